"""Weights in memory that replicas map: where the buffers are."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.kernels.shared_weights import SharedWeights, shared_bytes


def shared_by(world: int, lengths: list[int]) -> list[SharedWeights]:
    """Each rank's, in memory of one process."""
    memories = [torch.full((shared_bytes(lengths),), 99, dtype=torch.uint8) for _ in range(world)]
    staging = [memory.data_ptr() for memory in memories]
    found = []
    for rank in range(world):
        group = SimpleNamespace(size=world, index=rank)
        workspace: Any = SimpleNamespace(group=group, staging=staging, memory=memories[rank])
        found.append(SharedWeights(workspace, lengths))
    return found


@given(st.integers(2, 8), st.lists(st.integers(1, 2000), min_size=1, max_size=6))
def test_buffers_do_not_overlap(world: int, lengths: list[int]) -> None:
    for shared in shared_by(world, lengths):
        begin = shared.workspace.staging[0]
        places = [(shared.address(k, 0) - begin, length) for k, length in enumerate(lengths)]
        taken = sorted(places)
        assert all(start + length <= following for (start, length), (following, _) in pairwise(taken))
        assert sum(taken[-1]) <= shared.workspace.memory.numel()
        assert [shared.memory(k).numel() for k in range(len(lengths))] == lengths
        assert all(
            shared.memory(k).data_ptr() == shared.address(k, shared.workspace.group.index) for k in range(len(lengths))
        )
        assert all(shared.address(k, 0) % 512 == begin % 512 for k in range(len(lengths)))
