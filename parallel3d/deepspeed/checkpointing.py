"""Recomputation of activations by DeepSpeed's process-wide functions, at its import path `parallel3d.checkpointing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

from parallel3d.autograd.recomputation import Checkpointer, RecomputationTimes
from parallel3d.config import Config, load, load_sections
from parallel3d.rng import Capture, OwnStreams

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset", "times"]


def _capture() -> Capture | None:
    return next((streams.capture for streams in _process.own_streams if streams.capture is not None), None)


@dataclass
class _Process:
    checkpointer: Checkpointer = field(default_factory=lambda: Checkpointer(capture=_capture))
    is_configured: bool = False
    own_streams: WeakSet[OwnStreams] = field(default_factory=WeakSet)  # of the engines' groups


# One object for the process, because layers call `checkpoint` without knowing an engine. It is the package's only
# global that changes: DeepSpeed's functions require it. A PipelineModule has a Checkpointer of its own.
_process = _Process()


def follow_captures(own_streams: OwnStreams) -> None:
    """Let `checkpoint` know of CUDA graphs that are captured with these streams: in them it can't restore random states."""
    _process.own_streams.add(own_streams)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run function(*args, **kwargs), and recompute it in its backward, with the settings of `configure`."""
    return _process.checkpointer(function, *args, **kwargs)


non_reentrant_checkpoint = checkpoint  # DeepSpeed's other name


def configure(
    mpu_: Any = None,
    deepspeed_config: str | Path | Mapping[str, Any] | Config | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure `checkpoint` by the configuration's `activation_checkpointing` section, then by the arguments given.

    mpu_, partition_activations, contiguous_checkpointing and num_checkpoints (the size of its buffer) have no effect:
    PyTorch's allocator reuses the blocks. Raises ConfigError.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    config = load_sections(deepspeed_config, "activation_checkpointing")
    section = config.activation_checkpointing.model_dump(exclude_none=True)
    section.update({key: value for key, value in given.items() if value is not None})
    settings = load({"activation_checkpointing": section}).activation_checkpointing
    _process.checkpointer = Checkpointer(settings, capture=_capture)
    _process.is_configured = True


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _process.is_configured


def times() -> RecomputationTimes:
    """Return the times of all regions run by `checkpoint` since the last call, if configured with `profile`."""
    return _process.checkpointer.times()


def reset() -> None:
    """Do nothing; DeepSpeed scripts call it between evaluations. Here a region's tensors are freed with its graph."""
