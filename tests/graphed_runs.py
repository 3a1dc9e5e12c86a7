"""A training with and without CUDA graphs: the toy model with dropout, half of whose lengths change in one step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import toy
from layouts import CLIPPING, TORCH_SEED, Run, make_engine, own_iterator, run_steps
from taped_graphs import TapedGraphs
from torch import Tensor

from parallel3d.engine import step
from parallel3d.pipe.cuda_graphs import GraphedExecutor
from parallel3d.schedule.instructions import COMPUTE_OPS

ACCUMULATION, STEPS = 4, 6  # the third step is captured; in the fifth half of the lengths change


def counted(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropy over tokens with an even label, and their number."""
    each = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    even = labels.flatten() % 2 == 0
    return (each * even).sum(), even.sum()


def train(pp: int, pipeline: dict[str, Any], tied: bool, config: dict[str, Any]) -> tuple[Run, int, int]:
    """Also the number of replays of graphs, and of this rank's compute instructions."""
    torch.manual_seed(TORCH_SEED)
    with nullcontext() if torch.cuda.is_available() else mock.patch.object(step, "CudaGraphs", TapedGraphs):
        engine = make_engine(
            toy.model(tied, dropout=0.2),
            counted if tied else toy.cross_entropy,
            accumulation=ACCUMULATION,
            clipping=CLIPPING,
            pipeline={"stages": pp, **pipeline},
            **config,
        )
    per_step = ACCUMULATION * engine.grid.get_data_parallel_world_size()
    kinds = ["lengths" if 0 <= k - 4 * per_step < per_step / 2 else "tuple" for k in range(STEPS * per_step)]
    data = [toy.micro_batch(k, kind) for k, kind in enumerate(kinds)]
    replay = GraphedExecutor._replay
    with mock.patch.object(GraphedExecutor, "_replay", autospec=True, side_effect=replay) as replays:
        run = run_steps(engine, own_iterator(engine, data), STEPS)
    program = engine._runner.programs.get(ACCUMULATION, training=True).instructions[engine.pipeline_module.stage_id]
    return run, replays.call_count, sum(i.op in COMPUTE_OPS for i in program)


def check(graphed: list[tuple[Run, int, int]], plain: list[tuple[Run, int, int]]) -> None:
    """Three whole steps were replayed, of which the first was captured, and losses, norms and weights are the same bits."""
    for (run, replays, instructions), (wanted, none, _) in zip(graphed, plain, strict=True):
        assert replays >= 3 * instructions
        assert none == 0
        assert str(run[:2]) == str(wanted[:2])  # a norm is NaN where gradients overflow
        for name, weight in run[2].items():
            assert torch.equal(weight, wanted[2][name]), name
