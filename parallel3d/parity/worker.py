"""Worker of a check: each rank trains the layouts of a plan and writes what it holds into files.

Rank r writes <layout>.<r>.pt, a RankResult, or error.<r>.json where the layout can't be carried out.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from parallel3d.comm.environment import destroy, init_distributed
from parallel3d.config.layout import PartialLayout, parse_layout
from parallel3d.engine import Engine
from parallel3d.errors import Parallel3DError
from parallel3d.initialization import initialize
from parallel3d.parameters import slicing_of
from parallel3d.parity.layout import accumulation, config_of
from parallel3d.pipe.module import PipelineModule
from parallel3d.user_model import Subject, load_subject

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Plan:
    """Work of the ranks of one world: to train these layouts one after the other."""

    target: str
    layouts: tuple[str, ...]
    steps: int
    seed: int
    dtype: str


class Held(TypedDict):
    """A flat part of a parameter, from `start` of what the rank has of it.

    slicing: (dim, size, ranges) of a Slicing where that is a slice of the whole, else None.
    """

    name: str
    slicing: tuple[int, int, tuple[tuple[int, int], ...]] | None
    start: int
    part: Tensor


class RankResult(TypedDict):
    """losses, norms, weights: after each step; gradients: of the first step, before clipping."""

    losses: list[float]
    norms: list[float]
    weights: list[list[Held]]
    gradients: list[Held]


def building_dtype(dtype: str) -> torch.dtype:
    """The default dtype under which layers and data are made: half-precision weights are rounded from fp32 masters."""
    return torch.float32 if dtype == "bfloat16" else DTYPES[dtype]


def train(subject: Subject, layout: PartialLayout, plan: Plan) -> RankResult:
    """The rank's part of training a subject in a layout. Collective."""
    config = config_of(layout, subject.given(), plan.seed, plan.dtype)
    module = PipelineModule(
        subject.layers, loss_fn=subject.loss_fn, seed_layers=True, base_seed=plan.seed, config=config
    )
    engine, *_ = initialize(model=module, config=config)
    result = RankResult(losses=[], norms=[], weights=[], gradients=[])

    def keep_first_gradients() -> None:
        if not result["gradients"]:
            result["gradients"] = held(engine, "gradient")

    engine.update.call_before_step(keep_first_gradients)
    total = plan.steps * accumulation(layout, subject.given()) * layout.replicas
    data = _own_batches(engine, subject, total, plan.seed)
    for _ in range(plan.steps):
        result["losses"].append(float(engine.train_batch(data)))
        norm = engine.get_global_grad_norm()
        assert norm is not None
        result["norms"].append(float(norm))
        result["weights"].append(held(engine, "master"))
    return result


def _own_batches(engine: Engine, subject: Subject, total: int, seed: int) -> Iterator[Any] | None:
    """This replica's share of the world's micro-batches: the g-th goes to replica g mod dp."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    replica, size = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    return (subject.batch(index, seed) for index in range(replica, total, size))


@torch.no_grad()
def held(engine: Engine, what: Literal["gradient", "master"]) -> list[Held]:
    """Return what this rank updates of each parameter: gradients of the mean loss (before the step), or masters."""
    update = engine.update
    parts = []
    for piece in (piece for bucket in update.reducer.all_buckets() for piece in bucket.pieces):
        if what == "gradient":
            # A parameter that the loss doesn't reach has an accumulator of zeros.
            part = piece.gradient.to(piece.master.dtype) / update.gradient_scale.to(piece.master.dtype)
        else:
            part = piece.master.detach()
        slicing = slicing_of(piece.info.parameter)
        place = None if slicing is None else (slicing.dim, slicing.size, slicing.ranges)
        own = part.flatten().cpu().clone()
        parts.append(Held(name=piece.info.name, slicing=place, start=piece.start, part=own))
    return parts


def run_rank(rank: int, folder: Path, plan: Plan, world_size: int, uses_gpus: bool) -> None:
    """Carry out the plan as one process of a world, with NCCL or gloo; what it prints goes into a file."""
    _print_into(folder / f"output.{rank}.txt")
    os.environ["LOCAL_RANK"] = str(rank)
    if not uses_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    torch.set_default_dtype(building_dtype(plan.dtype))
    meeting = (folder / "rendezvous").as_uri()
    init_distributed("nccl" if uses_gpus else "gloo", init_method=meeting, rank=rank, world_size=world_size)
    for k, text in enumerate(plan.layouts):
        try:
            result = train(load_subject(plan.target, plan.seed), parse_layout(text), plan)
        except Parallel3DError as error:
            told = {"layout": text, "message": str(error)}
            (folder / f"error.{rank}.json").write_text(json.dumps(told))
            raise
        torch.save(result, folder / f"{k}.{rank}.pt")
    destroy()  # multiprocessing ends its processes without exit handlers


def _print_into(path: Path) -> None:
    with path.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
