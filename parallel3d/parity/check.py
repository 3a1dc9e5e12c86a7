"""Train a model in layouts, each on the ranks of a world, and on one process, and compare their results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from parallel3d.checkpoint.parts import Part, shard_parts
from parallel3d.comm.environment import get_rank
from parallel3d.config import Config, PartialLayout, load
from parallel3d.engine import Engine
from parallel3d.errors import ConfigError, ExecutionError, Parallel3DError
from parallel3d.initialization import initialize
from parallel3d.launcher.ranks import run_ranks
from parallel3d.models.user_model import Subject, load_subject
from parallel3d.parity.reference import Step, Trained, Whole, train_reference
from parallel3d.parity.settings import FP8_TOLERANCE, TOLERANCES, Settings, accumulation, check_config
from parallel3d.pipe.module import PipelineModule
from parallel3d.specs import layer_name

# A tensor whose norm is less than this share of the model's is compared on the scale of that share: if its true value is zero,
# as for the bias of attention's keys, it contains only rounding errors.
_NEGLIGIBLE = 1e-2


@dataclass(frozen=True)
class StepReport:
    """Report on one step.

    - loss, norm: (of the layout, of one process).
    - differences: relative, of the loss, the gradient norm before clipping, and the weight tensor that differs most.
    """

    loss: tuple[float, float]
    norm: tuple[float, float]
    differences: tuple[float, float, float]


@dataclass(frozen=True)
class Report:
    """Report on one layout.

    - gradients, weights: name -> relative difference, after the first and the last step, in model order.
    - classes: the name of each layer's class.
    """

    layout: str
    steps: tuple[StepReport, ...]
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    tolerance: float
    classes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        steps = (difference for step in self.steps for difference in step.differences)
        return all(map(self.agrees, [*steps, *self.gradients.values(), *self.weights.values()]))

    def agrees(self, difference: float) -> bool:
        """Return whether a relative difference is within tolerance; NaN is not."""
        return difference <= self.tolerance

    def differing(self, differences: Mapping[str, float]) -> list[str]:
        """Return the names that differ by more than the tolerance, in model order."""
        return [name for name, difference in differences.items() if not self.agrees(difference)]


def make_report(
    layout: str,
    ranks: Sequence[Trained[list[Part]]],
    wanted: Trained[Whole],
    exact: Trained[Whole],
    tolerance: float,
    classes: tuple[str, ...],
) -> Report:
    """Compare what all ranks hold with one process.

    - wanted: results of one process.
    - exact: the same results, or, for half precision, those of a dtype whose rounding is negligible. If `wanted` itself is far
      from them, as when Adam normalizes the rounding of a gradient that is truly zero, twice that distance passes.
    """
    scales = _scales(wanted.gradients, exact.gradients, tolerance, by_size=False)
    gradients = differences((rank.gradients for rank in ranks), wanted.gradients, scales)
    steps, weights = [], {}
    for k, step in enumerate(wanted.steps):
        scales = _scales(step.weights, exact.steps[k].weights, tolerance, by_size=True)
        weights = differences((rank.steps[k].weights for rank in ranks), step.weights, scales)
        loss = _farthest((rank.steps[k].loss for rank in ranks), step.loss)
        norm = _farthest((rank.steps[k].norm for rank in ranks), step.norm)
        off = _relative(loss, step.loss), _relative(norm, step.norm), _farthest(weights.values(), 0.0)
        steps.append(StepReport((loss, step.loss), (norm, step.norm), off))
    return Report(layout, tuple(steps), gradients, weights, tolerance, classes)


def _norm(tensor: Tensor) -> float:
    return float(tensor.double().norm())


def _scales(
    wanted: Mapping[str, Tensor], exact: Mapping[str, Tensor], tolerance: float, by_size: bool
) -> dict[str, float]:
    """Return the scale of each tensor's difference: its norm, or 1% of the model's where that is more.

    by_size: 1% of what a tensor of its size has of the model's norm. No scale is less than lets twice the rounding of the
    wanted tensor, its distance from the exact one, pass.
    """
    norm = math.sqrt(sum(_norm(tensor) ** 2 for tensor in wanted.values()))
    total = sum(tensor.numel() for tensor in wanted.values())
    scales = {}
    for name, tensor in wanted.items():
        rounding = _norm(tensor.double() - exact[name].double())
        share = math.sqrt(tensor.numel() / max(1, total)) if by_size else 1.0
        scales[name] = max(_norm(tensor), _NEGLIGIBLE * norm * share, 2 * rounding / tolerance)
    return scales


def differences(
    ranks: Iterable[Sequence[Part]], wanted: Mapping[str, Tensor], scales: Mapping[str, float]
) -> dict[str, float]:
    """Return name -> ‖got - wanted‖ / its scale, each element by the copy that is farthest off.

    Infinite where no rank holds some element, or a name is not the reference's.
    """
    errors = {name: torch.full_like(whole, -1.0) for name, whole in wanted.items()}
    unknown = {}
    for part in (part for own in ranks for part in own):
        if part.name in errors:
            where = part.box.slices([0] * len(part.shape))
            error = errors[part.name][where]
            error.copy_(torch.maximum(error, (part.values - wanted[part.name][where]).abs()))
        else:
            unknown[part.name] = math.inf
    for error in errors.values():
        if bool((error < 0).any()):
            error.fill_(math.inf)
    return {name: _norm(error) / max(scales[name], 1e-30) for name, error in errors.items()} | unknown


def _farthest(numbers: Iterable[float], wanted: float) -> float:
    """Return the number that differs most from the wanted one, NaN first; 0 of no numbers."""
    return max(numbers, key=lambda number: math.inf if math.isnan(number) else abs(number - wanted), default=0.0)


def _relative(got: float, wanted: float) -> float:
    return abs(got - wanted) / max(abs(wanted), 1e-30) if got != wanted else 0.0


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
        torch.compiler.reset()  # code compiled for other layouts would count towards the compiler's limits
        try:
            result = train(load_subject(target, settings.seed), layout, settings)
        except Parallel3DError as error:
            raise ExecutionError(f"layout {layout.text!r}: {error}") from error
        torch.save(result, folder / f"{k}.{get_rank()}")


def train(subject: Subject, layout: PartialLayout, settings: Settings) -> Trained[list[Part]]:
    """Train a subject in a layout and return this rank's results. Collective."""
    config, seed = check_config(layout, subject.given(), settings), settings.seed
    inputs, labels = subject.batch(0, seed)  # the sample for recomputation policy "auto"
    given: dict[str, Any] = {"seed_layers": True, "base_seed": seed, "sample_input": inputs, "sample_labels": labels}
    module = PipelineModule(subject.layers, loss_fn=subject.loss_fn, config=config, **given)
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
    for shard in (shard for bucket in engine.update.reducer.all_buckets() for shard in bucket.shards):
        values = shard.master.detach()
        if gradients:
            # A parameter that the loss doesn't reach has an accumulator of zeros.
            values = shard.gradient.to(values.dtype) / engine.update.gradient_scale.to(values.dtype)
        held = shard_parts(shard.info.name, shard, values)
        parts += [replace(part, values=part.values.cpu().clone()) for part in held]
    return parts
