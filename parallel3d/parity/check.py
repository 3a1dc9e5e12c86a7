"""Trains a subject in layouts and on one process, and compares."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from parallel3d.config import load
from parallel3d.config.layout import PartialLayout
from parallel3d.errors import ConfigError, ExecutionError, Parallel3DError
from parallel3d.parity.layout import accumulation, config_of
from parallel3d.parity.reference import Reference
from parallel3d.parity.report import Report, Trained, make_report
from parallel3d.parity.worker import DTYPES, Plan, RankResult, building_dtype, run_rank
from parallel3d.specs import layer_name
from parallel3d.user_model import Subject, describe, load_subject

TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Settings:
    """steps: of the optimizer; dtype: of weights, one of TOLERANCES; tolerance: relative, None for the dtype's."""

    steps: int = 3
    seed: int = 1234
    dtype: str = "float32"
    tolerance: float | None = None


def check(target: str, layouts: Sequence[PartialLayout], settings: Settings) -> Iterator[Report]:
    """A report for each layout, in the order given. target: see load_subject.

    Layouts of equally many processes share one launch, on GPUs where there are enough, else on the CPU. Raises
    Parallel3DError for what can't be carried out, before any process is started where that can be known.
    """
    tolerance = TOLERANCES[settings.dtype] if settings.tolerance is None else settings.tolerance
    with _default_dtype(building_dtype(settings.dtype)), TemporaryDirectory(prefix="parallel3d_check_") as folder:
        subject = load_subject(target, settings.seed)
        for layout in layouts:
            _check_layout(layout, subject, settings)
        classes = tuple(map(layer_name, subject.layers))
        launched: dict[int, Path] = {}
        wanted: dict[tuple[int, str], tuple[Trained, Trained | None]] = {}
        for layout in layouts:
            same = [other for other in layouts if other.world_size == layout.world_size]
            per_step = accumulation(layout, subject.given()) * layout.replicas
            device = torch.device("cuda", 0) if _uses_gpus(layout.world_size) else torch.device("cpu")
            if (per_step, device.type) not in wanted:
                alone = partial(_train_reference, target, layout, settings, per_step, device)
                dtype = DTYPES[settings.dtype]
                exact = alone(torch.float32) if dtype == torch.bfloat16 else None
                wanted[per_step, device.type] = alone(dtype), exact
            if layout.world_size not in launched:
                launched[layout.world_size] = Path(folder) / str(layout.world_size)
                _launch(launched[layout.world_size], target, same, settings)
            ranks = _results(launched[layout.world_size], same.index(layout), layout.world_size)
            yield make_report(layout.text, ranks, *wanted[per_step, device.type], tolerance, classes)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _check_layout(layout: PartialLayout, subject: Subject, settings: Settings) -> None:
    """Raise ConfigError for a layout that this model or its configuration rules out."""
    try:
        config = load(config_of(layout, subject.given(), settings.seed, settings.dtype))
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


def _uses_gpus(world_size: int) -> bool:
    return torch.cuda.device_count() >= world_size


def _train_reference(
    target: str, layout: PartialLayout, settings: Settings, per_step: int, device: torch.device, dtype: torch.dtype
) -> Trained:
    subject = load_subject(target, settings.seed)
    config = load(config_of(layout, subject.given(), settings.seed, settings.dtype))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            reference = Reference(subject, config, settings.seed, dtype, device)
            first = reference.step(per_step)
            gradients = reference.gradients
            return Trained([first, *(reference.step(per_step) for _ in range(settings.steps - 1))], gradients)
        except Parallel3DError:
            raise
        except Exception as error:
            raise ExecutionError(f"on one process, where layers get no context: {describe(error)}") from error


def _launch(folder: Path, target: str, layouts: Sequence[PartialLayout], settings: Settings) -> None:
    """Train these layouts, all of one size; the ranks' results are then in `folder`. Raises Parallel3DError if one fails."""
    folder.mkdir()
    plan = Plan(target, tuple(layout.text for layout in layouts), settings.steps, settings.seed, settings.dtype)
    size = layouts[0].world_size
    # One process imports all that the ranks need, and they are its copies: not of this one, which may have used CUDA.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["parallel3d.parity.worker"])
    context = start_processes(
        run_rank, (folder, plan, size, _uses_gpus(size)), size, join=False, start_method="forkserver"
    )
    try:
        while not context.join():
            pass
    except (ProcessRaisedException, ProcessExitedException) as failure:
        for path in sorted(folder.glob("error.*.json"), key=lambda path: path.stat().st_mtime_ns):
            told = json.loads(path.read_text())
            raise ExecutionError(f"layout {told['layout']!r}: {told['message']}") from failure
        raise ExecutionError(f"in {' or '.join(plan.layouts)}: {failure}") from failure
    finally:
        for process in context.processes:
            process.kill()


def _results(folder: Path, layout: int, world_size: int) -> list[RankResult]:
    return [torch.load(folder / f"{layout}.{rank}.pt", weights_only=True) for rank in range(world_size)]
