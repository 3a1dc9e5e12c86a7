"""Run DeepSpeed's own unit tests on this package, and print which pass.

`python tools/deepspeed_tests.py CHECKOUT [MODULE ...]`: CHECKOUT has DeepSpeed's repository, MODULE is a file or folder below
its tests/unit (default: MODULES). No GPU is needed. A test that takes longer than LIMIT_S has failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

# Topology, configuration, schedules, fp16, loss scales, data, launcher, pipelines, checkpoints, ZeRO 1 to 3, recomputation.
MODULES = """runtime/pipe runtime/test_ds_config_dict.py runtime/test_ds_config_model.py runtime/test_lr_schedulers.py
runtime/half_precision/test_fp16.py runtime/half_precision/test_dynamic_loss_scale.py runtime/zero/test_zero_config.py
runtime/test_data.py launcher pipe checkpoint v1/zero/test_zero.py runtime/test_ds_initialize.py
runtime/activation_checkpointing""".split()
LIMIT_S = 240.0
_NOTES, _ROOT = "DEEPSPEED_TEST_NOTES", Path(__file__).resolve().parent.parent


def pytest_configure() -> None:
    """Let the ranks of a test start with torch imported."""
    preload = ["torch", "deepspeed.pipe", "parallel3d.initialization", "deepspeed_test_ranks"]
    multiprocessing.set_forkserver_preload(preload)


def pytest_collectstart(collector: Any) -> None:
    """Make fixtures of the classes that DeepSpeed's tests mark as fixtures, which pytest since 8.4 does not know as such."""
    module = getattr(collector, "obj", None) if isinstance(collector, pytest.Module) else None
    for name, value in list(vars(module).items()) if module is not None else ():
        if isinstance(value, type) and getattr(value, "is_dist_fixture", False) and "run" in vars(value):
            setattr(module, f"fixture_{name}", pytest.fixture(name=name)(lambda request, kind=value: kind()(request)))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test begins; if it hangs, nothing follows."""
    _note(nodeid, "failed", "hangs")


def pytest_runtest_logreport(report: Any) -> None:
    """Note the outcome of a test that has ended, by itself or in its setup."""
    if report.when == "call" or not report.passed:
        crash = getattr(report.longrepr, "reprcrash", None)
        _note(report.nodeid, report.outcome, crash.message.partition("\n")[0] if crash is not None else "")


def _note(*words: str) -> None:
    with open(os.environ[_NOTES], "a") as file:
        file.write(json.dumps(words) + "\n")


def main() -> int:
    """Run the tests, and print the counts of each file and the tests that fail."""
    from parallel3d.cli.deepspeed import write_wheel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="DeepSpeed's repository")
    parser.add_argument("modules", nargs="*", default=MODULES, help="files or folders below its tests/unit")
    options = parser.parse_args()
    total: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        # Without the checkout's own package, which its tests would import.
        unit = Path(shutil.copytree(options.checkout / "tests", Path(folder, "tests"))) / "unit"
        places = [unit / name for name in options.modules]
        files = [file for place in places for file in (sorted(place.rglob("test_*.py")) or [place])]
        with zipfile.ZipFile(write_wheel(Path(folder))) as wheel:
            wheel.extractall(folder)
        command = Path(folder) / "bin" / "deepspeed"
        command.parent.mkdir()
        start = "import sys\nfrom parallel3d.launcher.deepspeed import command\nsys.exit(command())\n"
        command.write_text(f"#!{sys.executable}\n{start}")
        command.chmod(0o755)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [_ROOT, folder, unit.parent, unit, _ROOT / "tools"])),
            "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "LOCAL_SIZE": "4",  # the number of devices, for tests that ask
            "HF_HUB_OFFLINE": "1",
            _NOTES: str(Path(folder) / "notes"),
        }
        for file in files:
            found = _run(file, environment)
            counts = Counter(outcome for outcome, _ in found.values())
            total += counts
            print(f"{file.relative_to(unit)}: {dict(counts) or 'it can not be imported'}", flush=True)
            for test, (outcome, reason) in found.items():
                if outcome == "failed":
                    print(f"    {test.partition('::')[2]}: {reason}", flush=True)
    print(f"all: {dict(total)}")
    return 0


def _run(file: Path, environment: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return (outcome, reason) of each test of a file. After one that hangs, pytest is started again for the others."""
    found: dict[str, tuple[str, str]] = {}
    notes = Path(environment[_NOTES])
    while True:
        notes.write_text("")
        left_out = [word for test in found for word in ("--deselect", test)]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "deepspeed_tests", str(file)]
        process = subprocess.Popen(
            [*command, *left_out],
            cwd=file.parent,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while (hangs := process.poll() is None) and time.time() - notes.stat().st_mtime < LIMIT_S:
            time.sleep(1)
        if hangs:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        new = {test: (outcome, reason) for test, outcome, reason in map(json.loads, notes.read_text().splitlines())}
        found |= new
        if not hangs or not new:
            return found


if __name__ == "__main__":
    sys.exit(main())
