"""Settings of a PipelineModule, from its arguments, its topology and the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from parallel3d.comm.environment import get_world_size
from parallel3d.comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from parallel3d.config import Config, PipelineConfig, load_sections
from parallel3d.config.section import read_only
from parallel3d.errors import ConfigError, PartitionError
from parallel3d.partition import Method
from parallel3d.pipe.calls import LayerChoice, Policies
from parallel3d.schedule.builders import build
from parallel3d.schedule.instructions import Program


@dataclass(frozen=True)
class BuildSettings:
    """Settings by which a module is split and its layers are built, with the names of PipelineModule's arguments."""

    topology: ProcessTopology
    num_stages: int
    num_chunks: int
    placement: str
    seed_layers: bool
    partition_method: Method
    checkpointable_layers: LayerChoice | None
    activation_checkpoint_interval: int
    checkpoint_policy: Policies
    sequence_parallel: bool
    layout_independent: bool
    max_stage_bytes: int | None = None

    def program(self, pipeline: PipelineConfig, num_micro_batches: int) -> Program:
        """Build the configured schedule's compute instructions. Raises ScheduleError if that can't be done."""
        shape = (self.num_stages, num_micro_batches, self.num_chunks, self.placement)
        return build(pipeline.schedule, *shape, pipeline.max_in_flight)


def checkpoint_interval(config: Config) -> int | None:
    """Return how many neighbouring layers the configuration has recomputed together; None if it doesn't say."""
    policy, interval = config.activation_checkpointing.policy, config.pipeline.activation_checkpoint_interval
    if policy == "none":
        return 0
    return 1 if interval is None and policy is not None else interval


def resolve_settings(
    config: str | Path | Mapping[str, Any] | Config | None,
    topology: ProcessTopology | None,
    num_layers: int,
    **given: Any,
) -> BuildSettings:
    """Take each setting from the arguments, else from the configuration, else its default.

    given: PipelineModule's arguments with the names of settings; None for those that the caller left out.

    Raises ConfigError where argument and configuration disagree, PartitionError for a number of stages that the world
    can't have.
    """
    layout = load_sections(config, "pipeline", "tensor_parallel", "rng", "activation_checkpointing")
    pipeline = layout.pipeline

    def choose(key: str, default: Any) -> Any:
        own = {"partition_method": pipeline.partition, "activation_checkpoint_interval": checkpoint_interval(layout)}
        configured = own[key] if key in own else getattr(pipeline, key)
        return _choose(key, read_only(given[key]), configured, default)

    stages = _choose("num_stages", given["num_stages"], pipeline.stages, None)
    topology = topology or _make_topology(stages, layout.tensor_parallel.size or 1)
    stages = _choose("num_stages", stages, max(1, topology.get_dim("pipe")), 1)
    recomputed = choose("checkpointable_layers", None)
    # Unless chunks are given, schedule "auto" gets two chunks a stage in a V: a small bubble in the least memory.
    chunks_given = any((given["num_chunks"], pipeline.num_chunks, given["placement"], pipeline.placement))
    two_chunks = pipeline.schedule == "auto" and not chunks_given and 1 < stages <= num_layers // 2
    return BuildSettings(
        topology=topology,
        num_stages=stages,
        num_chunks=choose("num_chunks", 2 if two_chunks else 1),
        placement=choose("placement", "v" if two_chunks else "loop"),
        seed_layers=choose("seed_layers", False),
        partition_method=choose("partition_method", "parameters"),
        checkpointable_layers=recomputed,
        activation_checkpoint_interval=choose("activation_checkpoint_interval", 0 if recomputed is None else 1),
        checkpoint_policy=layout.activation_checkpointing.policy or "full",
        sequence_parallel=layout.tensor_parallel.sequence_parallel,
        layout_independent=layout.rng.layout_independent,
        max_stage_bytes=pipeline.max_stage_bytes,
    )


def _choose(key: str, argument: Any, configured: Any, default: Any) -> Any:
    """Return the argument, else the configured (or the topology's) value, else the default.

    Raises ConfigError when argument and configuration disagree.
    """
    if argument is not None and configured is not None and argument != configured:
        raise ConfigError(
            f"{key} is {argument!r} in one place and {configured!r} in another (PipelineModule's arguments, its topology, the "
            "configuration's pipeline section); give it once"
        )
    return next((value for value in (argument, configured) if value is not None), default)


def _make_topology(num_stages: int | None, tensor_size: int) -> ProcessTopology:
    world_size = get_world_size()
    if num_stages is None:
        raise PartitionError("PipelineModule needs num_stages, a topology, or pipeline.stages in its configuration")
    if not isinstance(num_stages, Integral) or num_stages < 1:
        raise PartitionError(f"num_stages is {num_stages!r}; give a whole number of at least 1")
    ranks_per_replica = num_stages * tensor_size
    if world_size % ranks_per_replica:
        fitting = [n for n in range(1, world_size + 1) if world_size % (n * tensor_size) == 0]
        tensor = f" x {tensor_size} tensor-parallel ranks" if tensor_size > 1 else ""
        remedy = f"use one of {fitting} stages" if fitting else f"set tensor_parallel.size to a divisor of {world_size}"
        raise PartitionError(
            f"{num_stages} stages{tensor} don't divide a world of {world_size} processes; {remedy}, or start a multiple of "
            f"{ranks_per_replica} processes"
        )
    num_replicas = world_size // ranks_per_replica
    if tensor_size == 1:
        return PipeDataParallelTopology(num_stages, num_replicas)
    return PipeModelDataParallelTopology(num_pp=num_stages, num_mp=tensor_size, num_dp=num_replicas)
