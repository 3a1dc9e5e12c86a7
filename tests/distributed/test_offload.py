"""Optimizer state in host memory: the numbers are those of training without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import run_steps
from offload_runs import (
    BF16,
    CASES,
    DEVICE,
    HALF,
    ON_CPU,
    STEPS,
    WORLDS,
    Case,
    compare,
    data_of,
    engine_of,
    on_disk,
    optimizer_state,
    trained,
)
from parallel3d.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

from parallel3d.errors import ConfigError, OffloadError


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_are_those_without_offload(run_ranks, name: str, tmp_path: Path):
    for problems in run_ranks(WORLDS[name], compare, CASES[name], tmp_path):
        assert not problems, "\n".join(problems)


AUTO = {"offload_optimizer": {"device": "cpu", "ratio": "auto"}, "sub_group_size": 300}


def move_back(case: Case) -> dict[str, Any]:
    wanted, wanted_state, _, _ = trained(case, {})
    run, state, _, engine = trained(case, AUTO)
    report = engine.reports.memory_report()[engine.global_rank]
    return {
        "equal": run[:2] == wanted[:2] and all(torch.equal(state[key], wanted_state[key]) for key in wanted_state),
        "host": report["host"][1],
        "offloaded": sum(bucket.is_offloaded for bucket in engine.update.sharded.buckets),
    }


@pytest.mark.parametrize("name", ["dp1", "dp3-bf16"])
def test_with_ratio_auto_the_device_keeps_what_it_has_room_for(run_ranks, name: str):
    for found in run_ranks(WORLDS[name], move_back, CASES[name]):
        assert found == {"equal": True, "host": 0, "offloaded": 0}


RESUMED = Case(dp=2, config=BF16)


def resume(directory: Path) -> dict[str, bool]:
    """Save with offload after one step, and go on without it, and the other way round."""
    found = {}
    disk = on_disk(directory)
    wanted = trained(RESUMED, {})[1]
    ways: dict[str, Any] = {"to device": (DEVICE, {}), "to host": ({}, DEVICE), "to cpu": (HALF, ON_CPU)}
    for name, (first, second) in {**ways, "off disk": (disk, {}), "to disk": ({}, disk)}.items():
        engine = engine_of(RESUMED, first)
        run_steps(engine, data_of(engine, 0, 1), 1)
        engine.save_checkpoint(directory / name)
        other = engine_of(RESUMED, second)
        other.load_checkpoint(directory / name)
        run_steps(other, data_of(other, 1, STEPS - 1), STEPS - 1)
        tolerance = 1e-6 if second is ON_CPU else 0.0
        state = optimizer_state(other)
        found[name] = all(torch.allclose(state[k], wanted[k], rtol=tolerance, atol=tolerance) for k in wanted)
    return found


def test_a_checkpoint_goes_on_with_and_without_offload(run_ranks, tmp_path: Path):
    for found in run_ranks(2, resume, tmp_path):
        assert found == {"to device": True, "to host": True, "to cpu": True, "off disk": True, "to disk": True}


def write() -> tuple[float, float]:
    """Write a master and a weight between steps; return how far they are from what a step without a gradient makes of them."""
    case = Case(optimizer=("SGD", {"lr": 0.0}), config=BF16, clipping=0.0)
    engine = engine_of(case, DEVICE)
    first, second = list(engine.module.parameters())[:2]
    run_steps(engine, data_of(engine, 0, 1), 1)
    safe_set_full_fp32_param(first, torch.full_like(first, 0.123, dtype=torch.float32))
    with torch.no_grad():
        second.fill_(2.5)
    run_steps(engine, data_of(engine, 1, 1), 1)
    return float(safe_get_full_fp32_param(first).mean()), float(safe_get_full_fp32_param(second).mean())


def test_masters_on_the_host_follow_what_is_written(run_ranks):
    [(first, second)] = run_ranks(1, write)
    assert (first, second) == (pytest.approx(0.123), 2.5)


SHORT = {"offload": {"host_memory_gib": 1e-5}}


def refusals(directory: Path) -> list[str]:
    errors = []
    for optimizer, zero, config in (
        (("Adafactor", {"lr": 1e-3}), DEVICE, {}),
        (("SGD", {"lr": 0.1}), {"offload_optimizer": {"device": "gpu"}}, {}),
        (("SGD", {"lr": 0.1}), {"offload_optimizer": {"device": "nvme"}}, {}),
        (("AdamW", {"lr": 1e-3}), DEVICE, SHORT),
        # One rank's directory is missing, and all ranks raise.
        (("AdamW", {"lr": 1e-3}), on_disk(directory / str(torch.distributed.get_rank())), {}),
    ):
        try:
            engine_of(Case(dp=2, optimizer=optimizer, config=config), zero)
        except (ConfigError, OffloadError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_what_cannot_be_offloaded_is_an_error_on_all_ranks(run_ranks, tmp_path: Path):
    (tmp_path / "0").mkdir()
    for whole, device, no_path, short, missing in run_ranks(2, refusals, tmp_path):
        assert "Adafactor works on whole tensors" in whole
        assert "offload_optimizer.device" in device
        assert "'gpu'" in device
        assert "device is nvme, but nvme_path is missing" in no_path
        assert short.startswith(
            "OffloadError: offloaded state needs 0.000 GiB of host memory (by local rank: 0.000 by 0"
        )
        assert "offload.host_memory_gib leaves 0.000 GiB" in short
        assert missing.startswith("OffloadError: a scratch file of")
        assert str(tmp_path / "1") in missing
    assert list((tmp_path / "0").iterdir()) == []
