"""DeepSpeed's keys, and those of earlier versions, that no field holds: the table known_keys.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import yaml


class Support(Enum):
    """How a key is handled, and the heading of such keys in the table of all."""

    SUPPORTED = "supported", "Supported"
    DIFFERENT = "different", "Supported, with a difference"
    OWN = "own", "Keys that DeepSpeed doesn't have"
    OLD_NAME = "old name", "Old names"
    # Known keys, which no field holds.
    LATER = "not yet supported", "Not yet supported: left out, with a warning each"
    REFUSED = "refused", "Not yet supported: an error, since the results would differ"
    WITHOUT_EFFECT = (
        "without effect",
        "Without effect: named in one warning, if they ask for something else than is done anyway",
    )
    REMOVED = "removed", "Removed: an error"  # whatever the value: keys of earlier versions of this package

    heading: str

    def __new__(cls, name: str, heading: str = "") -> Support:
        """Make the kind of a name."""
        support = object.__new__(cls)
        support._value_, support.heading = name, heading
        return support


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
