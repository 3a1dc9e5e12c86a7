"""Training in layouts on the ranks of one world, each of which keeps what it holds for the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from parallel3d.checkpoint.parts import Part, parts_of
from parallel3d.comm.environment import get_rank
from parallel3d.config.layout import PartialLayout
from parallel3d.engine import Engine
from parallel3d.errors import ExecutionError, Parallel3DError
from parallel3d.initialization import initialize
from parallel3d.parity.reference import Step, Trained
from parallel3d.parity.settings import Settings, accumulation, check_config
from parallel3d.pipe.module import PipelineModule
from parallel3d.user_model import Subject, load_subject


def train_layouts(target: str, layouts: Sequence[PartialLayout], settings: Settings, folder: Path) -> None:
    """Train in the layouts one after the other; write this rank's results of the k-th to `folder`/k.rank. Collective."""
    torch.set_default_dtype(settings.building_dtype)
    for k, layout in enumerate(layouts):
        try:
            result = train(load_subject(target, settings.seed), layout, settings)
        except Parallel3DError as error:
            raise ExecutionError(f"layout {layout.text!r}: {error}") from error
        torch.save(result, folder / f"{k}.{get_rank()}")


def train(subject: Subject, layout: PartialLayout, settings: Settings) -> Trained[list[Part]]:
    """Train a subject in a layout and return this rank's results. Collective."""
    config, seed = check_config(layout, subject.given(), settings), settings.seed
    module = PipelineModule(subject.layers, loss_fn=subject.loss_fn, seed_layers=True, base_seed=seed, config=config)
    engine, *_ = initialize(model=module, config=config)
    steps: list[Step[list[Part]]] = []
    gradients: list[Part] = []

    def keep_first_gradients() -> None:
        if not gradients:
            gradients.extend(held_parts(engine, gradients=True))

    engine.update.call_before_step(keep_first_gradients)
    data = None
    if engine.is_first_stage() or engine.is_last_stage():
        # The g-th micro-batch of the world goes to replica g mod dp.
        replica, total = engine.grid.get_data_parallel_rank(), accumulation(layout, subject.given()) * layout.replicas
        data = (subject.batch(index, seed) for index in range(replica, settings.steps * total, layout.replicas))
    for _ in range(settings.steps):
        loss, norm = engine.train_batch(data), engine.get_global_grad_norm()
        assert norm is not None
        steps.append(Step(float(loss), float(norm), held_parts(engine, gradients=False)))
    return Trained(steps, gradients)


@torch.no_grad()
def held_parts(engine: Engine, gradients: bool) -> list[Part]:
    """Return what this rank updates of each parameter: gradients of the mean loss, before the step, or master weights."""
    parts: list[Part] = []
    for shard in (shard for bucket in engine.update.reducer.all_buckets() for shard in bucket.pieces):
        values = shard.master.detach()
        if gradients:
            # A parameter that the loss doesn't reach has an accumulator of zeros.
            values = shard.gradient.to(values.dtype) / engine.update.gradient_scale.to(values.dtype)
        held = parts_of(shard.info.name, shard.info.parameter, values, shard.start)
        parts += [replace(part, values=part.values.cpu().clone()) for part in held]
    return parts
