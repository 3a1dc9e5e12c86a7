"""DeepSpeed's Adam by its names, at its import path `parallel3d.ops.adam`."""

from __future__ import annotations

from typing import Any

import torch

from parallel3d.optim.optimizers import Parameters, build_optimizer


class _Adam(type):
    """Type of which torch's Adam and AdamW are instances, those that `initialize` makes of a configuration too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, (torch.optim.Adam, torch.optim.AdamW))


class DeepSpeedCPUAdam(metaclass=_Adam):
    """Maker of torch's AdamW, or of its Adam without adamw_mode."""

    def __new__(
        cls,
        model_params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> Any:
        """Return the optimizer. DeepSpeed ignores amsgrad, which works here.

        Raises ConfigError for False as bias_correction or fp32_optimizer_states.
        """
        params = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "adam_w_mode": adamw_mode,
            "fp32_optimizer_states": fp32_optimizer_states,
        }
        return build_optimizer("Adam", model_params, params)


class FusedAdam(metaclass=_Adam):
    """Maker of torch's AdamW, or of its Adam without adam_w_mode, with fused kernels on CUDA."""

    def __new__(
        cls,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> Any:
        """Return the optimizer. DeepSpeed refuses amsgrad, which works here; set_grad_none has no effect.

        Raises ConfigError for False as bias_correction.
        """
        return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
