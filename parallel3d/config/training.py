"""The sections on the optimizer, compilation, kernels, recomputation, checkpoints, run records and failures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator

from parallel3d.config.known_keys import keys_of
from parallel3d.config.section import (
    LayerNames,
    NonEmpty,
    Params,
    Positive,
    ReadOnlyMapping,
    Section,
    key,
    own_key,
)


class OptimizerConfig(Section):
    """The optimizer by name, and the arguments of its constructor."""

    known_keys = keys_of("optimizer")

    type: NonEmpty = Field(description='the name of an optimizer, such as "AdamW"')
    params: Params = Field(
        default_factory=ReadOnlyMapping, description='a mapping of the optimizer\'s arguments, such as {"lr": 1e-3}'
    )

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

    type: NonEmpty = Field(description='the name of a schedule, such as "WarmupLR"')
    params: Params = Field(
        default_factory=ReadOnlyMapping,
        description='a mapping of the schedule\'s arguments, such as {"warmup_num_steps": 100}',
    )


class CompileConfig(Section):
    """torch.compile, layer by layer."""

    known_keys = keys_of("compile")

    enabled: bool = own_key(False, "true or false")
    backend: str = own_key("inductor", "a backend of torch.compile")
    mode: str | None = own_key(None, "a mode of torch.compile, or null")
    dynamic: bool | None = own_key(None, "true or false, whether shapes are expected to change, or null to find out")
    layers: LayerNames = own_key(None, "class names, or a regular expression that is searched in them; null for all")


AttentionBackend = Literal["cudnn", "flash", "efficient", "math"]
_QUOTED_BACKENDS = ", ".join(f'"{name}"' for name in get_args(AttentionBackend))


def _read_backends(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    return tuple(dict.fromkeys(names)) if isinstance(names, (list, tuple)) else value


class AttentionConfig(Section):
    """Which of PyTorch's kernels compute scaled_dot_product_attention."""

    unset_by_auto = frozenset({"backend"})

    backend: Annotated[
        tuple[AttentionBackend, ...] | None,
        Field(min_length=1),
        BeforeValidator(_read_backends, json_schema_input_type=AttentionBackend | tuple[AttentionBackend, ...] | None),
    ] = own_key(None, f'"auto" for PyTorch\'s choice, or {_QUOTED_BACKENDS} or a list of them, the first choice first')


def _kernel(choice: str) -> Any:
    """Define the field of a kernel. choice: the meaning of true and false."""
    return own_key(False, f'{choice}, or "auto" for the default')


class KernelsConfig(Section):
    """The CUDA kernels of this package to use, where the hardware has what they need; `p3d doctor` shows where.

    All are off by default: among whole steps, only those of two replicas became faster, with optimizer_step (docs/kernels.md).
    """

    known_keys = keys_of("kernels")
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

    enabled: bool = own_key(False, "true or false")
    min_replicas: Positive = own_key(
        1, "a whole number >= 1 of data-parallel replicas, with fewer of which training stops"
    )


class RngConfig(Section):
    """Dependence of random numbers on the layout."""

    layout_independent: bool = own_key(
        False,
        "true or false, whether what tensor-parallel ranks drop is part of what one process would drop, for the price of "
        "drawing all of it, and of attention that holds its probabilities",
    )


class ActivationCheckpointingConfig(Section):
    """How layers that are recomputed keep their inputs; which layers: pipeline.activation_checkpoint_interval."""

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    number_checkpoints: Positive | None = key(None, "a whole number of checkpoints >= 1, or null")
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


def _capitalized(value: object) -> object:
    return value.capitalize() if isinstance(value, str) else value


TagValidation = Annotated[Literal["Ignore", "Warn", "Fail"], BeforeValidator(_capitalized, json_schema_input_type=str)]


class CheckpointConfig(Section):
    """How engine.save_checkpoint saves."""

    known_keys = keys_of("checkpoint")

    tag_validation: TagValidation = key(
        "Warn",
        '"Ignore", "Warn" or "Fail", when ranks give different tags',
        differs="rank 0's is used, unless it is Fail",
    )
    keep_last: Positive | None = own_key(None, "a whole number of checkpoints >= 1 to keep, or null for all")
    async_save: bool = own_key(False, "true, to write while training goes on, or false")
    timeout_s: float = own_key(1800.0, "a number of seconds > 0 that ranks wait for each other", gt=0)


class RunRecordConfig(Section):
    """Whether the training writes what it measured, for the planner to learn from."""

    directory: NonEmpty | None = own_key(None, "a folder for run_record.json, or null for none")
    after_steps: Positive = own_key(10, "a whole number of steps >= 1, after which 4 are recorded")


class FailuresConfig(Section):
    """Detection and reports of failures. timeout_s: how long ranks may wait for one that doesn't move; 0: forever."""

    timeout_s: float = own_key(60.0, "seconds >= 0 after which a rank that holds up others is late, 0 for never", ge=0)
    directory: NonEmpty = own_key(".", "the folder for failure-RANK.json")
