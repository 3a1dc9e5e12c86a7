"""Sections on the optimizer, its learning rate, and what the backward recomputes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator, WithJsonSchema, field_validator

from parallel3d.config.section import (
    OWN,
    KnownKey,
    LayerNames,
    Params,
    Positive,
    ReadOnlyMapping,
    Section,
    Support,
    differs,
    known,
)
from parallel3d.errors import nearest

_BOOL = "true or false"


def _no_params() -> ReadOnlyMapping:
    return ReadOnlyMapping({})


class OptimizerConfig(Section):
    """The optimizer by name, and the arguments of its constructor."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = known(
        Support.WITHOUT_EFFECT, "PyTorch's fused kernels are used wherever they exist", "legacy_fusion"
    )

    type: str = Field(min_length=1, description='the name of an optimizer, such as "AdamW"')
    params: Params = Field(default_factory=_no_params, description="a mapping of the optimizer's arguments")

    @field_validator("params")
    @classmethod
    def _no_clipping(cls, params: Mapping[str, Any]) -> Mapping[str, Any]:
        if "max_grad_norm" in params:
            raise ValueError(
                f"max_grad_norm is no argument of an optimizer; set gradient_clipping to {params['max_grad_norm']!r} at the "
                "top level instead"
            )
        return params


class SchedulerConfig(Section):
    """The learning-rate schedule by name, and the arguments of its constructor."""

    type: str = Field(min_length=1, description='the name of a schedule, such as "WarmupLR"')
    params: Params = Field(default_factory=_no_params, description="a mapping of the schedule's arguments")


class CompileConfig(Section):
    """torch.compile, layer by layer."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = known(
        Support.WITHOUT_EFFECT,
        "layers are compiled one by one where enabled is true",
        "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
        "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
        "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
        "keep_int_input_tensors keep_all_input_tensors passes",
    )

    enabled: bool = Field(False, description=_BOOL, json_schema_extra=OWN)
    backend: str = Field("inductor", description="a backend of torch.compile", json_schema_extra=OWN)
    mode: str | None = Field(None, description="a mode of torch.compile, or null", json_schema_extra=OWN)
    dynamic: bool | None = Field(
        None,
        description="true or false, whether shapes are expected to change, or null to find out",
        json_schema_extra=OWN,
    )
    layers: LayerNames = Field(
        None,
        description="class names, or a regular expression that is searched in them; null for all",
        json_schema_extra=OWN,
    )


ATTENTION_BACKENDS = ("cudnn", "flash", "efficient", "math")
_QUOTED_BACKENDS = ", ".join(f'"{name}"' for name in ATTENTION_BACKENDS)


def _read_backends(value: object) -> object:
    if value is None:
        return None
    names = (value,) if isinstance(value, str) else value
    if isinstance(names, (list, tuple)) and names and all(name in ATTENTION_BACKENDS for name in names):
        return tuple(dict.fromkeys(names))
    wrong = [name for name in names if name not in ATTENTION_BACKENDS] if isinstance(names, (list, tuple)) else []
    hint = nearest(wrong[0], ATTENTION_BACKENDS) if wrong and isinstance(wrong[0], str) else ""
    raise ValueError(f'give "auto", or {_QUOTED_BACKENDS} or a list of them, the first choice first.{hint}')


class AttentionConfig(Section):
    """Which of PyTorch's kernels compute scaled_dot_product_attention."""

    unset_by_auto = frozenset({"backend"})

    backend: Annotated[
        tuple[str, ...] | None,
        PlainValidator(_read_backends),
        WithJsonSchema(
            {
                "anyOf": [
                    {"enum": [*ATTENTION_BACKENDS, None]},
                    {"type": "array", "items": {"enum": list(ATTENTION_BACKENDS)}},
                ]
            }
        ),
    ] = Field(
        None,
        description=f'"auto" for PyTorch\'s choice, or {_QUOTED_BACKENDS} or a list of them, the first choice first',
        json_schema_extra=OWN,
    )


def _kernel(choice: str) -> Any:
    """The field of a kernel. choice: what true and false mean."""
    return Field(False, description=f'{choice}, or "auto" for the default', json_schema_extra=OWN)


class KernelsConfig(Section):
    """The CUDA kernels of this package to use, where the hardware has what they need; `p3d doctor` shows where.

    All are off by default: among whole steps, only those of two replicas became faster, with optimizer_step (docs/kernels.md).
    """

    known_keys: ClassVar[Mapping[str, KnownKey]] = {
        **known(Support.REMOVED, "no training step became faster with it", "all_reduce_norm"),
        **known(Support.REMOVED, "steps with tensor parallelism became 2.5% slower with it", "message_wait"),
        **known(Support.REMOVED, "optimizer_step gathers the weights in less time", "all_gather"),
    }
    unset_by_auto = frozenset({"all_reduce", "reduce_scatter", "optimizer_step"})

    all_reduce: bool = _kernel(
        "true to all-reduce among tensor-parallel ranks of one host by a kernel over NVLink, false for NCCL"
    )
    reduce_scatter: bool = _kernel(
        "true to reduce-scatter gradients among replicas of one host by a kernel over NVLink, false for NCCL"
    )
    optimizer_step: bool = _kernel(
        "true to run Adam and AdamW as one kernel that also writes the weights of all replicas of one host, false for torch's"
    )


class ElasticConfig(Section):
    """Whether a restart may have another number of replicas: the train batch stays, by another number of micro-batches."""

    enabled: bool = Field(False, description=_BOOL, json_schema_extra=OWN)
    min_replicas: Positive = Field(
        1,
        description="a whole number >= 1 of data-parallel replicas, with fewer of which training stops",
        json_schema_extra=OWN,
    )


class RngConfig(Section):
    """Dependence of random numbers on the layout."""

    layout_independent: bool = Field(
        False,
        description="true or false, whether what tensor slices drop is part of what one process would drop, for the price of "
        "drawing all of it, and of attention that holds its probabilities",
        json_schema_extra=OWN,
    )


class ActivationCheckpointingConfig(Section):
    """How layers that are recomputed keep their inputs; which layers: pipeline.activation_checkpoint_interval."""

    partition_activations: bool = Field(False, description=_BOOL)
    contiguous_memory_optimization: bool = Field(False, description=_BOOL)
    cpu_checkpointing: bool = Field(False, description=_BOOL)
    number_checkpoints: Positive | None = Field(None, description="a whole number of checkpoints >= 1, or null")
    synchronize_checkpoint_boundary: bool = Field(False, description=_BOOL)
    profile: bool = Field(False, description=_BOOL)


def _capitalized(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


TagValidation = Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capitalized, json_schema_input_type=str)]


class CheckpointConfig(Section):
    """How engine.save_checkpoint saves."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = {
        **known(Support.WITHOUT_EFFECT, "every checkpoint loads in any layout", "load_universal"),
        **known(Support.WITHOUT_EFFECT, "every rank writes its own part", "parallel_write", keys=("pipeline_stage",)),
        **known(Support.WITHOUT_EFFECT, "files are written by safetensors", "writer"),
        **known(Support.WITHOUT_EFFECT, "nothing is pickled", "checkpoint_serialization"),
        **known(
            Support.REFUSED,
            "any rank may read what any other has written: save to a directory that all hosts share",
            "use_node_local_storage",
        ),
    }

    tag_validation: TagValidation = Field(
        "Warn",
        description='"Ignore", "Warn" or "Fail", when ranks give different tags',
        json_schema_extra=differs("rank 0's is used, unless it is Fail"),
    )
    keep_last: Positive | None = Field(
        None, description="a whole number of checkpoints >= 1 to keep, or null for all", json_schema_extra=OWN
    )
    async_save: bool = Field(
        False, description="true, to write while training goes on, or false", json_schema_extra=OWN
    )
    timeout_s: float = Field(
        1800.0, gt=0, description="a number of seconds > 0 that ranks wait for each other", json_schema_extra=OWN
    )


class RunRecordConfig(Section):
    """Whether the training writes what it measured, for the planner to learn from."""

    directory: str | None = Field(
        None, min_length=1, description="a folder for run_record.json, or null for none", json_schema_extra=OWN
    )
    after_steps: Positive = Field(
        10, description="a whole number of steps >= 1, behind which 4 are recorded", json_schema_extra=OWN
    )


class FailuresConfig(Section):
    """How a failure is found and told. timeout_s: how long ranks may wait for one that doesn't move; 0: for ever."""

    timeout_s: float = Field(
        60.0,
        ge=0,
        description="seconds >= 0 after which a rank that holds up others is late, 0 for never",
        json_schema_extra=OWN,
    )
    directory: str = Field(".", min_length=1, description="the folder for failure-RANK.json", json_schema_extra=OWN)
