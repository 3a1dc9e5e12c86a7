"""The rotary section of a config.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from parallel3d.errors import ConfigError, nearest
from parallel3d.models.config import Rope


class Json(BaseModel):
    """A section, or all, of a config.json; immutable."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class RopeJson(Json):
    """`rope_parameters`, or `rope_scaling` beside a `rope_theta`."""

    rope_theta: float | None = None
    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def rope(self, theta: float) -> Rope:
        """theta: where this has none."""
        return Rope(
            theta=theta if self.rope_theta is None else self.rope_theta,
            kind=self.rope_type,
            factor=self.factor,
            original_max_positions=self.original_max_position_embeddings,
            low_freq_factor=self.low_freq_factor,
            high_freq_factor=self.high_freq_factor,
            beta_fast=self.beta_fast or 32.0,
            beta_slow=self.beta_slow or 1.0,
            attention_factor=self.attention_factor,
            mscale=self.mscale,
            mscale_all_dim=self.mscale_all_dim,
            truncate=self.truncate,
        )

    @classmethod
    def of(cls, rope: Rope) -> dict[str, Any]:
        """Return the values that differ from the default, and those that each kind always needs."""
        scaled = cls(
            rope_theta=rope.theta,
            rope_type=rope.kind,
            factor=rope.factor,
            original_max_position_embeddings=rope.original_max_positions,
            low_freq_factor=rope.low_freq_factor,
            high_freq_factor=rope.high_freq_factor,
            beta_fast=rope.beta_fast,
            beta_slow=rope.beta_slow,
            attention_factor=rope.attention_factor,
            mscale=rope.mscale,
            mscale_all_dim=rope.mscale_all_dim,
            truncate=rope.truncate,
        )
        needs = {
            "default": (),
            "linear": ("factor",),
            "dynamic": ("factor",),
            "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "yarn": tuple(name for name in cls.model_fields if not name.startswith(("low_", "high_", "rope_"))),
        }[rope.kind]
        values = {name: getattr(scaled, name) for name in ("rope_theta", "rope_type", *needs)}
        return {name: value for name, value in values.items() if value is not None}


def rope_section(name: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a RopeJson from a section by this name, in the way of transformers 4 or 5. Raises ConfigError."""
    given = {("rope_type" if key == "type" else key): value for key, value in section.items()}
    if given.get("partial_rotary_factor") == 1.0:
        del given["partial_rotary_factor"]
    unknown = {key: value for key, value in given.items() if key not in RopeJson.model_fields}
    refuse(f"in {name}", unknown, RopeJson.model_fields)
    return {key: value for key, value in given.items() if value is not None}


def refuse(where: str, unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ConfigError for the first key that is switched on."""
    for key, value in unknown.items():
        if value is not None and value is not False:
            raise ConfigError(
                f"key {key!r} = {value!r} {where} is not known to the native decoder;{nearest(key, known)} if what is computed "
                f"doesn't depend on it, pass from_hf(..., ignore=[{key!r}])"
            )
