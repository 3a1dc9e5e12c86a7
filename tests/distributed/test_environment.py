"""The same script under each launcher's environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch.distributed as dist
from warm import THEN, run_codes, run_launcher

from parallel3d.comm.environment import meet
from parallel3d.errors import CommunicationError, PeerError

ROOT = Path(__file__).parents[2]
SCRIPT = (
    "import parallel3d as p; p.init_distributed(); print(p.comm.get_rank(), p.comm.get_world_size()); p.comm.barrier()"
)


def environment(**variables: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "MASTER", "RANK", "WORLD", "LOCAL"))}
    return {**inherited, "PYTHONPATH": str(ROOT), **variables}


def run(folder: Path, script: str = SCRIPT, **variables: str) -> CompletedProcess[str]:
    [done] = run_codes(script, folder, [environment(**variables)])
    return done


@pytest.fixture
def trap(tmp_path: Path) -> Iterator[str]:
    """Yield a PATH with an ssh that must not be called."""
    ssh, called = tmp_path / "trap" / "ssh", tmp_path / "called"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/sh\necho $* >> {called}\nexit 1\n")
    ssh.chmod(0o755)
    yield f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"
    assert not called.exists(), called.read_text()


def test_srun_starts_a_world(tmp_path: Path, trap: str):
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "127.0.0.1", "PATH": trap}
    ranks = [environment(**job, SLURM_PROCID=str(r), SLURM_LOCALID=str(r)) for r in range(2)]
    done = run_codes(SCRIPT, tmp_path, ranks)
    assert [rank.stdout.strip() for rank in done] == ["0 2", "1 2"], [rank.stderr for rank in done]


def test_our_launcher_and_torchrun_start_the_same_world(tmp_path: Path, trap: str):
    (tmp_path / "script.py").write_text(SCRIPT)
    ours = "parallel3d.launcher", "--num_procs", "2", "script.py"
    torchrun = "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "script.py"
    printed = run_launcher(tmp_path, *ours, THEN, *torchrun, environment=environment(PATH=trap))
    assert sorted(printed.splitlines()) == ["0 2", "0 2", "1 2", "1 2"]


def test_a_script_without_a_launcher_is_a_world_of_one(tmp_path: Path):
    assert run(tmp_path).stdout.strip() == "0 1"


def test_half_of_a_launchers_variables_is_an_error_that_names_the_rest(tmp_path: Path):
    done = run(tmp_path, RANK="0", WORLD_SIZE="1")
    assert done.returncode != 0
    assert "MASTER_ADDR, MASTER_PORT" in done.stderr


def test_a_backend_in_capitals_is_the_same_backend(tmp_path: Path):
    """torch takes either; with the wrong device, all ranks of a host would use its first GPU."""
    done = run(tmp_path, "import parallel3d; parallel3d.init_distributed('NCCL')", CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    assert "local rank 0 has no GPU of its own" in done.stderr


def test_ranks_that_do_not_come_are_named():
    store = dist.HashStore()
    store.set("join/2", "")
    with pytest.raises(CommunicationError, match=r"ranks \[1, 3\] have not joined the world within 0.2 s"):
        meet(store, 0, 4, 0.2)
    store.set("exit/3", "exit code 0")
    with pytest.raises(PeerError, match=r"rank 3 ended \(exit code 0\) before it joined the world") as raised:
        meet(store, 0, 4, 60)
    assert raised.value.rank == 3


def test_a_rank_that_comes_last_lets_all_go_on():
    store = dist.HashStore()
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda rank: meet(store, rank, 3, 60), range(3)))


# At its end the main thread holds on to the interpreter while gloo's threads want it, to let go of their tensors.
BUSY_AT_ITS_END = """
import atexit, sys, time, torch, parallel3d as p
atexit.register(lambda: print(p.comm.is_initialized()))  # runs after what is registered later
p.init_distributed("gloo")
sys.setswitchinterval(1000)
for _ in range(50):
    p.comm.all_reduce(torch.ones(8), async_op=True)
end = time.monotonic() + 0.5
while time.monotonic() < end:
    pass
"""


def test_a_script_that_leaves_the_world_to_us_ends_well():
    """Python's own end, so that it is started anew."""
    command, pipe = [sys.executable, "-c", BUSY_AT_ITS_END], subprocess.PIPE
    processes = [subprocess.Popen(command, env=environment(), stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    assert [(p.communicate(timeout=100), p.returncode) for p in processes] == [(("False\n", ""), 0)] * 2


def test_dist_init_required_says_who_joins(tmp_path: Path):
    done = run(tmp_path / "alone", "import parallel3d as p; p.init_distributed('gloo', dist_init_required=False)")
    assert "this process has joined no world; call parallel3d.init_distributed()" in done.stderr
    both = "p.init_distributed('gloo', True, 23456); p.init_distributed('gloo', dist_init_required=False)"
    done = run(tmp_path / "both", f"import os, parallel3d as p; {both}; print(os.environ['MASTER_PORT'])")
    assert done.stdout.strip() == "23456"
