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
_CHUNKED = ("interleaved", "zb-looped", "zbv")  # by 2, if the words don't say
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
    if layout.schedule in _CHUNKED:
        layout = replace(layout, chunks=layout.chunks or 2)
    return replace(layout, placement="v") if layout.schedule == "zbv" else layout


def in_words(layout: RunLayout) -> str:
    """The words from which parse_run_layout reads the layout again; left out is what is None, and what goes without saying."""
    numbers = (("pp", layout.stages), ("dp", layout.replicas), ("tp", layout.slices))
    words = [f"{name}{number}" for name, number in numbers if number > 1]
    words += ["sp"] * layout.sequence_parallel
    words += [f"zero{layout.zero}"] * (layout.zero is not None)
    words += [layout.schedule] if layout.schedule is not None else []
    words += ["v"] * (layout.placement == "v" and layout.schedule != "zbv")
    chunks = None if layout.chunks == (2 if layout.schedule in _CHUNKED else 1) else layout.chunks
    rest = (
        ("chunks", chunks),
        ("m", layout.micro_batches),
        ("mb", layout.micro_batch),
        ("ckpt", layout.recompute or None),
    )
    words += [f"{name}{number}" for name, number in rest if number is not None]
    return ",".join(words) or "pp1"
