"""Ranks meet through the store: each gets its answer, or all the same error; who doesn't come is named."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from parallel3d.checkpoint.save import Meeting
from parallel3d.comm import lifelines
from parallel3d.comm.collectives import Group
from parallel3d.comm.rendezvous import Rendezvous
from parallel3d.errors import CheckpointError, CommunicationError, PeerError
from parallel3d.failures.watchdog import follows


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


def left_waiting(rank: int, size: int, port: int, dying: int, before: str, told: Any) -> None:
    """A process of its own. One rank is killed when the others wait for it; they tell what they hear of that, and when."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    meeting = Meeting(control(), 60)

    def come() -> None:
        meeting.attempt("before", dict, lambda values: values)

    if before == "it met the others":
        come()
    dist.barrier()
    if before == "it came to a meeting":  # which another one comes to when it is dead
        if rank == dying:
            threading.Thread(target=come, daemon=True).start()
        else:
            time.sleep(2 * (rank == 1))
            come()
    if rank == dying:
        child = os.fork()  # as a data loader's worker, which outlives it for a while
        if child == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(1)
        store.set("died", repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        meeting.attempt("save", dict, lambda values: values)
    except CheckpointError as error:
        seconds = time.time() - float(store.get("died"))
        cause = error.__cause__
        told.put((rank, str(error), seconds, follows(error), cause.rank if isinstance(cause, PeerError) else None))
    told.close()
    told.join_thread()
    store.add("over", 1)
    while int(store.get("over")) < size - 1:  # the end of one that has heard is not what the others hear
        time.sleep(0.05)
    os._exit(0)


@pytest.mark.parametrize(
    ("dying", "before"), [(1, "nothing"), (0, "nothing"), (2, "it met the others"), (2, "it came to a meeting")]
)
def test_the_death_of_a_rank_is_told_at_once_to_those_that_wait(dying: int, before: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # an agent's: it outlives every rank
    context = multiprocessing.get_context("forkserver")
    told = context.Queue()
    arguments = [(rank, 3, store.port, dying, before, told) for rank in range(3)]
    processes = [context.Process(target=left_waiting, args=a, daemon=True) for a in arguments]
    try:
        for process in processes:
            process.start()
        heard = sorted(told.get(timeout=40) for _ in range(2))
    except queue.Empty:
        pytest.fail("those that wait for a dead rank stand still")
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [rank for rank, *_ in heard] == [rank for rank in range(3) if rank != dying]
    for _, message, seconds, is_consequence, blamed in heard:
        assert f"save: rank {dying} ended" in message
        assert seconds < 5
        assert is_consequence
        assert blamed == dying


def left_early(folder: str) -> tuple[str, int | None, float] | None:
    rank, rendezvous = dist.get_rank(), Rendezvous(control(), "test")
    rendezvous.meet("first", rank, lambda values: values, 20)
    left, heard = Path(folder) / "left", None
    if rank == 2:
        del rendezvous
        gc.collect()
        left.touch()
    else:
        while not left.exists():
            time.sleep(0.01)
        begun = time.monotonic()
        try:
            rendezvous.meet("second", rank, lambda values: values, 60)
        except PeerError as error:
            heard = (str(error), error.rank, time.monotonic() - begun)
    dist.barrier()
    return heard


def test_a_rendezvous_that_is_gone_counts_as_a_rank_that_left(run_ranks, tmp_path: Path) -> None:
    for message, blamed, seconds in run_ranks(3, left_early, str(tmp_path))[:2]:
        assert "second: rank 2 ended" in message
        assert blamed == 2
        assert seconds < 10


def sockets() -> set[str]:
    """This process's, by their inodes."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {name for name in (os.readlink(link) for link in links if os.path.islink(link)) if name.startswith("socket")}


def opened_and_closed() -> tuple[int, int, int]:
    group = control()
    dist.barrier(group.handle)
    before = sockets()
    series = [Rendezvous(group, f"series {k}") for k in range(4)]
    opened = sockets() - before
    for rendezvous in series:
        assert rendezvous.meet("all", 1, lambda values: [sum(values)] * 3, 20) == 3
    child = os.fork()
    if child == 0:
        os._exit(len(sockets() & opened))
    inherited = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.barrier()
    del series, rendezvous
    gc.collect()
    return len(opened), inherited, len(sockets() & opened)


def test_connections_are_closed_with_their_rendezvous_and_in_children(run_ranks) -> None:
    for rank, (opened, inherited, left) in enumerate(run_ranks(3, opened_and_closed)):
        assert opened == 4 * (2 if rank == 0 else 1)
        assert inherited == 0
        assert left == 0


def refuse(*_: Any, **__: Any) -> socket.socket:
    raise ConnectionRefusedError


def connect_to_another(*_: Any, **__: Any) -> socket.socket:
    """Somebody else answers, who knows nothing of ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.socket()
        ours.connect(server.getsockname())
        theirs, _ = server.accept()
        theirs.send(b"220 ready")
        theirs.close()
    return ours


def unconnected(connect: Callable[..., socket.socket]) -> tuple[int, str, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", connect)
        patch.setattr(lifelines, "_CONNECT_S", 1.0)
        rendezvous = Rendezvous(control(), "test")
    total = rendezvous.meet("all", 1, lambda values: [sum(values)] * 3, 20)
    dist.barrier()
    begun, message = time.monotonic(), ""
    if dist.get_rank() != 1:
        try:
            rendezvous.meet("two", 1, lambda values: values, 2)
        except CommunicationError as error:
            message = str(error)
    waited = time.monotonic() - begun
    dist.barrier()
    return total, message, waited


@pytest.mark.parametrize("connect", [refuse, connect_to_another])
def test_where_no_connection_can_be_made_ranks_meet_all_the_same(
    run_ranks, connect: Callable[..., socket.socket]
) -> None:
    for rank, (total, message, waited) in enumerate(run_ranks(3, unconnected, connect)):
        assert total == 3
        if rank != 1:
            assert "two: ranks [1] have not come within 2 s" in message
            assert waited < 10
