"""Predicted and measured values side by side, by numbers that were worked out by hand."""

from __future__ import annotations

import io

import pytest
from records import make_record
from rich.console import Console

from parallel3d.monitor.run_record import RankRecord
from parallel3d.planner.calibrate.runs import Line, compare, comparison_table, print_comparison
from parallel3d.planner.search.result import Prediction, StageMemory

GIB = 2**30


def prediction(**changes: object) -> Prediction:
    stages = [
        StageMemory(stage=s, parts={}, phases={}, allocated=a * GIB, reserved=r * GIB, capacity=80 * GIB)
        for s, (a, r) in enumerate([(20, 25), (10, 12)])
    ]
    return Prediction(
        layout="pp2,1f1b,m4,mb2",
        stages=2,
        replicas=1,
        tensor_ranks=1,
        sequence_parallel=False,
        chunks=1,
        placement="loop",
        schedule="1f1b",
        micro_batch=2,
        micro_batches=4,
        zero=0,
        recompute=0,
        seconds=1.1,
        low=1.0,
        high=1.2,
        tokens_per_second=1000.0,
        mfu=0.4,
        bubble=0.2,
        exposed_communication=0.05,
        breakdown={"forward": 0.33, "optimizer": 0.09, "exposed communication": 0.06, "bubble": 0.2},
        bounds=(0, 1, 2),
        memory=tuple(stages),
    ).model_copy(update=changes)


def rank(number: int, allocated: int | None, reserved: int | None, outside: int | None) -> RankRecord:
    sizes = {"allocated": allocated, "reserved": reserved, "outside": outside}
    in_gib = {name: None if size is None else size * GIB for name, size in sizes.items()}
    return RankRecord(rank=number, stage=number, device="H200", parts={}, **in_gib)


def test_what_both_sides_know_is_compared():
    record = make_record(
        instructions={"F@0": 0.010, "B@0": 0.020, "SA@0": 0.001}, ranks=[rank(0, 16, 20, 4), rank(1, None, None, None)]
    ).model_copy(update={"breakdown": {"forward": 0.3, "communication": 0.03, "reduce": 0.01, "step": 0.1}})
    found = compare(record, prediction(), {"F@0": 0.011, "SA@0": 0.001, "W@0": 1.0})

    def rows(lines: tuple[Line, ...]) -> list[tuple[str, float]]:
        return [(line.what, round(line.error, 9)) for line in lines]

    assert rows(found.step) == [
        ("step", 0.1),
        ("forward", 0.1),
        ("exposed communication", 0.5),
        ("optimizer", -0.1),
        ("bubble", pytest.approx(-0.05)),
    ]
    assert rows(found.instructions) == [("F@0", 0.1), ("SA@0", 0.0)]
    assert rows(found.memory) == [("rank 0 allocated", 0.25), ("rank 0 reserved", round(1 / 24, 9))]


def printed(**records: object) -> list[list[str]]:
    record = make_record(**records)
    table = comparison_table(compare(record, prediction(), {f"F@{k}": 0.010 + 0.0001 * k for k in range(40)}))
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_the_table_has_units_and_errors_in_percent(capsys: pytest.CaptureFixture[str]):
    rows = printed(instructions={"F@0": 0.0125}, ranks=[rank(0, 16, None, None)], step=1.0, bubble=0.25)
    assert rows[0] == ["step", "1100.000 ms", "1000.000 ms", "+10.0 %"]
    assert ["bubble", "20.0%", "25.0%", "-5.0 pp"] in rows
    assert ["F@0", "10.000 ms", "12.500 ms", "-20.0 %"] in rows
    assert rows[-1] == ["rank 0 allocated", "20.000 GiB", "16.000 GiB", "+25.0 %"]
    print_comparison(compare(make_record(), prediction(), {}))
    assert "pp2,1f1b,m4,mb2 on NVIDIA H200" in capsys.readouterr().out


def test_of_many_instructions_the_worst_are_shown_and_the_mean_of_all():
    """Predicted grows by 1% a chunk: the last are off most."""
    rows = printed(instructions={f"F@{k}": 0.010 for k in range(40)})
    shown = [row[0] for row in rows if row[0].startswith("F@")]
    assert shown == [f"F@{k}" for k in range(24, 40)]
    assert ["... 40, mean error", "", "", "19.5%"] in rows


def test_nothing_measured_is_no_division_by_it():
    nothing = Line(what="exposed communication", unit="s", predicted=0.0, measured=0.0)
    assert nothing.error == 0.0
    assert nothing._replace(predicted=1.0).error == float("inf")
