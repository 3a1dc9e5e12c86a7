"""Device memory that communication and libraries take outside of the allocator's count, as far as it is known beforehand."""

from __future__ import annotations

from collections.abc import Iterable

# A context with the kernels of PyTorch's libraries, all of which are loaded (CUDA_MODULE_LOADING=EAGER, environment.py): an
# estimate; it depends on the driver and on PyTorch's build.
CONTEXT_BYTES = 700 * 2**20
# NCCL's buffers of one connection and channel, one for each protocol: of Simple NCCL_BUFFSIZE (NCCL's documentation), of LL 8
# lines of 16 bytes for each of 512 threads, of LL128 120 words of 8 bytes for each of 640, both 8 steps deep (its device.h).
_CONNECTION_BYTES = 4 * 2**20 + 8 * 16 * 512 * 8 + 120 * 8 * 640 * 8
# An estimate of how many it opens over NVLink; fewer elsewhere.
_CHANNELS = 16
_CONNECTIONS = 2  # of a ring: with both neighbours


def communicator_bytes(sizes: Iterable[int]) -> int:
    """Of NCCL's buffers for communicators of so many ranks each; of one rank alone there is none."""
    return sum(_CHANNELS * min(_CONNECTIONS, size - 1) * _CONNECTION_BYTES for size in sizes)
