"""A log of this process's collectives: `comms_logger` of the configuration, and `comm.log_summary()`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from parallel3d.logs import logger

if TYPE_CHECKING:
    from parallel3d.config.monitors import CommsLoggerConfig

_ROW = "{:<16}{:>16}{:>8}{:>18}{:>16}{:>16}{:>18}{:>16}"
_HEAD = ("collective", "bytes", "count", "total latency ms", "average ms", "Gbps", "bus Gbps", "straggler ms")
# Bytes that cross a link for each byte of the collective, from n ranks (nccl-tests' bus bandwidth).
_BUS: dict[str, Callable[[int], float]] = {"all_reduce": lambda n: 2 * (n - 1) / n, "broadcast": lambda n: 1.0}

Call = tuple[str, int, int]  # kind, bytes of all ranks' tensor, number of ranks


class CollectivesLog:
    """Log of the times of this process's collectives.

    settings: None if the log is off. seconds: (kind, bytes, number of ranks) -> the seconds of each of these calls.

    As in DeepSpeed, each is timed alone: the process waits for the device before and after it, so nothing overlaps.
    """

    def __init__(self) -> None:
        self.settings: CommsLoggerConfig | None = None
        self.seconds: dict[Call, list[float]] = {}

    def begin(self, settings: CommsLoggerConfig) -> None:
        """Log from now on if the configuration of a new engine says so; an earlier engine's log goes on."""
        if settings.enabled:
            self.settings = settings

    def takes(self, kind: str) -> bool:
        """Return whether collectives of this kind, such as all_reduce, are logged. prof_ops may have torch's longer names."""
        settings = self.settings
        return settings is not None and (settings.prof_all or any(name.startswith(kind) for name in settings.prof_ops))

    def run(self, call: Call, device: torch.device, collective: Callable[[], Any]) -> None:
        """Run a collective, which waits, and log it."""
        _synchronize(device)
        begin = time.perf_counter()
        collective()
        _synchronize(device)
        self.seconds.setdefault(call, []).append(time.perf_counter() - begin)
        if self.settings is not None and self.settings.verbose:
            logger.info("%s", _row(call, self.seconds[call][-1:], None))

    def summary(self, everyone: Sequence[dict[Call, list[float]]] = ()) -> str:
        """Return a table of the calls. everyone: `seconds` of all ranks, for what the slowest of them has cost this one."""
        lines = [_ROW.format(*_HEAD)]
        for call, seconds in sorted(self.seconds.items()):
            same = [rank[call] for rank in everyone if len(rank.get(call, ())) == len(seconds)]
            waited = (
                sum(mine - min(each) for mine, *each in zip(seconds, seconds, *same, strict=True)) if same else None
            )
            lines.append(_row(call, seconds, waited))
        return "\n".join(lines)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(call: Call, seconds: Sequence[float], waited: float | None) -> str:
    kind, nbytes, ranks = call
    total = sum(seconds)
    rate = 8e-9 * nbytes * len(seconds) / total
    bus = rate * _BUS.get(kind, lambda n: (n - 1) / n)(ranks)
    latencies = (f"{1e3 * total:.3f}", f"{1e3 * total / len(seconds):.3f}")
    straggler = "" if waited is None else f"{1e3 * waited:.3f}"
    return _ROW.format(kind, nbytes, len(seconds), *latencies, f"{rate:.3f}", f"{bus:.3f}", straggler)


LOG = CollectivesLog()  # one a process, as torch.distributed's default group
