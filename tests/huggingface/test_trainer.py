"""Hugging Face's Trainer with `deepspeed=`: the numbers are those of its training with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trainer_runs import SAVED, STEPS, configuration, run_job

CPU = {"device": "cpu"}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "stage 0": configuration({"stage": 0}),
    "stage 1": configuration({"stage": 1}),
    "stage 2, offload": configuration({"stage": 2, "offload_optimizer": CPU}),
    "stage 3": configuration({"stage": 3}),
    "stage 3, offload": configuration({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
    "adapters, ddp": None,
    "adapters, stage 2": configuration({"stage": 2}),
    "adapters, stage 3": configuration({"stage": 3, "offload_param": CPU}),
}


RESUMED_ALONE = ("stage 1", "stage 3, offload", "adapters, stage 3")


def alike(name: str) -> str:
    """The training with DDP that has the same numbers."""
    return "adapters, ddp" if name.startswith("adapters") else "ddp"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What two ranks did with each configuration."""
    directory = tmp_path_factory.mktemp("trainer")
    runs = run_job(directory, "trainer_runs", CONFIGS)
    alone = run_job(directory, "trainer_runs", {name: CONFIGS[name] for name in RESUMED_ALONE}, world=1)
    return directory, runs | {f"{name} by one rank": run for name, run in alone.items()}


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if config is not None])
def test_a_training_is_that_of_ddp(found: tuple[Path, dict[str, Any]], name: str):
    directory, runs = found
    wanted = runs[alike(name)]
    assert len(wanted["loss"]) == len(wanted["norm"]) == STEPS
    for key, values in wanted.items():
        assert runs[name][key] == pytest.approx(values, rel=1e-5), key
    file = "adapter_model.safetensors" if name.startswith("adapters") else "model.safetensors"
    own, others = (load_file(directory / run / "saved" / file) for run in (name, alike(name)))
    assert own.keys() == others.keys()
    for key, weight in others.items():
        assert own[key].numpy() == pytest.approx(weight.numpy(), abs=1e-5), key


@pytest.mark.parametrize(
    ("name", "by"), [*((name, "") for name in CONFIGS), *((name, " by one rank") for name in RESUMED_ALONE)]
)
def test_a_resumed_training_ends_as_one_without_a_break(found: tuple[Path, dict[str, Any]], name: str, by: str):
    _, runs = found
    own, whole = runs[f"{name}, resumed{by}"], runs[alike(name)]
    assert len(own["loss"]) == STEPS  # the log goes on from the checkpoint's
    assert own["loss"][SAVED:] == pytest.approx(whole["loss"][SAVED:], rel=1e-5)
    assert own["eval"] == pytest.approx(whole["eval"], rel=1e-5)
    assert own["best"] == pytest.approx(whole["best"], rel=1e-5)
