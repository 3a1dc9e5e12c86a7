"""Where ranks post their reports of an incident and agree on one verdict, over a store that outlives them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter

from parallel3d.comm.store import VERDICT_KEY, exit_key
from parallel3d.failures.verdict import Report, Verdict

REPORT: TypeAdapter[Report] = TypeAdapter(Report)
VERDICT: TypeAdapter[Verdict | None] = TypeAdapter(Verdict | None)

_PAUSE_S = 0.05


class Board:
    """One rank's view. Incidents are counted from 0; a key of each says who opened it, what each rank reports, the verdict.

    lost: the store no longer answers, so that this rank is on its own.
    """

    def __init__(self, store: Any, run: str, rank: int, world_size: int):
        self._store, self._run, self._rank, self._world_size = store, run, rank, world_size
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

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key]), False))

    def _get(self, key: str) -> str | None:
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else None, None)

    def is_open(self, incident: int) -> bool:
        """Whether a rank has opened it."""
        return self._has(self._key(incident))

    def open(self, incident: int) -> bool:
        """Call on all ranks to report; whether this rank is the first to."""
        mine = str(self._rank)
        opener = self._ask(lambda: self._store.compare_set(self._key(incident), "", mine).decode(), mine)
        return bool(opener == mine)

    def post(self, incident: int, report: Report) -> None:
        """Report, for this rank or for one that can't; the first report of a rank counts."""
        text = REPORT.dump_json(report).decode()
        self._ask(lambda: self._store.compare_set(self._key(incident, report.rank), "", text), None)

    def amend(self, incident: int, before: Report, now: Report) -> None:
        """Report anew, unless another has reported for this rank meanwhile."""
        texts = [REPORT.dump_json(report).decode() for report in (before, now)]
        self._ask(lambda: self._store.compare_set(self._key(incident, now.rank), *texts), None)

    def reports(self, incident: int) -> dict[int, Report]:
        """Those that are there."""
        texts = {rank: self._get(self._key(incident, rank)) for rank in range(self._world_size)}
        return {rank: REPORT.validate_json(text) for rank, text in texts.items() if text is not None}

    def collect(
        self, incident: int, window_s: float, enough: Callable[[Mapping[int, Report]], bool]
    ) -> dict[int, Report]:
        """The reports, once all ranks that live have given theirs or `enough` says so, after window_s at the latest."""
        deadline, missing = time.monotonic() + window_s, set(range(self._world_size))
        found: dict[int, Report] = {}
        while True:
            for rank in sorted(missing):
                text = self._get(self._key(incident, rank))
                if text is not None:
                    found[rank] = REPORT.validate_json(text)
            missing -= set(found)
            alive = [rank for rank in missing if not self.has_ended(rank)]
            if not alive or self.lost or enough(found) or time.monotonic() > deadline:
                return found
            time.sleep(_PAUSE_S)

    def settle(self, incident: int, verdict: Verdict | None) -> Verdict | None:
        """This verdict, unless another rank has one already: then that."""
        text = VERDICT.dump_json(verdict).decode()
        settled = self._ask(lambda: self._store.compare_set(self._key(incident, "verdict"), "", text).decode(), text)
        if verdict is not None and settled == text:
            self._ask(lambda: self._store.set(VERDICT_KEY, text), None)
        return VERDICT.validate_json(settled)

    def settled(
        self, incident: int, window_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[Verdict | None] | None:
        """The verdict in a tuple, as soon as a rank has settled on it; None when none has within window_s.

        meanwhile: what else is to be done again and again.
        """
        deadline = time.monotonic() + window_s
        while not self.lost and time.monotonic() < deadline:
            meanwhile()
            text = self._get(self._key(incident, "verdict"))
            if text is not None:
                return (VERDICT.validate_json(text),)
            time.sleep(_PAUSE_S)
        return None

    def leave(self) -> None:
        """Note that this rank's script is over."""
        self._ask(lambda: self._store.set(self._key("left", self._rank), "1"), None)

    def has_left(self, rank: int) -> bool:
        """Whether that rank's script is over."""
        return self._has(self._key("left", rank))

    def has_ended(self, rank: int) -> bool:
        """Whether that rank's process is known to be over, or about to."""
        return self.ending(rank) is not None or self.has_left(rank)

    def ending(self, rank: int) -> str | None:
        """How that rank's process ended, where the launcher has noted it."""
        return self._get(exit_key(rank))
