"""The engine in Ray Train: an example, whose workers Ray starts again after one was killed. Run by `make clusters`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).parents[1]
STEPS, BATCH = 15, 32
SCRIPT = """
import os, signal, time
from pathlib import Path
import ray.train
import ray_train

ray.init(include_dashboard=False)
train, report = ray_train.train, ray.train.report

def killed_once(args):
    storage = Path(args["scratch"]).parent

    def report_and_die(metrics, checkpoint):
        report(metrics, checkpoint=checkpoint)
        if metrics["step"] == 10:
            while not (storage / "pipeline" / "checkpoint_manager_snapshot.json").exists():
                time.sleep(0.01)  # until Ray knows a checkpoint
            os.kill(os.getpid(), signal.SIGKILL)

    if ray.train.get_context().get_world_rank() == 1:
        starts = storage / "starts"
        if not starts.exists():
            ray.train.report = report_and_die
        with starts.open("a") as file:
            print(ray.train.get_checkpoint() is not None, file=file)
    train(args)

ray_train.train = killed_once
ray_train.main()
"""


def plain_losses() -> list[float]:
    """Plain PyTorch's, on one process."""
    inputs = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    layers = []
    for index in range(8):
        torch.manual_seed(1234 + index)
        layers.append(nn.Tanh() if index % 2 else nn.Linear(32, 32))
    net = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        x = inputs.roll(-BATCH * step, 0)[:BATCH]
        loss = F.mse_loss(net(x), x.roll(1, dims=1).sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ray_restarts_a_pipeline_from_its_own_copy_of_a_checkpoint(tmp_path: Path):
    script = tmp_path / "killed_once.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "RAY_DEDUP_LOGS": "0"}
    environment["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"  # an actor for each start; no cloud announces a node's end
    command = [sys.executable, str(script), "--steps", str(STEPS), "--storage", str(tmp_path / "storage")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 0, said
    assert (tmp_path / "storage" / "starts").read_text().split() == ["False", "True"], said
    last = re.search(rf"step {STEPS}: loss (\S+); Checkpoint", ended.stdout)
    assert last is not None, said
    assert float(last[1]) == pytest.approx(plain_losses()[-1], abs=1e-5)
