"""Reports of a run's steps, on a clock that only layers and messages advance: every time is known exactly."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timed_runs
from timed_runs import LATENCY, MICRO_BATCHES, timed_engine, train
from torch import Tensor

from parallel3d.monitor.records import PARTS, Breakdown
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.schedule.timing import simulate


def run_one_step(costs: Sequence[float], schedule: str) -> tuple[list[Breakdown], float]:
    """The breakdown of all ranks, and the simulated makespan; what was measured must be what is simulated."""
    with ExitStack() as stack:
        engine = timed_engine(stack, costs, schedule, wall_clock_breakdown=True)
        train(engine, 1)
        program, measured = engine.reports.timeline()

        def cost(i: Instruction) -> float:
            if i.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
                return LATENCY
            return {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 2.0}.get(i.op, 0.0) * costs[i.chunk]

        simulated = simulate(program, cost)
        ends = [
            {(s.rank, str(s.instruction)): s.end for s in t.spans if s.instruction.op in (Op.FORWARD, Op.BACKWARD)}
            for t in (measured, simulated)
        ]
        assert ends[0] == pytest.approx(ends[1])
        return engine.reports.time_breakdown(), simulated.makespan


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("costs", [(1.0, 1.0), (1.0, 5.0), (1.0, 4.0, 1.0)], ids=str)
def test_a_slow_stage_is_forward_on_itself_and_bubble_on_its_neighbours(run_ranks, costs: tuple[float, ...], dp: int):
    """The executor's own times are the simulator's; what is neither compute nor a message under way is bubble."""
    results = run_ranks(len(costs) * dp, run_one_step, costs, "1f1b")
    for ranks, makespan in results:
        assert ranks == results[0][0], "the same on every rank"
        for rank, parts in enumerate(ranks):
            own = costs[rank // dp]
            assert parts.forward == pytest.approx(MICRO_BATCHES * own)
            assert parts.backward == pytest.approx(2 * MICRO_BATCHES * own)
            assert (parts.step, parts.reduce, parts.other) == pytest.approx((1.0, 0.0, 0.0))
            idle = makespan - 3 * MICRO_BATCHES * own
            assert parts.bubble + parts.communication == pytest.approx(idle)
            assert parts.total == pytest.approx(makespan + 1.0)
            # An exposed message costs its latency, and no compute instruction waits for more than one.
            assert parts.communication <= 2 * MICRO_BATCHES * LATENCY + 1e-9
            assert parts.communication > 0 or rank // dp == costs.index(max(costs))
    if len(set(costs)) > 1:
        slow = costs.index(max(costs))
        ranks, _ = results[0]
        for neighbour in {slow - 1, slow + 1} & set(range(len(costs))):
            assert ranks[neighbour * dp].bubble > 2 * MICRO_BATCHES * (costs[slow] - 1)


def two_stages() -> tuple[list[Breakdown], dict[str, float]]:
    with ExitStack() as stack:
        engine = timed_engine(stack, (1.0, 3.0), "gpipe", wall_clock_breakdown=True, steps_per_print=1)
        used = (2 - engine.global_rank) * 2**30
        stack.enter_context(mock.patch("parallel3d.monitor.steps.peak_memory", return_value=used))
        with redirect_stdout(io.StringIO()):
            train(engine, 1)
        return engine.reports.time_breakdown(), engine.reports.monitor.values


def test_two_stages_literally(run_ranks):
    """GPipe, forwards of 1 and 3 s, backwards of 2 and 6 s, messages of 0.25 s, an all-reduce of 1 s at the end."""
    (ranks, values), (_, others) = run_ranks(2, two_stages)
    # Stage 1 waits 1 s for the first activation to be made and 0.25 s for it to come, then works until 55.25.
    last = 1.25 + 6 * 3 + 6 * 6
    assert ranks[1] == Breakdown(18.0, 36.0, 0.0, 1.0, 0.25, pytest.approx(1.0 + 2.25), 0.0)
    # Stage 0 works 6 s, and 2 s on each gradient, which comes 0.25 s after it was made; the last ends at last + 2.25.
    assert ranks[0].total == pytest.approx(last + 2.25 + 1.0)
    assert ranks[0] == Breakdown(
        6.0, 12.0, 0.0, 1.0, pytest.approx(6 * 0.25), pytest.approx(last + 2.25 - 18.0 - 6 * 0.25), 0.0
    )
    # Of monitors, in milliseconds, the mean of both ranks.
    times = {"forward": 12.0, "backward": 24.0, "backward_inner": 24.0, "backward_allreduce": 0.0, "step": 1.0}
    assert {name: values[f"elapsed_time_ms_{name}"] / 1e3 for name in times} == pytest.approx(times)
    assert values["bubble"] == pytest.approx((ranks[0].bubble + ranks[1].bubble) / (ranks[0].total + ranks[1].total))
    assert values["memory_gib"] == 2.0  # of the fullest rank
    assert {name: others[name] for name in ("bubble", "memory_gib")}.items() <= values.items()


def watched(config: dict[str, Any], steps: int) -> tuple[str, list[int], int]:
    """Return this rank's output, the reads of clock and scalars at the end of each step, and the events kept."""
    reads, scalars = [], 0

    def counting(read: Callable[[Tensor], float]) -> Callable[[Tensor], float]:
        def counted(tensor: Tensor) -> float:
            nonlocal scalars
            scalars += tensor.is_floating_point()  # integers are what hosts agree on
            return read(tensor)

        return counted

    out = io.StringIO()
    with ExitStack() as stack:
        engine = timed_engine(stack, (1.0, 1.0), "1f1b", **config)
        stack.enter_context(redirect_stdout(out))
        # Not CPU-only ways to wait for a device: none may be tried.
        stack.enter_context(mock.patch("torch.cuda.synchronize", side_effect=AssertionError("synchronized")))
        stack.enter_context(mock.patch.object(Tensor, "__float__", counting(Tensor.__float__)))
        stack.enter_context(mock.patch.object(Tensor, "item", counting(Tensor.item)))
        for _ in range(steps):
            before = (timed_runs.CLOCK.reads, scalars)
            train(engine, 1)
            reads.append((timed_runs.CLOCK.reads - before[0], scalars - before[1]))
        return out.getvalue(), reads, engine.global_steps


EVERYTHING = {
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "activation_checkpointing": {"profile": True},
    "steps_per_print": 3,
}


def test_prints_come_from_rank_0_and_nothing_waits_between_them(run_ranks, tmp_path: Path):
    files = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    ranks = run_ranks(2, watched, {**EVERYTHING, **files}, 7)
    for rank, (text, reads, _) in enumerate(ranks):
        clock = [c for c, _ in reads]
        scalars = [s for _, s in reads]
        assert clock == [0, 0, 1, 0, 0, 1, 0]
        printing = 2 if rank == 0 else 0  # the loss and the norm
        assert scalars == [0, 0, printing, 0, 0, printing, 0]
        if rank > 0:
            assert text == ""
    text = ranks[0][0]
    lines = [line for line in text.splitlines() if "loss" in line]
    assert [line.split(":")[0] for line in lines] == ["step 3", "step 6"]
    number = r"[\d.e+-]+"
    settings = "lr 0.1, mom 0.5, skipped 0"
    speed = rf"{number} s/step, {number} samples/s, memory {number} GiB"
    line = rf"step 3: loss {number}, grad norm {number}, {settings}, {speed}"
    assert re.fullmatch(line, lines[0])
    assert text.count("step 3, s ") == text.count("step 3, MiB") == 1
    for part in (*PARTS, "total", "mean", "max", "rank 1", "forward, backward", "resident", "activation checkpointing"):
        assert part in text
    assert text.count("predicted / measured") == 2


def test_nothing_is_printed_or_read_where_nothing_is_asked_for(run_ranks):
    for text, reads, _ in run_ranks(2, watched, {"steps_per_print": None, "memory_breakdown": True}, 2):
        assert (text, reads) == ("", [(0, 0), (0, 0)])


def dump() -> str:
    out = io.StringIO()
    with redirect_stdout(out), ExitStack() as stack:
        timed_engine(stack, (1.0, 1.0), "zb-h1", dump_state=True, zero_optimization={"stage": 1})
    return out.getvalue()


def test_dump_state_tells_what_is_in_force_on_rank_0(run_ranks):
    texts = run_ranks(4, dump)
    assert not any(texts[1:])
    layer = 32 * 2 * 2  # 4 x 4 weights and 4 biases, padded to 2 shards of 32
    wanted = [
        "gradient_accumulation_steps: 6",
        "schedule: zb-h1",
        "seed: 1234",
        "train_batch_size: 24",
        "topology: {pipe: 2, data: 2}",
        f"(1,): [{layer // 2}]",
        "is updated: 2",
        "FORWARD: 6",
        "BACKWARD_WEIGHT: 6",
        "REDUCE_GRADS: 1",
    ]
    for line in wanted:
        assert line in texts[0], line
    table = texts[0].split("partition:\n")[1]
    assert "Timed" in table
