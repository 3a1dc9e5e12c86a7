"""DeepSpeed's functions for the whole state of a parameter, at its import path `parallel3d.utils`.

Every replica that holds the parameter must call them at the same point; under a pipeline only the ranks of its stage hold it.
"""

from __future__ import annotations

from torch import Tensor, nn

from parallel3d.errors import ConfigError
from parallel3d.zero.whole_state import WholeState, whole_state


def _state_of(parameter: nn.Parameter) -> WholeState:
    found = whole_state(parameter)
    if found is None:
        raise ConfigError(
            f"no engine trains this parameter of shape {list(parameter.shape)}; pass one of the model's trainable parameters, "
            "after initialize"
        )
    return found


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor:
    """Return the whole fp32 (or wider) master of a parameter, in its shape."""
    return _state_of(param).master()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole master of a parameter; the weights follow."""
    _state_of(param).set_master(value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor:
    """Return the whole gradient of a parameter, summed over the replicas, between the last backward and the step."""
    return _state_of(param).gradient()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole gradient of a parameter, between the last backward and the step."""
    _state_of(param).set_gradient(value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole optimizer state of a parameter, such as "exp_avg"; None if there is none, as before the first step."""
    return _state_of(param).optimizer_state(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write a whole optimizer state of a parameter."""
    _state_of(param).set_optimizer_state(optim_state_key, value)
