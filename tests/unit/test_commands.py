"""The commands `p3d` and `parallel3d`: their help, options and output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel3d.cli import ckpt
from parallel3d.cli.arguments import make_parser
from parallel3d.config import load
from parallel3d.launcher.cli import parse_options
from parallel3d.parity.settings import TOLERANCES

COMMANDS = [
    "config",
    "check",
    "ckpt",
    "ckpt import",
    "plan",
    "report",
    "trace",
    "doctor",
    "build-kernels",
    "deepspeed",
    "completion",
]


def test_help_and_what_starts_other_hosts_import_no_torch(tmp_path: Path):
    (tmp_path / "ssh").write_text("#!/bin/sh\n")
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("a.invalid slots=1\nb.invalid slots=1\n")
    lines = [f"p3d({[*command.split(), '--help']})" for command in COMMANDS]
    lines += [f"{command}([{flag!r}])" for command in ("p3d", "launcher") for flag in ("--help", "--version")]
    lines.append(f"launcher(['-H', {str(tmp_path / 'hosts')!r}, 's.py']) and sys.exit('no host has come')")
    script = f"""
import sys
from parallel3d.cli import main as p3d
from parallel3d.launcher import main as launcher
for line in {lines}:
    try:
        eval(line)
    except SystemExit as end:
        assert end.code == 0, line
assert "torch" not in sys.modules
"""
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: p3d") == len(COMMANDS) + 1
    assert done.stdout.endswith("parallel3d 0.1.0\n")


def test_the_package_is_the_launcher():
    command = [sys.executable, "-m", "parallel3d", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "parallel3d 0.1.0\n"


def test_options_may_be_written_with_either_line():
    options = make_parser().parse_args(["plan", "--global_batch", "8", "--global-batch=16"])
    assert options.global_batch == 16
    assert make_parser().parse_args(["doctor", "--tensor_parallel", "2"]).tensor_parallel == 2
    launch = parse_options(["--num-procs", "2", "--max-restarts=1", __file__, "--its_own", "--its-own"])
    assert (launch.num_procs, launch.max_restarts) == (2, 1)
    assert launch.command[1:] == ["--its_own", "--its-own"]


def test_all_dtypes_may_be_chosen():
    for dtype in TOLERANCES:
        assert make_parser().parse_args(["check", "f", "--layouts", "pp2", "--dtype", dtype]).dtype == dtype
    for dtype in ckpt.DTYPES:
        assert make_parser().parse_args(["ckpt", "export", "a", "b", "--dtype", dtype]).dtype == dtype


@pytest.mark.parametrize("option", ["--nnodes", "--nproc-per-node=1", "--rdzv_backend"])
def test_the_launcher_knows_options_of_torchrun(option: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_options([option, "2", __file__])
    said = capsys.readouterr().err
    assert (
        f"unknown option {option}. That one is torchrun's; use torchrun, or parallel3d with --hostfile, --num_nodes"
        in said
    )


def test_a_reader_that_ends_early_is_no_error():
    command = f"{sys.executable} -m parallel3d.cli config --schema | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (141, "{", "")


def test_completion(tmp_path: Path):
    code = f'p3d() {{ {sys.executable} -m parallel3d.cli "$@"; }}; eval "$(p3d completion bash)"; complete -p p3d parallel3d'
    code += "; COMP_WORDS=(p3d plan --gl); COMP_CWORD=2; _shtab_p3d; echo ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    first, second, third = done.stdout.splitlines()
    assert first.endswith("_shtab_p3d p3d")
    assert second.endswith("_shtab_parallel3d parallel3d")
    assert third == "--global-batch"


def test_a_configuration_may_name_its_schema():
    assert load({"$schema": "p3d.schema.json", "train_batch_size": 4}) == load({"train_batch_size": 4})
