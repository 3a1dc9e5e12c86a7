"""The launcher as a user meets it: a process that starts scripts, ends them, and says what went wrong."""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from warm import WarmProcess

from parallel3d.launcher import agent, cli, worker
from parallel3d.launcher.agent import rank_failures, summary

REPO = Path(__file__).parents[2]
TIMEOUT_S = 60

# A rank, its child, and a child that left the rank's process group; their ids are in the file named by the rank.
SLEEPER = """
import os, pathlib, signal, subprocess, sys, time
rank = os.environ["RANK"]
if rank in sys.argv[1:]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "300"])
stray = subprocess.Popen(["sleep", "300"], start_new_session=True)
pathlib.Path("." + rank).write_text(f"{os.getpid()} {child.pid} {stray.pid}")
os.rename("." + rank, rank + ".pids")
"""


def environment_in(folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(folder)}
    environment.pop("OMP_NUM_THREADS", None)
    return environment


REAL, FORKED = ("parallel3d.launcher",), ("forked_ranks", "parallel3d.launcher")  # the latter for what imports torch


def start(
    folder: Path, script: str, *options: str, args: tuple[str, ...] = (), launcher: tuple[str, ...] = REAL
) -> WarmProcess:
    """The launcher, from a warm process; the ranks are started as ever, or else forked."""
    (folder / "script.py").write_text(script)
    return WarmProcess(folder, environment_in(folder), *launcher, *options, "script.py", *args)


def run(folder: Path, script: str, *options: str, launcher: tuple[str, ...] = REAL) -> tuple[int, str, str]:
    process = start(folder, script, *options, launcher=launcher)
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def pids(folder: Path, num_ranks: int) -> list[int]:
    """The ids that `num_ranks` ranks running SLEEPER wrote, once they all have."""
    wait_for(lambda: len(list(folder.glob("*.pids"))) == num_ranks)
    return [int(pid) for file in folder.glob("*.pids") for pid in file.read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Return the environment that each of three ranks sees, started from a terminal with 'hello' on standard input."""
    folder = tmp_path_factory.mktemp("reports")
    script = """
import json, os, sys
seen = dict(argv=sys.argv, name=__name__, file=__file__, path=sys.path[0], env=dict(os.environ))
seen["tty"] = sys.stdout.isatty()
if os.environ["RANK"] == "0":
    seen["stdin"] = sys.stdin.read()
open(os.environ["RANK"] + ".json", "w").write(json.dumps(seen))
"""
    args = ("--m", "3", "--num_gpus", "7", "-m", "x", "--", "--log_dir=y", "-h", "${local_rank}", "$$", "", "a b")
    (folder / "script.py").write_text(script)
    command = [sys.executable, "-m", "parallel3d.launcher", "--num_procs", "3", "script.py", *args]
    terminal, slave = pty.openpty()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment_in(folder),
        stdin=subprocess.PIPE,
        stdout=slave,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, err = process.communicate("hello", timeout=TIMEOUT_S)
    os.close(slave)
    os.close(terminal)
    assert (process.returncode, err) == (0, "")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]


def test_each_rank_finds_its_place_in_the_environment(reports: list[dict]) -> None:
    for rank, report in enumerate(reports):
        env = report["env"]
        assert [env["RANK"], env["LOCAL_RANK"]] == [str(rank), str(rank)]
        assert [env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]] == ["3", "3"]
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["MASTER_PORT"] == reports[0]["env"]["MASTER_PORT"] != "0"
        assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert env["CUDA_VISIBLE_DEVICES"] == ""  # CPU processes


def test_what_follows_the_script_is_the_scripts(reports: list[dict]) -> None:
    for report in reports:
        assert report["argv"][1:] == [
            *("--m", "3", "--num_gpus", "7", "-m", "x", "--", "--log_dir=y", "-h", "${local_rank}", "$$", "", "a b")
        ]


def test_a_script_runs_as_the_main_program(reports: list[dict]) -> None:
    for report in reports:
        assert report["name"] == "__main__"
        assert report["argv"][0] == report["file"] == os.path.join(report["path"], "script.py")


def test_terminal_and_standard_input_are_the_launchers(reports: list[dict]) -> None:
    assert all(report["tty"] for report in reports)
    assert reports[0]["stdin"] == "hello"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--num", "4", "s.py"], "unknown option --num. Did you mean '--num_gpus'?"),
        (["--num_proc=4", "s.py"], "unknown option --num_proc=4. Did you mean '--num_procs'?"),
        (["--num_procs", "0", "s.py"], "'0' is not a number of processes: give an integer of at least 1"),
        (["--num_procs", "pp2,td2", "s.py"], "unknown word 'td2'. Did you mean 'tp2'?"),
        (["--num_gpus", "-1", "s.py"], "--num_gpus"),
        (["--num_gpus", "2", "--num_procs", "2", "s.py"], "--num_procs: not allowed with argument --num_gpus"),
        (["--num_gpus", "8", "s.py"], "--num_gpus 8, but the number of CUDA devices present is 2"),
        (["--master_port", "65536", "s.py"], "not a port"),
        (["missing.py"], "there is no script 'missing.py' in "),
        (["--no_python", "missing-program"], "there is no program 'missing-program' on PATH"),
        (["--num_procs", "2"], "nothing to run: name a script"),
    ],
)
def test_a_wrong_command_line_is_explained(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "s.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "num_devices", "num_workers", "uses_gpus"),
    [
        ([], 4, 4, True),
        ([], 0, 1, False),
        (["--num_gpus", "2"], 4, 2, True),
        (["--num_procs", "3"], 4, 3, False),
        (["--num_procs", "tp3,dp2,zero1"], 4, 6, False),
        (["--num_gpus", "pp2,sp,tp2"], 4, 4, True),
    ],
)
def test_number_of_processes(
    argv: list[str], num_devices: int, num_workers: int, uses_gpus: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[argparse.Namespace] = []
    monkeypatch.setattr(agent, "launch", launched.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_devices))))
    cli.main([*argv, __file__])
    assert [(options.num_workers, options.uses_gpus) for options in launched] == [(num_workers, uses_gpus)]


def test_slots_count_the_devices_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    monkeypatch.setattr(agent, "launch", lambda _: launched.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3")
    cli.main(["--include", "localhost:2,0", __file__])
    assert launched == ["7,3"]


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = run(tmp_path, "", "--num_procs", "1", "--master_port", port)
    assert code == 2
    assert f"--master_port {port} is taken; leave it out to get a free one" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("statement", "code", "how"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL, "SIGKILL"),
    ],
)
def test_the_exit_code_of_the_failed_rank_is_the_jobs(tmp_path: Path, statement: str, code: int, how: str) -> None:
    script = f"import os, signal, sys\nif os.environ['RANK'] == '1': {statement}"
    found, out, err = run(tmp_path, script, "--num_procs", "2")
    # On a busy machine rank 0 may not be through when rank 1 fails, and is ended then.
    ended = ["parallel3d: ended because of it: rank 0"]
    assert (found, out, err.splitlines()[0]) == (code, "", f"parallel3d: rank 1 failed ({how})")
    assert err.splitlines()[1:] in ([], ended)


def test_a_rank_that_fails_between_two_looks_is_not_one_that_was_ended(tmp_path: Path) -> None:
    """While torch's agent looks, after ours, which has found all ranks running."""
    script = "import os, sys, time\ntime.sleep(0.3)\nsys.exit(3 * (os.environ['RANK'] == '1'))"
    late = ("launcher_with_grace", "5", "0.6")
    code, _, err = run(tmp_path, script, "--num_procs", "2", launcher=late)
    assert (code, err.splitlines()[0]) == (3, "parallel3d: rank 1 failed (exit code 3)")


def test_a_rank_that_ends_before_it_joins_is_named(tmp_path: Path) -> None:
    script = "import os\nif os.environ['RANK'] == '0':\n    import parallel3d\n    parallel3d.init_distributed()"
    code, _, err = run(tmp_path, script, "--num_procs", "2", launcher=FORKED)
    assert code == 1
    reason = "PeerError: rank 1 ended (exit code 0) before it joined the world; every rank must call "
    assert f"parallel3d: rank 0 failed (exit code 1): {reason}" in err


def test_an_exception_ends_all_ranks_and_is_shown_once(tmp_path: Path) -> None:
    script = (
        SLEEPER
        + """
if rank != "1":
    time.sleep(300)
while len([name for name in os.listdir() if name.endswith(".pids")]) < 3:
    time.sleep(0.01)
from parallel3d.errors import ExecutionError
raise ExecutionError(", ".join(["rank 1", "stage 1", "micro-batch 3", "F3@1: ValueError: odd"]))
"""
    )
    code, _, err = run(tmp_path, script, "--num_procs", "3", launcher=FORKED)
    assert code == 1
    message = "ExecutionError: rank 1, stage 1, micro-batch 3, F3@1: ValueError: odd"
    assert err.splitlines()[-2:] == [
        f"parallel3d: rank 1 failed (exit code 1): {message}",
        "parallel3d: ended because of it: ranks 0, 2",
    ]
    assert err.count("micro-batch 3, F3@1") == 2  # the traceback and the summary
    assert err.count("Traceback") == 1
    assert not any(map(lives, pids(tmp_path, 3)))


@pytest.mark.parametrize(
    ("number", "times", "stubborn", "grace_s"),
    [(signal.SIGINT, 1, (), 600), (signal.SIGTERM, 1, ("1",), 1), (signal.SIGTERM, 2, ("0", "1"), 600)],
    ids=["interrupt", "terminate", "terminate twice"],
)
def test_a_signal_to_the_launcher_leaves_no_process(
    tmp_path: Path, number: signal.Signals, times: int, stubborn: tuple[str, ...], grace_s: int
) -> None:
    """Where the grace is long, the launcher ends only if it does not wait for that."""
    (tmp_path / "script.py").write_text(SLEEPER + "time.sleep(300)")
    arguments = [str(grace_s), "0", "--num_procs", "2", "script.py", *stubborn]
    process = WarmProcess(tmp_path, environment_in(tmp_path), "launcher_with_grace", *arguments)
    started = pids(tmp_path, 2)
    assert len(started) == 6
    assert all(map(lives, started))
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.3)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (128 + number, "")
    assert not any(map(lives, started))
    assert not list(tmp_path.glob("parallel3d_*"))  # its temporary folder


def test_nothing_is_left_of_a_killed_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, SLEEPER + "time.sleep(300)", "--num_procs", "2", args=("0", "1"))
    started = pids(tmp_path, 2)
    variables = Path(f"/proc/{started[0]}/environ").read_text().split("\0")
    [error_file] = [v.partition("=")[2] for v in variables if v.startswith("TORCHELASTIC_ERROR_FILE=")]
    [folder] = [place for place in Path(error_file).parents if place.name.startswith("parallel3d_")]
    assert folder.is_dir()
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    wait_for(lambda: not any(map(lives, started)))
    wait_for(lambda: not folder.exists())


ORPHANS = """
import os, pathlib, time
for _ in range(20):
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            time.sleep(0.05)  # until its parent has ended
        os._exit(0)
    os.waitpid(child, 0)

def zombies():
    stats = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            stats.append(stat.read_text().rpartition(")")[2].split()[:2])
        except OSError:
            pass
    return stats.count(["Z", str(os.getppid())])

end = time.monotonic() + 10
time.sleep(0.2)
while zombies() and time.monotonic() < end:
    time.sleep(0.05)
print(zombies())
"""


def test_orphans_of_the_ranks_are_reaped_as_they_end(tmp_path: Path) -> None:
    assert run(tmp_path, ORPHANS, "--num_procs", "1") == (0, "0\n", "")


def test_two_jobs_at_once_meet_their_own_ranks(tmp_path: Path) -> None:
    script = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(int(sys.argv[1]))
dist.all_reduce(total)
print(total.item())
dist.destroy_process_group()
"""
    jobs = [start(tmp_path, script, "--num_procs", "2", args=(job,), launcher=FORKED) for job in ("1", "10")]
    outputs = [job.communicate(timeout=TIMEOUT_S) for job in jobs]
    assert [out.split() for out, _ in outputs] == [["2", "2"], ["20", "20"]], outputs
    assert [job.returncode for job in jobs] == [0, 0]


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("prefix", ["[rank {}] ", ""], ids=["beside files", "straight"])
def test_lines_of_ranks_stay_whole_and_come_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, unbuffered: bool
) -> None:
    """Into a pipe, where Python itself writes blocks, or else every word."""
    script = """
import os, sys, time
print("begun")
for word in "a line of rank".split():
    for stream in (sys.stdout, sys.stderr):
        print(word, end=" ", file=stream)
    time.sleep(0.25)
for stream in (sys.stdout, sys.stderr):
    print(os.environ["RANK"], file=stream)
time.sleep(600)
"""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1" if unbuffered else "")
    process = start(tmp_path, script, "--num_procs", "2", *(("--log_dir", "logs") if prefix else ()))
    late = threading.Timer(TIMEOUT_S, process.terminate)
    late.start()
    out, err = ([stream.readline() for _ in range(n)] for stream, n in ((process.stdout, 4), (process.stderr, 2)))
    late.cancel()
    process.terminate()
    process.communicate(timeout=TIMEOUT_S)
    begun = [prefix.format(rank) + "begun\n" for rank in (0, 1)]
    whole = [prefix.format(rank) + f"a line of rank {rank}\n" for rank in (0, 1)]
    assert sorted(out) == sorted(begun + whole)
    assert sorted(err) == whole


def test_log_dir_keeps_each_ranks_output(tmp_path: Path) -> None:
    script = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    code, out, _ = run(tmp_path, script, "--num_procs", "2", "--enable_each_rank_log", "logs")
    assert code == 0
    assert sorted(out.splitlines()) == ["[rank 0] out 0", "[rank 1] out 1"]
    assert sorted(file.read_text() for file in tmp_path.glob("logs/**/stdout.log")) == ["out 0\n", "out 1\n"]
    assert sorted(file.read_text() for file in tmp_path.glob("logs/**/stderr.log")) == ["err\n", "err\n"]


def test_a_program_that_is_not_pythons(tmp_path: Path) -> None:
    """An empty OMP_NUM_THREADS counts as none."""
    command = ["--num_procs", "2", "--save_pid", "--no_python"]
    words = 'echo "$RANK $OMP_NUM_THREADS $(cat "$0/$PPID.deepspeed") $1"'
    program = ["sh", "-c", words, tempfile.gettempdir(), "$x ${local_rank}"]
    process = WarmProcess(tmp_path, environment_in(tmp_path) | {"OMP_NUM_THREADS": ""}, *REAL, *command, *program)
    out, err = process.communicate(timeout=TIMEOUT_S)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(out.splitlines()) == [f"{rank} {threads} {process.pid} $x ${{local_rank}}" for rank in (0, 1)]
    assert (process.returncode, err) == (0, "")
    assert not Path(tempfile.gettempdir(), f"{process.pid}.deepspeed").exists()


def test_ranks_go_where_a_plan_places_them(tmp_path: Path) -> None:
    """Two launchers on this host stand for two hosts. A failed rank is named by its rank of the plan."""
    script = """
import os, pathlib, sys
import parallel3d
import torch.distributed as dist
parallel3d.init_distributed("gloo")
rank = int(os.environ["RANK"])
assert (dist.get_rank(), dist.get_world_size()) == (rank, 4)
pathlib.Path(f"{rank}.place").write_text(os.environ["CROSS_RANK"] + os.environ["LOCAL_RANK"])
dist.barrier()
sys.exit(3 * (rank == 2))
"""
    places = [
        {"rank": rank, "host": host, "gpu": gpu}
        for rank, (host, gpu) in enumerate([("a", 0), ("b", 0), ("a", 1), ("b", 1)])
    ]
    (tmp_path / "ranks.json").write_text(json.dumps(places))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    options = ["--ranks", "ranks.json", "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", port, "--node_rank"]
    hosts = [start(tmp_path, script, *options, index, launcher=FORKED) for index in "01"]
    said = [host.communicate(timeout=TIMEOUT_S) for host in hosts]
    assert [(tmp_path / f"{rank}.place").read_text() for rank in range(4)] == ["00", "10", "01", "11"], said
    assert hosts[0].returncode == 3
    assert "rank 2" in said[0][1]


WORKER = [sys.executable, worker.__file__, str(os.getpid())]
PROGRAMS = {
    "exception": "def f():\n    raise ValueError('a\\nb') from KeyError('c')\nf()",
    "syntax error": "x = (",
    "exit text": "import sys; sys.exit('why')",
    "exit code": "raise SystemExit(7)",
    "exit hooks": "import atexit; atexit.register(print, 'bye'); 1 / 0",
    "own hook": "import sys; sys.excepthook = lambda *e: print('mine', e[0]); 1 / 0",
    "imports and spawns": """
import multiprocessing, neighbour
def double(x):
    return neighbour.two * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(double, [1, 2]))
""",
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("as_module", [False, True])
def test_a_worker_behaves_as_python_does(tmp_path: Path, program: str, as_module: bool) -> None:
    (tmp_path / "neighbour.py").write_text("two = 2")
    (tmp_path / "program.py").write_text(PROGRAMS[program])
    target = ["-m", "program"] if as_module else [str(tmp_path / "program.py")]
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    expected, found = (
        subprocess.run([*command, *target], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
        for command in ([sys.executable], WORKER)
    )
    assert found.returncode == expected.returncode
    assert found.stdout == expected.stdout
    # With -m python itself shows its frames in runpy too: there compare the last line.
    start = -1 if as_module else 0
    assert found.stderr.splitlines()[start:] == expected.stderr.splitlines()[start:]


def test_a_message_neither_floods_nor_controls_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise ValueError('\\x1b[2J' + 'x' * 10**6 + ' the end')")
    error_file = tmp_path / "error.json"
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(error_file)}
    command = [*WORKER, str(tmp_path / "program.py")]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert len(found.stderr) < 40_000
    assert "\x1b" not in found.stderr
    assert "ValueError: \\x1b[2Jxxx" in found.stderr
    assert found.stderr.endswith("xxx the end\n")
    failures = rank_failures({0: ProcessFailure(0, 0, 1, str(error_file))}, {0}, 0.0)
    assert len(summary(failures)) < 3_000
    assert summary(failures).startswith("parallel3d: rank 0 failed (exit code 1): ValueError: \\x1b[2Jxxx")


def test_a_failed_rank_that_hangs_while_it_shuts_down_is_cut_short(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(300,)).start()\n1 / 0")
    hurried = f"""
import sys
sys.path[0] = {os.path.dirname(worker.__file__)!r}
import worker
worker._EXIT_TIMEOUT_S = 0.2
worker.main()
"""
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}
    command = [sys.executable, "-c", hurried, str(os.getpid()), str(program)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert found.returncode == 1
    assert "ZeroDivisionError: division by zero" in found.stderr


def test_a_silent_death_counts_as_the_cause_of_its_peers_exceptions(tmp_path: Path) -> None:
    def failure(rank: int, exit_code: int, error: str | None, failed_at: float = 0.0) -> ProcessFailure:
        file = tmp_path / f"{rank}.json"
        if error is not None:
            file.write_text(json.dumps({"message": {"message": error, "extraInfo": {"timestamp": int(failed_at)}}}))
            os.utime(file, (failed_at, failed_at))
        return ProcessFailure(rank, 0, exit_code, str(file))

    found = {
        0: failure(0, 1, "RuntimeError: Connection closed by peer\ndetails", 100.5),
        1: failure(1, -signal.SIGKILL, None),
        2: failure(2, -signal.SIGTERM, None),
        3: failure(3, 1, "RuntimeError: Broken pipe", 101.0),
        4: failure(4, -signal.SIGKILL, None),
    }
    found[5] = failure(5, 1, "PeerError: rank 3 (stage 1, host h) failed", 100.1)
    # The ranks themselves know better than the order of their deaths.
    known = rank_failures(found, failed_first={0, 1}, last_healthy=100.0, culprit=3)
    assert summary(known).splitlines() == [
        "parallel3d: rank 3 failed (exit code 1): RuntimeError: Broken pipe",
        "parallel3d: rank 0 failed too (exit code 1): RuntimeError: Connection closed by peer",
        "parallel3d: ended because of it: ranks 1, 2, 4, 5",
    ]
    # It may have been told to end while it still shut down: its exception made the exit code.
    known = rank_failures({**found, 3: failure(3, -signal.SIGTERM, "ValueError: odd")}, {0, 1}, 100.0, culprit=3)
    assert summary(known).splitlines()[0] == "parallel3d: rank 3 failed (exit code 1): ValueError: odd"
    assert known[0].status == 1
    failure(3, 1, "RuntimeError: Broken pipe", 101.0)
    del found[5]
    failures = rank_failures(found, failed_first={0, 1}, last_healthy=100.0)
    assert summary(failures).splitlines() == [
        "parallel3d: rank 1 failed (SIGKILL)",
        "parallel3d: rank 0 failed 0.5 s later (exit code 1): RuntimeError: Connection closed by peer",
        "parallel3d: rank 3 failed 1.0 s later (exit code 1): RuntimeError: Broken pipe",
        "parallel3d: ended because of it: ranks 2, 4",
    ]
    assert failures[0].status == 137
    # A mistake in the script is every rank's.
    found = {rank: failure(rank, 1, "ConfigError: unknown key 'optimiser'", 100.0 + rank) for rank in (2, 0, 1)}
    found[3] = failure(3, 1, "ConfigError: no optimizer", 104.0)
    assert summary(rank_failures(found, set(found), 100.0)).splitlines() == [
        "parallel3d: rank 0 failed (exit code 1): ConfigError: unknown key 'optimiser'",
        "parallel3d: the same error on ranks 1, 2",
        "parallel3d: rank 3 failed 4.0 s later (exit code 1): ConfigError: no optimizer",
    ]
