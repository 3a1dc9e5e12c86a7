"""Kernels under compute-sanitizer: no access outside of what is theirs, no race in shared memory, no barrier passed by some."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("compiled_kernels")

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed; it comes with CUDA's toolkit")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_nothing_is_found(num_gpus: int, tool: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python"]
    # Of kernels of ours alone, and not of what libraries ask the driver for in vain.
    ours = [
        part
        for name in ("all_reduce", "reduce_scatter", "adamw")
        for part in ("--kernel-name", f"kernel_substring={name}")
    ]
    command += [str(SANITIZER), "--tool", tool, "--error-exitcode", "9", *ours, "--report-api-errors", "no"]
    command += [sys.executable, str(Path(__file__).with_name("sanitized.py"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("all kernels ran") == 2
    assert done.stdout.count("ERROR SUMMARY: 0 errors") + done.stdout.count("0 hazards displayed") == 2
