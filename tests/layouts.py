"""Layouts of a training run: all of them, a cover of all pairs of their values, and the run itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from typing import Any

import torch
import toy
from reference import Item, LossFn, Reference, distance
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from parallel3d.rng import stream_seed

# Losses and gradient norms of each step, and final weights by name.
Run = tuple[list[float], list[float], dict[str, Tensor]]

STEPS = 3  # the second has momenta, the third new lengths
BASE_SEED = 77
CLIPPING = 0.05
TORCH_SEED, CONFIG_SEED = 5, 1234
# Room for the two largest layers, so that stage 3 releases weights within a step.
SHARDED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 6000,
    "stage3_prefetch_bucket_size": 2000,
}


@dataclass(frozen=True)
class Layout:
    """One way to train the toy model. `AXES` lists the values of each field."""

    pp: int = 1
    dp: int = 1
    accumulation: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    placement: str = "loop"
    checkpointing: int | str = 0
    tied: bool = False
    data: str = "tensor"
    shapes: str = "static"
    clipping: bool = False
    optimizer: str = "SGD"
    zero: str = "0"
    dropout: float = 0.0

    @property
    def num_steps(self) -> int:
        """Number of steps to train: the second has caches, momenta and gathered weights; the third, new lengths."""
        return 3 if self.accumulation == 1 else 2

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the model, which has 4 layers more than twice as many: a layer for each chunk, or two."""
        return 2 if self.pp * self.chunks <= 6 else 5

    @property
    def is_valid(self) -> bool:
        """Whether this schedule runs so many chunks, so placed."""
        if self.schedule == "zbv":
            return (self.chunks, self.placement) == (2, "v")
        one = (1, ("loop",))
        looped = (3, ("loop",))
        limits = {"1f1b": one, "zb-h1": one, "interleaved": looped, "zb-looped": looped}
        most, placements = limits.get(self.schedule, (3, ("loop", "v")))
        v_fits = self.placement == "loop" or self.chunks == 2
        return self.chunks <= most and self.placement in placements and v_fits

    def __str__(self) -> str:
        words = [
            f"pp{self.pp}",
            f"dp{self.dp}",
            f"m{self.accumulation}",
            self.schedule,
            f"{self.chunks}{self.placement}",
        ]
        words += [f"ckpt{self.checkpointing}", "tied" if self.tied else "untied", self.data, self.shapes]
        return "-".join(
            [*words, "clip" if self.clipping else "noclip", self.optimizer, f"zero{self.zero}", f"drop{self.dropout}"]
        )


AXES: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 4),
    "dp": (1, 2, 3),
    "accumulation": (1, 4, 5),
    "schedule": ("1f1b", "gpipe", "interleaved", "written", "zb-h1", "zbv", "zb-looped", "split"),
    "chunks": (1, 2, 3),
    "placement": ("loop", "v"),
    "checkpointing": (0, 1, 2, "cheap", "attention"),
    "tied": (False, True),
    "data": ("tensor", "tuple", "lengths"),
    "shapes": ("static", "dynamic"),
    "clipping": (False, True),
    "optimizer": ("SGD", "AdamW"),
    "zero": ("0", "1", "2", "2 per micro-batch", "3", "3 per micro-batch"),
    "dropout": (0.0, 0.2),
}


def issue_layouts() -> list[Layout]:
    """The whole product of the axes that issues 2 and 3 name, with the combinations of the other axes taken in turn."""
    in_turn = ("shapes", "optimizer", "placement", "checkpointing", "dropout")
    others = list(product(*(AXES[axis] for axis in in_turn)))
    named = [axis for axis in AXES if axis not in in_turn]
    layouts = []
    for k, values in enumerate(product(*(AXES[axis] for axis in named))):
        fields = dict(zip(named, values, strict=True))
        turns = (dict(zip(in_turn, others[(k + j) * 7 % len(others)], strict=True)) for j in range(len(others)))
        layout = next((found for turn in turns if (found := Layout(**fields, **turn)).is_valid), None)
        if layout is not None:
            layouts.append(layout)
    return layouts


Value = tuple[str, Any]
Pair = tuple[Value, Value]
# The axes whose values don't all go together; the others are free.
BOUND = ("pp", "dp", "schedule", "chunks", "placement")


def pairs_of(layout: Layout) -> set[Pair]:
    return set(combinations([(f.name, getattr(layout, f.name)) for f in fields(layout)], 2))


def bound_values(max_ranks: int) -> list[dict[str, Any]]:
    """The combinations of the bound axes that make a valid layout of at most so many ranks."""
    cores = [dict(zip(BOUND, values, strict=True)) for values in product(*(AXES[axis] for axis in BOUND))]
    return [core for core in cores if Layout(**core).is_valid and core["pp"] * core["dp"] <= max_ranks]


def possible_pairs(max_ranks: int = 12) -> set[Pair]:
    """Every pair of values that some valid layout of at most so many ranks holds."""
    pairs = set()
    free = [(axis, value) for axis in AXES if axis not in BOUND for value in AXES[axis]]
    for core in bound_values(max_ranks):
        pairs |= set(product(core.items(), free)) | set(combinations(core.items(), 2))
    pairs |= {pair for pair in combinations(free, 2) if pair[0][0] != pair[1][0]}
    order = list(AXES)
    return {tuple(sorted(pair, key=lambda value: order.index(value[0]))) for pair in pairs}


def worth(layout: Layout, num_pairs: int) -> float:
    """How good a row of a cover it is that adds so many pairs: few ranks and micro-batches are soon run.

    A schedule on one stage and a ZeRO stage on one replica show little of what they do.
    """
    shown = 0.55 if 1 in (layout.pp, layout.dp) else 1.0
    micro_batches = layout.num_steps * layout.dp * layout.accumulation
    return shown * num_pairs / (layout.pp * layout.dp + 1 + micro_batches / 3) ** 0.8


@cache
def all_pairs(max_ranks: int = 12, candidates: int = 150) -> list[Layout]:
    """Valid layouts that hold every possible pair: greedily, the best of some random candidates in each round."""
    rng = random.Random(60)  # of a thousand seeds, that of the least processor time
    cores = bound_values(max_ranks)
    bits = {value: 1 << k for k, value in enumerate((axis, v) for axis in AXES for v in AXES[axis])}
    left = dict.fromkeys(bits, 0)  # of each value, those with which it makes a pair that no row holds yet
    for one, other in possible_pairs(max_ranks):
        left[one] |= bits[other]
        left[other] |= bits[one]
    cover = []
    while one := next((value for value in left if left[value]), None):
        # Held by every candidate, so that each round makes progress.
        missing = dict([one, next(value for value in bits if left[one] & bits[value])])
        fitting = [core for core in cores if all(core.get(axis, value) == value for axis, value in missing.items())]
        rows = []
        for _ in range(candidates):
            free = {axis: rng.choice(values) for axis, values in AXES.items() if axis not in BOUND}
            row = {**free, **missing, **rng.choice(fitting)}
            mask = sum(bits[value] for value in row.items())
            num_pairs = sum((left[value] & mask).bit_count() for value in row.items()) // 2
            rows.append((worth(Layout(**row), num_pairs), row, mask))
        _, row, mask = max(rows, key=lambda found: found[0])
        cover.append(Layout(**row))
        for value in row.items():
            left[value] &= ~mask
    return cover


def specs(items: Sequence[Item | LayerSpec]) -> list[Any]:
    """The layers of a PipelineModule."""
    layers: list[Any] = []
    for item in items:
        if isinstance(item, LayerSpec):
            layers.append(item)
        elif item.is_function:
            layers.append(item.make)
        elif item.make is toy.Norm:  # a module as it is, for once
            layers.append(item.build())
        elif item.tie is None:
            layers.append(LayerSpec(item.make, *item.args, **item.kwargs))
        else:
            ties = {"forward_fn": item.call, "tied_weight_attr": item.attributes}
            layers.append(TiedLayerSpec(item.tie, item.make, *item.args, **ties, **item.kwargs))
    return layers


def written_schedule(pp: int, num_micro_batches: int, chunks: int, placement: str) -> list[list[str]]:
    """A schedule that no builder makes: all forwards chunk by chunk, then all backwards, the first micro-batch first."""
    where = [*range(pp), *reversed(range(pp))] if placement == "v" else [c % pp for c in range(pp * chunks)]
    lists = []
    for rank in range(pp):
        own = [c for c, r in enumerate(where) if r == rank]
        forwards = [f"F{m}@{c}" for c in own for m in range(num_micro_batches)]
        lists.append(forwards + [f"B{m}@{c}" for c in reversed(own) for m in range(num_micro_batches)])
    return lists


def split_schedule(pp: int, num_micro_batches: int, chunks: int, placement: str) -> list[list[str]]:
    """Return written_schedule with every backward split, and the weight gradients at the end in another order."""
    lists = written_schedule(pp, num_micro_batches, chunks, placement)
    backwards = [[i for i in rank if i.startswith("B")] for rank in lists]
    return [
        [i.replace("B", "I") for i in rank] + [i.replace("B", "W") for i in reversed(own)]
        for rank, own in zip(lists, backwards, strict=True)
    ]


def own_iterator(engine: Engine, micro_batches: Sequence[Any]) -> Iterator[Any] | None:
    """This rank's share of the world's micro-batches: the g-th goes to replica g mod dp; None where none is needed."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    return iter(micro_batches[engine.grid.get_data_parallel_rank() :: engine.grid.get_data_parallel_world_size()])


def copies(module: PipelineModule) -> dict[str, Tensor]:
    """This rank's trained parameters by their names in the whole model. Collective, as shards are gathered."""
    with parallel3d.zero.GatheredParameters(module.parameters()):
        return {info.name: info.parameter.detach().cpu().clone() for info in module.parameter_infos()}


OPTIMIZERS = {"SGD": {"lr": 0.1, "momentum": 0.5}, "AdamW": {"lr": 2e-4, "eps": 1e-6, "weight_decay": 0.1}}


def make_optimizer(name: str, **changes: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """The reference's optimizer."""
    return lambda parameters: getattr(torch.optim, name)(parameters, **{**OPTIMIZERS[name], **changes})


def make_engine(
    items: Sequence[Item | LayerSpec],
    loss_fn: LossFn | None = toy.cross_entropy,
    *,
    optimizer: str = "SGD",
    optimizer_changes: Mapping[str, Any] | None = None,
    accumulation: int = 1,
    clipping: float = 0.0,
    pipeline: Mapping[str, Any] | None = None,
    **config: Any,
) -> Engine:
    """An engine for these layers. pipeline: that section of the configuration; config: its other keys."""
    whole = {
        "train_micro_batch_size_per_gpu": toy.SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "optimizer": {"type": optimizer, "params": {**OPTIMIZERS[optimizer], **(optimizer_changes or {})}},
        "zero_optimization": {"reduce_bucket_size": 1500},  # several buckets to a chunk
        "steps_per_print": None,
        "pipeline": {"stages": 1, **(pipeline or {})},
        **config,
    }
    module = PipelineModule(specs(items), loss_fn=loss_fn, seed_layers=True, base_seed=BASE_SEED, config=whole)
    engine, *_ = parallel3d.initialize(model=module, config=whole)
    return engine


def run_steps(engine: Engine, iterator: Iterator[Any] | None, steps: int) -> Run:
    losses, norms = [], []
    for _ in range(steps):
        losses.append(engine.train_batch(iterator).item())
        norms.append(engine.get_global_grad_norm().item())
    return losses, norms, copies(engine.module)


def train(layout: Layout, **config: Any) -> Run:
    """On one rank: the losses, gradient norms and final weights of the layout's steps. config: other keys."""
    schedule: Any = layout.schedule
    if schedule in ("written", "split"):
        write = written_schedule if schedule == "written" else split_schedule
        schedule = write(layout.pp, layout.accumulation, layout.chunks, layout.placement)
    recomputed = layout.checkpointing if isinstance(layout.checkpointing, str) else None
    torch.manual_seed(TORCH_SEED)
    engine = make_engine(
        toy.model(layout.tied, layout.num_blocks, layout.dropout),
        optimizer=layout.optimizer,
        accumulation=layout.accumulation,
        clipping=CLIPPING if layout.clipping else 0.0,
        pipeline={
            "stages": layout.pp,
            "schedule": schedule,
            "num_chunks": layout.chunks,
            "placement": layout.placement,
            "activation_checkpoint_interval": None if recomputed else layout.checkpointing,
            "shapes": layout.shapes,
        },
        zero_optimization={
            "stage": int(layout.zero[0]),
            "reduce_bucket_size": 1500,  # several buckets to a chunk
            "reduce_per_micro_batch": layout.zero.endswith("per micro-batch"),
            **SHARDED,
        },
        activation_checkpointing={"policy": recomputed},
        **config,
    )
    total = layout.num_steps * layout.accumulation * layout.dp
    data = own_iterator(engine, [toy.micro_batch(g, layout.data) for g in range(total)])
    return run_steps(engine, data, layout.num_steps)


def enter_layer(step: int, micro_batch: int, layer: int) -> None:
    """Seeds what the reference draws."""
    seed = stream_seed(CONFIG_SEED, TORCH_SEED, step, micro_batch, layer)
    # torch.manual_seed formats the stack where there is no CUDA, a millisecond under pytest.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def run_reference(reference: Reference, micro_batches: Sequence[Any], per_step: int) -> Run:
    steps = [reference.step(micro_batches[k : k + per_step]) for k in range(0, len(micro_batches), per_step)]
    return [loss for loss, _ in steps], [norm for _, norm in steps], reference.weights()


@cache
def reference_run(
    steps: int,
    per_step: int,
    tied: bool,
    data: str,
    clipping: bool,
    optimizer: str,
    dropout: float,
    num_blocks: int = 3,
) -> Run:
    """Return the result that `train` must have in any layout with `steps` steps of `per_step` micro-batches."""
    clip = CLIPPING if clipping else 0.0
    model = toy.model(tied, num_blocks, dropout)
    reference = Reference(model, toy.cross_entropy, make_optimizer(optimizer), clip, BASE_SEED, enter=enter_layer)
    return run_reference(reference, [toy.micro_batch(g, data) for g in range(steps * per_step)], per_step)


def check_layout(layout: Layout, ranks: Sequence[Run]) -> None:
    """`check` of what `train` returned on all ranks."""
    steps, per_step = layout.num_steps, layout.dp * layout.accumulation
    model = (layout.tied, layout.data, layout.clipping, layout.optimizer, layout.dropout, layout.num_blocks)
    wanted = reference_run(steps, per_step, *model)
    assert not layout.clipping or min(wanted[1]) > CLIPPING, "clipping must have an effect to be tested"
    check(ranks, wanted, layout.dp)


def check(ranks: Sequence[Run], wanted: Run, dp: int, tolerance: float = 1e-5) -> None:
    """Losses, norms and each weight tensor relative to `tolerance`, on every rank; each parameter on dp ranks or more."""
    losses, norms, weights = wanted
    for rank, (own_losses, own_norms, own_weights) in enumerate(ranks):
        assert own_weights.keys() <= weights.keys()
        assert (own_losses, own_norms) == tuple(ranks[0][:2]), f"rank {rank} reports other numbers than rank 0"
    for what, got, right in (("losses", ranks[0][0], losses), ("norms", ranks[0][1], norms)):
        assert len(got) == len(right)
        close = all(abs(g - r) <= tolerance * abs(r) for g, r in zip(got, right, strict=True))
        assert close, f"{what} are {got}, not {right}"
    for name, right in weights.items():
        found = [own[name] for _, _, own in ranks if name in own]
        assert len(found) >= dp, f"{name} is on {len(found)} ranks"
        assert all(torch.equal(copy, found[0]) for copy in found), f"the copies of {name} differ"
        assert distance(found[0], right) <= tolerance, f"{name} is off by {distance(found[0], right):.2e}"
