"""Gradients through the sink, whole, fused and deferred, against plain autograd on a copy of the model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallel3d.autograd.recipes import Product, Value
from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable, open_ports
from parallel3d.errors import ExecutionError

WIDTH, WORDS = 6, 9
MODES = ["whole", "fused", "deferred"]
EXACT: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}


class Apply(nn.Module):
    """A module from a function of (self, x), over children and parameters given by name."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **members: Any):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(self, x)


class Cube(torch.autograd.Function):
    """A user's function, with nothing of ours inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * gradient


class First(torch.autograd.Function):
    """A user's function whose second input gets None for a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Recompute(torch.autograd.Function):
    """A user's function that runs a layer again in its backward and asks autograd.grad for what it needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: list[nn.Module]) -> Tensor:
        ctx.layer, ctx.x = layer[0], x
        with torch.no_grad():
            return layer[0](x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            y = ctx.layer(x)
        (dx,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        dw, db = torch.autograd.grad(y, [ctx.layer.weight, ctx.layer.bias], gradient)
        return dx, dw, db, None


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        if not names or name in names:
            parameter.requires_grad_(False)
    return module


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def tied_embedding() -> nn.Module:
    """One weight in an embedding layer, in the output layer, and in a bare F.embedding."""
    model = Apply(
        lambda m, ids: m.out(m.hidden(m.embed(ids)) + F.embedding(ids.flip(0), m.embed.weight)),
        embed=nn.Embedding(WORDS, WIDTH),
        hidden=linear(),
        out=nn.Linear(WIDTH, WORDS),
    )
    model.out.weight = model.embed.weight
    return model


def checkpointed(use_reentrant: bool) -> nn.Module:
    block = nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.GELU(), linear())
    return Apply(
        lambda m, x: m.last(checkpoint(m.block, m.first(x), use_reentrant=use_reentrant)),
        first=linear(),
        block=block,
        last=linear(),
    )


def compiled(backend: str) -> nn.Module:
    torch.compiler.reset()
    block = nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(WIDTH), linear(False))
    block.compile(backend=backend)
    return nn.Sequential(linear(), block, nn.Tanh(), linear())


def compiled_embedding() -> nn.Module:
    torch.compiler.reset()
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH, padding_idx=1), linear())
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def hooked_by_user() -> nn.Module:
    model = nn.Sequential(linear(), linear(), linear())
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    model[1].bias.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    model[2].register_full_backward_hook(lambda module, dx, dy: (3 * dx[0],))
    return model


def odd_indices(*shape: int) -> Tensor:
    return torch.randint(0, WORDS, shape)


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    input: Callable[[], Tensor]
    deferred: str  # names of the parameters that BACKWARD_INPUT leaves to BACKWARD_WEIGHT


def x(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape, WIDTH, requires_grad=True)


CASES = {
    "mlp": Case(lambda: nn.Sequential(linear(), nn.GELU(), linear()), x(2, 3), "0.weight 0.bias 2.weight 2.bias"),
    "input without gradient": Case(lambda: nn.Sequential(linear(), linear()), lambda: torch.randn(2, WIDTH), "0 1"),
    "one vector": Case(linear, x(), "weight bias"),
    "five dims": Case(linear, x(2, 1, 2, 3), "weight bias"),
    "no samples": Case(lambda: nn.Sequential(linear(), linear()), x(0, 3), "0 1"),
    "no features": Case(lambda: nn.Sequential(nn.Linear(WIDTH, 0), nn.Linear(0, WIDTH)), x(2, 3), "0 1"),
    "transposed input": Case(linear, lambda: torch.randn(3, WIDTH, 2).requires_grad_().mT, "weight bias"),
    "no bias": Case(lambda: nn.Sequential(linear(False), linear(False)), x(4), "0.weight 1.weight"),
    "linear used twice": Case(lambda: Apply(lambda m, x: m.a(m.a(x).tanh()), a=linear()), x(2, 3), "a"),
    "layer and its bare weight": Case(
        lambda: Apply(lambda m, x: F.linear(m.a(x), m.a.weight) + m.a.bias, a=linear()), x(2, 3), "a"
    ),
    "embedding": Case(lambda: nn.Embedding(WORDS, WIDTH), lambda: odd_indices(3, 4), "weight"),
    "embedding of nothing": Case(lambda: nn.Embedding(WORDS, WIDTH), lambda: odd_indices(0, 4), "weight"),
    "embedding with padding": Case(
        lambda: nn.Embedding(WORDS, WIDTH, padding_idx=-2), lambda: torch.arange(WORDS).repeat(2), "weight"
    ),
    "embedding, sparse": Case(lambda: nn.Embedding(WORDS, WIDTH, sparse=True), lambda: odd_indices(5), ""),
    "embedding by frequency": Case(
        lambda: nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=True), lambda: odd_indices(7), ""
    ),
    "tied embedding": Case(tied_embedding, lambda: odd_indices(4, 3), "embed hidden out.bias"),
    "whole layers between": Case(
        lambda: Apply(
            lambda m, x: m.b(m.norm(m.conv(m.a(x).mT).mT) * m.scale),
            a=linear(),
            conv=nn.Conv1d(WIDTH, WIDTH, 1),
            norm=nn.LayerNorm(WIDTH),
            scale=nn.Parameter(torch.randn(WIDTH)),
            b=linear(),
        ),
        x(2, 3),
        "a b",
    ),
    "frozen weight": Case(lambda: nn.Sequential(linear(), frozen(linear(), "weight")), x(3), "0"),
    "frozen bias": Case(lambda: nn.Sequential(linear(), frozen(linear(), "bias")), x(3), "0 1.weight"),
    "all frozen": Case(lambda: frozen(nn.Sequential(linear(), nn.GELU(), linear())), x(3), ""),
    "low rank": Case(
        lambda: Apply(
            lambda m, x: m.base(x) + m.up(m.down(x)),
            base=frozen(linear()),
            down=nn.Linear(WIDTH, 2, bias=False),
            up=nn.Linear(2, WIDTH, bias=False),
        ),
        x(2, 3),
        "down up",
    ),
    "weight_norm": Case(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), linear()), x(2, 3), "1"),
    "weight_norm by hook": Case(
        lambda: nn.Sequential(torch.nn.utils.weight_norm(linear()), linear()),  # deprecated, still around
        x(2, 3),
        "1",
    ),
    "spectral_norm": Case(
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(linear()), linear()), x(2, 3), "1"
    ),
    "checkpointed": Case(lambda: checkpointed(False), x(2, 3), "first block.0 block.3 last"),
    "checkpointed, reentrant": Case(lambda: checkpointed(True), x(2, 3), "first block.0 block.3 last"),
    "custom function beside": Case(
        lambda: Apply(lambda m, x: m.b(Cube.apply(m.a(x))), a=linear(), b=linear()), x(2, 3), "a b"
    ),
    "custom function around": Case(
        lambda: Apply(
            lambda m, x: m.b(Recompute.apply(m.c(x), m.a.weight, m.a.bias, [m.a])), a=linear(), b=linear(), c=linear()
        ),
        x(2, 3),
        "b c",
    ),
    "attention": Case(
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True), x(2, 3), "linear1 linear2"
    ),
    "autocast": Case(
        lambda: Apply(
            lambda m, x: torch.autocast("cpu", torch.bfloat16)(m.a)(x).double() + m.b(x), a=linear(), b=linear()
        ),
        x(2, 3),
        "b",
    ),
    "results changed in place": Case(
        lambda: Apply(
            lambda m, ids: m.b(m.a(m.embed(ids).add_(m.scale)).sigmoid_()).mul_(2),
            embed=nn.Embedding(WORDS, WIDTH),
            scale=nn.Parameter(torch.randn(WIDTH)),
            a=linear(),
            b=linear(False),
        ),
        lambda: odd_indices(2, 3),
        "embed a b",
    ),
    "unused layer": Case(lambda: Apply(lambda m, x: m.a(x), a=linear(), unused=linear()), x(2), "a"),
    "gradient that is None": Case(
        lambda: Apply(lambda m, x: First.apply(m.a(x), m.b(x)), a=linear(), b=linear()), x(2), "a"
    ),
    "user's hooks": Case(hooked_by_user, x(2), "0.bias 1.weight 2"),
    "compiled, eager": Case(lambda: compiled("eager"), x(2, 3), "0 1.0 1.3 3"),
    "compiled, aot_eager": Case(lambda: compiled("aot_eager"), x(2, 3), "0 1.0 1.3 3"),
    "compiled, embedding": Case(compiled_embedding, lambda: odd_indices(4, 3), "0 1"),
}


class Run:
    """A model on a sink whose accumulators start at zero, or, transient, at NaN and are overwritten first."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None, transient: bool = False):
        self.model, self.sink = model, GradientSink(on_complete=self._note)
        self.names = {p: name for name, p in model.named_parameters()}
        self.gradients = {p: torch.zeros_like(p, dtype=dtype).detach() for p in self.names if p.requires_grad}
        for p, gradient in self.gradients.items():
            self.sink.attach(p, partial(self._transient, p) if transient else gradient, overwrites=transient)
        self._arrived: set[nn.Parameter] = set()
        make_splittable(model, self.sink)
        open_ports(model, self.sink)
        # What the sink has reported, and the accumulators at that time.
        self.completed: list[str] = []
        self.at_completion: dict[str, Tensor] = {}
        self.on_report: Callable[[Any], object] | None = None
        self.sink.open()

    def _transient(self, p: nn.Parameter) -> Tensor:
        if p not in self._arrived:
            self.gradients[p].fill_(torch.nan)
        self._arrived.add(p)
        return self.gradients[p]

    def _note(self, p: Any) -> None:
        if self.on_report is not None:
            self.on_report(p)
            return
        self.completed.append(self.names[p])
        self.at_completion[self.names[p]] = self.gradients[p].clone()

    def expecting(self, names: Iterable[str], place: Any = None) -> AbstractContextManager[None]:
        """Reports each of these parameters by itself."""
        return self.sink.expecting({p: [p] for p, name in self.names.items() if name in set(names)}, place)

    def backward(self, mode: str, place: Any, y: Tensor, dy: Tensor | None = None, create_graph: bool = False) -> None:
        contexts = {"whole": nullcontext, "fused": self.sink.fusing, "deferred": partial(self.sink.deferring, place)}
        with contexts[mode]():
            (y.square().sum() if dy is None else y).backward(dy, create_graph=create_graph)

    def pending(self, place: Any) -> set[str]:
        return {self.names[p] for p in self.sink.pending(place)}

    def touched(self) -> set[str]:
        return {self.names[p] for p in self.sink.touched()}

    def check(self, reference: nn.Module, **tolerance: float) -> None:
        """The accumulators hold the `.grad` of `reference`, and what has none there was not touched here."""
        expected = {name: p.grad for name, p in reference.named_parameters()}
        assert self.touched() == {name for name, gradient in expected.items() if gradient is not None}
        for p, mine in self.gradients.items():
            theirs = expected[self.names[p]]
            theirs = torch.zeros_like(p).detach() if theirs is None else theirs.to_dense()
            torch.testing.assert_close(mine, theirs, msg=self.names[p], check_dtype=False, **(tolerance or EXACT))


def expand(model: nn.Module, names: str) -> set[str]:
    """ "0 2.bias" -> the parameters 0.weight, 0.bias, 2.bias."""
    owned = {name for name, _ in model.named_parameters()}
    return {name for name in owned for prefix in names.split() if name == prefix or name.startswith(prefix + ".")}


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.build().double()


def double_input(case: Case) -> Tensor:
    x = case.input()
    return x.double().detach().requires_grad_(x.requires_grad) if x.is_floating_point() else x


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning", "ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("transient", [False, True], ids=["in place", "transient"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_autograd(name: str, mode: str, transient: bool) -> None:
    case = CASES[name]
    run, reference = Run(build(case), transient=transient), build(case)
    for module in reference.modules():
        module._compiled_call_impl = None
    for micro_batch in range(2):
        mine, theirs = double_input(case), double_input(case)
        with torch.no_grad():
            theirs.copy_(mine)
        y, expected = run.model(mine), reference(theirs)
        assert torch.equal(y, expected)
        assert y.requires_grad == expected.requires_grad
        if not y.requires_grad:
            continue
        dy = torch.randn_like(y)
        expected.backward(dy)
        run.completed.clear()
        reached = {name for name, p in reference.named_parameters() if p.grad is not None}
        if mode == "deferred":
            run.backward(mode, micro_batch, y, dy)
            reached = run.pending(micro_batch)
            assert reached == expand(run.model, case.deferred)
            with run.expecting(reached, micro_batch):
                run.sink.run_deferred(micro_batch)
                assert sorted(run.completed) == sorted(reached), "each once, before the end"
        else:
            with run.expecting(reached):
                run.backward(mode, micro_batch, y, dy)
                assert sorted(run.completed) == sorted(reached), "each once, before the end"
        torch.testing.assert_close(mine.grad, theirs.grad, **EXACT)
        assert not run.pending(micro_batch)
        for name, p in run.model.named_parameters():
            assert name not in reached or torch.equal(run.at_completion[name], run.gradients[p])
    run.check(reference)


@pytest.mark.parametrize("mode", ["whole", "fused"])
def test_groups_are_reported_in_the_order_given(mode: str) -> None:
    """Whichever fills first; one that the graph doesn't reach in the end, and what comes after it then."""
    model = nn.ModuleList([linear(), linear(), linear()])
    run = Run(model)
    reports: list[str] = []
    run.on_report = reports.append
    last, first, unused = (list(layer.parameters()) for layer in (model[1], model[0], model[2]))

    def backward(*groups: str) -> list[str]:
        reports.clear()
        named = {"last": last, "first": first, "unused": unused}
        with run.sink.expecting({name: named[name] for name in groups}):
            run.backward(mode, 0, model[1](model[0](torch.ones(WIDTH))))
            inside = list(reports)
        assert reports == list(groups)
        return inside

    assert backward("last", "first") == ["last", "first"]
    assert backward("first", "last") == ["first", "last"]
    assert backward("last", "unused", "first") == ["last"]


def test_a_gradient_after_its_group_was_reported_is_an_error() -> None:
    run, y = Run(linear()), torch.ones(WIDTH)
    with run.expecting(["weight"]):
        run.backward("whole", 0, run.model(y))
        with pytest.raises(ExecutionError, match=r"\[6, 6\] got another gradient"):
            run.backward("whole", 0, run.model(y))


def accumulate(reference: nn.Module, inputs: list[Tensor]) -> None:
    for x in inputs:
        reference(x).square().sum().backward()


def test_places_queued_together_run_in_any_order() -> None:
    case = CASES["linear used twice"]
    run, inputs = Run(build(case)), [double_input(case) for _ in range(3)]
    for m, x in enumerate(inputs):
        run.backward("deferred", ("chunk", m), run.model(x))
    done: list[Tensor] = []
    for m in (1, 2, 0):
        run.sink.run_deferred(("chunk", m))
        done.append(inputs[m])
        reference = build(case)
        accumulate(reference, done)
        run.check(reference)
    run.sink.run_deferred(("chunk", 0))  # nothing left
    run.check(reference)


def test_a_completed_parameter_has_its_whole_gradient() -> None:
    case = CASES["tied embedding"]
    run, reference, ids = Run(build(case)), build(case), double_input(case)
    accumulate(reference, [ids])
    run.backward("deferred", 0, run.model(ids))
    assert not run.completed
    with run.expecting(run.names.values(), 0):
        run.sink.run_deferred(0)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(run.at_completion[name], p.grad, **EXACT)


def test_a_new_batch_drops_what_was_queued_and_touched() -> None:
    case = CASES["mlp"]
    run = Run(build(case))
    run.backward("deferred", 0, run.model(double_input(case)))
    run.backward("whole", 1, run.model(double_input(case)))
    run.sink.open()
    assert not run.pending(0)
    assert not run.touched()


def test_gradients_arrive_after_the_user_drops_them() -> None:
    case = CASES["whole layers between"]
    run, reference = Run(build(case)), build(case)
    inputs = [double_input(case) for _ in range(2)]
    for x in inputs:
        run.backward("whole", 0, run.model(x))
        run.model.zero_grad()
    accumulate(reference, inputs)
    run.check(reference)


def test_a_queue_keeps_only_inputs_and_output_gradients() -> None:
    model = nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(WIDTH), linear())
    run = Run(model)
    storages: dict[str, StorageWeakRef] = {}

    def watch(name: str, tensor: Tensor) -> None:
        storages[name] = StorageWeakRef(tensor.untyped_storage())

    def watch_output(name: str, module: nn.Module, inputs: tuple[Tensor], y: Tensor) -> None:
        watch(f"y{name}", y)
        y.register_hook(lambda dy: watch(f"dy{name}", dy))

    for name, layer in model.named_children():
        layer.register_forward_hook(partial(watch_output, name))

    def alive() -> set[str]:
        return {name for name, storage in storages.items() if not storage.expired()}

    x = torch.randn(2, 3, WIDTH)
    watch("x", x)
    run.backward("deferred", 0, run.model(x))
    del x
    assert alive() == {"x", "dy0", "y2", "dy3"}
    left: list[set[str]] = []
    order = [model[3].weight, model[3].bias, model[0].weight, model[0].bias]
    run.on_report = lambda _: left.append(alive())
    with run.sink.expecting({p: [p] for p in order}, 0):
        run.sink.run_deferred(0)
    assert left == [{"x", "dy0", "dy3"}, {"x", "dy0"}, {"dy0"}, set()], "3.weight, 3.bias, 0.weight, 0.bias"


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def test_every_product_runs_once() -> None:
    """A checkpointed block is recomputed in BACKWARD_INPUT alone, which makes no weight gradient."""
    run = Run(checkpointed(False))
    with Products() as forward:
        y = run.model(torch.randn(2, WIDTH))
    with Products() as backward_input:
        run.backward("deferred", 0, y)
    with Products() as backward_weight:
        run.sink.run_deferred(0)
    recomputed, input_gradients = 2, 3  # the model's input needs none
    assert (forward.count, backward_input.count, backward_weight.count) == (4, recomputed + input_gradients, 4)


@pytest.mark.parametrize("what", ["input", "gradient"])
def test_a_queued_tensor_modified_in_place_is_an_error(what: str) -> None:
    run = Run(linear())
    x, dy = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    run.backward("deferred", (1, 4), run.model(x), dy)
    (x if what == "input" else dy).add_(1)
    with pytest.raises(ExecutionError, match=r"\[6, 6\] was modified in place .* of \(1, 4\)"):
        run.sink.run_deferred((1, 4))


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_parameters_accumulate_in_fp32(mode: str) -> None:
    """Each micro-batch's product is rounded to bf16 once, as autograd rounds it; the sum over micro-batches is not.

    So the sum differs from the one product in fp32 over all samples by bf16's half unit, 2^-9, of each term at most.
    """
    torch.manual_seed(0)
    run = Run(nn.Linear(64, 32).bfloat16(), torch.float32)
    inputs, dys = torch.randn(8, 16, 64).bfloat16(), torch.randn(8, 16, 32).bfloat16()
    sums = {name: torch.zeros(p.shape) for name, p in run.model.named_parameters()}
    magnitude = torch.zeros(32, 64)
    for m, (x, dy) in enumerate(zip(inputs, dys, strict=True)):
        run.backward(mode, m, run.model(x), dy)
        run.sink.run_deferred(m)
        sums["weight"] += dy.t() @ x
        sums["bias"] += dy.sum(0)
        magnitude += (dy.t() @ x).abs()
    got = {run.names[p]: gradient for p, gradient in run.gradients.items()}
    direct = dys.flatten(0, 1).float().t() @ inputs.flatten(0, 1).float()
    assert torch.equal(got["weight"], sums["weight"])
    assert bool(((got["weight"] - direct).abs() <= magnitude * 2**-8 + 1e-5).all())
    torch.testing.assert_close(got["bias"], sums["bias"], rtol=2**-8, atol=2**-8 * 16)
    assert all(p.grad is None for p in run.names)


def test_accumulators_may_be_narrower_than_the_parameters() -> None:
    for mode in MODES:
        case = CASES["mlp"]
        run, reference, x = Run(build(case), torch.float32), build(case), double_input(case)
        run.backward(mode, 0, run.model(x))
        run.sink.run_deferred(0)
        accumulate(reference, [x])
        run.check(reference, rtol=1e-5, atol=1e-5)


def test_values_and_products_are_added() -> None:
    layer = linear().double()
    run = Run(layer, torch.float64)
    left, right = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    run.sink.add(layer.weight, Value(left.t() @ right))
    run.sink.add(layer.weight, Product(left, right))
    torch.testing.assert_close(run.gradients[layer.weight], 2 * left.t() @ right, **EXACT)
    assert run.touched() == {"weight"}
    assert not run.completed


@pytest.mark.parametrize("mode", ["whole", "fused"])
@pytest.mark.parametrize("name", ["mlp", "embedding"])
def test_gradients_are_multiplied_in_any_dtype(mode: str, name: str) -> None:
    for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, {"rtol": 1e-5, "atol": 1e-5})):
        case = CASES[name]
        run, reference, x = Run(build(case), dtype), build(case), double_input(case)
        with run.sink.scaling(0.375):
            for _ in range(2):
                run.backward(mode, 0, run.model(x))
        accumulate(reference, [x, x])
        for parameter in reference.parameters():
            parameter.grad *= 0.375
        run.check(reference, **tolerance)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_gradients(mode: str) -> None:
    """A penalty on the input's gradient: autograd.grad inside the backward adds to no accumulator."""

    def penalized(model: nn.Module, x: Tensor) -> Tensor:
        (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return model(x) + dx

    case = CASES["mlp"]
    run, reference, x = Run(build(case)), build(case), double_input(case)
    with run.sink.fusing():
        penalized(run.model, x)
    assert not run.touched()
    run.backward(mode, 0, penalized(run.model, x))
    run.sink.run_deferred(0)
    penalized(reference, x).square().sum().backward()
    run.check(reference)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("transient", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_backward_that_is_differentiable_itself(mode: str, transient: bool) -> None:
    case = CASES["whole layers between"]
    run, reference = Run(build(case), transient=transient), build(case)
    inputs = [double_input(case) for _ in range(2)]
    for x in inputs:
        run.backward(mode, 0, run.model(x), create_graph=True)
    assert not run.pending(0)
    assert not any(gradient.requires_grad for gradient in run.gradients.values())
    accumulate(reference, inputs)
    run.check(reference)


def test_autograd_grad_inside_a_deferring_backward_queues_nothing() -> None:
    case = CASES["mlp"]
    run, reference, x = Run(build(case)), build(case), double_input(case)
    with run.sink.deferring(0):
        mine = torch.autograd.grad(run.model(x).sum(), [x, *run.names])
        (dx,) = torch.autograd.grad(run.model(x).sum(), x)
    theirs = torch.autograd.grad(reference(x).sum(), [x, *reference.parameters()])
    torch.testing.assert_close([*mine, dx], [*theirs, theirs[0]], **EXACT)
    assert not run.pending(0)


def test_shapes_can_be_inferred_on_the_meta_device() -> None:
    run = Run(nn.Sequential(nn.Embedding(WORDS, WIDTH), linear()).to("meta"))
    y = run.model(torch.zeros(2, 3, dtype=torch.long, device="meta"))
    assert y.shape == (2, 3, WIDTH)
    run.backward("deferred", 0, y)


def test_forward_without_gradients_saves_nothing() -> None:
    case = CASES["mlp"]
    run, reference, x = Run(build(case)), build(case), double_input(case)
    for context in torch.no_grad(), torch.inference_mode():
        with context:
            y = run.model(x)
            assert torch.equal(y, reference(x))
            assert y.grad_fn is None


def test_torch_func_sees_an_ordinary_layer() -> None:
    case = CASES["mlp"]
    run, reference, x = Run(build(case)), build(case), double_input(case).detach()

    def loss(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    for transform in torch.func.grad, lambda f: torch.vmap(torch.func.grad(f), in_dims=(None, 0)):
        mine = transform(partial(loss, run.model))(dict(run.model.named_parameters()), x)
        theirs = transform(partial(loss, reference))(dict(reference.named_parameters()), x)
        torch.testing.assert_close(mine, theirs, **EXACT)
    torch.testing.assert_close(torch.vmap(run.model)(x), reference(x), **EXACT)


def test_a_copy_of_a_layer_is_an_ordinary_layer_of_its_own() -> None:
    run = Run(nn.Sequential(linear(), linear()))
    for other in copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model)):
        with torch.no_grad():
            other[0].weight.zero_()
        x = torch.randn(2, WIDTH)
        torch.testing.assert_close(other(x), other[1](other[0].bias.expand(2, -1)))
        run.backward("deferred", 0, other(x))
        assert other[0].weight.grad is not None
        assert not run.pending(0)
        assert not run.touched()


def test_another_sink_takes_over() -> None:
    case = CASES["mlp"]
    first = Run(build(case))
    second, reference, x = Run(first.model), build(case), double_input(case)
    make_splittable(second.model, second.sink)  # idempotent
    second.backward("deferred", 0, second.model(x))
    assert second.pending(0) == expand(second.model, case.deferred)
    second.sink.run_deferred(0)
    second.backward("whole", 0, second.model(x))
    accumulate(reference, [x, x])
    second.check(reference)
    assert not first.touched()
    assert not first.completed
    assert not any(gradient.any() for gradient in first.gradients.values())
    second.sink.open()
    with pytest.raises(ExecutionError, match=r"such as of shape \[.*, are another one's that was made later"):
        first.sink.open()


def test_a_forward_of_the_users_own_stays() -> None:
    layer = linear()
    layer.forward = lambda x: 2 * x
    assert torch.equal(Run(layer).model(torch.ones(3)), torch.full((3,), 2.0))


def test_layers_and_sinks_are_garbage_once_dropped() -> None:
    run = Run(nn.Sequential(linear(), nn.LayerNorm(WIDTH), nn.Embedding(WORDS, WIDTH)))
    run.backward("deferred", 0, run.model[1](run.model[0](torch.ones(WIDTH))))
    references = [weakref.ref(run.sink), weakref.ref(run.model), *map(weakref.ref, run.names)]
    del run
    gc.collect()
    assert [r() for r in references] == [None] * len(references)


def test_gradients_leave_a_graph_as_the_backward_asks_for_them() -> None:
    """By autograd.grad, by a user's hook, and after a layer was frozen; what one backward left is not in the next."""
    torch.compiler.reset()
    run, x = Run(nn.Sequential(linear(), nn.GELU(), linear()).double()), torch.randn(2, WIDTH).double()
    plain = copy.deepcopy(run.model)
    run.model.compile(backend="aot_eager", fullgraph=True)
    for model in (run.model, plain):
        model[2].weight.register_hook(lambda gradient: 2 * gradient)

    def check_grad(*wanted: str) -> None:
        found, expected = (
            torch.autograd.grad(model(x).square().sum(), [model.get_parameter(name) for name in wanted])
            for model in (run.model, plain)
        )
        for gradient, other in zip(found, expected, strict=True):
            assert torch.equal(gradient, other)

    check_grad("0.weight")
    check_grad("2.bias", "0.bias")
    run.backward("fused", 0, run.model(x))
    plain(x).square().sum().backward()
    run.check(plain)
    frozen(run.model[0])
    frozen(plain[0])
    run.backward("deferred", 0, run.model(x))
    assert run.pending(0) == {"2.bias"}, "the hook sees the weight's gradient at once"
    run.sink.run_deferred(0)
    plain(x).square().sum().backward()
    run.check(plain)


def test_layers_of_a_kind_share_one_graph() -> None:
    """Else torch.compile would compile eight of them, and run the rest as they are."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    run = Run(nn.Sequential(*(Apply(lambda layer, x: layer.inner(x).relu(), inner=linear()) for _ in range(3))))
    for layer in run.model:
        layer.compile(backend=backend, fullgraph=True)
    run.model(torch.ones(2, WIDTH, requires_grad=True))
    assert len(graphs) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["fused", "deferred"])
@pytest.mark.parametrize("transient", [False, True])
def test_half_products_on_cuda_are_not_rounded(mode: str, transient: bool, dtype: torch.dtype) -> None:
    run = Run(nn.Linear(256, 128).to("cuda", dtype), torch.float32, transient)
    inputs, dys = (torch.randn(4, 3, 512, n, device="cuda").to(dtype) for n in (256, 128))
    for m in range(4):
        run.backward(mode, m, run.model(inputs[m]), dys[m])
    for m in range(4):
        run.sink.run_deferred(m)
    rows = dys.flatten(0, -2).double()
    expected = {"weight": rows.t() @ inputs.flatten(0, -2).double(), "bias": rows.sum(0)}
    for p, gradient in run.gradients.items():
        error = (gradient - expected[run.names[p]]).norm() / expected[run.names[p]].norm()
        assert error < 1e-5
