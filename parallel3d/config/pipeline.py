"""The sections pipeline (stages, schedule, partition) and tensor_parallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema, model_validator

from parallel3d.config.section import (
    OWN,
    KnownKey,
    LayerNames,
    NonNegative,
    Positive,
    ReadOnlyMapping,
    Section,
    Support,
    differs,
    dumped,
    known,
    whole,
)
from parallel3d.errors import nearest

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "zb-looped", "auto")
_QUOTED_SCHEDULES = ", ".join(f'"{name}"' for name in SCHEDULES)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _read_schedule(value: object) -> object:
    if isinstance(value, (list, tuple)) and value and all(isinstance(rank, (list, tuple)) for rank in value):
        if all(isinstance(instruction, str) for rank in value for instruction in rank):
            return tuple(map(tuple, value))
    elif isinstance(value, str) and value in SCHEDULES:
        return value
    hint = nearest(value.lower(), SCHEDULES) if isinstance(value, str) else ""
    raise ValueError(
        f'give {_QUOTED_SCHEDULES} or, for each stage, its list of instructions such as ["F0@0", "B0@0"].{hint}'
    )


def _read_partition(value: object) -> object:
    if value == "best":
        return None  # DeepSpeed's default: whatever the module says
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, Mapping) and set(value) == {"weights"}:
        weights = value["weights"]
        if isinstance(weights, (list, tuple)) and all(map(_is_number, weights)):
            return ReadOnlyMapping(value)
    elif isinstance(value, (list, tuple)):
        bounds = tuple(map(whole, value))
        if all(_is_number(bound) and isinstance(bound, int) for bound in bounds):
            return bounds
    raise ValueError(
        'give "parameters", "flops", "profile", "uniform", "type:REGEX", bounds such as [0, 3, 8] or '
        '{"weights": [one number a layer]}'
    )


Schedule = Annotated[
    str | tuple[tuple[str, ...], ...],
    PlainValidator(_read_schedule),
    WithJsonSchema({"anyOf": [{"enum": list(SCHEDULES)}, {"type": "array", "items": {"type": "array"}}]}),
]
Partition = Annotated[
    str | tuple[int, ...] | Mapping[str, Any] | None,
    PlainValidator(_read_partition),
    PlainSerializer(dumped),
    WithJsonSchema({"type": ["string", "array", "object", "null"]}),
]


class PipelineConfig(Section):
    """How layers become stages, and in which order the stages work; None: as PipelineModule says."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = {
        **known(
            Support.WITHOUT_EFFECT,
            "activations between stages are not partitioned over tensor-parallel ranks",
            "pipe_partitioned grad_partitioned",
        ),
        **known(Support.REMOVED, "no training step became faster with it", "receive_in_place"),
    }
    auto_is_a_value = frozenset({"schedule"})
    unset_by_auto = frozenset({"stages"})

    stages: Positive | None = Field(None, description="a whole number of stages >= 1")
    schedule: Schedule = Field(
        "1f1b", description=f"{_QUOTED_SCHEDULES} or lists of instructions", json_schema_extra=OWN
    )
    num_chunks: Positive | None = Field(
        None, description="a whole number of chunks a stage >= 1", json_schema_extra=OWN
    )
    placement: Literal["loop", "v"] | None = Field(None, description='"loop" or "v"', json_schema_extra=OWN)
    partition: Partition = Field(
        None,
        description='a method ("parameters", "flops", "profile", "uniform", "type:REGEX"), bounds or weights',
        json_schema_extra=differs("bounds and weights may be given too; layers are split by an exact min-max"),
    )
    max_stage_bytes: Positive | None = Field(
        None,
        description="a whole number of bytes that model state and activations of a stage may take at most",
        json_schema_extra=OWN,
    )
    activation_checkpoint_interval: NonNegative | None = Field(
        None, description="a whole number of layers >= 0, where 0 recomputes nothing"
    )
    checkpointable_layers: LayerNames = Field(
        None, description="a regular expression or a list of class names", json_schema_extra=OWN
    )
    max_in_flight: float | None = Field(
        None,
        gt=0,
        description='a number > 0, the activations that "zb-looped" and "auto" may hold as a multiple of "1f1b"\'s',
        json_schema_extra=OWN,
    )
    plan: str | None = Field(
        None, description='a path, where schedule "auto" finds its plan or else writes it', json_schema_extra=OWN
    )
    peer_copies: bool = Field(
        True,
        description="true or false: whether stages of one host send by copies into each other's memory, else by NCCL",
        json_schema_extra=OWN,
    )
    shapes: Literal["static", "dynamic"] = Field("static", description='"static" or "dynamic"', json_schema_extra=OWN)
    seed_layers: bool | None = Field(None, description="true or false")

    @model_validator(mode="after")
    def _consistent(self) -> PipelineConfig:
        others = {"1f1b": '"interleaved" or "gpipe"', "zb-h1": '"zb-looped"'}
        if self.schedule in others and self.num_chunks not in (None, 1):
            raise ValueError(
                f'schedule "{self.schedule}" runs 1 chunk a stage, but num_chunks is {self.num_chunks}; set schedule to '
                f"{others[self.schedule]}, or num_chunks to 1"
            )
        others = {"interleaved": '"gpipe"', "zb-looped": '"zbv"'}
        if self.schedule in others and self.placement == "v":
            raise ValueError(
                f'schedule "{self.schedule}" needs placement "loop"; set that, or schedule to {others[self.schedule]}'
            )
        if self.schedule == "zbv" and (self.num_chunks not in (None, 2) or self.placement not in (None, "v")):
            raise ValueError(
                f'schedule "zbv" needs num_chunks 2 and placement "v", but num_chunks is {self.num_chunks} and placement '
                f'is {self.placement!r}; set both, or schedule to "zb-looped"'
            )
        if self.placement == "v" and self.num_chunks not in (None, 2):
            raise ValueError(
                f'placement "v" puts 2 chunks on each stage, but num_chunks is {self.num_chunks}; set num_chunks to 2, '
                'or placement to "loop"'
            )
        if self.max_in_flight is not None and self.schedule not in ("zb-looped", "auto"):
            raise ValueError(
                'max_in_flight bounds schedules "zb-looped" and "auto"; set schedule to one, or leave max_in_flight out'
            )
        if self.plan is not None and self.schedule != "auto":
            raise ValueError('plan is the file of schedule "auto"; set schedule to that, or leave plan out')
        if isinstance(self.schedule, tuple) and self.stages not in (None, len(self.schedule)):
            raise ValueError(
                f"schedule lists instructions for {len(self.schedule)} stages, but stages is {self.stages}; give one "
                "list a stage"
            )
        return self


class TensorParallelConfig(Section):
    """Over how many ranks each layer is sliced that can be, and whether what lies between is shared along the sequence."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = {
        **known(
            Support.REFUSED,
            "give size, and layers that slice themselves or parallel3d.tensor_parallel.parallelize",
            "autotp_size",
            same=(0, 1),
        ),
        **known(
            Support.WITHOUT_EFFECT,
            "layers say themselves how they are sliced",
            "dtype tp_overlap_comm vocab_parallel_lm_head vocab_parallel_ce_backend tp tensor_parallel injection_policy_tuple "
            "partition_config preset_model keep_module_on_host kernel_inject replace_with_kernel_inject",
        ),
    }
    unset_by_auto = frozenset({"size"})

    size: Positive | None = Field(None, description="a whole number of ranks >= 1", json_schema_extra=OWN)
    sequence_parallel: bool = Field(False, description="true or false", json_schema_extra=OWN)
    peer_copies: bool = Field(
        False,
        description="true or false: whether, with sequence_parallel, slices of one host send by copies into each other's "
        "memory, behind the products, else by NCCL",
        json_schema_extra=OWN,
    )

    @property
    def copies_shards(self) -> bool:
        """Whether shards of sequences shall travel by copies."""
        return self.sequence_parallel and self.peer_copies

    @model_validator(mode="after")
    def _consistent(self) -> TensorParallelConfig:
        if self.sequence_parallel and self.size == 1:
            raise ValueError(
                "sequence_parallel shares sequences over the ranks of a slice group, but size is 1; set size, or "
                "sequence_parallel to false"
            )
        return self
