"""Layouts of pipeline x data x tensor: a cover of all pairs of their values, the run, its reference and the comparison."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
import toy3d
from layouts import BASE_SEED, OPTIMIZERS, SHARDED, Run, copies, make_optimizer, own_iterator, run_reference, specs
from reference import Reference, distance
from torch import Tensor

import parallel3d
from parallel3d.parameters import Slicing, slicing_of
from parallel3d.pipe import LayerSpec, PipelineModule

STEPS, ACCUMULATION, CLIPPING = 2, 4, 0.3
# What a rank holds: of each parameter its slice and its values.
Held = dict[str, tuple[Slicing | None, Tensor]]


@dataclass(frozen=True)
class Layout:
    pp: int
    tp: int
    dp: int
    zero: str
    sequence_parallel: bool
    schedule: str
    tied: bool
    clipping: bool
    optimizer: str
    policy: str = "none"

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def is_valid(self) -> bool:
        return self.tp > 1 or not self.sequence_parallel

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in vars(self).items())


AXES: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2),
    "tp": (1, 2, 4),
    "dp": (1, 2),
    "zero": ("0", "1", "2", "2 per micro-batch", "3", "3 per micro-batch"),
    "sequence_parallel": (False, True),
    "schedule": ("1f1b", "interleaved", "zb-h1"),
    "tied": (False, True),
    "clipping": (False, True),
    "optimizer": ("SGD", "AdamW"),
    "policy": ("none", "cheap", "full"),
}
ALL = [layout for values in product(*AXES.values()) if (layout := Layout(*values)).is_valid]


@cache
def pairs(layout: Layout) -> frozenset[Any]:
    return frozenset(combinations(vars(layout).items(), 2))


def worth(layout: Layout, num_pairs: int) -> float:
    """How good a row of a cover it is that adds so many pairs, as in layouts.py."""
    shown = 0.55 if 1 in (layout.pp, layout.dp) else 1.0
    return shown * num_pairs / (layout.num_ranks + 2) ** 0.5


@cache
def cover(max_ranks: int = 16) -> list[Layout]:
    """Layouts of at most so many ranks that hold every pair of values that any holds: greedily the best of some."""
    fitting = [layout for layout in ALL if layout.num_ranks <= max_ranks]
    rng, chosen = random.Random(15), []  # of thirty seeds, that of the fewest ranks
    left: set[Any] = set().union(*map(pairs, fitting))
    while left:
        one = next(iter(sorted(left, key=repr)))
        holding = [layout for layout in fitting if one in pairs(layout)]
        some = rng.sample(holding, min(40, len(holding)))
        chosen.append(max(some, key=lambda layout: worth(layout, len(pairs(layout) & left))))
        left -= pairs(chosen[-1])
    return chosen


def held_by(module: PipelineModule) -> Held:
    """Return what this rank holds. Collective, as shards are gathered."""
    slicings = {info.name: slicing_of(info.parameter) for info in module.parameter_infos()}
    return {name: (slicings[name], values) for name, values in copies(module).items()}


def train(
    layout: Layout, per_token: bool = False, changes: Mapping[str, Any] | None = None
) -> tuple[list[float], list[float], Held]:
    config = {
        "train_micro_batch_size_per_gpu": toy3d.SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIPPING if layout.clipping else 0.0,
        "optimizer": {"type": layout.optimizer, "params": OPTIMIZERS[layout.optimizer]},
        "zero_optimization": {
            "stage": int(layout.zero[0]),
            "reduce_bucket_size": 1500,
            "reduce_per_micro_batch": layout.zero.endswith("per micro-batch"),
            **SHARDED,
            "stage3_max_live_parameters": 9000,  # the embedding and the head
        },
        "tensor_parallel": {"size": layout.tp, "sequence_parallel": layout.sequence_parallel},
        "pipeline": {
            "stages": layout.pp,
            "schedule": layout.schedule,
            "num_chunks": 2 if layout.schedule == "interleaved" else 1,
        },
        "activation_checkpointing": {"policy": layout.policy},
        "steps_per_print": None,
        **(changes or {}),
    }
    loss = LayerSpec(toy3d.SlicedLoss, per_token)
    module = PipelineModule(
        specs(toy3d.model(layout.tied)), loss_fn=loss, seed_layers=True, base_seed=BASE_SEED, config=config
    )
    engine, *_ = parallel3d.initialize(model=module, config=config)
    data = own_iterator(engine, [toy3d.micro_batch(g) for g in range(STEPS * ACCUMULATION * layout.dp)])
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(engine.train_batch(data).item())
        norms.append(engine.get_global_grad_norm().item())
    return losses, norms, held_by(module)


def train_alone(dp: int, tied: bool, clipping: bool, optimizer: str, device: str = "cpu") -> Run:
    """Return the result that `train` must have in any layout with these replicas, by plain PyTorch on one device."""
    batches = [tuple(tensor.to(device) for tensor in toy3d.micro_batch(g)) for g in range(STEPS * ACCUMULATION * dp)]
    with torch.device(device):
        reference = Reference(
            toy3d.model(tied), toy3d.plain_loss, make_optimizer(optimizer), CLIPPING if clipping else 0.0, BASE_SEED
        )
        losses, norms, weights = run_reference(reference, batches, ACCUMULATION * dp)
    assert not clipping or min(norms) > CLIPPING, "clipping must have an effect to be tested"
    return losses, norms, {name: weight.cpu() for name, weight in weights.items()}


wanted = cache(train_alone)


def joined(ranks: Iterable[Held], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole tensors, of the shapes of `weights`, from what all ranks hold; NaN where none holds an element."""
    whole: dict[str, Tensor] = {}
    for held in ranks:
        for name, (slicing, part) in held.items():
            if slicing is None:
                assert torch.equal(part, whole.setdefault(name, part)), f"the copies of {name} differ"
            else:
                gathered = whole.setdefault(name, torch.full(weights[name].shape, torch.nan))
                before = slicing.part_of(gathered)
                assert torch.equal(before, part) or bool(before.isnan().all()), f"the copies of {name} differ"
                slicing.write(gathered, part)
    assert whole.keys() == weights.keys()
    return whole


def check(ranks: list[Any], expected: Run) -> None:
    """Losses, norms and each gathered weight tensor to 1e-5; copies are equal bit for bit."""
    losses, norms, weights = expected
    assert all((own_losses, own_norms) == (ranks[0][0], ranks[0][1]) for own_losses, own_norms, _ in ranks)
    whole = joined((held for _, _, held in ranks), weights)
    assert ranks[0][0] == pytest.approx(losses, rel=1e-5)
    assert ranks[0][1] == pytest.approx(norms, rel=1e-5)
    for name, weight in weights.items():
        assert distance(whole[name], weight) <= 1e-5, f"{name} is off by {distance(whole[name], weight):.2e}"
