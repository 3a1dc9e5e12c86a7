"""Training on several hosts, by ssh, mpirun and Slurm: run by `make clusters`, not by `make test`, which finds test_*.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from host_launchers import launcher_server
from network_hosts import ROOT, Host, require, two_hosts

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


def plain_losses(_: Path) -> list[float]:
    """Plain PyTorch's losses, of whole batches."""
    import torch  # here, as all test processes but one are told the losses
    from torch import nn

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
    """Commands run on hosts in one folder, which has a script, and a hostfile of two hosts with two slots each."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self._programs = folder / "job", folder
        self.folder.mkdir()
        (self.folder / "train.py").write_text(TRAINING)
        (self.folder / "hosts").write_text("host-a slots=2\nhost-b slots=2\n")
        (self.folder / ".parallel3d_env").write_text(f"FROM_FILE={HOSTILE}\n")
        self._environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
            "PATH": f"{folder}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            **environment,
        }
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, host: Host, *command: str, **environment: str) -> None:
        with (self.folder / "said").open("a") as said:
            self._started.append(
                subprocess.Popen(
                    host.inside(*command, folder=self.folder),
                    env=self._environment | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                )
            )

    def kill_last(self, host: Host) -> None:
        """Kill what was started last, with all that it has started on its host."""
        for pid in host.processes():
            with suppress(ProcessLookupError):  # it has ended with one that was killed
                os.kill(pid, signal.SIGKILL)
        self._started.pop().wait(10)

    def launch(self, host: Host, *options: str) -> None:
        """Start the launcher on a host, with the hostfile."""
        python = str(self._programs / "python")
        self.start(host, python, "-m", "parallel3d.launcher", "-H", "hosts", *options, "train.py")

    def wait(self, seconds: float) -> int:
        """Return the largest exit code."""
        end = time.monotonic() + seconds
        try:
            return max(abs(process.wait(end - time.monotonic())) for process in self._started)
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

    def check(self, reference: list[float], replicas: int) -> None:
        """It has trained as plain PyTorch does, each step once at least, the last with so many replicas."""
        last = {step: (size, loss) for step, size, loss in self.rows()}
        assert sorted(last) == list(range(1, STEPS + 1)), self.said()
        assert [loss for _, (_, loss) in sorted(last.items())] == pytest.approx(reference, rel=1e-4)
        assert last[STEPS][0] == replicas


def left(host: Host) -> list[str]:
    """What of a job still runs on a host; sessions of sshd wait for their clients there."""
    return [line for line in host.processes().values() if not line.startswith("sshd: ")]


@pytest.fixture(scope="session")
def launchers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of the server that all workers share."""
    own = tmp_path_factory.getbasetemp()
    with launcher_server(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) as path:
        yield path


@pytest.fixture(scope="session")
def reference(made_once: Callable[[str, Callable[[Path], Any]], tuple[Path, Any]]) -> list[float]:
    return made_once("reference", plain_losses)[1]


@pytest.fixture
def network(tmp_path: Path, launchers: Path) -> Iterator[list[Host]]:
    """Two hosts, the first with the higher address."""
    require()
    with two_hosts(tmp_path, launchers, ("host-a", "host-b"), (2, 1)) as hosts:
        yield hosts


def place(host: str, rank: int, local: int, crossed: int) -> list[str]:
    return [host, *map(str, (rank, local, 4, 2, crossed, 2)), "host-a", HOSTILE]


IN_ORDER = [place("host-a", 0, 0, 0), place("host-a", 1, 1, 0), place("host-b", 2, 0, 1), place("host-b", 3, 1, 1)]


def test_two_hosts_train_as_plain_pytorch_and_keep_their_order(
    tmp_path: Path, network: list[Host], reference: list[float]
):
    """Also after a rank has failed."""
    job = Job(tmp_path, PARALLEL3D_TEST_FAILS="3 4 0")
    job.launch(
        network[0], "--num_procs", "dp4", "--max_restarts", "1", "--launcher_args", f"-F {tmp_path / 'ssh_config'}"
    )
    assert job.wait(120) == 0, job.said()
    job.check(reference, 4)
    assert job.places(0) == job.places(1) == IN_ORDER
    assert "parallel3d: rank 3 failed (exit code 3)" in job.said()
    assert job.said().count("parallel3d: restart 1 of 1") == 2
    assert not left(network[0]) + left(network[1])
    assert not (job.folder / "x").exists()


def test_excluded_slots_are_left_out_and_the_exit_code_is_the_failed_rank_s(tmp_path: Path, network: list[Host]):
    job = Job(tmp_path, PARALLEL3D_TEST_FAILS="1 2 0")
    job.launch(network[0], "--exclude", "host-a:1@host-b:0", "--launcher_args", f"-F {tmp_path / 'ssh_config'}")
    assert job.wait(120) == 3, job.said()
    assert [row[:3] for row in job.places(0)] == [["host-a", "0", "0"], ["host-b", "1", "0"]]
    assert "parallel3d: rank 1 failed (exit code 3)" in job.said()
    assert not left(network[0]) + left(network[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("restarts", [0, 2])
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_lost_host_ends_the_job_or_leaves_fewer_replicas(
    tmp_path: Path, network: list[Host], reference: list[float], how: str, restarts: int
):
    job = Job(tmp_path, PARALLEL3D_TEST_PAUSE="0.3")
    job.launch(network[0], "--launcher_args", f"-F {tmp_path / 'ssh_config'}", "--max_restarts", str(restarts))
    job.until(lambda: len(job.rows()) >= 3)
    network[1].kill() if how == "killed" else network[1].link("down")
    if restarts:
        assert job.wait(120) == 0, job.said()
        job.check(reference, 2)
        assert "parallel3d: restart 1 of 2" in job.said()
    else:
        assert job.wait(30) == 1, job.said()
    assert "rank 2 (stage 0, host host-b) doesn't answer" in job.said()
    assert not left(network[0])
    if how == "cut off":
        job.until(lambda: not left(network[1]), 30)


def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path, network: list[Host]):
    """Of one whose --include chooses slots."""
    job = Job(tmp_path, PARALLEL3D_TEST_PAUSE="60")
    job.launch(network[0], "--include", "host-b:1@host-a:0", "--launcher_args", f"-F {tmp_path / 'ssh_config'}")
    job.until(lambda: len(job.rows()) == 1)
    assert [row[:3] for row in job.places(0)] == [["host-a", "0", "0"], ["host-b", "1", "0"]]
    [head] = [pid for pid, line in network[0].processes().items() if "parallel3d.launcher -H hosts" in line]
    os.kill(head, signal.SIGKILL)
    job.until(lambda: not left(network[0]) + left(network[1]), 30)


MPIRUNS = {
    "openmpi": "--mca plm_rsh_args '{ssh}' --mca oob_tcp_if_include eth0 --mca btl_tcp_if_include eth0",
    "mpich": "",
}


@pytest.mark.parametrize("launcher", MPIRUNS)
def test_mpirun_starts_two_hosts(tmp_path: Path, network: list[Host], reference: list[float], launcher: str):
    require(f"mpirun.{launcher}")
    (tmp_path / "mpirun").write_text(f'#!/bin/sh\nexec mpirun.{launcher} "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    ssh = f"-F {tmp_path / 'ssh_config'}"
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    job = Job(tmp_path, HYDRA_LAUNCHER_EXTRA_ARGS=ssh, **as_root)
    args = MPIRUNS[launcher].format(ssh=ssh)
    job.launch(network[0], "--launcher", launcher, "--num_procs", "2", "--launcher_args", args)
    assert job.wait(120) == 0, job.said()
    job.check(reference, 4)
    assert job.places(0) == IN_ORDER
    assert not left(network[0]) + left(network[1])


SLURM = """ClusterName=test
SlurmctldHost=host-a
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/slurm
SlurmdSpoolDir={folder}/slurm/%n
SlurmctldPidFile={folder}/slurm/ctld.pid
SlurmdPidFile={folder}/slurm/%n.pid
SelectType=select/cons_tres
SlurmdParameters=config_overrides
NodeName=host-a,host-b CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def slurm(folder: Path, hosts: list[Host]) -> Iterator[str]:
    """Slurm on the hosts. Yields the path of its configuration."""
    for name in ("munge", "slurm"):
        (folder / name).mkdir()
    configuration, key = folder / "slurm.conf", folder / "munge" / "key"
    configuration.write_text(SLURM.format(folder=folder))
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment, daemons = {**os.environ, "SLURM_CONF": str(configuration)}, []

    def ready(*command: str) -> str:
        return subprocess.run(
            hosts[0].inside(*command), env=environment, capture_output=True, text=True, check=False
        ).stdout

    with (folder / "daemons").open("w") as said, ExitStack() as stack:

        def serve(host: Host, *command: str) -> None:
            daemons.append(subprocess.Popen(host.inside(*command), env=environment, stdout=said, stderr=said))
            stack.callback(daemons[-1].wait, 10)
            stack.callback(daemons[-1].terminate)

        own = [
            f"--{name}={folder}/munge/{name.removesuffix('-file')}"
            for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        ]
        serve(hosts[0], "munged", "-F", "--force", *own)
        end = time.monotonic() + 30
        while not (folder / "munge" / "socket").exists():
            assert time.monotonic() < end
            time.sleep(0.05)
        serve(hosts[0], "slurmctld", "-D")
        for host in hosts:
            serve(host, "slurmd", "-D", "-N", host.name)
        while ready("sinfo", "-h", "-N", "-o", "%T").split() != ["idle", "idle"]:
            assert time.monotonic() < end, (folder / "daemons").read_text()
            time.sleep(0.2)
        yield str(configuration)


def test_slurm_starts_two_hosts(tmp_path: Path, network: list[Host], reference: list[float]):
    """By the launcher, which calls srun, and by the example's batch script, where a rank fails once."""
    require("munged", "slurmctld", "slurmd", "srun", "sbatch")
    with slurm(tmp_path, network) as configuration:
        job = Job(tmp_path, SLURM_CONF=configuration)
        job.launch(network[0], "--launcher", "slurm", "--num_procs", "2")
        assert job.wait(120) == 0, job.said()
        job.check(reference, 4)
        assert job.places(0) == IN_ORDER
        job.folder.rename(tmp_path / "first")
        job = Job(tmp_path, SLURM_CONF=configuration, PARALLEL3D_TEST_FAILS="3 4 0", FROM_FILE=HOSTILE)
        asked = ["--wait", "--output=said", "--gpus-per-node=0", "--cpus-per-task=1"]
        script = str(ROOT / "examples" / "clusters" / "slurm.sbatch")
        job.start(network[0], "sbatch", *asked, script, "--num_procs", "2", "train.py")
        assert job.wait(120) == 0, job.said()
        job.check(reference, 4)
        assert job.places(0) == job.places(1) == IN_ORDER


PODS = {
    "pytorchjob.yaml": [
        {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2", "RANK": str(rank)}
        for rank in (0, 1)
    ],
    "jobset.yaml": [{"JOB_COMPLETION_INDEX": str(index)} for index in (0, 1)],
}


@pytest.mark.parametrize("name", PODS)
def test_pods_of_kubernetes_train(tmp_path: Path, launchers: Path, reference: list[float], name: str):
    """What their containers run, with the variables and names that the controllers' documentations promise.

    A pod of Kubeflow's is killed, and started anew: it joins again.
    """
    require()
    spec = yaml.safe_load((ROOT / "examples" / "clusters" / name).read_text())["spec"]
    if "replicatedJobs" in spec:
        [job_spec] = spec["replicatedJobs"]
        template = job_spec["template"]["spec"]
        assert template["parallelism"] == template["completions"] == 2
        pods, names = [template["template"]] * 2, ("train-hosts-0-0.train", "train-hosts-0-1.train")
    else:
        kinds = spec["pytorchReplicaSpecs"]
        assert [kinds[kind]["replicas"] for kind in ("Master", "Worker")] == [1, 1]
        pods, names = [kinds[kind]["template"] for kind in ("Master", "Worker")], ("train-master-0", "train-worker-0")
    with two_hosts(tmp_path, launchers, names) as hosts:
        job = Job(tmp_path, PARALLEL3D_TEST_PAUSE="2" if name == "pytorchjob.yaml" else "0")
        for host, pod, environment in zip(hosts, pods, PODS[name], strict=True):
            [container] = pod["spec"]["containers"]
            job.start(host, *container["command"], *container["args"], **environment)
        if name == "pytorchjob.yaml":
            job.until(lambda: len(job.rows()) == 2)
            job.kill_last(hosts[1])
            job.start(hosts[1], *container["command"], *container["args"], **environment)
        assert job.wait(150) == 0, job.said()
        job.check(reference, 2)
        assert [row[0] for row in job.places(0)] == list(names)
