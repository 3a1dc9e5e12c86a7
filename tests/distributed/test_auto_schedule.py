"""Schedule "auto": the first steps are measured, then a plan is run; no number of the training changes for it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import toy
from auto_runs import ACCUMULATION, STEPS, check_plan, train
from layouts import BASE_SEED, Run, check, make_engine, make_optimizer, own_iterator, run_reference, run_steps
from reference import Reference

from parallel3d.errors import ConfigError
from parallel3d.schedule.auto import Measured, Plan, make_plan
from parallel3d.schedule.instructions import COMPUTE_OPS

PLANNED: dict[str, tuple[int, int, dict[str, Any], tuple[int, ...]]] = {
    "defaults": (1, 0, {}, (0, 1, 1, 0)),
    "loops": (2, 2, {"num_chunks": 3, "max_in_flight": 2.0}, (0, 1, 0, 1, 0, 1)),
    "one chunk": (2, 1, {"num_chunks": 1}, (0, 1)),
    "all-reduces": (2, 0, {}, (0, 1, 1, 0)),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All-reduces, which test_parity.py has in every schedule, in a planned one too with --full."""
    if "placement" in metafunc.fixturenames:
        names = [name for name in PLANNED if metafunc.config.getoption("full") or name != "all-reduces"]
        values = [PLANNED[name] for name in names]
        metafunc.parametrize(("dp", "zero", "pipeline", "placement"), values, ids=names)


def test_measuring_and_planning_change_no_number(
    run_ranks, tmp_path: Path, dp: int, zero: int, pipeline: dict[str, Any], placement: tuple[int, ...]
):
    file = tmp_path / "plan.json"
    results = run_ranks(2 * dp, train, dp, zero, {**pipeline, "plan": str(file)})
    micro_batches = [toy.micro_batch(g) for g in range(dp * ACCUMULATION * STEPS - dp)]
    reference = Reference(toy.model(tied=True), toy.cross_entropy, make_optimizer("SGD"), base_seed=BASE_SEED)
    check([run for run, *_ in results], run_reference(reference, micro_batches, dp * ACCUMULATION), dp)
    plans = [Plan.model_validate_json(text) for _, text, _, _ in results]
    assert all(plan == plans[0] for plan in plans), "every rank runs the same plan"
    assert [where for *_, where, _ in results] == [placement] * 2 * dp
    check_plan(plans[0])
    assert Plan.model_validate_json(file.read_text()) == plans[0]


def train_by(path: str, zero: int) -> tuple[Run, list[str]]:
    """By the plan of a file, on two replicas."""
    engine = make_engine(
        toy.model(tied=True),
        accumulation=ACCUMULATION,
        pipeline={"stages": 2, "schedule": "auto", "plan": path},
        zero_optimization={"stage": zero, "reduce_bucket_size": 1500, "reduce_per_micro_batch": zero == 2},
    )
    micro_batches = [toy.micro_batch(g) for g in range(2 * ACCUMULATION * 2)]
    program = engine._runner.programs.get(ACCUMULATION, training=True)
    ran = [str(i) for i in program.instructions[engine.pipeline_module.stage_id] if i.op in COMPUTE_OPS]
    return run_steps(engine, own_iterator(engine, micro_batches), 2), ran


@pytest.mark.parametrize("zero", [1, 2])
def test_an_order_that_hides_reductions_changes_no_number(run_ranks, tmp_path: Path, zero: int):
    times = Measured.model_validate({**plan_of_two()["measured"], "limit": (1e9, 1e9), "backward": (0.2,) * 4})
    busy = times.model_copy(update={"reductions": ((0.1, 0.1),) * 4, "reduces_every_micro_batch": zero == 2})
    plan, without = (make_plan((0, 1, 1, 0), ACCUMULATION, m) for m in (busy, times))
    assert plan.instructions != without.instructions
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    results = run_ranks(4, train_by, str(tmp_path / "plan.json"), zero)
    micro_batches = [toy.micro_batch(g) for g in range(2 * ACCUMULATION * 2)]
    reference = Reference(toy.model(tied=True), toy.cross_entropy, make_optimizer("SGD"), base_seed=BASE_SEED)
    check([run for run, _ in results], run_reference(reference, micro_batches, 2 * ACCUMULATION), 2)
    assert {tuple(ran) for _, ran in results} == set(plan.instructions)


def first_programs(path: str) -> tuple[list[str], bool]:
    engine = make_engine(
        toy.model(tied=False), accumulation=2, pipeline={"stages": 2, "schedule": "auto", "plan": path}
    )
    program = engine._runner.programs.get(2, training=True)
    planned = engine.schedule_plan is not None
    engine.train_batch(own_iterator(engine, [toy.micro_batch(g) for g in range(2)]))
    return [str(i) for i in program.instructions[engine.pipeline_module.stage_id] if i.op.value in "FBIW"], planned


def plan_of_two() -> dict[str, Any]:
    """All backwards behind all forwards: nothing that a search would find."""
    times, most = [0.1] * 4, [1e9, 1e9]
    lists = [
        ["F0@0", "F1@0", "F0@3", "F1@3", "B0@3", "B1@3", "B0@0", "B1@0"],
        ["F0@1", "F1@1", "F0@2", "F1@2", "B0@2", "B1@2", "B0@1", "B1@1"],
    ]
    measured = dict.fromkeys(("forward", "input_gradient", "weight_gradient", "backward", "held", "deferred"), times)
    return {
        "name": "mine",
        "placement": [0, 1, 1, 0],
        "num_micro_batches": 2,
        "makespan": 1.0,
        "bubble": 0.5,
        "held": [0, 0],
        "measured": {**measured, "transfer": 0.0, "limit": most},
        "instructions": lists,
    }


def test_a_stored_plan_runs_from_the_first_step(run_ranks, tmp_path: Path):
    file, stored = tmp_path / "plan.json", plan_of_two()
    file.write_text(json.dumps(stored))
    results = run_ranks(2, first_programs, str(file))
    assert [lists for lists, _ in results] == stored["instructions"]
    assert all(planned for _, planned in results)
    assert json.loads(file.read_text()) == stored


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"placement": [0, 1, 0, 1]}, r"chunks on stages \[0, 1, 0, 1\], but the module's are on \[0, 1, 1, 0\]"),
        ({"bubble": "large"}, "bubble\n.*valid number"),
        (
            {"instructions": [["F0@0"], []], "num_micro_batches": 1},
            "micro-batch 0 on chunk 0 needs either B, or I and W",
        ),
        (
            {"num_micro_batches": 3, "instructions": plan_of_two()["instructions"]},
            "says 3 micro-batches, but its lists have 2",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_by_all_ranks(run_ranks, tmp_path: Path, changes, message: str):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**plan_of_two(), **changes}))
    for raised in run_ranks(2, refusal, str(file)):
        assert raised is not None
        assert re.search(message, raised, re.DOTALL), raised
        assert "Delete it to measure again" in raised


def test_a_plan_that_could_not_be_written_or_read_is_refused_at_once(run_ranks, tmp_path: Path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    for path, message in (
        ("nowhere/plan.json", "no directory"),
        (".", "can't be read"),
        ("binary.json", "can't be read"),
    ):
        for raised in run_ranks(2, refusal, str(tmp_path / path)):
            assert raised is not None
            assert message in raised


def refusal(path: str) -> str | None:
    try:
        first_programs(path)
    except ConfigError as error:
        return str(error)
    return None


def other_numbers(changes: dict[int, int], steps: int) -> tuple[list[tuple[int, int]], Plan | None, int]:
    """The plan after steps before some of which the number of micro-batches is changed; how many each step trained on."""
    engine = make_engine(toy.model(tied=False), accumulation=4, pipeline={"stages": 2, "schedule": "auto"})
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(8 * steps)])
    trained = []
    for step in range(steps):
        if step in changes:
            engine.set_train_batch_size(changes[step] * toy.SAMPLES)
        before = engine.global_samples
        engine.train_batch(data)
        trained.append((step, (engine.global_samples - before) // toy.SAMPLES))
    return trained, engine.schedule_plan, engine.global_steps


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [2, 7])
def test_another_batch_size_starts_the_measuring_anew(run_ranks, number: int):
    for trained, plan, _ in run_ranks(2, other_numbers, {3: number}, 3 + 1 + 8):
        assert [count for _, count in trained] == [4] * 3 + [number] * 9
        assert plan is not None
        assert plan.num_micro_batches == number
        check_plan(plan)
    assert all(plan is None for _, plan, _ in run_ranks(2, other_numbers, {6: number}, 6 + 1 + 7))


def with_other_records(asked: dict[int, str], breakdown: bool) -> tuple[list[float], bool, list[str]]:
    """Auto's own recording beside the user's. asked: step -> what is to be profiled of it."""
    engine = make_engine(
        toy.model(tied=False),
        accumulation=2,
        pipeline={"stages": 2, "schedule": "auto"},
        wall_clock_breakdown=breakdown,
        **({"steps_per_print": 1} if breakdown else {}),
    )
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(2 * STEPS)])
    losses, seen = [], []
    for step in range(STEPS):
        if step in asked:
            engine.reports.profile_next_batch(asked[step])
        losses.append(engine.train_batch(data).item())
        if asked.get(step) == "time":
            seen.append(engine.reports.timeline()[0].name)
        elif asked.get(step) == "memory":
            seen.append(
                str(max(measured for _, measured in (row["activations"] for row in engine.reports.memory_report())) > 0)
            )
    return losses, engine.schedule_plan is not None, seen


@pytest.mark.parametrize("asked", [{}, {2: "time", 3: "memory", 4: "memory", 5: "time"}], ids=["breakdown", "profiles"])
def test_what_the_user_records_beside_it_is_recorded(run_ranks, asked: dict[int, str]):
    plain = Reference(toy.model(tied=False), toy.cross_entropy, make_optimizer("SGD"), base_seed=BASE_SEED)
    wanted = run_reference(plain, [toy.micro_batch(g) for g in range(2 * STEPS)], 2)[0]
    for losses, planned, seen in run_ranks(2, with_other_records, asked, not asked):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert planned
        assert seen == (["auto", "True", "True", "auto"] if asked else [])
