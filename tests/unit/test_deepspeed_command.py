"""The command `deepspeed`: its hosts and flags, what it starts, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from warm import WarmProcess

from parallel3d.comm.environment import mpi_environment
from parallel3d.errors import ConfigError
from parallel3d.launcher import cli, deepspeed, nodes
from parallel3d.launcher import start as start_module
from parallel3d.launcher.nodes import _PASSED_ON
from parallel3d.launcher.start import choose_hosts
from parallel3d.launcher.worker import own_cores
from parallel3d.membership import TOKEN

REPO = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--autotuning run s.py", "--autotuning is not supported; `p3d plan`"),
        ("--elastic_training s.py", "--elastic_training is not supported"),
        ("--num_gpus 1 -i localhost s.py", "don't go with --include or --exclude localhost"),
        ("--num_nodes 2 s.py", "--num_nodes is 2, but hosts are localhost; name a --hostfile"),
        ("-e localhost s.py", r"no slot is left of {'localhost': \[0\]}; .* --exclude fewer than 'localhost'"),
        ("-H hosts --num_procs pp3 s.py", "the 3 ranks of a layout can't be divided among 2 hosts"),
        ("--no_ssh --node_rank 3 s.py", "nodes are 0 to 0"),
        ("--max_elastic_nodes 2 s.py", "--max_elastic_nodes is not supported; --max_restarts goes on with fewer hosts"),
        ("--launcher mvapich s.py", r"--launcher mvapich is not supported; drop it.*MVAPICH take mpich's options"),
        ("--launcher impi s.py", "--launcher impi is not supported"),
        ("-H hosts --no_ssh --node_rank 0 s.py", "the first of 2 hosts is localhost, where the others can't reach it"),
        ("--no_ssh --num_nodes 2 --node_rank 0 s.py", "needs --master_addr: the address of the host of --node_rank 0"),
        ("-H hostile s.py", "'a;touch x slots=1' is not a host"),
        ("-H hosts --master_addr a s.py", "'x;touch y=1' is not a variable"),
        ("--ranks hosts s.py", "--ranks hosts is not a ranks.json of `p3d plan`"),
        ("--ranks lacking.json s.py", r"the ranks are \[0, 2\]; give each rank one place, from 0"),
        ("--ranks shell.json s.py", "'a;touch x' is not a host name"),
        ("--ranks twice.json s.py", r"the devices of host a are \[0, 0\]; give each rank a device of its own"),
        ("--ranks named.json s.py", r"the devices of host a are \['0'\]"),
        ("--ranks plan.json -H hosts s.py", "--ranks plan.json names hosts and devices, and so does --hostfile hosts"),
        ("--ranks plan.json --num_gpus 1 s.py", "--ranks plan.json names hosts and devices, and so does --num_gpus 1"),
        ("--ranks plan.json --num_nodes 1 s.py", "and so does --num_nodes 1; give one of the two"),
        ("--ranks plan.json -e a:0 s.py", "and so does --exclude a:0; give one of the two"),
        ("-H latin s.py", "latin is not UTF-8 text"),
        ("--num_procs 1 --bind_core_list 0,99999 script.py", r"--bind_core_list: .* cores \[99999\] are not among"),
        ("missing.py", "there is no script 'missing.py'"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, told: str):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("localhost slots=1\nother slots=1\n")
    Path("hostile").write_text("a;touch x slots=1\n")
    Path(".deepspeed_env").write_text("# of all hosts\n\nA=1\nx;touch y=1\n")
    places = [{"rank": rank, "host": "a", "gpu": rank} for rank in (2, 0)]
    Path("lacking.json").write_text(json.dumps(places))
    Path("shell.json").write_text(json.dumps([{"rank": 0, "host": "a;touch x", "gpu": 0}]))
    for name, gpus in {"twice": [0, 0], "named": ["0"], "plan": [0]}.items():
        places = [{"rank": rank, "host": "a", "gpu": gpu} for rank, gpu in enumerate(gpus)]
        Path(f"{name}.json").write_text(json.dumps(places))
    Path("latin").write_bytes("h\xf6st slots=1".encode("latin-1"))
    Path("script.py").touch()
    with pytest.raises(ConfigError, match=told):
        deepspeed.main(arguments.split())


def test_wrong_texts_for_several_hosts_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    with pytest.raises(ConfigError, match=r"""--launcher_args '-o "x': No closing quotation; close the quotes"""):
        deepspeed.main(["-H", "hosts", "--dry_run", "--launcher_args", '-o "x', "s.py"])
    Path(".deepspeed_env").write_bytes(b"A=\xff")
    with pytest.raises(ConfigError, match=r"\.deepspeed_env is not UTF-8 text"):
        deepspeed.main(["-H", "hosts", "--dry_run", "s.py"])
    Path(".deepspeed_env").write_text("  # of all hosts\n  A = 1\n")
    assert nodes.exports()["A"] == "1"


@pytest.mark.parametrize("prog", ["parallel3d", "deepspeed"])
def test_options_choose_hosts_and_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prog: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    Path("hosts").write_text("b slots=4 # has the lowest rank\n\na slots=2\n")
    for words, hosts in {
        "-H hosts": {"b": [0, 1, 2, 3], "a": [0, 1]},
        "--hostfile hosts -i a@b:2,0": {"b": [0, 2], "a": [0, 1]},
        "-H hosts --include a:1": {"a": [1]},
        "-H hosts -e b:3@a": {"b": [0, 1, 2]},
        "-H hosts --exclude b": {"a": [0, 1]},
        "-H hosts --num_nodes 1 --num_gpus 2": {"b": [0, 1]},
        "-H hosts --num_accelerators 1": {"b": [0], "a": [0]},
        "-H hosts --num_procs dp6": {"b": [0, 1, 2], "a": [0, 1, 2]},
        "--include localhost:2": {"localhost": [2]},
        "--no_ssh --num_nodes 2 --master_addr b": {"node-0": [0, 1, 2], "node-1": [0, 1, 2]},
    }.items():
        assert list(choose_hosts(cli.parse_options([*words.split(), "s.py"], prog)).items()) == list(hosts.items())
    options = cli.parse_options(["-H", "missing", "s.py"], prog)
    if prog == "parallel3d":  # training on one host alone would be a surprise
        with pytest.raises(ConfigError, match=f"no hostfile 'missing' in {tmp_path}; correct --hostfile"):
            choose_hosts(options)
    else:
        assert choose_hosts(options) == {"localhost": [0, 1, 2]}


def test_a_dry_run_tells_the_processes_of_this_host(capsys: pytest.CaptureFixture[str]):
    own, warning = "'--local_rank=${local_rank}' ", "deepspeed: there is no hostfile 'missing'; this host is used\n"
    for words, first, said in (
        ("-q", own, ""),
        ("--log_level error --no_local_rank", "", ""),
        ("--no_ssh", own, warning),
    ):
        assert deepspeed.main([*words.split(), *"-H missing --dry_run --num_gpus 2 --module job --lr 1".split()]) == 0
        assert capsys.readouterr() == (f"2 x {sys.executable} -m job {first}--lr 1\n", said)


SCRIPT = """
import json, os, sys
seen = [sys.argv[1:], os.environ["WORLD_SIZE"], os.environ.get("FROM_FILE"), sorted(os.sched_getaffinity(0))]
seen.append(os.environ.get("FROM_SCRIPT"))
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


def test_a_rank_s_cores_are_neighbours_on_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of two sockets of two physical cores with two threads each, numbered as Linux does: all sockets' first threads first."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for core in range(8):
        topology = tmp_path / f"cpu{core}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{core % 2}\n")
        (topology / "core_id").write_text(f"{core // 2 % 2}\n")
    assert [own_cores(rank, 2, str(tmp_path)) for rank in (0, 1)] == [[0, 4, 2, 6], [1, 5, 3, 7]]
    assert [own_cores(rank, 3, "nowhere") for rank in (0, 1, 2)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert own_cores(8, 9, "nowhere") == list(range(8))


def test_the_file_of_a_killed_process_with_this_id_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file, options = tmp_path / f"{os.getpid()}.deepspeed", "--save_pid --dry_run --num_gpus 1 --module job".split()
    file.write_text("old")
    assert deepspeed.main(options) == 0
    assert not file.exists()
    file.mkdir()
    with pytest.raises(ConfigError, match=r"--save_pid: .* remove that file"):
        deepspeed.main(options)


def test_several_hosts_are_started_by_ssh_with_this_one_s_folder_and_environment(tmp_path: Path):
    """The other host is played by an `ssh` that runs what it is given here; its address is another one of this host's."""
    (tmp_path / "bin").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@" >> asked\nfor last; do :; done\ncd / && exec env -u FROM_FILE $last\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\nelsewhere.invalid slots=2\n")
    (tmp_path / ".deepspeed_env").write_text("FROM_FILE=a b \n")
    (tmp_path / "activate").write_text("export FROM_SCRIPT=read\n")
    options = "-H hosts --launcher PDSH --ssh_port 2222 --master_port 29877 --venv_script ./activate script.py".split()
    _, found = run(tmp_path, *options, "a $x", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert [row[:3] for row in found] == [[[f"--local_rank={rank}", "a $x"], "3", "a b"] for rank in (0, 0, 1)]
    assert {row[4] for row in found} == {"read"}
    options = "-o BatchMode=yes -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
    assert (tmp_path / "asked").read_text() == f"-T -p 2222 {options} elsewhere.invalid sh -s\n"


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        (["exit 0", "kill -KILL $$", "exec sleep 600"], 128 + signal.SIGKILL),
        (["exit 0", "exit 255", "exec sleep 600"], 255),
        (["kill -KILL $$"], 128 + signal.SIGKILL),
        (["kill -KILL $$", "exit 3"], 3),
        (["kill -KILL $$", "exit 0"], 0),
    ],
)
def test_exit_code_when_hosts_are_lost(monkeypatch: pytest.MonkeyPatch, scripts: list[str], expected: int):
    """A job is a success only if all hosts that are not lost have ended, and well."""
    monkeypatch.setattr(nodes, "_ALONE_S", 0.5)
    started = []
    for index, script in enumerate(scripts):
        starter = nodes.Starter(f"host-{index}", ["sh", "-c", script], script)
        started.append((starter, subprocess.Popen(starter.command, stdin=subprocess.PIPE)))
    assert nodes._wait(started, 0, None) == expected
    for _, process in started:
        process.kill()
        process.communicate()


def test_all_hosts_look_for_programs_and_libraries_in_the_same_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As DeepSpeed's launcher has it: without them an ssh has those of a shell that reads no profile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/nccl plugin")
    found = nodes.exports()
    assert (found["PATH"], found["LD_LIBRARY_PATH"]) == (os.environ["PATH"], "/opt/nccl plugin")


def test_what_mpirun_and_srun_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One launcher on each host of a plan; as the manuals of Open MPI, Hydra (MPICH, MVAPICH, Intel MPI) and Slurm have it."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(_PASSED_ON):
            monkeypatch.delenv(name)
    for name in ("NCCL_DEBUG", "UCX_TLS", "PYTHONUTF8", "HOME_OF_A_SECRET", "CUDA_VISIBLE_DEVICES", TOKEN):
        monkeypatch.setenv(name, "1")
    places = [("b", 1), ("a", 3), ("b", 0)]
    Path("ranks.json").write_text(json.dumps([{"rank": k, "host": h, "gpu": gpu} for k, (h, gpu) in enumerate(places)]))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("home").mkdir()
    Path("home", ".deepspeed_env").write_text("A=4 (x2)\nB=0\n")
    Path(".parallel3d_env").write_text("B=1\n")
    expected = {
        "openmpi": "A='4 (x2)' B=1 mpirun -n 2 --host b:1,a:1 --bind-to none -x NCCL_DEBUG -x UCX_TLS -x PYTHONUTF8 -x A -x B",
        "mpich": "A='4 (x2)' B=1 mpirun -n 2 -ppn 1 -hosts b,a -genvlist NCCL_DEBUG,UCX_TLS,PYTHONUTF8,A,B",
        "slurm": "A='4 (x2)' B=1 srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --export=ALL --no-kill --kill-on-bad-exit=0"
        " --cpu-bind=none --nodelist b,a",
    }
    options = "--ranks ranks.json --dry_run --max_restarts 2 --no_local_rank --bind_core_list 0,2-3 --launcher_args"
    for launcher, start in expected.items():
        assert (
            deepspeed.main([*options.split(), "--x y", "--launcher", launcher, "--module", "job.train", "--lr", "1"])
            == 0
        )
        said = capsys.readouterr().out
        program = (
            f"{sys.executable} -m parallel3d.launcher.deepspeed --no_ssh --hostfile= --ranks=ranks.json --master_addr=b"
        )
        program += (
            " --master_port=29500 --max_restarts=2 --log_level=info --bind_core_list=0,2,3 --module --no_local_rank"
        )
        program += " job.train --lr 1"
        assert said == f"NCCL_DEBUG=1 UCX_TLS=1 PYTHONUTF8=1 {start} --x y {program}\n"
        # What the host with index 1 makes of it.
        mine = deepspeed.parse_args([*program.split()[3:]])
        assert choose_hosts(mine) == {"b": [1, 0], "a": [3]}
        monkeypatch.setenv(
            "SLURMD_NODENAME" if launcher == "slurm" else "PMI_RANK", "a" if launcher == "slurm" else "1"
        )
        assert start_module._index(mine, {"b": [1, 0], "a": [3]}) == 1


def test_mpirun_ends_with_the_launcher_and_after_the_first_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A real one goes on when the launcher is killed, and waits as long as TCP does for a host that is cut off."""

    def runs() -> bool:
        stat = Path(f"/proc/{Path('pid').read_text().strip()}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    def until(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(nodes, "_ALONE_S", 0.5)
    Path("hosts").write_text("a slots=1\nb slots=1\n")
    Path("mpirun").write_text("#!/bin/sh\necho $$ > started\nmv started pid\nexec sleep 30\n")
    Path("mpirun").chmod(0o755)
    store = socket.create_server(("127.0.0.1", 0))
    place = ["--master_addr", "127.0.0.1", "--master_port", str(store.getsockname()[1])]
    command = ["-H", "hosts", "--launcher", "mpich", *place, "s.py"]
    for is_killed in (True, False):
        launcher = os.fork()
        if launcher == 0:
            store.close()
            os._exit(deepspeed.main(command))
        until(Path("pid").exists)
        if is_killed:
            os.kill(launcher, signal.SIGKILL)
        else:
            time.sleep(0.5)  # the launcher has seen the store
            store.close()
        assert os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1]) == (-signal.SIGKILL if is_killed else 1)
        until(lambda: not runs())
        Path("pid").unlink()


def test_arguments_of_mpirun_are_not_taken_for_options():
    options = deepspeed.parse_args(["--launcher_arg", "-mca btl tcp", "--module", "job.train", "--lr", "1"])
    assert options.launcher_args == "-mca btl tcp"


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
