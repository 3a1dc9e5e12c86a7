"""DeepSpeed's functions for the state of a parameter, whole or this rank's part, at its import path `parallel3d.utils`.

Every replica that holds the parameter must call them at the same point; under a pipeline only the ranks of its stage hold it.
Of a frozen parameter there is no state: reading gives None, and writing raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

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


def _is_frozen(parameter: nn.Parameter) -> bool:
    return not parameter.requires_grad and whole_state(parameter) is None


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole fp32 (or wider) master of a parameter, in its shape."""
    return None if _is_frozen(param) else _state_of(param).master()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole master of a parameter; the weights follow."""
    _state_of(param).set_master(value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient of a parameter, summed over the replicas, between the last backward and the step."""
    return None if _is_frozen(param) else _state_of(param).gradient()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole gradient of a parameter, between the last backward and the step."""
    _state_of(param).set_gradient(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the whole gradient of each parameter by update_func(gradient, parameter)."""
    for param in param_list:
        if not _is_frozen(param):
            state = _state_of(param)
            state.set_gradient(update_func(state.gradient(), param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole optimizer state of a parameter, such as "exp_avg"; None if there is none, as before the first step."""
    return None if _is_frozen(param) else _state_of(param).optimizer_state(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write a whole optimizer state of a parameter."""
    _state_of(param).set_optimizer_state(optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the master of a parameter, flat; see WholeState. Without ZeRO, that is all of it."""
    return None if _is_frozen(param) else _state_of(param).local_master()


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of the master of a parameter; the weights follow."""
    _state_of(param).set_local_master(value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the gradient of a parameter, flat."""
    return None if _is_frozen(param) else _state_of(param).local_gradient()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of the gradient of a parameter."""
    _state_of(param).set_local_gradient(value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of an optimizer state of a parameter, flat; None if there is none."""
    return None if _is_frozen(param) else _state_of(param).local_optimizer_state(optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's part of an optimizer state of a parameter."""
    _state_of(param).set_local_optimizer_state(optim_state_key, value)
