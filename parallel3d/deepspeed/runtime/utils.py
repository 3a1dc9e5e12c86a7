"""`parallel3d.deepspeed.runtime.utils`, as DeepSpeed scripts name it."""

from parallel3d.rng import set_random_seed

__all__ = ["set_random_seed"]
