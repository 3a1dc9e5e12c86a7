"""Every optimizer on shards, or on whole tensors of several ranks, trains as plain torch does on one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from layouts import BASE_SEED, Run, check, own_iterator, run_reference, run_steps, specs
from parallel3d.utils import safe_get_full_fp32_param
from reference import Item, Reference
from torch import Tensor, nn

import parallel3d
from parallel3d.errors import ConfigError
from parallel3d.pipe import LayerSpec, PipelineModule
from parallel3d.tensor_parallel import ColumnParallelLinear

SIZE, STEPS, ACCUMULATION = 9, 5, 2
# In float64: what takes signs, or divides by the root of a square, would blow up rounding noise (DESIGN 5).
LAYERS = [Item(nn.Linear, (SIZE, SIZE), {"dtype": torch.float64}) for _ in range(3)]
MATRICES = [Item(nn.Linear, (SIZE, SIZE), {"dtype": torch.float64, "bias": False}) for _ in range(3)]
# Params with much of what each of them can do.
ELEMENTWISE: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False},
    "AdamW": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.1, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "Lion": {"lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "ASGD": {"lr": 0.05, "t0": 2, "weight_decay": 0.1},
    "Adadelta": {"lr": 1.0, "eps": 1e-3, "weight_decay": 0.1},
    "Adamax": {"lr": 0.01, "weight_decay": 0.1},
    "NAdam": {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.05, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
}
WHOLE = {"Adafactor": {"lr": 0.05, "weight_decay": 0.1}, "Muon": {"lr": 0.05}}
PARTITIONED = [{"stage": 1}, {"stage": 2, "reduce_per_micro_batch": True}]
BIAS_LR = 0.02


class PaperLion(torch.optim.Optimizer):
    """arXiv:2302.06675, algorithm 2, a tensor at a time."""

    def __init__(self, params: Any, lr: float, betas: Sequence[float], weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].get("m", torch.zeros_like(p))
                update = torch.where(beta1 * m + (1 - beta1) * p.grad > 0, 1.0, -1.0)
                p.copy_(p - group["lr"] * (update + group["weight_decay"] * p))
                self.state[p]["m"] = beta2 * m + (1 - beta2) * p.grad


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, 2, SIZE, generator=draw, dtype=torch.float64)) for _ in range(count)]


def groups_of(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Biases have a learning rate of their own."""
    groups = [{"params": [p for p in parameters if p.dim() == 2]}]
    biases = [p for p in parameters if p.dim() == 1]
    return groups + ([{"params": biases, "lr": BIAS_LR, "weight_decay": 0.0}] if biases else [])


@contextmanager
def doubles() -> Iterator[None]:
    """Losses, norms and the optimizers' own scalars in float64 too."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@doubles()
def train(items: list[Item], name: str, params: dict[str, Any], zero: dict[str, Any]) -> tuple[Run, bool]:
    """On one rank: the run, and whether its shards cut a parameter, without which they would show nothing."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": name, "params": params},
        "zero_optimization": {"reduce_bucket_size": 200, **zero},  # two buckets, whose shards cut layers
        "steps_per_print": None,
    }
    model = PipelineModule(specs(items), num_stages=1, loss_fn=squares, seed_layers=True, base_seed=BASE_SEED)
    engine, *_ = parallel3d.initialize(model=model, model_parameters=groups_of(list(model.parameters())), config=config)
    data = own_iterator(engine, batches(STEPS * ACCUMULATION * engine.grid.get_data_parallel_world_size()))
    run = run_steps(engine, data, STEPS)
    whole = {info.parameter.numel() for info in engine.module.parameter_infos()}
    return run, any(p.numel() not in whole for group in engine.optimizer.param_groups for p in group["params"])


def plain(name: str, params: dict[str, Any]) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    """Torch's own, on whole tensors."""
    make = PaperLion if name == "Lion" else getattr(torch.optim, name)
    own = {key: value for key, value in params.items() if key != "adam_w_mode"}
    return lambda parameters: make(groups_of(parameters), **own)


@cache
@doubles()
def expected(name: str, ranks: int) -> Run:
    params = {**ELEMENTWISE, **WHOLE}[name]
    reference = Reference(MATRICES if name == "Muon" else LAYERS, squares, plain(name, params), base_seed=BASE_SEED)
    start = reference.weights()
    losses, norms, weights = run_reference(reference, batches(STEPS * ACCUMULATION * ranks), ACCUMULATION * ranks)
    assert not any(torch.allclose(start[n], weights[n], rtol=1e-2) for n in start), "training must move the weights"
    return losses, norms, weights


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("zero", PARTITIONED, ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_optimizer_on_shards_is_torch_on_whole_tensors(run_ranks, name: str, zero: dict[str, Any], ranks: int):
    results = run_ranks(ranks, train, LAYERS, name, ELEMENTWISE[name], zero)
    assert any(cut for _, cut in results)
    check([run for run, _ in results], expected(name, ranks), ranks, tolerance=1e-10)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_optimizer_of_whole_tensors_is_torch_with_zero_0(run_ranks, name: str, ranks: int):
    items = MATRICES if name == "Muon" else LAYERS
    results = run_ranks(ranks, train, items, name, WHOLE[name], {"stage": 0})
    check([run for run, _ in results], expected(name, ranks), ranks, tolerance=1e-10)


def refusal_of_slices(name: str) -> str:
    """Return the error, or the warning, of tensor slices that an optimizer is to update."""
    layer = LayerSpec(ColumnParallelLinear, SIZE, 2 * SIZE, bias=False, gather_output=True)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
    config |= {"pipeline": {"stages": 1}, "tensor_parallel": {"size": 2}}
    model = PipelineModule([layer], loss_fn=squares, config=config)
    own = Untested(model.parameters(), lr=0.1) if name == "untested" else None
    section = {} if own is not None else {"optimizer": {"type": name, "params": {"lr": 0.1}}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            parallel3d.initialize(model=model, optimizer=own, config={**config, **section})
        except ConfigError as error:
            return str(error)
    return " ".join(str(warning.message) for warning in caught)


class Untested(torch.optim.SGD):
    pass


@pytest.mark.parametrize("name", [*WHOLE, "untested", "AdamW"])
def test_tensor_slices_are_shards_to_an_optimizer(run_ranks, name: str):
    """Muon's products of matrices and Adafactor's sums over rows and columns differ for a slice."""
    messages = "".join(run_ranks(2, refusal_of_slices, name))
    said = {"untested": "unless it is elementwise, the weights now depend on the layout", "AdamW": None}
    expected = said.get(name, f"optimizer {name} works on whole tensors")
    assert messages == "" if expected is None else expected in messages


LATER = {
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    "offload": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    "bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "named": {"zero_optimization": {"stage": 1}},
}


def add_group(directory: str) -> dict[str, float]:
    """Return how far masters are from plain PyTorch's after a layer has joined the optimizer between steps."""
    far = {}
    for name, config in LATER.items():
        torch.manual_seed(2)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model = copy.deepcopy(plain)
        parameters = nn.Module.named_parameters if name == "named" else nn.Module.parameters
        optimizers = [torch.optim.SGD(parameters(m[0]), lr=0.1, momentum=0.9) for m in (plain, model)]
        engine, *_ = parallel3d.initialize(
            model=model, optimizer=optimizers[1], config={"train_micro_batch_size_per_gpu": 4, **config}
        )
        for step, x in enumerate(torch.randn(3, 4, 8)):
            if step == 1:
                for m, optimizer in zip((plain, model), optimizers, strict=True):
                    optimizer.add_param_group({"params": parameters(m[1]), "lr": 0.5})
            plain.zero_grad()
            plain(x).square().mean().backward()
            optimizers[0].step()
            engine.backward(engine(x).float().square().mean())
            engine.step()
        engine.save_checkpoint(directory, tag=name)
        pairs = zip(plain.parameters(), map(safe_get_full_fp32_param, model.parameters()), strict=True)
        far[name] = max(float((a - b).abs().max()) for a, b in pairs)
        if name == "named":
            assert [g["param_names"] for g in optimizers[1].param_groups] == [["weight", "bias"]] * 2
    return far


def test_a_group_is_added_between_steps(run_ranks, tmp_path):
    for far in run_ranks(2, add_group, str(tmp_path)):
        assert far["zero3"] < 1e-6
        assert far["offload"] < 1e-6
        assert far["named"] < 1e-6
        assert far["bf16"] < 0.01, "the layer that joins moves by a tenth"


def clip_fused() -> float:
    """Return how far weights in float64 are from plain PyTorch's after steps of a fused kernel with clipping."""
    torch.manual_seed(2)
    plain = nn.Linear(8, 8, dtype=torch.float64)
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1, eps=1e-2, fused=True) for m in (plain, model)]
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.01}
    engine, *_ = parallel3d.initialize(model=model, optimizer=optimizers[1], config=config)
    for x in torch.randn(3, 4, 8, dtype=torch.float64):
        plain.zero_grad()
        plain(x).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        optimizers[0].step()
        engine.backward(engine(x).square().mean())
        engine.step()
    return max(float((a - b).abs().max()) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_fused_kernel_clips_in_float64_exactly(run_ranks):
    assert run_ranks(1, clip_fused)[0] < 1e-12
