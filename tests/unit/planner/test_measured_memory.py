"""Predicted peaks against those that the benchmark measured on H200s, with the numbers as they are in the repository."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel3d.config import load
from parallel3d.config.run_layout import RunLayout
from parallel3d.planner.memory import MemoryModel
from parallel3d.planner.profile import ModelProfile
from parallel3d.schedule.builders import build
from parallel3d.schedule.lowering import lower

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from train_llama import SIZES, decoder_layers, loss_fn

RESULTS = Path(__file__).parents[3] / "tools" / "bench" / "results"
MICRO_BATCHES = 16


def measured(file: str, case: str) -> list[float]:
    """GiB that torch.cuda.max_memory_allocated gave on each rank."""
    cases = json.loads((RESULTS / file).read_text())["cases"]
    (found,) = [c for c in cases if c["case"] == case]
    peaks: list[float] = found["result"]["peak_gib"]
    return peaks


def predicted(layout: RunLayout, changes: dict[str, Any]) -> list[float]:
    size = SIZES["7b"]
    ids = torch.zeros(1, size.seq, dtype=torch.long)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW"},
        "compile": {"enabled": True},
        **changes,
    }
    memory = MemoryModel(ModelProfile(decoder_layers(size, "block"), ids, ids, loss_fn, load(config)))
    chunks = layout.stages * (layout.chunks or 1)
    each = size.layers // chunks
    bounds = [0, *(1 + each * c for c in range(1, chunks)), size.layers + 2]
    program = lower(build(layout.schedule, layout.stages, MICRO_BATCHES, layout.chunks or 1, layout.placement))
    stages = memory.stages(program, bounds, layout, [141 * 2**30] * layout.stages)
    return [stage.allocated / 2**30 for stage in stages]


def test_a_v_shaped_pipeline_of_four_gpus():
    layout = RunLayout(stages=4, chunks=2, schedule="zbv", placement="v", micro_batch=1, micro_batches=MICRO_BATCHES)
    found = measured("2026-11-21-pp4-compiled.json", "pp4-zbv-compile-cudnn")
    assert predicted(layout, {}) == pytest.approx(found, rel=0.01)


def test_optimizer_shards_on_four_gpus():
    layout = RunLayout(
        stages=1, replicas=4, zero=1, schedule="1f1b", placement="loop", micro_batch=1, micro_batches=MICRO_BATCHES
    )
    found = measured("2026-11-21-compiled.json", "dp4-zero1-bf16acc-compile-cudnn")
    assert predicted(layout, {"data_types": {"grad_accum_dtype": "bf16"}}) * 4 == pytest.approx(found, rel=0.01)
