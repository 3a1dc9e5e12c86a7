"""Saving and loading: what goes wrong is one CheckpointError on all ranks, and what was saved before is as it was."""

from __future__ import annotations

import copy
import json
import os
import pickle
import resource
import shutil
import struct
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import toy
from layouts import copies, make_engine, own_iterator, specs
from torch import nn
from warm import WarmProcess

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.checkpoint.directory import complete_checkpoints
from parallel3d.checkpoint.read import Reader
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.pipe import PipelineModule

STAGES = {"pipeline": {"stages": 2}}


def engine_of(num_blocks: int = 1, **config: Any) -> Engine:
    options: dict[str, Any] = {"optimizer": "AdamW", "accumulation": 2, **config}
    return make_engine(toy.model(tied=False, num_blocks=num_blocks), **options)


def train(engine: Engine, steps: int = 1, first: int = 0) -> list[float]:
    per_step = 2 * engine.dp_world_size
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(first * per_step, (first + steps) * per_step)])
    return [engine.train_batch(data).item() for _ in range(steps)]


def refusal(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return "nothing was raised"


def names(directory: Path) -> list[str]:
    """What a user finds in a directory of checkpoints."""
    return sorted(path.name for path in directory.iterdir() if path.name not in (".parallel3d", "zero_to_fp32.py"))


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# Damage


def two_checkpoints(directory: str) -> None:
    engine = engine_of(**STAGES)
    train(engine)
    engine.save_checkpoint(directory, tag="good")
    train(engine, first=1)
    engine.save_checkpoint(directory, tag="bad")


def shard_of(path: Path, rank: int = 1) -> Path:
    return path / f"rank{rank:05}-00.safetensors"


def flip_a_value(path: Path) -> None:
    content = bytearray(shard_of(path).read_bytes())
    content[-10] ^= 4
    shard_of(path).write_bytes(content)


def flip_the_header(path: Path) -> None:
    content = bytearray(shard_of(path).read_bytes())
    content[20] ^= 4
    shard_of(path).write_bytes(content)


def cut_short(path: Path) -> None:
    shard_of(path).write_bytes(shard_of(path).read_bytes()[:-1])


def delete(path: Path) -> None:
    shard_of(path).unlink()


def flip_the_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"global_steps": 2', '"global_steps": 3'))


def delete_the_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


class Bomb:
    """An object whose pickle runs code when it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def put_a_pickle(path: Path) -> None:
    """With the sizes and checksums that a manifest of it would have."""
    content = pickle.dumps({"weight": Bomb(path / "executed")})
    content += bytes(-len(content) % 8)
    shard_of(path).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    header = content[: 8 + min(struct.unpack("<Q", content[:8])[0], len(content))]
    manifest["files"][shard_of(path).name] = {"num_bytes": len(content), "header_crc32": zlib.crc32(header)}
    del manifest["crc32"]
    manifest["crc32"] = zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = [flip_a_value, flip_the_header, cut_short, delete, flip_the_manifest, delete_the_manifest, put_a_pickle]


def load_damaged(directory: str) -> dict[str, tuple[str, bool, str | None]]:
    """Return for each damage the message, whether nothing changed, and the path that was loaded instead."""
    engine = engine_of(**STAGES)
    train(engine)
    found = {}
    for damage in DAMAGES:
        place = str(Path(directory) / damage.__name__)
        before = copies(engine.module)
        message = refusal(engine.load_checkpoint, place)
        same = equal(before, copies(engine.module)) and engine.global_steps == 1
        found[damage.__name__] = (message, same, engine.load_checkpoint(place, tag="good")[0])
    return found


def test_damage_is_named_on_all_ranks_with_what_can_be_loaded(run_ranks, tmp_path: Path) -> None:
    run_ranks(2, two_checkpoints, str(tmp_path / "saved"))
    for damage in DAMAGES:
        shutil.copytree(tmp_path / "saved", tmp_path / damage.__name__)
        damage(tmp_path / damage.__name__ / "bad")
    for found in run_ranks(2, load_damaged, str(tmp_path)):
        for name, (message, unchanged, loaded) in found.items():
            path = tmp_path / name / "bad"
            file = path / "manifest.json" if "manifest" in name else shard_of(path)
            assert file.name in message, name
            assert str(path) in message, name
            assert "'good'" in message, name
            assert unchanged, name
            assert loaded == str(tmp_path / name / "good")
    assert not list(tmp_path.rglob("executed"))


# Saves that fail


def fail_to_save(directory: str) -> dict[str, Any]:
    engine = engine_of(**STAGES)
    train(engine)
    engine.save_checkpoint(directory, tag="good")
    found: dict[str, Any] = {}
    if engine.global_rank == 1:  # a disk that is full: no file may grow any further
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    found["full"] = refusal(engine.save_checkpoint, directory, tag="more")
    found["overwriting"] = refusal(engine.save_checkpoint, directory, tag="good")
    if engine.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    found["nowhere"] = refusal(engine.save_checkpoint, "/proc/nowhere", tag="good")
    for empty in (None, ""):
        with pytest.raises(ConfigError, match=f"save_dir is {empty!r}; give a directory"):
            engine.save_checkpoint(empty)
    found["tag"] = refusal(engine.save_checkpoint, directory, tag="../out")
    found["state"] = refusal(engine.save_checkpoint, directory, tag="more", client_state={"a": [1, {2, 3}]})
    found["loads"] = engine.load_checkpoint(directory)[0]
    train(engine, first=1)
    found["saves"] = engine.save_checkpoint(directory, tag="more")
    return found


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_one(run_ranks, tmp_path: Path) -> None:
    for found in run_ranks(2, fail_to_save, str(tmp_path)):
        for case in ("full", "overwriting"):
            assert "rank 1: " in found[case]
            assert "rank00001-00.safetensors can't be written" in found[case]
        assert "/proc/nowhere/good can't be written" in found["nowhere"]
        assert "tag '../out' can't be the name" in found["tag"]
        assert "client_state.a.1 is a builtins.set" in found["state"]
        assert found["loads"] == str(tmp_path / "good")
        assert found["saves"] is True
    assert names(tmp_path) == ["good", "latest", "more"]


def save_on_one_rank(directory: str, alone: int) -> tuple[str, float]:
    engine = engine_of(**STAGES, checkpoint={"timeout_s": 1.0})
    message = refusal(engine.save_checkpoint, directory) if engine.global_rank == alone else ""
    torch.distributed.barrier()
    [loss] = train(engine)  # no harm is done
    engine.save_checkpoint(directory)
    return message, loss


@pytest.mark.parametrize("alone", [0, 1])
def test_a_save_called_on_one_rank_alone_says_so(run_ranks, tmp_path: Path, alone: int) -> None:
    ranks = run_ranks(2, save_on_one_rank, str(tmp_path), alone)
    message, _ = ranks[alone]
    assert f"save_checkpoint: ranks [{1 - alone}] have not come within 1 s" in message
    assert ranks[0][1] == ranks[1][1]
    assert names(tmp_path) == ["global_step1", "latest"]


def save_by_other_tags(directory: str, validation: str) -> tuple[str, list[str]]:
    engine = engine_of(**STAGES, checkpoint={"tag_validation": validation})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            engine.save_checkpoint(directory, tag=f"of{engine.global_rank}")
            message = ""
        except AssertionError as error:  # as DeepSpeed's scripts catch it
            message = str(error)
    return message, [str(w.message) for w in caught if "tag" in str(w.message)]


@pytest.mark.parametrize("validation", ["Ignore", "warn", "FAIL"])
def test_tags_that_differ_are_handled_as_configured(run_ranks, tmp_path: Path, validation: str) -> None:
    ranks = run_ranks(2, save_by_other_tags, str(tmp_path), validation)
    words = "the tag is 'of0' on rank 0 and 'of1' on rank 1"
    assert all((words in message) == (validation == "FAIL") for message, _ in ranks)
    assert [words in str(told) for _, told in ranks] == [validation == "warn", False]
    assert (tmp_path / "of0").is_dir() == (validation != "FAIL")


# Resume


def resume_damaged(directory: str) -> dict[str, Any]:
    """Three checkpoints: of the last the manifest is cut short, of the second one byte of the weights differs."""
    engine = engine_of(**STAGES)
    nothing = engine.resume(directory)
    for _ in range(3):
        train(engine)
        engine.save_checkpoint(directory, client_state={"step": engine.global_steps})
    torch.distributed.barrier()
    if engine.global_rank == 0:
        manifest = Path(directory) / "global_step3" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:300])
        flip(max((Path(directory) / "global_step2").glob("rank00000*")))
    torch.distributed.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = engine_of(**STAGES)
        state = other.resume(directory)
    torch.distributed.barrier()
    if engine.global_rank == 0:
        (Path(directory) / "global_step1" / "manifest.json").unlink()
    torch.distributed.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        none = refusal(engine_of(**STAGES).resume, directory)
    told = [str(w.message) for w in caught if "resume" in str(w.message)]
    return {"nothing": nothing, "state": state, "steps": other.global_steps, "told": told, "none": none}


def flip(path: Path) -> None:
    """Change the last bit of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_resume_warns_of_what_it_passes_over_and_never_begins_anew_by_itself(run_ranks, tmp_path: Path) -> None:
    first, second = run_ranks(2, resume_damaged, str(tmp_path))
    for found in (first, second):
        assert (found["nothing"], found["state"], found["steps"]) == (None, {"step": 1}, 1)
        assert "can be loaded: 'global_step3': " in found["none"]
        assert "to train from the start, use another directory" in found["none"]
    assert second["told"] == []
    last, before = first["told"]
    assert "resume passes over 'global_step3': " in last
    assert "manifest.json is damaged" in last
    assert "resume passes over 'global_step2': " in before
    assert "is not what was written" in before


# What doesn't fit


class Net(nn.Module):
    def __init__(self, width: int, more: bool):
        super().__init__()
        self.up = nn.Linear(4, width)
        self.down = nn.Linear(width, 1)
        if more:
            self.extra = nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.frozen(x)))).square().mean()


def plain(model: nn.Module, optimizer: str = "AdamW", **config: Any) -> Engine:
    whole = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": optimizer, "params": {"lr": 0.1}}, **config}
    return parallel3d.initialize(model=model, config={"steps_per_print": None, **whole})[0]


def fit_badly(directory: str) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = plain(Net(3, more=False))
    engine.train_batch(iter([torch.ones(2, 4)]))
    engine.save_checkpoint(directory, tag="whole")
    engine.save_checkpoint(directory, tag="trained", exclude_frozen_parameters=True)
    found: dict[str, Any] = {}
    other = plain(Net(5, more=True))
    found["other"] = refusal(other.load_checkpoint, directory)
    up = other.module.up.weight.clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other.load_checkpoint(directory, None, False)  # by position, as DeepSpeed's load_module_strict
    found["told"] = [str(w.message) for w in caught]
    found["fitting"] = torch.equal(other.module.down.bias, engine.module.down.bias)
    found["left"] = torch.equal(other.module.up.weight, up)
    other.train_batch(iter([torch.ones(2, 4)]))
    found["sgd"] = refusal(plain(Net(3, more=False), "SGD").load_checkpoint, directory)
    sgd = plain(Net(3, more=False), "SGD")
    found["module only"] = (sgd.load_checkpoint(directory, tag="whole", load_module_only=True)[0], sgd.global_steps)
    found["weights"] = equal(sgd.module.state_dict(), engine.module.state_dict())
    evaluated = parallel3d.initialize(model=Net(3, more=False), config={"train_micro_batch_size_per_gpu": 2})[0]
    evaluated.load_checkpoint(directory, tag="whole")  # it has no optimizer
    found["evaluated"] = equal(evaluated.module.state_dict(), engine.module.state_dict())
    own = Net(3, more=False)
    kept = own.frozen.weight.clone()
    trained = plain(own)
    trained.load_checkpoint(directory, tag="trained")
    found["frozen"] = torch.equal(own.frozen.weight, kept) and torch.equal(own.up.weight, engine.module.up.weight)
    thawed = Net(3, more=False)
    thawed.frozen.requires_grad_(True)
    found["thawed"] = refusal(plain(thawed).load_checkpoint, directory, tag="whole")
    lacking = Net(3, more=False)
    del lacking.frozen
    found["lacking"] = refusal(plain(lacking).load_checkpoint, directory, tag="whole")
    found["nothing"] = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["nothing"] = sgd.load_checkpoint(str(Path(directory) / "empty"))
    found["no latest"] = [str(w.message) for w in caught]
    found["tag"] = refusal(sgd.load_checkpoint, directory, tag="hole")
    return found


def test_what_does_not_fit_is_listed(run_ranks, tmp_path: Path) -> None:
    [found] = run_ranks(1, fit_badly, str(tmp_path))
    for words in (
        "2 missing: model/extra.bias, model/extra.weight",
        "3 of another shape: ",
        "model/up.weight is [3, 4], not [5, 4]",
        "model/down.weight is [1, 3], not [1, 5]",
    ):
        assert words in found["other"]
        assert any(words in line for line in found["told"])
    assert "2 not known to the model: model/frozen.bias, model/frozen.weight" in found["lacking"]
    assert found["fitting"]
    assert found["left"]
    assert "optimizer AdamW, and this engine has SGD" in found["sgd"]
    assert "load_module_only=True" in found["sgd"]
    assert found["module only"] == (str(tmp_path / "whole"), 0)
    assert found["weights"]
    assert found["evaluated"]
    assert found["frozen"]
    assert "optimizer/*/frozen.weight (the optimizer didn't hold it)" in found["thawed"]
    assert found["nothing"] == (None, None)
    assert any("latest" in line for line in found["no latest"])
    assert "hole is not there" in found["tag"]
    assert "Did you mean 'whole'?" in found["tag"]


def freeze_later(directory: str) -> list[bool]:
    """Freeze a layer between two steps, and load the weights where it has been frozen from the start."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 1))

    zero = {"stage": 2, "reduce_bucket_size": 40}
    model = made()
    engine = plain(model, zero_optimization=zero)
    for step in range(2):
        model[0].requires_grad_(step == 0)
        engine.backward(engine(torch.ones(2, 13)).sum())
        engine.step()
    found = []
    for name, is_excluded in (("whole", False), ("trained", True)):
        engine.save_checkpoint(directory, tag=name, exclude_frozen_parameters=is_excluded)
        other = made()
        other[0].requires_grad_(False)
        plain(other, zero_optimization=zero).load_checkpoint(directory, tag=name)
        found.append(equal(other.state_dict(), model.state_dict()))
    return found


def test_what_is_frozen_after_initialize_is_saved_as_trained(run_ranks, tmp_path: Path) -> None:
    assert run_ranks(3, freeze_later, str(tmp_path)) == [[True, True]] * 3


def with_groups(directory: str, saves: bool, joined: bool) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": toy.SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "pipeline": {"stages": torch.distributed.get_world_size()},
        "steps_per_print": None,
    }
    items = specs(toy.model(tied=False, num_blocks=1))
    module = PipelineModule(items, loss_fn=toy.cross_entropy, seed_layers=True, base_seed=1, config=config)
    matrices, vectors = ([p for p in module.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if joined:
        groups = [{"params": [*matrices, *vectors]}]
    engine = parallel3d.initialize(model=module, model_parameters=groups, config=config)[0]
    if saves:
        engine.train_batch(own_iterator(engine, [toy.micro_batch(0)]))
        engine.optimizer.param_groups[1]["lr"] = 0.25
        engine.save_checkpoint(directory)
    elif joined:
        before = copies(engine.module)
        return refusal(engine.load_checkpoint, directory), equal(before, copies(engine.module))
    else:
        engine.load_checkpoint(directory)
        state = engine.optimizer.state
        held = [p for group in engine.optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in state] == [id(p) for p in held if p in state], "in the order in which a step makes it"
        assert len(state) > 2
    return [(group["lr"], group["weight_decay"]) for group in engine.optimizer.param_groups]


def test_parameter_groups_keep_their_settings(run_ranks, tmp_path: Path) -> None:
    wanted = [(0.1, 0.1), (0.25, 0.0)]
    assert run_ranks(2, with_groups, str(tmp_path), True, False) == [wanted] * 2
    assert run_ranks(1, with_groups, str(tmp_path), False, False) == [wanted]
    [(message, unchanged)] = run_ranks(1, with_groups, str(tmp_path), False, True)
    assert "parameter group 0 joins parameters that were saved with different settings" in message
    assert unchanged


def with_a_group_that_joined(directory: str) -> tuple[str, list[str], bool, list[float]]:
    """Save after a layer has joined the optimizer; load without it, in part, and with it."""

    def made() -> tuple[nn.Module, Engine]:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = torch.optim.AdamW(net[0].parameters(), lr=0.1)
        config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
        return net, parallel3d.initialize(model=net, optimizer=optimizer, config=config)[0]

    def step(engine: Engine) -> float:
        loss = engine(torch.ones(2, 4)).square().mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net, engine = made()
        engine.optimizer.add_param_group({"params": net[1].parameters(), "lr": 0.01})
        step(engine)
        engine.save_checkpoint(directory)
        other, loaded = made()
        before = copy.deepcopy(other.state_dict())
        message, unchanged = refusal(loaded.load_checkpoint, directory), equal(before, other.state_dict())
        caught.clear()
        loaded.load_checkpoint(directory, strict=False)
        told = [str(warning.message) for warning in caught]
        loaded.optimizer.add_param_group({"params": other[1].parameters(), "lr": 0.01})
        loaded.load_checkpoint(directory)
    return message, told, unchanged, [step(one) - step(two) for one, two in [(engine, loaded)] * 3]


def test_the_state_of_a_group_that_joined_is_not_lost_in_silence(run_ranks, tmp_path: Path) -> None:
    missing = "2 missing: optimizer/*/1.bias (this engine's optimizer doesn't hold it), optimizer/*/1.weight"
    ranks = run_ranks(2, with_a_group_that_joined, str(tmp_path))
    assert any(missing in line for line in ranks[0][1])
    for message, _, unchanged, gaps in ranks:
        assert missing in message
        assert unchanged
        assert gaps == [0.0] * 3


class Scaled(nn.Linear):
    """Has state that is no tensor, as layers in fp8 have."""

    largest = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = max(self.largest, x.detach().abs().max().item())
        return super().forward(x / self.largest)

    def get_extra_state(self) -> dict[str, float]:
        return {"largest": self.largest}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.largest = state["largest"]


def with_extra_state(directory: str, saves: bool) -> float:
    layers, stages = [parallel3d.LayerSpec(Scaled, 4, 4)] * 2, torch.distributed.get_world_size()
    engine = plain(PipelineModule(layers, num_stages=stages, loss_fn=nn.functional.mse_loss, base_seed=1))
    x = torch.ones(2, 4)
    if saves:
        engine.train_batch(iter([(8 * x, x)]))
        engine.save_checkpoint(directory)
    else:
        engine.load_checkpoint(directory)
    return engine.train_batch(iter([(x, x)])).item()


def test_state_that_is_no_tensor_is_saved_and_loaded(run_ranks, tmp_path: Path) -> None:
    unbroken, _ = run_ranks(2, with_extra_state, str(tmp_path), True)
    assert run_ranks(1, with_extra_state, str(tmp_path), False) == [pytest.approx(unbroken)]


# Saving while training goes on


def save_meanwhile(directory: str) -> dict[str, Any]:
    config = {**STAGES, "checkpoint": {"async_save": True, "keep_last": 2}, "zero_optimization": {"stage": 1}}
    engine = engine_of(**config)
    train(engine)
    began = threading.Event()
    go_on = threading.Event()
    write = parallel3d.checkpoint.save.write_parts

    def slowly(*args: Any) -> Any:
        began.set()
        assert go_on.wait(20)
        return write(*args)

    parallel3d.checkpoint.save.write_parts = slowly
    try:
        engine.save_checkpoint(directory, client_state={"n": np.arange(2)})
        assert began.wait(20)
        unbroken = train(engine, 2, first=1)  # in-place updates of what is being saved
        written = (Path(directory) / "global_step1").exists()
        go_on.set()
        engine.save_checkpoint(directory)  # waits for the first
        first_there = (Path(directory) / "global_step1").exists()
    finally:
        parallel3d.checkpoint.save.write_parts = write
    engine.checkpoints.wait()
    other = engine_of(**config)
    _, client_state = other.load_checkpoint(directory, tag="global_step1")
    again = train(other, 2, first=1)
    other.save_checkpoint(directory, tag="third")
    other.checkpoints.wait()
    place = Path(directory) / "file"
    place.write_text("")
    torch.distributed.barrier()
    early = refusal(other.save_checkpoint, place / "below")
    return {
        "losses": (unbroken, again),
        "written": (written, first_there),
        "client": client_state["n"].tolist() if client_state else None,
        "early": early,
    }


def test_asynchronous_saves_are_of_the_moment_they_were_called(run_ranks, tmp_path: Path) -> None:
    for found in run_ranks(4, save_meanwhile, str(tmp_path)):
        assert found["losses"][0] == found["losses"][1]
        assert found["written"] == (False, True)
        assert found["client"] == [0, 1]
        assert "below/global_step3 can't be written" in found["early"]
    # keep_last is 2
    assert names(tmp_path) == ["file", "global_step3", "latest", "third"]


@pytest.mark.parametrize("fails", [False, True], ids=["saved", "not saved"])
def test_a_script_that_ends_waits_for_what_it_saves_and_fails_if_that_fails(tmp_path: Path, fails: bool) -> None:
    script = tmp_path / "script.py"
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))\n"
    script.write_text(
        "import sys, torch, parallel3d\n"
        "config = {'train_micro_batch_size_per_gpu': 1, 'optimizer': {'type': 'SGD', 'params': {'lr': 1}}}\n"
        "config['checkpoint'] = {'async_save': True}\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(1000, 1000) for _ in range(8)])\n"
        "engine, *_ = parallel3d.initialize(model=model, config=config)\n"
        + limit * fails
        + "engine.save_checkpoint(sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    arguments = ["--num_procs", "1" if fails else "2", str(script), str(tmp_path / "saved")]
    ended = WarmProcess(tmp_path, environment, "forked_ranks", "parallel3d.launcher", *arguments)
    _, errors = ended.communicate(timeout=100)
    assert ended.returncode == int(fails), errors
    assert ("parallel3d: exit code 1, as the last checkpoint was not saved: rank 0: " in errors) == fails
    if fails:
        assert complete_checkpoints(tmp_path / "saved") == []
        return
    assert (tmp_path / "saved" / "latest").read_text() == "global_step0"
    [found] = complete_checkpoints(tmp_path / "saved")
    assert list(Reader(found.path).verify_all()) == []


def fail_meanwhile(directory: str) -> tuple[list[str], list[str]]:
    engine = engine_of(**STAGES, checkpoint={"async_save": True})
    train(engine)
    if engine.global_rank == 1:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # told at once, too
        engine.save_checkpoint(directory)
        waited = refusal(engine.checkpoints.wait)
        engine.save_checkpoint(directory)
        at_next = refusal(engine.save_checkpoint, directory)
    if engine.global_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    engine.save_checkpoint(directory)
    return [waited, at_next], [refusal(engine.checkpoints.wait)]


def test_an_asynchronous_save_that_failed_is_told_at_the_next_call(run_ranks, tmp_path: Path) -> None:
    for told, fine in run_ranks(2, fail_meanwhile, str(tmp_path)):
        assert all("rank 1: " in line and "rank00001-00.safetensors can't be written" in line for line in told)
        assert fine == ["nothing was raised"]
    assert names(tmp_path) == ["global_step1", "latest"]
