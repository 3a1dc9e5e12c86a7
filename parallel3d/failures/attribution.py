"""Attribution of an engine's failures, and its hooks in the process: for uncaught exceptions, SIGTERM and the exit."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import uuid
import weakref
from types import TracebackType

import torch

from parallel3d.activity import EVALUATES, SLOT_BYTES, Activity, Phase
from parallel3d.comm.collectives import all_gather_object
from parallel3d.comm.coordination import failure_store
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import FailuresConfig
from parallel3d.errors import PeerError
from parallel3d.failures.board import Board
from parallel3d.failures.neighbours import FindProgram, Neighbours
from parallel3d.failures.watchdog import Watchdog, follows, say


class Attribution:
    """Attributes the failures of an engine's world until `owner`, the engine, is gone.

    Collective: every rank makes it at the same place. In a world of one nothing is attributed.
    """

    def __init__(
        self,
        owner: object,
        groups: ProcessGroups,
        settings: FailuresConfig,
        find_program: FindProgram,
        device: torch.device,
    ):
        self._rank, self._device, self.activity = groups.rank, device, groups.activity
        self._batch_end: torch.cuda.Event | None = None
        self._attributed: BaseException | None = None
        self._watchdog: Watchdog | None = None
        self.activity.reset()
        if groups.world.size == 1:
            return
        run = all_gather_object(uuid.uuid4().hex, groups.control)[0]
        hooks = ProcessHooks.of_process()
        self._watchdog = watchdog = Watchdog(
            Board(failure_store(), run, groups.rank, groups.world.size),
            Neighbours(groups.control, self.activity),
            self.activity,
            groups.rank,
            [groups.coordinate("pipe", rank) for rank in groups.world.ranks],
            find_program,
            settings,
            self._device_is_busy,
            hooks.asked_to_end,
        )
        weakref.finalize(owner, watchdog.close)
        hooks.serve(self, watchdog)

    def _device_is_busy(self) -> bool:
        """Return whether the device has not finished the last batch that the host has finished."""
        return self._batch_end is not None and not self._batch_end.query()

    def done(self) -> None:
        """Note that a call of the engine is over, and that the script's own code runs next."""
        self.activity.enter(Phase.EVALUATING if self.activity.slots[EVALUATES] else Phase.USER)
        if self._device.type == "cuda":
            self._batch_end = self._batch_end or torch.cuda.Event()
            self._batch_end.record(torch.cuda.current_stream(self._device))

    def failed(self, error: BaseException) -> None:
        """Let all ranks find the rank at fault. Raises PeerError from an `error` that only follows from another rank's end."""
        if self._watchdog is None or self._attributed is error:
            return
        self.activity.enter(self.activity.phase_of(error))
        verdict = self._watchdog.failed(error)
        self._attributed = error
        if verdict is not None and verdict.rank != self._rank and follows(error) and not isinstance(error, PeerError):
            self._attributed = PeerError(verdict.line, verdict.rank)
            raise self._attributed from error


class ProcessHooks:
    """The process's hooks, which serve the attribution made last. The interpreter keeps the one instance, see `of_process`."""

    def __init__(self) -> None:
        self._served: tuple[Attribution, Watchdog] | None = None
        self._activities: weakref.WeakSet[Activity] = weakref.WeakSet()
        self._reader = -1
        self._previous_hook = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._leave)
        self._listen()

    @classmethod
    def of_process(cls) -> ProcessHooks:
        """Return the hooks of this process, installed at the first call."""
        for hook in (sys.excepthook, signal.getsignal(signal.SIGTERM)):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, cls):
                return owner
        return cls()

    def serve(self, attribution: Attribution, watchdog: Watchdog) -> None:
        """Serve this attribution from now on. Its watchdog also watches earlier engines, so the previous watchdog is closed."""
        if self._served is not None:
            self._served[1].close()
        self._served = attribution, watchdog
        for activity in self._activities:
            activity.merge_into(attribution.activity)
        self._activities.add(attribution.activity)

    def asked_to_end(self) -> bool:
        """Return whether a SIGTERM has come since the last call."""
        try:
            return signal.SIGTERM in (os.read(self._reader, 4096) if self._reader >= 0 else b"")
        except BlockingIOError:
            return False

    def _uncaught(self, kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        if self._served is not None and isinstance(error, Exception):
            try:
                self._served[0].failed(error)
            except PeerError as peer_error:
                error = peer_error
            if isinstance(error, PeerError):  # the rank at fault shows its traceback
                say(f"{type(error).__name__}: {error}")
                return
        self._previous_hook(kind, error, frames)

    def _leave(self) -> None:
        if self._served is not None:
            self._served[1].leave(_ending_in_the_middle())
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _listen(self) -> None:
        """Have SIGTERM written to a pipe that the watchdog reads: the main thread may be blocked in C code for good.

        A script that handles SIGTERM itself keeps doing so.
        """
        is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not is_default or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before >= 0:  # set by an event loop
            signal.set_wakeup_fd(before)
            return
        self._reader = reader
        signal.signal(signal.SIGTERM, self._terminate)
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Detach a forked child, such as a loader's worker: it has no watchdog, and handles signals itself."""
        if self._served is not None:
            self._served[0].activity.share(memoryview(bytearray(SLOT_BYTES)))
        self._served, self._reader = None, -1
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _terminate(self, number: int, frame: object) -> None:
        """Handle SIGTERM in Python: the watchdog ends this process; without one, the signal does."""
        if self._served is None or not self._served[1].is_alive():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _ending_in_the_middle() -> str | None:
    """Return how the script was left, if by a KeyboardInterrupt or, where the launcher's worker noted it, an exit code."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, SystemExit):
        return f"exit code {error.code if isinstance(error.code, int) else 1}"
    return KeyboardInterrupt.__name__ if isinstance(error, KeyboardInterrupt) else None
