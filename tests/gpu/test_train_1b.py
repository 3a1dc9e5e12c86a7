"""The 1b decoder trains over a pipeline of four GPUs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"


@pytest.mark.parametrize("schedule", [("1f1b", "1"), ("interleaved", "2")], ids=lambda s: s[0])
def test_1b_learns_a_batch_by_heart_at_pp4(num_gpus: int, schedule: tuple[str, str]):
    if num_gpus < 4:
        pytest.skip("needs 4 CUDA devices")
    name, chunks = schedule
    command = [sys.executable, "-m", "parallel3d.launcher", "--num_gpus", "4", str(EXAMPLE), "--size", "1b"]
    command += ["--stages", "4", "--schedule", name, "--chunks", chunks, "--lr", "3e-4", "--steps", "10"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.strip().splitlines()[-1])
    print(result)
    assert result["losses"][0] == pytest.approx(math.log(32000), abs=0.6)
    assert result["losses"][-1] < result["losses"][0] - 1.0
