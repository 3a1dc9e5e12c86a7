"""The README's script runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_ten_lines_of_the_readme_train(tmp_path: Path):
    """On two stages of two replicas; a line at its end tells that all ranks have the same loss."""
    (script,) = re.findall(r"## Ten lines\n\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    end = "\nprint('loss', engine.global_steps, float(loss), flush=True)\nparallel3d.comm.destroy()\n"
    (tmp_path / "script.py").write_text(script + end)
    command = [sys.executable, "-m", "parallel3d", "--num_procs", "4", tmp_path / "script.py"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert run.returncode == 0, run.stderr
    told = re.findall(r"loss (\d+) ([\d.]+)", run.stdout)
    assert len(told) == 4
    assert {steps for steps, _ in told} == {"100"}
    assert len({loss for _, loss in told}) == 1
