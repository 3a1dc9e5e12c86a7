"""Over NCCL a rank that raises, dies, hangs or calls other layers is named on all ranks, and all end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule

class Faulty(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.inner = 0, nn.Linear(8, 8)
    def forward(self, x):
        self.calls += 1
        if self.calls == 11:  # the third step's third micro-batch
            what = sys.argv[1]
            if what == "raise":
                raise ValueError("planted")
            if what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        return self.inner(x)

config = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": None,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "pipeline": {"stages": 2}, "failures": {"timeout_s": 5, "directory": sys.argv[2]},
}
module = PipelineModule(
    [LayerSpec(nn.Linear, 8, 8), LayerSpec(Faulty)], loss_fn=nn.functional.mse_loss, partition_method="uniform", config=config
)
engine, *_ = parallel3d.initialize(model=module, config=config)
data = iter([(torch.ones(2, 8), torch.zeros(2, 8))] * 100)
for _ in range(5):
    engine.train_batch(data)
"""


@pytest.mark.parametrize(
    ("what", "said"),
    [("raise", "ValueError: planted"), ("die", "SIGKILL"), ("hang", "is late")],
    ids=lambda value: value,
)
def test_one_verdict_names_rank_1(num_gpus: int, tmp_path: Path, what: str, said: str):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "parallel3d.launcher", "--num_gpus", "2", str(script), what, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode != 0
    verdicts = [json.loads(path.read_text())["verdict"] for path in tmp_path.glob("failure-*.json")]
    assert verdicts, done.stderr
    assert {(verdict["rank"], verdict["place"]["instruction"]) for verdict in verdicts} == {(1, "F2@1")}, done.stderr
    assert said in done.stdout + done.stderr


ORDERS = """
import sys
import torch
from torch import nn
import parallel3d

class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, width) for width in (8, int(sys.argv[1]), 8)])
    def forward(self, x, first):
        return sum(self.blocks[k](x).sum() for k in ((0, 1, 2) if first else (1, 0, 2)))

config = {
    "train_micro_batch_size_per_gpu": 2, "steps_per_print": None, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "failures": {"directory": sys.argv[2]},
}
engine, *_ = parallel3d.initialize(model=Chosen(), config=config)
for step in range(3):
    engine.backward(engine(torch.ones(2, 8, device=engine.device), step < 2 or engine.global_rank == 0))
    engine.step()
"""


@pytest.mark.parametrize("width", [8, 1 << 20])
def test_replicas_that_gather_different_weights_are_told_so(num_gpus: int, tmp_path: Path, width: int):
    """Widths: gathers of one size end, with weights mixed up; of others they may never end."""
    script = tmp_path / "script.py"
    script.write_text(ORDERS)
    command = [sys.executable, "-m", "parallel3d.launcher", "--num_gpus", "2", str(script), str(width), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode != 0
    assert "replicas call layers in different orders" in done.stdout + done.stderr
    assert "blocks.0" in done.stderr
