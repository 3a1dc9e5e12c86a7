"""Gathers by copies, with threads for streams: every rank gets all shards as they are at the time, and may write them then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from streams import CurrentStream, ThreadStream
from torch import Tensor

from parallel3d.comm.collectives import Group, all_gather_into
from parallel3d.comm.peer import gathers
from parallel3d.comm.peer.gathers import GatherCopies, mapped_bytes, open_gather_copies
from parallel3d.comm.peer.symmetric import Unavailable

ROUNDS = 50


@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, (1, 64, 1000)), (3, (1000,))])
def test_every_rank_gathers_the_shards_of_all_between_writes(num_ranks: int, sizes: tuple[int, ...]) -> None:
    streams = [ThreadStream(k) for k in range(2 * num_ranks)]
    computing, copying = streams[:num_ranks], streams[num_ranks:]
    held = sum(mapped_bytes(4 * size) for size in sizes)
    memory = [torch.zeros(4096 + held, dtype=torch.uint8) for _ in range(num_ranks)]
    addresses = [each.data_ptr() for each in memory]
    ranks = [
        GatherCopies(memory[k], k, addresses, cast(Any, CurrentStream(computing[k])), cast(Any, copying[k]))
        for k in range(num_ranks)
    ]
    shards = [[rank.keep(torch.full((size,), float(k))) for size in sizes] for k, rank in enumerate(ranks)]
    assert not ranks[0].holds(torch.zeros(4))
    wrong: list[str] = []

    def write(shard: Tensor, value: float) -> None:
        shard.fill_(value)

    def check(whole: Tensor, number: int, size: int) -> None:
        wanted = torch.cat([torch.full((size,), float(100 * number + k)) for k in range(num_ranks)])
        if not torch.equal(whole, wanted):
            wrong.append(f"round {number}, shards of {size}")

    for number in range(ROUNDS):
        for k, rank in enumerate(ranks):
            for shard, size in zip(shards[k], sizes, strict=True):
                assert rank.holds(shard)
                computing[k].run(lambda shard=shard, value=100 * number + k: write(shard, value))
                whole = torch.full((num_ranks * size,), -1.0)
                work = rank.gather(whole, shard)
                computing[k].follow(cast(Any, work.event))
                computing[k].run(lambda whole=whole, number=number, size=size: check(whole, number, size))
    assert all(stream.close() for stream in streams), "a stream stands still"
    assert not wrong


def test_a_group_gathers_by_them_what_they_hold() -> None:
    kept, group = torch.arange(3.0), Group((0, 1), cast(Any, object()))
    asked: list[Tensor] = []
    work = SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def gather(whole: Tensor, shard: Tensor) -> Any:
        asked.append(shard)
        return work

    group.use_gather_copies(cast(Any, SimpleNamespace(holds=lambda shard: shard is kept, gather=gather)))
    all_gather_into(torch.empty(6), kept, group).wait()
    assert asked[0] is kept
    with pytest.raises(Exception, match="object"):  # by the backend, whose group this is not
        all_gather_into(torch.empty(6), torch.arange(3.0), group)


@pytest.mark.parametrize("size", [1, 2])
def test_no_copies_where_there_is_one_replica_or_an_obstacle(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    reason = Unavailable("no room", "make some") if size == 2 else None
    monkeypatch.setattr(gathers, "check_axis", lambda *arguments: reason)
    groups = SimpleNamespace(data=SimpleNamespace(size=size))
    assert open_gather_copies(cast(Any, groups), torch.device("cpu"), 8) is None
