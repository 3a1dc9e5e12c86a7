"""Sections on number formats: fp16, bf16, autocast, and the dtypes of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from parallel3d.config.section import (
    Dtype,
    HalfDtype,
    KnownKey,
    NonNegative,
    Positive,
    Section,
    Support,
    differs,
    known,
)

_BOOL = "true or false"
_MASTERS = "masters, their gradients and the optimizer's state are kept in fp32; set it to false"


class Fp16Config(Section):
    """Training in float16 with fp32 masters, the loss scaled; loss_scale 0 is a scale that adapts (arXiv:1710.03740).

    The first scale is 2**initial_scale_power. It doubles after loss_scale_window steps without an overflow, and halves, not
    below min_loss_scale, at the hysteresis-th overflow; consecutive_hysteresis: a step without one restores the count.
    """

    known_keys: ClassVar[Mapping[str, KnownKey]] = {
        **known(Support.REFUSED, _MASTERS, "fp16_master_weights_and_grads"),
        **known(Support.WITHOUT_EFFECT, "PyTorch's fused kernels are used wherever they exist", "fused_mode"),
    }

    enabled: bool = Field(False, description=_BOOL)
    auto_cast: bool = Field(
        True,
        description=_BOOL,
        json_schema_extra=differs(
            "true by default: floating-point inputs are cast to fp16; false leaves them as they are"
        ),
    )
    loss_scale: float = Field(0.0, ge=0, description="a number >= 0, where 0 lets the scale adapt")
    initial_scale_power: NonNegative = Field(16, le=127, description="a whole number of powers of two from 0 to 127")
    loss_scale_window: Positive = Field(1000, description="a whole number of steps >= 1")
    hysteresis: Positive = Field(2, description="a whole number of overflows >= 1")
    consecutive_hysteresis: bool = Field(False, description=_BOOL)
    min_loss_scale: float = Field(1.0, gt=0, description="a number > 0, such as 1")


class Bf16Config(Section):
    """Training in bfloat16 with fp32 masters; check_grad_overflow skips a step whose gradients are not finite."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = {
        **known(Support.REFUSED, _MASTERS, "bf16_master_weights_and_grads bf16_optimizer_states"),
        **known(
            Support.WITHOUT_EFFECT,
            "gradients always reach their fp32 accumulators as soon as they are made",
            "immediate_grad_update",
        ),
    }

    enabled: bool = Field(False, description=_BOOL)
    check_grad_overflow: bool = Field(
        False,
        description=_BOOL,
        json_schema_extra=differs("false by default: the check makes the host wait for the device in every step"),
    )


class TorchAutocastConfig(Section):
    """Layers and loss run under torch.autocast; with float16 the loss is scaled by the other keys of `fp16`."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = known(
        Support.WITHOUT_EFFECT,
        "torch.autocast itself chooses the operations; communication_data_type is the dtype of reductions",
        "lower_precision_safe_modules",
    )

    enabled: bool = Field(False, description=_BOOL)
    dtype: HalfDtype = Field("bf16", description='"bfloat16" or "float16"')


class AmpConfig(Section):
    """The opt levels of NVIDIA's apex, on torch.autocast: O0 fp32, O1 autocast, O2 fp16 with fp32 masters, O3 fp16."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = known(
        Support.WITHOUT_EFFECT,
        "opt_level alone decides: apex itself is not used",
        "cast_model_type cast_model_outputs patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale "
        "num_losses verbosity min_loss_scale max_loss_scale hard_override",
    )

    enabled: bool = Field(False, description=_BOOL)
    opt_level: Literal["O0", "O1", "O2", "O3"] = Field(
        "O1",
        description='"O0", "O1", "O2" or "O3"',
        json_schema_extra=differs("runs on torch.autocast, without apex"),
    )


class DataTypesConfig(Section):
    """Dtypes that are chosen apart from the weights'."""

    known_keys: ClassVar[Mapping[str, KnownKey]] = {
        **known(Support.REFUSED, "fp16 and bf16 choose the dtype of all weights", "param_dtype"),
        **known(Support.REFUSED, "buffers keep the dtype they were made in", "buffer_dtype"),
        **known(
            Support.REFUSED, "no buffer is cast, so none needs to be kept", "keep_in_fp32_modules", same=("auto", [])
        ),
    }

    grad_accum_dtype: Dtype | None = Field(
        None,
        description='"fp32", "bf16" or "fp16"',
        json_schema_extra=differs("fp32 by default, or the weights' dtype where that is wider"),
    )
