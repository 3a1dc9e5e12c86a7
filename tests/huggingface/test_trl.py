"""TRL's trainers with `deepspeed=`: the numbers are those of their training with DDP."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_runs import configuration, run_job

CPU = {"device": "cpu"}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "stage 2": configuration({"stage": 2, "offload_optimizer": CPU}),
    "stage 3": configuration({"stage": 3}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_job(tmp_path_factory.mktemp("trl"), "trl_runs", CONFIGS)


@pytest.mark.parametrize("kind", ["sft", "lora", "dpo", "grpo"])
@pytest.mark.parametrize("name", ["stage 2", "stage 3"])
def test_a_training_is_that_of_ddp(found: dict[str, Any], kind: str, name: str):
    own, wanted = found[f"{kind}, {name}"], found[f"{kind}, ddp"]
    assert len(wanted["loss"]) == len(wanted["norm"]) == 3
    assert own["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert own["norm"] == pytest.approx(wanted["norm"], rel=1e-5)
