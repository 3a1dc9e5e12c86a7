"""A layout with its schedule in words, "pp2,tp2,zero1,zb-h1,m8": one run of a training."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel3d.config.layout import AXES, SHARING, Flags, Layout, Numbered, read_words
from parallel3d.config.pipeline import SCHEDULES

_NUMBERED: Numbered = {
    **AXES,
    "mb": ("micro_batch", "samples of a micro-batch"),
    "m": ("micro_batches", "micro-batches of a replica"),
    "chunks": ("chunks", "chunks of a stage"),
    "ckpt": ("recompute", "layers recomputed together"),
}
_FLAGS: Flags = {**SHARING, "v": ("placement", "v"), **{name: ("schedule", name) for name in SCHEDULES}}


@dataclass(frozen=True)
class RunLayout(Layout):
    """A layout with its schedule. text: as written; micro_batch: its samples; micro_batches: of each replica in a step;
    recompute: as the configuration's activation_checkpoint_interval. What is None the words leave open.
    """

    text: str = ""
    micro_batch: int | None = None
    micro_batches: int | None = None
    chunks: int | None = None
    recompute: int | None = None
    schedule: str | None = None
    placement: str | None = None


def parse_run_layout(text: str) -> RunLayout:
    """Read words separated by commas. Raises ConfigError for an unknown or repeated word, with what is known."""
    layout = RunLayout(text=text, **read_words(text.lower(), _NUMBERED, _FLAGS))
    if layout.schedule in ("interleaved", "zb-looped", "zbv"):
        layout = replace(layout, chunks=layout.chunks or 2)
    return replace(layout, placement="v") if layout.schedule == "zbv" else layout
