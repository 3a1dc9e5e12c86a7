"""Decorators of engine methods: they record the activity of the process, and attribute exceptions to a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from parallel3d.activity import EVALUATES, PHASE, Phase
from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import PeerError
from parallel3d.failures.attribution import Attribution
from parallel3d.failures.watchdog import follows

P = ParamSpec("P")
R = TypeVar("R")


class _HasGroups(Protocol):
    _groups: ProcessGroups


class _Watched(_HasGroups, Protocol):
    _attribution: Attribution


G = TypeVar("G", bound=_HasGroups)
E = TypeVar("E", bound=_Watched)

# Phases in which an exception on one rank leaves the others waiting. Earlier phases agree on errors; after a call by the
# script, the script may recover.
_TOGETHER = frozenset({Phase.PROGRAM, Phase.REDUCING, Phase.STEP})


def attributed(phase: Phase) -> Callable[[Callable[Concatenate[E, P], R]], Callable[Concatenate[E, P], R]]:
    """Decorate an engine method that begins with `phase`: its exceptions are attributed, see Attribution.failed.

    The activity recorded at an exception is kept, for scripts that don't catch it.
    """

    def decorate(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
        @functools.wraps(method)
        def run(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
            activity = self._groups.activity
            activity.note(None)
            activity.enter(phase)
            if phase is not Phase.CALL:  # for calls, engine.eval() sets it
                activity.slots[EVALUATES] = phase is Phase.EVALUATING
            try:
                result = method(self, *args, **kwargs)
            except Exception as error:
                lost = follows(error) and not isinstance(error, PeerError)
                if lost or activity.slots[PHASE] in _TOGETHER:
                    self._attribution.failed(error)
                raise
            self._attribution.done()
            return result

        return run

    return decorate


def untimed(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
    """Decorate a method that saves or loads: failures.timeout_s does not apply while it runs."""

    @functools.wraps(method)
    def run(self: G, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._groups.activity.untimed(Phase.SAVING):
            return method(self, *args, **kwargs)

    return run
