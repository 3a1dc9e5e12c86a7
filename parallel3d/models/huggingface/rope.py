"""The rotary section of a config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import TypeAdapter

from parallel3d.errors import ConfigError, nearest
from parallel3d.models.config import Rope

_ROPE = TypeAdapter(Rope)
_KNOWN = _ROPE.dump_python(Rope(), by_alias=True).keys()

_LLAMA3 = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
# The keys that each kind has besides rope_theta and rope_type.
_KEYS_OF_KIND = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": _LLAMA3,
    "yarn": (*_LLAMA3[:2], "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


def rope_json(rope: Rope) -> dict[str, Any]:
    """Return the section of a config.json that describes `rope`."""
    values = _ROPE.dump_python(rope, by_alias=True, exclude_none=True)
    keys = ("rope_theta", "rope_type", *_KEYS_OF_KIND[rope.kind])
    return {key: values[key] for key in keys if key in values}


def rope_section(name: str, section: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    """Return a section of this name, written by transformers 4 or 5, with the keys of Rope alone.

    theta: the rope_theta of the whole config, for a section that has none. Raises ConfigError for an unknown key.
    """
    renamed = {("rope_type" if key == "type" else key): value for key, value in section.items()}
    if renamed.get("partial_rotary_factor") == 1.0:
        del renamed["partial_rotary_factor"]
    refuse(f"in {name}", {key: value for key, value in renamed.items() if key not in _KNOWN}, _KNOWN)
    given = {key: value for key, value in renamed.items() if value is not None}
    return given if theta is None else {"rope_theta": theta, **given}


def refuse(where: str, unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ConfigError for the first unknown key that is switched on."""
    for key, value in unknown.items():
        if value is not None and value is not False:
            raise ConfigError(
                f"key {key!r} = {value!r} {where} is not known to the native decoder;{nearest(key, known)} if what is computed "
                f"doesn't depend on it, pass from_hf(..., ignore=[{key!r}])"
            )
