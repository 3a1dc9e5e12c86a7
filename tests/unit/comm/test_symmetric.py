"""Memory that ranks map, and channels in it, as far as a machine without CUDA shows them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from parallel3d.comm import groups as comm_groups
from parallel3d.comm.collectives import Group
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.peer import copies, symmetric
from parallel3d.comm.peer.copies import pipeline_channels
from parallel3d.comm.peer.symmetric import Mapped, Unavailable, map_memory
from parallel3d.comm.topology import ProcessTopology

CPU = torch.device("cpu")
CHANNELS = pipeline_channels(2)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> ProcessGroups:
    """A world of one, whose pipeline maps memory full of sevens."""
    fake = SimpleNamespace(
        empty=lambda size, dtype, device: torch.full((size,), 7, dtype=dtype),
        rendezvous=lambda memory, handle: object(),
    )
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", fake)
    monkeypatch.setattr(torch.distributed, "_symmetric_memory", fake, raising=False)
    monkeypatch.setattr(symmetric, "everywhere", lambda good, control: good)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(Group, "index", 0)
    monkeypatch.setattr(comm_groups, "init_distributed", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    groups = ProcessGroups(ProcessTopology(["pipe"], [1]))
    groups.pipe = Group((0, 1), cast(Any, object()))
    return groups


def test_mapped_memory_counts_for_as_long_as_it_lives(groups: ProcessGroups) -> None:
    ring, weights = (map_memory(groups, "pipe", CPU, size, cleared=10) for size in (100, 1000))
    assert ring is not None
    assert weights is not None
    assert groups.mapped_bytes() == 1100
    part = weights.memory[:10]
    del ring
    assert groups.mapped_bytes() == 1000
    del weights
    assert groups.mapped_bytes() == 1000, "a part of it keeps it alive"
    del part
    assert groups.mapped_bytes() == 0


def test_channels_begin_with_nothing_counted(groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "check_axis", lambda *args: None)
    shared = CHANNELS.open(groups, "pipe", CPU, "stages")
    assert isinstance(shared, Mapped)
    ring = CHANNELS.ring(0, 1, lambda _: shared.memory)
    assert not ring.filled.any()
    assert not ring.emptied.any()
    assert shared.memory[-1] == 7


def test_memory_that_can_not_be_mapped_is_unavailable(groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no such memory")

    monkeypatch.setattr(copies, "check_axis", lambda *args: None)
    monkeypatch.setattr(sys.modules["torch.distributed._symmetric_memory"], "rendezvous", fail)
    assert CHANNELS.open(groups, "pipe", CPU, "stages") is None
    assert groups.mapped_bytes() == 0


def test_nccls_switch_keeps_ranks_along_an_axis_from_each_others_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "all_gather_object", lambda own, control: [("host", k, None) for k in range(2)])
    monkeypatch.setattr(symmetric, "first_unavailable", lambda own, control: own)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    topology, pair = ProcessTopology(["pipe"], [2]), SimpleNamespace(ranks=(0, 1))
    world = cast(Any, SimpleNamespace(backend="nccl", control=None, topology=topology, pipe=pair))

    def reason() -> Unavailable | None:
        device = torch.device("cuda", 0)
        return symmetric.check_axis(world, "pipe", device, "stages", lambda device: None, symmetric.check_hosts)

    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert reason() is None
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "NCCL_P2P_DISABLE is 1" in str(reason())


def test_a_reason_is_found_before_anything_is_mapped(groups: ProcessGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    reason, mapped = Unavailable("two hosts", "use one"), []
    monkeypatch.setattr(copies, "check_axis", lambda *args: reason)
    monkeypatch.setattr(copies, "map_memory", lambda *args, **kwargs: cast(Any, mapped.append(args)))
    assert CHANNELS.open(groups, "pipe", CPU, "stages") is None
    assert not mapped
