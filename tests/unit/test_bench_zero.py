"""The comparisons of ZeRO: their rows, what a host can't run, their tables, and one row on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from fault_ranks import run_process

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import zero_tables
from run import environment
from table import make_section
from zero_rows import Host, Row, obstacle, rows, table
from zero_tables import Workload

WORK = Workload("tiny", seq=32, processes=1, micro_batch=1, micro_batches=2, warmup=0, steps=1)
GPUS = Host(4, has_gpus=True, nvme_path="/local", has_infiniband=True)


def found(name: str, number: int) -> Row:
    (row,) = [row for row in rows("/local") if (row.table, row.name) == (number, name)]
    return row


def test_rows_are_those_that_notes_of_users_compare():
    names = {number: [row.name for row in rows() if row.table == number] for number in range(1, 6)}
    assert [len(own) for own in names.values()] == [8, 7, 3, 8, 6]
    assert names[1][:3] == ["none", "optimizer", "optimizer + parameters"]
    assert found("IB + SHM off", 4).environment == {"NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    memory = {"device": "cpu", "pin_memory": True}
    assert found("stage 2, offload", 2).zero == {"stage": 2, "offload_optimizer": memory}
    assert found("stage 3, offload", 2).zero == {"stage": 3, "offload_optimizer": memory, "offload_param": memory}
    for row in rows("/local"):
        assert zero_tables.refusal(zero_tables.configuration(row, WORK)) == "", row


def test_a_key_that_would_be_left_out_is_told_before_a_training():
    config = zero_tables.configuration(found("stage 1", 2), WORK)
    assert zero_tables.refusal(config) == ""
    assert "stage" in zero_tables.refusal(config | {"zero_optimization": {"stage": 4}})
    assert "autotuning" in zero_tables.refusal(config | {"autotuning": {"enabled": True}})


@pytest.mark.parametrize(
    ("name", "number", "framework", "changes", "reason"),
    [
        ("none", 1, "deepspeed", {}, ""),
        ("optimizer on nvme", 1, "parallel3d", {}, ""),
        ("optimizer on nvme", 1, "parallel3d", {"nvme_path": ""}, "give --nvme_path"),
        ("auto: what the GPU has no room for", 1, "deepspeed", {}, "deepspeed has no such setting"),
        ("bf16 with fp8 linears", 3, "parallel3d", {}, ""),
        ("all on", 4, "parallel3d", {"has_gpus": False}, ""),
        ("P2P off", 4, "parallel3d", {"has_gpus": False}, "the CPU uses gloo"),
        ("P2P off", 4, "parallel3d", {"processes": 1}, "1 GPU has no link"),
        ("IB off", 4, "parallel3d", {"has_infiniband": False}, "no InfiniBand"),
        ("IB + SHM off", 4, "parallel3d", {"has_infiniband": False}, ""),
    ],
)
def test_what_a_host_can_not_run_has_a_reason(
    name: str, number: int, framework: str, changes: dict[str, Any], reason: str
):
    told = obstacle(found(name, number), framework, Host(**{**vars(GPUS), **changes}))
    assert reason in told
    assert bool(reason) == bool(told)


def record(number: int, name: str, **result: Any) -> dict[str, Any]:
    figures = {"step_s": 0.5, "min_s": 0.4, "max_s": 0.6, "samples_s": 8.0, "skipped": 1, "loss": 1.0}
    figures |= {"peak_gib": [1.0, 2.5], "host_gib": [3.0, 2.0], "pinned_gib": [0.0, 1.5], **result}
    named = {"table": number, "row": name, "framework": "parallel3d"}
    return named | {"status": "ok", "wall_s": 1.0, "result": figures}


def test_the_page_has_figures_and_reasons():
    gib = 2**30
    memory = {"weights": (gib, gib), "masters": (gib, gib), "optimizer": (2 * gib, 3 * gib), "update": (0, 0)}
    memory |= {"transient": (gib, 0), "backward": (5 * gib, 6 * gib), "step": (7 * gib, 4 * gib)}
    failed = {"table": 3, "row": "fp8", "framework": "parallel3d", "status": "not run", "error": ["no fp8"]}
    run = {
        "date": "2026-01-02T03:04",
        "commit": "abc",
        "command": "python here",
        "hardware": {"count": 2, "name": "H200"},
        "versions": {"torch": "2.11"},
        "workload": vars(WORK),
        "missing": {"deepspeed": "not installed"},
        "zero_tables": [record(3, "bf16"), failed, record(5, "stage 1", memory=memory), record(5, "stage 2")],
    }
    page = make_section(run).splitlines()
    assert page[0] == "2026-01-02, 2 x H200, commit abc; torch 2.11."
    assert page[2] == "deepspeed: not installed."
    assert "| bf16 | parallel3d | 0.500 | 0.400-0.600 | 8.00 | 2.50 | 3.00 + 1.50 pinned | 1 |  |" in page
    assert "| fp8 | parallel3d |  |  |  |  |  |  | not run: no fp8 |" in page
    assert "| stage 1 | parallel3d | 1 / 1 | 3 / 4 | 0 / 0 | 0 / 0 | 1 / 0 | 7 / 6 | 0 / 0 | 2.50 |" in page
    assert "| stage 2 | parallel3d |  |  |  |  |  |  |  | 2.50 |" in page
    assert page[-1] == "`python here`"
    assert len(table(run["zero_tables"], 1)) == 1


def test_a_row_trains_and_tells_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zero_tables, "run_process", run_process)
    row = found("optimizer", 1)
    ended = zero_tables.run_row(row, "parallel3d", WORK, environment([]), 120.0)
    assert ended["status"] == "ok", ended
    result = ended["result"]
    assert result["samples_s"] == pytest.approx(2 / result["step_s"])
    assert min(result["host_gib"]) > 0.05
    # 435,264 parameters: 12 bytes of each, of masters and Adam's moments, are in host memory.
    assert result["memory"]["host"] == pytest.approx([435_264 * 12] * 2, rel=0.01)
