"""Decorator of engine methods: it records the activity of the process, and attributes exceptions to a rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from parallel3d.activity import EVALUATES, PHASE, Phase
from parallel3d.errors import PeerError
from parallel3d.failures.watchdog import follows

Method = TypeVar("Method", bound=Callable[..., Any])

# Phases in which an exception on one rank leaves the others waiting. Earlier phases agree on errors; after a call by the
# script, the script may recover.
_TOGETHER = frozenset({Phase.PROGRAM, Phase.REDUCING, Phase.STEP})


def attributed(phase: Phase) -> Callable[[Method], Method]:
    """Decorate an engine method that begins with `phase`: its exceptions are attributed, see Attribution.failed.

    The activity recorded at an exception is kept, for scripts that don't catch it.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
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

        return cast(Method, run)

    return decorate
