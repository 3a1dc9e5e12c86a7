"""The sections pipeline (stages, schedule, partition), tensor_parallel and activation_checkpointing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from parallel3d.config.section import (
    LayerNames,
    NonEmpty,
    NonNegative,
    Positive,
    ReadOnlyMapping,
    Section,
    dumped,
    key,
    own_key,
    read_only,
    whole,
)
from parallel3d.schedule.builders import check_chunks

ScheduleName = Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "zb-looped", "auto"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
SelectivePolicy = Literal["cheap", "attention"]  # keeps some of what a layer computes
SELECTIVE: tuple[SelectivePolicy, ...] = get_args(SelectivePolicy)
RecomputationPolicy = Literal["none", "full", "auto"] | SelectivePolicy
# Policy of all layers, or by the layers' class names or numbers, with "default" for the others.
_Policies = Annotated[
    RecomputationPolicy
    | Annotated[Mapping[str, RecomputationPolicy], Field(min_length=1), AfterValidator(ReadOnlyMapping)],
    PlainSerializer(dumped),
]
_QUOTED_SCHEDULES = ", ".join(f'"{name}"' for name in SCHEDULES)


def leaves_open(policy: object) -> bool:
    """Return whether a policy, or one of several, is "auto"."""
    return "auto" in policy.values() if isinstance(policy, Mapping) else policy == "auto"


def _read_partition(value: object) -> object:
    return None if value == "best" else read_only(value)  # DeepSpeed's default: whatever the module says


Schedule = Annotated[
    ScheduleName | Annotated[tuple[tuple[str, ...], ...], Field(min_length=1)], BeforeValidator(read_only)
]
_Weights = Annotated[
    Mapping[Literal["weights"], tuple[float, ...]], Field(min_length=1), AfterValidator(ReadOnlyMapping)
]
Partition = Annotated[
    NonEmpty | tuple[Annotated[int, BeforeValidator(whole)], ...] | _Weights | None,
    BeforeValidator(_read_partition),
    PlainSerializer(dumped),
]


class PipelineConfig(Section, keys="pipeline"):
    """Split of the layers into stages, and the schedule; None: by the arguments of PipelineModule."""

    unset_by_auto = frozenset({"stages"})

    stages: Positive | None = key(None, "a whole number of stages >= 1")
    schedule: Schedule = own_key(
        "1f1b",
        f'{_QUOTED_SCHEDULES} or, for each stage, its list of instructions such as ["F0@0", "B0@0"]',
    )
    num_chunks: Positive | None = own_key(None, "a whole number of chunks a stage >= 1")
    placement: Literal["loop", "v"] | None = own_key(None, '"loop" or "v"')
    partition: Partition = key(
        None,
        'a method ("parameters", "flops", "profile", "uniform", "type:REGEX"), bounds such as [0, 3, 8] or '
        '{"weights": [one number a layer]}',
        differs="bounds and weights may be given too; layers are split by an exact min-max",
    )
    max_stage_bytes: Positive | None = own_key(
        None, "a whole number of bytes that model state and activations of a stage may take at most"
    )
    activation_checkpoint_interval: NonNegative | None = key(
        None, "a whole number of layers >= 0, where 0 recomputes nothing"
    )
    checkpointable_layers: LayerNames = own_key(
        None, 'a regular expression such as "Block|MLP", or a list of class names such as ["Block"]'
    )
    max_in_flight: float | None = own_key(
        None,
        'a number > 0, the activations that "zb-looped" and "auto" may hold as a multiple of "1f1b"\'s',
        gt=0,
    )
    plan: str | None = own_key(None, 'a path, where schedule "auto" finds its plan or else writes it')
    peer_copies: bool = own_key(
        True,
        "true or false: whether stages of one host send by copies into each other's memory, else by NCCL",
    )
    shapes: Literal["static", "dynamic"] = own_key("static", '"static" or "dynamic"')
    units: Literal["block", "half"] = own_key("block", '"block" or "half", see the units of models.from_hf')
    seed_layers: bool | None = key(None, "true or false")

    @model_validator(mode="after")
    def _consistent(self) -> PipelineConfig:
        check_chunks(self.schedule if isinstance(self.schedule, str) else None, self.num_chunks, self.placement)
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


class TensorParallelConfig(Section, keys="tensor_parallel"):
    """The number of tensor-parallel ranks, and whether activations between their layers are sharded along the sequence."""

    unset_by_auto = frozenset({"size"})

    size: Positive | None = own_key(None, "a whole number of ranks >= 1")
    autotp_size: NonNegative = key(
        0,
        "a whole number of ranks >= 0 over which a model of transformers is sharded; 0 or 1: not",
        differs="by the plan of the model's config; train_batch_size counts the samples of all ranks, as in DeepSpeed",
    )
    sequence_parallel: bool = own_key(False, "true or false")
    peer_copies: bool = own_key(
        False,
        "true or false: whether, with sequence_parallel, tensor-parallel ranks of one host send by copies into each other's "
        "memory while matrix products run, else by NCCL",
    )

    @property
    def copies_shards(self) -> bool:
        """Whether shards of sequences are sent by copies."""
        return self.sequence_parallel and self.peer_copies

    @model_validator(mode="after")
    def _consistent(self) -> TensorParallelConfig:
        if self.sequence_parallel and self.size == 1:
            raise ValueError(
                "sequence_parallel shards sequences over the tensor-parallel ranks, but size is 1; set size, or "
                "sequence_parallel to false"
            )
        return self


class ActivationCheckpointingConfig(Section):
    """Recomputation of activations; pipeline.checkpointable_layers and activation_checkpoint_interval choose the layers."""

    policy: _Policies | None = own_key(
        None,
        '"none", "cheap" (element-wise results are recomputed), "attention" (attention, too), "full" (all) or "auto" (what '
        "memory_budget needs), of the layers that pipeline.checkpointable_layers chooses; or by class names and numbers of "
        'layers, such as {"Block": "cheap", "7": "full", "default": "none"}',
    )
    memory_budget: float | None = own_key(
        None,
        "a number > 0, for policy \"auto\": what a rank's tensors may take in GiB or, up to 1, as a share of the GPU's memory",
        gt=0,
    )

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: Positive | None = key(None, "a whole number of checkpoints >= 1, or null")
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> ActivationCheckpointingConfig:
        if self.memory_budget is not None and not leaves_open(self.policy):
            raise ValueError('memory_budget is for policy "auto"; set policy to that, or leave memory_budget out')
        return self
