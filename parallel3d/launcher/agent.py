"""Start, watch and end the workers of one node, by torch's elastic agent.

On Linux this process adopts orphaned descendants, reaps them as they end, and leaves none behind. Elsewhere the workers
themselves still end, by their process groups.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any, cast

from torch.distributed import Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from parallel3d.comm.coordination import SAID_KEY, VERDICT_KEY, agents_store, exit_key
from parallel3d.comm.membership import local_job
from parallel3d.errors import ConfigError, PeerDataError, PeerEndOfData, PeerError, printable
from parallel3d.launcher import worker
from parallel3d.launcher.guard import guarded
from parallel3d.launcher.options import GRACE_S, LaunchOptions

_LEAVING_S = 3.0  # until a rank that has left its script is ended like the others

# Errors that name another rank's failure.
_OF_PEERS = (PeerError.__name__, PeerDataError.__name__, PeerEndOfData.__name__)

# Exit codes of ranks that the launcher ends, maybe while one that has raised still shuts down: its peers may be faster.
_OF_THE_LAUNCHER = (-signal.SIGTERM, -signal.SIGKILL)

_ADDRESS = "127.0.0.1"
_PR_SET_CHILD_SUBREAPER = 36
_RENDEZVOUS_TIMEOUT_S = 60
_BACKLOG = 4096


@dataclass(frozen=True)
class RankFailure:
    """One failed rank.

    - exit_code: of the process, -N if signal N ended it; 1 for a rank that raised and was ended while it shut down.
    - error: first line of the exception that it raised, None if it ended without raising.
    - time: when it failed, in seconds since the epoch.
    - was_ended: whether the launcher ended it.
    """

    rank: int
    exit_code: int
    error: str | None
    time: float
    was_ended: bool

    @property
    def status(self) -> int:
        """The exit code in a shell's convention: 128 + N for signal N."""
        return self.exit_code if self.exit_code > 0 else 128 - self.exit_code


class WorkerAgent(LocalElasticAgent):
    """torch's local agent, with a limit to how long ending the workers takes, and a note of which failed first.

    - failed_first: ranks that had failed when the agent began to end the others; empty before that.
    - last_healthy: the last time, in seconds since the epoch, at which none had failed.
    - spare: child processes that are not the workers'.
    """

    def __init__(self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs, spare: set[int]) -> None:
        super().__init__(spec, logs_specs, log_line_prefix_template="[rank ${rank}] ")
        self._spare = spare
        self._failures: Mapping[int, ProcessFailure] = {}
        self._noted: set[int] = set()  # ranks whose ends are in the store
        self.failed_first: set[int] = set()
        self.last_healthy = time.time()
        self._grace_s = GRACE_S

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        now = time.time()
        handlers = cast(SubprocessContext, self._pcontext).subprocess_handlers
        codes = {rank: handler.proc.poll() for rank, handler in handlers.items()}
        self.failed_first = {rank for rank, code in codes.items() if code}
        for rank, code in codes.items():
            if code is not None and rank not in self._noted:
                # The other ranks find out what happened before they are ended themselves.
                self.store().set(exit_key(rank), ending(code))
                self._noted.add(rank)
        if self.failed_first:
            self._wait_for_culprit(codes)
            # torch's agent would end the others here too, but wait 30 s for them.
            self._shutdown()
        else:
            self.last_healthy = now
        if self.failed_first or None not in codes.values():
            result = super()._monitor_workers(worker_group)
        else:  # torch's agent would look again, and take a rank that has just failed for one that was ended
            result = RunResult(WorkerState.HEALTHY)
        self._failures = result.failures
        reap(self._spare | set(cast(SubprocessContext, self._pcontext).pids().values()))
        return result

    def _verdict(self) -> dict[str, Any] | None:
        """Return the ranks' own verdict on which of them is at fault, if they have found one."""
        store = self.store()
        return json.loads(store.get(VERDICT_KEY)) if store.check([VERDICT_KEY]) else None

    def _wait_for_culprit(self, codes: Mapping[int, int | None]) -> None:
        """Give a rank that left its script a moment to end by its own exit code: the peers that it fails may be faster."""
        verdict = self._verdict()
        if verdict is not None and verdict["kind"] == "exited" and codes.get(verdict["rank"], 0) is None:
            with suppress(TimeoutExpired):
                cast(SubprocessContext, self._pcontext).subprocess_handlers[verdict["rank"]].proc.wait(_LEAVING_S)

    def report(self) -> list[RankFailure]:
        """Print the verdict unless a rank has, and return the failures of the workers that were started last.

        The root cause comes first.
        """
        verdict = self._verdict()
        if verdict is not None and not self.store().check([SAID_KEY]):
            print(f"parallel3d: {verdict['line']}", file=sys.stderr)
        culprit = None if verdict is None else int(verdict["rank"])
        return rank_failures(self._failures, self.failed_first, self.last_healthy, culprit)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        print(summary(self.report()), file=sys.stderr)
        most = worker_group.spec.max_restarts
        print(f"parallel3d: restart {most - self._remaining_restarts} of {most}", file=sys.stderr, flush=True)
        end_leftovers(self._spare)
        self._grace_s = GRACE_S  # for the workers to be started
        self._noted.clear()
        super()._restart_workers(worker_group)

    def store(self) -> Store:
        """Return the store by which ranks report failures to each other and to this agent."""
        group = self._worker_group
        return agents_store(_ADDRESS, cast(int, group.master_port), group.spec.max_restarts - self._remaining_restarts)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE_S) -> None:
        # torch 2.11's _shutdown takes no timeout, and 2.13 passes 30 s in places: so GRACE_S holds, whatever is passed. It is
        # called again when all have ended, or when a second signal interrupts the wait: then there is no more grace.
        grace, self._grace_s = self._grace_s, 0
        if self._pcontext:
            self._pcontext.close(death_sig, grace)
        super()._shutdown(death_sig)


def launch(options: LaunchOptions) -> int:
    """Run the workers to their end and return the exit code of the job.

    It is 0, or the code of the first rank that failed (128 + N for signal N), after a summary on stderr, or 128 + N if this
    process got signal N. If it isn't 0, no process of the job is left, also where this process is killed on Linux. Raises
    ConfigError if the workers can't be started.
    """
    _set_environment(options)
    # The agent's own report of a failure stays off the terminal: the summary is shorter.
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    worker.print_lines()
    adopt_orphans()
    with guarded() as remove_later:
        return _launch(options, children(), remove_later)


def _launch(options: LaunchOptions, before: set[int], remove_later: Callable[[str], None]) -> int:
    """Run the workers, and return the exit code. before: child processes that are not the workers'."""
    code = 1
    try:
        code = _run(options, before, remove_later)
    except SignalException as death:
        code = 128 + death.sigval
    except KeyboardInterrupt:  # before the agent handles the signals
        code = 128 + signal.SIGINT
    finally:
        if code != 0:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)  # ignore a second Ctrl-C
            end_leftovers(before)
    return code


def _run(options: LaunchOptions, spare: set[int], remove_later: Callable[[str], None]) -> int:
    if options.log_dir is not None:
        try:
            os.makedirs(options.log_dir, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--log_dir {options.log_dir}: {error.strerror}; name a folder that can be written"
            ) from error
    # The agent substitutes ${local_rank} in them as in a string.Template, where $$ is a dollar sign.
    command, *own = [argument.replace("$", "$$") for argument in options.command]
    arguments = [command, *options.first_arguments, *own]
    if not options.is_program:
        arguments = [worker.__file__, str(os.getpid()), *(["-m"] if options.is_module else []), *arguments]
    spec = WorkerSpec(
        role="worker",
        local_world_size=options.num_workers,
        rdzv_handler=_StorePerStart(options.master_port),
        entrypoint=arguments.pop(0) if options.is_program else sys.executable,
        args=tuple(arguments),
        max_restarts=options.max_restarts,
    )
    # The folder of the ranks' output and error files.
    with nullcontext(options.log_dir) if options.log_dir else TemporaryDirectory(prefix="parallel3d_") as folder:
        if not options.log_dir:
            remove_later(folder)
        logs = DefaultLogsSpecs(folder, tee=Std.ALL if options.log_dir else Std.NONE)
        agent = WorkerAgent(spec, logs, spare)
        if not agent.run().is_failed():
            return 0
        failures = agent.report()
    print(summary(failures), file=sys.stderr)
    return failures[0].status


class _StorePerStart(StaticTCPRendezvous):
    """Rendezvous of this node alone, with a store that listens as soon as its port is picked; the ranks join that store.

    Each start has its own store: a rank that is started again must not find what an earlier one left there, such as
    addresses of connections. port: of the first store, 0 for a free one.
    """

    def __init__(self, port: int):
        super().__init__(_ADDRESS, port, 0, 1, time.strftime("%Y-%m-%d_%H-%M-%S"), _RENDEZVOUS_TIMEOUT_S)
        self._next: TCPStore | None = _listen(port)

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the address and store of the next start."""
        self._store, self._next = self._next or _listen(0), None
        self.master_port = self._store.port
        return super().next_rendezvous()


def _listen(port: int) -> TCPStore:
    """Return a store that only processes of this host reach; by itself torch's listens on all interfaces."""
    try:
        server = socket.create_server((_ADDRESS, port), backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(f"--master_port {port} is taken; leave it out to get a free one ({error})") from error
    port = server.getsockname()[1]
    return TCPStore(
        _ADDRESS, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=server.detach()
    )


def _set_environment(options: LaunchOptions) -> None:
    """Set the variables that the workers inherit; the agent adds the ranks."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    os.environ.update(local_job())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.num_workers)))
    if options.binds_cores:
        os.environ[worker.BINDS_CORES] = "1"
    if options.uses_gpus:
        # As init_distributed does, which is too late for a script that uses CUDA before it.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def adopt_orphans() -> None:
    """Make this process the parent of each descendant whose own parent dies, so that `children` finds it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the ids of this process's children, including ended ones that nobody has waited for."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            # The second field, the name in parentheses, may hold spaces and parentheses itself.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def reap(others: Set[int]) -> None:
    """Reap adopted children that have ended. others: children for which somebody else waits."""
    with suppress(ChildProcessError):  # there are none
        # Whether any has ended is cheap to ask. It is left to be waited for: it may be another's.
        if sys.platform == "linux" and os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            for pid in children() - others:
                os.waitpid(pid, os.WNOHANG)


def end_leftovers(spare: Set[int], timeout_s: float = 5.0) -> None:
    """Kill processes that the workers started and left, and their children after adoption.

    spare: children that the workers did not start.
    """
    deadline = time.monotonic() + timeout_s
    while (left := children() - spare) and time.monotonic() < deadline:
        for pid in left:
            # A child's id is not reused before the child is waited for, so this can't hit another process.
            with suppress(OSError):  # another user's process: reported as left
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)
    if left:
        reason = "these processes can't be killed (they are blocked in the kernel)"
        print(f"parallel3d: {reason}: {sorted(left)}", file=sys.stderr)


def rank_failures(
    failures: Mapping[int, ProcessFailure], failed_first: set[int], last_healthy: float, culprit: int | None = None
) -> list[RankFailure]:
    """Return the failures of a run in order of time, with the ranks that the launcher ended last.

    - failed_first: ranks that had failed when the launcher began to end the others.
    - last_healthy: when none had failed. A rank that ended without raising (by a signal, an exit code) gets this time: its
      peers' exceptions of the same moment, such as a closed connection, are its consequences and not its cause.
    - culprit: the rank that the ranks themselves found at fault. It goes first, and the others ended because of it, unless
      with an error of their own.
    """
    found = []
    for rank, failure in failures.items():
        message, error, failed_at = failure.error_file_data["message"], None, last_healthy
        if isinstance(message, dict):  # the rank has written an error file
            error, failed_at = (
                printable(message["message"].partition("\n")[0]) or None,
                os.path.getmtime(failure.error_file),
            )
        was_ended = rank not in failed_first and error is None
        if culprit in failures:
            was_ended = rank != culprit and (error is None or error.startswith(_OF_PEERS))
        exit_code = 1 if error is not None and failure.exitcode in _OF_THE_LAUNCHER else failure.exitcode
        found.append(RankFailure(rank, exit_code, error, failed_at, was_ended))
    return sorted(found, key=lambda f: (f.rank != culprit, f.was_ended, f.time, f.rank))


def summary(failures: Sequence[RankFailure]) -> str:
    """Format a line per rank that failed by itself, in the order given, and one for all that were ended because of them."""
    first = failures[0]
    lines = []
    for failure in failures:
        if not failure.was_ended:
            seconds = failure.time - first.time  # negative if the first one was slow to end
            later = "" if failure is first else f" {seconds:.1f} s later" if seconds >= 0 else " too"
            error = f": {failure.error}" if failure.error else ""
            lines.append(f"parallel3d: rank {failure.rank} failed{later} ({ending(failure.exit_code)}){error}")
    ended = sorted(failure.rank for failure in failures if failure.was_ended)
    if ended:
        ranks = ("rank " if len(ended) == 1 else "ranks ") + ", ".join(map(str, ended))
        lines.append(f"parallel3d: ended because of it: {ranks}")
    return "\n".join(lines)


def ending(exit_code: int) -> str:
    """Name an exit code: 'SIGKILL' for -9, 'exit code 3' for 3."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        return f"signal {-exit_code}"
