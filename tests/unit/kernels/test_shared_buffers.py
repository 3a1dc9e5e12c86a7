"""Buffers in memory that replicas map: where they are."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.kernels.workspace import PAD_BYTES, SymmetricWorkspace, buffer_bytes


def workspaces(world: int, lengths: list[int]) -> list[SymmetricWorkspace]:
    """Each rank's, in memory of one process."""
    memories = [torch.full((PAD_BYTES + buffer_bytes(lengths),), 99, dtype=torch.uint8) for _ in range(world)]
    staging = [memory.data_ptr() + PAD_BYTES for memory in memories]
    found = []
    for memory in memories:
        workspace = object.__new__(SymmetricWorkspace)
        vars(workspace).update({"staging": staging, "_shared": SimpleNamespace(memory=memory)})
        found.append(workspace)
    return found


@given(st.integers(2, 8), st.lists(st.integers(1, 2000), max_size=6))
def test_buffers_do_not_overlap(world: int, lengths: list[int]) -> None:
    for rank, workspace in enumerate(workspaces(world, lengths)):
        begin = workspace.staging[0]
        buffers = workspace.buffers(lengths)
        assert [memory.numel() for memory, _ in buffers] == lengths
        assert all(memory.data_ptr() == places[rank] for memory, places in buffers)
        assert all(len(places) == world for _, places in buffers)
        taken = sorted((places[0] - begin, length) for (_, places), length in zip(buffers, lengths, strict=True))
        assert all(start + length <= following for (start, length), (following, _) in pairwise(taken))
        assert all(sum(last) <= buffer_bytes(lengths) for last in taken[-1:])
        assert all(start % 512 == 0 for start, _ in taken)
