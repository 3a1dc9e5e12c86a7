"""What opening channels does with what is in the way, and with the memory that it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from parallel3d.comm.collectives import Group
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.obstacles import UNMAPPED, Obstacle
from parallel3d.comm.peer import channels
from parallel3d.comm.peer.channels import open_channels
from parallel3d.comm.peer.peer_copies import pipeline_channels
from parallel3d.comm.peer.symmetric import Mapped

CPU, ALONE = torch.device("cpu"), Group((0,), None)
GROUPS = cast(ProcessGroups, SimpleNamespace(pipe=ALONE, control=ALONE))
WANTED = pipeline_channels(2)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """What is mapped, where nothing is in the way."""
    found = torch.full((WANTED.num_bytes,), 7, dtype=torch.uint8)
    monkeypatch.setattr(channels, "axis_obstacle", lambda *args: None)
    monkeypatch.setattr(channels, "map_memory", lambda group, control, device, size: Mapped(found[:size], None, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def test_nothing_is_counted_yet(memory: torch.Tensor) -> None:
    shared = open_channels(GROUPS, "pipe", WANTED, CPU, "stages")
    assert isinstance(shared, Mapped)
    ring = WANTED.ring(0, 1, lambda _: shared.memory)
    assert not ring.filled.any()
    assert not ring.emptied.any()
    assert memory[-1] == 7


@pytest.mark.usefixtures("memory")
def test_memory_that_is_not_to_be_had_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "map_memory", lambda *args: None)
    assert open_channels(GROUPS, "pipe", WANTED, CPU, "stages") is UNMAPPED


@pytest.mark.usefixtures("memory")
def test_what_is_in_the_way_is_told_before_anything_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    reason, mapped = Obstacle("two hosts", "use one"), []
    monkeypatch.setattr(channels, "axis_obstacle", lambda *args: reason)
    monkeypatch.setattr(channels, "map_memory", lambda *args: cast(Any, mapped.append(args)))
    assert open_channels(GROUPS, "pipe", WANTED, CPU, "stages") is reason
    assert not mapped
