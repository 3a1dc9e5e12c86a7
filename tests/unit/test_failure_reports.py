"""The parts of failure attribution that need no world: errors that keep their type, the board, the cost."""

from __future__ import annotations

import pickle
import timeit
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from parallel3d.activity import PHASE, POSITION, SLOT_BYTES, STEADY, Activity, Phase, is_in_first_step, is_untimed
from parallel3d.autograd.sink import GradientSink
from parallel3d.config import load
from parallel3d.engine.compile import Compilation
from parallel3d.errors import CheckpointError, ConfigError, ExecutionError, execution_error
from parallel3d.failures.board import Board
from parallel3d.failures.verdict import Kind, Report, State, Verdict


class Awkward(Exception):
    def __init__(self, code: int, text: str):
        super().__init__(code, text)
        self.code = code

    def __str__(self) -> str:
        return "awkward"


@pytest.mark.parametrize(
    "cause", [KeyError("k"), ValueError("v"), torch.OutOfMemoryError("oom"), ConfigError("c"), Awkward(3, "x")]
)
def test_an_execution_error_is_also_what_caused_it(cause: Exception):
    error = execution_error("rank 1: it broke", cause)
    assert isinstance(error, ExecutionError)
    assert isinstance(error, type(cause))
    assert str(error) == "rank 1: it broke"
    assert getattr(error, "code", None) == getattr(cause, "code", None)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (ExecutionError, "rank 1: it broke")


@pytest.mark.parametrize("cause", [StopIteration(), OSError(2, "no"), UnicodeDecodeError("utf8", b"", 0, 1, "odd")])
def test_types_that_cannot_be_joined_are_left_out(cause: Exception):
    error = execution_error("rank 1: it broke", cause)
    assert isinstance(error, ExecutionError)
    assert str(error) == "rank 1: it broke"
    assert not isinstance(error, StopIteration)


def store() -> dist.Store:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def report(rank: int) -> Report:
    return Report(rank, 0, "h", State.RUNNING)


def verdict(rank: int) -> Verdict:
    return Verdict(Kind.LATE, rank, 0, "h", "it is late", None, None, 1.0, ())


def test_all_ranks_settle_on_the_first_verdict():
    shared = store()
    boards = [Board(shared, "run", rank, 3) for rank in range(3)]
    assert [board.is_open(0) for board in boards] == [False] * 3
    assert [board.open(0) for board in boards] == [True, False, False]
    assert all(board.is_open(0) and not board.is_open(1) for board in boards)
    assert boards[1].settled(0, 0.1) is None
    with ThreadPoolExecutor() as threads:
        settled = list(threads.map(lambda rank: boards[rank].settle(0, verdict(rank)), range(3)))
    assert len({str(settled_on) for settled_on in settled}) == 1
    assert boards[2].settled(0, 1) == (settled[0],)
    assert boards[0].settle(1, None) is None
    assert boards[1].settled(1, 1) == (None,)


def test_reports_are_collected_from_those_that_live():
    shared = store()
    boards = [Board(shared, "run", rank, 4) for rank in range(4)]
    boards[0].post(0, report(0))
    boards[1].post(0, report(1))
    boards[1].post(0, replace(report(1), state=State.FAILED))  # the first counts
    assert set(boards[0].collect(0, 0.2, lambda _: False)) == {0, 1}
    boards[2].leave(None)
    shared.set("exit/3", "SIGKILL")
    found = boards[0].collect(0, 60, lambda _: False)  # at once: nobody is missing who might still report
    assert found == {0: report(0), 1: report(1)} == boards[3].reports(0)
    assert (boards[0].has_left(2), boards[0].ending(3)) == (True, "SIGKILL")


def test_a_rank_may_report_anew_unless_another_has_reported_for_it():
    shared = store()
    boards = [Board(shared, "run", rank, 2) for rank in range(2)]
    told = [replace(report(rank), state=State.ASKED_TO_END) for rank in range(2)]
    silent = replace(report(1), state=State.SILENT)
    boards[0].post(0, report(0))
    boards[0].amend(0, report(0), told[0])
    boards[0].post(0, silent)
    boards[1].post(0, report(1))
    boards[1].amend(0, report(1), told[1])
    assert boards[0].reports(0) == {0: told[0], 1: silent}


def test_a_board_whose_store_is_gone_leaves_the_rank_to_itself():
    master = store()
    board = Board(dist.TCPStore("127.0.0.1", master.port, is_master=False), "run", 1, 2)
    assert not board.is_open(0)
    del master
    assert not board.is_open(0)
    assert board.lost
    assert board.open(0)
    assert board.settle(0, verdict(0)) == verdict(0)
    assert board.collect(0, 60, lambda _: False) == {}


def test_a_process_may_take_its_time_where_it_says_so():
    activity = Activity()
    assert is_in_first_step(activity.slots)
    activity.share(memoryview(bytearray(SLOT_BYTES)))
    activity.slots[STEADY] = 1
    assert not is_in_first_step(activity.slots)
    assert not is_untimed(activity.slots)
    with activity.untimed(Phase.SAVING), activity.untimed(Phase.UNWATCHED):
        assert is_untimed(activity.slots)
        assert activity.slots[0] == Phase.UNWATCHED
    assert not is_untimed(activity.slots)
    activity.reset()
    assert is_in_first_step(activity.slots)


def test_after_an_exception_in_a_save_that_a_script_catches_the_phase_is_that_before():
    activity = Activity()
    activity.enter(Phase.USER)
    with pytest.raises(CheckpointError) as caught, activity.untimed(Phase.UNWATCHED), activity.untimed(Phase.SAVING):
        raise CheckpointError("the disk is full")
    assert Phase(activity.slots[PHASE]) is Phase.USER
    assert activity.phase_of(caught.value) is Phase.SAVING, "for a script that does not catch it"
    assert activity.phase_of(KeyError("later")) is Phase.USER


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_a_compilation_counts_as_a_move():
    groups = SimpleNamespace(activity=Activity(), rank=0, model=SimpleNamespace(size=1))
    layer = Doubling()
    calls = SimpleNamespace(modules=lambda: [("0", layer)], policy_of=lambda module: None)
    model = SimpleNamespace(groups=groups, layer_names=[], calls=calls, named_modules=layer.named_modules)
    model.wrap_loss = lambda wrap: None
    compilation = Compilation(
        cast(Any, model), load({"compile": {"enabled": True, "backend": "eager"}}), GradientSink()
    )
    compilation.compile({})
    before = bytes(groups.activity.slots)
    layer(torch.ones(2))
    moved = bytes(groups.activity.slots)
    assert moved != before
    layer(torch.ones(2))
    assert bytes(groups.activity.slots) == moved


def test_noting_an_instruction_costs_far_less_than_a_microsecond():
    times = timeit.repeat(
        "for k in numbers: slots[POSITION] = k",
        globals={"numbers": range(10_000), "slots": Activity().slots, "POSITION": POSITION},
        number=1,
        repeat=20,
    )
    assert min(times) / 10_000 < 5e-7
