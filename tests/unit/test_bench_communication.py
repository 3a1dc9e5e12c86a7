"""The benchmark of communication: its arithmetic, its table, and a run of it on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_ranks import run_process

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import communication
from communication import bus_bandwidth, table
from kernels import category
from table import communication_section
from torch import Tensor


def test_bus_bandwidth_is_what_a_ring_sends():
    """A ring of n devices passes n - 1 parts of n on, twice."""
    for world in (2, 3, 8):
        assert bus_bandwidth("all_reduce", 4096 * world, world, 2.0) == pytest.approx(2 * (world - 1) * 4096 / 2.0)
        assert bus_bandwidth("ring", 4096, world, 2.0) == 2048.0


def test_the_table_compares_the_kernel_with_the_backend():
    def record(by: str, seconds: float) -> dict[str, Any]:
        times = {"seconds": seconds, "min_s": seconds / 2, "max_s": 2 * seconds, "bus_bytes_per_s": 3e9}
        return {"what": "all_reduce", "world": 4, "dtype": "bfloat16", "bytes": 65536, "by": by, **times}

    _, nccl, kernel = table([record("nccl", 3e-5), record("kernel", 1.5e-5)])
    assert nccl == ["all_reduce", "4", "bfloat16", "65,536", "nccl", "30.0", "15.0-60.0", "3.0", ""]
    assert kernel == ["all_reduce", "4", "bfloat16", "65,536", "kernel", "15.0", "7.5-30.0", "3.0", "0.50"]


def test_the_page_has_a_row_for_each_way_beside_the_backends():
    def record(num_bytes: int, by: str, seconds: float) -> dict[str, Any]:
        return {"what": "ring", "world": 2, "dtype": "bfloat16", "bytes": num_bytes, "by": by, "seconds": seconds}

    run = {
        "date": "2026-01-02T03:04",
        "commit": "abc",
        "command": "python here",
        "hardware": {"count": 2, "name": "H200"},
        "versions": {"torch": "2.11"},
        "workload": {"repeats": 5},
        "measured": [record(1024, "nccl", 4e-5), record(1024, "copies", 2e-5), record(1024, "kernel", 1e-5)],
    }
    page = communication_section(run).splitlines()
    assert page[0] == "2026-01-02, 2 x H200, commit abc; torch 2.11."
    assert page[5:7] == [
        "| ring | 2 | bfloat16 | 1,024 | nccl | 40.0 | copies | 20.0 (0.50) |",
        "|  |  |  |  |  |  | kernel | 10.0 (0.25) |",
    ]


def test_the_kernel_counts_as_communication():
    assert category("void (anonymous namespace)::all_reduce<__nv_bfloat16, 4, true>(Call)") == "communication"
    assert category("void (anonymous namespace)::all_reduce<float, 2, false>(Sum)") == "communication"
    assert category("void at::native::reduce_kernel<512, 1>(float)") != "communication"


class Device:
    """Imagined, with what is done on it in turn. wakes: whether it does, each time, before the host has called all."""

    def __init__(self, wakes: Sequence[bool]):
        self.wakes = iter(wakes)
        self.sleeps: list[float] = []
        self.done: list[str] = []

    def event(self, enable_timing: bool) -> Device:
        assert enable_timing
        return self

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles / communication.CYCLES_PER_S)
        self.done = []

    def record(self) -> None:
        self.done.append("record")

    def query(self) -> bool:
        return next(self.wakes)

    def synchronize(self) -> None:
        self.done.append("wait")

    def elapsed_time(self, _: Device) -> float:
        return 20.0

    def copy_there(self, value: int, device: torch.device) -> Tensor:
        self.done.append("copy")
        return torch.full((), value, device=device)

    def time(self, monkeypatch: pytest.MonkeyPatch, calls: int) -> float:
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch, "tensor", self.copy_there)
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda late: self.done.append("agree"))
        return communication.time_queued_calls(lambda: self.done.append("call"), calls, torch.device("cpu"))


def test_queued_calls_are_timed_without_the_host(monkeypatch: pytest.MonkeyPatch):
    """Between the two events lie the calls alone, and a device that woke too early sleeps twice as long."""
    device = Device([True, True, False])
    assert device.time(monkeypatch, 2) == 0.01
    assert device.sleeps == [0.02, 0.04, 0.08]
    assert device.done == ["call", "record", "call", "call", "record", "wait", "copy", "agree"]


def test_a_host_that_is_never_ahead_is_an_error(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RuntimeError, match=r"slept 1.0 s before 2 calls"):
        Device([True] * 9).time(monkeypatch, 2)


EXCHANGED = ("all_reduce", "ring", "message")


def test_a_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool):
    """With --full by torchrun itself."""
    out = tmp_path / "communication.json"
    command = [communication.__file__, "--cpu", "--worlds", "2,64", "--sizes", "64,4096"]
    command += ["--dtypes", "float32", "--products", "64,32,48", "--repeats", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    if not full:
        monkeypatch.setattr(communication, "run_process", run_process)
    assert communication.main() == 0
    run = json.loads(out.read_text())
    found = [(m["what"], m["by"], m["bytes"]) for m in run["measured"]]
    exchanged = [(what, "gloo", size) for size in (64, 4096) for what in EXCHANGED]
    updated = [("reduce_scatter", "gloo", 64), ("reduce_scatter", "gloo", 4096)]
    names = ["gather, 3 of attention", "gather, 2 of feed-forward"]
    names += [f"{way}, of {block}" for block in ("attention", "feed-forward") for way in ("scatter", "gather and keep")]
    exchanged += [("product beside a ring", by, 4096) for by in ("alone", "gloo")]
    assert found == exchanged + [(name, by, 64 * 32 * 4) for name in names for by in ("alone", "gloo")] + updated
    assert {m["world"] for m in run["measured"]} == {2}
    assert all(0 < m["min_s"] <= m["seconds"] <= m["max_s"] for m in run["measured"])
    assert run["workload"]["worlds"] == [2]
    assert "without CUDA" in run["off"]["2"] or "no CUDA device" in run["off"]["2"]
    assert {"date", "commit", "command", "hardware", "versions"} <= run.keys()
