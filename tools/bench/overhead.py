"""Host time per instruction of executor, messages and reducer, on the CPU: one rank of a pipeline whose others are a fake.

python tools/bench/overhead.py --steps 1000

The rank runs its list of a real program by the real Executor, Messages and GradientReducer, over a transport that takes every
message and delivers every receipt at once. Its layers are linears of 8 features; what they take, forward and backward, is
measured by calling them alone in the same order, and subtracted. Times are the CPU time of the thread, so that what else
the machine does counts less. Not in it: what gloo or NCCL take to post a message.

Then the host time of a gather of a unit of ZeRO-3, the wait for it and its release: a block of 9 parameters, on the GPU if
there is one. Its group has one rank, so that a copy stands in for the collective.

Last, what decoder blocks of 16 features take forward and backward beside plain ones: with recomputation, by the block and
without the repeated forward itself; with tensor and with sequence parallelism of two ranks, of which the other is a fake, by
the collective and with torch's own call.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel3d.activity import Activity
from parallel3d.autograd.recomputation import Checkpointer
from parallel3d.autograd.split_backward import make_splittable
from parallel3d.comm.collectives import Group
from parallel3d.comm.structures import describe
from parallel3d.comm.transport import Incoming
from parallel3d.config import RecomputationPolicy
from parallel3d.models.blocks import Block
from parallel3d.models.config import DecoderConfig
from parallel3d.models.layers import Stream, open_stream
from parallel3d.models.tables import Tables
from parallel3d.optim.precision import Precision
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.executor import Batch, Executor, no_record
from parallel3d.pipe.messages import Messages
from parallel3d.schedule.builders import build
from parallel3d.schedule.instructions import Op, Program
from parallel3d.schedule.lowering import add_gradient_reduction, lower
from parallel3d.specs import BuildContext
from parallel3d.zero.policy import ZeroPolicy
from parallel3d.zero.reducer import GradientReducer
from parallel3d.zero.weights import ShardedWeights, Units

FEATURES = 8
BLOCKS, TOKENS = 8, 4
# (schedule, stages, chunks a stage, rank): ends and middles of pipelines, whole and split backwards.
SETTINGS = (("1f1b", 4, 1, 1), ("interleaved", 4, 2, 0), ("interleaved", 4, 2, 3), ("zb-h1", 4, 1, 2))


@dataclass
class Here:
    """A received tensor (parallel3d.comm.transport.Incoming)."""

    tensor: Tensor

    def wait(self) -> Tensor:
        """Return the tensor."""
        return self.tensor

    def is_completed(self) -> bool:
        """Return True."""
        return True


class Prompt:
    """A transport on which every message arrives at once (parallel3d.comm.transport.Transport)."""

    def __init__(self, header: Any):
        self._header = header

    def send(self, tensors: Sequence[Tensor], stage: int) -> None:
        """Drop the tensors."""

    def receive(self, buffers: Sequence[Tensor], stage: int) -> Sequence[Incoming]:
        """Return the buffers at once, with any contents."""
        return list(map(Here, buffers))

    def send_header(self, header: Any, stage: int) -> None:
        """Drop the header."""

    def receive_header(self, stage: int) -> Any:
        """Return the one header: every chunk's output has the same structure."""
        return self._header.skeleton

    def use_host(self, use: bool) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing: every message has been sent."""


class Stage:
    """The part of a PipelineModule that the executor needs: a linear for each chunk of this rank, and a loss."""

    def __init__(self, placement: Sequence[int], rank: int):
        self.placement, self.stage_id = tuple(placement), rank
        self.device = torch.device("cpu")
        self.groups = SimpleNamespace(rank=rank, activity=Activity())
        own = [c for c, stage in enumerate(placement) if stage == rank]
        self.layers = {c: nn.Linear(FEATURES, FEATURES, bias=False) for c in own}

    def forward_chunk(self, chunk: int, inputs: Tensor, _: object) -> Tensor:
        """Run the chunk's only layer."""
        return self.layers[chunk](inputs)

    def loss_fn(self, output: Tensor, _: Tensor) -> Tensor:
        """Return the sum."""
        return output.sum()

    def infos(self) -> list[ParameterInfo]:
        """Return the parameters' descriptions."""
        return [ParameterInfo(f"layers.{c}.weight", layer.weight, (c,)) for c, layer in self.layers.items()]


class Rank:
    """One rank of a pipeline, the others of which are prompt; `step` runs a batch, `layers_alone` only what layers do in it."""

    def __init__(self, schedule: str, num_stages: int, num_chunks: int, rank: int, num_micro_batches: int):
        program = build(schedule, num_stages, num_micro_batches, num_chunks, "loop")
        self.stage = Stage(program.placement, rank)
        self.reducer = GradientReducer(self.stage.infos(), ZeroPolicy(0, 1 << 30), rank, Group((rank,), None), {})
        buckets = [1] * program.num_chunks
        self.program: Program = add_gradient_reduction(lower(program), buckets)
        self.instructions = [i for i in self.program.instructions[rank] if i.op is not Op.REDUCE_GRADS]
        if any(i.op is Op.BACKWARD_WEIGHT for i in self.instructions):
            for layer in self.stage.layers.values():
                make_splittable(layer, self.reducer.sink)
        self.sample = torch.ones(1, FEATURES)
        output = torch.ones(1, FEATURES, requires_grad=True)
        self.messages = Messages(Prompt(describe(output)[0]), self.stage.device, dynamic=False)
        stage: Any = self.stage
        self.executor = Executor(stage, self.messages, self.reducer, lambda chunk: None, Precision())
        self.alone = Stage(program.placement, rank)

    def step(self) -> None:
        """Run a batch as the engine does, without the optimizer."""
        count = self.program.num_micro_batches
        batch = Batch([(self.sample, self.sample)] * count, [7] * count, training=True)
        self.reducer.start_step()
        self.executor.run(self.program, (), batch, no_record, no_record)
        self.reducer.finish_step()

    def layers_alone(self) -> None:
        """Run the same forwards and backwards by plain PyTorch."""
        last = len(self.alone.placement) - 1
        outputs: dict[tuple[int, int], Tensor] = {}
        for i in self.instructions:
            if i.op is Op.FORWARD:
                output = self.alone.forward_chunk(i.chunk, self.sample.detach().requires_grad_(i.chunk > 0), None)
                outputs[i.chunk, i.micro_batch] = output.sum() if i.chunk == last else output
            elif i.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                output = outputs.pop((i.chunk, i.micro_batch))
                torch.autograd.backward(output, torch.ones_like(output))


@dataclass(frozen=True)
class Overhead:
    """Microseconds of host time per instruction; first, last: medians of the first and the last tenth of the steps."""

    schedule: str
    rank: int
    instructions: int
    median_us: float
    first_us: float
    last_us: float
    layers_us: float


def measure(setting: tuple[str, int, int, int], num_micro_batches: int, steps: int) -> Overhead:
    """Median over steps; each step's layers alone are timed right behind it, so that both see the same machine."""
    rank = Rank(*setting, num_micro_batches)
    for _ in range(3):
        rank.step(), rank.layers_alone()
    count = len(rank.instructions)
    pairs = [(_microseconds(rank.step) / count, _microseconds(rank.layers_alone) / count) for _ in range(steps)]
    own = [whole - layers for whole, layers in pairs]
    tenth = max(1, steps // 10)
    medians = [median(values) for values in (own, own[:tenth], own[-tenth:], [layers for _, layers in pairs])]
    return Overhead(setting[0], setting[3], count, *(round(us, 2) for us in medians))


def measure_gather(steps: int) -> float:
    """Return the median of the microseconds of host time that a gather, the wait for it and its release take."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [(FEATURES, FEATURES)] * 7 + [(FEATURES,)] * 2
    whole = torch.randn(sum(map(prod, shapes)), device=device)
    views = [part.view(shape) for part, shape in zip(whole.split([*map(prod, shapes)]), shapes, strict=True)]
    parameters = [nn.Parameter(view) for view in views]
    units = Units({0: [ShardedWeights(whole, whole.clone(), parameters, views, Group((0,), None))]})

    def gather() -> None:
        units.gather(0)
        units.use((0,))
        units.release(0)

    for _ in range(10):
        gather()
    return round(median(_microseconds(gather) for _ in range(steps)), 2)


class Blocks:
    """Decoder blocks that run one after the other. run: calls a block, of (block, its input)."""

    def __init__(
        self,
        run: Callable[..., Any] = lambda block, x: block(x),
        group: Group | None = None,
        shards_sequence: bool = False,
    ):
        groups: Any = SimpleNamespace(model=group or Group((0,), None))
        context = BuildContext(groups, torch.device("cpu"), shards_sequence)
        config = DecoderConfig(vocab_size=16, hidden_size=16, ffn_size=16, num_layers=1, num_heads=2)
        self._blocks = [Block(config, 0, Tables(config), context=context) for _ in range(BLOCKS)]
        self._x = torch.ones(1, TOKENS // groups.model.size if shards_sequence else TOKENS, 16, requires_grad=True)
        self._length, self._run = TOKENS if shards_sequence else None, run

    def forward(self) -> Tensor:
        """Run all blocks."""
        x: Any = Stream(self._x, length=self._length) if self._length else self._x
        for block in self._blocks:
            x = self._run(block, x)
        return open_stream(x).hidden

    def train(self) -> None:
        """Run all blocks forward and backward."""
        self.forward().sum().backward()


def measure_blocks(steps: int) -> dict[str, float]:
    """Return microseconds of host time: of recomputing a block by each policy, and of a collective of each parallelism.

    A block takes four all-reduces, or ten collectives over shards of the sequence.
    """
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    pair, plain = Group((0, 1), dist.group.WORLD), Blocks()
    policies: Sequence[RecomputationPolicy] = ("full", "cheap", "attention")
    cases = {f"recomputed_{p}_us": (Blocks(Checkpointer().under(p, restores=False)), 1) for p in policies}
    cases |= {"all_reduce_us": (Blocks(group=pair), 4), "sequence_us": (Blocks(group=pair, shards_sequence=True), 10)}
    own: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(steps):
        forward, whole = _microseconds(plain.forward), _microseconds(plain.train)
        for name, (blocks, number) in cases.items():
            beside = whole + forward * name.startswith("recomputed")
            own[name].append((_microseconds(blocks.train) - beside) / BLOCKS / number)
    return {name: round(median(values), 1) for name, values in own.items()}


def _microseconds(function: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start) / 1e3


def main() -> None:
    """Measure every setting and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--micro_batches", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for setting in SETTINGS:
        print(json.dumps(asdict(measure(setting, args.micro_batches, args.steps))), flush=True)
    print(json.dumps({"gather_us": measure_gather(args.steps)}), flush=True)
    print(json.dumps(measure_blocks(args.steps)), flush=True)


if __name__ == "__main__":
    main()
