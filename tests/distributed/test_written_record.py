"""Records that a run writes: times on a clock that only layers and messages advance, bytes and names against torch."""

from __future__ import annotations

import base64
import gzip
import json
import re
import socket
import time
import warnings
import zlib
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from layouts import make_engine, own_iterator
from timed_runs import HIDDEN, LATENCY, MICRO_BATCHES, timed_engine, train

import parallel3d
from parallel3d.cli import main
from parallel3d.comm import get_rank
from parallel3d.config.layout import parse_layout
from parallel3d.errors import ConfigError
from parallel3d.monitor.run_record import RunRecord, read_run_record
from parallel3d.monitor.traces import merge_traces
from parallel3d.planner.report.run import read_run, run_page
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op
from parallel3d.schedule.timing import simulate

COSTS = (1.0, 3.0)


def timed_record(directory: str) -> tuple[RunRecord, float, float]:
    """The record; by the simulator, the makespan and the bubble of the program that ran."""
    with ExitStack() as stack:
        engine = timed_engine(stack, COSTS, "1f1b", run_record={"directory": directory, "after_steps": 3})
        train(engine, 3 + 4)
        program = engine.reports.timeline()[0]

        def cost(i: Instruction) -> float:
            if i.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
                return LATENCY
            return {Op.FORWARD: 1.0, Op.BACKWARD: 2.0}.get(i.op, 0.0) * COSTS[i.chunk]

        simulated = simulate(program, cost)
        return engine.reports.write_run_record(directory), simulated.makespan, simulated.bubble


def drawn_computes(html: str, which: str) -> dict[str, tuple[float, float]]:
    """Return (start, end) of the forwards and backwards that a timeline of a run's page draws."""
    packed = re.search(r'id="data">([^<]+)<', html)
    assert packed is not None
    timeline = json.loads(zlib.decompress(base64.b64decode(packed[1])))["timelines"][which]
    tick, found = timeline["seconds"] / timeline["ticks"], {}
    for lane in timeline["lanes"]:
        at = 0
        for start, length, op, chunk, micro, _ in zip(*lane.values(), strict=True):
            at += start
            if (short := timeline["ops"][op]["short"]) in "FB":
                found[f"{short}{micro}@{chunk}"] = at * tick, (at + length) * tick
    return found


@pytest.mark.parametrize("dp", [1, 2])
def test_times_are_those_of_the_layers_and_messages(run_ranks, tmp_path: Path, dp: int):
    """A step is its program and a second for the norm, whatever was recorded of it; instructions take what layers do."""
    ranks = run_ranks(2 * dp, timed_record, str(tmp_path))
    record, makespan, bubble = ranks[0]
    assert all(other == record for other, _, _ in ranks)
    assert read_run_record(tmp_path) == record
    medians = {name: timing.median for name, timing in record.instructions.items() if not name.startswith("RED")}
    assert medians == pytest.approx({"F@0": 1.0, "F@1": 3.0, "B@0": 2.0, "B@1": 6.0, "SA@0": LATENCY, "SG@1": LATENCY})
    assert record.instructions["B@1"].count == 3 * MICRO_BATCHES * dp
    assert (record.step.median, record.step.spread, record.step.count) == pytest.approx((makespan + 1.0, 0.0, 1))
    assert record.optimizer.median == pytest.approx(1.0)
    run = read_run(tmp_path)
    measured, planned = (drawn_computes(run_page(run, "run"), which) for which in ("measured", "planned"))
    assert len(measured) == 2 * 2 * MICRO_BATCHES
    assert measured == {name: pytest.approx(times, abs=1e-4) for name, times in planned.items()}
    assert record.bubble == pytest.approx(bubble)
    busy = {"forward": MICRO_BATCHES * 2.0, "backward": MICRO_BATCHES * 4.0, "step": 1.0}
    assert {part: record.breakdown[part] for part in busy} == pytest.approx(busy)
    assert sum(record.breakdown.values()) == pytest.approx(makespan + 1.0)
    assert record.model.parameters == (HIDDEN * HIDDEN + HIDDEN,) * 2
    assert (record.bounds, record.layout) == ((0, 1, 2), f"pp2,{'dp2,' * (dp == 2)}1f1b,m{MICRO_BATCHES},mb2")
    assert all(rank.allocated is not None for rank in record.ranks)


TIED = {"stages": 2, "schedule": "zbv", "num_chunks": 2, "placement": "v", "activation_checkpoint_interval": 1}


def real_record(directory: str | None, pipeline: dict[str, Any], zero: int, memory: bool) -> tuple[RunRecord, Any, int]:
    """The record of a run that asks for it; what memory_report says; the elements of this rank's own parameters."""
    engine = make_engine(
        toy.model(tied=True),
        accumulation=4,
        pipeline=pipeline,
        zero_optimization={"stage": zero, "reduce_bucket_size": 1500},
    )
    steps = 6
    per_step = 4 * engine.grid.get_data_parallel_world_size()
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(per_step * steps)])
    for step in range(steps):
        if memory and step == 3:
            engine.reports.profile_next_batch("memory")
        if step >= 4:
            engine.reports.profile_next_batch()
        engine.train_batch(data)
    record = engine.reports.write_run_record(directory if engine.global_rank == 0 else None)
    return record, engine.reports.memory_report(), sum(p.numel() for p in engine.module.parameters())


@pytest.mark.parametrize(("pipeline", "zero", "memory"), [({"stages": 2}, 0, False), (TIED, 1, True)])
def test_the_record_says_what_ran(run_ranks, tmp_path: Path, pipeline: dict[str, Any], zero: int, memory: bool):
    ranks = run_ranks(4, real_record, str(tmp_path / "run"), pipeline, zero, memory)
    record, report, _ = ranks[0]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"run_record.json", "step_timeline.json"}
    assert read_run_record(tmp_path / "run") == record
    words = parse_layout(record.layout)
    assert (words.stages, words.replicas, words.zero) == (2, 2, zero)
    assert (words.micro_batches, words.micro_batch, words.recompute) == (4, toy.SAMPLES, 1 if memory else 0)
    assert words.schedule == record.schedule == pipeline.get("schedule", "1f1b")
    assert record.seq == toy.LENGTH
    assert record.step.count == 6 - 2 - 2 - memory
    assert record.config["zero_optimization"]["reduce_per_micro_batch"] is False  # of "auto", for gradients so small
    # Every parameter once, in the layer that is first to use it.
    items = toy.model(tied=True)
    counts = [0 if item.is_function else sum(p.numel() for p in item.build().parameters()) for item in items]
    assert record.model.parameters == (*counts[:-1], 0)
    assert len(record.model.layers) == len(items)
    chunks = range(len(record.bounds) - 1)
    kinds = ("F", "I", "W") if memory else ("F", "B")
    computes = {name for name in record.instructions if name[0] in "FBIW"}
    assert computes == {f"{kind}@{c}" for kind in kinds for c in chunks}
    # gloo tells when an all-reduce is done, not when a reduce-scatter is.
    assert any(name.startswith("RED@") for name in record.instructions) == (zero == 0)
    assert all(timing.median > 0 for name, timing in record.instructions.items() if name in computes)
    for own, row in zip(record.ranks, report, strict=True):
        assert own.parts == {name: measured for name, (_, measured) in row.items()}
        phases = max(own.parts["backward"], own.parts["step"])
        assert own.allocated == (phases if memory else None)


def test_model_print_doesnt_depend_on_the_layout(run_ranks, tmp_path: Path):
    prints = [
        run_ranks(4, real_record, str(tmp_path), pipeline, 0, False)[0][0].model.digest
        for pipeline in ({"stages": 4}, {"stages": 1}, {"stages": 2, "schedule": "interleaved", "num_chunks": 3})
    ]
    assert len(set(prints)) == 1


def unwritable(directory: str, by_itself: bool) -> tuple[str, int]:
    asked = {"run_record": {"directory": directory, "after_steps": 1}} if by_itself else {}
    engine = make_engine(toy.model(tied=False), accumulation=2, pipeline={"stages": 2}, **asked)
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(2 * 6)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            engine.train_batch(data)
    said = [str(w.message) for w in caught if "run record" in str(w.message)]
    if not by_itself:
        with pytest.raises(ConfigError, match="no batch was profiled"):
            engine.reports.write_run_record(directory)
        engine.reports.profile_next_batch()
        with pytest.raises(StopIteration):
            engine.train_batch(data)
        return "", engine.global_steps
    return "".join(said), engine.global_steps


def test_a_record_that_cant_be_written_ends_no_training(run_ranks, tmp_path: Path):
    (tmp_path / "file").write_text("")
    ranks = run_ranks(2, unwritable, str(tmp_path / "file"), True)
    assert [steps for _, steps in ranks] == [6, 6]
    assert "name a directory" in ranks[0][0]
    assert ranks[1][0] == ""
    assert run_ranks(2, unwritable, str(tmp_path), False) == [("", 6)] * 2
    assert not list(tmp_path.glob("*.json"))


def planned(directory: str) -> tuple[RunRecord, list[list[str]]]:
    engine = make_engine(
        toy.model(tied=False),
        accumulation=4,
        pipeline={"stages": 2, "schedule": "auto"},
        run_record={"directory": directory, "after_steps": 1},
    )
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(4 * 14)])
    for _ in range(14):
        engine.train_batch(data)
    plan = engine.schedule_plan
    assert plan is not None
    return read_run_record(directory), [list(rank) for rank in plan.instructions]


def test_under_schedule_auto_the_plan_is_recorded_not_what_was_tried_for_it(run_ranks, tmp_path: Path):
    record, lists = run_ranks(2, planned, str(tmp_path))[0]
    assert record.program is not None
    assert [[str(i) for i in map(Instruction.parse, rank) if i.op in COMPUTE_OPS] for rank in record.program] == lists
    kinds = {f"{Instruction.parse(i).op.value}@{Instruction.parse(i).chunk}" for rank in lists for i in rank}
    assert {name for name in record.instructions if name[0] in "FBIW"} == kinds
    assert json.loads((tmp_path / "run_record.json").read_text())["schedule"] == "auto"


def by_calls(directory: str) -> int:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "steps_per_print": None,
        "run_record": {"directory": directory, "after_steps": 4},
    }
    engine, *_ = parallel3d.initialize(model=model, config=config)
    for _ in range(2 * (4 + 4)):
        engine.backward(engine(torch.randn(2, 3)).square().mean())
        engine.step()
    return engine.global_steps


def test_steps_by_calls_are_recorded_too(run_ranks, tmp_path: Path):
    assert run_ranks(2, by_calls, str(tmp_path)) == [8, 8]
    record = read_run_record(tmp_path)
    assert {name: timing.count for name, timing in record.instructions.items() if name[0] in "FB"} == {
        "F@0": 2 * 2 * 3,
        "B@0": 2 * 2 * 3,
    }
    assert record.instructions["RED@0#0"].count == 3
    assert (record.model.layers, record.model.parameters) == (("Sequential",), (3 * 4 + 4 + 4 + 1,))
    assert (record.layout, record.seq) == ("dp2,1f1b,m2,mb2", None)


AHEAD_S = 1000


def traced(directory: str, elsewhere: str) -> None:
    """Two traces; in the second, rank 1 is on another host, whose clock is ahead."""
    engine = make_engine(
        toy.model(tied=False),
        accumulation=2,
        pipeline={"stages": 2},
        run_record={"directory": directory},
    )
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(2 * 5)])
    engine.train_batch(data)
    engine.profile(2, memory=True)
    for _ in range(2):
        engine.train_batch(data)
    now, file = time.time, Path(elsewhere, "trace-1.json.gz")
    with pytest.MonkeyPatch.context() as patch:
        if get_rank() == 1:
            patch.setattr(socket, "gethostname", lambda: "elsewhere")
            patch.setattr(time, "time", lambda: now() + AHEAD_S)
        engine.profile(2, elsewhere)
    for _ in range(2):
        engine.train_batch(data)
    if get_rank() == 1:
        trace = json.loads(gzip.decompress(file.read_bytes()))
        trace["baseTimeNanoseconds"] += 7 * AHEAD_S * 10**9  # of which times are counted there
        for event in trace["traceEvents"]:
            event |= {"ts": event["ts"] - 6e6 * AHEAD_S} if "ts" in event else {}
        file.write_bytes(gzip.compress(json.dumps(trace).encode()))


def test_the_ranks_traces_are_one_on_one_clock(run_ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_ranks(2, traced, str(tmp_path), str(tmp_path / "elsewhere"))
    assert main(["trace", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}/trace.json.gz: 2 ranks; ")
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in events:
        if re.fullmatch(r"[FB]\d+@\d", event["name"]) and event.get("cat") == "user_annotation":
            rank = event["name"][-1]
            assert names[event["pid"]].startswith(f"rank {rank} (stage {rank}, ")
            spans.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(spans) == {f"{op}{m}@{c}" for op in "FB" for m in range(2) for c in range(2)}
    for m in range(2):
        order = [sorted(spans[f"{name.format(m)}"]) for name in ("F{}@0", "F{}@1", "B{}@1", "B{}@0")]
        assert [len(of_steps) for of_steps in order] == [2] * 4
        for k in range(2):
            for before, after in pairwise(order):
                assert before[k][1] <= after[k][0]
    flows = [(e["id"], e["pid"]) for e in events if e.get("ph") in ("s", "f")]
    assert len({number for number, _ in flows}) == len(set(flows))
    assert any(event["name"] == "[memory]" for event in events)
    merge_traces(tmp_path / "elsewhere", tmp_path / "elsewhere.json.gz")
    with gzip.open(tmp_path / "elsewhere.json.gz", "rt") as file:
        times = [e["ts"] for e in json.load(file)["traceEvents"] if e.get("cat") == "user_annotation"]
    assert max(times) - min(times) < 1e6 * AHEAD_S / 2


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["trace", str(tmp_path)]) == 2
    assert "record some steps by engine.profile(steps)" in capsys.readouterr().err
    (tmp_path / "trace-0.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    assert main(["trace", str(tmp_path)]) == 2
    assert "trace-0.json.gz' is not a trace of engine.profile" in capsys.readouterr().err


def monitored_on_rank_0(directory: str) -> int:
    own = {"csv_monitor": {"enabled": True, "output_path": directory}} if get_rank() == 0 else {}
    engine = make_engine(toy.model(tied=False), accumulation=2, pipeline={"stages": 2}, steps_per_print=2, **own)
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(2 * 4)])
    for _ in range(4):
        engine.train_batch(data)
    engine.monitor.flush()
    return engine.global_steps


def test_a_monitor_may_be_enabled_on_the_writing_rank_alone(run_ranks, tmp_path: Path):
    assert run_ranks(2, monitored_on_rank_0, str(tmp_path)) == [4, 4]
    (folder,) = tmp_path.iterdir()
    losses, bubbles = ((folder / f"Train_Samples_{name}.csv").read_text().split() for name in ("train_loss", "bubble"))
    assert [len(losses), len(bubbles)] == [1 + 4, 1 + 2]
    assert [line.split(",")[0] for line in bubbles[1:]] == [line.split(",")[0] for line in losses[2::2]]
