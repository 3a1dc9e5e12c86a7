"""Linears that can run in fp8, and how they are made to."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from parallel3d.autograd.fp8 import Fp8, Fp8Linear
from parallel3d.autograd.sink import GradientSink
from parallel3d.autograd.split_backward import is_split, make_splittable
from parallel3d.config.section import LayerNames
from parallel3d.errors import ConfigError
from parallel3d.kernels.fp8 import MULTIPLE
from parallel3d.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer whose products can be in fp8."""
    if type(module._parameters.get("weight")) is not nn.Parameter:  # parametrized
        return False
    plain = type(module).forward is nn.Linear.forward and ("forward" not in vars(module) or is_split(module))
    return plain or type(module) in (ColumnParallelLinear, RowParallelLinear)


def fits_fp8(linear: nn.Module) -> bool:
    """Return whether the tensor cores support fp8 GEMMs of a linear layer's sizes."""
    return not any(size % MULTIPLE for size in _sizes(linear))


def patterns_of(choice: LayerNames) -> list[str]:
    """Return regular expressions for the names that stay out."""
    if isinstance(choice, str):
        try:
            return [re.compile(choice).pattern]
        except re.error as error:
            raise ConfigError(f"fp8.filter {choice!r} is not a regular expression: {error}") from error
    return [re.escape(part) for part in choice or ()]


def _sizes(linear: nn.Module) -> Sequence[int]:
    """Return the sizes of the weights on all ranks. They are not read from the weight, which ZeRO-3 may have freed."""
    whole: Any = linear
    if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)) and not linear.cut.shared:
        return whole.in_features, whole.out_features, *linear.cut.lengths
    return whole.in_features, whole.out_features


def attach_fp8(linear: nn.Module, fp8: Fp8, sink: GradientSink) -> None:
    """Let a linear layer compute in fp8. sink: gets the weight gradient of a plain one."""
    group, dim = None, None
    if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)) and linear.group.size > 1:
        group, dim = linear.group, 0 if isinstance(linear, ColumnParallelLinear) else 1
    layer = fp8.layers[linear] = Fp8Linear(fp8, sink, group, dim)
    if isinstance(linear, (ColumnParallelLinear, RowParallelLinear)):
        linear.use_fp8(layer)
    else:
        make_splittable(linear, sink)
        forward: Any = linear.forward
        forward.__self__.compute_by(layer.forward)
