"""Errors that a user can get. Each message gives the values at fault and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

_MOST_SHOWN = 20_000
# Names of schedules in other packages -> the same schedule here, or the closest one.
_ELSEWHERE = {
    "afab": "gpipe",
    "loopedbfs": "gpipe",
    "interleaved1f1b": "interleaved",
    "vpp": "interleaved",
    "zb1p": "zb-h1",
    "zerobubble": "zb-h1",
    "interleavedzerobubble": "zb-looped",
    "dualpipe": "zbv",
    "dualpipev": "zbv",
    "zbvzerobubble": "zbv",
}


class Parallel3DError(Exception):
    """Base of every error that this package raises on purpose. A message of 20,000 characters is cut in its middle."""

    def __init__(self, message: str = ""):
        left_out = len(message) - _MOST_SHOWN
        if left_out > 0:
            half = _MOST_SHOWN // 2
            message = f"{message[:half]} [... {left_out} characters ...] {message[-half:]}"
        super().__init__(message)


class ConfigError(Parallel3DError, ValueError, AssertionError):
    """A configuration that can't be carried out: unknown key, wrong value, conflicting values.

    It is an AssertionError for DeepSpeed's scripts, which catch that.
    """


class TopologyError(Parallel3DError, ValueError):
    """Axes, dimensions, ranks or coordinates that don't describe one world."""


class PartitionError(Parallel3DError, ValueError):
    """Layers that can't be split into the stages or tensor-parallel ranks asked for."""


class ScheduleError(Parallel3DError, ValueError):
    """A program that is incomplete, can deadlock or exceeds its memory bound."""


class CommunicationError(Parallel3DError, RuntimeError):
    """A message between ranks that doesn't fit what the other end expects."""


class DataError(Parallel3DError, ValueError):
    """A data iterator that is missing, or yields something that is not a micro-batch."""


class ExecutionError(Parallel3DError, RuntimeError):
    """An exception inside an instruction; says rank, stage, micro-batch and instruction, and keeps the cause."""


def note_place(error: Exception, place: str) -> None:
    """Note in which layer or function of the user an exception arose; the first note stays."""
    vars(error).setdefault("parallel3d_place", place)


def message_of(error: Exception) -> str:
    """Return what is sent to other ranks about an error: its message, with its type if it is not of this package."""
    return str(error) if isinstance(error, Parallel3DError) else f"{type(error).__name__}: {error}"


def first_line_of(error: Exception) -> str:
    """Return the type and the first line of an exception, and the place that was noted."""
    line = printable(next(iter(str(error).splitlines()), ""))
    place = getattr(error, "parallel3d_place", None)
    return f"{type(error).__name__}: {line}" + (f", in {place}" if place else "")


def execution_error(message: str, cause: Exception) -> ExecutionError:
    """Return an ExecutionError that is also an instance of the cause's type, if the types can be joined."""
    kind = type(cause)
    if isinstance(cause, (ExecutionError, StopIteration)):  # a StopIteration would end the training loop silently
        return ExecutionError(message)
    try:
        joined: Any = type("ExecutionError", (ExecutionError, kind), {**_LIKE_EXECUTION_ERROR, "__module__": __name__})
        error: ExecutionError = joined.__new__(joined, message)
    except TypeError:  # a type in C with its own layout or constructor
        return ExecutionError(message)
    vars(error).update(vars(cause))
    error.args = (message,)
    return error


# Joined types can't be pickled by name, and some (KeyError) have their own constructor or text.
_LIKE_EXECUTION_ERROR: dict[str, Any] = {
    "__init__": ExecutionError.__init__,
    "__str__": ExecutionError.__str__,
    "__reduce__": lambda error: (ExecutionError, error.args),
}


class PeerError(CommunicationError):
    """Another rank failed, so this one can't continue. rank: the one that failed, if known."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class PeerDataError(PeerError, DataError):
    """Another rank could not load its micro-batches."""


class PeerEndOfData(PeerError, StopIteration):
    """Another rank has no micro-batch left, so the training ends here too."""


class NumericsError(Parallel3DError, ArithmeticError):
    """An inf or NaN that check_numerics found."""


class CheckpointError(Parallel3DError, RuntimeError, AssertionError):
    """A checkpoint that is incomplete, damaged, of another model, or cannot be written.

    It is an AssertionError for DeepSpeed's scripts, which catch that.
    """


class OffloadError(Parallel3DError, RuntimeError):
    """State that doesn't fit into host memory or on disk, or can't be read from there or written to."""


class KernelError(Parallel3DError, RuntimeError):
    """CUDA kernels that can't be compiled, loaded or launched."""


class PrecisionError(Parallel3DError, ArithmeticError):
    """Gradients that no loss scale keeps finite."""


def printable(text: str, most: int = 2000) -> str:
    """Return a text that any terminal, file and store takes: without control characters, and not too long.

    Other characters than printable ones, newlines and tabs are escaped, as in "\\x1b" and "\\udc80". most: characters that are
    kept, half of them from the end.
    """
    if len(text) > most:
        text = f"{text[: most // 2]} ... ({len(text) - most} characters left out) ... {text[-(most // 2) :]}"
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def nearest(word: str, vocabulary: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the closest known word, whatever its case, or "" if none is close.

    If known words contain `word`, the shortest of them is the closest, such as zero_optimization for zero.
    """
    known = {w.lower(): w for w in vocabulary}
    if (same := _ELSEWHERE.get(re.sub("[^a-z0-9]", "", word.lower()))) in known:
        return f" Did you mean {same!r}?"
    longer = [other for other in known if len(word) > 3 and word.lower() in other]
    close = sorted(longer, key=len) or difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)
    return f" Did you mean {known[close[0]]!r}?" if close else ""
