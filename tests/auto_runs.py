"""Runs under schedule "auto", and what holds for any plan."""

from __future__ import annotations

from collections import Counter
from typing import Any

import toy
from layouts import Run, make_engine, own_iterator, run_steps

from parallel3d.schedule.auto import Measured, Plan
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.lowering import add_communication, add_gradient_reduction, add_parameter_gather
from parallel3d.schedule.order import validate
from parallel3d.schedule.timing import simulate

STEPS, ACCUMULATION = 10, 4  # of which 8 are measured


def train(dp: int, zero: int, pipeline: dict[str, Any]) -> tuple[Run, str | None, tuple[int, ...], int]:
    engine = make_engine(
        toy.model(tied=True),
        accumulation=ACCUMULATION,
        pipeline={"stages": 2, "schedule": "auto", **pipeline},
        zero_optimization={"stage": zero, "reduce_bucket_size": 1500, "reduce_per_micro_batch": zero == 2},
    )
    last = [toy.micro_batch(g) for g in range(dp * ACCUMULATION * STEPS - dp)]  # the last batch is one short
    run = run_steps(engine, own_iterator(engine, last), STEPS)
    plan = engine.schedule_plan
    program = engine._runner.programs.get(ACCUMULATION, training=True)
    ran = [str(i) for i in program.instructions[engine.pipeline_module.stage_id] if i.op.value in "FBIW"]
    if plan is not None:
        check_traffic(plan.measured, program, engine, dp, zero)
    planned = plan is not None and list(plan.instructions[engine.pipeline_module.stage_id]) == ran
    return run, plan.model_dump_json() if planned else None, engine.pipeline_module.placement, engine.global_steps


def check_traffic(measured: Measured, program: Program, engine: Any, dp: int, zero: int) -> None:
    """Measured is what this stage launches, where the backend tells when that is done, and took some time."""
    stage, on_gpu = engine.pipeline_module.stage_id, engine.device.type == "cuda"
    own = [c for c, where in enumerate(program.placement) if where == stage]
    buckets = Counter(
        i.chunk for i in program.instructions[stage] if i.op is Op.REDUCE_GRADS and (zero < 2 or i.micro_batch == 0)
    )
    tells = dp > 1 and (on_gpu or zero == 0)  # gloo doesn't of a reduce-scatter
    assert [len(measured.reductions[c]) for c in own] == [buckets[c] if tells else 0 for c in own]
    assert (sum(sum(measured.reductions[c]) for c in own) > 0) == tells
    gathered = sum(measured.gather[c] for c in own) > 0
    assert gathered == (zero > 0) if dp > 1 and on_gpu else not gathered or (dp > 1 and zero > 0)
    assert measured.reduces_every_micro_batch == (zero == 2)


def with_traffic(program: Program, measured: Measured) -> Program:
    """Lower the program as an engine does, without gathers where nothing is partitioned: these take no time."""
    if measured.reductions:
        buckets = [len(times) for times in measured.reductions]
        program = add_gradient_reduction(add_communication(program), buckets, measured.reduces_every_micro_batch)
    return add_parameter_gather(program) if measured.gather else program


def check_plan(plan: Plan) -> None:
    """Check that a plan can run, keeps its limits, and promises the simulator's times."""
    program = plan.program(plan.num_micro_batches)
    validate(program)
    timeline = simulate(program, plan.measured.cost)
    whole = simulate(with_traffic(program, plan.measured), plan.measured.cost)
    assert (whole.makespan, timeline.bubble) == (plan.makespan, plan.bubble)
    assert plan.exposed == whole.makespan - timeline.makespan
    assert all(h <= most for h, most in zip(plan.held, plan.measured.limit, strict=True))
    m = plan.measured
    assert all(t > 0 for times in (m.forward, m.input_gradient, m.weight_gradient, m.backward) for t in times)
    # A chunk's input, [samples, length, hidden] in fp32, is held with every micro-batch.
    assert all(h >= toy.SAMPLES * toy.LENGTH * toy.HIDDEN * 4 for h in m.held[1:])
