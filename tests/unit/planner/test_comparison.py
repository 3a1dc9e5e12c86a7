"""Predicted and measured values side by side, by numbers that were worked out by hand."""

from __future__ import annotations

import io

from records import make_record
from rich.console import Console
from rich.table import Table

from parallel3d.monitor.run_record import RankRecord
from parallel3d.planner.calibrate.runs import compare
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
    rows = rows_of(compare(record, prediction(), {"F@0": 0.011, "SA@0": 0.001, "W@0": 1.0}))
    assert [(what, error) for what, _, _, error in rows] == [
        ("step", "+10.0 %"),
        ("forward", "+10.0 %"),
        ("exposed communication", "+50.0 %"),
        ("optimizer", "-10.0 %"),
        ("bubble", "-5.0 pp"),
        ("F@0", "+10.0 %"),
        ("SA@0", "+0.0 %"),
        ("rank 0 allocated", "+25.0 %"),
        ("rank 0 reserved", "+4.2 %"),
    ]


def rows_of(table: Table) -> list[list[str]]:
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    lines = captured.get().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def printed(**records: object) -> list[list[str]]:
    predicted = {f"F@{k}": 0.010 + 0.0001 * k for k in range(40)}
    return rows_of(compare(make_record(**records), prediction(), predicted))


def test_the_table_has_units_and_errors_in_percent():
    rows = printed(instructions={"F@0": 0.0125}, ranks=[rank(0, 16, None, None)], step=1.0, bubble=0.25)
    assert rows[0] == ["step", "1.10 s", "1.00 s", "+10.0 %"]
    assert ["bubble", "20.0%", "25.0%", "-5.0 pp"] in rows
    assert ["F@0", "10.0 ms", "12.5 ms", "-20.0 %"] in rows
    assert rows[-1] == ["rank 0 allocated", "20.0 GiB", "16.0 GiB", "+25.0 %"]
    assert compare(make_record(), prediction(), {}).title == "pp2,1f1b,m4,mb2 on NVIDIA H200"


def test_of_many_instructions_the_worst_are_shown_and_the_mean_of_all():
    """Predicted grows by 1% a chunk: the last are off most."""
    rows = printed(instructions={f"F@{k}": 0.010 for k in range(40)})
    shown = [row[0] for row in rows if row[0].startswith("F@")]
    assert shown == [f"F@{k}" for k in range(24, 40)]
    assert ["... 40, mean error", "", "", "19.5%"] in rows


def test_nothing_measured_is_no_division_by_it():
    parts = {"exposed communication": 0.0, "forward": 1.0}
    record = make_record().model_copy(update={"breakdown": {}})
    rows = rows_of(compare(record, prediction(breakdown=parts), {}))
    assert ["exposed communication", "0 µs", "0 µs", "+0.0 %"] in rows
    assert ["forward", "1.00 s", "0 µs", "+inf %"] in rows
