"""Process groups, collectives and transports: all communication of the package goes through here.

The names below are those that scripts use, as in `deepspeed.comm`.
"""

from parallel3d.comm.environment import (
    barrier,
    broadcast,
    destroy,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
    local_device,
)

__all__ = [
    "barrier",
    "broadcast",
    "destroy",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
    "local_device",
]
