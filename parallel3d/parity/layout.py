"""A layout in words, "pp2,tp2,zero1,zb-h1", and the configuration it stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from parallel3d.config.pipeline import SCHEDULES
from parallel3d.errors import ConfigError, nearest

_NUMBERED = {
    "pp": "stages",
    "dp": "replicas",
    "tp": "slices",
    "zero": "zero",
    "m": "micro_batches",
    "chunks": "chunks",
    "ckpt": "recompute",
}
_FLAGS = ("sp", "v", *SCHEDULES)
_WORDS = (*(f"{name}N" for name in _NUMBERED), *_FLAGS)


@dataclass(frozen=True)
class Layout:
    """text: as written; zero: the stage; micro_batches: for each replica in a step; recompute: activation_checkpoint_interval.

    What is None is the base configuration's, or the default.
    """

    text: str
    stages: int = 1
    replicas: int = 1
    slices: int = 1
    zero: int | None = None
    micro_batches: int | None = None
    chunks: int | None = None
    recompute: int | None = None
    schedule: str | None = None
    placement: str | None = None
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.stages * self.replicas * self.slices

    def accumulation(self, base: Mapping[str, Any]) -> int:
        """Micro-batches for each replica in a step: as written, as configured, or two a stage."""
        configured = base.get("gradient_accumulation_steps")
        return self.micro_batches or (configured if isinstance(configured, int) else 2 * self.stages)

    def config(self, base: Mapping[str, Any], seed: int, dtype: str) -> dict[str, Any]:
        """A base configuration with what the layout says in place of its own, quiet and with all seeds given."""
        config = {key: value for key, value in base.items() if key != "train_batch_size"}
        if config.get("train_micro_batch_size_per_gpu") in (None, "auto"):
            config["train_micro_batch_size_per_gpu"] = 1
        config["gradient_accumulation_steps"] = self.accumulation(base)
        config.setdefault("optimizer", {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})
        config |= {"seed": seed, "steps_per_print": None, "wall_clock_breakdown": False, "dump_state": False}
        config["bf16"] = {"enabled": dtype == "bfloat16"}
        pipeline = {
            "schedule": self.schedule,
            "num_chunks": self.chunks,
            "placement": self.placement,
            "activation_checkpoint_interval": self.recompute,
        }
        own = {key: value for key, value in pipeline.items() if value is not None}
        config["pipeline"] = {**_section(base, "pipeline"), **own, "stages": self.stages, "seed_layers": True}
        sliced = {"size": self.slices, "sequence_parallel": self.sequence_parallel}
        config["tensor_parallel"] = {**_section(base, "tensor_parallel"), **sliced}
        if self.zero is not None:
            config["zero_optimization"] = {**_section(base, "zero_optimization"), "stage": self.zero}
        return config


def _section(base: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of a configuration as given; empty where it is absent, or no mapping."""
    given = base.get(key)
    return given if isinstance(given, Mapping) else {}


def parse_layout(text: str) -> Layout:
    """Read words separated by commas. Raises ConfigError for an unknown or repeated word, with what is known."""
    found: dict[str, Any] = {}
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        key, value = _read(word, text)
        if key in found:
            raise ConfigError(f"layout {text!r}: {word!r} sets {key} a second time; give it once")
        found[key] = value
    layout = Layout(text, **found)
    if layout.schedule in ("interleaved", "zb-looped", "zbv"):
        layout = replace(layout, chunks=layout.chunks or 2)
    return replace(layout, placement="v") if layout.schedule == "zbv" else layout


def _read(word: str, text: str) -> tuple[str, Any]:
    if word in SCHEDULES:
        return "schedule", word
    if word in ("sp", "v"):
        return ("sequence_parallel", True) if word == "sp" else ("placement", "v")
    match = re.fullmatch(r"([a-z]+)(\d+)", word)
    if match is None or match[1] not in _NUMBERED:
        hint = nearest(match[1] if match else word, _NUMBERED if match else _FLAGS)
        raise ConfigError(f"layout {text!r}: unknown word {word!r}.{hint} Give some of {', '.join(_WORDS)}")
    number = int(match[2])
    if number < 1 and match[1] not in ("zero", "ckpt"):
        raise ConfigError(f"layout {text!r}: {word!r} asks for none; give {match[1]}1 or more")
    return _NUMBERED[match[1]], number
