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
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
open(f"place.{{engine.global_rank}}.{{start}}", "w").write(json.dumps(place))
for step in range(engine.global_steps, {STEPS}):
    if os.environ.get("PARALLEL3D_TEST_FAILS") == f"{{engine.global_rank}} {{step}} {{start}}":
        sys.exit(3)
    loss = engine.train_batch().item()
    engine.save_checkpoint("saved")
    if engine.global_rank == 0:
        with open("losses", "a") as file:
            file.write(json.dumps([engine.global_steps, engine.dp_world_size, loss]) + "\\n")
    time.sleep(float(os.environ.get("PARALLEL3D_TEST_PAUSE", "0")))
parallel3d.comm.destroy()
"""

HOSTILE = "a 'b' $c; touch x"
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
    """The launcher, run on a host in a folder of its own, with a hostfile of two hosts that have two slots each."""

    def __init__(self, folder: Path, host: Host, *options: str, **environment: str) -> None:
        self.folder = folder / "job"
        self.folder.mkdir()
        (self.folder / "train.py").write_text(TRAINING)
        (self.folder / "hosts").write_text("host-a slots=2\nhost-b slots=2\n")
        (self.folder / ".parallel3d_env").write_text(f"FROM_FILE={HOSTILE}\n")
        environment = {**variables(), "GLOO_SOCKET_IFNAME": "eth0", **environment}
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

    def until(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def places(self, start: int) -> list[list[str]]:
        """What each rank of a start, counted from 0, saw of its place."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"place.*.{start}"))]

    def check(self, replicas: int) -> None:
        """It has trained as plain PyTorch does, each step once at least, the last with so many replicas."""
        last = {step: (size, loss) for step, size, loss in self.rows()}
        assert sorted(last) == list(range(1, STEPS + 1)), self.said()
        assert [loss for _, (_, loss) in sorted(last.items())] == pytest.approx(reference(), rel=1e-4)
        assert last[STEPS][0] == replicas


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def left(host: Host) -> list[str]:
    """What of a job still runs on a host; sessions of sshd wait for their clients there."""
    return [line for line in host.processes() if not line.startswith("sshd: ")]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[list[Host]]:
    """Two hosts, the first with the higher address."""
    require()
    with two_hosts(tmp_path, ("host-a", "host-b"), (2, 1)) as hosts:
        yield hosts


def place(host: str, rank: int, local: int, crossed: int) -> list[str]:
    return [host, *map(str, (rank, local, 4, 2, crossed, 2)), "host-a", HOSTILE]


def test_two_hosts_train_as_plain_pytorch_and_keep_their_order(tmp_path: Path, network: list[Host]):
    """Also after a rank has failed."""
    options = ["--num_procs", "2", "--max_restarts", "1", "--launcher_args", f"-F {tmp_path / 'ssh'}"]
    job = Job(tmp_path, network[0], *options, PARALLEL3D_TEST_FAILS="3 4 0")
    assert job.wait(120) == 0, job.said()
    job.check(4)
    places = [place("host-a", 0, 0, 0), place("host-a", 1, 1, 0), place("host-b", 2, 0, 1), place("host-b", 3, 1, 1)]
    assert job.places(0) == job.places(1) == places
    assert "parallel3d: rank 3 failed (exit code 3)" in job.said()
    assert job.said().count("parallel3d: restart 1 of 1") == 2
    assert not left(network[0]) + left(network[1])
    assert not (job.folder / "x").exists()


def test_excluded_slots_are_left_out_and_the_exit_code_is_the_failed_rank_s(tmp_path: Path, network: list[Host]):
    options = ["--exclude", "host-a:1@host-b:0", "--launcher_args", f"-F {tmp_path / 'ssh'}"]
    job = Job(tmp_path, network[0], *options, PARALLEL3D_TEST_FAILS="1 2 0")
    assert job.wait(120) == 3, job.said()
    assert [row[:3] for row in job.places(0)] == [["host-a", "0", "0"], ["host-b", "1", "0"]]
    assert "parallel3d: rank 1 failed (exit code 3)" in job.said()
    assert not left(network[0]) + left(network[1])


@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_host_ends_the_job_or_leaves_fewer_replicas(
    tmp_path: Path, network: list[Host], how: str, restarts: int
):
    options = ["--launcher_args", f"-F {tmp_path / 'ssh'}", "--max_restarts", str(restarts)]
    job = Job(tmp_path, network[0], *options, PARALLEL3D_TEST_PAUSE="0.3")
    job.until(lambda: len(job.rows()) >= 3)
    network[1].kill() if how == "killed" else network[1].link("down")
    if restarts:
        assert job.wait(120) == 0, job.said()
        job.check(2)
        assert "parallel3d: restart 1 of 2" in job.said()
    else:
        assert job.wait(30) == 1, job.said()
    assert "rank 2 (stage 0, host host-b) doesn't answer" in job.said()
    assert not left(network[0])
    if how == "cut off":
        job.until(lambda: not left(network[1]), 30)


def test_mpirun_starts_two_hosts(tmp_path: Path, network: list[Host]):
    require("mpirun")
    args = f"--mca plm_rsh_args '-F {tmp_path / 'ssh'}' --mca oob_tcp_if_include eth0 --mca btl_tcp_if_include eth0"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = Job(tmp_path, network[0], "--launcher", "openmpi", "--num_procs", "2", "--launcher_args", args, **root)
    assert job.wait(120) == 0, job.said()
    job.check(4)
    assert [row[:3] for row in job.places(0)] == [
        ["host-a", "0", "0"],
        ["host-a", "1", "1"],
        ["host-b", "2", "0"],
        ["host-b", "3", "1"],
    ]
    assert not left(network[0]) + left(network[1])
