"""Failed ranks of a job, in the order of cause and consequence, and the lines that say so."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from parallel3d.errors import PeerDataError, PeerEndOfData, PeerError, printable

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
    """Format a line for each error, in the order given, one for other ranks with the same error, and one for ended ranks."""
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
