"""All-reduce over NVLink (csrc/all_reduce.cu)."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from parallel3d.comm.collectives import Work
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer.copies import open_shard_copies
from parallel3d.config import Config
from parallel3d.kernels.workspace import DTYPES, VECTOR_BYTES, Call, PeerKernel

# Half of the staging buffer: what one call takes, 4096 tokens x 4096 features in bf16.
HALF_BYTES = 32 * 2**20
# The most that the kernel takes: NCCL is faster from about 128 MiB on.
MOST_BYTES = 2 * HALF_BYTES
# Nearly all multiprocessors of an H200: with half of them 32 MiB take 1.1 times as long.
MAX_BLOCKS = 128
# Up to this size every rank reads the whole message of all peers, instead of summing its part for all.
_ONE_SHOT_BYTES = {2: 512 * 2**10, 4: 512 * 2**10, 8: 256 * 2**10}
_TRIAL_SIZES = (3, 2**18 + 3)  # summed in one shot and, by 4 ranks or more, in two


class AllReduce(PeerKernel):
    """AllReduceKernel that sums tensors over one group in rank order in fp32: bitwise the same on all ranks and every time."""

    key, axis, noun = "all_reduce", "model", "tensor-parallel ranks"
    half_bytes = HALF_BYTES
    instead = "sums over tensor-parallel ranks"

    @staticmethod
    def calls(size: int, element_bytes: int, world_size: int, threads: int) -> list[Call]:
        """Return the calls that sum a message of `size` elements, see PeerKernel."""
        most, result = HALF_BYTES // element_bytes, []
        for start in range(0, size, most):
            length = min(most, size - start)
            two_shot = length * element_bytes > _ONE_SHOT_BYTES[world_size]
            vectors = -(-length * element_bytes // VECTOR_BYTES)
            vectors = -(-vectors // world_size) if two_shot else vectors
            result.append(Call(start, length, min(MAX_BLOCKS, -(-vectors // threads)), two_shot))
        return result

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernel sums tensors like `x`; the same on every rank."""
        return x.is_cuda and x.dtype in DTYPES and x.nbytes <= MOST_BYTES

    def start(self, x: Tensor) -> Work:
        """Start to sum `x`, contiguous, in place, on another stream than the current one."""
        return self.workspace.run_on_side_stream(partial(self.sum_into, x, x), x)

    def sum_into(self, out: Tensor, x: Tensor) -> None:
        """Write the sum of every rank's x to `out` on the current stream; both are contiguous and may be the same.

        Raises CommunicationError after a peer was late, KernelError.
        """
        group, stream = self.workspace.group, self.workspace.follow()
        width, source, target = x.element_size(), x.data_ptr(), out.data_ptr()
        kind = (DTYPES[x.dtype], group.size, group.index)
        for call in self._calls(x.numel(), width):
            offset = call.start * width
            self._launch(call, stream, call.two_shot, *kind, source + offset, target + offset, call.size)

    def raise_if_failed(self) -> None:
        """Raise CommunicationError if a peer was late in any call that has ended; waits for nothing."""
        self.workspace.raise_if_failed()

    def try_out(self) -> bool:
        """Return whether the sums are right in every dtype, in one shot and in two."""
        group, good = self.workspace.group, True
        for dtype, size in itertools.product(DTYPES, _TRIAL_SIZES):
            x = torch.full((size,), 1 + group.index, dtype=dtype, device=self.workspace.device)
            self.sum_into(x, x)
            good = good and bool((x == group.size * (group.size + 1) // 2).all())
        return good


def open_tensor_parallel(groups: ProcessGroups, device: torch.device, config: Config) -> None:
    """Let tensor-parallel ranks sum by the kernel and exchange shards by copies, as configured. Collective over the world."""
    group = groups.model
    group.use_all_reduce(AllReduce.open(groups, device) if config.kernels.all_reduce else None)
    group.use_shard_messages(open_shard_copies(groups, device) if config.tensor_parallel.copies_shards else None)
