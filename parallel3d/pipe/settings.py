"""What PipelineModule's arguments, its topology and the configuration say together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from parallel3d.comm.environment import get_world_size
from parallel3d.config import Config, load_layout
from parallel3d.errors import ConfigError, PartitionError
from parallel3d.layer_choice import LayerChoice
from parallel3d.partition import Method
from parallel3d.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

T = TypeVar("T")


@dataclass(frozen=True)
class BuildSettings:
    """How a module is split and its layers are built; see PipelineModule, and the rng section for layout_independent."""

    topology: ProcessTopology
    num_stages: int
    num_chunks: int
    placement: str
    seed_layers: bool
    partition_method: Method
    checkpointable_layers: LayerChoice | None
    activation_checkpoint_interval: int
    sequence_parallel: bool
    layout_independent: bool
    max_stage_bytes: int | None = None


def settle(
    config: str | Path | Mapping[str, Any] | Config | None,
    *,
    num_stages: int | None,
    topology: ProcessTopology | None,
    seed_layers: bool | None,
    partition_method: Method | None,
    activation_checkpoint_interval: int | None,
    checkpointable_layers: LayerChoice | None,
    num_chunks: int | None,
    placement: str | None,
    num_layers: int,
) -> BuildSettings:
    """Arguments, else the configuration's layout, else the defaults. Raises ConfigError where two disagree, PartitionError."""
    layout = load_layout(config)
    pipeline = layout.pipeline
    stages = _choose("num_stages", num_stages, pipeline.stages, None)
    topology = topology or _make_topology(stages, layout.tensor_parallel.size or 1)
    recomputed = _choose(
        "checkpointable_layers", _as_tuple(checkpointable_layers), pipeline.checkpointable_layers, None
    )
    method: Method = "parameters"
    length = _choose("num_stages", stages, max(1, topology.get_dim("pipe")), 1)
    given = (num_chunks, pipeline.num_chunks, placement, pipeline.placement)
    # Schedule "auto" has the chunks that need the least memory for their bubble, unless it is told.
    split = pipeline.schedule == "auto" and not any(given) and 1 < length <= num_layers // 2
    return BuildSettings(
        topology=topology,
        num_stages=length,
        num_chunks=_choose("num_chunks", num_chunks, pipeline.num_chunks, 2 if split else 1),
        placement=_choose("placement", placement, pipeline.placement, "v" if split else "loop"),
        seed_layers=_choose("seed_layers", seed_layers, pipeline.seed_layers, False),
        partition_method=_choose("partition_method", _as_configured(partition_method), pipeline.partition, method),
        checkpointable_layers=recomputed,
        activation_checkpoint_interval=_choose(
            "activation_checkpoint_interval",
            activation_checkpoint_interval,
            pipeline.activation_checkpoint_interval,
            0 if recomputed is None else 1,
        ),
        sequence_parallel=layout.tensor_parallel.sequence_parallel,
        layout_independent=layout.rng.layout_independent,
        max_stage_bytes=pipeline.max_stage_bytes,
    )


def _as_configured(method: Method | None) -> Method | None:
    """A partition method as the configuration reads it: bounds and weights are tuples."""
    if isinstance(method, Mapping):
        return {key: tuple(values) if isinstance(values, list) else values for key, values in method.items()}
    return tuple(method) if isinstance(method, list) else method


def _as_tuple(choice: LayerChoice | None) -> LayerChoice | None:
    """A choice of layers as the configuration reads it: names are a tuple."""
    return tuple(choice) if isinstance(choice, list) else choice


def _choose(key: str, argument: T | None, configured: Any, default: T) -> T:
    """An argument, else what the configuration (or topology) says, else the default; ConfigError when the two disagree."""
    if argument is not None and configured is not None and argument != configured:
        raise ConfigError(
            f"{key} is {argument!r} in one place and {configured!r} in another (PipelineModule's arguments, its topology, the "
            "configuration's pipeline section); give it once"
        )
    if argument is not None:
        return argument
    return default if configured is None else configured


def _make_topology(num_stages: int | None, num_slices: int) -> ProcessTopology:
    world_size = get_world_size()
    if num_stages is None:
        raise PartitionError("PipelineModule needs num_stages, a topology, or pipeline.stages in its configuration")
    if num_stages < 1:
        raise PartitionError(f"num_stages is {num_stages}; a pipeline has at least 1")
    if world_size % (num_stages * num_slices):
        fitting = [n for n in range(1, world_size + 1) if world_size % (n * num_slices) == 0]
        sliced = f" x {num_slices} tensor slices" if num_slices > 1 else ""
        remedy = f"use one of {fitting} stages" if fitting else f"set tensor_parallel.size to a divisor of {world_size}"
        raise PartitionError(
            f"{num_stages} stages{sliced} don't divide a world of {world_size} processes; {remedy}, or start a multiple of "
            f"{num_stages * num_slices} processes"
        )
    num_replicas = world_size // (num_stages * num_slices)
    if num_slices == 1:
        return PipeDataParallelTopology(num_stages, num_replicas)
    return PipeModelDataParallelTopology(num_pp=num_stages, num_mp=num_slices, num_dp=num_replicas)
