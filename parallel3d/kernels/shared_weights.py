"""Weights in memory that the replicas of one host map into their address spaces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from parallel3d.kernels.workspace import SymmetricWorkspace

_ALIGNMENT = 512


def shared_bytes(lengths: Sequence[int]) -> int:
    """Return the bytes of device memory that buffers of these lengths, in bytes, take on each rank."""
    return sum(map(_aligned, lengths))


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class SharedWeights:
    """Buffers of given lengths in bytes, the same on every rank of a group.

    workspace: with shared_bytes(lengths) staging bytes.
    """

    def __init__(self, workspace: SymmetricWorkspace, lengths: Sequence[int]):
        self.workspace, self._lengths = workspace, tuple(lengths)
        self._starts = [0, *accumulate(map(_aligned, lengths))]

    def memory(self, buffer: int) -> Tensor:
        """Return this rank's bytes of a buffer."""
        start = self._starts[buffer]
        return self.workspace.memory[start : start + self._lengths[buffer]]

    def address(self, buffer: int, rank: int) -> int:
        """Return the address of a buffer on a rank, given by its index in the group, as this process maps it."""
        return int(self.workspace.staging[rank]) + self._starts[buffer]
