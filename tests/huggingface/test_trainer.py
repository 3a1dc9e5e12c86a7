"""Hugging Face's Trainer with `deepspeed=`: the numbers are those of its training with DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trainer_runs import NOT_RESUMED, SAVED, STEPS, accelerate_launch, configuration, run_jobs, torchrun

CPU = {"device": "cpu"}
OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": dict.fromkeys(("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "ddp": None,
    "stage 0": configuration({"stage": 0}),
    "stage 1": configuration({"stage": 1}),
    "stage 1, autotp": configuration({"stage": 1}, tensor_parallel={"autotp_size": 2}),
    "stage 2, offload": configuration({"stage": 2, "offload_optimizer": CPU}),
    "stage 3": configuration({"stage": 3}),
    "stage 3, offload": configuration({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}),
    "stage 2, its optimizer": configuration({"stage": 2}, optimizer=OPTIMIZER),
    "rates, ddp": None,
    "rates, its scheduler": configuration({"stage": 2}, scheduler=SCHEDULER),
    "rates, its optimizer and scheduler": configuration({"stage": 2}, optimizer=OPTIMIZER, scheduler=SCHEDULER),
    "memory, ddp": None,
    "memory, stage 2": configuration({"stage": 2}),
    "twice, ddp": None,
    "twice, stage 1": configuration({"stage": 1}),
    "twice, stage 3": configuration({"stage": 3}),
    "adapters, ddp": None,
    "adapters, stage 2": configuration({"stage": 2}),
    "adapters, stage 3": configuration({"stage": 3, "offload_param": CPU}),
}


# Without --full: other cases have each setting of these in another company.
FULL_ONLY = ("stage 3", "stage 2, its optimizer", "rates, its scheduler", "twice, stage 1", "adapters, stage 2")
NOT_RESUMED_BUT_FULL = ("ddp", "adapters, ddp", "stage 0", *FULL_ONLY)
RESUMED_ALONE = ("stage 1", "stage 3, offload", "adapters, stage 3")


def alike(name: str) -> str:
    """The training with DDP that has the same numbers."""
    kind = name.partition(",")[0]
    return f"{kind}, ddp" if f"{kind}, ddp" in CONFIGS else "ddp"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full, test = metafunc.config.getoption("full"), metafunc.function
    if test is test_a_training_is_that_of_ddp:
        trained = [name for name, config in CONFIGS.items() if config is not None]
        metafunc.parametrize("name", [name for name in trained if full or name not in FULL_ONLY])
    elif test is test_a_resumed_training_ends_as_one_without_a_break:
        resumed = [name for name in CONFIGS if not name.startswith(NOT_RESUMED)]
        cases = [(name, "") for name in resumed if full or name not in NOT_RESUMED_BUT_FULL]
        metafunc.parametrize(("name", "by"), [*cases, *((name, " by one rank") for name in RESUMED_ALONE)])


@pytest.fixture(scope="module")
def found(made_once: Any, full: bool) -> tuple[Path, dict[str, Any]]:
    """What two ranks did with each configuration, and one with some."""
    left_out = () if full else NOT_RESUMED_BUT_FULL
    configs = {name: config for name, config in CONFIGS.items() if full or name not in FULL_ONLY}

    def run(directory: Path) -> dict[str, Any]:
        resumed = {name: CONFIGS[name] for name in RESUMED_ALONE}
        jobs = (torchrun(2), configs, left_out), (torchrun(1), resumed, ())
        runs, alone = run_jobs(directory, "trainer_runs", *jobs)
        return runs | {f"{name} by one rank": run for name, run in alone.items()}

    return made_once("trainer", run)


def test_a_training_is_that_of_ddp(found: tuple[Path, dict[str, Any]], name: str):
    directory, runs = found
    wanted = runs[alike(name)]
    assert len(wanted["loss"]) == len(wanted["norm"]) == STEPS
    for key in ("loss", "norm", "eval", "best"):
        assert runs[name][key] == pytest.approx(wanted[key], rel=1e-5), key
    if "its" in name:  # a schedule that the engine steps has already gone on when the Trainer logs
        assert runs[name]["rate"][:-1] == pytest.approx(wanted["rate"][1:])
    else:
        assert runs[name]["rate"] == pytest.approx(wanted["rate"])
    assert runs[name]["states"] == [1]  # those of earlier engines are freed
    file = "adapter_model.safetensors" if name.startswith("adapters") else "model.safetensors"
    own, others = (load_file(directory / run / "saved" / file) for run in (name, alike(name)))
    assert own.keys() == others.keys()
    for key, weight in others.items():
        assert own[key].numpy() == pytest.approx(weight.numpy(), abs=1e-5), key


def test_a_resumed_training_ends_as_one_without_a_break(found: tuple[Path, dict[str, Any]], name: str, by: str):
    _, runs = found
    own, whole = runs[f"{name}, resumed{by}"], runs[alike(name)]
    assert len(own["loss"]) == STEPS  # the log goes on from the checkpoint's
    assert own["loss"][SAVED:] == pytest.approx(whole["loss"][SAVED:], rel=1e-5)
    assert own["eval"] == pytest.approx(whole["eval"], rel=1e-5)
    assert own["best"] == pytest.approx(whole["best"], rel=1e-5)


@pytest.fixture
def found_by_accelerate(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a loop of accelerate's found with DDP, and launched with a DeepSpeed configuration in a file."""
    config = configuration({"stage": 2}, gradient_accumulation_steps=2, gradient_clipping=1.0)
    launchers = torchrun(2), accelerate_launch(tmp_path, config)
    wanted, own = run_jobs(tmp_path, "accelerate_runs", *((launcher, {}, ()) for launcher in launchers))
    return wanted, own


def test_a_loop_of_accelerate_is_that_of_ddp(found_by_accelerate: tuple[dict[str, Any], dict[str, Any]]):
    wanted, own = found_by_accelerate
    assert (wanted.pop("type"), own.pop("type")) == ("MULTI_CPU", "DEEPSPEED")
    assert len(wanted["norm"]) == 2
    for key, values in wanted.items():
        assert own[key] == pytest.approx(values, rel=1e-5), key
