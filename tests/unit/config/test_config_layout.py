"""Layouts in words: what they say, and what a wrong one is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config import Layout, parse_layout
from parallel3d.errors import ConfigError

NUMBERS = st.integers(1, 100)


@given(st.permutations(["pp", "tp", "dp", "zero"]), st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), st.booleans())
def test_words_in_any_order(names: list[str], numbers: tuple[int, ...], sequence_parallel: bool):
    said = dict(zip(names, numbers, strict=True))
    words = [f"{name}{number}" for name, number in said.items()] + ["sp"] * sequence_parallel
    layout = parse_layout(", ".join(words))
    assert layout == Layout(said["pp"], said["tp"], said["dp"], said["zero"], sequence_parallel)
    assert layout.world_size == said["pp"] * said["tp"] * said["dp"]


def test_what_is_not_named():
    assert parse_layout("tp4") == Layout(stages=1, slices=4, replicas=1, zero=None, sequence_parallel=False)
    assert parse_layout("zero0").zero == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp2,tt2", "unknown word 'tt2'. Did you mean 'tp2'? Known are ppN (pipeline stages), tpN"),
        ("pp2,zer1", "unknown word 'zer1'. Did you mean 'zero1'?"),
        ("pp2;tp2", "separate them by commas"),
        ("pp", "unknown word 'pp'. Did you mean"),
        ("pp2,,tp2", "unknown word ''. Known are"),
        ("", "unknown word ''. Known are"),
        ("8", "unknown word '8'. Known are"),
        ("pp2,tp0", "'tp0' asks for no tensor slices; give tp1 or more, or leave it out"),
        ("dp2,pp2,dp4", "'dp4' sets the replicas a second time; give one of them"),
        ("pp-2", "unknown word 'pp-2'"),
    ],
)
def test_a_wrong_layout_is_explained(text: str, message: str):
    with pytest.raises(ConfigError) as error:
        parse_layout(text)
    assert f"layout {text!r}" in str(error.value)
    assert message in str(error.value)
