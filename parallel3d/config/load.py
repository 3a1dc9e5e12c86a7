"""From a file, a mapping or a base64 text to a Config: all problems in one error, what is left out in warnings."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from parallel3d.config.auto import fill
from parallel3d.config.files import decode, read_mapping
from parallel3d.config.pipeline import PipelineConfig, TensorParallelConfig
from parallel3d.config.review import Review, warnings_of
from parallel3d.config.schema import Config
from parallel3d.config.training import ActivationCheckpointingConfig, RngConfig
from parallel3d.errors import ConfigError

Source = str | Path | Mapping[str, Any] | Config | None


@dataclass(frozen=True)
class Reading:
    """A Config and how it came about: the mapping that was given, where filled values come from, what was left out."""

    name: str
    given: Mapping[str, Any]
    config: Config
    origins: Mapping[str, str]
    review: Review

    @property
    def warnings(self) -> list[str]:
        """Return the warnings about keys that were left out."""
        return warnings_of(self.config, self.review)


def load(source: Source, auto: Mapping[str, Any] | None = None, known: Mapping[str, Any] | None = None) -> Config:
    """The Config that a file (JSON with comments, Hjson, YAML), a mapping, or the base64 of a JSON text describes.

    None is all defaults, a Config is itself. auto: values for keys that are "auto", nested or with dotted keys.
    known: dotted keys; further values for those that are still "auto". Raises ConfigError that lists all problems.
    Warns of the known keys that are left out.
    """
    if isinstance(source, Config):
        if auto:
            raise ConfigError(f'auto gives {", ".join(auto)}, but a Config has no "auto" left; drop one of the two')
        return source
    reading = read(source, auto, known)
    for line in reading.warnings:
        warnings.warn(f"{reading.name}: {line}", stacklevel=2)
    return reading.config


class LayoutSections(NamedTuple):
    """The sections of a configuration that determine how layers are built."""

    pipeline: PipelineConfig
    tensor_parallel: TensorParallelConfig
    rng: RngConfig


def load_layout(source: Source) -> LayoutSections:
    """The sections that decide on layers, read without looking at others, whose "auto"s may be filled later."""
    config = _load_sections(source, LayoutSections._fields)
    return LayoutSections(config.pipeline, config.tensor_parallel, config.rng)


def load_activation_checkpointing(source: Source) -> ActivationCheckpointingConfig:
    """The activation_checkpointing section alone, as `load_layout` reads its own."""
    return _load_sections(source, ("activation_checkpointing",)).activation_checkpointing


def load_precision(source: Source) -> Config:
    """A Config that holds only what decides on number formats, as `load_layout` reads its own sections."""
    return _load_sections(source, ("fp16", "bf16", "torch_autocast", "amp"))


def load_kernels(source: Source) -> Config:
    """A Config that holds only what decides on kernels and copies, and among whom, as `load_layout` reads its own sections."""
    return _load_sections(source, ("kernels", "pipeline", "tensor_parallel"))


def _load_sections(source: Source, sections: tuple[str, ...]) -> Config:
    if isinstance(source, Config):
        return source
    name, given = read_source(source)
    return _checked(name, {key: value for key, value in given.items() if key in sections}, {}, {}).config


def read(source: str | Path | Mapping[str, Any] | None, auto: Any = None, known: Any = None) -> Reading:
    """As `load`, without warnings, and with how the values came about."""
    return _checked(*read_source(source), auto or {}, known or {})


def read_source(source: object) -> tuple[str, Mapping[str, Any]]:
    """(name for messages, mapping) of a path, a base64 text, a mapping or None. Raises ConfigError for what is none."""
    if source is None or isinstance(source, Mapping):
        return "configuration", source or {}
    if isinstance(source, str) and (mapping := decode(source)) is not None:
        return "configuration in base64", mapping
    if isinstance(source, (str, Path)):
        return str(source), read_mapping(Path(source))
    raise ConfigError(f"a configuration is a path or a mapping, not {type(source).__name__}; give one of the two")


def _checked(name: str, given: Mapping[str, Any], auto: Any, known: Mapping[str, Any]) -> Reading:
    if not isinstance(auto, Mapping):
        raise ConfigError(
            f'auto is {auto!r}; give a mapping of the keys that are "auto" to values, such as {{"optimizer.params.lr": 1e-4}}'
        )
    filling = fill(given, auto, known)
    review = Review(filling.problems)
    config = review.read(filling.values)
    if config is None:
        lines = review.problems
        raise ConfigError(
            f"{name}: " + (lines[0] if len(lines) == 1 else "\n  - ".join([f"{len(lines)} problems", *lines]))
        )
    return Reading(name, given, config, filling.origins, review)
