"""Checkpoints of DeepSpeed's and torch's are imported, training continues as in plain PyTorch, and they are exported again."""

from __future__ import annotations

import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import parallel3d
from parallel3d.checkpoint import Reader
from parallel3d.cli import main
from parallel3d.deepspeed.utils import zero_to_fp32
from parallel3d.errors import CheckpointError
from parallel3d.pipe import LayerSpec, PipelineModule, TiedLayerSpec

SAVED = Path(__file__).parents[1] / "data" / "deepspeed-0.19.8"
sys.path.insert(0, str(SAVED))
import models  # noqa: E402 (next to the checkpoints)

STEPS = 2
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10}},
    "steps_per_print": None,
}
Weights = dict[str, Tensor]


def ours(name: str, model: nn.Module, stages: int, directory: str) -> tuple[Any, ...]:
    """Load, train two steps, save; what was loaded."""
    config = {**CONFIG, "zero_optimization": {"stage": 2 if stages == 1 else 1}}
    optimizer = torch.optim.AdamW(models.groups(model), lr=1.0)
    engine, *_ = parallel3d.initialize(model=model, optimizer=optimizer, config=config)
    path, client_state = engine.load_checkpoint(str(Path(directory) / name))
    loaded = Path(str(path)).name, client_state, engine.global_steps, round(engine.get_lr()[0], 9)
    for step in range(models.STEPS, models.STEPS + STEPS):
        replica = engine.grid.get_data_parallel_rank() if stages > 1 else torch.distributed.get_rank()
        inputs = models.samples(step, replica, torch.float32)
        if stages > 1:
            engine.train_batch(iter([inputs]))
        else:
            engine.backward(engine(*inputs))
            engine.step()
    engine.save_checkpoint(str(Path(directory) / f"{name}-trained"))
    return loaded


def train_module(directory: str) -> tuple[Any, ...]:
    return ours("zero2-bf16", models.Net(), 1, directory)


def train_pipeline(directory: str) -> tuple[Any, ...]:
    layers = models.layers(True, LayerSpec, TiedLayerSpec)
    loss = nn.functional.mse_loss
    return ours("pipe-zero1-bf16", PipelineModule(layers, num_stages=2, loss_fn=loss), 2, directory)


class Pipeline(nn.Module):
    """The layers of the pipeline in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.io = nn.Linear(3, 5, bias=False)
        self.first, self.second, self.scale = nn.LayerNorm(5), nn.LayerNorm(3), models.Scale()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(self.io(x).tanh()) @ self.io.weight
        return nn.functional.mse_loss(self.scale(self.second(hidden)), y)


PLAIN_NAMES = {"tied_modules.io": "io", "2": "first", "4": "second", "5": "scale"}


def plain(name: str, model: nn.Module, names: dict[str, str]) -> tuple[Weights, Weights]:
    """Weights and moments after two more steps of two replicas in plain PyTorch, from what DeepSpeed's functions returned."""
    saved = load_file(SAVED / name / "expected.safetensors")
    for old, new in names.items():
        saved = {key.replace(f"/{old}.", f"/{new}."): value for key, value in saved.items()}
    optimizer = torch.optim.AdamW(models.groups(model), lr=1.0)
    with torch.no_grad():
        for key, parameter in (*model.named_parameters(), *model.named_buffers()):
            parameter.copy_(saved.get(f"master/{key}", saved[f"model/{key}"]))
            if parameter.requires_grad:
                moments = {moment: saved[f"optimizer/{moment}/{key}"] for moment in ("exp_avg", "exp_avg_sq")}
                optimizer.state[parameter] = {"step": torch.tensor(float(models.STEPS)), **moments}
    for step in range(models.STEPS, models.STEPS + STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * math.log(step) / math.log(10)
        optimizer.zero_grad()
        for replica in range(2):
            (model(*models.samples(step, replica, torch.float32)) / 2).backward()
        optimizer.step()
    weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
    return weights, {key: optimizer.state[p]["exp_avg_sq"] for key, p in model.named_parameters() if p.requires_grad}


def check_close(found: Reader, wanted: tuple[Weights, Weights], names: dict[str, str]) -> None:
    for prefix, values in zip(("model", "optimizer/exp_avg_sq"), wanted, strict=True):
        for key, value in values.items():
            head, _, rest = key.partition(".")
            torch.testing.assert_close(
                found.read(f"{prefix}/{names.get(head, head)}.{rest}"), value, rtol=1e-6, atol=1e-7
            )


@pytest.fixture(scope="module")
def trained(rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSpeed's checkpoints imported, and trained on: at dp2 with ZeRO-2, and at pp2 x dp2 with ZeRO-1."""
    path = tmp_path_factory.mktemp("imported")
    for name in ("zero2-bf16", "pipe-zero1-bf16"):
        assert main(["ckpt", "import", str(SAVED / name), str(path / name)]) == 0
    lr = round(0.01 * math.log(2) / math.log(10), 9)
    for function, ranks in ((train_module, 2), (train_pipeline, 4)):
        for loaded in rank_pool.run(ranks, function, str(path)):
            assert loaded == ("global_step2", {"epoch": 3}, 2, lr)
    return path


def test_training_continues_as_in_plain_pytorch(trained: Path):
    found = Reader(trained / "zero2-bf16-trained" / "global_step4")
    check_close(found, plain("zero2-bf16", models.Net(), {}), {})
    found = Reader(trained / "pipe-zero1-bf16-trained" / "global_step4")
    ours_of = {"io": "layers.0", "first": "layers.2", "second": "layers.4", "scale": "layers.5"}
    check_close(found, plain("pipe-zero1-bf16", Pipeline(), PLAIN_NAMES), ours_of)


def load_wrong(directory: str) -> list[str]:
    """The errors of other models and of a directory that wasn't imported; the weights stay as they were."""
    errors = []
    engine, *_ = parallel3d.initialize(
        model=models.Halves(), config={**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    )
    before = [p.detach().clone() for p in engine.module.parameters()]
    for place in (Path(directory) / "zero2-bf16", SAVED / "zero2-bf16"):
        try:
            engine.load_checkpoint(str(place))
        except CheckpointError as error:
            errors.append(str(error))
    assert all(map(torch.equal, before, engine.module.parameters()))
    return errors


def test_another_model_and_other_files_are_refused_with_a_remedy(
    trained: Path, rank_pool: Any, capsys: pytest.CaptureFixture[str]
):
    for wrong_model, not_imported in rank_pool.run(2, load_wrong, str(trained)):
        assert "doesn't fit the model: 4 missing: model/down.bias" in wrong_model
        assert "model/first.weight" in wrong_model
        assert f"`p3d ckpt import {SAVED}/zero2-bf16/global_step2 DIRECTORY`" in not_imported
    assert main(["ckpt", "import", str(trained / "zero2-bf16"), str(trained / "x")]) == 2
    assert "holds no checkpoint of DeepSpeed's or torch.distributed.checkpoint's" in capsys.readouterr().err


def test_zero_to_fp32_gives_masters_of_both(trained: Path, tmp_path: Path):
    wanted = load_file(SAVED / "zero2-bf16" / "expected.safetensors")
    masters = {key.removeprefix("master/"): value for key, value in wanted.items() if key.startswith("master/")}
    others = {key.removeprefix("model/"): value.float() for key, value in wanted.items() if key.startswith("model/")}
    for place, buffers in ((SAVED, {"scale"}), (trained, set())):
        found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(place / "zero2-bf16")
        assert found.keys() == others.keys() | {"tied.weight"}
        assert all(torch.equal(found[name], value) for name, value in {**others, **masters}.items())
        own = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(place / "zero2-bf16", None, True)
        assert own.keys() == masters.keys() | {"tied.weight"} | buffers
        model = zero_to_fp32.load_state_dict_from_zero_checkpoint(models.Net(), place / "zero2-bf16", "global_step2")
        assert all(torch.equal(p, {**others, **masters}[name]) for name, p in model.named_parameters())
        output = tmp_path / place.name
        zero_to_fp32.main([str(place / "zero2-bf16"), str(output)])
        written = torch.load(output / "pytorch_model.bin", weights_only=True)
        assert all(torch.equal(written[name], value) for name, value in found.items())
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            place / "zero2-bf16", output, 100, safe_serialization=True
        )
        assert (output / "model.safetensors.index.json").is_file()
    again = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(trained / "zero2-bf16-trained")  # an engine saved it
    assert again.keys() == found.keys()
    assert torch.equal(again["tied.weight"], again["first.weight"])


def flattened(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optimizer": state}


def test_dcp_is_read_by_torch_and_comes_back(trained: Path, tmp_path: Path):
    source, exported = trained / "zero2-bf16" / "global_step2", tmp_path / "step-2"
    assert main(["ckpt", "export", str(source), str(exported), "--format", "dcp"]) == 0
    model = models.Net()
    optimizer = torch.optim.AdamW(models.groups(model), lr=1.0)
    state = flattened(model, optimizer)
    dcp.load(state, checkpoint_id=exported, no_dist=True)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    wanted = load_file(SAVED / "zero2-bf16" / "expected.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted.get(f"master/{name}", wanted[f"model/{name}"]).float()), name
        if parameter.requires_grad:
            assert torch.equal(optimizer.state[parameter]["exp_avg"], wanted[f"optimizer/exp_avg/{name}"])
            assert optimizer.state[parameter]["step"] == 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]

    # What torch saves of that model comes back, with the names of FSDP and with torchtitan's.
    whole = flattened(model, optimizer)
    for place, content in (("fsdp", whole), ("titan", {**whole["model"], "optimizer": whole["optimizer"]})):
        dcp.save(content, checkpoint_id=tmp_path / place, no_dist=True)
        assert main(["ckpt", "import", str(tmp_path / place), str(tmp_path / "ours")]) == 0
        found, before = Reader(tmp_path / "ours" / place), Reader(source)
        names = {name for name in before.tensors if not name.startswith("master/")}
        assert found.tensors.keys() == names | {"model/tied.weight"}
        for name in names:
            master = name.replace("model/", "master/")
            assert torch.equal(found.read(name), before.read(master if master in before.tensors else name).float()), (
                name
            )
        assert found.manifest.state["counters"]["global_steps"] == 2


def save_sharded(directory: str) -> dict[str, Any]:
    """Train a step with FSDP, save its shards, and return the whole state."""
    from torch.distributed.fsdp import fully_shard  # it takes a second to import

    torch.manual_seed(0)
    model = models.Halves()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(*models.samples(0, torch.distributed.get_rank(), torch.float32)).backward()
    optimizer.step()
    dcp.save(flattened(model, optimizer), checkpoint_id=directory)
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    return {**{f"model/{k}": v for k, v in weights.items()}, **state}


def test_shards_of_fsdp_are_joined(rank_pool: Any, tmp_path: Path):
    wanted = rank_pool.run(2, save_sharded, str(tmp_path / "shards"))[0]
    assert main(["ckpt", "import", str(tmp_path / "shards"), str(tmp_path / "ours")]) == 0
    found = Reader(tmp_path / "ours" / "shards")
    for name in found.tensors:
        _, key, parameter = name.split("/") if name.startswith("optimizer") else ("", "", "")
        assert torch.equal(found.read(name), wanted[f"state.{parameter}.{key}" if key else name]), name
    assert len(found.tensors) == 4 * 6


@pytest.mark.parametrize("names", [["model.layers.0.up.weight", "lm_head.weight"], ["model.layers.0.up.weight"]])
def test_names_of_hugging_face_keep_their_prefix_in_dcp(tmp_path: Path, names: list[str]):
    weights = {name: torch.full((2,), float(k)) for k, name in enumerate(names)}
    for place, content in (("flat", weights), ("wrapped", {"model": weights})):
        dcp.save(content, checkpoint_id=tmp_path / place, no_dist=True)
        assert main(["ckpt", "import", str(tmp_path / place), str(tmp_path / "ours")]) == 0
        found = Reader(tmp_path / "ours" / place)
        assert found.tensors.keys() == {f"model/{name}" for name in names}
        assert all(torch.equal(found.read(f"model/{name}"), weight) for name, weight in weights.items())


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return torch.load, ("/dev/null",)


def test_damaged_files_of_dcp_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dcp.save({"model": {"a": torch.ones(2)}, "head": torch.ones(1)}, checkpoint_id=tmp_path / "bad", no_dist=True)
    assert main(["ckpt", "import", str(tmp_path), str(tmp_path / "ours"), "--tag", "bad"]) == 2
    assert "has weights model.* and 'head'" in capsys.readouterr().err
    (tmp_path / "bad" / "__0_0.distcp").unlink()
    assert main(["ckpt", "import", str(tmp_path / "bad"), str(tmp_path / "ours")]) == 2
    assert "__0_0.distcp" in capsys.readouterr().err
    (tmp_path / "bad" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    assert main(["ckpt", "import", str(tmp_path / "bad"), str(tmp_path / "ours")]) == 2
    assert "it names torch.serialization.load" in capsys.readouterr().err
