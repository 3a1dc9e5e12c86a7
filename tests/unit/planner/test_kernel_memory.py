"""What this package's kernels take of a device is part of the memory that is predicted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel3d.config import load
from parallel3d.config.run_layout import RunLayout
from parallel3d.kernels.all_reduce import staging_bytes
from parallel3d.pipe import LayerSpec
from parallel3d.planner.flight import Replays
from parallel3d.planner.memory import MemoryModel
from parallel3d.planner.profile import ModelProfile
from parallel3d.schedule.builders import build
from parallel3d.schedule.lowering import lower


def outside(slices: int, kernels: dict[str, object]) -> int:
    """Of PyTorch's allocator, on a rank of one stage."""
    given = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "train_micro_batch_size_per_gpu": 1,
        "kernels": kernels,
    }
    sample = torch.ones(1, 4)
    profile = ModelProfile([LayerSpec(nn.Linear, 4, 4)], sample, sample, nn.MSELoss(), load(given))
    layout = RunLayout(stages=1, replicas=1, slices=slices, schedule="1f1b", micro_batch=1, micro_batches=1)
    program = lower(build("1f1b", 1, 1, 1, "loop"))
    (stage,) = MemoryModel(profile).stages(Replays.of_program(program), (0, 1), layout, [1])
    return stage.outside


@pytest.mark.parametrize(("slices", "taken"), [(1, 0), (2, staging_bytes()), (3, 0), (8, staging_bytes())])
def test_the_staging_buffer_counts_where_the_kernel_runs(slices: int, taken: int) -> None:
    off = outside(slices, {"all_reduce": False})
    assert outside(slices, {}) == off, "auto is off for now"
    assert outside(slices, {"all_reduce": True}) - off == taken
