"""Plans such as `p3d plan` finds, with a real program's timeline, to test the report with."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from parallel3d.planner.search.result import (
    LinkLoad,
    PlanResult,
    Prediction,
    RankPlace,
    Rejected,
    StageMemory,
)
from parallel3d.schedule.builders import build
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program
from parallel3d.schedule.lowering import add_gradient_reduction, add_parameter_gather, lower
from parallel3d.schedule.timing import Span, simulate

GIB = 1 << 30
_COSTS = {
    Op.FORWARD: 0.0041,
    Op.BACKWARD: 0.0085,
    Op.BACKWARD_INPUT: 0.0049,
    Op.BACKWARD_WEIGHT: 0.0037,
    Op.SEND_ACTIVATION: 0.0006,
    Op.SEND_GRADIENT: 0.0006,
    Op.RECV_ACTIVATION: 0.0006,
    Op.RECV_GRADIENT: 0.0006,
    Op.GATHER_PARAMS: 0.003,
    Op.REDUCE_GRADS: 0.0011,
    Op.LOAD_MICRO_BATCH: 0.0001,
}


@dataclass(frozen=True)
class Shape:
    """The winner's."""

    stages: int = 4
    replicas: int = 4
    tensor_ranks: int = 2
    micro_batches: int = 16
    schedule: str = "zbv"
    chunks: int = 2
    placement: str = "v"
    gpus_per_host: int = 8

    @property
    def layout(self) -> str:
        return f"pp{self.stages},dp{self.replicas},tp{self.tensor_ranks},zero1,{self.schedule},m{self.micro_batches}"


def plan(shape: Shape | None = None, seed: int = 0, ranked: int = 12, rejected: int = 40) -> PlanResult:
    """A plan whose winner is of this shape. Every instruction takes its own time, as measured ones would."""
    shape = shape or Shape()
    dice = random.Random(seed)
    world = shape.stages * shape.replicas * shape.tensor_ranks
    best = [_prediction(shape, shape.layout, 1.0, dice)]
    for k in range(1, ranked):
        best.append(_prediction(shape, f"{shape.layout},mb{k + 1}", 1.0 + 0.03 * k, dice))
    lost = tuple(_lost(k, dice) for k in range(rejected))
    frontier = sorted((p.peak, p.seconds, p.layout) for p in best)
    bounds = list(best[0].bounds)
    best_so_far, curve = float("inf"), []
    for peak, seconds, layout in frontier:
        if seconds < best_so_far:
            curve.append((peak, seconds, layout))
            best_so_far = seconds
    return PlanResult(
        model="Llama-3-8B",
        cluster=f"{max(1, world // shape.gpus_per_host)}x{min(world, shape.gpus_per_host)}xH100",
        num_devices=world,
        global_batch=shape.replicas * shape.micro_batches,
        seq=8192,
        best=tuple(best),
        rejected=lost,
        trade_off=tuple(curve),
        timeline=timeline(shape, dice),
        links=links(shape),
        map=ranks(shape),
        config={
            "train_batch_size": shape.replicas * shape.micro_batches,
            "train_micro_batch_size_per_gpu": 1,
            "pipeline": {
                "stages": shape.stages,
                "num_chunks": shape.chunks,
                "schedule": shape.schedule,
                "partition": bounds,
            },
            "zero_optimization": {"stage": 1, "reduce_bucket_size": 500_000_000},
            "bf16": {"enabled": True},
        },
        layers=("embedding", *(f"block.{k}" for k in range(2 * shape.stages * shape.chunks - 2)), "norm and head"),
        considered=18_432,
        simulated=96,
    )


def _prediction(shape: Shape, layout: str, slower: float, dice: random.Random) -> Prediction:
    seconds = slower * 0.0131 * shape.micro_batches * shape.chunks * (1 + (shape.stages - 1) / shape.micro_batches / 3)
    shares = {"forward": 0.29, "backward": 0.58, "bubble": 0.06, "exposed communication": 0.04, "optimizer": 0.03}
    lean = 1.4 - slower * 0.4
    return Prediction(
        layout=layout,
        stages=shape.stages,
        replicas=shape.replicas,
        tensor_ranks=shape.tensor_ranks,
        sequence_parallel=shape.tensor_ranks > 1,
        chunks=shape.chunks,
        placement=shape.placement,
        schedule=shape.schedule,
        micro_batch=1,
        micro_batches=shape.micro_batches,
        zero=1,
        recompute=0,
        seconds=seconds,
        low=0.94 * seconds,
        high=1.07 * seconds,
        tokens_per_second=8192 * shape.replicas * shape.micro_batches / seconds,
        mfu=0.47 / slower,
        bubble=shares["bubble"],
        exposed_communication=shares["exposed communication"] * seconds,
        breakdown={name: share * seconds for name, share in shares.items()},
        bounds=tuple(2 * k for k in range(shape.stages * shape.chunks + 1)),
        memory=tuple(_memory(stage, shape, lean, dice) for stage in range(shape.stages)),
    )


def _memory(stage: int, shape: Shape, lean: float, dice: random.Random) -> StageMemory:
    gib = {
        "weights": 4.0,
        "gradients": 8.0,
        "masters": 4.0,
        "optimizer": 8.0,
        "activations": lean * (14 + 24 * (shape.stages - stage) / shape.stages),
        "workspace": 2.5 + (3.0 if stage == shape.stages - 1 else 0.0),
        "transient": 1.2,
        "messages": 0.5,
    }
    parts = {name: int(GIB * size * dice.uniform(0.97, 1.03)) for name, size in gib.items()}
    allocated = sum(parts.values())
    phases = {"steady": allocated - GIB, "backward": allocated, "step": 26 * GIB, "save": 24 * GIB}
    return StageMemory(
        stage=stage, parts=parts, phases=phases, allocated=allocated, reserved=allocated + 3 * GIB, capacity=80 * GIB
    )


def _lost(k: int, dice: random.Random) -> Rejected:
    layout = f"pp{2 ** (k % 4)},dp{2 ** (k % 3)},tp{1 + k % 2},zero{k % 3},1f1b,m{8 * (1 + k % 5)},mb{k + 1}"
    if k % 4 == 3:
        peak = int(GIB * dice.uniform(82, 190))
        return Rejected(layout=layout, why=f"does not fit: stage 0 needs {peak / GIB:.1f} GiB of 80", peak=peak)
    if k % 4 == 2:
        return Rejected(layout=layout, why="tp 2 does not divide 7 key heads")
    why = ("more bubble: 18% instead of 6%", "waits 31 ms for links, 12 ms more")[k % 2]
    return Rejected(layout=layout, why=why, seconds=dice.uniform(0.5, 0.9), peak=int(GIB * dice.uniform(40, 79)))


def timeline(shape: Shape, dice: random.Random) -> tuple[Span, ...]:
    program = lower(build(shape.schedule, shape.stages, shape.micro_batches, shape.chunks, shape.placement))
    program = add_parameter_gather(add_gradient_reduction(program, [2] * program.num_chunks))
    jitter: dict[Instruction, float] = {}

    def cost(i: Instruction) -> float:
        return _COSTS[i.op] * jitter.setdefault(i, dice.uniform(0.95, 1.05))

    large = shape.stages * shape.micro_batches > 4096
    spans = _hurried(program, cost) if large else simulate(program, cost).spans
    return tuple(spans)


def _hurried(program: Program, cost: Callable[[Instruction], float]) -> Iterator[Span]:
    """Each stage runs its list without a wait for others: as many spans as of a simulation, in a tenth of the time."""
    for rank, instructions in enumerate(program.instructions):
        clock = 0.0041 * rank
        for i in instructions:
            start, took = clock, cost(i)
            clock += took if i.op in COMPUTE_OPS else 0.0
            yield Span(rank, i, start, start + took)


def ranks(shape: Shape) -> tuple[RankPlace, ...]:
    out = []
    for rank in range(shape.stages * shape.replicas * shape.tensor_ranks):
        rest, model = divmod(rank, shape.tensor_ranks)
        pipe, data = divmod(rest, shape.replicas)
        host, gpu = divmod(rank, shape.gpus_per_host)
        out.append(RankPlace(rank=rank, host=f"host{host}", gpu=gpu, pipe=pipe, data=data, model=model))
    return tuple(out)


def links(shape: Shape) -> tuple[LinkLoad, ...]:
    """GPUs on an NVSwitch of their host, network cards on rails, rails on a spine."""
    out: list[LinkLoad] = []

    def add(a: str, b: str, kind: str, rate: float, **axes: float) -> None:
        nbytes = sum(axes.values())
        out.append(LinkLoad(a=a, b=b, kind=kind, nbytes=nbytes, seconds=nbytes / rate, by_axis=axes))

    several = shape.stages * shape.replicas * shape.tensor_ranks > shape.gpus_per_host
    for place in ranks(shape):
        gpu = f"{place.host}/gpu{place.gpu}"
        add(gpu, f"{place.host}/nvswitch", "nvlink", 4e11, model=9.0 * GIB, data=2.0 * GIB, pipe=0.2 * GIB)
        if several:
            add(
                gpu, f"{place.host}/nic{place.gpu}", "pcie", 5e10, data=0.3 * GIB * (1 + place.pipe % 2), pipe=0.5 * GIB
            )
            add(f"{place.host}/nic{place.gpu}", f"rail{place.gpu}", "nic", 4.5e10, data=1.1 * GIB, pipe=0.5 * GIB)
    if several:
        for rail in range(shape.gpus_per_host):
            add(f"rail{rail}", "spine", "network", 1.6e12, pipe=0.9 * GIB)
    if len(out) <= 128:
        return tuple(out)
    # As Network.loads: links whose ends' names differ in numbers alone are one.
    return tuple({tuple(re.sub(r"\d+", "", end) for end in (link.a, link.b)): link for link in out}.values())
