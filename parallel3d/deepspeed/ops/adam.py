"""DeepSpeed's Adam by its names, at its import path `parallel3d.ops.adam`."""

from __future__ import annotations

import torch

from parallel3d.deepspeed.ops.named import OptimizerName
from parallel3d.optim.optimizers import Parameters, build_optimizer


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
