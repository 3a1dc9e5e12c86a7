"""Device memory that communication and libraries take outside of the allocator's count, as far as it is known beforehand."""

from __future__ import annotations

from collections.abc import Iterable

# A context with PyTorch's kernels loaded eagerly (CUDA_MODULE_LOADING=EAGER, see environment.py): what nvidia-smi shows of a
# process on an H100 or H200 that has allocated nothing. Kernels load lazily elsewhere, in less.
CONTEXT_BYTES = 700 * 2**20
# Buffers of a connection, one a channel: NCCL_BUFFSIZE, by default 4 MiB of protocol Simple (NCCL's documentation), and those
# of LL and LL128, 0.3 and 1.2 MiB.
_CONNECTION_BYTES = round(5.5 * 2**20)
_CHANNELS = 16  # over NVLink on an H100; fewer elsewhere
_CONNECTIONS = 2  # of a ring: with both neighbours


def communicator_bytes(sizes: Iterable[int]) -> int:
    """Of NCCL's buffers for communicators of so many ranks each; of one rank alone there is none."""
    return sum(_CHANNELS * min(_CONNECTIONS, size - 1) * _CONNECTION_BYTES for size in sizes)
