"""DeepSpeed's names of devices and of kinds of state, for engine.offload_states."""

from __future__ import annotations

from enum import StrEnum

from parallel3d.config.zero import OffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig
from parallel3d.config.zero import OffloadParamConfig as DeepSpeedZeroOffloadParamConfig

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]


class OffloadDeviceEnum(StrEnum):
    """Devices of offloaded state."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """Kinds of state: weights and gradients of the layers (lp), and masters (hp) and state of the optimizer."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
