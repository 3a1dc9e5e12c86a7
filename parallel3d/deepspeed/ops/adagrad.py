"""DeepSpeed's Adagrad by its name, at its import path `parallel3d.ops.adagrad`."""

from __future__ import annotations

import torch

from parallel3d.deepspeed.ops.named import OptimizerName
from parallel3d.optim.optimizers import Parameters, build_optimizer


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
