"""Process groups, collectives and transports: all communication of the package goes through here.

The names below are for scripts, as in `deepspeed.comm`: functions about the world, and torch's own functions on torch's process
groups.
"""

import logging
from typing import Any

import torch.distributed
from torch import Tensor
from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_global_rank,
    irecv,
    is_available,
    isend,
    monitored_barrier,
    new_group,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
    send,
)

from parallel3d.comm.environment import (
    destroy,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
    local_device,
)

inference_all_reduce = all_reduce  # DeepSpeed has an implementation of its own, on the CPU


def get_world_group() -> Any:
    """Return torch's group of all processes."""
    return torch.distributed.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the ranks in the world of a group's processes, in its order; without a group, of all."""
    return torch.distributed.get_process_group_ranks(group)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """Call torch's function of this name, with a tensor of one element for a scalar, which gloo refuses and NCCL takes."""
    given = input_tensor.reshape(1) if input_tensor.dim() == 0 else input_tensor
    return torch.distributed.all_gather_into_tensor(output_tensor, given, group, async_op)


def log_summary(show_straggler: bool = False) -> None:
    """Tell on the first rank where the times of communication are to be had: no collective is logged here."""
    if get_rank() == 0:
        logging.getLogger("parallel3d").warning(
            "collectives are not logged; engine.reports.time_breakdown() has the times of a recorded step's communication"
        )
