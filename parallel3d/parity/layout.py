"""A layout in words, "pp2,tp2,zero1,zb-h1", and the configuration it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from parallel3d.config.layout import AXES, SHARING, Flags, Layout, Numbered, read_words
from parallel3d.config.pipeline import SCHEDULES

_NUMBERED: Numbered = {
    **AXES,
    "m": ("micro_batches", "micro-batches of a replica"),
    "chunks": ("chunks", "chunks of a stage"),
    "ckpt": ("recompute", "layers recomputed together"),
}
_FLAGS: Flags = {**SHARING, "v": ("placement", "v"), **{name: ("schedule", name) for name in SCHEDULES}}


@dataclass(frozen=True)
class RunLayout(Layout):
    """A layout with its schedule. text: as written; micro_batches: of each replica in a step; recompute: as the
    configuration's activation_checkpoint_interval. What is None is the base configuration's, or the default.
    """

    text: str = ""
    micro_batches: int | None = None
    chunks: int | None = None
    recompute: int | None = None
    schedule: str | None = None
    placement: str | None = None

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


def parse_run_layout(text: str) -> RunLayout:
    """Read words separated by commas. Raises ConfigError for an unknown or repeated word, with what is known."""
    layout = RunLayout(text=text, **read_words(text.lower(), _NUMBERED, _FLAGS))
    if layout.schedule in ("interleaved", "zb-looped", "zbv"):
        layout = replace(layout, chunks=layout.chunks or 2)
    return replace(layout, placement="v") if layout.schedule == "zbv" else layout
