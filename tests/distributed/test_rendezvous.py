"""Ranks meet through the store: each gets its answer, or all the same error; who doesn't come is named."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch.distributed as dist

from parallel3d.comm.collectives import Group
from parallel3d.comm.rendezvous import Rendezvous
from parallel3d.errors import CheckpointError, CommunicationError


def control() -> Group:
    return Group(tuple(range(dist.get_world_size())), dist.new_group(backend="gloo"))


def meetings() -> tuple[Any, ...]:
    rank, rendezvous = dist.get_rank(), Rendezvous(control(), "test")
    items = rendezvous.meet("add", rank, lambda values: [[sum(values), k] for k in range(len(values))], 20)
    text = random.Random(rank).randbytes(5 << 20).hex()  # more than a store's value holds, however it is packed
    large = rendezvous.meet("large", text, lambda values: [values[1], values[2], values[0]], 60)

    def refuse(values: list[int]) -> list[int]:
        raise CheckpointError(f"not {values}")

    def fail(values: list[int]) -> list[int]:
        return [1 // values[0]]

    told = []
    for decide in (refuse, fail):
        try:
            rendezvous.meet("refuse", rank, decide, 20)
        except (CheckpointError, CommunicationError) as error:
            told.append((type(error), str(error)))
    try:
        rendezvous.meet("left" if rank == 1 else "right", rank, lambda values: values, 20)
    except CommunicationError as error:
        told.append((type(error), str(error)))
    # In a thread, while this one uses the world.
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(rendezvous.meet("later", 1, lambda v: [sum(v)] * 3, 20)))
    thread.start()
    dist.barrier()
    thread.join()
    return items, large == random.Random((rank + 1) % 3).randbytes(5 << 20).hex(), told, found


def test_each_rank_gets_its_answer_and_all_get_the_same_error(run_ranks) -> None:
    for rank, (items, large, told, found) in enumerate(run_ranks(3, meetings)):
        assert items == [3, rank]
        assert large
        assert told[0] == (CheckpointError, "not [0, 1, 2]")
        assert told[1][0] is CommunicationError
        assert "ZeroDivisionError" in told[1][1]
        assert "left" in told[2][1]
        assert "right" in told[2][1]
        assert found == [3]


def lonely(absent: int) -> tuple[str, int]:
    rank, rendezvous = dist.get_rank(), Rendezvous(control(), "test")
    message = ""
    dist.barrier()  # whose imports or group took longer isn't late
    if rank != absent:
        try:
            rendezvous.meet("all", 0, lambda values: values, 6.0 - rank)  # the last to come gives up first
        except CommunicationError as error:
            message = str(error)
    dist.barrier()
    return message, rendezvous.meet("all", rank, lambda values: [sum(values)] * 3, 20)


def test_who_does_not_come_is_named_and_the_next_meeting_is_held(run_ranks) -> None:
    for absent in (0, 2):
        for rank, (message, total) in enumerate(run_ranks(3, lonely, absent)):
            assert total == 3
            if rank != absent:
                assert f"all: ranks [{absent}] have not come within {6 - rank} s" in message
