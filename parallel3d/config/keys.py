"""Every key and what becomes of it, from the schema itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from parallel3d.config.schema import Config
from parallel3d.config.section import ReadOnlyMapping, Section, Support, section_of

OWN_KEY = "own"
OLD_NAME = "old name"


@dataclass(frozen=True)
class KeyRow:
    """A key by its dotted path, its default where it has one, its status and what to know about it."""

    path: str
    default: str
    status: str
    meaning: str


def key_rows(section: type[Section] = Config, path: str = "") -> Iterator[KeyRow]:
    """A row for each key of a section and of the sections inside."""
    for name, info in section.model_fields.items():
        inner = section_of(info.annotation)
        if inner is not None:
            yield from key_rows(inner, f"{path}{name}.")
        else:
            yield _field_row(f"{path}{name}", info)
    for old, new in section.renamed.items():
        yield KeyRow(f"{path}{old}", "", OLD_NAME, f"of `{path}{new}`")
    for name, key in section.known_keys.items():
        inside = f"; its keys: {', '.join(key.keys)}" if key.keys else ""
        yield KeyRow(f"{path}{name}", "", key.support.value, key.reason + inside)


_HEADINGS = {
    Support.SUPPORTED.value: "Supported",
    Support.DIFFERENT.value: "Supported, with a difference",
    OWN_KEY: "Keys that DeepSpeed doesn't have",
    OLD_NAME: "Old names",
    Support.LATER.value: "Not yet supported: left out, with a warning each",
    Support.REFUSED.value: "Not yet supported: an error, since the results would differ",
    Support.WITHOUT_EFFECT.value: "Without effect: named in one warning, if they ask for something else than is done anyway",
    Support.REMOVED.value: "Removed: an error",
}


def keys_as_markdown() -> str:
    """The table of all keys, by status, in Markdown."""
    rows = list(key_rows())
    lines = [
        "# Every configuration key",
        "",
        "Made from the schema by `p3d config --keys`. [configuration.md](configuration.md) is the guide.",
    ]
    for status, heading in _HEADINGS.items():
        lines += ["", f"## {heading}", "", "| key | default | |", "|---|---|---|"]
        lines += [_line(row) for row in rows if row.status == status]
    return "\n".join(lines) + "\n"


def _line(row: KeyRow) -> str:
    default, meaning = f"`{row.default}`" if row.default else "", row.meaning.replace("|", "\\|")
    return f"| `{row.path}` | {default} | {meaning} |"


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, in which any value may be "auto"."""
    return Config.model_json_schema()


def _field_row(path: str, info: FieldInfo) -> KeyRow:
    marks = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    difference = marks.get("difference")
    status = OWN_KEY if marks.get("own") else Support.DIFFERENT.value if difference else Support.SUPPORTED.value
    meaning = str(info.description) + (f"; {difference}" if difference else "")
    return KeyRow(path, _shown(info.get_default(call_default_factory=True)), status, meaning)


def _shown(default: object) -> str:
    if default is PydanticUndefined:
        return ""
    if isinstance(default, (ReadOnlyMapping, BaseModel)):
        return "{}"
    return json.dumps(default)
