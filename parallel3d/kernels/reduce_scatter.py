"""Reduce-scatter of gradients over NVLink (csrc/reduce_scatter.cu)."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from parallel3d.comm.collectives import Work
from parallel3d.kernels.workspace import DTYPES, VECTOR_BYTES, Call, PeerKernel

# Half of the staging buffer, which one call takes: what all ranks send.
HALF_BYTES = 64 * 2**20
# Nearly all multiprocessors of an H200: with half of them 1 GiB takes 1.15 times as long.
MAX_BLOCKS = 128
# Blocks of a call that runs during a backward, which is then 2% shorter than with MAX_BLOCKS.
SIDE_BLOCKS = 32
_TRIAL_SIZES = (3, 2**16 + 3)


class ReduceScatter(PeerKernel):
    """ReduceScatterKernel that sums gradients over one group, in fp32 and in rank order, for any dtype of the messages."""

    key, axis, noun = "reduce_scatter", "data", "replicas"
    half_bytes = HALF_BYTES
    instead = "reduces gradients"

    @staticmethod
    def calls(
        size: int, element_bytes: int, world_size: int, threads: int, most_blocks: int = MAX_BLOCKS
    ) -> list[Call]:
        """Return the calls that reduce shards of `size` elements, see PeerKernel."""
        slot = HALF_BYTES // world_size // VECTOR_BYTES * VECTOR_BYTES
        most, per_vector = slot // element_bytes, VECTOR_BYTES // element_bytes
        result = []
        for start in range(0, size, most):
            length = min(most, size - start)
            result.append(Call(start, length, min(most_blocks, -(-length // (per_vector * threads)))))
        return result

    def takes(self, whole: Tensor, output: Tensor, wire: torch.dtype) -> bool:
        """Return whether the kernel reduces tensors like these; the same on every rank."""
        known = whole.dtype in (torch.float32, wire) and wire in DTYPES
        return whole.is_cuda and whole.dtype == output.dtype and known

    def squares_size(self, numel: int, wire: torch.dtype) -> int:
        """Return the length of `squares` for a shard of `numel` elements."""
        return len(self._calls(numel, wire.itemsize)) * MAX_BLOCKS

    def start(self, output: Tensor, whole: Tensor, wire: torch.dtype, accumulate: bool, squares: Tensor | None) -> Work:
        """Start `reduce_into` on another stream than the current one."""
        call = partial(self.reduce_into, output, whole, wire, accumulate, squares, SIDE_BLOCKS)
        return self.workspace.run_on_side_stream(call, whole, output)

    def reduce_into(
        self,
        output: Tensor,
        whole: Tensor,
        wire: torch.dtype,
        accumulate: bool,
        squares: Tensor | None,
        most_blocks: int = MAX_BLOCKS,
    ) -> None:
        """Compute output [n] (+)= the sum of every rank's part of whole [ranks * n], in rank order, on the current stream.

        - output, whole: contiguous, fp32 or as `wire`; output may be this rank's part of whole.
        - wire: the dtype in which parts travel, to which the own one is rounded too.
        - squares: float64 [squares_size(n)], whose sum becomes that of the results' squares.

        Raises CommunicationError after a peer was late, KernelError.
        """
        group, size, stream = self.workspace.group, output.numel(), self.workspace.follow()
        if squares is not None:
            squares.zero_()  # a call with fewer blocks leaves some elements unwritten
        source, target, width = whole.data_ptr(), output.data_ptr(), whole.itemsize
        kind = (DTYPES[wire], whole.dtype != wire, group.size, group.index)
        for k, call in enumerate(self._calls(size, wire.itemsize, most_blocks=most_blocks)):
            offset = call.start * width
            own_squares = None if squares is None else squares.data_ptr() + k * MAX_BLOCKS * 8
            memory = (source + offset, target + offset, own_squares)
            self._launch(call, stream, *kind, *memory, size, call.size, accumulate)

    def try_out(self) -> bool:
        """Return whether the results are right in every pair of dtypes."""
        group, device, good = self.workspace.group, self.workspace.device, True
        for wire, dtype, size in itertools.product(DTYPES, DTYPES, _TRIAL_SIZES):
            whole = torch.full((group.size * size,), 1 + group.index, dtype=dtype, device=device)
            output = torch.ones(size, dtype=dtype, device=device)
            if not self.takes(whole, output, wire):
                continue
            squares = torch.empty(self.squares_size(size, wire), dtype=torch.float64, device=device)
            self.reduce_into(output, whole, wire, True, squares)
            total = 1 + group.size * (group.size + 1) // 2
            good = good and bool((output == total).all()) and float(squares.sum()) == size * total**2
        return good
