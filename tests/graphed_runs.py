"""Trainings with and without CUDA graphs, with dropout, in which half of the lengths change in one step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import toy
from layouts import CLIPPING, TORCH_SEED, Run, make_engine, own_iterator, run_steps
from taped_graphs import TapedGraphs
from torch import Tensor, nn

import parallel3d
from parallel3d.engine import step
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.pipe.graphed_executor import GraphedExecutor
from parallel3d.schedule.instructions import COMPUTE_OPS

# Also the number of replays of graphs, and of this rank's compute instructions.
Result = tuple[Run, int, int]
ACCUMULATION, STEPS = 4, 6  # the third step is captured; in the fifth half of the lengths change


def counted(output: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the cross entropy over tokens with an even label, and their number."""
    each = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="none")
    even = labels.flatten() % 2 == 0
    return (each * even).sum(), even.sum()


def stand_in() -> AbstractContextManager[Any]:
    """Put the stand-in of CUDA graphs in their place, on the CPU."""
    return nullcontext() if torch.cuda.is_available() else mock.patch.object(step, "CudaGraphs", TapedGraphs)


def make(*args: Any, accumulation: int = ACCUMULATION, **config: Any) -> Any:
    """An engine of layouts.make_engine."""
    torch.compiler.reset()  # layers that other tests have compiled in this process count for its limits
    torch.manual_seed(TORCH_SEED)
    with stand_in():
        return make_engine(*args, accumulation=accumulation, clipping=CLIPPING, **config)


def run(engine: Any, micro_batch: Callable[[int, bool], Any]) -> Result:
    """micro_batch(number, whether it has another length)."""
    accumulation = engine.gradient_accumulation_steps()
    per_step = accumulation * engine.grid.get_data_parallel_world_size()
    data = [micro_batch(k, 0 <= k - 4 * per_step < per_step / 2) for k in range(STEPS * per_step)]
    replay = GraphedExecutor._replay
    with mock.patch.object(GraphedExecutor, "_replay", autospec=True, side_effect=replay) as replays:
        result = run_steps(engine, own_iterator(engine, data), STEPS)
    program = engine._runner.programs.get(accumulation, training=True).instructions[engine.pipeline_module.stage_id]
    return result, replays.call_count, sum(i.op in COMPUTE_OPS for i in program)


def train(pp: int, pipeline: dict[str, Any], tied: bool, config: dict[str, Any]) -> Result:
    """The toy model with dropout."""
    loss = counted if tied else toy.cross_entropy
    engine = make(toy.model(tied, dropout=0.2), loss, pipeline={"stages": pp, **pipeline}, **config)
    # The integer of a tuple, which each layer counts up, is compiled anew in each layer.
    usual = "tensor" if config.get("compile", {}).get("enabled") else "tuple"
    return run(engine, lambda k, changed: toy.micro_batch(k, "lengths" if changed else usual))


DECODER = DecoderConfig(
    vocab_size=37,
    hidden_size=32,  # parts of which fp8 takes
    ffn_size=64,
    num_layers=2,
    num_heads=2,
    embedding_dropout=0.1,
    attention_dropout=0.2,
    residual_dropout=0.1,
)


def train_sliced(sequence_parallel: bool, pipeline: dict[str, Any], config: dict[str, Any]) -> Result:
    """A decoder over two tensor-parallel ranks, which draw masks of their own."""
    tensor_parallel = {"size": 2, "sequence_parallel": sequence_parallel}
    engine = make(
        decoder(DECODER),
        causal_lm_loss,
        accumulation=2,  # of one stage; a micro-batch is recorded and replayed operator by operator
        pipeline=pipeline,
        tensor_parallel=tensor_parallel,
        attention={"backend": "math"},  # whose backward is deterministic
        **config,
    )

    def micro_batch(k: int, changed: bool) -> tuple[Tensor, Tensor]:
        ids = torch.randint(37, (toy.SAMPLES, 5 if changed else 7), generator=torch.Generator().manual_seed(k))
        return ids, ids

    return run(engine, micro_batch)


class Blocks(nn.Module):
    """A plain module, of which the engine recomputes the blocks."""

    def __init__(self, dropout: float):
        super().__init__()
        layers = [[nn.Linear(64, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 64)] for _ in range(3)]
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, y)


def train_plain(dropout: float, config: dict[str, Any]) -> list[Tensor]:
    """Losses and weights of five steps."""
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW"},
        "activation_checkpointing": {"policy": "full"},
        "steps_per_print": None,
        **config,
    }
    with stand_in():
        engine, *_ = parallel3d.initialize(model=Blocks(dropout), config=config)
    batches = iter([tuple(torch.randn(2, 8, 64)) for _ in range(5)])
    losses = [engine.train_batch(batches) for _ in range(5)]
    return [tensor.detach().cpu() for tensor in (*losses, *engine.module.parameters())]


def check(graphed: list[Result], plain: list[Result]) -> None:
    """Three whole steps were replayed, of which the first was captured, and losses, norms and weights are the same bits."""
    for (got, replays, instructions), (wanted, none, _) in zip(graphed, plain, strict=True):
        assert replays >= 3 * instructions
        assert none == 0
        assert str(got[:2]) == str(wanted[:2])  # a norm is NaN where gradients overflow
        for name, weight in got[2].items():
            assert torch.equal(weight, wanted[2][name]), name
