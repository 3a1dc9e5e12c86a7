"""Board on which ranks post their reports of an incident and agree on one verdict, in a store that outlives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from parallel3d.comm.coordination import SAID_KEY, VERDICT_KEY, exit_key
from parallel3d.failures.verdict import Report, Verdict

REPORT: TypeAdapter[Report] = TypeAdapter(Report)
VERDICT: TypeAdapter[Verdict | None] = TypeAdapter(Verdict | None)


@dataclass(frozen=True)
class Windows:
    """Intervals of failure attribution, in seconds.

    - poll: time between two checks of the process and the board by a watchdog.
    - pause: time between two checks of the board by a rank that waits for others' entries.
    - answer: time after which a rank without a report is silent; shorter than launchers wait between SIGTERM and SIGKILL.
    - spread: time within which all ranks get SIGTERM, one after the other, if the whole job is asked to end.
    - grace: time between the verdict and the end of a process whose main thread has not raised.
    - leave: time for which a script that is over waits for the watchdog; longer than the store may take to answer.
    """

    poll: float = 0.25
    pause: float = 0.05
    answer: float = 3.0
    spread: float = 2.0
    grace: float = 5.0
    leave: float = 6.0


class Board:
    """One rank's view of the board. Incidents are counted from 0; the store has a key for who opened an incident, for each
    rank's report and for the verdict.

    - run: prefix of the keys, the same on all ranks.
    - lost: whether the store no longer answers, so that this rank is on its own.
    """

    def __init__(self, store: Any, run: str, rank: int, world_size: int, windows: Windows | None = None):
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
        self.windows = windows or Windows()
        self.lost = False

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._run, *parts)))

    def _ask(self, question: Callable[[], Any], default: Any) -> Any:
        if self.lost:
            return default
        try:
            return question()
        except RuntimeError:  # torch's DistError
            self.lost = True
            return default

    def _get(self, key: str) -> str | None:
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None, None)

    def _replace(self, key: str, old: str, new: str) -> str:
        """Set a key to `new` if it holds `old` ("": nothing), and return what it then holds; `new` if the store is lost."""
        return str(self._ask(lambda: self._store.compare_set(key, old, new).decode(), new))

    def is_open(self, incident: int) -> bool:
        """Return whether a rank has opened the incident."""
        return self._get(self._key(incident)) is not None

    def open(self, incident: int) -> bool:
        """Call on all ranks to report, and return whether this rank is the first to do so."""
        return self._replace(self._key(incident), "", str(self._rank)) == str(self._rank)

    def post(self, incident: int, report: Report) -> None:
        """Post a report of this rank, or of one that can't; the first report of a rank counts."""
        self._replace(self._key(incident, report.rank), "", REPORT.dump_json(report).decode())

    def amend(self, incident: int, before: Report, now: Report) -> None:
        """Replace this rank's report, unless another rank has posted one for it."""
        old, new = (REPORT.dump_json(report).decode() for report in (before, now))
        self._replace(self._key(incident, now.rank), old, new)

    def reports(self, incident: int, ranks: Iterable[int] | None = None) -> dict[int, Report]:
        """Return the reports posted so far on these ranks (all), by rank."""
        asked = range(self._world_size) if ranks is None else ranks
        texts = {rank: self._get(self._key(incident, rank)) for rank in asked}
        return {rank: REPORT.validate_json(text) for rank, text in texts.items() if text is not None}

    def collect(
        self, incident: int, window: float, enough: Callable[[Mapping[int, Report]], bool]
    ) -> dict[int, Report]:
        """Return the reports once all living ranks have posted or `enough` accepts them, or after the window."""
        deadline, missing = time.monotonic() + window, set(range(self._world_size))
        reports: dict[int, Report] = {}
        while True:
            reports |= self.reports(incident, sorted(missing))
            missing -= set(reports)
            alive = [rank for rank in missing if self.ending(rank) is None and not self.has_left(rank)]
            if not alive or self.lost or enough(reports) or time.monotonic() > deadline:
                return reports
            time.sleep(self.windows.pause)

    def settle(self, incident: int, verdict: Verdict | None) -> Verdict | None:
        """Settle on this verdict and return it; if another rank has settled already, return that one's verdict."""
        text = VERDICT.dump_json(verdict).decode()
        settled = self._replace(self._key(incident, "verdict"), "", text)
        if verdict is not None and settled == text:
            self._ask(lambda: self._store.set(VERDICT_KEY, text), None)
        return VERDICT.validate_json(settled)

    def settled(
        self, incident: int, window: float, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[Verdict | None] | None:
        """Wait until a rank has settled and return its verdict in a tuple; None if none has within the window.

        meanwhile: called between two checks of the board.
        """
        deadline = time.monotonic() + window
        while not self.lost and time.monotonic() < deadline:
            meanwhile()
            text = self._get(self._key(incident, "verdict"))
            if text is not None:
                return (VERDICT.validate_json(text),)
            time.sleep(self.windows.pause)
        return None

    def note_said(self) -> None:
        """Note that this rank has printed the verdict. If no rank has (its disk may be full), the launcher prints it."""
        self._ask(lambda: self._store.set(SAID_KEY, "1"), None)

    def leave(self, ending: str | None) -> None:
        """Note that this rank's script is over. ending: how, if not at its end; the launcher notes that too, but later."""
        if ending is not None:
            self._ask(lambda: self._store.set(exit_key(self._rank), ending), None)
        self._ask(lambda: self._store.set(self._key("left", self._rank), "1"), None)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank's script is over."""
        return self._get(self._key("left", rank)) is not None

    def ending(self, rank: int) -> str | None:
        """Return how a rank's process ended, as noted by the launcher; None if it is not known to have ended."""
        return self._get(exit_key(rank))
