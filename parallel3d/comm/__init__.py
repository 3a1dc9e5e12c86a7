"""Process groups, collectives and transports: all communication of the package goes through here.

The names below are for scripts, as in `deepspeed.comm`: functions about the world, and torch's own functions on torch's process
groups.
"""

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
    destroy_process_group,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
    local_device,
)
from parallel3d.comm.log import LOG
from parallel3d.logs import logger

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
    """Print on the first rank the table of its collectives that `comms_logger` has logged.

    Bytes are those of the tensor of all ranks. Messages between stages and the package's own kernels are not included.
    show_straggler: also the time for which the first rank waited for later ones: its latency of each call, less the least
    of all ranks. Collective if given: every rank calls it.
    """
    everyone: list[Any] = [None] * get_world_size() if show_straggler else []
    if show_straggler:
        all_gather_object(everyone, LOG.seconds)
    if get_rank() == 0:
        logger.info("%s", LOG.summary(everyone) if LOG.settings else "no collectives: set comms_logger.enabled to true")
