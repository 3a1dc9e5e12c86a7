"""Start, watch and end the workers of this host, by torch's elastic agent.

This process adopts orphaned descendants, reaps them as they end, and leaves none.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any, cast

from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous.api import RendezvousError

from parallel3d.comm.coordination import SAID_KEY, VERDICT_KEY, agents_store, exit_key
from parallel3d.errors import ConfigError, ExecutionError, PeerDataError, PeerEndOfData, PeerError, printable
from parallel3d.launcher import worker
from parallel3d.launcher.guard import LIFELINE, follow_input, guarded
from parallel3d.launcher.processes import GRACE_S, adopt_orphans, children, end_leftovers, reap
from parallel3d.launcher.rendezvous import DONE, FAILED, LEFT, RUNS, OneHost, SeveralHosts
from parallel3d.logs import logger
from parallel3d.membership import local_job

_HOST_ANSWERS = timedelta(seconds=5)
_LEAVING_S = 3.0  # time until a rank that has left its script is ended like the others
_OTHERS_END_S = 30.0  # time that a launcher waits for the other hosts' after its own ranks have ended well


class WorkerAgent(LocalElasticAgent):
    """torch's local agent, with a limit to how long ending the workers takes, and a note of which failed first.

    - failed_first: ranks that had failed when the agent began to end the others; empty before that.
    - last_healthy: the last time, in seconds since the epoch, at which none had failed.
    - spare: child processes that are not the workers'. hosts: where several hosts meet.
    """

    def __init__(
        self, spec: WorkerSpec, logs_specs: DefaultLogsSpecs, spare: set[int], hosts: SeveralHosts | None
    ) -> None:
        super().__init__(
            spec, logs_specs, exit_barrier_timeout=_OTHERS_END_S, log_line_prefix_template="[rank ${rank}] "
        )
        self._spare, self._hosts = spare, hosts
        self._failures: Mapping[int, ProcessFailure] = {}
        self._noted: set[int] = set()  # ranks whose ends are in the store
        self.failed_first: set[int] = set()
        self.last_healthy = time.time()
        self._grace_s = GRACE_S

    def _handlers(self) -> dict[int, SubprocessHandler]:
        """Return the process of each rank of this host."""
        of_local = cast(SubprocessContext, self._pcontext).subprocess_handlers
        return {worker.global_rank: of_local[worker.local_rank] for worker in self._worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        now = time.time()
        codes = {rank: handler.proc.poll() for rank, handler in self._handlers().items()}
        self.failed_first = {rank for rank, code in codes.items() if code}
        for rank, code in codes.items():
            if code is not None and rank not in self._noted:
                # The other ranks find out what happened before they are ended themselves.
                self._ask(partial(_note, rank, ending(code)))
                self._noted.add(rank)
        if self.failed_first:
            self._wait_for_culprit(codes)
            # torch's agent would end the others here too, but wait 30 s for them.
            self._shutdown()
        else:
            self.last_healthy = now
            if self._hosts is not None and (result := self._look_at_hosts(None in codes.values())):
                return result
        if self.failed_first or None not in codes.values():
            result = super()._monitor_workers(worker_group)
        else:  # torch's agent would look again, and take a rank that has just failed for one that was ended
            result = RunResult(WorkerState.HEALTHY)
        self._failures = result.failures
        reap(self._spare | set(cast(SubprocessContext, self._pcontext).pids().values()))
        return result

    def _look_at_hosts(self, runs: bool) -> RunResult | None:
        """Return a result if other hosts have failed or must be waited for, else None. runs: whether a rank here still runs."""
        assert self._hosts is not None
        trouble = self._hosts.look(RUNS if runs else DONE)
        if trouble is None:
            return None if runs or self._hosts.states() <= {DONE, LEFT} else RunResult(WorkerState.HEALTHY)
        logger.error("parallel3d: %s", trouble)
        self._shutdown()
        self._failures = {}
        if self._hosts.is_cut_off:
            self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED)

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        """Return the ranks' store's answer to a question; None, and no restart, if it is on a host that does not answer."""
        if self._hosts is None or not self._hosts.is_cut_off:
            try:
                return question(self.store())
            except DistError:
                if self._hosts is None:
                    raise
                self._hosts.cut_off()
                self._remaining_restarts = 0
        return None

    def _verdict(self) -> dict[str, Any] | None:
        """Return the ranks' own verdict on which of them is at fault, if they have found one."""
        text = self._ask(lambda store: store.get(VERDICT_KEY) if store.check([VERDICT_KEY]) else None)
        return None if text is None else json.loads(text)

    def _wait_for_culprit(self, codes: Mapping[int, int | None]) -> None:
        """Give a rank that left its script a moment to end with its own exit code, as peers that it fails may end faster."""
        verdict = self._verdict()
        if verdict is not None and verdict["kind"] == "exited" and codes.get(verdict["rank"], 0) is None:
            with suppress(TimeoutExpired):
                self._handlers()[verdict["rank"]].proc.wait(_LEAVING_S)

    def report(self) -> list[RankFailure]:
        """Print the verdict, unless a rank has, and what has failed. Return the failures of the workers that were started last.

        The root cause comes first.
        """
        verdict = self._verdict()
        if verdict is not None and not self._ask(lambda store: store.check([SAID_KEY])):
            logger.error("parallel3d: %s", verdict["line"])
        culprit = None if verdict is None else int(verdict["rank"])
        failures = rank_failures(self._failures, self.failed_first, self.last_healthy, culprit)
        if failures:
            logger.error("%s", summary(failures))
        return failures

    def status(self, failures: Sequence[RankFailure]) -> int:
        """Return the job's exit code: that of the first failure, or that of the rank at fault on another host."""
        verdict, end = self._verdict() or {"rank": -1}, time.monotonic() + _LEAVING_S
        rank, key = verdict["rank"], exit_key(verdict["rank"])
        while rank not in {-1, *self._handlers()} and time.monotonic() < end:  # its launcher may be slower
            text = self._ask(lambda store: store.get(key) if store.check([key]) else None)
            if text is not None and status_of(text.decode()):
                return status_of(text.decode())
            time.sleep(0.1)
        return failures[0].status if failures else 1

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        if self._hosts is not None:  # one count for all hosts, by which ranks of one start find each other
            self._remaining_restarts = worker_group.spec.max_restarts - self._hosts.starts

    def _assign_worker_ranks(self, store: Store, index: int, num_hosts: int, spec: WorkerSpec) -> list[Worker]:
        workers = super()._assign_worker_ranks(store, index, num_hosts, spec)
        node = self._hosts and self._hosts.node
        if node and node.ranks and num_hosts == len(node.hosts):  # else a host is lost
            for worker, rank in zip(workers, node.ranks, strict=True):
                worker.global_rank = worker.role_rank = rank
        return workers

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # DeepSpeed's names of what torch's agent sets.
        os.environ["LOCAL_SIZE"] = str(worker_group.spec.local_world_size)
        os.environ["CROSS_RANK"] = str(worker_group.group_rank)
        os.environ["CROSS_SIZE"] = str(worker_group.group_world_size)
        return cast(dict[int, Any], super()._start_workers(worker_group))

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.report()
        most = worker_group.spec.max_restarts
        # A host that comes back also restarts all ranks, which torch's count leaves out.
        number = most - self._remaining_restarts if self._hosts is None else self._hosts.starts + 1
        logger.warning("parallel3d: restart %d of %d", number, most)
        end_leftovers(self._spare)
        self._grace_s = GRACE_S  # for the workers to be started
        self._noted.clear()
        super()._restart_workers(worker_group)

    def store(self) -> Store:
        """Return the store by which ranks report failures to each other and to this agent."""
        group = self._worker_group
        restarts = group.spec.max_restarts - self._remaining_restarts
        patience = {} if self._hosts is None else {"connect": _HOST_ANSWERS}
        return agents_store(cast(str, group.master_addr), cast(int, group.master_port), restarts, **patience)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = GRACE_S) -> None:
        # torch 2.11's _shutdown takes no timeout, and 2.13 passes 30 s in places: so GRACE_S holds, whatever is passed. It is
        # called again when all have ended, or when a second signal interrupts the wait: then there is no more grace.
        grace, self._grace_s = self._grace_s, 0
        if self._pcontext:
            self._pcontext.close(death_sig, grace)
        super()._shutdown(death_sig)


def _note(rank: int, how: str, store: Store) -> None:
    store.set(exit_key(rank), how)


def launch(options: argparse.Namespace) -> int:
    """Run the workers to their end and return the exit code of the job.

    options: of the command line, and `num_workers`, `uses_gpus` and `node`, a Node if the job has several hosts, else None.

    It is 0, or the code of the first rank that failed (128 + N for signal N), after a summary on stderr, or 128 + N if this
    process got signal N. If it isn't 0, no process of the job is left, also where this process is killed. Raises
    ConfigError if the workers can't be started.
    """
    _set_environment(options)
    # The agent's own report of a failure stays off the terminal: the summary is shorter.
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    worker.print_lines()
    if os.environ.pop(LIFELINE, None):
        follow_input()
    adopt_orphans()
    with guarded() as remove_later:
        return _launch(options, children(), remove_later)


def _launch(options: argparse.Namespace, before: set[int], remove_later: Callable[[str], None]) -> int:
    """Run the workers, and return the exit code. before: child processes that are not the workers'."""
    code = 1
    try:
        code = _run(options, before, remove_later)
    except SignalException as death:
        code = 128 + death.sigval
    except KeyboardInterrupt:  # before the agent handles the signals
        code = 128 + signal.SIGINT
    except (ExecutionError, RendezvousError, DistError) as error:  # the hosts don't meet
        logger.error("parallel3d: %s", str(error) or type(error).__name__)
    finally:
        if code != 0:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_IGN)  # ignore a second Ctrl-C
            end_leftovers(before)
    return code


def _run(options: argparse.Namespace, spare: set[int], remove_later: Callable[[str], None]) -> int:
    """Run the agent to its end, say what has failed, and return the exit code."""
    if options.log_dir is not None:
        try:
            os.makedirs(options.log_dir, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--log_dir {options.log_dir}: {error.strerror}; name a folder that can be written"
            ) from error
    # The agent substitutes ${local_rank} in them as in a string.Template, where $$ is a dollar sign.
    command, *own = [argument.replace("$", "$$") for argument in options.command]
    arguments = [command, *options.local_rank_arguments, *own]
    if not options.no_python:
        arguments = [worker.__file__, str(os.getpid()), *(["-m"] if options.module else []), *arguments]
    hosts = None if options.node is None else SeveralHosts.of(options.node, options.max_restarts)
    spec = WorkerSpec(
        role="worker",
        local_world_size=options.num_workers,
        rdzv_handler=hosts or OneHost(options.master_port),
        entrypoint=arguments.pop(0) if options.no_python else sys.executable,
        args=tuple(arguments),
        max_restarts=options.max_restarts,
    )
    # The folder of the ranks' output and error files.
    with nullcontext(options.log_dir) if options.log_dir else TemporaryDirectory(prefix="parallel3d_") as folder:
        if not options.log_dir:
            remove_later(folder)
        logs = DefaultLogsSpecs(folder, tee=Std.ALL if options.log_dir else Std.NONE)
        try:
            agent = WorkerAgent(spec, logs, spare, hosts)
            code = agent.status(agent.report()) if agent.run().is_failed() else 0
            if hosts is not None and not hosts.is_cut_off:
                hosts.leave(FAILED if code else LEFT)
            return code
        finally:
            if hosts is not None:
                hosts.rest()


def _set_environment(options: argparse.Namespace) -> None:
    """Set the variables that the workers inherit; the agent adds the ranks."""
    cores = len(os.sched_getaffinity(0))
    os.environ.update(local_job() if options.node is None else {})
    # OpenMP ignores an empty value, and each worker would then use all cores.
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // options.num_workers))
    if options.bind_cores_to_rank or options.bind_core_list:
        os.environ[worker.BINDS_CORES] = "1"
    if options.uses_gpus:
        # As init_distributed does, which is too late for a script that uses CUDA before it.
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# Errors that name another rank's failure.
_OF_PEERS = (PeerError.__name__, PeerDataError.__name__, PeerEndOfData.__name__)

# Exit codes of ranks that the launcher ends, maybe while one that has raised still shuts down: its peers may be faster.
_OF_THE_LAUNCHER = (-signal.SIGTERM, -signal.SIGKILL)


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
    """Format one line for each error, in the order given, one for the other ranks with that error, and one for ended ranks."""
    first = failures[0]
    alike: dict[object, list[RankFailure]] = {}
    for failure in (failure for failure in failures if not failure.was_ended):
        kind = failure.rank if failure.error is None else (failure.exit_code, failure.error)
        alike.setdefault(kind, []).append(failure)
    lines = []
    for failure, *others in alike.values():
        seconds = failure.time - first.time  # negative if the first one was slow to end
        later = "" if failure is first else f" {seconds:.1f} s later" if seconds >= 0 else " too"
        error = f": {failure.error}" if failure.error else ""
        lines.append(f"rank {failure.rank} failed{later} ({ending(failure.exit_code)}){error}")
        lines += _about("the same error on", others)
    lines += _about("ended because of it:", [failure for failure in failures if failure.was_ended])
    return "\n".join(f"parallel3d: {line}" for line in lines)


def _about(text: str, failures: Sequence[RankFailure]) -> list[str]:
    """Return a line about the ranks of some failures; none if there are none."""
    ranks = sorted(failure.rank for failure in failures)
    return [f"{text} {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"] if ranks else []


def ending(exit_code: int) -> str:
    """Name an exit code: 'SIGKILL' for -9, 'exit code 3' for 3."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        return f"signal {-exit_code}"


def status_of(ending: str) -> int:
    """Return the exit code, in a shell's convention, of a process whose end `ending` names."""
    kind, _, number = ending.rpartition(" ")
    return int(number) if kind == "exit code" else 128 + (int(number) if kind else signal.Signals[ending])
