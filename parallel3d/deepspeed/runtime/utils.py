"""`parallel3d.deepspeed.runtime.utils`, as DeepSpeed scripts name it."""

import resource

import torch

from parallel3d.deepspeed.utils.logging import logger
from parallel3d.rng import set_random_seed

__all__ = ["see_memory_usage", "set_random_seed"]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and this process's memory, with its peak, in GiB. Without `force` do nothing, as in DeepSpeed."""
    if force:
        sizes = {"peak on the host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if torch.cuda.is_available():
            sizes |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
            sizes["peak allocated"] = torch.cuda.max_memory_allocated()
        logger.info("%s | %s", message, ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.items()))
