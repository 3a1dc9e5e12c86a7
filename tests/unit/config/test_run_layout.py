"""A layout with its schedule in words: what is written is what is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.run_layout import RunLayout, in_words, parse_run_layout
from parallel3d.errors import ConfigError


def test_words_set_what_they_name() -> None:
    layout = parse_run_layout("pp4,dp2,tp2,sp,zero1,zb-looped,chunks4,m16,mb2,ckpt1")
    expected = RunLayout(
        text=layout.text,
        stages=4,
        replicas=2,
        slices=2,
        sequence_parallel=True,
        zero=1,
        schedule="zb-looped",
        chunks=4,
        micro_batches=16,
        micro_batch=2,
        recompute=1,
    )
    assert layout == expected


SCHEDULES = (
    ("1f1b", 1, "loop"),
    ("interleaved", 4, "loop"),
    ("interleaved", 2, "loop"),
    ("zbv", 2, "v"),
    (None, 1, None),
)


@given(
    st.tuples(*[st.integers(1, 64)] * 5),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(SCHEDULES),
)
def test_a_layout_is_read_again_from_its_words(sizes, shares, zero, recompute, variant) -> None:
    (stages, replicas, slices, micro_batch, micro_batches), (schedule, chunks, placement) = sizes, variant
    written = RunLayout(
        stages=stages,
        replicas=replicas,
        slices=slices,
        sequence_parallel=shares,
        zero=zero,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        chunks=chunks,
        recompute=recompute,
        schedule=schedule,
        placement=placement,
    )
    read = parse_run_layout(in_words(written))
    for name in (
        "stages",
        "replicas",
        "slices",
        "sequence_parallel",
        "zero",
        "micro_batch",
        "micro_batches",
        "schedule",
    ):
        assert getattr(read, name) == getattr(written, name)
    # What goes without saying may be left out.
    assert (read.chunks or 1, read.recompute or 0) == (chunks, recompute)
    assert (read.placement or "loop") == (placement or "loop")


def test_an_unknown_word_is_told_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="zb-loop"):
        parse_run_layout("pp4,zb-loopd")
