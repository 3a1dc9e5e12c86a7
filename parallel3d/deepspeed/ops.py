"""DeepSpeed's optimizers at its import paths, `parallel3d.ops.adam`, `.adagrad` and `.lion`.

They return optimizers of torch, or this package's Lion, on any device: where the state lies and which device updates it is the
configuration's `offload_optimizer` to say. isinstance(engine.optimizer, FusedAdam) is true for each Adam and AdamW, and so on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch

from parallel3d.optim.optimizers import Lion, Parameters, build_optimizer

adagrad = adam = lion = sys.modules[__name__]
# DeepSpeed's operators, by the NAME of their builders, and whether there is one here.
__compatible_ops__ = {"cpu_adam": True, "fused_adam": True, "fused_lamb": False, "utils": False, "async_io": True}


class OptimizerName:
    """A function that makes optimizers, with which isinstance() may ask for one: for any of these classes.

    Use it as a decorator: `@OptimizerName.of(torch.optim.Adam, torch.optim.AdamW)`.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer], classes: tuple[type[torch.optim.Optimizer], ...]):
        self._make, self._classes = make, classes
        update_wrapper(self, make)

    @classmethod
    def of(
        cls, *classes: type[torch.optim.Optimizer]
    ) -> Callable[[Callable[..., torch.optim.Optimizer]], OptimizerName]:
        """Return a decorator of the function that makes optimizers of these classes."""
        return lambda make: cls(make, classes)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Return an optimizer."""
        return self._make(*args, **kwargs)

    def __reduce__(self) -> str:
        return str(vars(self)["__name__"])  # pickled by name, as a class is

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._classes)


@OptimizerName.of(torch.optim.Adam, torch.optim.AdamW)
def DeepSpeedCPUAdam(
    model_params: Parameters,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Return torch's AdamW, or its Adam without adamw_mode. DeepSpeed ignores amsgrad, which works here.

    Raises ConfigError for False as bias_correction or fp32_optimizer_states.
    """
    params = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    own = {"amsgrad": amsgrad, "adam_w_mode": adamw_mode, "fp32_optimizer_states": fp32_optimizer_states}
    return build_optimizer("Adam", model_params, params | own)


@OptimizerName.of(torch.optim.Adam, torch.optim.AdamW)
def FusedAdam(
    params: Parameters,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Return torch's AdamW, or its Adam without adam_w_mode, with fused kernels on CUDA.

    DeepSpeed refuses amsgrad, which works here; set_grad_none has no effect: gradients are the engine's. Raises ConfigError
    for False as bias_correction.
    """
    return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


@OptimizerName.of(torch.optim.Adagrad)
def DeepSpeedCPUAdagrad(
    model_params: Parameters,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Return torch's Adagrad. Raises ConfigError for amsgrad, which Adagrad lacks, and without fp32_optimizer_states."""
    own = {"amsgrad": amsgrad, "fp32_optimizer_states": fp32_optimizer_states}
    return build_optimizer("Adagrad", model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay, **own})


@OptimizerName.of(Lion)
def DeepSpeedCPULion(
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Return Lion. Raises ConfigError without fp32_optimizer_states."""
    own = {"fp32_optimizer_states": fp32_optimizer_states}
    return build_optimizer("Lion", params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **own})


@OptimizerName.of(Lion)
def FusedLion(
    params: Parameters,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Return Lion. set_grad_none has no effect: gradients are the engine's."""
    return DeepSpeedCPULion(params, lr, betas, weight_decay)
