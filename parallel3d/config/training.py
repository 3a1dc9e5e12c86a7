"""Sections on the optimizer, its learning rate, and what the backward recomputes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator

from parallel3d.config.section import OWN, KnownKey, Params, Positive, ReadOnlyMapping, Section, Support, known

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


class FailuresConfig(Section):
    """How a failure is found and told. timeout_s: how long ranks may wait for one that doesn't move; 0: for ever."""

    timeout_s: float = Field(
        60.0,
        ge=0,
        description="seconds >= 0 after which a rank that holds up others is late, 0 for never",
        json_schema_extra=OWN,
    )
    directory: str = Field(".", min_length=1, description="the folder for failure-RANK.json", json_schema_extra=OWN)
