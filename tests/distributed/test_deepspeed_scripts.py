"""Scripts written for DeepSpeed run with another import line, under both launchers, and learn as plain PyTorch does."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import math
import os
import random
import re
import runpy
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from fault_ranks import FaultRanks
from torch import nn
from warm import WarmProcess, run_launcher, run_script

import parallel3d as deepspeed
from parallel3d.cli.deepspeed import write_wheel

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
OURS = [sys.executable, "-m", "parallel3d.launcher", "--num_procs"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"]
# Of a launcher: without Python's start, for ranks that need not import torch.
FORKED = slice(2, None)
WARM: list[str] = []  # no launcher: ranks with the environment that one gives, from a process that has imported torch
SCRIPT_SEED, ORDER_SEED = 1138, 1234  # the scripts' --seed; the configuration's own default


def run(folder: Path, launcher: list[str], ranks: int, name: str, config: Path, *arguments: str) -> str:
    """Run a script. Return what it printed: of the first rank if there is no launcher."""
    script = [str(EXAMPLES / f"{name}.py"), "--deepspeed_config", str(config), *arguments]
    if not launcher:
        ended = FaultRanks().run(ranks, folder, run_script, *script, timeout=200)
        assert ended.codes == [0] * ranks, ended.outputs
        return ended.outputs[0]
    if launcher[0] != sys.executable:
        return run_launcher(ROOT, *launcher, str(ranks), *script)
    done = subprocess.run([*launcher, str(ranks), *script], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batches(data: Any, size: int, epochs: int, shuffled: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the samples of each step, over all ranks."""
    shuffle = torch.Generator()
    orders = [torch.randperm(len(data), generator=shuffle.manual_seed(ORDER_SEED + epoch)) for epoch in range(epochs)]
    orders = orders if shuffled else [torch.arange(len(data))] * epochs
    return [(data.images[part], data.labels[part]) for order in orders for part in order.split(size)]


@pytest.mark.parametrize("name", ["deepspeed_pipeline", "deepspeed_plain"])
def test_only_the_import_line_tells_it_from_a_deepspeed_script(name: str):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    tree.body = tree.body[1:]  # the docstring says how to start it
    lines = [line for line in ast.unparse(tree).splitlines() if "parallel3d" in line]
    assert lines == ["import parallel3d as deepspeed"]


STEPS = 40


@cache
def pipeline_losses(shuffled: bool) -> list[float]:
    """Plain PyTorch's, of whole batches."""
    module, config = example("deepspeed_pipeline"), json.loads((EXAMPLES / "deepspeed_pipeline.json").read_text())
    torch.manual_seed(SCRIPT_SEED)
    net = module.SmallAlexNet()
    optimizer = torch.optim.Adam(net.parameters(), **config["optimizer"]["params"])
    losses = []
    for images, labels in batches(module.Pictures(2048), config["train_batch_size"], 2, shuffled)[:STEPS]:
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_script_of_the_pipeline_tutorials_base_line(tmp_path: Path, full: bool):
    """Started by torchrun, or by a Python of its own, it is only with --full."""
    launcher = TORCHRUN if full else WARM
    arguments = ["-s", str(STEPS), "-p", "0", "--backend", "gloo"]
    out = run(tmp_path, launcher, 2, "deepspeed_pipeline", EXAMPLES / "deepspeed_pipeline.json", *arguments)
    found = [float(loss) for loss in re.findall(rf"step: +\d+ / +{STEPS} loss: ([\d.]+)", out)]
    assert found == pytest.approx(pipeline_losses(shuffled=True), abs=2e-3)
    assert sum(found[-5:]) < 0.9 * sum(found[:5])


# The imports of the pipeline tutorial's script, instead of the example's single one.
IMPORTS = """import deepspeed
import deepspeed.comm as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import RepeatingLoader"""


def test_the_tutorials_script_runs_unchanged_where_the_package_is_deepspeed(tmp_path: Path, full: bool):
    """Started by the command deepspeed, which passes --local_rank; on four ranks only with --full."""
    source = (EXAMPLES / "deepspeed_pipeline.py").read_text().replace("import torch.distributed as dist\n", "")
    source = source.replace("import parallel3d as deepspeed", IMPORTS)
    source = source.replace("deepspeed.pipe.Pipe", "Pipe").replace("deepspeed.utils.Rep", "Rep")
    assert "parallel3d" not in source.split('"""')[2]
    (tmp_path / "train.py").write_text(source)
    with zipfile.ZipFile(write_wheel(tmp_path)) as wheel:
        wheel.extractall(tmp_path)
    config = str(EXAMPLES / "deepspeed_pipeline.json")
    for ranks in (1, 2, 4) if full else (1, 2):
        command = ["forked_ranks", "parallel3d.launcher.deepspeed", "--num_gpus", str(ranks), "train.py"]
        process = WarmProcess(
            tmp_path, dict(os.environ), *command, "--deepspeed_config", config, "-s", "10", "-p", str(ranks)
        )
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        found = [float(loss) for loss in re.findall(r"step: +\d+ / +10 loss: ([\d.]+)", out)]
        assert found == pytest.approx(pipeline_losses(shuffled=False)[:10], abs=2e-3)


INTERVAL, SCALE = 10, 2.0**10
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def plain_losses(config: dict[str, Any], replicas: int, dtype: torch.dtype, epochs: int) -> list[float]:
    """Plain PyTorch's, over fp32 masters: of the micro-batches of replica 0, the means over INTERVAL steps."""
    module = example("deepspeed_plain")
    torch.manual_seed(SCRIPT_SEED)
    net = module.Net()
    masters = [weight.detach().clone() for weight in net.parameters()]
    optimizer = torch.optim.AdamW(masters, **config["optimizer"]["params"])
    net.to(dtype)
    warmup = config["scheduler"]["params"]
    micro = config["train_micro_batch_size_per_gpu"]
    losses: list[float] = []
    for step, (images, labels) in enumerate(batches(module.Pictures(1280, 2), config["train_batch_size"], epochs)):
        part = min(1.0, math.log(max(1, step), warmup["warmup_num_steps"]))
        optimizer.param_groups[0]["lr"] = warmup["warmup_max_lr"] * part
        each = nn.functional.cross_entropy(net(images.to(dtype)), labels, reduction="none")
        net.zero_grad()
        (each.mean() * SCALE).backward()
        for master, weight in zip(masters, net.parameters(), strict=True):
            master.grad = weight.grad.float() / SCALE
        nn.utils.clip_grad_norm_(masters, config["gradient_clipping"])
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, net.parameters(), strict=True):
                weight.copy_(master)
        losses.append(each.detach().unflatten(0, (-1, replicas, micro))[:, 0].float().mean().item())
    return [sum(losses[k : k + INTERVAL]) / INTERVAL for k in range(0, len(losses), INTERVAL)]


@pytest.mark.parametrize(
    ("launcher", "replicas", "dtype", "stage"),
    [(OURS, 2, "half", 1), (TORCHRUN, 1, "fp32", 0)],
    ids=["parallel3d half precision", "torchrun fp32"],
)
def test_a_script_of_the_plain_engine(
    tmp_path: Path, full: bool, launcher: list[str], replicas: int, dtype: str, stage: int
):
    """Started by parallel3d's launcher, it is only with --full."""
    launcher = launcher if full else TORCHRUN[FORKED] if launcher == TORCHRUN else WARM
    config, epochs = json.loads((EXAMPLES / "deepspeed_plain.json").read_text()), 2
    if dtype == "half":
        dtype = "fp16" if full else "bf16"  # CPUs take ten times longer in fp16
    config["fp16"]["enabled"], config["bf16"]["enabled"] = dtype == "fp16", dtype == "bf16"
    config["zero_optimization"]["stage"] = stage
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    arguments = ["--deepspeed", "-e", str(epochs), "--log-interval", str(INTERVAL)]
    out = run(tmp_path, launcher, replicas, "deepspeed_plain", path, *arguments)
    found = [float(loss) for loss in re.findall(r"loss: ([\d.]+) lr", out)]
    wanted = plain_losses(config, replicas, DTYPES[dtype], epochs)
    assert found == pytest.approx(wanted, rel=1e-3 if dtype == "fp32" else 2e-2)
    assert found[-1] < 0.9 * found[0]
    assert float(re.search(r"Accuracy of the network on the 512 test images: ([\d.]+) %", out)[1]) > 30


class Sized(nn.Linear):
    """A layer whose number of rows depends on the data: it keeps the rows whose first value is positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[: int((x[:, 0] > 0).sum()) + 1])


def ask() -> dict[str, Any]:
    seeds: list[int] = []
    module = deepspeed.pipe.PipelineModule(
        [deepspeed.pipe.LayerSpec(Sized, 4, 4) for _ in range(4)],
        2,
        None,
        lambda output, labels: (output.sum() - labels.sum()).square(),
        True,
        seeds.append,
        base_seed=50,
        partition_method="uniform",
        dynamic_shape=True,
    )
    config = {"train_batch_size": 12, "gradient_accumulation_steps": 2, "optimizer": {"type": "Adam"}}
    engine, *_ = deepspeed.initialize(model=module, config={**config, "steps_per_print": None})
    torch.manual_seed(0)
    for _ in range(3):  # the same inputs' shapes, other outputs'
        engine.train_batch(iter([(torch.randn(6, 4), torch.ones(1)) for _ in range(2)]))
    accelerator = deepspeed.get_accelerator()
    gathered = torch.zeros(2)
    deepspeed.comm.all_gather_into_tensor(gathered, torch.tensor(1.0 + engine.global_rank))
    ranks = engine.get_pipeline_parallel_rank(), engine.get_data_parallel_rank(), engine.get_model_parallel_rank()
    return {
        "seeds": seeds,
        "ranks": ranks,
        "sizes": (engine.world_size, engine.dp_world_size, engine.mp_world_size),
        "mpu": engine.mpu.get_pipe_parallel_rank(),
        "applied": engine.was_step_applied(),
        "is": isinstance(engine, deepspeed.DeepSpeedEngine)
        and isinstance(engine.optimizer, deepspeed.ops.adam.FusedAdam),
        "optimizer": engine.optimizer.optimizer is engine.optimizer,
        "gathered": gathered.tolist(),
        "device": (accelerator.device_name(1), accelerator.current_device_name(), accelerator.is_available()),
        "backend": accelerator.communication_backend_name(),
        "world": (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()),
        "sum": own_sum(),
    }


def own_sum() -> tuple[list[int], list[int], float]:
    """Ranks of the world and of a group of the second rank alone, and the sum over the world of rank + 1."""
    comm, value = deepspeed.comm, torch.tensor(deepspeed.comm.get_rank() + 1.0)
    second = comm.new_group([1])
    ranks = comm.get_all_ranks_from_group(second) if comm.get_rank() == 1 else []
    comm.inference_all_reduce(value, group=comm.get_world_group())
    return comm.get_all_ranks_from_group(), ranks, value.item()


def test_names_that_such_scripts_use(run_ranks):
    for rank, found in enumerate(run_ranks(2, ask)):
        assert found == {
            "seeds": [50 + 2 * rank, 51 + 2 * rank],
            "ranks": (rank, 0, 0),
            "sizes": (2, 1, 1),
            "mpu": rank,
            "applied": True,
            "is": True,
            "optimizer": True,
            "gathered": [1.0, 2.0],
            "device": ("cpu", "cpu", True),
            "backend": "gloo",
            "world": (rank, 2),
            "sum": ([0, 1], [1] if rank == 1 else [], 3.0),
        }


def test_log_dist_logs_on_the_ranks_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    # Another test of this process may have made a world of one rank.
    monkeypatch.setattr(sys.modules[deepspeed.utils.log_dist.__module__], "is_initialized", lambda: False)
    deepspeed.utils.log_dist("before the world", ranks=[5])
    assert capsys.readouterr() == ("[rank 0] before the world\n", "")


def test_the_level_of_a_logger_and_its_handlers_is_set_by_a_word():
    own = logging.Logger("own")
    own.addHandler(logging.StreamHandler())
    deepspeed.utils.set_log_level_from_string("warning", own)
    assert (own.level, own.handlers[0].level) == (logging.WARNING, logging.WARNING)
    with pytest.raises(ValueError, match="LOUD"):
        deepspeed.utils.set_log_level_from_string("loud", own)


def test_set_random_seed_seeds_all_generators():
    def draw() -> tuple[float, ...]:
        deepspeed.runtime.utils.set_random_seed(2**40 + 3)
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    assert draw() == draw()


def test_the_script_beside_checkpoints_writes_masters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    layer, rate = nn.Linear(1, 1, bias=False), 2.0**-12
    nn.init.ones_(layer.weight)
    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": rate}}}
    engine = deepspeed.initialize(model=layer, config=config)[0]
    for _ in range(2):  # the gradient of w is 1
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
    assert engine.save_checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", ".", "out", "-d"])
    runpy.run_path("zero_to_fp32.py", run_name="__main__")
    weights = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert {name: value.item() for name, value in weights.items()} == {"weight": 1 - 2 * rate}
    assert layer.weight.item() == 1.0, "rounded"
