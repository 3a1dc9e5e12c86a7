"""A failing layer ends the whole job, and one line says where it failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

SCRIPT = """
import os, sys, time
from pathlib import Path

import torch
from torch import nn

import parallel3d
from parallel3d.pipe import LayerSpec, PipelineModule

direction, stages, chunks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
Path(os.environ["RANK"] + ".pid").write_text(str(os.getpid()))


def tire():
    Path("struck").write_text(repr(time.time()))
    raise RuntimeError("the layer is tired")


class Trip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        tire()


class Fragile(nn.Linear):
    calls = 0

    def forward(self, x):
        Fragile.calls += 1
        fails = Fragile.calls == 5 + 4  # the second batch's micro-batch 3, of five
        if fails and direction == "forward":
            tire()
        return Trip.apply(super().forward(x)) if fails and direction == "backward" else super().forward(x)


# Of `stages * chunks` parts of two layers, part 1 is on stage 1.
layers = [LayerSpec(Fragile if k == 2 else nn.Linear, 4, 4) for k in range(2 * stages * chunks)]
schedule = "interleaved" if chunks > 1 else "1f1b"
module = PipelineModule(
    layers, num_stages=stages, num_chunks=chunks, partition_method="uniform", loss_fn=nn.functional.mse_loss
)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 5,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "pipeline": {"schedule": schedule},
}
engine, *_ = parallel3d.initialize(model=module, config=config)
# Replica 0 alone is broken.
if engine.grid.get_data_parallel_rank() > 0:
    direction = "never"
while True:
    engine.train_batch(iter([(torch.zeros(2, 4), torch.zeros(2, 4)) for _ in range(5)]))
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("direction", "stages", "chunks", "instruction"), [("forward", 4, 1, "F3@1"), ("backward", 2, 2, "B3@1")]
)
def test_a_layer_that_raises_ends_the_job(tmp_path: Path, direction: str, stages: int, chunks: int, instruction: str):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "parallel3d.launcher", "--num_procs", "4", "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    job = subprocess.run(
        [*command, direction, str(stages), str(chunks)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    err = job.stderr
    assert job.returncode == 1, err
    assert time.time() - float((tmp_path / "struck").read_text()) < 30
    # rank: of stage 1 in the first pipeline; the pipelines of 2 stages are ranks 0, 2 and 1, 3.
    rank = 2 if stages == 2 else 1
    place = f"rank {rank}, stage 1, micro-batch 3, instruction {instruction}: RuntimeError: the layer is tired"
    # One line of the traceback, and one of the summary at the very end, which names the root cause first.
    lines = [line for line in err.splitlines() if place in line]
    assert len(lines) == 2, err
    assert re.fullmatch(
        rf"parallel3d: rank {rank} failed \(exit code 1\): ExecutionError: {re.escape(place)}", lines[1]
    )
    summary = [line for line in err.splitlines() if line.startswith("parallel3d: ")]
    assert summary[0] == lines[1], "the root cause comes first"
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 4
    assert not [pid for pid in pids if lives(pid)]
