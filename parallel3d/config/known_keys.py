"""DeepSpeed's keys, and those of earlier versions, that no field holds: the table known_keys.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml


class Support(str, Enum):
    """How a key that no field holds is handled."""

    SUPPORTED = "supported"
    DIFFERENT = "supported, with a difference"
    LATER = "not yet supported"  # one warning each: the numbers don't depend on it
    REFUSED = "refused"  # an error: without it the results would differ
    WITHOUT_EFFECT = "without effect"  # one warning that lists them
    REMOVED = "removed"  # an error, whatever the value: a key of an earlier version of this package


@dataclass(frozen=True)
class KnownKey:
    """A key that no field holds.

    - reason: shown to the user.
    - same: values that hold here anyway.
    - inner: the keys of a section, among which a misspelled one is found.
    - switch: the inner key that turns a section on; a section without it is off. off_values: those that leave it off.
    """

    support: Support
    reason: str
    same: Sequence[object] = ()
    inner: Sequence[str] = ()
    switch: str = "enabled"
    off_values: Sequence[object] = (False, None)

    def asks_nothing(self, value: object) -> bool:
        """Return whether this value leaves everything as it is here."""
        # Where true holds anyway, false asks for something.
        if value in self.same or (not value and (value is not False or True not in self.same)):
            return True
        if isinstance(value, Mapping) and (self.switch in self.inner or self.switch in value):
            return value.get(self.switch, self.off_values[0]) in self.off_values
        return False


@cache
def _table() -> Any:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def keys_of(section: str) -> dict[str, KnownKey]:
    """Return the keys of a section, or of the top level, that no field holds."""
    found = {}
    for support, entries in _table()[section].items():
        for entry in entries:
            about = {name: value for name, value in entry.items() if name != "keys"}
            found.update(dict.fromkeys(entry["keys"], KnownKey(Support(support), **about)))
    return found
