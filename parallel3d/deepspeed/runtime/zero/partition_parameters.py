"""Names of ZeRO-3 that transformers, TRL and scripts import from DeepSpeed's `runtime.zero.partition_parameters`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallel3d.deepspeed.accelerator import get_accelerator
from parallel3d.zero.external import register_external_parameter, unregister_external_parameter
from parallel3d.zero.init import Init
from parallel3d.zero.weights import GatheredParameters
from parallel3d.zero.weights import WeightState as ZeroParamStatus

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """Return a constructor of tensors as it is: zero.Init changes the dtype of none. Transformers replaces this function."""
    return function
