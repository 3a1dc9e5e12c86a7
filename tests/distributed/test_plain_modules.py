"""Any module trains data-parallel by three calls, or by train_batch, as it does on one process in plain PyTorch."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from layouts import CONFIG_SEED, TORCH_SEED
from ranks import RankError
from reference import distance
from torch import Tensor, nn

import parallel3d
from parallel3d import DeepSpeedEngine as Engine
from parallel3d.errors import ConfigError
from parallel3d.rng import stream_seed

STEPS, SAMPLES, WIDTH, CLIPPING = 4, 3, 16, 0.05
ZERO = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "reduce_per_micro_batch": False},
    {"stage": 2, "reduce_per_micro_batch": True},
    {"stage": 3, "stage3_param_persistence_threshold": 0},
]


class Model(nn.Module):
    """Shared, frozen and unused parameters, a buffer, dropout, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 2)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.frozen(self.block(self.embed(ids) + self.shift)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(ids).flatten(0, -2), labels.flatten())


def model() -> Model:
    torch.manual_seed(3)
    return Model()


def micro_batch(g: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + g)
    ids = torch.randint(0, 11, (SAMPLES, 6), generator=generator)
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def make(accumulation: int, **config: Any) -> Engine:
    whole = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.5}},
        "steps_per_print": None,
        **config,
    }
    whole["zero_optimization"] = {"reduce_bucket_size": 300, **config.get("zero_optimization", {})}
    trained = model()
    torch.manual_seed(TORCH_SEED)
    engine, *_ = parallel3d.initialize(model=trained, config=whole)
    return engine


Result = tuple[list[float], list[float], dict[str, Tensor]]


def by_calls(accumulation: int, zero: dict[str, Any]) -> Result:
    engine = make(accumulation, zero_optimization=zero)
    dp, rank = engine.dp_world_size, engine.global_rank
    losses, norms, g = [], [], rank
    for step in range(STEPS):
        total = 0.0
        for k in range(accumulation):
            assert engine.is_gradient_accumulation_boundary() == (k == accumulation - 1)
            loss = engine(**micro_batch(g))
            engine.backward(loss)
            engine.step()
            total, g = total + loss.item() / accumulation, g + dp
        assert engine.global_steps == step + 1
        losses.append(total)
        norms.append(engine.get_global_grad_norm().item())
    with parallel3d.zero.GatheredParameters(engine.parameters()):
        return losses, norms, {n: p.detach().clone() for n, p in engine.named_parameters()}


def by_train_batch(accumulation: int, zero: dict[str, Any]) -> Result:
    engine = make(accumulation, zero_optimization=zero)
    dp, rank = engine.dp_world_size, engine.global_rank
    iterator = iter([micro_batch(g) for g in range(rank, STEPS * accumulation * dp, dp)])
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(engine.train_batch(iterator).item())
        norms.append(engine.get_global_grad_norm().item())
    with parallel3d.zero.GatheredParameters(engine.parameters()):
        return losses, norms, {n: p.detach().clone() for n, p in engine.module.named_parameters()}


def on_one_process(per_step: int) -> Result:
    reference = model()
    trained = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3, momentum=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for g in range(step * per_step, (step + 1) * per_step):
            torch.manual_seed(stream_seed(CONFIG_SEED, TORCH_SEED, step, g - step * per_step, 0))
            loss = reference(**micro_batch(g))
            (loss / per_step).backward()
            total += loss.item() / per_step
        norms.append(float(nn.utils.clip_grad_norm_(trained, CLIPPING)))
        optimizer.step()
        losses.append(total)
    assert min(norms) > CLIPPING, "clipping must have an effect to be tested"
    return losses, norms, {n: p.detach().clone() for n, p in reference.named_parameters()}


def check(ranks: Sequence[Result], wanted: Result) -> None:
    losses, norms, weights = wanted
    mean = [sum(row) / len(ranks) for row in zip(*(own for own, _, _ in ranks), strict=True)]
    assert mean == pytest.approx(losses, rel=1e-5)
    for _, own_norms, own_weights in ranks:
        assert own_norms == pytest.approx(norms, rel=1e-5)
        assert own_weights.keys() == weights.keys()
        for name, weight in own_weights.items():
            assert torch.equal(weight, ranks[0][2][name])
            assert distance(weight, weights[name]) <= 1e-5, name


@pytest.mark.parametrize("zero", ZERO, ids=str)
@pytest.mark.parametrize("train", [by_calls, by_train_batch])
@pytest.mark.parametrize(("dp", "accumulation"), [(1, 3), (3, 2), (2, 1)])
def test_a_module_trains_as_on_one_process(run_ranks, train: Any, dp: int, accumulation: int, zero: dict[str, Any]):
    check(run_ranks(dp, train, accumulation, zero), on_one_process(dp * accumulation))


ODD_DTYPES = (torch.bool, torch.int16, torch.uint16, torch.int64, torch.complex64, torch.float64, torch.float8_e4m3fn)


class OddlyHeld(nn.Module):
    """Buffers of dtypes that backends don't know, and tensors whose elements don't lie side by side; they differ by rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        grid = torch.arange(12.0).view(3, 4) + 100 * rank
        self.strided = nn.Parameter(grid[:, ::2])
        self.transposed = nn.Parameter(grid.clone().t())
        self.register_buffer("column", grid.clone()[:, 1])
        self.register_buffer("scalar", torch.tensor(float(rank)))
        self.register_buffer("expanded", torch.tensor([[rank], [2 * rank]]).expand(2, 3))
        self.register_buffer("empty", torch.zeros(0, 3))
        for dtype in ODD_DTYPES:
            self.register_buffer(str(dtype).removeprefix("torch."), torch.full((3,), 1 - rank).to(dtype))


def held(module: nn.Module) -> dict[str, tuple[str, Any]]:
    return {name: (str(tensor.dtype), tensor.tolist()) for name, tensor in module.state_dict().items()}


def held_alike() -> dict[str, tuple[str, Any]]:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = OddlyHeld(torch.distributed.get_rank())
    return held(parallel3d.initialize(model=model, config={**config, "steps_per_print": None})[0].module)


def test_replicas_begin_with_the_first_ones_tensors_of_any_dtype_and_strides(run_ranks):
    assert run_ranks(2, held_alike) == [held(OddlyHeld(0))] * 2


def accumulate_without_sync(zero: dict[str, Any]) -> Result:
    """Two of three micro-batches inside no_sync, the last outside."""
    engine = make(3, zero_optimization=zero)
    dp, g = engine.dp_world_size, engine.global_rank
    losses, norms = [], []
    engine.set_gradient_accumulation_boundary(True)
    for _ in range(STEPS):
        total = 0.0
        with engine.no_sync():
            for _ in range(2):
                loss = engine(**micro_batch(g))
                engine.backward(loss)
                total, g = total + loss.item() / 3, g + dp
        loss = engine(**micro_batch(g))
        engine.backward(loss)
        engine.step()
        losses.append(total + loss.item() / 3)
        norms.append(engine.get_global_grad_norm().item())
        g += dp
    with parallel3d.zero.GatheredParameters(engine.parameters()):
        return losses, norms, {n: p.detach().clone() for n, p in engine.module.named_parameters()}


@pytest.mark.parametrize("zero", ZERO[:3], ids=str)
def test_no_sync_holds_gradients_back(run_ranks, zero: dict[str, Any]):
    check(run_ranks(2, accumulate_without_sync, zero), on_one_process(6))


def misuse(kind: str) -> str:
    engine = make(2, zero_optimization=ZERO[3] if kind == "no_sync, never held" else ZERO[0])
    try:
        if kind == "no backward":
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
        elif kind == "not reduced":
            with engine.no_sync():
                engine.backward(engine(**micro_batch(0)))
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
        elif kind == "no_sync, never held":
            with engine.no_sync():
                engine.backward(engine(**micro_batch(0)))
        elif kind == "again":
            engine.set_gradient_accumulation_boundary(True)
            for g in range(2):
                engine.backward(engine(**micro_batch(g)))
        elif kind == "many losses":
            engine.backward(engine.module.logits(micro_batch(0)["ids"]))
        elif kind == "plateau":
            engine.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer)
            engine.train_batch(iter([micro_batch(0)] * 2))
        elif kind == "no metrics":
            engine.lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer)
            engine.set_gradient_accumulation_boundary(True)
            before = engine.block[0].weight.clone()
            engine.backward(engine(**micro_batch(0)))
            try:
                engine.step()
            finally:
                assert torch.equal(engine.block[0].weight, before)
        elif kind == "thawed":
            engine.frozen.requires_grad_(True)
            engine.train_batch(iter([micro_batch(0)] * 2))
        elif kind == "stages":
            make(1, pipeline={"stages": 2})
        elif kind == "no blocks":
            make(1, activation_checkpointing={"policy": "cheap"})
        elif kind == "no loss":
            engine.module.forward = engine.module.logits
            engine.train_batch(iter([(micro_batch(0)["ids"],)] * 2))
    except parallel3d.Parallel3DError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no backward", "call engine.backward(loss) before"),
        ("not reduced", "run the last one outside"),
        ("no_sync, never held", "reduce_per_micro_batch to false"),
        ("again", "give one call the sum of a micro-batch's losses"),
        ("many losses", "one element, or (sum, count), not [3, 5, 11]"),
        ("plateau", "engine.step({'metrics': ...})"),
        ("no metrics", "only engine.step({'metrics': ...})"),
        ("thawed", "parameter frozen.weight was frozen when initialize was called"),
        ("stages", "the model is a Model, for which it is 1; build a PipelineModule of its layers ("),
        (
            "no blocks",
            "needs blocks, in a ModuleList or named by parallel3d.zero.set_z3_leaf_modules, and the model has none",
        ),
        ("no loss", "one element, or (sum, count), not [3, 5, 11]"),
    ],
)
def test_misuse_is_explained(run_ranks, kind: str, message: str):
    assert message in run_ranks(1, misuse, kind)[0]


def ask() -> dict[str, Any]:
    engine = make(2, scheduler={"type": "WarmupLR", "params": {"warmup_min_lr": 0.05, "warmup_max_lr": 0.1}})
    with torch.no_grad():
        evaluated = engine.eval()(**micro_batch(0)).item()
        modes = engine.training, engine.train().training
    loss, logits = engine.eval_batch(iter([micro_batch(0)]), return_logits=True, num_micro_batches=1)
    engine.zero_grad()
    engine.backward(engine(**micro_batch(1)))
    engine.zero_grad()  # forgets that micro-batch
    engine.eval()  # no dropout
    for g in (0, 0):
        engine.backward(engine(**micro_batch(g)))
        engine.step()
    return {
        "eval": evaluated == loss.item() == logits[0].item(),
        "modes": modes,
        "attribute": engine.shift.shape,
        "parameters": sum(p.numel() for p in engine.parameters()),
        "norm": engine.get_global_grad_norm().item(),
        "lr": engine.get_lr(),
        "info": engine.get_batch_info(),
        "stage": engine.zero_optimization_stage(),
        "missing": hasattr(engine, "no_such_thing"),
        "state": list(engine.state_dict()),
    }


def test_what_scripts_ask_of_an_engine(run_ranks):
    (found,) = run_ranks(1, ask)
    reference = model().eval()
    reference(**micro_batch(0)).backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm().item()
    assert found["eval"]
    assert found["modes"] == (False, True)
    assert found["attribute"] == (WIDTH,)
    assert found["parameters"] == sum(p.numel() for p in reference.parameters())
    assert found["norm"] == pytest.approx(norm, rel=1e-5)
    assert found["info"] == (6, 3, 2)
    assert found["stage"] == 0
    assert not found["missing"]
    assert found["state"] == list(reference.state_dict())
    assert found["lr"] == [0.05]


def split_by_calls() -> None:
    layers = [parallel3d.LayerSpec(nn.Linear, 4, 4) for _ in range(2)]
    module = parallel3d.PipelineModule(layers, num_stages=2, loss_fn=lambda y, t: (y - t).square().mean())
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = parallel3d.initialize(model=module, config=config)
    engine(torch.ones(1, 4))


def test_a_model_in_stages_is_not_called(run_ranks):
    with pytest.raises(RankError, match=r"cut into 2 chunks, which only engine\.train_batch"):
        run_ranks(2, split_by_calls)


def time_by_calls() -> tuple[list[str], list[dict[str, float]]]:
    engine = make(2)
    for step in range(2):
        if step == 1:
            engine.reports.profile_next_batch()
        for g in range(2):
            engine.backward(engine(**micro_batch(g)))
            engine.step()
    _, timeline = engine.reports.timeline()
    return [str(span.instruction) for span in timeline.spans], [
        vars(parts) for parts in engine.reports.time_breakdown()
    ]


def test_time_by_calls_is_broken_down_as_a_batchs(run_ranks):
    for instructions, ranks in run_ranks(2, time_by_calls):
        assert instructions == ["F0@0", "B0@0", "F1@0", "B1@0"]
        for parts in ranks:
            assert parts["forward"] > 0
            assert parts["backward"] > 0
            assert parts["step"] > 0


class Encoding(UserDict[str, Tensor]):
    """A mapping that is no dict, as tokenizers return."""


class Features(dict[str, Tensor]):
    pass


class Squares(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def of_a_mapping(kind: type) -> list[float]:
    torch.manual_seed(0)
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "steps_per_print": None}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = parallel3d.initialize(model=Squares(WIDTH, WIDTH), config=config)
    batch = kind({"x": torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)})
    return [engine.eval_batch(iter([batch])).item(), engine.train_batch(iter([batch])).item()]


@pytest.mark.parametrize("kind", [dict, OrderedDict, Features, Encoding])
def test_a_micro_batch_may_be_any_mapping(run_ranks, kind: type):
    torch.manual_seed(0)
    alone = Squares(WIDTH, WIDTH).bfloat16()
    loss = alone(torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.bfloat16).view(2, WIDTH)).item()
    assert run_ranks(1, of_a_mapping, kind)[0] == [loss, loss]


def sliced_plain_module() -> str:
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "tensor_parallel": {"size": 2}}
    with pytest.raises(ConfigError) as caught:
        parallel3d.initialize(model=Squares(WIDTH, WIDTH), config=config)
    return str(caught.value)


def test_slices_of_a_plain_module_are_refused(run_ranks):
    for message in run_ranks(2, sliced_plain_module):
        assert "the model is a Squares, which is whole on every rank; build a PipelineModule" in message
