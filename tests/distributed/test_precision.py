"""fp16, bf16 and autocast in every ZeRO stage and schedule train as one process does in the same precision."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toy
from half_reference import HalfReference, distance_of_models
from layouts import BASE_SEED, SHARDED, copies, make_engine, own_iterator
from ranks import RankError
from reference import Item, build
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine

STEPS, ACCUMULATION, DP, CLIPPING = 12, 2, 2, 1.0
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SCALING = {"enabled": True, "initial_scale_power": 12}
ZERO: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "reduce_per_micro_batch": False},
    {"stage": 2, "reduce_per_micro_batch": True},
]
SHARDED_WEIGHTS = {"stage": 3, **SHARDED, "stage3_max_live_parameters": 2600}
ADAM = {"lr": 5e-3, "eps": 1e-6, "weight_decay": 0.1}
UNSPLIT = ("plain", "calls")
ITEMS = toy.model(tied=False, num_blocks=1)


def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), labels.flatten())


def micro_batches(steps: int) -> list[Any]:
    return [toy.micro_batch(g % 24) for g in range(steps * ACCUMULATION * DP)]


def world_of(kind: str) -> int:
    return DP if kind in UNSPLIT else 2 * DP


def in_single(value: float) -> float:
    """Rounded to single precision."""
    return torch.tensor(value, dtype=torch.float64).float().item()


class Whole(nn.Module):
    """The same layers as one plain module that returns its loss."""

    def __init__(self, items: Sequence[Item]) -> None:
        super().__init__()
        self.items = items
        self.layers = nn.ModuleList([m if m is not None else nn.Identity() for m in build(items, BASE_SEED)])

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        for item, layer in zip(self.items, self.layers, strict=True):
            inputs = item.make(inputs) if item.is_function else layer(inputs)
        return loss_fn(inputs, labels)


def engine_of(kind: str, zero: dict[str, Any], items: Sequence[Item] = ITEMS, **config: Any) -> Engine:
    """kind: a schedule of two stages; or a plain module, by train_batch ("plain") or by the user's own calls ("calls")."""
    config["zero_optimization"] = {"reduce_bucket_size": 500, **zero}
    params = {**ADAM, **config.pop("adam", {})}
    if kind not in UNSPLIT:
        return make_engine(
            items,
            loss_fn,
            optimizer="AdamW",
            optimizer_changes=params,
            accumulation=ACCUMULATION,
            clipping=CLIPPING,
            pipeline={"stages": 2, "schedule": kind},
            **config,
        )
    whole = {
        "train_micro_batch_size_per_gpu": toy.SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "AdamW", "params": params},
        "steps_per_print": None,
        **config,
    }
    return parallel3d.initialize(model=Whole(items), config=whole)[0]


def step(engine: Engine, kind: str, data: Iterator[Any] | None) -> float:
    """One step; its mean loss, over this rank's micro-batches alone where the user calls."""
    if kind != "calls":
        return engine.train_batch(data).item()
    losses = []
    for _ in range(ACCUMULATION):
        loss = engine(*next(data))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return sum(losses) / ACCUMULATION


def weights_of(engine: Engine) -> dict[str, Tensor]:
    return copies(engine.pipeline_module)


def train(kind: str, zero: dict[str, Any], config: dict[str, Any], steps: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(kind, zero, **config)
    data = own_iterator(engine, micro_batches(steps))
    return [step(engine, kind, data) for _ in range(steps)], weights_of(engine)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of threads of torch's operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
@threads(2)
def reference(dtype: torch.dtype | None, autocast: torch.dtype | None = None, steps: int = STEPS) -> Any:
    return train_alone(dtype, autocast, steps)


def train_alone(
    dtype: torch.dtype | None,
    autocast: torch.dtype | None = None,
    steps: int = STEPS,
    moved: float = 0.0,
    seed: int = 0,
) -> Any:
    """moved: the largest relative change of the initial weights, drawn at random by `seed`."""
    alone = HalfReference(ITEMS, loss_fn, lambda p: torch.optim.AdamW(p, **ADAM), dtype, CLIPPING, BASE_SEED, autocast)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for master, weight in zip(alone.masters, alone.weights, strict=True):
            master *= 1 + moved * (2 * torch.rand(master.shape, generator=generator) - 1)
            weight.copy_(master)
    per_step = ACCUMULATION * DP
    batches = micro_batches(steps)
    losses = [alone.step(batches[k : k + per_step], 2.0**12) for k in range(0, len(batches), per_step)]
    return losses, dict(zip(alone.names, (w.detach().clone() for w in alone.weights), strict=True))


@cache
@threads(1)
def distance_alone(dtype: torch.dtype) -> float:
    """How far one process in half precision ends from fp32 at most, of some runs that round differently.

    Rounding errors grow from step to step, so the distance of one run is a matter of chance, and of the processor: in fp16
    from 0.005 to 0.010. The runs begin with weights that are moved by less than they are rounded.
    """
    _, exact = reference(None)
    eps = torch.finfo(dtype).eps / 4
    return max(distance_of_models(train_alone(dtype, moved=eps, seed=seed)[1], exact) for seed in range(24))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every fourth case of both dtypes, where --full asks for all; test_zero.py has bf16 in every schedule and stage."""
    if metafunc.function is test_half_precision_is_as_near_to_fp32_as_one_process:
        kinds = [*product(["1f1b", "zb-h1", *UNSPLIT], ZERO), ("1f1b", SHARDED_WEIGHTS), ("zb-h1", SHARDED_WEIGHTS)]
        cases = [
            (name, *case)
            for k, case in enumerate(kinds)
            for n, name in enumerate(DTYPES)
            if metafunc.config.getoption("full") or (k + k // len(ZERO) + 2 * n) % 4 == 0
        ]
        metafunc.parametrize(("name", "kind", "zero"), cases, ids=str)


def test_half_precision_is_as_near_to_fp32_as_one_process(run_ranks, name: str, kind: str, zero: dict[str, Any]):
    config = {"fp16": SCALING} if name == "fp16" else {"bf16": {"enabled": True}}
    ranks = run_ranks(world_of(kind), train, kind, zero, config, STEPS)
    losses, _ = reference(DTYPES[name])
    _, exact = reference(None)
    # The mean over micro-batches and replicas, in double precision, of losses that are equal to the bit.
    first = sum(own_losses[0] for own_losses, _ in ranks) / len(ranks)
    assert in_single(first) == in_single(losses[0])
    got: dict[str, Tensor] = {}
    for own_losses, own_weights in ranks:
        assert kind == "calls" or own_losses == ranks[0][0]
        for key, weight in own_weights.items():
            assert weight.dtype == DTYPES[name]
            assert torch.equal(weight, got.setdefault(key, weight))
    assert 0 < distance_of_models(got, exact) <= 1.1 * distance_alone(DTYPES[name])


# --- autocast


AUTOCASTS = {
    "bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    "amp O1": {"amp": {"enabled": True, "opt_level": "O1"}},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "zero"), [*product(["1f1b", "zb-h1", "plain"], [ZERO[1]]), ("1f1b", SHARDED_WEIGHTS)], ids=str
)
@pytest.mark.parametrize("name", AUTOCASTS)
def test_autocast_is_torchs(run_ranks, name: str, kind: str, zero: dict[str, Any]):
    ranks = run_ranks(world_of(kind), train, kind, zero, AUTOCASTS[name], 5)
    dtype = torch.bfloat16 if name == "bf16" else torch.float16
    losses, weights = reference(None, dtype, 5)
    for own_losses, own_weights in ranks:
        assert own_losses[0] == in_single(losses[0])
        assert own_losses == pytest.approx(losses, rel=2e-3)
        for key, weight in own_weights.items():
            assert weight.dtype == torch.float32
            assert float((weight - weights[key]).norm() / weights[key].norm()) < 2e-3, key


def amp(level: str) -> tuple[set[torch.dtype], float, bool, float]:
    engine = engine_of("plain", ZERO[0], amp={"enabled": True, "opt_level": level})
    loss = engine.train_batch(iter(micro_batches(1))).item()
    dtypes = {p.dtype for p in engine.parameters()}
    return dtypes, engine.loss_scale(), engine.dynamic_loss_scale(), loss


@pytest.mark.parametrize(
    ("level", "dtype", "scale", "dynamic"),
    [
        ("O0", torch.float32, 1.0, False),
        ("O1", torch.float32, 2.0**16, True),
        ("O2", torch.float16, 2.0**16, True),
        ("O3", torch.float16, 1.0, False),
    ],
)
def test_amp_levels(run_ranks, level: str, dtype: torch.dtype, scale: float, dynamic: bool):
    ((dtypes, found_scale, found_dynamic, loss),) = run_ranks(1, amp, level)
    assert (dtypes, found_dynamic) == ({dtype}, dynamic)
    assert found_scale in (scale, scale / 2)  # the first step may overflow
    with torch.no_grad():
        alone = HalfReference(ITEMS, loss_fn, torch.optim.SGD, None, 0.0, BASE_SEED)
        exact = sum(alone.loss(*m).item() for m in micro_batches(1)[:ACCUMULATION]) / ACCUMULATION
    assert loss == pytest.approx(exact, rel=1e-6 if level == "O0" else 5e-3)


# --- overflow


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Planted(nn.Linear):
    """A linear layer whose output's gradient can be made to overflow."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + _Explode.apply(super().forward(x), self.factor)


PLANTED = [*ITEMS[:3], Item(Planted, (toy.HIDDEN, toy.HIDDEN)), *ITEMS[3:]]
OVERFLOWS = {1, 2, 4}  # steps, counted from 0
TOTAL = 6


def train_planted(kind: str, zero: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(kind, zero, PLANTED, **config)
    data = own_iterator(engine, micro_batches(TOTAL))
    last_replica = engine.grid.get_data_parallel_rank() == engine.dp_world_size - 1
    planted = [m for m in engine.pipeline_module.modules() if isinstance(m, Planted)]
    scales, rates, kept, applied = [], [], [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(TOTAL):
            for module in planted:
                module.factor = float("inf") if number in OVERFLOWS and last_replica else 1.0
            before = weights_of(engine)
            step(engine, kind, data)
            after = weights_of(engine)
            kept.append(all(torch.equal(before[name], after[name]) for name in before))
            applied.append(engine.was_step_applied())
            scales.append(engine.loss_scale())
            rates.append(engine.get_lr()[0])
    messages = [str(w.message) for w in caught if "skipped" in str(w.message)]
    return {
        "scales": scales,
        "kept": kept,
        "applied": applied,
        "rates": rates,
        "messages": messages,
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "weights": weights_of(engine),
    }


KINDS = [
    ("1f1b", {}),
    ("zb-h1", {}),
    ("plain", {}),
    ("calls", {}),
    ("plain", {"adam": {"fused": True}}),
    ("1f1b", {"adam": {"fused": True}}),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("zero", [ZERO[0], ZERO[1], ZERO[3], SHARDED_WEIGHTS], ids=str)
@pytest.mark.parametrize(("kind", "extra"), KINDS, ids=str)
def test_a_planted_overflow_skips_the_step_on_every_rank(
    run_ranks, kind: str, extra: dict[str, Any], zero: dict[str, Any]
):
    """Two lives: the overflow at step 1 takes one, at step 2 the scale halves, and again at step 4."""
    fp16 = {**SCALING, "hysteresis": 2}
    schedule = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.9}}
    config = {"fp16": fp16, "scheduler": schedule, **extra}
    ranks = run_ranks(world_of(kind), train_planted, kind, zero, config)
    alone = HalfReference(PLANTED, loss_fn, lambda p: torch.optim.AdamW(p, **ADAM), torch.float16, CLIPPING, BASE_SEED)
    scales, rates, scale = [], [], 2.0**12
    batches = micro_batches(TOTAL)
    for step in range(TOTAL):
        share = batches[step * ACCUMULATION * DP : (step + 1) * ACCUMULATION * DP]
        alone.step(share, scale, update=step not in OVERFLOWS)
        if step in OVERFLOWS:
            scale /= 2 if step != 1 else 1
        else:
            alone.optimizer.param_groups[0]["lr"] *= 0.9
        scales.append(scale)
        rates.append(alone.optimizer.param_groups[0]["lr"])
    names = dict(zip(alone.names, (w.detach() for w in alone.weights), strict=True))
    for rank, found in enumerate(ranks):
        assert found["scales"] == scales
        assert found["rates"] == pytest.approx(rates)
        assert found["kept"] == [step in OVERFLOWS for step in range(TOTAL)]
        assert found["applied"] == [step not in OVERFLOWS for step in range(TOTAL)]
        assert (found["skipped"], found["steps"]) == (len(OVERFLOWS), TOTAL)
        for name, weight in found["weights"].items():
            assert float((weight.float() - names[name].float()).norm() / names[name].float().norm()) < 2e-3, name
        assert len(found["messages"]) == (len(OVERFLOWS) if rank == 0 else 0)
    stage = 0 if kind in UNSPLIT else next(s for s, r in enumerate(ranks[::DP]) if "layers.3.weight" in r["weights"])
    assert ranks[0]["messages"][1].startswith("step 3 skipped: gradients overflow, first in layers.3.")
    assert f"(stage {stage}, rank" in ranks[0]["messages"][1]
    assert "loss scale 4096 -> 2048" in ranks[0]["messages"][1]


def overflow_forever() -> None:
    engine = engine_of("plain", ZERO[1], PLANTED, fp16={"enabled": True, "initial_scale_power": 2, "hysteresis": 1})
    next(m for m in engine.modules() if isinstance(m, Planted)).factor = float("nan")
    data = iter(micro_batches(10))
    for _ in range(4):
        engine.train_batch(data)


def test_staying_at_the_lowest_scale_is_an_error(run_ranks):
    with pytest.raises(RankError, match=r"overflow at the lowest loss scale, fp16.min_loss_scale = 1") as raised:
        run_ranks(2, overflow_forever)
    assert set(raised.value.tracebacks) == {0, 1}


def overflow_in_bf16(checks: bool) -> tuple[int, bool]:
    engine = engine_of("plain", ZERO[1], PLANTED, bf16={"enabled": True, "check_grad_overflow": checks})
    next(m for m in engine.modules() if isinstance(m, Planted)).factor = float("inf")
    engine.train_batch(iter(micro_batches(1)))
    return engine.skipped_steps, all(bool(p.isfinite().all()) for p in engine.parameters())


@pytest.mark.parametrize("checks", [True, False])
def test_bf16_skips_an_overflow_where_asked_to(run_ranks, checks: bool):
    assert run_ranks(2, overflow_in_bf16, checks) == [(int(checks), checks)] * 2


# --- gradients and buffers that half precision would spoil


class Faint(nn.Module):
    """Its weights' gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def train_faint(dtype: str, zero: dict[str, Any]) -> tuple[list[float], Any]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "loss_scale": 2.0**12},
        "data_types": {"grad_accum_dtype": dtype},
        "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": 2.0**26}},
        "steps_per_print": None,
    }
    engine = parallel3d.initialize(model=Faint(), config=config)[0]
    engine.backward(engine(torch.full((4,), 2.0**-14) * torch.tensor([1.0, 0.5, 0.25, 0.125])) * 2.0**-12)
    engine.step()
    return engine.module.weight.tolist(), engine.module.turns


@pytest.mark.parametrize("zero", ZERO[:2], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_gradients_below_fp16_survive_unscaling(run_ranks, dtype: str, zero: dict[str, Any]):
    for weights, _ in run_ranks(2, train_faint, dtype, zero):
        assert weights == [-1.0, -0.5, -0.25, -0.125]


def test_complex_buffers_stay_as_they_were_built(run_ranks):
    ((_, turns),) = run_ranks(1, train_faint, "fp32", ZERO[0])
    assert torch.equal(turns, Faint().turns)


class Far(nn.Module):
    """Knows its positions to the digit, if it gets them so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, positions: Tensor) -> Tensor:
        return self.weight.float() * (positions.float() - 4096).sum()


def look_far(precision: dict[str, Any]) -> tuple[float, float]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        **precision,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "steps_per_print": None,
    }
    engine = parallel3d.initialize(model=Far(), config=config)[0]
    positions = torch.tensor([4097.0])  # 4096 in fp16 and bf16
    return engine(positions).item(), engine.train_batch(iter([(positions,)])).item()


@pytest.mark.parametrize(
    ("cast", "seen"), [({}, 0.0), ({"auto_cast": True}, 0.0), ({"auto_cast": False}, 1.0)], ids=str
)
@pytest.mark.parametrize(
    "section", [{"fp16": {"enabled": True, "loss_scale": 1}}, {"bf16": {"enabled": True}}], ids=list
)
def test_inputs_are_cast_unless_auto_cast_is_false(run_ranks, section: Any, cast: dict[str, Any], seen: float):
    [(name, settings)] = section.items()
    assert run_ranks(1, look_far, {name: {**settings, **cast}}) == [(seen, seen)]
