"""Sections on the optimizer, its learning rate, and what the backward recomputes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from parallel3d.config.section import OWN, KnownKey, Params, Positive, ReadOnlyMapping, Section, Support, differs, known

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
