"""Sections of the number formats in which layers compute, and gradients accumulate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from parallel3d.config.section import (
    Dtype,
    HalfDtype,
    LayerNames,
    NonNegative,
    Positive,
    Section,
    key,
    own_key,
)


def _read_number(value: object) -> object:
    """Read a number that is written as a text, as DeepSpeed does for loss_scale."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class Fp16Config(Section, keys="fp16"):
    """Training in float16 with fp32 masters, the loss scaled; loss_scale 0 is a scale that adapts (arXiv:1710.03740).

    The first scale is 2**initial_scale_power. It doubles after loss_scale_window steps without an overflow, and halves, not
    below min_loss_scale, at the hysteresis-th overflow; consecutive_hysteresis: a step without one restores the count.
    """

    enabled: bool = False
    auto_cast: bool = key(
        True,
        "true or false",
        differs="true by default: floating-point inputs are cast to fp16; false leaves them as they are",
    )
    loss_scale: Annotated[float, BeforeValidator(_read_number, json_schema_input_type=float | str)] = key(
        0.0, "a number >= 0, where 0 lets the scale adapt", ge=0
    )
    initial_scale_power: NonNegative = key(16, "a whole number of powers of two from 0 to 127", le=127)
    loss_scale_window: Positive = key(1000, "a whole number of steps >= 1")
    hysteresis: Positive = key(2, "a whole number of overflows >= 1")
    consecutive_hysteresis: bool = False
    min_loss_scale: float = key(1.0, "a number > 0, such as 1", gt=0)


class Bf16Config(Section, keys="bf16"):
    """Training in bfloat16 with fp32 masters; check_grad_overflow skips a step whose gradients are not finite."""

    enabled: bool = False
    auto_cast: bool = own_key(
        True, "true or false: floating-point inputs are cast to bf16; false leaves them as they are, as DeepSpeed does"
    )
    check_grad_overflow: bool = key(
        False,
        "true or false",
        differs="false by default: the check makes the host wait for the device in every step",
    )


class TorchAutocastConfig(Section, keys="torch_autocast"):
    """Layers and loss run under torch.autocast; with float16 the loss is scaled by the other keys of `fp16`."""

    enabled: bool = False
    dtype: HalfDtype = key("bf16", '"bfloat16" or "float16"')


class AmpConfig(Section, keys="amp"):
    """The opt levels of NVIDIA's apex, on torch.autocast: O0 fp32, O1 autocast, O2 fp16 with fp32 masters, O3 fp16."""

    enabled: bool = False
    opt_level: Literal["O0", "O1", "O2", "O3"] = key(
        "O1",
        '"O0", "O1", "O2" or "O3"',
        differs="runs on torch.autocast, without apex",
    )


class DataTypesConfig(Section, keys="data_types"):
    """Dtypes that are chosen apart from the weights'."""

    grad_accum_dtype: Dtype | None = key(
        None,
        '"fp32", "bf16" or "fp16"',
        differs="fp32 by default, or the weights' dtype where that is wider",
    )


class Fp8Config(Section):
    """Products of the blocks' linears in fp8: e4m3 operands, e5m2 gradients, dynamic scales (arXiv:2209.05433)."""

    enabled: bool = own_key(False, "true or false")
    recipe: Literal["tensorwise", "rowwise"] = own_key(
        "tensorwise", '"tensorwise" for one scale of a tensor, or "rowwise" for one of each row, as torchao has them'
    )
    weight_gradient: Literal["fp8", "bf16"] = own_key(
        "fp8", '"fp8", or "bf16" to multiply gradients of weights in the dtype of the activations'
    )
    filter: LayerNames = own_key(
        None,
        "parts of the names of linears that stay out, or a regular expression that is searched in the names; null for none",
    )
