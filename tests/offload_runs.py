"""Trainings with offload, and what differs from those without."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from layouts import SHARDED, own_iterator, run_steps, specs
from parallel3d.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.pipe import PipelineModule

# Spans of 300 elements, of buckets of 1500: more than there are buffers in the window.
DEVICE = {"offload_optimizer": {"device": "cpu", "buffer_count": 2}, "sub_group_size": 300}
HALF = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 300}
ON_CPU = {"offload_optimizer": {"device": "cpu", "step": "cpu", "buffer_count": 3}, "sub_group_size": 300}
STEPS, ACCUMULATION = 3, 2


@dataclass(frozen=True)
class Case:
    """One way to train. optimizer: its type and params."""

    dp: int = 1
    pp: int = 1
    stage: int = 2
    optimizer: tuple[str, dict[str, Any]] = ("AdamW", {"lr": 2e-3})
    config: dict[str, Any] = field(default_factory=dict)
    tied: bool = False
    frozen: tuple[int, ...] = ()
    clipping: float = 0.05
    schedule: str = "1f1b"
    per_micro_batch: bool = False
    blocks: int = 3


BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}}
CASES = {
    "dp1": Case(stage=0, tied=True),
    "dp1-bf16-zero3": Case(stage=3, config=BF16, optimizer=("Adam", {"lr": 2e-3, "weight_decay": 0.1})),
    "dp2-fp16": Case(dp=2, config=FP16, stage=1, frozen=(2, 5)),
    "dp2-fp16-sgd": Case(dp=2, config=FP16, optimizer=("SGD", {"lr": 0.05, "momentum": 0.9}), clipping=0.0),
    "dp3-bf16": Case(dp=3, config={**BF16, "data_types": {"grad_accum_dtype": "bf16"}}, tied=True),
    "dp3-zero3": Case(dp=3, stage=3, config=BF16, optimizer=("Lion", {"lr": 1e-3}), frozen=(1,), blocks=5),
    "dp2-per-micro-batch": Case(
        dp=2, stage=3, per_micro_batch=True, optimizer=("Adagrad", {"lr": 1e-2, "initial_accumulator_value": 0.1})
    ),
    "pp2-dp2": Case(pp=2, dp=2, config=BF16, tied=True, optimizer=("RMSprop", {"lr": 1e-3, "momentum": 0.5})),
    "pp2-zero0": Case(pp=2, stage=0, schedule="zb-h1", optimizer=("NAdam", {"lr": 1e-3})),
    "dp2-others": Case(dp=2, optimizer=("Adamax", {"lr": 1e-3}), clipping=0.0),
}
WAYS = ("device", "half", "cpu", "disk")
WORLDS = {name: case.dp * case.pp for name, case in CASES.items()}


def engine_of(case: Case, offload: dict[str, Any]) -> Engine:
    torch.manual_seed(5)
    kind, params = case.optimizer
    config = {
        "train_micro_batch_size_per_gpu": toy.SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": case.clipping,
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": {
            "stage": case.stage,
            "reduce_bucket_size": 1500,
            "reduce_per_micro_batch": case.per_micro_batch,
            **SHARDED,
            **offload,
        },
        "steps_per_print": None,
        "pipeline": {"stages": case.pp, "schedule": case.schedule},
        **case.config,
    }
    module = PipelineModule(
        specs(toy.model(case.tied, case.blocks)), loss_fn=toy.cross_entropy, seed_layers=True, config=config
    )
    for name, parameter in module.named_parameters():
        if name.startswith(tuple(f"layers.{layer}." for layer in case.frozen)):
            parameter.requires_grad_(False)
    engine, *_ = parallel3d.initialize(model=module, config=config)
    return engine


def data_of(engine: Engine, first: int = 0, steps: int = STEPS) -> Any:
    per_step = ACCUMULATION * engine.grid.get_data_parallel_world_size()
    batches = [toy.micro_batch(g, "tuple") for g in range(first * per_step, (first + steps) * per_step)]
    return own_iterator(engine, batches)


def optimizer_state(engine: Engine) -> dict[str, Tensor]:
    """Masters and elementwise state by name, whole. Collective."""
    found = {}
    keys = sorted({key for state in engine.optimizer.state.values() for key in state if key != "step"})
    for info in engine.pipeline_module.parameter_infos():
        found[f"master/{info.name}"] = safe_get_full_fp32_param(info.parameter)
        for key in keys:
            value = safe_get_full_optimizer_state(info.parameter, key)
            if value is not None:
                found[f"{key}/{info.name}"] = value
    return found


def trained(
    case: Case, offload: dict[str, Any], before_step: Callable[[], None] = lambda: None, steps: int = STEPS
) -> tuple[Any, dict[str, Tensor], int, Engine]:
    engine = engine_of(case, offload)
    engine.update.call_before_step(before_step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="step . skipped")
        run = run_steps(engine, data_of(engine), steps)
    return run, optimizer_state(engine), engine.skipped_steps, engine


def on_disk(directory: Path, **more: Any) -> dict[str, Any]:
    return {
        "offload_optimizer": {"device": "nvme", "nvme_path": str(directory), "buffer_count": 2, **more},
        "sub_group_size": 300,
    }


def compare(
    case: Case, directory: Path, before_step: Callable[[], None] = lambda: None, names: Sequence[str] = WAYS
) -> list[str]:
    """Return what differs from training without offload, and from the predicted memory.

    before_step: called in each step; names: of the ways to offload that are tried.
    """
    wanted, wanted_state, skipped, engine = trained(case, {})
    # A CPU and a GPU round masters differently, and so weights of few bits, which the steps to come compute with.
    rounds_otherwise = engine.device.type == "cuda" and bool({"bf16", "fp16"} & case.config.keys())
    first, first_state, *_ = trained(case, {}, steps=skipped + 1) if rounds_otherwise else (wanted, wanted_state)
    problems = []
    # From stage 2 on, the disk has a part, host memory another one, and the device the rest.
    split = {"ratio": 0.8, "host_ratio": 0.5} if case.stage >= 2 else {}
    ways = {"device": DEVICE, "half": HALF, "cpu": ON_CPU, "disk": on_disk(directory, **split)}
    for name in names:
        offload = ways[name]
        tolerance = 1e-6 if name == "cpu" else 0.0
        run, state, own_skipped, engine = trained(case, offload, before_step)
        if own_skipped != skipped or (0 < skipped < STEPS) != ("fp16" in case.config):
            problems.append(f"{name}: {own_skipped} skipped steps, {skipped} without offload")
        if tolerance and rounds_otherwise:
            if run[0] != pytest.approx(wanted[0], rel=1e-3, nan_ok=True):
                problems.append(f"{name}: {run[0]}, without offload {wanted[0]}")
            run, state, _, engine = trained(case, offload, before_step, skipped + 1)
        expected, expected_state = (first, first_state) if tolerance else (wanted, wanted_state)
        for losses, others in zip(run[:2], expected[:2], strict=True):
            if losses != pytest.approx(others, rel=tolerance, abs=0, nan_ok=True):
                problems.append(f"{name}: {losses}, without offload {others}")
        if set(state) != set(expected_state) or not expected_state:
            problems.append(f"{name}: {sorted(set(state) ^ set(expected_state))}")
        # Rounded to bf16 or fp16, weights may differ by a step of the dtype where the masters differ by 1e-6.
        weights = run[2] if not tolerance else {}
        for key, value in {**state, **weights}.items():
            other = expected_state[key] if key in expected_state else expected[2][key]
            if tolerance and key.endswith("qkv.bias"):
                # The gradient of a key's bias is zero, and Adam makes steps of its rounding.
                value, other = (torch.cat([t[: toy.HIDDEN], t[2 * toy.HIDDEN :]]) for t in (value, other))
            if not torch.allclose(value, other, rtol=tolerance, atol=tolerance):
                problems.append(f"{name}: {key} differs by {(value - other).abs().max()}")
        offloaded = [bucket for bucket in engine.update.sharded.buckets if bucket.is_offloaded]
        kept = len(engine.update.sharded.buckets) - len(offloaded)
        read = sum(bucket.state_on_disk for bucket in offloaded)
        keeps = name == "half" or (name == "disk" and bool(split))
        if not offloaded or (kept > 0) != keeps or (read > 0) != (name == "disk"):
            problems.append(f"{name}: {len(offloaded)} buckets are offloaded, {kept} are not, {read} are on disk")
        if name == "disk" and (read < len(offloaded)) != bool(split):
            problems.append(f"{len(offloaded) - read} of {len(offloaded)} offloaded buckets are in host memory")
        rates = [file.rates() for file in engine.update.disks().values()]
        if [min(each) > 0 for each in rates] != [True] * (name == "disk"):
            problems.append(f"{name}: the disk's rates are {rates}")
        for row, (predicted, measured) in engine.reports.memory_report()[engine.global_rank].items():
            # A shard that is padding alone gets masters and no state: up to two blocks of the disk less.
            allowed = 2 * 4096 if name == "disk" else 0.01 * predicted
            if row in ("host", "disk", "window", "masters") and not predicted - allowed <= measured <= predicted:
                problems.append(f"{name}: {row} is {measured}, predicted {predicted}")
    return problems
