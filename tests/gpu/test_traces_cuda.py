"""Traces of GPUs: kernels of all ranks beside their instructions, and torch's snapshot of the memory."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import toy
from layouts import make_engine, own_iterator
from ranks import RankPools

from parallel3d.monitor.traces import MERGED, merge_traces


def traced(directory: str) -> None:
    engine = make_engine(toy.model(tied=False), accumulation=2, pipeline={"stages": 2})
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(2 * 3)])
    engine.train_batch(data)
    engine.profile(2, directory, memory=True)
    for _ in range(2):
        engine.train_batch(data)


def test_kernels_of_all_ranks_are_in_one_trace(gpu_pool: RankPools, tmp_path: Path):
    gpu_pool.run(2, traced, str(tmp_path))
    assert merge_traces(tmp_path, tmp_path / MERGED) == 2
    with gzip.open(tmp_path / MERGED, "rt") as file:
        events = json.load(file)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert {names[e["pid"]].split()[1] for e in kernels} == {"0", "1"}
    # On the device, torch draws instructions whose kernels their own thread launches: not backwards, which autograd's launches.
    for category, wanted in (
        ("user_annotation", {"F0@0", "F1@1", "B0@1", "B1@0"}),
        ("gpu_user_annotation", {"F0@0", "F1@1"}),
    ):
        assert {e["name"] for e in events if e.get("cat") == category} >= wanted
    for rank in range(2):
        snapshot = pickle.loads((tmp_path / f"memory-{rank}.pickle").read_bytes())
        assert any(trace for trace in snapshot["device_traces"]), "allocations"
