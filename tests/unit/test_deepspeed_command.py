"""The command `deepspeed`: its hosts and flags, what it starts, and what it refuses."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from warm import WarmProcess

from parallel3d.comm.environment import mpi_environment
from parallel3d.deepspeed.launcher.runner import encode_world_info
from parallel3d.errors import ConfigError
from parallel3d.launcher import deepspeed
from parallel3d.launcher.hosts import parse_hostfile, parse_range_list, parse_resource_filter
from parallel3d.launcher.multinode_runner import IMPIRunner, MPICHRunner, MVAPICHRunner, SlurmRunner

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
        ("--force_multi --launcher jsrun s.py", "--launcher jsrun is not supported; drop it"),
        ("-H uneven --master_addr a --launcher mpich s.py", "one number of processes on each host, but the hosts have"),
        ("-H hosts --no_ssh --node_rank 0 s.py", "the first of 2 hosts is localhost, where the others can't reach it"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, told: str):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost slots=1\nother slots=1\n")
    Path("uneven").write_text("localhost slots=1\nother slots=2\n")
    with pytest.raises(ConfigError, match=told):
        deepspeed.main(arguments.split())


SCRIPT = """
import json, os, sys
seen = [sys.argv[1:], os.environ["WORLD_SIZE"], os.environ.get("FROM_FILE"), sorted(os.sched_getaffinity(0))]
with open(os.environ["RANK"], "w") as file:
    json.dump(seen, file)
"""


def run(folder: Path, *argv: str, script: str = SCRIPT, **environment: str) -> tuple[str, list[list]]:
    """Run the command in a folder. Returns what it says, and what each rank saw."""
    (folder / "script.py").write_text(script)
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


OF_MPI = """
import json, os, sys
with open(os.environ["OMPI_COMM_WORLD_RANK"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
"""
# Plays Open MPI's mpirun: passes only the variables of -x on.
MPIRUN = """#!/usr/bin/env python3
import os, subprocess, sys
words = iter(sys.argv[1:])
passed, number = {"PATH": os.environ["PATH"]}, 0
for word in words:
    if word in ("-n", "--host", "-x", "--tag"):
        value = next(words)
        number = int(value) if word == "-n" else number
        passed |= {value: os.environ[value]} if word == "-x" else {}
        assert word != "--host" or value == "127.0.0.1:1,elsewhere.invalid:1"
    else:
        break
program = [word, *words]
for rank in range(number):
    names = {"RANK": rank, "SIZE": number, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    own = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
    subprocess.run(program, env=passed | own, check=True)
"""


def test_mpirun_starts_all_hosts_and_passes_the_environment_on(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.write_text(MPIRUN)
    mpirun.chmod(0o755)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nelsewhere.invalid slots=1\n")
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=a b\n")
    options = ["-H", "hosts", "--launcher", "OpenMPI", "--launcher_args", "--tag x"]
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    _, found = run(tmp_path, *options, "script.py", "a $x", script=OF_MPI, PATH=path)
    for rank, (arguments, seen) in enumerate(found):
        assert (arguments, seen["FROM_FILE"], seen["MASTER_ADDR"]) == (["a $x"], "a b", "127.0.0.1")
        assert mpi_environment(seen) == {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    assert len(found) == 2


def test_commands_of_other_launchers():
    """As their manuals have the options: srun's, and those of Hydra, the process manager of MPICH, MVAPICH and Intel MPI."""
    options = deepspeed.parse_args(["--module", "job.train", "--lr", "1"])
    program, hosts = [sys.executable, "-u", "-m", "job.train", "--lr", "1"], {"a": 4, "b": 4}
    environment = {"HOME": "/root"}
    slurm = SlurmRunner(options, encode_world_info(hosts))
    assert slurm.get_cmd(environment, {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}) == [
        *("srun", "-n", "8", "--ntasks-per-node", "4", "--nodelist", "a,b", "--export=ALL"),
        *program,
    ]
    for kind in (MPICHRunner, MVAPICHRunner, IMPIRunner):
        runner = kind(options, encode_world_info(hosts))
        runner.add_export("A", "4(x2)")
        runner.add_export("B", "1")
        assert runner.exports == {"A": '"4(x2)"', "B": "1"}
        command = ["mpirun", "-n", "8", "-ppn", "4", "-hosts", "a,b", "-genvlist", "A,B", *program]
        assert runner.get_cmd(environment, hosts) == command
    assert environment == {"HOME": "/root", "A": "4(x2)", "B": "1"}


def test_ranks_of_one_host_meet_there():
    prefix = "MV2_COMM_WORLD"
    names = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    found = mpi_environment({f"{prefix}_{name}": value for name, value in names.items()})
    assert found == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    assert mpi_environment({"PMI_RANK": "0", "PMI_SIZE": "1"}) == {}
    assert mpi_environment({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}) == {
        "RANK": "0",
        "WORLD_SIZE": "4",
    }
