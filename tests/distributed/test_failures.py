"""A failing layer ends the whole job, and one line says where it failed."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fault_ranks import FaultRanks
from warm import WarmProcess, run_script

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


def place_of(rank: int, instruction: str) -> str:
    return f"rank {rank}, stage 1, micro-batch 3, instruction {instruction}: RuntimeError: the layer is tired"


def check_ended(folder: Path, ranks: int) -> None:
    """All ranks have ended."""
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    assert len(pids) == ranks
    assert not [pid for pid in pids if lives(pid)]


def launch(folder: Path, ranks: int, *arguments: str) -> str:
    """Run the script by the launcher. Return its stderr when the job has failed within a minute and left nothing."""
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    job = WarmProcess(
        folder, environment, "forked_ranks", "parallel3d.launcher", "--num_procs", str(ranks), "script.py", *arguments
    )
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1, errors
    check_ended(folder, ranks)
    return errors


def check_frames(output: str, rank: int, direction: str) -> None:
    """The traceback of the rank has the lines of the user's script: the layer's, and what that calls."""
    before = re.escape(f"[rank{rank}]: ")
    for function, line in ((direction, "tire()"), ("tire", 'raise RuntimeError("the layer is tired")')):
        place = rf'^{before}  File ".*/script.py", line \d+, in {function}$'
        assert re.search(rf"{place}\n{before}    {re.escape(line)}$", output, re.MULTILINE), output


def check_summary(errors: str, rank: int, instruction: str) -> None:
    """The place is in one line of the traceback, and in one of the summary at the end, which names the root cause first."""
    place = place_of(rank, instruction)
    place += ", in layer 2 (Fragile)" if instruction.startswith("F") else ""
    lines = [line for line in errors.splitlines() if place in line]
    assert len(lines) == 2, errors
    assert re.fullmatch(
        rf"parallel3d: rank {rank} failed \(exit code 1\): ExecutionError: {re.escape(place)}", lines[1]
    )
    summary = [line for line in errors.splitlines() if line.startswith("parallel3d: ")]
    assert summary[0] == lines[1], "the root cause comes first"


def test_a_layer_whose_forward_raises_ends_the_job(tmp_path: Path):
    errors = launch(tmp_path, 3, "forward", "3", "1")
    check_summary(errors, 1, "F3@1")
    check_frames(errors, 1, "forward")


def test_a_layer_whose_backward_raises_ends_all_ranks(tmp_path: Path, full: bool):
    """In the first of two pipelines, which are ranks 0, 2 and 1, 3. With --full by the launcher, too."""
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = FaultRanks().run(4, tmp_path, run_script, str(tmp_path / "script.py"), "backward", "2", "2")
    check_ended(tmp_path, 4)
    assert all(ended.codes), ended.outputs
    assert ended.codes[2] == 1
    lines = [line for output in ended.outputs for line in output.splitlines() if place_of(2, "B3@1") in line]
    assert len(lines) == 1, ended.outputs
    check_frames(ended.outputs[2], 2, "backward")
    if full:
        folder = tmp_path / "launched"
        folder.mkdir()
        check_summary(launch(folder, 4, "backward", "2", "2"), 2, "B3@1")
