"""PipelineTrainer: a model in stages and slices has the numbers of a plain Trainer on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trainer_runs import STEPS, accelerate_launch, configuration, run_jobs, torchrun

CPU = {"device": "cpu"}
# What writes the configuration, or None for a plain Trainer; the number of replicas; options of pipeline_trainer_runs.train.
Case = tuple[dict[str, Any] | None, int, dict[str, Any]]


def case(stages: int, tensor_ranks: int, zero: dict[str, Any], replicas: int = 1, **options: Any) -> Case:
    layout = {"pipeline": {"stages": stages}, "tensor_parallel": {"size": tensor_ranks}}
    return configuration(zero, **layout, **options.pop("config", {})), replicas, options


GROUPED = {"train_sampling_strategy": "group_by_length"}  # draws the order from torch's own generator
PLAIN: dict[str, Case] = {
    "plain": (None, 1, {"again": True}),
    "adapters, plain": (None, 1, {"adapts": True}),
    "grouped plain": (None, 1, {"arguments": GROUPED}),
}
# It says nothing of gradient_clipping, as in docs/huggingface.md.
SHORT = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
ON_ONE: dict[str, Case] = {
    "short": ({**SHORT, "zero_optimization": {"stage": 1}, "pipeline": {"stages": 1}}, 1, {}),
    "grouped": case(1, 1, {"stage": 0}, arguments=GROUPED),
    "grouped, resumed": case(1, 1, {"stage": 0}, resumes=True, arguments=GROUPED),
}
REFUSED = {
    "label_smoothing_factor": 0.1,
    "average_tokens_across_devices": False,
    "auto_find_batch_size": True,
    "neftune_noise_alpha": 5.0,  # with the two tensor-parallel ranks
}
REFUSING: dict[str, Case] = {
    "refused": case(1, 2, {"stage": 1}, arguments=REFUSED),
    "refused model": case(1, 1, {"stage": 1}, unshifted=True),
}
ON_TWO: dict[str, Case] = {
    "pp2": case(2, 1, {"stage": 1}),  # its configuration is in a file
    "dp2": case(1, 1, {"stage": 2}, 2, again=True, shifted=True),
    "pp2, resumed in tp2": case(
        1,
        2,
        {"stage": 0},
        resumes=True,
        again=True,
        arguments={"gradient_checkpointing": True},
        config={"train_batch_size": 8},
    ),
}
REFUSED_ON_TWO: dict[str, Case] = {"refused batch": case(2, 1, {"stage": 0}, config={"train_batch_size": 16})}
ON_FOUR: dict[str, Case] = {
    "pp2dp2": case(2, 1, {"stage": 2, "offload_optimizer": CPU}, 2),
    "pp2dp2, resumed in pp2tp2": case(2, 2, {"stage": 0}, resumes=True, arguments={"gradient_checkpointing": True}),
    "pp2dp2, resumed in pp2dp2 with zero3": case(2, 1, {"stage": 3}, 2, resumes=True, again=True),
    "adapters in pp2tp2": case(2, 2, {"stage": 1}, adapts=True),
    "adapters in pp2dp2 with zero3": case(2, 1, {"stage": 3}, 2, adapts=True),
}


def run(directory: Path) -> dict[str, Any]:
    config, replicas, options = ON_TWO["pp2"]
    two = {**REFUSED_ON_TWO, **ON_TWO, "pp2": (None, replicas, options)}
    jobs = (
        (accelerate_launch(directory, config), two, ()),
        (torchrun(1), {**PLAIN, **ON_ONE, **REFUSING}, ()),
        (torchrun(4), ON_FOUR, ()),
    )
    return {name: found for runs in run_jobs(directory, "pipeline_trainer_runs", *jobs) for name, found in runs.items()}


@pytest.fixture(scope="module")
def found(made_once: Any) -> tuple[Path, dict[str, Any]]:
    return made_once("pipelines", run)


def check(directory: Path, runs: dict[str, Any], name: str) -> None:
    """Compare a training, and the model that it saved last, with the plain one's."""
    plain, file = "plain", "model.safetensors"
    if name.startswith("adapters"):
        plain, file = "adapters, plain", "adapter_model.safetensors"
    if name.startswith("grouped"):
        plain = "grouped plain"
    assert len(runs[plain]["loss"]) == len(runs[plain]["grad_norm"]) == STEPS
    for key, values in runs[name].items():
        assert values == pytest.approx(runs[plain][key], rel=1e-5), key
    own, whole = (load_file(directory / run.partition(",")[0] / "saved" / file) for run in (name, plain))
    assert own.keys() == whole.keys()
    for key, weight in whole.items():
        assert own[key].numpy() == pytest.approx(weight.numpy(), abs=1e-5), key


@pytest.mark.parametrize("name", [*ON_ONE, *ON_TWO, *ON_FOUR])
def test_a_training_is_that_of_one_process(found: tuple[Path, dict[str, Any]], name: str):
    check(*found, name)


def test_what_would_give_other_numbers_is_refused(found: tuple[Path, dict[str, Any]]):
    error = found[1]["refused"]["error"]
    assert all(name in error for name in REFUSED)
    assert "BartForCausalLM, whose loss compares each position with its own" in found[1]["refused model"]["error"]
    batch = found[1]["refused batch"]["error"]
    assert "16 != 2 x 4 x 1 = 8. Set train_batch_size to 8" in batch
