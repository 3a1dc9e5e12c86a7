"""Layouts with their schedules, in words and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config.pipeline import SCHEDULES
from parallel3d.config.run_layout import RunLayout, parse_run_layout, write_run_layout

counts = st.integers(1, 64)
layouts = st.builds(
    RunLayout,
    stages=counts,
    slices=counts,
    replicas=counts,
    zero=st.sampled_from([None, 1, 2]),
    sequence_parallel=st.booleans(),
    micro_batch=st.none() | counts,
    micro_batches=st.none() | counts,
    chunks=st.none() | st.integers(2, 9),
    recompute=st.none() | counts,
    schedule=st.none() | st.sampled_from(SCHEDULES),
    placement=st.sampled_from([None, "v"]),
    units=st.sampled_from([None, "half"]),
)


@given(layouts)
def test_words_are_read_as_what_was_written(layout: RunLayout):
    words = write_run_layout(layout)
    chunked = layout.schedule in ("interleaved", "zb-looped", "zbv")
    expected = replace(
        layout,
        text=words,
        chunks=layout.chunks or (2 if chunked else None),
        placement="v" if layout.schedule == "zbv" else layout.placement,
    )
    assert parse_run_layout(words) == expected


@pytest.mark.parametrize(
    "words",
    [
        "pp4,dp2,zero1,zbv,m16,mb2,ckpt1",
        "pp2,dp2,tp2,sp,interleaved,chunks3,m8,mb1",
        "pp1,gpipe,v,chunks2",
        "tp8,m4",
        "pp4,dp2,zero1,half,zb-h1",
    ],
)
def test_these_words_are_the_usual_ones(words: str):
    assert write_run_layout(parse_run_layout(words)) == words
    # What is the default anyway needs no word.
    assert write_run_layout(RunLayout(zero=0, recompute=0, chunks=1, placement="loop")) == "pp1"
