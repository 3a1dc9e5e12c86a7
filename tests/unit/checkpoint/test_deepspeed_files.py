"""DeepSpeed's own checkpoints are read bit for bit, and what can't be read exactly is refused by name.

The files and what is expected of them were written by DeepSpeed; tests/data/deepspeed-0.19.8/write.py is the script.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from parallel3d.checkpoint.deepspeed import read_deepspeed
from parallel3d.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from parallel3d.errors import CheckpointError

SAVED = Path(__file__).parents[2] / "data" / "deepspeed-0.19.8"
# Those whose numbers DeepSpeed's own functions don't return -> a run with the same numbers.
TWINS = {"zero0-fused-bf16": "zero0-bf16", "zero2-round-robin": "zero2-bf16"}
NAMES = sorted(path.name for path in SAVED.iterdir() if path.is_dir() and path.name != "__pycache__")


def expected(name: str) -> dict[str, Tensor]:
    """What DeepSpeed returned, by this package's names."""
    found = load_file(SAVED / TWINS.get(name, name) / "expected.safetensors")
    if not name.startswith("pipe"):
        return found
    renamed = {}
    for key, value in found.items():
        kind, _, own = key.rpartition("/")
        renamed[f"{kind}/layers.{own.replace('tied_modules.io', '0')}"] = value
    return renamed


def check(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", NAMES)
def test_weights_masters_and_moments_are_read_bitwise(name: str):
    whole = read_deepspeed(SAVED / name / "global_step2")
    steps = {key: value for key, value in whole.tensors.items() if key.startswith("optimizer/step/")}
    check({key: value for key, value in whole.tensors.items() if key not in steps}, expected(name))
    # DeepSpeed's optimizer for bf16 without ZeRO makes its state by a step with gradients of zero.
    assert {float(value) for value in steps.values()} == {
        3.0 if name.startswith("zero0") and name.endswith("bf16") else 2.0
    }
    trained = {key.split("/")[2] for key in steps}
    assert {name for groups in whole.groups for group in groups for name in group["names"]} == trained
    assert {group["settings"]["weight_decay"] for groups in whole.groups for group in groups} == {0.1, 0.0}
    assert whole.optimizer == "AdamW"
    assert whole.counters["global_steps"] == 2
    assert whole.lr_scheduler == {"last_batch_iteration": 1}
    assert whole.client_state == {"epoch": 3}


@pytest.mark.parametrize("name", ["zero0-bf16", "zero3-bf16", "pipe-zero1-bf16", "tp2-zero1-bf16"])
def test_fp32_weights_are_the_masters(name: str):
    wanted = {key.removeprefix("master/"): value for key, value in expected(name).items() if key.startswith("master/")}
    found = get_fp32_state_dict_from_zero_checkpoint(SAVED / name, exclude_frozen_parameters=True)
    assert found.keys() - {"tied.weight", "scale", "layers.5.scale"} == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())


def copied(name: str, path: Path) -> Path:
    shutil.copytree(SAVED / name / "global_step2", path)
    return path


def rewritten(path: Path, change: Any) -> None:
    content = torch.load(path, weights_only=True)
    change(content)
    torch.save(content, path)


def test_tensor_parallel_weights_need_to_say_how(tmp_path: Path):
    path = copied("tp2-zero1-bf16", tmp_path / "tag")
    fused = [{"patterns": ["^up"], "shape": (2, -1), "partition_dim": 0}]
    rewritten(
        path / "mp_rank_00_model_states.pt",
        lambda states: states["universal_checkpoint_info"].update(parameter_with_sub_params=fused),
    )
    with pytest.raises(CheckpointError, match=r"shards up.* in a way that is not read here"):
        read_deepspeed(path)
    rewritten(path / "mp_rank_00_model_states.pt", lambda states: states.pop("universal_checkpoint_info"))
    with pytest.raises(CheckpointError, match=r"sharded over 2 tensor-parallel ranks.*client_state"):
        read_deepspeed(path)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/parallel3d-was-here",)


@pytest.mark.parametrize("file", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_nothing_in_a_file_is_executed(tmp_path: Path, file: str):
    path = copied("zero2-bf16", tmp_path / "tag")
    torch.save({"module": Bomb()}, path / file)
    with pytest.raises(CheckpointError, match=rf"{file} can't be read.*system"):
        read_deepspeed(path)
    assert not Path("/tmp/parallel3d-was-here").exists()


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        (
            "zero2-bf16",
            "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "1 of optimizer states.*copy the files of all nodes",
        ),
        ("zero3-bf16", "zero_pp_rank_1_mp_rank_00_model_states.pt", "1 files of model states"),
        ("pipe-zero0-fp32", "mp_rank_01_model_states.pt", "1 model-parallel ranks of 2"),
        ("pipe-zero1-bf16", "layer_02-model_states.pt", "masters of 2.bias, but not its weights"),
        ("pipe-zero1-bf16", "layer_00-model_states.pt", "no layer_.*tied_modules.io.weight"),
    ],
)
def test_a_missing_file_is_named(tmp_path: Path, name: str, file: str, message: str):
    path = copied(name, tmp_path / "tag")
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=message):
        read_deepspeed(path)


def test_states_without_names_are_not_guessed(tmp_path: Path):
    """Without ZeRO in fp32, a parameter that isn't trained can't be told from one that is."""
    path = copied("zero0-fp32", tmp_path / "tag")
    rewritten(path / "mp_rank_00_model_states.pt", lambda states: states["module"].update(frozen2=torch.ones(5)))
    with pytest.raises(CheckpointError, match=r"whose the optimizer's states are.*--weights-only"):
        read_deepspeed(path)
    whole = read_deepspeed(path, weights_only=True)
    assert {key.split("/")[0] for key in whole.tensors} == {"model"}
