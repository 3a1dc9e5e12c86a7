"""Layouts in words and back, the errors of wrong words, and the configuration that a layout means."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel3d.config import Layout, load, parse_layout
from parallel3d.config.layout import configuration
from parallel3d.config.pipeline import SCHEDULES
from parallel3d.errors import ConfigError
from parallel3d.parity.settings import Settings, check_config

NUMBERS = st.integers(1, 100)
layouts = st.builds(
    Layout,
    stages=NUMBERS,
    tensor_ranks=NUMBERS,
    replicas=NUMBERS,
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    micro_batch=NUMBERS,
    micro_batches=NUMBERS,
    chunks=NUMBERS,
    recompute=st.integers(0, 9),
    policy=st.sampled_from([None, "cheap", "attention", "auto"]),
    schedule=st.sampled_from(SCHEDULES),
    placement=st.sampled_from(["loop", "v"]),
    units=st.sampled_from([None, "half"]),
)


@given(st.permutations(["pp", "tp", "dp", "zero"]), st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), st.booleans())
def test_words_in_any_order(names: list[str], numbers: tuple[int, ...], sequence_parallel: bool):
    said = dict(zip(names, numbers, strict=True))
    words = [f"{name}{number}" for name, number in said.items()] + ["sp"] * sequence_parallel
    layout = parse_layout(", ".join(words))
    expected = Layout(
        stages=said["pp"],
        tensor_ranks=said["tp"],
        replicas=said["dp"],
        zero=said["zero"],
        sequence_parallel=sequence_parallel,
    )
    assert layout.complete() == expected
    assert layout.world_size == said["pp"] * said["tp"] * said["dp"]


def test_fields_that_no_word_sets_are_open():
    layout = parse_layout("TP4, zero0")
    assert layout.complete(replicas=2) == Layout(tensor_ranks=4, replicas=2)
    assert layout.given == {"tensor_ranks", "zero"}
    assert (layout.decided("zero"), layout.decided("replicas")) == (0, None)
    assert layout.text == "TP4, zero0"


@given(layouts)
def test_words_are_read_as_what_was_written(layout: Layout):
    layout = layout if layout.schedule != "zbv" else layout.model_copy(update={"placement": "v"})
    layout = layout if layout.recompute else layout.model_copy(update={"policy": None})
    assert parse_layout(layout.text).complete() == layout


@pytest.mark.parametrize(
    "words",
    [
        "pp4,dp2,zero1,zbv,m16,mb2,ckpt1",
        "pp2,dp2,tp2,sp,interleaved,chunks3,m8,mb1",
        "pp1,gpipe,v,chunks2,m1,mb1",
        "tp8,1f1b,m4,mb1",
        "pp4,dp2,zero1,half,zb-h1,m2,mb1",
        "pp4,zb-h1,m2,mb1,cheap",
        "pp2,1f1b,m2,mb1,attention,ckpt2",
        "pp2,1f1b,m2,mb1,ckpt-auto",
    ],
)
def test_these_words_are_the_usual_ones(words: str):
    assert parse_layout(words).complete().text == words


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp2,tt2", "unknown word 'tt2'. Did you mean 'tp2'? Give words from ppN (pipeline stages), tpN"),
        ("pp2,zer1", "unknown word 'zer1'. Did you mean 'zero1'?"),
        ("pp2;tp2", "separated by commas"),
        ("pp", "unknown word 'pp'. Did you mean 'pp1'?"),
        ("pp2,ckpt", "unknown word 'ckpt'. Did you mean 'ckpt1'?"),
        ("pp2,,tp2", "unknown word ''. Give words from"),
        ("", "unknown word ''. Give words from"),
        ("8", "unknown word '8'. Give words from"),
        ("pp2,tp0", "'tp0' asks for no tensor-parallel ranks; give tp1 or more, or leave it out"),
        ("pp2,full", "unknown word 'full'. As policy of recomputation it is 'ckpt1'. Give words from"),
        ("ckpt0,cheap", "'cheap' recomputes a part of layers, ckpt0 none; leave one out"),
        ("cheap,attention", "'attention' sets the policy a second time"),
        ("dp2,pp2,dp4", "'dp4' sets the replicas a second time; give one of them"),
        ("pp-2", "unknown word 'pp-2'"),
    ],
)
def test_a_wrong_layout_is_explained(text: str, message: str):
    with pytest.raises(ConfigError) as error:
        parse_layout(text)
    assert f"layout {text!r}" in str(error.value)
    assert message in str(error.value)


def test_a_partial_layout_changes_only_what_its_words_give():
    base = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 3,
        "zero_optimization": True,
        "pipeline": {"placement": "v", "num_chunks": 2, "stages": 8},
        "tensor_parallel": {"size": 4, "sequence_parallel": True},
    }
    config = configuration(parse_layout("pp2,gpipe"), base)
    assert config == {
        "gradient_accumulation_steps": 3,
        "zero_optimization": True,
        "pipeline": {"placement": "v", "num_chunks": 2, "stages": 2, "schedule": "gpipe"},
        "tensor_parallel": {"size": 1, "sequence_parallel": False},
    }


@given(layouts)
def test_a_complete_layout_means_one_configuration(layout: Layout):
    config = configuration(layout, {"pipeline": {"schedule": "zbv", "stages": 7}, "train_batch_size": 5}, bounds=(0, 2))
    assert "train_batch_size" not in config
    assert config["pipeline"] == {
        "stages": layout.stages,
        "schedule": layout.schedule,
        "num_chunks": layout.chunks,
        "placement": layout.placement,
        "activation_checkpoint_interval": layout.recompute,
        "partition": [0, 2],
        **({"units": "half"} if layout.units else {}),
    }
    assert configuration(layout, {"pipeline": {"units": "half"}})["pipeline"]["units"] == (layout.units or "block")
    assert config.get("activation_checkpointing", {}).get("policy") == layout.policy
    base = {"activation_checkpointing": {"policy": "full", "profile": True}}
    assert configuration(layout, base)["activation_checkpointing"] == {"policy": layout.policy, "profile": True}
    base = {"activation_checkpointing": {"policy": {"Block": "cheap"}}}
    kept = {"Block": "cheap"} if layout.policy is None and layout.recompute else layout.policy
    assert configuration(layout, base)["activation_checkpointing"] == {"policy": kept}
    assert config["train_micro_batch_size_per_gpu"] == layout.micro_batch
    assert config["gradient_accumulation_steps"] == layout.micro_batches
    assert config["zero_optimization"]["stage"] == layout.zero


@pytest.mark.parametrize("asked", [None, False, True, "auto"])
@pytest.mark.parametrize("words", ["dp2,zero0", "dp2,zero1", "dp2,zero2", "dp2"])
def test_reductions_of_every_micro_batch_are_for_the_stages_that_have_them(asked: Any, words: str):
    base = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    if asked is not None:
        base["zero_optimization"]["reduce_per_micro_batch"] = asked
    zero = load(configuration(parse_layout(words), base)).zero_optimization
    keeps = zero.stage == 2
    assert zero.reduce_per_micro_batch == ((asked if asked is not None else "auto") if keeps or not asked else "auto")


@pytest.mark.parametrize("words", ["dp2,zero2", "dp2,zero3"])
def test_a_complete_layout_reduces_gradients_in_every_micro_batch(words: str):
    layout = parse_layout(words).complete()
    assert configuration(layout, {})["zero_optimization"]["reduce_per_micro_batch"] is True
    base = {"zero_optimization": {"reduce_per_micro_batch": False}}
    assert configuration(layout, base)["zero_optimization"]["reduce_per_micro_batch"] is False


def test_a_check_shards_small_layers_too_unless_told_otherwise():
    def threshold(words: str, base: dict[str, Any]) -> int:
        config = load(check_config(parse_layout(words), base, Settings()))
        return config.zero_optimization.stage3_param_persistence_threshold

    assert threshold("dp2,zero3", {}) == 0
    assert threshold("dp2", {"zero_optimization": {"stage": 3}}) == 0
    assert threshold("dp2,zero3", {"zero_optimization": {"stage3_param_persistence_threshold": 7}}) == 7
    assert threshold("dp2,zero2", {}) == load({}).zero_optimization.stage3_param_persistence_threshold > 0
