"""Train a model in layouts and on one process, and compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from parallel3d.config import Config, load
from parallel3d.config.layout import PartialLayout
from parallel3d.errors import ConfigError
from parallel3d.launcher.ranks import run_ranks
from parallel3d.parity.reference import Trained, Whole, train_reference
from parallel3d.parity.report import Report, make_report
from parallel3d.parity.settings import TOLERANCES, Settings, accumulation, check_config
from parallel3d.parity.worker import train_layouts
from parallel3d.specs import layer_name
from parallel3d.user_model import Subject, load_subject


def check(target: str, layouts: Sequence[PartialLayout], settings: Settings) -> Iterator[Report]:
    """Yield a report for each layout, in the order given.

    Layouts of the same number of processes share one start, on GPUs where there are enough, else on the CPU. target: as
    load_subject takes it. Raises Parallel3DError for what can't be carried out, before any process is started where that
    can be known.
    """
    tolerance = TOLERANCES[settings.dtype] if settings.tolerance is None else settings.tolerance
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
