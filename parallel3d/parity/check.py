"""Train a model in layouts, each on the ranks of a world, and on one process, and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from parallel3d.checkpoint.parts import Part, shard_parts
from parallel3d.comm.environment import get_rank
from parallel3d.config import Config, PartialLayout, load
from parallel3d.engine import Engine
from parallel3d.errors import ConfigError, ExecutionError, Parallel3DError
from parallel3d.initialization import initialize
from parallel3d.launcher.ranks import run_ranks
from parallel3d.models.user_model import Subject, load_subject
from parallel3d.parity.reference import Step, Trained, Whole, train_reference
from parallel3d.parity.report import Report, make_report
from parallel3d.parity.settings import FP8_TOLERANCE, TOLERANCES, Settings, accumulation, check_config
from parallel3d.pipe.module import PipelineModule
from parallel3d.specs import layer_name


def check(target: str, layouts: Sequence[PartialLayout], settings: Settings) -> Iterator[Report]:
    """Yield a report for each layout, in the order given.

    Layouts of the same number of processes share one start, on GPUs where there are enough, else on the CPU. target: as
    load_subject takes it. Raises Parallel3DError for what can't be carried out, before any process is started where that
    can be known.
    """
    with ExitStack() as stack:
        root = Path(stack.enter_context(TemporaryDirectory(prefix="parallel3d_check_")))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(settings.building_dtype)
        subject = load_subject(target, settings.seed)
        configs = [_load_config(layout, subject, settings) for layout in layouts]
        classes = tuple(map(layer_name, subject.layers))
        references: dict[tuple[int, bool], tuple[Trained[Whole], Trained[Whole]]] = {}
        for layout, config in zip(layouts, configs, strict=True):
            size = layout.world_size
            uses_gpus = torch.cuda.device_count() >= size
            per_step = accumulation(layout, subject.given()) * layout.replicas
            if (per_step, uses_gpus) not in references:
                references[per_step, uses_gpus] = train_reference(target, config, settings, per_step, uses_gpus)
            folder, same = root / str(size), [other for other in layouts if other.world_size == size]
            if not folder.exists():
                folder.mkdir()
                run_ranks(train_layouts, size, uses_gpus, target, same, settings, folder)
            files = [folder / f"{same.index(layout)}.{rank}" for rank in range(size)]
            ranks = [torch.load(file, weights_only=False) for file in files]
            given = FP8_TOLERANCE if config.fp8.enabled else TOLERANCES[settings.dtype]
            tolerance = given if settings.tolerance is None else settings.tolerance
            yield make_report(layout.text, ranks, *references[per_step, uses_gpus], tolerance, classes)


def _load_config(layout: PartialLayout, subject: Subject, settings: Settings) -> Config:
    """Return the configuration of a layout. Raises ConfigError for a layout that the model or the configuration rules out."""
    try:
        config = load(check_config(layout, subject.given(), settings))
    except ConfigError as error:
        raise ConfigError(f"layout {layout.text!r}: {error}") from error
    chunks, most = layout.stages * (config.pipeline.num_chunks or 1), len(subject.layers)
    if chunks > most:
        raise ConfigError(
            f"layout {layout.text!r} asks for {chunks} chunks of a model of {most} layers; give {most} stages x chunks or fewer"
        )
    for section in ("fp16", "torch_autocast", "amp"):
        if getattr(config, section).enabled:
            raise ConfigError(
                f"the configuration enables {section}, which is not checked; leave it out, and give --dtype"
            )
    return config


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
    engine.update.sharded.settle()
    for shard in (shard for bucket in engine.update.reducer.all_buckets() for shard in bucket.pieces):
        values = shard.master.detach()
        if gradients:
            # A parameter that the loss doesn't reach has an accumulator of zeros.
            values = shard.gradient.to(values.dtype) / engine.update.gradient_scale.to(values.dtype)
        held = shard_parts(shard.info.name, shard, values)
        parts += [replace(part, values=part.values.cpu().clone()) for part in held]
    return parts
