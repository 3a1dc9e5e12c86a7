"""An engine's calls, watched: whose failure an exception in one is, and what the process does meanwhile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, TypeVar

from parallel3d.activity import ACTIVITY, EVALUATES, PHASE, Phase
from parallel3d.errors import PeerError
from parallel3d.failures.process import Attribution
from parallel3d.failures.watchdog import follows

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound="Attributed")

# Where an exception on one rank leaves the others waiting. Before, all agree on it; in single calls the script may recover.
_TOGETHER = frozenset({Phase.PROGRAM, Phase.REDUCING, Phase.STEP})


class Attributed:
    """The part of an engine that knows of failures."""

    _attribution: Attribution

    def unwatched(self) -> AbstractContextManager[None]:
        """Inside, this rank may take as long as it likes, while others wait for it: failures.timeout_s doesn't count."""
        return ACTIVITY.untimed(Phase.UNWATCHED)


def attributed(phase: Phase) -> Callable[[Callable[Concatenate[E, P], R]], Callable[Concatenate[E, P], R]]:
    """A method of an engine that begins with `phase`. An exception in it is attributed: see Attribution.failed.

    What is being done when it is raised stays noted, for a script that doesn't catch it.
    """

    def decorate(method: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
        @functools.wraps(method)
        def run(self: E, /, *args: P.args, **kwargs: P.kwargs) -> R:
            ACTIVITY.wait = None
            ACTIVITY.enter(phase)
            if phase is not Phase.CALL:  # in calls, engine.eval() says it
                ACTIVITY.slots[EVALUATES] = phase is Phase.EVALUATING
            try:
                result = method(self, *args, **kwargs)
            except Exception as error:
                lost = follows(error) and not isinstance(error, PeerError)
                if lost or ACTIVITY.slots[PHASE] in _TOGETHER:
                    self._attribution.failed(error)
                raise
            self._attribution.done()
            return result

        return run

    return decorate
