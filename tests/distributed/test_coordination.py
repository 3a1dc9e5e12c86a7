"""Ranks decide through the store: each gets its item, or all the same error; ranks that do not come are named."""

from __future__ import annotations

import gc
import os
import queue
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from fork_server import warm_context
from ranks import RankPool

from parallel3d.comm.collectives import Group
from parallel3d.comm.coordination import CollectiveDecision
from parallel3d.comm.liveness import _listen
from parallel3d.errors import CheckpointError, CommunicationError, PeerError
from parallel3d.failures.watchdog import follows


def control() -> Group:
    return Group(tuple(range(dist.get_world_size())), dist.new_group(backend="gloo"))


Cases = list[dict[str, Any]]


def sockets() -> set[str]:
    """This process's, by their inodes."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {name for name in (os.readlink(link) for link in links if os.path.islink(link)) if name.startswith("socket")}


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


def opened(timeout_s: float = 20) -> CollectiveDecision:
    return CollectiveDecision(control(), "test", timeout_s)


def decisions() -> tuple[Any, ...]:
    rank, decision = dist.get_rank(), opened(60)
    items = decision.make("add", rank, lambda values: [[sum(values), k] for k in range(len(values))])
    text = random.Random(rank).randbytes(5 << 20).hex()  # more than a store's value holds, however it is packed
    large = decision.make("large", text, lambda values: [values[1], values[2], values[0]])

    def refuse(values: list[int]) -> list[int]:
        raise CheckpointError(f"not {values}")

    def fail(values: list[int]) -> list[int]:
        return [1 // values[0]]

    errors = []
    for decide in (refuse, fail):
        try:
            decision.make("refuse", rank, decide)
        except (CheckpointError, CommunicationError) as error:
            errors.append((type(error), str(error)))
    try:
        decision.make("left" if rank == 1 else "right", rank, lambda values: values)
    except CommunicationError as error:
        errors.append((type(error), str(error)))
    # In a thread, while this one uses the world.
    totals: list[int] = []
    thread = threading.Thread(target=lambda: totals.append(decision.make("later", 1, lambda v: [sum(v)] * 3)))
    thread.start()
    dist.barrier()
    thread.join()
    return items, large == random.Random((rank + 1) % 3).randbytes(5 << 20).hex(), errors, totals


def total_of(decision: CollectiveDecision) -> int:
    return decision.make("all", 1, lambda values: [sum(values)] * 3)


def wait_for_all(decision: CollectiveDecision, name: str, takes_part: bool) -> str:
    """Return what a rank hears of one that does not come."""
    if takes_part:
        try:
            decision.make(name, 0, lambda values: values)
        except CommunicationError as error:
            return str(error)
    return ""


def unconnected(connect: Callable[..., socket.socket]) -> CollectiveDecision:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", connect)
        return CollectiveDecision(control(), "test", 2, connect_s=0.5)


def answered_late(decision: CollectiveDecision, folder: str) -> list[Any]:
    """Return what a rank hears of two decisions, the first of which takes rank 0 longer than the others wait."""
    rank, gave_up = decision.rank, [Path(folder) / f"gave up {other}" for other in (1, 2)]

    def decide(values: list[Any]) -> list[Any]:
        while "first" in values and not all(path.exists() for path in gave_up):
            time.sleep(0.01)
        time.sleep(0.2)  # rank 1 waits for the second answer when the first one comes
        return [f"{rank} of {value}" for rank, value in enumerate(values)]

    heard = []
    for value in ("first", "second"):
        try:
            heard.append(decision.make("the same", value, decide))
        except CommunicationError as error:
            heard.append(str(error))
            gave_up[rank - 1].touch()
            while rank == 2 and not decision._store.check(["0/answer/2"]):
                time.sleep(0.01)
    return heard


def waits_in_vain(folder: str) -> dict[str, Any]:
    """Each with decisions of its own, all at once, as most of it is waiting."""
    rank, absences = dist.get_rank(), (0, 2)
    lonely = [opened(3.0 - rank / 2) for _ in absences]  # the last to come gives up first
    apart = [unconnected(connect) for connect in (refuse, connect_to_another)]
    totals, late = [total_of(decision) for decision in apart], opened(3.0)
    dist.barrier()  # a rank whose imports or group took longer isn't late
    with ThreadPoolExecutor(5) as pool:
        heard_late = pool.submit(answered_late, late, folder)
        left_alone = [
            pool.submit(wait_for_all, decision, "all", rank != absent)
            for decision, absent in zip(lonely, absences, strict=True)
        ]
        waiting = [pool.submit(wait_for_all, decision, "two", rank != 1) for decision in apart]
    dist.barrier()
    return {
        "lonely": [(found.result(), total_of(decision)) for found, decision in zip(left_alone, lonely, strict=True)],
        "late": heard_late.result(),
        "unconnected": [(total, found.result()) for total, found in zip(totals, waiting, strict=True)],
    }


def waits_known() -> list[tuple[str, tuple[int, ...]] | None]:
    """What rank 0 is known to wait for, while another rank is elsewhere, and after what it caught."""
    decision, rank, seen = opened(1.0), dist.get_rank(), []
    activity = decision._group.activity
    dist.barrier()
    if rank == 0:

        def look() -> None:
            end = time.monotonic() + 20
            while activity.wait is None and time.monotonic() < end:
                time.sleep(0.01)
            seen.append(None if activity.wait is None else (activity.wait.what, activity.wait.ranks))

        looker = threading.Thread(target=look)
        looker.start()
        with suppress(CommunicationError):
            decision.make("save_checkpoint", 0, lambda values: values)
        looker.join()
        seen.append(activity.wait and (activity.wait.what, activity.wait.ranks))
    dist.barrier()
    return seen


def left_early(folder: str) -> tuple[str, int | None] | None:
    rank, decision = dist.get_rank(), opened(60)
    decision.make("first", rank, lambda values: values)
    left, heard = Path(folder) / "left", None
    if rank == 2:
        del decision
        gc.collect()
        left.touch()
    else:
        while not left.exists():
            time.sleep(0.01)
        try:
            decision.make("second", rank, lambda values: values)
        except PeerError as error:
            heard = (str(error), error.rank)
    dist.barrier()
    return heard


def opened_and_closed() -> tuple[int, int, int]:
    group = control()
    dist.barrier(group.handle)
    before = sockets()
    series = [CollectiveDecision(group, f"series {k}", 20) for k in range(4)]
    opened = sockets() - before
    for decision in series:
        assert decision.make("all", 1, lambda values: [sum(values)] * 3) == 3
    child = os.fork()
    if child == 0:
        os._exit(len(sockets() & opened))
    inherited = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    dist.barrier()
    del series, decision
    gc.collect()
    return len(opened), inherited, len(sockets() & opened)


def all_cases(folder: str) -> dict[str, Any]:
    """Every case that needs no start of its own."""
    return {
        "decisions": decisions(),
        "left early": left_early(folder),
        "sockets": opened_and_closed(),
        **waits_in_vain(folder),
    }


@pytest.fixture(scope="module")
def cases(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return rank_pool.run(3, all_cases, str(tmp_path_factory.mktemp("left")))


def test_each_rank_gets_its_item_and_all_get_the_same_error(cases: Cases) -> None:
    for rank, (items, large, errors, totals) in enumerate(case["decisions"] for case in cases):
        assert items == [3, rank]
        assert large
        assert errors[0] == (CheckpointError, "not [0, 1, 2]")
        assert errors[1][0] is CommunicationError
        assert "ZeroDivisionError" in errors[1][1]
        assert "left" in errors[2][1]
        assert "right" in errors[2][1]
        assert totals == [3]


def test_a_rank_that_does_not_come_is_named_and_the_next_decision_is_made(cases: Cases) -> None:
    for k, absent in enumerate((0, 2)):
        for rank, (message, total) in enumerate(case["lonely"][k] for case in cases):
            assert total == 3
            if rank != absent:
                assert f"all: ranks [{absent}] have not come within {3 - rank / 2:g} s" in message


def test_an_answer_that_comes_too_late_is_not_the_next_decisions(cases: Cases) -> None:
    assert cases[0]["late"] == ["0 of first", "0 of second"]
    for rank in (1, 2):
        message, answer = cases[rank]["late"]
        assert "the same: rank 0 has not answered within 3 s" in message
        assert answer == f"{rank} of second"


def test_a_decision_that_is_gone_counts_as_a_rank_that_left(cases: Cases) -> None:
    for message, blamed in (case["left early"] for case in cases[:2]):
        assert "second: rank 2 ended" in message
        assert blamed == 2


def test_connections_are_closed_with_their_owner_and_in_children(cases: Cases) -> None:
    for rank, (opened, inherited, left) in enumerate(case["sockets"] for case in cases):
        assert opened == 4 * (2 if rank == 0 else 1)
        assert inherited == 0
        assert left == 0


def test_the_first_rank_listens_where_other_hosts_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(of_master: str) -> str:
        monkeypatch.setenv("MASTER_ADDR", of_master)
        with _listen() as server:
            return server.getsockname()[0]

    assert address("127.0.0.1") == address("localhost") == "127.0.0.1"
    # To itself, a host's name is this address on Debian, and another one to other hosts.
    assert address("127.0.1.1") in ("::", "0.0.0.0")


def test_without_connections_decisions_are_made_all_the_same(cases: Cases) -> None:
    for k in range(2):
        for rank, (total, message) in enumerate(case["unconnected"][k] for case in cases):
            assert total == 3
            if rank != 1:
                assert "two: ranks [1] have not come within 2 s" in message


def left_waiting(rank: int, size: int, port: int, dying: int, before: str, heard_by: Any) -> None:
    """A process of its own. One rank is killed when the others wait for it; they tell what they hear of that."""
    agents = store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if before == "it held the store":  # as under srun and mpirun, where no agent does
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            agents.set("port", str(store.port))
        else:
            store = dist.TCPStore("127.0.0.1", int(agents.get("port")), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    decision = CollectiveDecision(control(), "checkpoint", 600, CheckpointError)

    def come() -> None:
        decision.attempt("before", dict, lambda values: values)

    if before == "it met the others":
        come()
    dist.barrier()
    if before == "it came to a decision":  # which another one comes to when it is dead
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
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        decision.attempt("save", dict, lambda values: values)
    except CheckpointError as error:
        cause = error.__cause__
        heard_by.put((rank, str(error), follows(error), cause.rank if isinstance(cause, PeerError) else None))
    heard_by.close()
    heard_by.join_thread()
    agents.add("over", 1)
    while int(agents.get("over")) < size - 1:  # the end of one that has heard is not what the others hear
        time.sleep(0.05)
    os._exit(0)


Heard = list[tuple[int, str, bool, int | None]]
DEATHS = [
    (1, "nothing"),
    (0, "nothing"),
    (0, "it held the store"),
    (2, "it met the others"),
    (2, "it came to a decision"),
]


@contextmanager
def dying_world(dying: int, before: str) -> Iterator[Any]:
    """Three ranks, one of which dies; the queue that those which wait for it report to."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # an agent's: it outlives every rank
    context = warm_context()
    reports = context.Queue()
    arguments = [(rank, 3, store.port, dying, before, reports) for rank in range(3)]
    processes = [context.Process(target=left_waiting, args=a, daemon=True) for a in arguments]
    try:
        for process in processes:
            process.start()
        yield reports
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def deaths() -> dict[tuple[int, str], Heard]:
    """Return what was heard of each death; less where nothing was. All at once, as most of it is waiting."""
    heard: dict[tuple[int, str], Heard] = {}
    with ExitStack() as stack:
        worlds = {death: stack.enter_context(dying_world(*death)) for death in DEATHS}
        for death, reports in worlds.items():
            heard[death] = []
            with suppress(queue.Empty):
                for _ in range(2):
                    heard[death].append(reports.get(timeout=40))
    return heard


@pytest.mark.parametrize(("dying", "before"), DEATHS)
def test_the_death_of_a_rank_is_told_to_those_that_wait(
    deaths: dict[tuple[int, str], Heard], dying: int, before: str
) -> None:
    heard = sorted(deaths[dying, before])
    assert [rank for rank, *_ in heard] == [rank for rank in range(3) if rank != dying], "a rank stands still"
    for _, message, is_consequence, blamed in heard:
        assert f"save: rank {dying} ended" in message
        assert is_consequence
        assert blamed == dying


def test_who_waits_for_a_decision_is_known_to_watchdogs(run_ranks):
    assert run_ranks(2, waits_known)[0] == [("save_checkpoint", (0, 1)), None]
