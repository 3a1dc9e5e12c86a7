"""Ranks that die are started again and go on from the last whole checkpoint, with fewer replicas if need be."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from warm import WarmProcess

ROOT = Path(__file__).parents[2]
STEPS, BATCH, SAMPLES, SEED = 24, 4, 24, 1234

TRAINING = f"""
import json, os, signal, sys, time
import torch
from torch import nn
import parallel3d

torch.manual_seed(3)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(
    torch.randn({SAMPLES}, 6, generator=torch.Generator().manual_seed(0)), torch.ones({SAMPLES}, 1)
)
config = {{
    "train_batch_size": {BATCH},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "seed": {SEED},
    "optimizer": {{"type": "SGD", "params": {{"lr": 0.1, "momentum": 0.9}}}},
    "zero_optimization": {{"stage": 1}},
    "elastic": {{"enabled": True}},
    "steps_per_print": None,
}}
class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x, y):
        return nn.functional.mse_loss(self.net(x), y)
engine, *_ = parallel3d.initialize(model=WithLoss(), config=config, training_data=data)
engine.resume(sys.argv[1])
for step in range(engine.global_steps, {STEPS}):
    loss = engine.train_batch().item()
    if step == 5 and "DIES_BEFORE_SAVING" in os.environ:
        time.sleep(0.5)  # the other waits for it, in its save
        for pid in (os.getppid(), os.getpid()):
            os.kill(pid, signal.SIGKILL)
    engine.save_checkpoint(sys.argv[1], client_state={{"step": step}})
    if engine.global_rank == 0:
        with open(sys.argv[2], "a") as file:
            file.write(json.dumps([engine.global_steps, engine.dp_world_size, loss]) + "\\n")
    time.sleep(0.05)
parallel3d.comm.destroy()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_random_faults_lose_nothing(
    tmp_path: Path, full: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """tools/soak.py says what it checks; by hand it plants 200 faults. Here: a full disk, a killed rank, a full disk again.

    The first start saves at once, the second later.
    """
    rounds, faults = (20, "kill save stop join disk clock") if full else (3, "kill disk")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    arguments = f"--rounds {rounds} --layout pp2 --longest 0.5 --seed 10 --directory {tmp_path} --faults {faults}"
    monkeypatch.setattr(sys, "argv", ["soak.py", *arguments.split()])
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -m forked_ranks "$@"\n')
    python.chmod(0o700)
    if not full:
        monkeypatch.setattr(sys, "executable", str(python))
    code = importlib.import_module("soak").main()
    said = capsys.readouterr()
    assert code == 0, said.out + said.err
    assert re.search(rf"rounds +{rounds}\n(.*\n)* +kill +[1-9](.*\n)*lost +0\nwrong +0\nnothing is lost", said.out)


def test_the_launcher_gives_up_after_its_restarts(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "open(sys.argv[1], 'a').write(os.environ['RANK'] + os.environ['TORCHELASTIC_RESTART_COUNT'] + ' ')\n"
        "if os.environ['RANK'] == '1': raise ValueError('again')\n"
    )
    options = ["--num_procs", "2", "--max_restarts", "2"]
    arguments = ["parallel3d.launcher", *options, str(script), str(tmp_path / "starts")]
    job = WarmProcess(tmp_path, environment(), "forked_ranks", *arguments)
    _, errors = job.communicate(timeout=100)
    assert job.returncode == 1
    assert [line for line in errors.splitlines() if "restart" in line] == [
        "parallel3d: restart 1 of 2",
        "parallel3d: restart 2 of 2",
    ]
    assert errors.count("rank 1 failed (exit code 1): ValueError: again") == 3
    assert {"10", "11", "12"} <= set((tmp_path / "starts").read_text().split())


def reference() -> list[float]:
    """Plain PyTorch's losses, of whole batches."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    epoch = 0
    while len(losses) < STEPS:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(SEED + epoch))
        for part in order.split(BATCH):
            loss = nn.functional.mse_loss(net(inputs[part]), torch.ones(len(part), 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        epoch += 1
    return losses[:STEPS]


def read_rows(path: Path) -> list[list[float]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "amid" in metafunc.fixturenames:  # in a save more may go wrong
        metafunc.parametrize("amid", ["a save", "anything"] if metafunc.config.getoption("full") else ["a save"])


def test_a_lost_node_leaves_fewer_replicas(tmp_path: Path, amid: str):
    """Two agents of torchrun stand for two nodes; one is killed with its rank."""
    script, losses = tmp_path / "train.py", tmp_path / "losses"
    script.write_text(TRAINING)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes: list[WarmProcess] = []

    def start(last_call: int, **more: str) -> WarmProcess:
        # PyTorch 2.11's agents fail otherwise when the first node is lost.
        more["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # Quicker than by default, and yet not on a busy machine: a node counts as lost after 10 s.
        conf = f"join_timeout=60,last_call_timeout={last_call},keep_alive_interval=1,keep_alive_max_attempt=10,is_host=false"
        torchrun = ["--nnodes", "1:2", "--nproc_per_node", "1", "--max_restarts", "3"]
        torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{store.port}", "--rdzv_conf", conf]
        torchrun += [str(script), str(tmp_path / "saved"), str(losses)]
        nodes.append(WarmProcess(tmp_path, environment() | more, "forked_ranks", "torch.distributed.run", *torchrun))
        return nodes[-1]

    try:
        # The one that is lost joins first and waits for the other, which waits 2 s when it is alone.
        lost = start(60, **({"DIES_BEFORE_SAVING": "1"} if amid == "a save" else {}))
        store.wait(["torch.rendezvous.none"], timedelta(seconds=60))
        left = start(2)
        end = time.monotonic() + 100
        while len(rows := read_rows(losses)) < 5:
            assert time.monotonic() < end, left.returncode
            time.sleep(0.1)
        assert rows[0][1] == 2
        if amid == "a save":
            assert lost.wait(60) == -signal.SIGKILL
        else:
            for pid in processes_of(lost.pid):
                os.kill(pid, signal.SIGKILL)
        said = left.communicate(150)
        assert left.returncode == 0, said
    finally:
        for node in nodes:
            for pid in processes_of(node.pid):
                os.kill(pid, signal.SIGKILL)
            node.wait(10)
    last = {step: (replicas, loss) for step, replicas, loss in read_rows(losses)}
    assert sorted(last) == list(range(1, STEPS + 1))
    assert last[1][0] == 2
    assert last[STEPS][0] == 1
    assert [loss for _, (_, loss) in sorted(last.items())] == pytest.approx(reference(), rel=1e-4)


def processes_of(pid: int) -> list[int]:
    """A process, if it is there, and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [pid, *(below for child in children for below in processes_of(int(child)))]
