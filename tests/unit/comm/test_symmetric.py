"""Memory that ranks map, as far as a machine without CUDA shows it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel3d.comm.collectives import Group
from parallel3d.comm.peer import symmetric


def test_mapped_memory_counts_for_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        empty=lambda size, dtype, device: torch.empty(size, dtype=dtype), rendezvous=lambda memory, handle: object()
    )
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", fake)
    monkeypatch.setattr(torch.distributed, "_symmetric_memory", fake, raising=False)
    monkeypatch.setattr(symmetric, "everywhere", lambda good, control: good)
    monkeypatch.setattr(Group, "index", 0)
    before = symmetric.mapped_bytes()
    handle: Any = object()
    group = Group((0, 1), handle)
    ring, weights = (symmetric.map_memory(group, group, torch.device("cpu"), size) for size in (100, 1000))
    assert ring is not None
    assert weights is not None
    assert symmetric.mapped_bytes() == before + 1100
    part = weights.memory[:10]
    del ring
    assert symmetric.mapped_bytes() == before + 1000
    del weights
    assert symmetric.mapped_bytes() == before + 1000, "a part of it keeps it alive"
    del part
    assert symmetric.mapped_bytes() == before
