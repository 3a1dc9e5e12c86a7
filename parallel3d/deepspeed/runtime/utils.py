"""`parallel3d.deepspeed.runtime.utils`, as DeepSpeed scripts name it."""

import resource
from collections.abc import Sequence

import torch

from parallel3d.deepspeed.utils.logging import logger
from parallel3d.partition.chain import segment_costs
from parallel3d.partition.split import partition_layers
from parallel3d.rng import set_random_seed

__all__ = ["partition_balanced", "partition_uniform", "see_memory_usage", "set_random_seed"]


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return bounds [0, ..., num_items] of `num_parts` parts, as `partition_balanced` for items of equal weight."""
    return partition_balanced([1.0] * num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return bounds [0, ..., n] of parts of the n >= 1 items, of which the heaviest is as light as possible.

    With fewer items than parts the last parts are empty.
    """
    names = [str(k) for k in range(len(weights))]
    split = partition_layers(segment_costs(weights, names, None), min(num_parts, len(weights)))
    return [*split.bounds, *[len(weights)] * (num_parts - len(weights))]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and this process's memory, with its peak, in GiB. Without `force` do nothing, as in DeepSpeed."""
    if force:
        sizes = {"peak on the host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
        if torch.cuda.is_available():
            sizes |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
            sizes["peak allocated"] = torch.cuda.max_memory_allocated()
        logger.info("%s | %s", message, ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.items()))
