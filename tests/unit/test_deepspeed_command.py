"""The command `deepspeed`: its hosts and flags, what it starts, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from warm import WarmProcess

from parallel3d.errors import ConfigError
from parallel3d.launcher import deepspeed
from parallel3d.launcher.hosts import parse_hostfile, parse_range_list, parse_resource_filter

REPO = Path(__file__).parents[2]
HOSTS = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}


def test_hosts_are_read_and_filtered():
    lines = ["", "# two nodes", "worker-0 slots=4", "  worker-1   slots=2  # the small one"]
    assert parse_hostfile(lines) == {"worker-0": 4, "worker-1": 2}
    assert parse_resource_filter(HOSTS, include_str="worker-1@worker-0:2,0") == {"worker-1": [0, 1], "worker-0": [0, 2]}
    assert parse_resource_filter(HOSTS, exclude_str="worker-1@worker-0:1") == {"worker-0": [0, 2, 3]}
    assert parse_resource_filter(HOSTS) == HOSTS
    assert parse_range_list("0,2-4,6") == [0, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("parse", "told"),
    [
        (lambda: parse_hostfile(["worker-0 4"]), "'worker-0 4' is no host; write a line as: worker-0 slots=4"),
        (lambda: parse_hostfile(["a slots=1", "a slots=2"]), "a is there twice"),
        (lambda: parse_hostfile(["# nothing"]), "no host is in it"),
        (lambda: parse_resource_filter(HOSTS, "worker-0", "worker-1"), "give one of them"),
        (lambda: parse_resource_filter(HOSTS, "worker-2"), "no host 'worker-2'.* Did you mean 'worker-"),
        (lambda: parse_resource_filter(HOSTS, "worker-1:5"), r"worker-1 has the slots \[0, 1\], and not \[5\]"),
        (lambda: parse_resource_filter(HOSTS, "worker-0:a"), "'worker-0:a' is no host with slots"),
        (lambda: parse_range_list("0,5-2"), "does not ascend at '5-2'"),
        (lambda: parse_range_list("1,1"), "does not ascend"),
        (lambda: parse_range_list("x"), "'x' is no core"),
    ],
)
def test_wrong_hosts_are_named(parse, told):
    with pytest.raises(ConfigError, match=told):
        parse()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--autotuning run s.py", "--autotuning is not supported; `p3d plan`"),
        ("--elastic_training s.py", "--elastic_training is not supported"),
        ("--num_gpus 1 -i localhost s.py", "don't go with --include or --exclude localhost"),
        ("--num_nodes 2 s.py", "--num_nodes is 2, but hosts are localhost; name a --hostfile"),
        ("-e localhost s.py", "leaves no device"),
        ("--no_ssh --node_rank 3 s.py", "nodes are 0 to 0"),
        ("--force_multi --launcher mpich s.py", "--launcher mpich is not supported; drop it"),
        ("-H hosts --no_ssh --node_rank 0 s.py", "the first of 2 hosts is localhost, where the others can't reach it"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, told: str):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost slots=1\nother slots=1\n")
    with pytest.raises(ConfigError, match=told):
        deepspeed.main(arguments.split())


SCRIPT = """
import json, os, sys
seen = [sys.argv[1:], os.environ["WORLD_SIZE"], os.environ.get("FROM_FILE"), sorted(os.sched_getaffinity(0))]
with open(os.environ["RANK"], "w") as file:
    json.dump(seen, file)
"""


def run(folder: Path, *argv: str, **environment: str) -> tuple[str, list[list]]:
    """Run the command in a folder. Returns what it says, and what each rank saw."""
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": "", **environment}
    process = WarmProcess(folder, environment, "parallel3d.launcher.deepspeed", *argv)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return err, [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]"))]


def test_a_host_without_gpus_gets_cpu_processes_with_their_local_ranks(tmp_path: Path):
    cores = len(os.sched_getaffinity(0))
    said, found = run(tmp_path, "--num_gpus", "2", "--bind_cores_to_rank", "script.py", "--text", 'a $x "b"')
    assert "there is no CUDA device; the number of CPU processes is 2" in said
    assert [row[:2] for row in found] == [[[f"--local_rank={rank}", "--text", 'a $x "b"'], "2"] for rank in (0, 1)]
    assert cores == 1 or not set(found[0][3]) & set(found[1][3])


def test_several_hosts_are_started_by_ssh_with_this_one_s_folder_and_environment(tmp_path: Path):
    """The other host is played by an `ssh` that runs what it is given here; its address is another one of this host's."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" >> asked\nfor last; do :; done\ncd / && env -u FROM_FILE sh -c "$last"\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nelsewhere.invalid slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=a b\n")
    options = ["-H", "hosts", "--ssh_port", "2222", "--master_port", "29877", "script.py", "a $x"]
    _, found = run(tmp_path, *options, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert [row[:3] for row in found] == [[[f"--local_rank={rank}", "a $x"], "3", "a b"] for rank in (0, 0, 1)]
    [asked] = (tmp_path / "asked").read_text().splitlines()
    assert "-p 2222 elsewhere.invalid cd " in asked
    assert sys.executable in asked
