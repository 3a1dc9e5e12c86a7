"""Ranks as a launcher starts and ends them, but from a warm process: a start of Python and torch costs seconds."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from fork_server import warm_context
from torch.distributed import run as torchrun
from warm import run_and_end, run_script

from parallel3d.comm.coordination import agents_store, exit_key
from parallel3d.launcher import cli
from parallel3d.launcher.agent import ending
from parallel3d.launcher.start import choose_hosts

GRACE_S = 5.0  # the launcher's, between SIGTERM and SIGKILL


@dataclass
class Ended:
    """A world that has ended. at: when the last rank did, in seconds since the epoch; accounts: of rank, its file."""

    codes: list[int]
    at: float
    accounts: dict[int, dict[str, Any]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)


def _rank(
    rank: int, size: int, port: int, agent: bool, folder: str, script: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.setpgrp()
    os.chdir(folder)
    output = os.open(f"{rank}.out", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(agent), "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    run_and_end(script, args)


class FaultRanks:
    """`run(n, folder, script, *args)` runs script(*args) on n ranks, each a process of its own, and ends them.

    The store is this process's, as the elastic agent's is, or rank 0's where agent is False. Once a rank has ended with an
    error the others are told to end, and killed GRACE_S later. notes: whether how a rank ended is noted in the store, as this
    package's launcher does.
    """

    def __init__(self) -> None:
        self._context = warm_context()

    def run(
        self,
        n: int,
        folder: Path,
        script: Callable[..., None],
        *args: Any,
        notes: bool = True,
        agent: bool = True,
        timeout: float = 60,
    ) -> Ended:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        port = store.port
        if not agent:
            del store  # rank 0 opens one there
        ranks = [
            self._context.Process(target=_rank, args=(rank, n, port, agent, str(folder), script, args))
            for rank in range(n)
        ]
        for rank in ranks:
            rank.start()
        try:
            ended = self._watch(ranks, port, notes and agent, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        for rank in range(n):
            account = folder / f"failure-{rank}.json"
            if account.exists():
                ended.accounts[rank] = json.loads(account.read_text())
            ended.outputs.append((folder / f"{rank}.out").read_text())
        return ended

    def _watch(self, ranks: list[Any], port: int, notes: bool, deadline: float) -> Ended:
        told, first, noted = False, 0.0, set()
        while any(rank.exitcode is None for rank in ranks):
            now = time.monotonic()
            assert now < deadline, "the ranks did not end"
            bad = [k for k, rank in enumerate(ranks) if rank.exitcode]
            if bad and notes:
                for k in set(bad) - noted:
                    agents_store("127.0.0.1", port, 0).set(exit_key(k), ending(ranks[k].exitcode))
                    noted.add(k)
            if bad and not told:
                told, first = True, now
                for rank in ranks:
                    rank.terminate()  # where it has ended, and that isn't told yet, nothing
            if told and now - first > GRACE_S:
                for rank in ranks:
                    if rank.exitcode is None:
                        rank.kill()
            time.sleep(0.02)
        return Ended([rank.exitcode for rank in ranks], time.time())


def run_process(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> tuple[str, str]:
    """Run a launcher's command as run_process of tools/bench does: (status, output). The ranks come from a warm process."""
    launcher, *arguments = command[2:]
    if launcher == "parallel3d.launcher":
        options = cli.parse_options(arguments)
        [slots] = choose_hosts(options).values()
        number, script = len(slots), options.command
    else:
        words = torchrun.parse_args(arguments)
        number, script = int(words.nproc_per_node), [words.training_script, *words.training_script_args]
    with TemporaryDirectory() as folder:
        ended = FaultRanks().run(number, Path(folder), run_script, *script, timeout=timeout)
    return "failed" if any(ended.codes) else "ok", "".join(ended.outputs)
