"""Instructions captured as CUDA graphs: the bits that they compute without, in the same memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import toy
from gpu_memory import release_memory
from graphed_runs import check, train, train_plain, train_sliced
from layouts import make_engine
from ranks import RankPool
from reference import Item
from torch import Tensor, nn

import parallel3d
from parallel3d.errors import ExecutionError
from parallel3d.kernels.graph_memsets import clear_by_kernels
from parallel3d.models import DecoderConfig, causal_lm_loss, decoder
from parallel3d.pipe import PipelineModule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BF16 = {"bf16": {"enabled": True}}
FP8 = {**BF16, "fp8": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 1, "hysteresis": 1}}
CHEAP, FULL = ({"activation_checkpointing": {"policy": policy}} for policy in ("cheap", "full"))
GRAPHS = {"compile": {"cuda_graphs": True}}
ACCUMULATION = 4


@pytest.fixture(autouse=True)
def own_memory() -> Iterator[None]:
    """Each test begins on the default stream, with no memory reserved."""
    before = torch.cuda.current_stream()
    yield
    torch.cuda.set_stream(before)
    release_memory()


@pytest.mark.parametrize(
    ("schedule", "tied", "config"),
    [("1f1b", False, {**BF16, **FULL}), ("1f1b", True, CHEAP), ("zb-h1", False, FP8), ("zb-h1", True, FP16)],
)
def test_graphs_train_bitwise_as_without_on_one_gpu(schedule: str, tied: bool, config: dict[str, Any]):
    runs = [train(1, {"schedule": schedule}, tied, {**config, **changes}) for changes in (GRAPHS, {})]
    check([runs[0]], [runs[1]])


@pytest.mark.parametrize(
    ("pp", "pipeline", "config"),
    [
        (2, {"schedule": "zb-h1"}, BF16),
        (2, {"schedule": "zbv", "num_chunks": 2, "placement": "v"}, BF16),
        (1, {}, {**BF16, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1500}}),
    ],
)
def test_graphs_train_bitwise_as_without_on_two_gpus(
    gpu_pool: RankPool, pp: int, pipeline: dict[str, Any], config: dict[str, Any]
):
    graphed, plain = (gpu_pool.run(2, train, pp, pipeline, False, {**config, **c}) for c in (GRAPHS, {}))
    check(graphed, plain)


def check_sliced(gpu_pool: RankPool, sequence_parallel: bool, schedule: str, config: dict[str, Any]) -> None:
    compiled = config.get("compile", {})
    graphed, plain = (
        gpu_pool.run(
            2,
            train_sliced,
            sequence_parallel,
            {"schedule": schedule},
            {**config, "compile": {**compiled, **c}},
            timeout=400,
        )
        for c in (GRAPHS["compile"], {})
    )
    check(graphed, plain)


@pytest.mark.parametrize(
    ("sequence_parallel", "schedule", "config"),
    [
        (True, "zb-h1", BF16),
        (False, "1f1b", {**FP16, **FULL}),
        (True, "1f1b", {**FP8, **CHEAP}),
        (True, "zb-h1", {**BF16, "compile": {"enabled": True}}),
    ],
    ids=["sequence_parallel", "fp16", "fp8", "compiled"],
)
def test_graphs_hold_the_collectives_of_tensor_slices(
    gpu_pool: RankPool, sequence_parallel: bool, schedule: str, config: dict[str, Any]
):
    check_sliced(gpu_pool, sequence_parallel, schedule, config)


@pytest.mark.usefixtures("compiled_kernels")
def test_graphs_hold_the_kernel_that_sums_over_tensor_slices(gpu_pool: RankPool):
    check_sliced(gpu_pool, False, "1f1b", {**BF16, "kernels": {"all_reduce": True}})


DECODER = DecoderConfig(
    vocab_size=512,
    hidden_size=1024,  # so large that gaps in the allocator's segments of 20 MiB are few of its bytes
    ffn_size=2816,
    num_layers=6,
    num_heads=8,
    max_positions=1024,
    residual_dropout=0.1,
)


def train_decoder(schedule: str, given: dict[str, Any], **compiled: Any) -> tuple[list[Tensor], int]:
    """Losses, norms and weights after seven steps, on the host, and the most bytes reserved, without those of before."""
    release_memory()
    before = torch.cuda.memory_reserved()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "fused": True}},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "pipeline": {"schedule": schedule},
        "attention": {"backend": "math"},  # whose backward is deterministic
        "compile": compiled,
        **given,
    }
    model = PipelineModule(decoder(DECODER), num_stages=1, loss_fn=causal_lm_loss, seed_layers=True, config=config)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(512, (7 * engine.gradient_accumulation_steps(), 1, 1024), generator=generator)
    data, results = iter([(x, x) for x in ids]), []
    for _ in range(7):
        results += [engine.train_batch(data), engine.get_global_grad_norm()]
    results += [p.detach() for p in model.parameters()]
    return [torch.as_tensor(result).cpu() for result in results], torch.cuda.max_memory_reserved() - before


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("precision", [BF16, FP8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("compiled", "policy"),
    [(False, "none"), (True, "none"), (True, "cheap"), (True, "attention")],
    ids=["eager", "compiled", "cheap", "attention"],
)
def test_graphs_of_a_decoder(schedule: str, precision: dict[str, Any], compiled: bool, policy: str):
    """With fused products into fp32, dropout, and compiled the operators of in_graph.py."""
    config = {**precision, "activation_checkpointing": {"policy": policy}}
    plain, reserved = train_decoder(schedule, config, enabled=compiled)
    graphed, graphed_reserved = train_decoder(schedule, config, enabled=compiled, cuda_graphs=True)
    for got, wanted in zip(graphed, plain, strict=True):
        assert torch.equal(got, wanted)
    assert graphed_reserved <= 1.1 * reserved + 2**26, "CUDA graphs reserve more memory"


def test_graphs_of_more_micro_batches_take_no_more_memory():
    """What enters and leaves a chunk is kept for those in flight alone."""
    pipeline = {"schedule": "interleaved", "num_chunks": 2}
    config = {**BF16, "gradient_accumulation_steps": 96, "pipeline": pipeline}
    plain, reserved = train_decoder("interleaved", config)
    graphed, graphed_reserved = train_decoder("interleaved", config, cuda_graphs=True)
    assert all(map(torch.equal, graphed, plain))
    assert graphed_reserved <= 1.1 * reserved + 2**26, "CUDA graphs reserve more memory"


def test_kernels_that_are_started_from_cpp_are_the_same():
    """With weight gradients that are deferred. Not in fp8, where inductor fuses other operators."""
    wrappers: tuple[dict[str, bool], ...] = {}, {"cpp_wrapper": True}
    (wanted, _), (got, _) = (train_decoder("zb-h1", BF16, enabled=True, options=options) for options in wrappers)
    assert all(map(torch.equal, got, wanted))


def test_recomputed_blocks_of_a_plain_module_are_captured_unless_they_draw():
    graphed, plain = (train_plain(0.0, compiled) for compiled in (GRAPHS, {}))
    assert all(map(torch.equal, graphed, plain))
    with pytest.raises(ExecutionError, match=r"it can't be captured as a CUDA graph: |drawn again in a recomputation"):
        train_plain(0.1, GRAPHS)
    torch.ones(1, device="cuda").item()  # the device still works


class Reading(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.sum().item()


class Drawing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(torch.rand(()))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            Reading,
            r"F0@0: .*can't be captured as a CUDA graph: .*in layer 1 \(Reading\); set compile.cuda_graphs to false",
        ),
        (Drawing, "a layer draws random numbers on the host, which a graph would repeat"),
    ],
)
def test_a_layer_that_cannot_be_captured_is_named(make: Callable[..., nn.Module], message: str):
    items = [Item(nn.Linear, (8, 8)), Item(make, (8, 8))]
    engine = make_engine(items, nn.functional.mse_loss, **GRAPHS)
    batch = torch.ones(toy.SAMPLES, 8), torch.zeros(toy.SAMPLES, 8)
    for _ in range(2):
        engine.train_batch(iter([batch]))
    with pytest.raises(ExecutionError, match=message):
        engine.train_batch(iter([batch]))
    torch.ones(1, device="cuda").item()  # the device still works


def test_kernels_in_place_of_memsets_write_the_same_and_keep_the_order():
    cuda, size, stream = ctypes.CDLL("libcuda.so.1"), 1000, torch.cuda.Stream()
    memory = torch.zeros(8, size, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        memory.add_(7)
        # Where and what, in bytes from the beginning of a row: 32, 16 and 8 bits; an odd number of bytes; a part of each line.
        rows = [ctypes.c_void_p(row.data_ptr()) for row in memory]
        queue, number = ctypes.c_void_p(stream.cuda_stream), ctypes.c_size_t
        status = [
            cuda.cuMemsetD32Async(rows[0], 0x01020304, number(size), queue),
            cuda.cuMemsetD32Async(rows[1], 5, number(1), queue),
            cuda.cuMemsetD16Async(rows[2], ctypes.c_ushort(0x0506), number(2 * size), queue),
            cuda.cuMemsetD8Async(rows[3], ctypes.c_ubyte(9), number(4 * size - 4), queue),
            cuda.cuMemsetD8Async(rows[4], ctypes.c_ubyte(9), number(3), queue),
            cuda.cuMemsetD2D32Async(rows[5], number(4 * size), 11, number(10), number(2), queue),
        ]
        doubled = memory * 2
        graph.capture_end()
    assert status == [0] * len(status)

    replaced = clear_by_kernels(graph, memory.device)
    graph.instantiate()

    assert replaced == 4
    for run in (1, 2):
        memory.fill_(run)
        graph.replay()
        torch.cuda.synchronize()
        expected = torch.full((8, size), run + 7, dtype=torch.int32)
        expected[0], expected[1, 0], expected[2] = 0x01020304, 5, 0x05060506
        expected[3, :-1], expected[5, :10], expected[6, :10] = 0x09090909, 11, 11
        expected[4, 0] = 0x00090909  # its last byte stays: the sum is below 256
        torch.testing.assert_close(memory.cpu(), expected, rtol=0, atol=0)
        torch.testing.assert_close(doubled.cpu(), expected * 2, rtol=0, atol=0)
