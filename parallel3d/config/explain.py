"""A configuration explained: every value in force and where it comes from, what is left out and why, batch arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from parallel3d.config.auto import look_up
from parallel3d.config.batch import ACCUMULATION, MICRO, TRAIN, BatchSizes, resolve_batch
from parallel3d.config.load import Reading
from parallel3d.config.section import Section
from parallel3d.config.zero import STAGE_3_AS_2
from parallel3d.errors import ConfigError

GIVEN, DEFAULT, DERIVED, OF_MODULE = "given", "default", "derived", "as PipelineModule says"


@dataclass(frozen=True)
class Value:
    """A value in force. origin: GIVEN, DEFAULT, DERIVED, OF_MODULE, or "filled ..." by whom."""

    path: str
    value: Any
    origin: str


@dataclass(frozen=True)
class LeftOut:
    """A key that was given and does nothing, or not all that it says; why, for the user."""

    path: str
    value: Any
    why: str


@dataclass(frozen=True)
class Explanation:
    """Meaning of a configuration for a world of data x pipe x model ranks."""

    values: tuple[Value, ...]
    left_out: tuple[LeftOut, ...]
    sizes: BatchSizes
    pipe: int
    data: int
    model: int


def explain(reading: Reading, world: int, pipe: int | None = None, model: int = 1) -> Explanation:
    """For `world` ranks in pipelines of `pipe` stages (default: pipeline.stages, or 1), of `model` ranks each.

    Raises ConfigError where ranks or batch sizes don't divide, or `pipe` is not pipeline.stages.
    """
    config = reading.config
    stages = config.pipeline.stages
    if pipe is not None and stages is not None and pipe != stages:
        raise ConfigError(f"--pp is {pipe}, but pipeline.stages is {stages}; make the two equal or drop one")
    pipe = pipe or stages or 1
    if world % (pipe * model):
        raise ConfigError(
            f"{world} ranks can't be {pipe} stages x {model} tensor slices x dp; give a multiple of {pipe * model} ranks, or "
            "another number of stages"
        )
    data = world // (pipe * model)
    sizes = resolve_batch(
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
        pipe=pipe,
        data=data,
        model=model,
    )
    derived = {
        TRAIN: sizes.train_batch_size,
        MICRO: sizes.micro_batch_size,
        ACCUMULATION: sizes.num_micro_batches,
        "pipeline.stages": pipe,
        "data_types.grad_accum_dtype": "fp32",
        "communication_data_type": config.data_types.grad_accum_dtype or "fp32",
    }
    values = tuple(_values(config, "", reading, derived))
    return Explanation(values, tuple(_left_out(reading)), sizes, pipe, data, model)


def _values(section: Section, path: str, reading: Reading, derived: Mapping[str, Any]) -> Iterator[Value]:
    """The fields of a section; of one that is not enabled, only that."""
    off = getattr(section, "enabled", True) is False
    for name in ["enabled"] if off else type(section).model_fields:
        value, where = getattr(section, name), f"{path}{name}"
        if isinstance(value, Section):
            yield from _values(value, f"{where}.", reading, derived)
        elif name == "params":
            yield from (
                Value(f"{where}.{key}", inner, _origin(f"{where}.{key}", reading)) for key, inner in value.items()
            )
        elif value is None and where in derived:
            yield Value(where, derived[where], DERIVED)
        elif value is None and path == "pipeline." and name != "max_in_flight":
            yield Value(where, value, OF_MODULE)
        else:
            yield Value(where, value, _origin(where, reading))


def _origin(path: str, reading: Reading) -> str:
    if path in reading.origins:
        return reading.origins[path]
    if path in reading.review.unset:
        return DEFAULT
    return GIVEN if path in reading.review.kept else DEFAULT


def _left_out(reading: Reading) -> Iterator[LeftOut]:
    zero = reading.config.zero_optimization
    if zero.stage != zero.effective_stage:
        yield LeftOut("zero_optimization.stage", zero.stage, STAGE_3_AS_2)
    for path, (key, value) in reading.review.ignored.items():
        yield LeftOut(path, value, f"{key.support.value}: {key.reason}")
    for path in reading.review.silent:
        yield LeftOut(path, look_up(reading.given, path), "is so anyway")
