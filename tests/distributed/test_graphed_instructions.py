"""Instructions captured as CUDA graphs compute the bits that they compute without graphs. Their stand-in replays operators."""

from __future__ import annotations

from typing import Any

import pytest
import toy
from graphed_runs import check, train
from layouts import make_engine
from ranks import RankError

BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("ranks", "pp", "pipeline", "tied", "config"),
    [
        (1, 1, {"schedule": "1f1b"}, False, BF16),
        (2, 2, {"schedule": "zb-h1"}, True, {}),
        (2, 2, {"schedule": "zbv", "num_chunks": 2, "placement": "v"}, False, BF16),
        (2, 1, {"schedule": "1f1b"}, True, {**BF16, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1500}}),
    ],
)
def test_graphs_train_bitwise_as_without(
    run_ranks, ranks: int, pp: int, pipeline: dict[str, Any], tied: bool, config: dict[str, Any]
):
    graphed = run_ranks(ranks, train, pp, pipeline, tied, {**config, "compile": {"cuda_graphs": True}})
    plain = run_ranks(ranks, train, pp, pipeline, tied, config)
    check(graphed, plain)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs a CUDA device, and this is cpu; set compile.cuda_graphs to false"),
        ({"fp16": {"enabled": True}}, r"can't be combined with a changing loss scale \(fp16.loss_scale 0\)"),
        (
            {"check_numerics": True, "fp8": {"enabled": True}, **BF16},
            r"with fp8 \(fp8.enabled\), check_numerics; change",
        ),
        ({"pipeline": {"activation_checkpoint_interval": 1}}, "with recomputed layers"),
        ({"zero_optimization": {"stage": 2, "reduce_per_micro_batch": True}}, "with reduction in every micro-batch"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(run_ranks, config: dict[str, Any], message: str):
    with pytest.raises(RankError, match=message):
        run_ranks(1, refused, config)


def refused(config: dict[str, Any]) -> None:
    make_engine(toy.model(False), compile={"cuda_graphs": True}, **config)
