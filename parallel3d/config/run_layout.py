"""A layout with its schedule in words, "pp2,tp2,zero1,zb-h1,m8": one run of a training."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from parallel3d.config.layout import AXES, SHARING, Flags, Layout, Numbered, read_words
from parallel3d.config.pipeline import SCHEDULES

_NUMBERED: Numbered = {
    **AXES,
    "mb": ("micro_batch", "samples of a micro-batch"),
    "m": ("micro_batches", "micro-batches of a replica"),
    "chunks": ("chunks", "chunks of a stage"),
    "ckpt": ("recompute", "layers recomputed together"),
}
_FLAGS: Flags = {
    **SHARING,
    "half": ("units", "half"),
    "v": ("placement", "v"),
    **{name: ("schedule", name) for name in SCHEDULES},
}

# Schedules that run 2 chunks a stage where nothing else is said.
_CHUNKED = ("interleaved", "zb-looped", "zbv")


@dataclass(frozen=True)
class RunLayout(Layout):
    """A layout with its schedule. text: as written; micro_batch: its samples; micro_batches: of each replica in a step;
    recompute: as the configuration's activation_checkpoint_interval; units: "half" where the model's layers are half blocks, as
    models.decoder's units says. What is None the words leave open.
    """

    text: str = ""
    micro_batch: int | None = None
    micro_batches: int | None = None
    chunks: int | None = None
    recompute: int | None = None
    schedule: str | None = None
    placement: str | None = None
    units: str | None = None


class StatedLayout(BaseModel):
    """A run's layout, of which nothing is open, as files state it.

    layout: in words; schedule: "written" for a user's lists; units: None for layers as they are given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str
    stages: int
    replicas: int
    slices: int
    sequence_parallel: bool
    chunks: int
    placement: Literal["loop", "v"]
    schedule: str
    micro_batch: int
    micro_batches: int
    zero: int
    recompute: int
    units: Literal["half"] | None = None

    @staticmethod
    def fields_of(layout: RunLayout) -> dict[str, Any]:
        """The fields, for a constructor."""
        return {
            "layout": write_run_layout(layout),
            "stages": layout.stages,
            "replicas": layout.replicas,
            "slices": layout.slices,
            "sequence_parallel": layout.sequence_parallel,
            "chunks": layout.chunks or 1,
            "placement": layout.placement or "loop",
            "schedule": layout.schedule or "written",
            "micro_batch": layout.micro_batch,
            "micro_batches": layout.micro_batches,
            "zero": layout.zero or 0,
            "recompute": layout.recompute or 0,
            "units": layout.units,
        }

    def run_layout(self) -> RunLayout:
        """Return the stated layout."""
        names = [field.name for field in fields(RunLayout) if field.name != "text"]
        return RunLayout(text=self.layout, **{name: getattr(self, name) for name in names})


def parse_run_layout(text: str) -> RunLayout:
    """Read words separated by commas. Raises ConfigError for an unknown or repeated word, with what is known."""
    layout = RunLayout(text=text, **read_words(text.lower(), _NUMBERED, _FLAGS))
    if layout.schedule in _CHUNKED:
        layout = replace(layout, chunks=layout.chunks or 2)
    return replace(layout, placement="v") if layout.schedule == "zbv" else layout


def write_run_layout(layout: RunLayout) -> str:
    """Words that parse_run_layout reads, always the same for one layout; the configuration's defaults are left out."""
    axes = {"pp": layout.stages, "dp": layout.replicas, "tp": layout.slices}
    words = [f"{name}{size}" for name, size in axes.items() if size > 1] or ["pp1"]
    words += ["sp"] * layout.sequence_parallel + [f"zero{layout.zero}"] * bool(layout.zero)
    words += ["half"] if layout.units == "half" else []
    words += [layout.schedule] if layout.schedule is not None else []
    words += ["v"] * (layout.placement == "v" and layout.schedule != "zbv")
    implied = 2 if layout.schedule in _CHUNKED else 1
    words += [f"chunks{layout.chunks}"] if layout.chunks not in (None, implied) else []
    counts = {"m": layout.micro_batches, "mb": layout.micro_batch, "ckpt": layout.recompute or None}
    return ",".join(words + [f"{name}{count}" for name, count in counts.items() if count is not None])
