"""What a process has but one of: signal handlers, the hook for uncaught exceptions, and so the watchdog at work."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import uuid
import weakref
from types import TracebackType
from typing import Any

import torch

from parallel3d.activity import EVALUATES, SLOT_BYTES, Phase
from parallel3d.comm.collectives import all_gather_object
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.store import failure_store
from parallel3d.config import FailuresConfig
from parallel3d.errors import PeerError
from parallel3d.failures.board import Board
from parallel3d.failures.neighbours import Neighbours, ProgramOf
from parallel3d.failures.telling import say
from parallel3d.failures.watchdog import Watchdog, follows


class DeviceMark:
    """The end of a batch on the device, which the host may be ahead of; on the CPU it never is."""

    def __init__(self, device: torch.device):
        self._device = device
        self._event: torch.cuda.Event | None = None

    def set(self) -> None:
        """The host has done a batch."""
        if self._device.type == "cuda":
            self._event = self._event or torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))

    def is_ahead(self) -> bool:
        """Whether the device hasn't come to it."""
        return self._event is not None and not self._event.query()


class Attribution:
    """Attributes the failures of an engine's world, from here on until `owner` is gone or another takes over.

    Collective: every rank makes it at the same place. In a world of one nothing is to be attributed.
    """

    def __init__(
        self,
        owner: object,
        groups: ProcessGroups,
        settings: FailuresConfig,
        program_of: ProgramOf,
        device: torch.device,
    ):
        self.device_mark = DeviceMark(device)
        self._rank = groups.rank
        self._watchdog: Watchdog | None = None
        self._told: BaseException | None = None
        self.activity = groups.activity
        self.activity.reset()
        if groups.world.size == 1:
            return
        run = all_gather_object(uuid.uuid4().hex, groups.control)[0]
        neighbours = Neighbours(groups.control, self.activity)
        stages = [groups.coordinate("pipe", rank) for rank in groups.world.ranks]
        board = Board(failure_store(), run, groups.rank, groups.world.size)
        self._watchdog = Watchdog(
            board,
            neighbours,
            self.activity,
            groups.rank,
            stages,
            program_of,
            settings,
            self.device_mark.is_ahead,
            _PROCESS.signals,
        )
        weakref.finalize(owner, self._watchdog.close)
        _PROCESS.take(self)

    def close(self) -> None:
        """Attribute nothing any more."""
        if self._watchdog is not None:
            self._watchdog.close()

    def is_watched(self) -> bool:
        """Whether there is a watchdog at work."""
        return self._watchdog is not None and self._watchdog.is_alive()

    def leave(self) -> None:
        """This rank's script is over."""
        if self._watchdog is not None:
            self._watchdog.leave()

    def done(self) -> None:
        """A call is over: what comes is the script's own."""
        self.activity.enter(Phase.EVALUATING if self.activity.slots[EVALUATES] else Phase.USER)
        self.device_mark.set()

    def failed(self, error: BaseException) -> None:
        """Have all ranks find the one at fault. Raises PeerError, from an `error` that but follows from another's."""
        if self._watchdog is None or self._told is error:
            return
        verdict = self._watchdog.failed(error)
        self._told = error
        if verdict is not None and verdict.rank != self._rank and follows(error) and not isinstance(error, PeerError):
            self._told = PeerError(verdict.line, verdict.rank)
            raise self._told from error

    def uncaught(self, error: BaseException) -> BaseException:
        """What to show of an exception that ends the script."""
        try:
            self.failed(error)
        except PeerError as told:
            return told
        return error


class _Process:
    """The hooks, set once and for all; they serve the attribution made last."""

    def __init__(self) -> None:
        self._attribution: Attribution | None = None
        self._reader = -1

    def take(self, attribution: Attribution) -> None:
        """Serve this one from now on."""
        if self._attribution is None:
            self._install()
        else:
            self._attribution.close()
        self._attribution = attribution

    def signals(self) -> bytes:
        """The numbers of the signals that came since the last call."""
        try:
            return os.read(self._reader, 4096) if self._reader >= 0 else b""
        except BlockingIOError:
            return b""

    def _install(self) -> None:
        atexit.register(self._leave)
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> Any:
            if self._attribution is None or not isinstance(error, Exception):
                return previous(kind, error, frames)
            shown = self._attribution.uncaught(error)
            if isinstance(shown, PeerError):  # the rank at fault shows its traceback
                return say(f"{type(shown).__name__}: {shown}")
            return previous(kind, error, frames)

        sys.excepthook = hook
        self._listen()

    def _leave(self) -> None:
        if self._attribution is not None:
            self._attribution.leave()
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _listen(self) -> None:
        """Have SIGTERM written to a pipe that the watchdog reads: the main thread may be blocked in C code for good.

        A script that handles SIGTERM itself keeps doing so.
        """
        ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not ours or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before >= 0:  # an event loop's
            signal.set_wakeup_fd(before)
            return
        self._reader = reader
        signal.signal(signal.SIGTERM, self._terminate)
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A forked child, such as a loader's worker, has no watchdog: signals are its own affair."""
        if self._attribution is not None:
            self._attribution.activity.share(memoryview(bytearray(SLOT_BYTES)))
        self._attribution, self._reader = None, -1
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _terminate(self, number: int, frame: object) -> None:
        """Python's own part in SIGTERM: none while there is a watchdog, which ends this process."""
        if self._attribution is None or not self._attribution.is_watched():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_PROCESS = _Process()
