"""A layer of your own with tensor parallelism, in two ways: by a plan for plain PyTorch, and with the package's layers.

GatedMLP is plain PyTorch. SlicedMLP shards it by a plan, as Megatron-LM does: the first product by columns, the second by rows.
Its fused weight has two segments, gate and value, and each rank gets a part of either. SlicedHead writes the same out by hand.
Every rank draws the whole weights and keeps its part, so that losses are those of one process, as p3d check shows.
What no plan names, here the norm, is whole on every rank.

parallel3d --num_procs 4 examples/tensor_slicing.py                # 2 stages x 2 tensor-parallel ranks on the CPU
p3d check examples/tensor_slicing.py:subject --layouts pp2,tp2     # beside one process in plain PyTorch
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import parallel3d
from parallel3d.parity import Subject
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.specs import BuildContext
from parallel3d.tensor_parallel import Column, ColumnParallelLinear, RowParallelLinear, parallelize

HIDDEN, INNER, MICRO_BATCH = 32, 50, 4  # two ranks have 25 of the inner features each; three would have 17, 17 and 16
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
    "steps_per_print": None,
}


class GatedMLP(nn.Module):
    """x: [..., hidden] -> [..., hidden]. arXiv:2002.05202."""

    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate_value = nn.Linear(hidden, 2 * inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_value(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class SlicedMLP(GatedMLP):
    """GatedMLP with a part of the inner features on each rank. context: None in plain PyTorch."""

    def __init__(self, hidden: int, inner: int, context: BuildContext | None = None):
        super().__init__(hidden, inner)
        if context is not None:
            plan = {"gate_value": Column(segments=(inner, inner)), "down": "row"}
            parallelize(self, plan, context.groups.model)


class SlicedHead(nn.Module):
    """x: [..., hidden] -> [..., hidden], with tensor-parallel layers written out."""

    def __init__(self, hidden: int, inner: int, context: BuildContext | None = None):
        super().__init__()
        if context is None:
            self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        else:
            self.up = ColumnParallelLinear(hidden, inner, context=context)  # -> [..., this rank's part of inner]
            self.down = RowParallelLinear(inner, hidden, context=context)  # -> [..., hidden], summed over the ranks

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def layers() -> list[LayerSpec]:
    return [*(LayerSpec(SlicedMLP, HIDDEN, INNER) for _ in range(3)), LayerSpec(SlicedHead, HIDDEN, INNER)]


def micro_batch(index: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, [MICRO_BATCH, HIDDEN] each."""
    inputs = torch.randn(MICRO_BATCH, HIDDEN, generator=torch.Generator().manual_seed(index))
    return inputs, inputs.flip(1).sin()


def subject() -> Subject:
    """Return the model and its data for p3d check."""
    return Subject(layers(), micro_batch, F.mse_loss, CONFIG)


def train(stages: int, ranks: int, steps: int) -> list[float]:
    """Return the losses on `ranks` tensor-parallel ranks."""
    config = {**CONFIG, "tensor_parallel": {"size": ranks}, "pipeline": {"stages": stages}}
    model = PipelineModule(layers(), loss_fn=F.mse_loss, seed_layers=True, config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    if engine.global_rank == 0:
        print({name: tuple(weight.shape) for name, weight in model.named_parameters() if "0.gate" in name})
    data = map(micro_batch, range(steps * engine.gradient_accumulation_steps()))
    return [float(engine.train_batch(data)) for _ in range(steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    parallel3d.init_distributed()
    losses = train(args.stages, args.ranks, args.steps)
    if parallel3d.comm.get_rank() == 0:
        print(f"loss {losses[0]:.5f} in the first step, {losses[-1]:.5f} in step {len(losses)}")
    parallel3d.comm.destroy()


if __name__ == "__main__":
    main()
