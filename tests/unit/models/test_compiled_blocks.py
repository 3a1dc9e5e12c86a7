"""A compiled block is one graph, computes what a plain one does, and leaves its weight gradients to the sink."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from parallel3d.autograd.first_shapes import FirstShapes
from parallel3d.autograd.selective import recomputed_in_graph
from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import make_splittable, open_ports
from parallel3d.engine.compile import torch_options
from parallel3d.models import DecoderConfig
from parallel3d.models.blocks import Block
from parallel3d.models.tables import Tables

SIZES = {"vocab_size": 8, "hidden_size": 16, "ffn_size": 24, "num_layers": 1, "num_heads": 4}
OPTIONS = {
    "llama": {},
    "grouped queries, window, gelu": {"num_kv_heads": 2, "windows": (3,), "activation": "gelu_tanh"},
    "layer norm, biases, ungated": {
        "norm": "layer",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "activation": "relu",
        "gated": False,
    },
}


def make_block(options: dict[str, Any]) -> Block:
    torch.manual_seed(0)
    config = DecoderConfig(**SIZES, **options)
    return Block(config, 0, Tables(config))


def train(block: nn.Module, mode: str = "deferred") -> list[Tensor]:
    """The output of a forward and all gradients of its backward."""
    sink = GradientSink()
    make_splittable(block, sink)
    open_ports(block, sink)
    totals = {p: torch.zeros_like(p) for p in block.parameters()}
    for parameter, total in totals.items():
        sink.attach(parameter, total)
    sink.open()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(next(iter(totals))).requires_grad_()
    y = block(x)
    contexts = {"whole": nullcontext, "fused": sink.fusing, "deferred": partial(sink.deferring, "here")}
    context: AbstractContextManager[None] = contexts[mode]()
    with context:
        y.sin().sum().backward()
    linears = {p for p in totals if p.dim() == 2}
    assert sink.pending("here") >= (linears if mode == "deferred" else set())
    sink.run_deferred("here")
    assert x.grad is not None
    return [y.detach(), x.grad, *totals.values()]


def test_gradients_of_a_compiled_block_are_complete_before_the_backward_of_the_block_below():
    """In every micro-batch: its bucket can be reduced while the blocks below run, and needs memory no longer."""
    torch.compiler.reset()
    events: list[Any] = []
    sink = GradientSink(events.append)
    blocks = nn.ModuleList(make_block({}) for _ in range(3))
    make_splittable(blocks, sink)
    for parameter in blocks.parameters():
        sink.attach(parameter, torch.zeros_like(parameter))
    open_ports(blocks, sink)
    for block in blocks:
        block.compile(**torch_options({"backend": "aot_eager"}), fullgraph=True)
    sink.open()
    for _ in range(2):
        x = torch.randn(2, 5, 16)
        for k, block in enumerate(blocks):
            x = block(x)
            x.register_hook(lambda _, k=k: events.append(("backward", k)))
        with sink.expecting({k: list(blocks[k].parameters()) for k in (2, 1, 0)}), sink.fusing():
            x.sum().backward()
        assert events == [("backward", 2), 2, ("backward", 1), 1, ("backward", 0), 0]
        events.clear()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Making inductor's kernels takes a minute."""
    if "backend" in metafunc.fixturenames:
        full = metafunc.config.getoption("full")
        metafunc.parametrize("backend", ["aot_eager", "inductor", "cpp_wrapper"] if full else ["aot_eager"])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_compiled_block_breaks_no_graph_and_equals_a_plain_one(options: dict[str, Any], backend: str):
    """Bitwise, but for the order of inductor's sums. It must leave the tensors of deferred gradients alone."""
    torch.compiler.reset()
    exact = backend == "aot_eager"
    plain, compiled = (make_block(options).to(torch.float32 if exact else torch.float64) for _ in range(2))
    chosen: dict[str, Any] = (
        {"backend": "inductor", "options": {"cpp_wrapper": True}} if backend == "cpp_wrapper" else {"backend": backend}
    )
    compiled.compile(**torch_options(chosen), fullgraph=True)
    for mode in ("deferred", "fused", "whole"):
        for got, wanted in zip(train(compiled, mode), train(plain, mode), strict=True):
            tolerance = 0 if exact else 1e-12
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_tensor_parallel_ranks_do_not_choose_kernels_by_times_unless_a_mode_asks_for_it():
    chosen = {mode: torch_options({"backend": "inductor", "mode": mode}, True) for mode in ("default", "max-autotune")}
    assert chosen["default"]["options"]["deterministic"]
    assert "deterministic" not in chosen["max-autotune"]["options"]
    assert "deterministic" not in torch_options({"backend": "inductor"})["options"]


def test_a_pass_that_a_script_has_set_for_inductors_graphs_stays():
    def own(graph: torch.fx.Graph) -> None:
        """Change nothing."""

    with torch._inductor.config.patch(post_grad_custom_post_pass=own):
        assert torch_options({"backend": "inductor"})["options"]["post_grad_custom_post_pass"] is own
    assert torch_options({"backend": "inductor"})["options"]["post_grad_custom_post_pass"] is not own


class PlainBlock(nn.Module):
    """Linears of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


RECOMPUTED = {"around": partial(recomputed_in_graph, policy="cheap")}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (partial(make_block, {"residual_dropout": 0.1}), {}),
        (partial(make_block, {"residual_dropout": 0.1}), RECOMPUTED),
        (PlainBlock, {}),
    ],
    ids=["ours", "recomputed", "plain"],
)
def test_blocks_share_their_graph(make: Callable[[], nn.Module], options: dict[str, Any]):
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for _ in range(3):
        block = make()
        block.compile(backend="aot_eager", fullgraph=True, **options)
        train(block)
    assert counters["stats"]["unique_graphs"] == 1


class Counted:
    """Backend that counts its graphs and how often they run. static: whether no graph has a size as an input."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0
        self.static = True

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        self.static &= all(isinstance(example, Tensor) for example in examples)

        def run(*inputs: Any) -> Any:
            self.runs += 1
            return graph(*inputs)

        return run


class AnyKind(nn.Module):
    """Layers of many kinds in one class, as Hugging Face's layers are in their wrapper."""

    def __init__(self, size: int, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(size, size), activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.activation(self.linear(x))


@pytest.mark.parametrize("options", [{}, RECOMPUTED], ids=["none", "cheap"])
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_kinds_of_layers_than_torchs_limit_are_all_compiled(options: dict[str, Any]):
    """Each for its own sizes; torch by itself compiles as many graphs of a class, and runs all further layers of it eagerly."""
    torch.compiler.reset()
    backend, kinds = Counted(), [nn.ReLU, nn.GELU, nn.SiLU]
    assert len(kinds) > torch._dynamo.config.recompile_limit
    layers = [(size, AnyKind(size, kind())) for size, kind in enumerate(kinds, start=2) for _ in range(2)]
    for size, layer in layers:
        layer._compiled_call_impl = FirstShapes(layer._call_impl, "layer", backend=backend, **options)
        x = torch.randn(3, size, requires_grad=True)
        for _ in range(2):
            layer(x).sum().backward()
        with torch.no_grad():
            layer(x)
    assert backend.graphs == 2 * len(kinds)  # in training and without gradients
    assert backend.runs >= 3 * len(layers)
    assert backend.static


def saved(layer: Callable[[Tensor], Tensor], x: Tensor, parameters: Iterable[Tensor]) -> int:
    """Elements for each position that a compiled layer saves for its backward, its input too."""
    output = layer(x)  # PyTorch 2.11 frees what it saves with it
    node: Any = output.grad_fn
    while "Compiled" not in type(node).__name__:
        node = node.next_functions[0][0]
    activations = [t for t in node.saved_tensors if t.dim() > 2 or (t.dim() == 2 and len(t) == x.shape[:-1].numel())]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in activations}
    own = {parameter.untyped_storage()._cdata for parameter in parameters}
    return sum(nbytes for key, nbytes in storages.items() if key not in own) // (x.nbytes // x.shape[-1])


def test_the_graph_of_a_selective_policy_saves_what_a_region_keeps():
    """And its gradients are bitwise those of a plain block with the same masks."""
    torch.compiler.reset()
    hidden, ffn = SIZES["hidden_size"], SIZES["ffn_size"]
    plain = make_block({"residual_dropout": 0.1})
    torch.manual_seed(1)
    wanted = train(plain)
    # Input, queries, keys, values, output projection, gate and up, masks of a byte; with the attention, its
    # output and a logarithm for each head.
    products = 5 * hidden + 2 * ffn + 2 * hidden // 4
    for policy, elements in (("cheap", products + hidden + SIZES["num_heads"]), ("attention", products)):
        block = make_block({"residual_dropout": 0.1})
        around = partial(recomputed_in_graph, policy=policy)
        block.compile(around=around, backend="aot_eager", fullgraph=True)
        torch.manual_seed(1)
        for got, value in zip(train(block), wanted, strict=True):
            torch.testing.assert_close(got, value, rtol=0, atol=0)
        assert saved(block, torch.randn(2, 5, hidden).requires_grad_(), block.parameters()) == elements


def test_a_graph_that_changes_a_kept_result_in_place_computes_its_gradient():
    torch.compiler.reset()
    linear, x = nn.Linear(16, 16), torch.randn(2, 5, 16)

    def layer(x: Tensor) -> Tensor:
        return (linear(x).mul_(2).sigmoid() - 0.5).relu_()

    compiled = torch.compile(recomputed_in_graph(layer, "cheap"), backend="aot_eager", fullgraph=True)
    found = []
    for run in (layer, compiled):
        given = x.clone().requires_grad_()
        run(given).square().sum().backward()
        found.append([given.grad, linear.weight.grad])
        linear.weight.grad = None
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_a_linear_that_is_applied_twice_sums_its_gradients_for_autograd():
    """Where no sink takes them."""
    torch.compiler.reset()
    linear, x = nn.Linear(16, 16), torch.randn(2, 5, 16)
    twice = linear(linear(x).tanh())
    wanted = torch.autograd.grad(twice.square().sum(), [linear.weight, linear.bias])
    layer = nn.Sequential(linear, nn.Tanh(), linear)
    sink = GradientSink()
    make_splittable(layer, sink)
    open_ports(layer, sink)
    layer.compile(backend="aot_eager", fullgraph=True)
    layer(x).square().sum().backward()
    torch.testing.assert_close([linear.weight.grad, linear.bias.grad], list(wanted))


def test_a_copy_of_a_compiled_block_is_a_plain_one():
    torch.compiler.reset()
    block = make_block({})
    wanted = train(block)

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a copy is compiled")

    block.compile(backend=refuse)
    for got, value in zip(train(copy.deepcopy(block)), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=0, atol=0)
