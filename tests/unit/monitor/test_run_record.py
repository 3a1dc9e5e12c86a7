"""Times of sends and reductions from recorded steps, and the files of records."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from records import make_record

from parallel3d.comm.clock import Clock
from parallel3d.comm.collectives import DONE, Awaited, Group, Work
from parallel3d.comm.topology import ProcessTopology
from parallel3d.config import Config, without_removed
from parallel3d.errors import ConfigError
from parallel3d.monitor.records import StepRecord, instruction_times
from parallel3d.monitor.run_record import Timing, find_run_records, kind_name, read_run_record
from parallel3d.monitor.steps import StepRecorder
from parallel3d.schedule.instructions import Instruction
from parallel3d.schedule.timing import Span


def spans(rank: int, *given: tuple[str, float, float]) -> tuple[Span, ...]:
    return tuple(Span(rank, Instruction.parse(text), start, end) for text, start, end in given)


def record(
    rank: int,
    ran: tuple[tuple[str, float, float], ...] = (),
    waited: tuple[tuple[str, float, float], ...] = (),
    reduced: tuple[tuple[str, float, float], ...] = (),
) -> StepRecord:
    return StepRecord(0.0, 0.0, 0.0, spans(rank, *ran), spans(rank, *waited), spans(rank, *reduced))


def times_of(records: Sequence[StepRecord], topology: ProcessTopology) -> dict[str, list[float]]:
    """records: of one step, of all ranks."""
    return {kind_name(i): times for i, times in instruction_times([records], topology).items()}


def test_a_reduction_takes_from_when_its_last_rank_is_ready_until_it_is_done():
    """The second waits behind the first on each rank; a later micro-batch's of the same bucket counts with the first."""
    first = record(0, reduced=(("RED0@2#0", 1.0, 5.0), ("RED0@2#1", 2.0, 6.5), ("RED1@2#0", 9.0, 9.5)))
    second = record(0, reduced=(("RED0@2#0", 3.0, 5.0), ("RED0@2#1", 4.0, 6.5), ("RED1@2#0", 9.25, 9.5)))
    alone = record(1, reduced=(("RED0@1#0", 0.0, 4.0),))
    by_name = times_of([first, alone, second, record(1)], ProcessTopology(["data", "pipe"], [2, 2]))
    assert by_name == {"RED@2#0": [5.0 - 3.0, 9.5 - 9.25], "RED@2#1": [6.5 - 5.0], "RED@1#0": [4.0]}


def test_a_send_takes_from_when_it_is_made_until_it_is_there_where_somebody_waits_for_it():
    sender = record(0, ran=(("F0@0", 0.0, 2.0), ("F1@0", 2.0, 4.0), ("B0@0", 9.0, 12.0)))
    receiver = record(
        1,
        ran=(("F0@1", 2.5, 5.0), ("I0@1", 5.0, 8.0)),
        # The second message is there when it is asked for: it says nothing.
        waited=(("F0@1", 0.0, 2.5), ("F1@1", 8.0, 8.0)),
    )
    back = record(0, waited=(("B0@0", 4.0, 8.125),))
    by_name = times_of([sender, receiver, back], ProcessTopology(["pipe"], [3]))
    assert {name: times for name, times in by_name.items() if name[0] == "S"} == {"SA@0": [0.5], "SG@1": [0.125]}
    assert (by_name["F@0"], by_name["I@1"]) == ([2.0, 2.0], [3.0])


class _Future:
    """The future of a work that a test completes."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def add_done_callback(self, call: object) -> None:
        self.calls.append(call)


class _OnHost:
    def __init__(self, future: _Future | None):
        self.future = future

    def get_future(self) -> _Future:
        if self.future is None:
            raise RuntimeError("Work::getFuture not implemented.")
        return self.future

    def wait(self) -> None:
        raise AssertionError("recording waits for nothing")

    is_completed = wait


def test_reductions_are_recorded_where_the_backend_tells_when_they_are_done():
    future = _Future()
    works: list[Work] = [*(Awaited(_OnHost(f), Group((0,), None).waiting("")) for f in (future, None)), DONE]
    recorder = StepRecorder(0, Clock())
    before = time.monotonic()
    for bucket, work in enumerate(works):
        recorder.launched(Instruction.parse(f"RED0@0#{bucket}"), work)
    launched = time.monotonic()
    time.sleep(0.01)
    for call in future.calls:
        call(None)
    recorder.finish()
    (span,) = recorder.read().reductions
    assert str(span.instruction) == "RED0@0#0"
    assert before <= span.start <= launched
    assert launched + 0.01 <= span.end <= time.monotonic()


def test_timings_are_medians_and_distances_of_quartiles():
    assert Timing.of([3.0]) == Timing(median=3.0, spread=0.0, count=1)
    assert Timing.of([1.0, 2.0, 10.0, 4.0, 3.0]) == Timing(median=3.0, spread=2.0, count=5)


def test_records_are_found_at_any_depth_and_come_back_as_they_were(tmp_path: Path):
    records = [make_record(layout=f"pp{n}") for n in (2, 3)]
    records[0].write(tmp_path / "b" / "deep")
    path = records[1].write(tmp_path / "a")
    assert find_run_records([tmp_path, path]) == [(path, records[1]), (tmp_path / "b/deep/run_record.json", records[0])]
    assert records[0].model.digest != make_record(parameters=(5, 6)).model.digest


def test_what_is_no_record_says_what_to_do(tmp_path: Path):
    with pytest.raises(ConfigError, match="give directories with the records"):
        find_run_records([tmp_path])
    with pytest.raises(ConfigError, match=r"there is no run record .*engine.reports.write_run_record"):
        read_run_record(tmp_path)
    text = make_record().write(tmp_path).read_text()
    (tmp_path / "run_record.json").write_text(text.replace('"stages": 2', '"stages": "x"'))
    with pytest.raises(ConfigError, match=r"stages: .*valid integer.*, not 'x'"):
        read_run_record(tmp_path)
    (tmp_path / "run_record.json").write_text(text[: len(text) // 2])
    with pytest.raises(ConfigError, match="is not a run record of this version"):
        find_run_records([tmp_path])


def test_removed_keys_of_an_older_record_are_left_out():
    config = {
        "kernels": {"all_gather": "auto", "optimizer_step": True},
        "pipeline": {"receive_in_place": False, "stages": 2},
    }
    assert without_removed(config, Config) == {"kernels": {"optimizer_step": True}, "pipeline": {"stages": 2}}
