"""DeepSpeed's optimizers at its import paths, `parallel3d.ops.adam` and so on.

They return optimizers of torch, or this package's Lion, on any device: where the state lies and which device updates it is the
configuration's `offload_optimizer` to say. isinstance(engine.optimizer, FusedAdam) is true for each Adam and AdamW, and so on.
"""

from parallel3d.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]

# DeepSpeed's operators, by the NAME of their builders, and whether there is one here.
__compatible_ops__ = {"cpu_adam": True, "fused_adam": True, "fused_lamb": False, "utils": False, "async_io": True}
