"""Hugging Face's Trainer on two GPUs: the losses are those of DDP, and of one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import STEPS, configuration, run_job

# To import it takes each of xdist's workers a second, without a GPU too.
pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

CPU = {"device": "cpu"}
BY_TRAINER: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "stage 1": configuration({"stage": 1}),
    "stage 2, offload": configuration({"stage": 2, "offload_optimizer": CPU}),
    "stage 3, offload": configuration({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
    "adapters, ddp": None,
    "adapters, stage 3": configuration({"stage": 3}),
}


def split(stages: int, tensor_ranks: int, **options: Any) -> tuple[dict[str, Any], int, dict[str, Any]]:
    layout = {"pipeline": {"stages": stages}, "tensor_parallel": {"size": tensor_ranks}}
    return configuration({"stage": 1}, **layout), 1, options


ALONE = {"plain": (None, 1, {}), "adapters, plain": (None, 1, {"adapts": True})}
BY_PIPELINE_TRAINER = {
    "pp2": split(2, 1),
    "tp2": split(1, 2),
    "adapters in pp2": split(2, 1, adapts=True),
    "adapters in tp2": split(1, 2, adapts=True),
}


@pytest.mark.usefixtures("num_gpus")
def test_a_training_is_that_of_ddp(tmp_path: Path):
    runs = run_job(tmp_path, "trainer_runs", BY_TRAINER, cuda=True)
    for name in BY_TRAINER:
        wanted = runs["adapters, ddp" if name.startswith("adapters") else "ddp"]
        assert len(runs[name]["loss"]) == STEPS
        for run in (name, f"{name}, resumed"):
            for key in ("loss", "eval", "best"):
                assert runs[run][key] == pytest.approx(wanted[key], rel=1e-4), (run, key)


@pytest.mark.usefixtures("num_gpus")
def test_stages_and_slices_train_as_one_process(tmp_path: Path):
    wanted = run_job(tmp_path, "pipeline_trainer_runs", ALONE, world=1, cuda=True)
    runs = run_job(tmp_path, "pipeline_trainer_runs", BY_PIPELINE_TRAINER, cuda=True)
    for name, run in runs.items():
        alone = wanted["adapters, plain" if name.startswith("adapters") else "plain"]
        assert len(run["loss"]) == STEPS
        for key in ("before", "loss", "eval_loss", "best"):
            assert run[key] == pytest.approx(alone[key], rel=1e-4), (name, key)
