"""DeepSpeed's Lion by its names, at its import path `parallel3d.ops.lion`."""

from __future__ import annotations

import torch

from parallel3d.deepspeed.ops.named import OptimizerName
from parallel3d.optim.optimizers import Lion, Parameters, build_optimizer


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
