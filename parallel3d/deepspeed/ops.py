"""DeepSpeed's optimizers at its import paths, `parallel3d.ops.adam`, `.adagrad` and `.lion`.

They return optimizers of torch, or this package's Lion, on any device: where the state lies and which device updates it is the
configuration's `offload_optimizer` to say. isinstance(engine.optimizer, FusedAdam) is true for each Adam and AdamW, and so on.
"""

from __future__ import annotations

import sys
from inspect import Parameter, Signature
from typing import Any

import torch

from parallel3d.optim.optimizers import Lion, build_optimizer

adagrad = adam = lion = sys.modules[__name__]
# DeepSpeed's operators, by the NAME of their builders, and whether there is one here.
__compatible_ops__ = {"cpu_adam": True, "fused_adam": True, "fused_lamb": False, "utils": False, "async_io": True}
# Name of build_optimizer -> classes of the optimizers that it may return.
_CLASSES = {"Adam": (torch.optim.Adam, torch.optim.AdamW), "Adagrad": (torch.optim.Adagrad,), "Lion": (Lion,)}


class OptimizerName:
    """A class of DeepSpeed's optimizers by name: a call returns the optimizer, and isinstance() asks for one of its kind.

    - kind: name of the optimizer, as build_optimizer takes it, whose defaults are DeepSpeed's.
    - arguments: of the constructor, the parameters first, in DeepSpeed's order.
    """

    def __init__(self, name: str, kind: str, arguments: str):
        first, *others = arguments.split()
        optional = [Parameter(other, Parameter.POSITIONAL_OR_KEYWORD, default=None) for other in others]
        self.__signature__ = Signature([Parameter(first, Parameter.POSITIONAL_OR_KEYWORD), *optional])
        self.__name__, self._kind = name, kind

    def __call__(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return an optimizer. Raises ConfigError for arguments that it doesn't have, or that would change its rule."""
        known = {name: kwargs.pop(name) for name in [*kwargs] if name in self.__signature__.parameters}
        bound = self.__signature__.bind(*args, **known).arguments
        parameters, given = bound.pop(next(iter(bound))), bound | kwargs
        mode = given.pop("adamw_mode", None)  # accelerate passes it to each optimizer
        if mode is not None and self._kind == "Adam":
            given["adam_w_mode"] = mode  # the name of the configuration's key
        return build_optimizer(self._kind, parameters, given)

    def __reduce__(self) -> str:
        return self.__name__  # pickled by name, as a class is

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _CLASSES[self._kind])


DeepSpeedCPUAdam = OptimizerName(
    "DeepSpeedCPUAdam",
    "Adam",
    "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode fp32_optimizer_states",
)
FusedAdam = OptimizerName(
    "FusedAdam", "Adam", "params lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none"
)
DeepSpeedCPUAdagrad = OptimizerName(
    "DeepSpeedCPUAdagrad", "Adagrad", "model_params lr eps weight_decay amsgrad fp32_optimizer_states"
)
DeepSpeedCPULion = OptimizerName("DeepSpeedCPULion", "Lion", "model_params lr betas weight_decay fp32_optimizer_states")
FusedLion = OptimizerName("FusedLion", "Lion", "params lr betas weight_decay set_grad_none")
