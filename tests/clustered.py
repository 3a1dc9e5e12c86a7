"""Training on several hosts, by ssh, mpirun and Slurm: run by `make clusters`, not by `make test`, which finds test_*.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from network_hosts import ROOT, Host, require, two_hosts
from torch import nn

STEPS, BATCH, SAMPLES, SEED = 12, 8, 32, 1234

TRAINING = f"""
import json, os, socket, sys, time
import torch
from torch import nn
import parallel3d

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    def forward(self, x, y):
        return nn.functional.mse_loss(self.net(x), y)

data = torch.utils.data.TensorDataset(
    torch.randn({SAMPLES}, 6, generator=torch.Generator().manual_seed(0)), torch.ones({SAMPLES}, 1)
)
config = {{
    "train_batch_size": {BATCH},
    "train_micro_batch_size_per_gpu": 1,
    "seed": {SEED},
    "optimizer": {{"type": "SGD", "params": {{"lr": 0.1, "momentum": 0.9}}}},
    "zero_optimization": {{"stage": 1}},
    "elastic": {{"enabled": True}},
    "steps_per_print": None,
}}
engine, *_ = parallel3d.initialize(model=WithLoss(), config=config, training_data=data)
engine.resume("saved")
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR FROM_FILE".split()
place = [socket.gethostname(), *map(os.environ.get, names)]
open(f"place.{{engine.global_rank}}", "w").write(json.dumps(place))
for step in range(engine.global_steps, {STEPS}):
    loss = engine.train_batch().item()
    engine.save_checkpoint("saved")
    if engine.global_rank == 0:
        with open("losses", "a") as file:
            file.write(json.dumps([engine.global_steps, engine.dp_world_size, loss]) + "\\n")
    time.sleep(float(os.environ.get("PARALLEL3D_TEST_PAUSE", "0")))
parallel3d.comm.destroy()
"""

LAUNCHER = "import sys; sys.executable = sys.argv.pop(1); from parallel3d.launcher import main; sys.exit(main())"


def reference() -> list[float]:
    """Plain PyTorch's losses, of whole batches."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for epoch in range(STEPS * BATCH // SAMPLES):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
        for part in order.split(BATCH):
            loss = nn.functional.mse_loss(net(inputs[part]), torch.ones(len(part), 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


class Job:
    """The launcher, run on a host in a folder of its own."""

    def __init__(self, folder: Path, host: Host, *options: str, **environment: str) -> None:
        self.folder = folder / "job"
        self.folder.mkdir()
        (self.folder / "train.py").write_text(TRAINING)
        (self.folder / "hosts").write_text("host-a slots=2\nhost-b slots=2\n")
        (self.folder / ".parallel3d_env").write_text("FROM_FILE=a 'b' $c; touch x\n")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "GLOO_SOCKET_IFNAME": "eth0",
            **environment,
        }
        command = [sys.executable, "-c", LAUNCHER, str(folder / "python"), "-H", "hosts", *options, "train.py"]
        with (self.folder / "said").open("w") as said:
            self.process = subprocess.Popen(
                host.inside(*command, folder=self.folder),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )

    def wait(self, seconds: float) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it goes on after {seconds} s: {self.said()}")

    def said(self) -> str:
        return (self.folder / "said").read_text()

    def rows(self) -> list[list[float]]:
        path = self.folder / "losses"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def train(self, steps: int) -> None:
        """Wait until it has made some steps."""
        self.until(lambda: len(self.rows()) >= steps)

    def until(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def places(self) -> list[list[str]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("place.*"))]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[list[Host]]:
    require()
    with two_hosts(tmp_path) as hosts:
        yield hosts


def test_two_hosts_train_as_plain_pytorch(tmp_path: Path, network: list[Host]):
    job = Job(tmp_path, network[0], "--num_procs", "2", "--launcher_args", f"-F {tmp_path / 'ssh'}")
    assert job.wait(120) == 0, job.said()
    print(job.said())
    assert [loss for _, _, loss in job.rows()] == pytest.approx(reference(), rel=1e-4)
    assert not network[0].processes() + network[1].processes()
    print(job.places())
