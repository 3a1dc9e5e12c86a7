"""Strategies of malformed inputs: valid documents with faults, as values or as text, and random text."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 12)
    | st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**18 + 9, 10**200, 1e-300, 1e308, float("inf"), float("nan")])
    | st.sampled_from(
        ["auto", "", "\0", "\x1b[31m", "../x", "a.b", "0", "é" * 300, "Llama", "true", "1e999", "[", "F0@0"]
    )
    | st.text(max_size=8)
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FRAGMENTS = [
    *"{}[]:,\"'#\n\t\0-0.é\udc80",
    *("'''", "/*", "*/", "//", "\\u", "\\ud800", "- ", "? ", "&a", "*a", "<<: ", "%YAML 9", "---"),
    *("!!int ''", "!!timestamp x", "!!bool x", "!!binary x", "!!set", "!x"),
    *("0x", "1" * 5000, "1e999", "NaN", "Infinity", "null", "auto", "[" * 3000, '{"a":' * 800),
]
TEXTS = st.text(max_size=40) | st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value inside."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def _nested(value: Any, depth: int) -> Any:
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


@st.composite
def with_faults(draw: st.DrawFn, documents: Sequence[Any], keys: Sequence[str] = ()) -> Any:
    """Return one of the documents with up to four faults: dropped, renamed, swapped, repeated, deep, of another type."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 4))):
        places = list(_places(document))
        if not places:
            break
        container, key = draw(st.sampled_from(places))
        fault = draw(st.sampled_from(["drop", "value", "value", "document", "rename", "swap", "deep", "repeat", "add"]))
        if fault == "drop":
            del container[key]
        elif fault == "value":
            container[key] = draw(SCALARS)
        elif fault == "document":
            container[key] = draw(DOCUMENTS)
        elif fault == "deep":
            container[key] = _nested(container[key], draw(st.sampled_from([1, 2, 50, 200])))
        elif fault == "repeat":
            container[key] = [container[key]] * draw(st.sampled_from([0, 1, 2, 300]))
        elif fault == "swap":
            other, at = draw(st.sampled_from(places))
            container[key] = (
                copy.deepcopy(other[at])
                if (isinstance(other, dict) or at < len(other))
                and at in (other if isinstance(other, dict) else range(len(other)))
                else None
            )
        elif isinstance(container, dict):
            name = draw(st.sampled_from(keys) | st.text(max_size=6)) if keys else draw(st.text(max_size=6))
            container[name] = container.pop(key) if fault == "rename" else draw(SCALARS)
    return document


def as_text(documents: Sequence[Any], keys: Sequence[str] = ()) -> st.SearchStrategy[str]:
    """Return the strategy of JSON texts of documents with faults, some with faults of the text too."""
    dumped = with_faults(documents, keys).map(json.dumps)
    return st.one_of(dumped, dumped, torn(dumped), TEXTS)


@st.composite
def torn(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> str:
    """Return a text with a piece of it replaced by another one."""
    text = draw(texts)
    start = draw(st.integers(0, len(text)))
    stop = draw(st.integers(start, min(len(text), start + 12)))
    return text[:start] + draw(st.sampled_from(FRAGMENTS)) + text[stop:]
