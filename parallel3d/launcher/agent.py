"""Starts, watches and ends the workers of one node, on torch's elastic agent."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, cast

from torch.distributed import DistNetworkError, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from parallel3d.comm.coordination import VERDICT_KEY, agents_store, exit_key
from parallel3d.errors import ConfigError
from parallel3d.launcher import worker
from parallel3d.launcher.processes import adopt_orphans, children, kill_children
from parallel3d.launcher.report import RankFailure, ending, rank_failures, summary

GRACE_S = 5
"""Seconds between asking a worker to end and killing it."""

_ADDRESS = "127.0.0.1"
_RENDEZVOUS_TIMEOUT_S = 60


@dataclass(frozen=True)
class LaunchOptions:
    """What to start. command: the script, or a module's name if is_module, then its own arguments.

    max_restarts: how often all workers are started again when one has failed.
    """

    num_workers: int
    uses_gpus: bool
    command: tuple[str, ...]
    is_module: bool = False
    master_port: int = 0
    log_dir: str | None = None
    max_restarts: int = 0


class WorkerAgent(LocalElasticAgent):
    """torch's local agent, which bounds how long ending the workers takes and notes who failed first.

    failed_first: ranks that had failed when the agent began to end the others; empty while all is well.
    last_healthy: the last time, in seconds since the epoch, at which none had failed.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs, spare: set[int]) -> None:
        """spare: processes that are not the workers'."""
        super().__init__(spec, logs_specs, log_line_prefix_template="[rank ${rank}] ")
        self._spare = spare
        self._failures: Mapping[int, ProcessFailure] = {}
        self.failed_first: set[int] = set()
        self.last_healthy = time.time()
        self._grace_s = GRACE_S

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        now = time.time()
        handlers = cast(SubprocessContext, self._pcontext).subprocess_handlers
        codes = {rank: handler.proc.poll() or 0 for rank, handler in handlers.items()}
        self.failed_first = {rank for rank, code in codes.items() if code}
        if self.failed_first:
            self._note_exits({rank: codes[rank] for rank in self.failed_first})
            # Left to itself torch's agent would end the others here too, but wait 30 s for them.
            self._shutdown()
        else:
            self.last_healthy = now
        result = super()._monitor_workers(worker_group)
        self._failures = result.failures
        return result

    def failures(self) -> list[RankFailure]:
        """Of the workers that were started last, the root cause first."""
        return rank_failures(self._failures, self.failed_first, self.last_healthy, self._culprit())

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        print(summary(self.failures()), file=sys.stderr)
        most = worker_group.spec.max_restarts
        print(f"parallel3d: restart {most - self._remaining_restarts} of {most}", file=sys.stderr, flush=True)
        end_leftovers(self._spare)
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._grace_s = GRACE_S
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _note_exits(self, codes: Mapping[int, int]) -> None:
        """Tell the other ranks, which are to find out what happened, before they are ended themselves."""
        for rank, code in codes.items():
            self.store().set(exit_key(rank), ending(code))

    def store(self) -> Store:
        """The store by which ranks tell each other, and this agent, of failures."""
        group = self._worker_group
        return agents_store(_ADDRESS, cast(int, group.master_port), group.spec.max_restarts - self._remaining_restarts)

    def _culprit(self) -> int | None:
        """The rank that the ranks have found at fault, where they have."""
        store = self.store()
        return int(json.loads(store.get(VERDICT_KEY))["rank"]) if store.check([VERDICT_KEY]) else None

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE_S) -> None:
        # torch 2.11's _shutdown takes no timeout, and 2.13 passes 30 s in places: so GRACE_S whatever is asked. It's
        # called again when all have ended, or when a second signal interrupts the wait: then there is no more grace.
        grace, self._grace_s = self._grace_s, 0
        if self._pcontext:
            self._pcontext.close(death_sig, grace)
        super()._shutdown(death_sig)


def launch(options: LaunchOptions) -> int:
    """Run the workers to their end and return the exit code of the job.

    0, or the code of the first rank that failed (128 + N for signal N), after a summary on stderr; 128 + N when this
    process got signal N. When it isn't 0 no process of the job is left. Raises ConfigError when it can't start them.
    """
    _set_environment(options)
    _silence_agent()
    worker.print_lines()
    adopt_orphans()
    before = children()
    code = 1
    try:
        code = _run(options, before)
    except SignalException as death:
        code = 128 + death.sigval
    except KeyboardInterrupt:  # before the agent has taken over the signals
        code = 128 + signal.SIGINT
    finally:
        if code != 0:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)  # deaf to a second Ctrl-C
            end_leftovers(before)
    return code


def _run(options: LaunchOptions, spare: set[int]) -> int:
    with _log_folder(options.log_dir) as folder:
        logs = DefaultLogsSpecs(folder, tee=Std.ALL if options.log_dir else Std.NONE)
        agent = WorkerAgent(_worker_spec(options), logs, spare)
        if not agent.run().is_failed():
            return 0
        failures = agent.failures()
    print(summary(failures), file=sys.stderr)
    return failures[0].status


def _worker_spec(options: LaunchOptions) -> WorkerSpec:
    arguments = [worker.__file__, str(os.getpid()), *(["-m"] if options.is_module else []), *options.command]
    return WorkerSpec(
        role="worker",
        local_world_size=options.num_workers,
        rdzv_handler=_StorePerStart(options.master_port),
        entrypoint=sys.executable,
        # The agent substitutes ${local_rank} in them as in a string.Template, where $$ is a dollar sign.
        args=tuple(argument.replace("$", "$$") for argument in arguments),
        max_restarts=options.max_restarts,
    )


class _StorePerStart(StaticTCPRendezvous):
    """A rendezvous of this node alone, whose stores listen from the moment that their port is picked.

    The ranks join that same store. Each start has one of its own: a rank that is started again must not find there what one
    before it has left, as the address of its connections. port: of the first, 0 for a free one.
    """

    def __init__(self, port: int):
        super().__init__(_ADDRESS, port, 0, 1, time.strftime("%Y-%m-%d_%H-%M-%S"), _RENDEZVOUS_TIMEOUT_S)
        self._next: TCPStore | None = _listen(port)

    def next_rendezvous(self) -> RendezvousInfo:
        """See RendezvousHandler."""
        self._store, self._next = self._next or _listen(0), None
        self.master_port = self._store.port
        return super().next_rendezvous()


def _listen(port: int) -> TCPStore:
    try:
        return TCPStore(_ADDRESS, port, is_master=True, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        raise ConfigError(f"--master_port {port} is taken; leave it out to get a free one ({error})") from error


@contextmanager
def _log_folder(log_dir: str | None) -> Iterator[str]:
    """The folder for the ranks' output and error files: `log_dir`, made if need be, or one for the time of the run."""
    if log_dir is None:
        with TemporaryDirectory(prefix="parallel3d_") as folder:
            yield folder
        return
    try:
        os.makedirs(log_dir, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log_dir {log_dir}: {error.strerror}; name a folder that can be written") from error
    yield log_dir


def _set_environment(options: LaunchOptions) -> None:
    """What the workers inherit; the agent adds the ranks."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.num_workers)))
    if options.uses_gpus:
        # As init_distributed does, which is too late for a script that uses CUDA before it.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _silence_agent() -> None:
    """Keep the agent's own account of a failure off the terminal: the summary says it shorter."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def end_leftovers(spare: set[int]) -> None:
    """Kill what the workers started and left behind. spare: what is not theirs."""
    left = kill_children(spare=spare)
    if left:
        print(f"parallel3d: these processes can't be killed, the kernel holds them: {sorted(left)}", file=sys.stderr)
