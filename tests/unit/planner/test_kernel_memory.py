"""The memory of this package's kernels is part of the prediction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel3d.config import load
from parallel3d.config.layout import Layout
from parallel3d.kernels.all_reduce import AllReduce
from parallel3d.kernels.reduce_scatter import ReduceScatter
from parallel3d.pipe import LayerSpec
from parallel3d.planner.predict.chunk_memory import MemoryReplay
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.planner.predict.memory import MemoryModel, Room
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.search.result import StageMemory
from parallel3d.schedule.builders import build
from parallel3d.schedule.lowering import lower


def predicted(
    tensor_ranks: int, kernels: dict[str, object], replicas: int = 1, zero: int = 0, **settings: object
) -> StageMemory:
    """Return the predicted memory of a rank of one stage."""
    given = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        **settings,
        "train_micro_batch_size_per_gpu": 1,
        "kernels": kernels,
    }
    sample = torch.ones(1, 4)
    profile = ModelProfile([LayerSpec(nn.Linear, 4, 4)], sample, sample, nn.MSELoss(), load(given))
    layout = Layout(
        stages=1,
        replicas=replicas,
        tensor_ranks=tensor_ranks,
        schedule="1f1b",
        micro_batch=1,
        micro_batches=1,
        zero=zero,
    )
    program = lower(build("1f1b", 1, 1, 1, "loop"))
    stage = MemoryModel(profile).stage(MemoryReplay(program), Chunks.one(layout, 1), 0, Room(1, 1))
    return stage


def outside(tensor_ranks: int, kernels: dict[str, object], replicas: int = 1, zero: int = 0) -> int:
    """Return the bytes outside of PyTorch's allocator."""
    return predicted(tensor_ranks, kernels, replicas, zero).outside


@pytest.mark.parametrize(
    ("tensor_ranks", "taken"), [(1, 0), (2, AllReduce.staging_bytes()), (3, 0), (8, AllReduce.staging_bytes())]
)
def test_the_staging_buffer_counts_where_the_kernel_runs(tensor_ranks: int, taken: int) -> None:
    off = outside(tensor_ranks, {"all_reduce": False})
    assert outside(tensor_ranks, {}) == off, "auto is off for now"
    assert outside(tensor_ranks, {"all_reduce": True}) - off == taken


@pytest.mark.parametrize(
    ("replicas", "zero", "taken"), [(1, 1, 0), (2, 0, 0), (4, 1, ReduceScatter.staging_bytes()), (3, 2, 0)]
)
def test_the_reduce_scatters_counts_where_that_runs(replicas: int, zero: int, taken: int) -> None:
    off = outside(1, {}, replicas, zero)
    assert outside(1, {"reduce_scatter": True}, replicas, zero) - off == taken


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(("replicas", "zero", "shares"), [(2, 1, True), (2, 0, False), (3, 1, False), (1, 1, False)])
def test_weights_that_replicas_share_are_outside_of_the_allocators_count(
    replicas: int, zero: int, shares: bool
) -> None:
    off = predicted(1, {}, replicas, zero, **BF16)
    on = predicted(1, {"optimizer_step": True}, replicas, zero, **BF16)
    weights = off.parts["weights"]
    assert weights > 0
    assert on.outside - off.outside == (weights if shares else 0)
    assert off.allocated - on.allocated == (weights if shares else 0)
    assert predicted(1, {"optimizer_step": True}, replicas, zero) == predicted(1, {}, replicas, zero), (
        "fp32 weights stay"
    )


def test_the_kernels_step_needs_no_gradients_in_fp32() -> None:
    narrow = {**BF16, "data_types": {"grad_accum_dtype": "bf16"}}
    off, on = (predicted(1, {"optimizer_step": asked}, **narrow) for asked in (False, True))
    assert off.phases["step"] - on.phases["step"] == 4 * (32 + 32), "weights and biases, padded to 32 each, in fp32"
