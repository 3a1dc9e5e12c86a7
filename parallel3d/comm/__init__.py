"""Process groups, collectives and transports: all communication of the package goes through here.

The names below are for scripts, as in `deepspeed.comm`: functions about the world, and torch's own functions on torch's process
groups.
"""

from torch.distributed import (
    ReduceOp,
    all_gather,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    broadcast_object_list,
    destroy_process_group,
    gather,
    get_global_rank,
    irecv,
    isend,
    new_group,
    recv,
    reduce,
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
