"""All-gathers among ranks of one host as copies out of each other's memory, which occupy no multiprocessor.

Each rank keeps its shards in memory that all map. It copies the shards of the others by a stream of its own, during its compute
kernels. Before and after the copies the ranks meet on the device: from the first meeting on the shards have their values, and
after the second one they may be written. NCCL's kernels would take multiprocessors from the layers that run meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.streams import Copied, CudaStream, CudaStreams, check_copies
from parallel3d.comm.peer.symmetric import check_axis, check_hosts, map_memory

_ALIGNED_BYTES = 256
# Bytes of counts: an int32 for each peer, of its meetings so far.
_HEADER_BYTES = 4096


def mapped_bytes(nbytes: int) -> int:
    """Return the bytes that a shard takes of the memory."""
    return -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


class GatherCopies:
    """A rank's shards in mapped memory, and their gathers. All ranks keep and gather the same shards in the same order.

    - memory: this rank's bytes; index: its index among the ranks; addresses: of each rank's memory, as this process maps it.
    - stream: a stream that copies, and does nothing else.
    """

    def __init__(self, memory: Tensor, index: int, addresses: Sequence[int], streams: CudaStreams, stream: CudaStream):
        self._memory, self._index, self._addresses = memory, index, addresses
        self._streams, self._stream = streams, stream
        self._peers = [k for k in range(len(self._addresses)) if k != self._index]
        self._used, self._meetings = _HEADER_BYTES, 0

    def keep(self, shard: Tensor) -> Tensor:
        """Return a shard, [n], in the memory that all map, with its values."""
        start, self._used = self._used, self._used + mapped_bytes(shard.nbytes)
        return self._memory[start : start + shard.nbytes].view(shard.dtype).copy_(shard)

    def holds(self, shard: Tensor) -> bool:
        """Return whether a tensor is in that memory."""
        return 0 <= shard.data_ptr() - self._addresses[self._index] < self._memory.numel()

    def gather(self, whole: Tensor, shard: Tensor) -> Copied:
        """Start to gather every rank's shard, [n], into `whole`, [n * ranks], once the current stream's work is done."""
        self._stream.follow(self._streams.current().mark())
        self._meet()
        offset, target, nbytes = shard.data_ptr() - self._addresses[self._index], whole.data_ptr(), shard.nbytes
        for distance in range(len(self._addresses)):  # at any time each rank reads from another one
            rank = (self._index + distance) % len(self._addresses)
            self._stream.copy(target + rank * nbytes, self._addresses[rank] + offset, nbytes)
        self._meet()
        return Copied(self._stream.mark(), whole)

    def _meet(self) -> None:
        """Let the stream go on when all ranks' streams have come here."""
        self._meetings += 1
        for peer in self._peers:
            self._stream.write(self._addresses[peer] + 4 * self._index, self._meetings)
        for peer in self._peers:
            self._stream.wait_for(self._addresses[self._index] + 4 * peer, self._meetings)


def open_gather_copies(groups: ProcessGroups, device: torch.device, nbytes: int) -> GatherCopies | None:
    """Map memory for shards of `nbytes` in all; None on every rank unless all replicas of every group can have it.

    nbytes: the sum of their mapped_bytes. Collective over the world.
    """
    if groups.data.size == 1 or check_axis(groups, "data", device, "replicas", check_copies, check_hosts):
        return None
    shared = map_memory(groups, "data", device, _HEADER_BYTES + nbytes, cleared=_HEADER_BYTES)
    if shared is None:
        return None
    stream = CudaStream(torch.cuda.Stream(device))
    return GatherCopies(shared.memory, shared.index, shared.buffers(), CudaStreams(device), stream)
