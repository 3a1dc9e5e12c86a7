"""Linears in fp8 against an independent reference, the arithmetic of scales, and the choice of linears."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fp8_reference import into_fp8
from hypothesis import given
from hypothesis import strategies as st
from reference import distance
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel3d.autograd.fp8 import Fp8
from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import is_split, make_splittable, open_ports
from parallel3d.comm.collectives import Group
from parallel3d.config import Fp8Config, load
from parallel3d.engine.compile import torch_options
from parallel3d.engine.fp8 import check_device, linears_between, use_fp8
from parallel3d.errors import ConfigError
from parallel3d.kernels.fp8 import E4M3, E5M2, cast, multiply_on_gpu, multiply_ref

ALONE = Group((0,), None)
RECIPES = ["tensorwise", "rowwise"]
SETTINGS = [(recipe, weight_gradient) for recipe in RECIPES for weight_gradient in ("fp8", "bf16")]


def network() -> nn.Module:
    """An MLP whose middle layer is frozen; the last two have no multiple of 16."""
    torch.manual_seed(1)
    layers = [
        nn.Linear(32, 48),
        nn.ReLU(inplace=True),
        nn.Linear(48, 16, bias=False),
        nn.Linear(16, 48),
        nn.Linear(48, 5),
        nn.Linear(5, 16),
    ]
    layers[2].weight.requires_grad_(False)
    return nn.Sequential(*layers)


def in_fp8(model: nn.Module, sink: GradientSink, recipe: str, weight_gradient: str) -> Fp8:
    fp8 = Fp8(Fp8Config(recipe=recipe, weight_gradient=weight_gradient))
    use_fp8(linears_between([(1, model)], 3), fp8, sink, ALONE)
    return fp8


def whole(sink: GradientSink, loss: Tensor) -> None:
    loss.backward()


def fused(sink: GradientSink, loss: Tensor) -> None:
    with sink.fusing():
        loss.backward()


def deferred(sink: GradientSink, loss: Tensor) -> None:
    with sink.deferring("here"):
        loss.backward()
    sink.run_deferred("here")


def compare(
    backward: Callable[..., None],
    recipe: str,
    weight_gradient: str,
    dtype: torch.dtype,
    close: float,
    run: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x),
    backend: str | None = None,
) -> None:
    """Compare two micro-batches into fp32 with the reference. run: calls the model; backend: of torch.compile, in one graph."""
    model, expected = network().to(dtype), network().to(dtype)
    into_fp8([expected], recipe, weight_gradient, but=list(expected)[-2:])
    sink = GradientSink()
    sums = {p: torch.zeros(p.shape) for p in model.parameters() if p.requires_grad}
    for parameter, accumulator in sums.items():
        sink.attach(parameter, accumulator)
    sink.open()
    if backend is not None:
        make_splittable(model, sink)
    fp8 = in_fp8(model, sink, recipe, weight_gradient)
    if backend is not None:
        torch._dynamo.reset()
        open_ports(model, sink)
        options = torch_options({"backend": backend, "dynamic": False})
        model.compile(fullgraph=True, **options)
    wanted = {name: torch.zeros(p.shape) for name, p in expected.named_parameters()}
    with fp8.keeping():
        for seed in range(2):
            x = torch.randn(2, 7, 32, dtype=dtype, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            y = run(model, x)
            backward(sink, y.float().square().sum())
            copied = x.detach().clone().requires_grad_()
            z = expected(copied)
            z.float().square().sum().backward()
            assert distance(y.detach(), z.detach()) < close
            assert distance(x.grad, copied.grad) < close
            for name, p in expected.named_parameters():
                wanted[name] += 0 if p.grad is None else p.grad.float()
                p.grad = None
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert distance(sums[p], wanted[name]) < 1.5 * close, name


@pytest.mark.parametrize("backward", [whole, fused, deferred])
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(("recipe", "weight_gradient"), SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_reference(
    backward: Callable[..., None], recomputed: bool, recipe: str, weight_gradient: str, dtype: torch.dtype
):
    """Operands are equal to the bit, so that only the rounding of results differs."""
    run = partial(checkpoint, use_reentrant=False) if recomputed else nn.Module.__call__
    compare(backward, recipe, weight_gradient, dtype, 2e-6 if dtype is torch.float32 else 4e-3, run)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "compiled_by" in metafunc.fixturenames:
        # Making inductor's kernels takes seconds a case: without --full, test_compile.py has linears in fp8.
        full = metafunc.config.getoption("full")
        cases = [("aot_eager", *settings) for settings in (SETTINGS if full else SETTINGS[::3])]
        cases += [("inductor", *settings) for settings in SETTINGS if full]
        metafunc.parametrize(("compiled_by", "recipe", "weight_gradient"), cases)


def test_compiled_layers_are_one_graph(compiled_by: str, recipe: str, weight_gradient: str):
    compare(deferred, recipe, weight_gradient, torch.float32, 2e-6, backend=compiled_by)


def test_weights_are_cast_once_while_they_are_kept():
    model = nn.Sequential(nn.Linear(16, 16))
    fp8, x = in_fp8(model, GradientSink(), "tensorwise", "fp8"), torch.randn(3, 16)
    with torch.no_grad():
        with fp8.keeping():
            first = model(x)
            model[0].weight.data.mul_(2)  # which no version counter sees
            assert torch.equal(model(x), first)
            model[0].weight.mul_(2)
            assert not torch.equal(model(x), first), "a weight that a script has written is cast again"
            vars(model[0].weight)["sharded_weights"] = object()
            fp8.keep("the next step")
            second = model(x)
            model[0].weight.mul_(2)
            assert not torch.equal(model(x), second), "of gathered weights nothing is kept"
        assert not torch.equal(model(x), first)
        assert not torch.equal(copy.deepcopy(model)(x), model(x)), "a copy is not in fp8"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_stays_so(recipe: str, value: float):
    """In the outputs and gradients of its row, or of all."""
    model = nn.Sequential(nn.Linear(16, 32))
    in_fp8(model, GradientSink(), recipe, "fp8")
    x = torch.randn(4, 16, requires_grad=True)
    planted = x.detach().clone()
    planted[1, 2] = value
    assert not model(planted)[1].isfinite().any()
    y = model(x)
    g = torch.ones_like(y)
    g[1, 2] = value
    y.backward(g)
    assert not x.grad[1].isfinite().any()
    assert not model[0].weight.grad[2].isfinite().any()


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16),
    st.integers(-20, 20),
    st.sampled_from([E4M3, E5M2]),
    st.booleans(),
)
def test_scales(numbers: list[float], power: int, dtype: torch.dtype, rowwise: bool):
    x = torch.tensor(numbers).view(2, 8)
    one, other = cast(x, dtype, rowwise)
    assert torch.equal(cast(x, dtype, rowwise, straight=False)[1].values.float(), other.values.float())
    for matrix, scaled in ((x, one), (x.t(), other)):
        values = scaled.values.float() * scaled.inverse_scale
        peaks = matrix.abs().amax(1 if rowwise else (0, 1), keepdim=True)
        largest = scaled.values.float().abs().amax(1 if rowwise else (0, 1), keepdim=True)
        sizable = peaks >= 1e-12
        assert (largest[sizable] == torch.finfo(dtype).max).all(), "the largest magnitude becomes the largest number"
        # Half a unit in the last place, which is that of the smallest normal number below it.
        step = torch.maximum(matrix.abs(), torch.finfo(dtype).smallest_normal * scaled.inverse_scale)
        assert ((values - matrix).abs() <= step * torch.finfo(dtype).eps / 2 * (1 + 1e-5)).all()
    if float(x.abs()[x != 0].amin() if x.any() else 1) > 1e-4 and (x.abs().amax(1) > 1e-4).all():
        again, _ = cast(x * 2.0**power, dtype, rowwise)
        assert torch.equal(again.values.float(), one.values.float()), "powers of two change scales alone"


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_the_gpu(rowwise: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """All three of a layer, by torch's product on the CPU, given what CUDA's requires. That of 2.11 has one scale alone."""
    product, one = torch._scaled_mm, torch.ones(())

    def checked(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, use_fast_accum: bool
    ) -> Tensor:
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert b.dtype is E4M3, "the kernels of rowwise products have no other right operand"
        assert scale_a.dtype is scale_b.dtype is torch.float32
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert [scale_a.shape, scale_b.shape] == ([(len(a), 1), (1, b.shape[1])] if rowwise else [(), ()])
        assert out_dtype is torch.bfloat16 or not rowwise
        unscaled = product(a, b, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=use_fast_accum)
        return (unscaled * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    x, weight, gradient = torch.randn(6, 48), torch.randn(32, 48), torch.randn(6, 32)
    casts = cast(x, E4M3, rowwise), cast(weight, E4M3, rowwise), cast(gradient, E5M2, rowwise)
    (rows, columns), (straight, transposed), (g, g_columns) = casts
    close = 1e-6 if dtype is torch.float32 and not rowwise else 4e-3
    for a, b in ((rows, straight), (g, transposed), (g_columns, columns)):
        assert distance(multiply_on_gpu(a, b, dtype), multiply_ref(a, b, dtype)) < close


def test_linears_outside_of_blocks_odd_ones_and_those_filtered_out_stay():
    def chosen(stay_out: Any) -> list[str]:
        layers = [
            nn.Linear(16, 16),
            nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 24)),
            nn.Linear(16, 16),
            nn.Linear(16, 16),
        ]
        linears = linears_between(enumerate(layers), len(layers))
        use_fp8(linears, Fp8(load({"fp8": {"filter": stay_out}}).fp8), GradientSink(), ALONE)
        return [name for name, linear in linears if is_split(linear)]

    assert chosen(None) == ["layers.1.0", "layers.2"]
    assert chosen([".0"]) == chosen(r"\.0$") == ["layers.2"]
    with pytest.raises(ConfigError, match=r"fp8.filter has 'lm_head', which is in the name of no linear of a block"):
        chosen(["lm_head"])
    with pytest.raises(ConfigError, match=r"fp8.filter '\(' is not a regular expression"):
        chosen("(")
    with pytest.raises(ConfigError, match="fp8 finds no linear to run in: those of the 3 in blocks"):
        chosen("layers")


def test_what_has_no_fp8_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="fp16 is enabled; enable bf16 instead"):
        load({"fp8": {"enabled": True}, "fp16": {"enabled": True}})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"A100 has compute capability 8\.0, but fp8 needs 8.9"):
        check_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_device(torch.device("cuda"))
    check_device(torch.device("cpu"))
