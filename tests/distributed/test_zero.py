"""ZeRO stages beyond the parity of layouts: precision, odd parameters, memory, and what users hold in hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import activations
import pytest
import torch
import toy
from layouts import BASE_SEED, Run, check, copies, make_engine, make_optimizer, own_iterator, run_reference, run_steps
from ranks import RankError
from reference import Item, Reference, distance
from torch import Tensor, nn
from toy import HIDDEN

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.schedule.instructions import Instruction
from parallel3d.zero.memory import predict_state

ACCUMULATION, STEPS = 2, 3
PER_MICRO_BATCH = {"stage": 2, "reduce_per_micro_batch": True}
STAGES = [{"stage": 0}, {"stage": 1}, {"stage": 2, "reduce_per_micro_batch": False}, PER_MICRO_BATCH]
SMALL = {"reduce_bucket_size": 700}
# Few weights are live at once, by what each model needs: layers are gathered and released within a step.
SHARDED = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 300}
WITH_SHARDED = [*STAGES, SHARDED]
PIPELINES: list[dict[str, Any]] = [
    {"stages": 1},
    {"stages": 2, "schedule": "1f1b"},
    {"stages": 2, "schedule": "zb-h1"},
    {"stages": 2, "schedule": "zbv", "num_chunks": 2, "placement": "v"},
]
# With the fp32 cover of test_parity.py: all pairs of ZeRO, schedule and precision.
EVERY_SCHEDULE = [
    *PIPELINES,
    {"stages": 2, "schedule": "gpipe", "num_chunks": 2, "placement": "v"},
    {"stages": 2, "schedule": "interleaved", "num_chunks": 3},
    {"stages": 2, "schedule": "zb-looped", "num_chunks": 3},
]


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output.float() - labels).square().mean()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(2, HIDDEN, generator=generator), torch.randn(2, HIDDEN, generator=generator)) for _ in range(count)
    ]


# --- bf16 weights with fp32 masters

LINEARS = [Item(nn.Linear, (HIDDEN, HIDDEN)) for _ in range(6)]


def train_bf16(pipeline: dict[str, Any], zero: dict[str, Any], extra: dict[str, Any]) -> tuple[Run, set[torch.dtype]]:
    engine = make_engine(
        LINEARS,
        squares,
        optimizer="AdamW",
        accumulation=ACCUMULATION,
        clipping=0.05,
        pipeline=pipeline,
        zero_optimization={**SMALL, "stage3_max_live_parameters": 700, **zero},
        bf16={"enabled": True},
        **extra,
    )
    run = run_steps(engine, own_iterator(engine, batches(STEPS * ACCUMULATION * 2)), STEPS)
    return run, {p.dtype for p in engine.module.parameters()}


class MasterReference:
    """One process: bf16 forward and backward, fp32 sums of the bf16 gradients, AdamW on fp32 masters."""

    def __init__(self) -> None:
        make = make_optimizer("AdamW")
        self.master = Reference(LINEARS, squares, make, base_seed=BASE_SEED)

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        masters = self.master.trained
        half = copy.deepcopy(nn.Sequential(*self.master.modules)).bfloat16()
        for master in masters:
            master.grad = torch.zeros_like(master)
        total = 0.0
        for inputs, labels in micro_batches:
            half.zero_grad()
            loss = squares(half(inputs.bfloat16()), labels)
            (loss / len(micro_batches)).backward()
            total += loss.item() / len(micro_batches)
            for master, weight in zip(masters, half.parameters(), strict=True):
                master.grad += weight.grad.float()
        norm = float(nn.utils.clip_grad_norm_(masters, 0.05))
        self.master.optimizer.step()
        return total, norm

    def weights(self) -> dict[str, Tensor]:
        return {name: weight.bfloat16() for name, weight in self.master.weights().items()}


_RUNS: dict[str, Any] = {}


def run_once(run_ranks: Any, *arguments: Any) -> Any:
    """Run what several tests compare with; the same arguments give the same result."""
    key = repr(arguments)
    if key not in _RUNS:
        _RUNS[key] = run_ranks(*arguments)
    return _RUNS[key]


@cache
def master_run() -> Run:
    return run_reference(MasterReference(), batches(STEPS * ACCUMULATION * 2), 2 * ACCUMULATION)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("zero", WITH_SHARDED, ids=str)
@pytest.mark.parametrize("pipeline", EVERY_SCHEDULE, ids=lambda p: p.get("schedule", "no pipeline"))
def test_bf16_follows_one_process_with_fp32_masters(run_ranks, pipeline: dict[str, Any], zero: dict[str, Any]):
    ranks = run_ranks(2 * pipeline["stages"], train_bf16, pipeline, zero, {})
    assert all(dtypes == {torch.bfloat16} for _, dtypes in ranks)
    # A weight gradient may be rounded to bf16 before it is added, or not, by where it is computed.
    check([run for run, _ in ranks], master_run(), 2, tolerance=2e-3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("zero", WITH_SHARDED, ids=str)
def test_narrower_reductions_are_used_and_stay_near(run_ranks, zero: dict[str, Any], dtype: str):
    ranks = run_ranks(2, train_bf16, {"stages": 1}, zero, {"communication_data_type": dtype})
    check([run for run, _ in ranks], master_run(), 2, tolerance=2e-2)
    norms = run_once(run_ranks, 2, train_bf16, {"stages": 1}, zero, {})[0][0][1]
    assert ranks[0][0][1] != norms, "the dtype had no effect"


class Times(nn.Linear):
    """Linear layer of one element whose weight is 1."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)


# Sums of 2048, 4, 1 and 0: bf16 has 8 bits and fp16 11; 2053 needs 12.
SUMS = {"fp32": 2053.0, "fp16": 2052.0, "bf16": 2048.0}


def sums_of_gradients(zero: dict[str, Any], dtype: str) -> tuple[set[float], float]:
    """Return this rank's gradients and the norm of all, times the number of micro-batches."""
    engine = make_engine(
        [Item(Times), Item(Times)],
        lambda output, _: output.sum(),
        accumulation=4,
        pipeline={"stages": 2},
        train_micro_batch_size_per_gpu=1,
        zero_optimization=zero,
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": dtype},
    )
    sums: set[float] = set()
    gradient = parallel3d.utils.safe_get_full_grad
    engine.update.call_before_step(lambda: sums.update(4 * gradient(p).item() for p in engine.module.parameters()))
    engine.train_batch(iter([(torch.full((1, 1), x), torch.zeros(1)) for x in (2048.0, 4.0, 1.0, 0.0)]))
    return sums, 4 * engine.get_global_grad_norm().item()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("zero", WITH_SHARDED, ids=str)
@pytest.mark.parametrize("dtype", SUMS)
def test_every_stage_sums_gradients_in_the_dtype_asked_for(run_ranks, zero: dict[str, Any], dtype: str):
    for found in run_ranks(4, sums_of_gradients, zero, dtype):
        assert found == ({SUMS[dtype]}, pytest.approx(2**0.5 * SUMS[dtype]))


# --- stages against each other, and against whole tensors


def train_fp32(zero: dict[str, Any], pipeline: dict[str, Any]) -> dict[str, Tensor]:
    engine = make_engine(
        toy.model(tied=True), accumulation=ACCUMULATION, pipeline=pipeline, zero_optimization={**SMALL, **zero}
    )
    data = own_iterator(engine, [toy.micro_batch(g) for g in range(STEPS * ACCUMULATION * 2)])
    return run_steps(engine, data, STEPS)[2]


@pytest.mark.parametrize("zero", STAGES[1:], ids=str)
def test_stages_1_and_2_equal_stage_0_to_1e_6_with_sgd(run_ranks, zero: dict[str, Any]):
    pipeline = {"stages": 2}
    whole = run_once(run_ranks, 4, train_fp32, {"stage": 0}, pipeline)
    for got, wanted in zip(run_ranks(4, train_fp32, zero, pipeline), whole, strict=True):
        assert all(distance(got[name], wanted[name]) <= 1e-6 for name in wanted)


# --- frozen and odd parameters


class Odd(nn.Module):
    """A linear layer with all that is odd: frozen, unused, sometimes used, empty and shared parameters."""

    def __init__(self, hidden: int, layer: int):
        super().__init__()
        self.base = nn.Linear(hidden, hidden).requires_grad_(False)
        self.down, self.up = nn.Linear(hidden, 2, bias=False), nn.Linear(2, hidden, bias=False)
        self.same = self.up
        self.unused = nn.Parameter(torch.ones(3, 5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.sometimes = nn.Linear(hidden, hidden)
        self.never_here = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x) + self.same(self.down(x)) + self.empty.sum()
        return torch.tanh(y + self.sometimes(x)) if x.sum() > 1.0 else torch.tanh(y)


ODD = [Item(Odd, (HIDDEN, k)) for k in range(4)]


def train_odd(pipeline: dict[str, Any], zero: dict[str, Any], steps: int) -> Run:
    engine = make_engine(
        ODD,
        squares,
        optimizer="AdamW",
        accumulation=ACCUMULATION,
        clipping=0.05,
        pipeline=pipeline,
        zero_optimization={**SMALL, "stage3_max_live_parameters": 1500, **zero},
    )
    return run_steps(engine, own_iterator(engine, batches(steps * ACCUMULATION * 2)), steps)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("zero", WITH_SHARDED, ids=str)
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda p: p.get("schedule", "no pipeline"))
def test_odd_parameters_train_as_on_one_process(run_ranks, pipeline: dict[str, Any], zero: dict[str, Any]):
    """AdamW decays what it updates: an unused parameter must be left alone, as torch leaves it."""
    ranks = run_ranks(2 * pipeline["stages"], train_odd, pipeline, zero, STEPS)
    reference = Reference(ODD, squares, make_optimizer("AdamW"), 0.05, BASE_SEED)
    losses, norms, weights = run_reference(reference, batches(STEPS * ACCUMULATION * 2), 2 * ACCUMULATION)
    used = [float(reference.parameters[f"layers.{k}.sometimes.weight"].grad is not None) for k in range(4)]
    assert sum(used) > 0, "the case must be there to be tested"
    trained = {name: w for name, w in weights.items() if reference.parameters[name].requires_grad}
    check(ranks, (losses, norms, trained), 2)
    assert torch.equal(trained["layers.0.unused"], torch.ones(3, 5))


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


def frozen_linear(hidden: int) -> nn.Module:
    return nn.Linear(hidden, hidden).requires_grad_(False)


class Frozen(nn.Linear):
    def __init__(self, hidden: int):
        super().__init__(hidden, hidden)
        self.requires_grad_(False)


STAGE_OF_ITS_OWN = {
    "frozen first": [Item(Frozen, (HIDDEN,)), Item(nn.Linear, (HIDDEN, HIDDEN))],
    "no parameters last": [Item(nn.Linear, (HIDDEN, HIDDEN)), Item(Plain)],
}


def train_two(kind: str, zero: dict[str, Any], schedule: str) -> Run:
    engine = make_engine(
        STAGE_OF_ITS_OWN[kind],
        squares,
        accumulation=ACCUMULATION,
        clipping=0.05,
        pipeline={"stages": 2, "schedule": schedule, "partition": [0, 1, 2]},
        zero_optimization={**SMALL, **zero},
    )
    return run_steps(engine, own_iterator(engine, batches(STEPS * ACCUMULATION * 2)), STEPS)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("zero", WITH_SHARDED, ids=str)
@pytest.mark.parametrize("kind", STAGE_OF_ITS_OWN)
def test_a_stage_with_nothing_to_train(run_ranks, kind: str, zero: dict[str, Any], schedule: str):
    ranks = run_ranks(4, train_two, kind, zero, schedule)
    reference = Reference(STAGE_OF_ITS_OWN[kind], squares, make_optimizer("SGD"), 0.05, BASE_SEED)
    losses, norms, weights = run_reference(reference, batches(STEPS * ACCUMULATION * 2), 2 * ACCUMULATION)
    trained = {name: w for name, w in weights.items() if reference.parameters[name].requires_grad}
    check(ranks, (losses, norms, trained), 2)


# --- the user's own optimizer, groups and handles


def train_with_groups(zero: dict[str, Any]) -> tuple[Run, dict[str, Tensor], list[float]]:
    layers = [LayerSpec(nn.Linear, HIDDEN, HIDDEN) for _ in range(4)]
    model = PipelineModule(layers, num_stages=2, loss_fn=squares, seed_layers=True, base_seed=BASE_SEED)
    weights = [p for n, p in model.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": weights, "weight_decay": 0.3}, {"params": biases, "lr": 0.01}], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "steps_per_print": None,
        "zero_optimization": {**SMALL, **zero},
    }
    engine, returned, _, _ = parallel3d.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    assert returned is optimizer
    run = run_steps(engine, own_iterator(engine, batches(STEPS * ACCUMULATION * 2)), STEPS)
    with parallel3d.zero.GatheredParameters(model.parameters()):
        state = {f"layers.{n.removeprefix('layers.')}": w.clone() for n, w in model.state_dict().items()}
    return run, state, engine.get_lr()


@pytest.mark.parametrize("zero", WITH_SHARDED, ids=str)
def test_parameter_groups_and_schedules_go_on_working(run_ranks, zero: dict[str, Any]):
    def grouped(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.dim() == 1], "lr": 0.01},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    reference = Reference(LINEARS[:4], squares, grouped, base_seed=BASE_SEED)
    schedule = torch.optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.5)
    data, losses, norms = batches(STEPS * ACCUMULATION * 2), [], []
    for k in range(0, len(data), 2 * ACCUMULATION):
        loss, norm = reference.step(data[k : k + 2 * ACCUMULATION])
        schedule.step()
        losses.append(loss)
        norms.append(norm)
    ranks = run_ranks(4, train_with_groups, zero)
    check([run for run, _, _ in ranks], (losses, norms, reference.weights()), 2)
    for _, state, rates in ranks:
        assert all(distance(weight, reference.weights()[name]) <= 1e-5 for name, weight in state.items())
        assert rates == pytest.approx([0.1 * 0.5**STEPS, 0.01 * 0.5**STEPS])


class Signed(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.sign()


def build_unknown(stage: int, allow: bool) -> None:
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1, loss_fn=squares)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": allow,
    }
    parallel3d.initialize(model=model, optimizer=Signed, config=config)


def test_an_optimizer_not_known_to_be_elementwise_is_refused_on_shards(run_ranks):
    run_ranks(2, build_unknown, 0, False)
    run_ranks(2, build_unknown, 2, True)
    for ranks in (1, 2):  # a script that is tried on one rank finds out there
        with pytest.raises(RankError, match=r"Signed is not known to be elementwise.*zero_allow_untested_optimizer"):
            run_ranks(ranks, build_unknown, 1, False)


def build_foreign() -> None:
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4)], num_stages=1, loss_fn=squares)
    other = torch.optim.SGD(nn.Linear(3, 5).parameters(), lr=0.1)
    parallel3d.initialize(model=model, optimizer=other, config={"train_micro_batch_size_per_gpu": 2})


def test_an_optimizer_of_other_parameters_is_refused(run_ranks):
    with pytest.raises(RankError, match=r"shape \[5, 3\] that is not the model's; make it from model.parameters"):
        run_ranks(1, build_foreign)


# --- memory

WIDE = 128


def wide_engine(num_layers: int, zero: dict[str, Any], stages: int = 1) -> Engine:
    """bf16 with fp32 masters and AdamW, a bucket for each weight."""
    return make_engine(
        [Item(nn.Linear, (WIDE, WIDE)) for _ in range(num_layers)],
        squares,
        optimizer="AdamW",
        accumulation=2,
        bf16={"enabled": True},
        pipeline={"stages": stages},
        zero_optimization={"reduce_bucket_size": 1 << 13, **zero},
    )


def report_memory(zero: dict[str, Any]) -> list[dict[str, tuple[int, int]]]:
    engine = wide_engine(16, zero, stages=2)
    engine.train_batch(iter([(torch.randn(2, WIDE), torch.randn(2, WIDE))] * 2))
    return engine.reports.memory_report()


# Room for three of the layers.
STAGE_3 = {
    "stage": 3,
    "reduce_per_micro_batch": True,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 3 * (WIDE * WIDE + WIDE),
}


@pytest.mark.parametrize(
    ("zero", "per_parameter"), list(zip([*STAGES, STAGE_3], (18, 12, 12, 10, 9), strict=True)), ids=str
)
def test_predicted_state_is_what_is_held_and_what_the_paper_has(run_ranks, zero: dict[str, Any], per_parameter: float):
    """Of a stage's parameters on 2 replicas, with buckets counted: arXiv:1910.02054.

    2 + 4 + 12, 2 + 4 + 12/2, the same, 2 + 16/2, 18/2 bytes.
    """
    parameters = 8 * (WIDE * WIDE + WIDE)
    for report in run_ranks(4, report_memory, zero):
        for rank in report:
            for name, (predicted, measured) in rank.items():
                assert measured == pytest.approx(predicted, rel=1e-3), name
            assert rank["steady"][1] / parameters == pytest.approx(per_parameter, rel=0.02)
            if zero["stage"] == 3:
                assert rank["weights"][1] == pytest.approx(2 * parameters / 2, rel=1e-3)
                assert rank["gathered"][1] == 2 * zero["stage3_max_live_parameters"]
                assert rank["live"] == (0, 0)


def sample_peak(zero: dict[str, Any]) -> tuple[int, int, int]:
    """Run two steps. Return the largest model state after any instruction, the prediction, and the samples' number.

    Without weights that are gathered.
    """
    engine = wide_engine(48, zero)
    samples = []

    @contextmanager
    def sample(_: Instruction) -> Iterator[None]:
        yield
        samples.append((engine.update.reducer.state_bytes() + engine.update.sharded.state_bytes()).backward)

    with mock.patch("parallel3d.engine.reports.no_record", sample):
        for _ in range(2):
            engine.train_batch(iter([(torch.randn(2, WIDE), torch.randn(2, WIDE))] * 2))
    predicted = predict_state(engine.module.parameter_infos(), engine.update.policy, data_size=4)
    return max(samples), predicted.backward, len(samples)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("zero", "per_parameter"), [(STAGES[1], 2 + 4 + 12 / 4), (STAGES[3], 2 + 16 / 4), (STAGE_3, 18 / 4)], ids=str
)
def test_peak_of_model_state_sampled_after_every_instruction(run_ranks, zero: dict[str, Any], per_parameter: float):
    parameters = 48 * (WIDE * WIDE + WIDE)
    for peak, predicted, count in run_ranks(4, sample_peak, zero):
        assert count >= 2 * (2 + 2)  # the instructions of two micro-batches, twice
        assert peak == pytest.approx(predicted, rel=1e-3)
        assert peak / parameters == pytest.approx(per_parameter, rel=0.05)


def weights_after(zero: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    engine = make_engine(toy.model(tied=False), zero_optimization={**SMALL, **zero})
    run_steps(engine, own_iterator(engine, [toy.micro_batch(g) for g in range(2)]), 1)
    return {n: p.detach().clone() for n, p in engine.module.named_parameters()}, copies(engine.module)


@pytest.mark.parametrize("zero", STAGES, ids=str)
def test_weights_read_right_after_a_step_are_whole(run_ranks, zero: dict[str, Any]):
    ranks = run_ranks(2, weights_after, zero)
    for named, by_info in ranks:
        assert named.keys() == ranks[0][0].keys()
        assert all(torch.equal(weight, ranks[0][0][name]) for name, weight in named.items())
        assert all(torch.equal(weight, by_info[name]) for name, weight in named.items())


@pytest.mark.parametrize("schedule", activations.SCHEDULES)
def test_activations_in_flight_are_predicted(run_ranks, schedule: str):
    first, *_ = run_ranks(2, activations.report, schedule, 128)
    activations.check_report(schedule, first, 128, messages=1)


MOMENTS = {"AdamW": (2, {}), "SGD": (0, {"momentum": 0.0}), "sgd": (1, {"momentum": 0.9})}


def optimizer_bytes(name: str, changes: dict[str, Any]) -> tuple[int, int]:
    engine = make_engine([Item(nn.Linear, (WIDE, WIDE))], squares, optimizer=name, optimizer_changes=changes)
    engine.train_batch(iter([(torch.randn(2, WIDE), torch.randn(2, WIDE))]))
    return engine.reports.memory_report()[0]["optimizer"]


@pytest.mark.parametrize("name", MOMENTS)
def test_optimizer_state_is_predicted(run_ranks, name: str):
    moments, changes = MOMENTS[name]
    ((predicted, measured),) = run_ranks(1, optimizer_bytes, "SGD" if name == "sgd" else name, changes)
    wanted = moments * (WIDE * WIDE + WIDE) * 4
    assert (predicted, measured) == (pytest.approx(wanted, rel=1e-3), pytest.approx(wanted, rel=1e-3))
