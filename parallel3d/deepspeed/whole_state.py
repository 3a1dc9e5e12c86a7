"""DeepSpeed's functions for the state of a parameter, at its import path `parallel3d.utils`.

Every replica that holds the parameter must call them at the same point; under a pipeline only the ranks of its stage hold it.
Those with "local" are for the elements that this rank updates, flat: with ZeRO a part of the parameter, or no elements. For a
parameter that no engine trains, as a frozen one, those with "get" return None, and the others raise ConfigError.
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


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole fp32 (or wider) master of a parameter, in its shape."""
    state = whole_state(param)
    return None if state is None else state.master()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole master of a parameter; the weights follow."""
    _state_of(param).set_master(value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient of a parameter, summed over the replicas, between the last backward and the step."""
    state = whole_state(param)
    return None if state is None else state.gradient()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole gradient of a parameter, between the last backward and the step."""
    _state_of(param).set_gradient(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Write update_func(gradient, parameter) as the whole gradient of each trainable parameter of the list."""
    for param in param_list:
        if param.requires_grad:
            state = _state_of(param)
            state.set_gradient(update_func(state.gradient(), param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole optimizer state of a parameter, such as "exp_avg"; None if there is none, as before the first step."""
    state = whole_state(param)
    return None if state is None else state.optimizer_state(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write a whole optimizer state of a parameter."""
    _state_of(param).set_optimizer_state(optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the master of a parameter."""
    state = whole_state(param)
    return None if state is None else state.local_master()


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of the master; the weights follow."""
    _state_of(param).set_local_master(value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the gradient, summed over the replicas, between the last backward and the step."""
    state = whole_state(param)
    return None if state is None else state.local_gradient()


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of the gradient, between the last backward and the step."""
    _state_of(param).set_local_gradient(value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of an optimizer state; None if there is none, as before the first step."""
    state = whole_state(param)
    return None if state is None else state.local_optimizer_state(optim_state_key)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's part of an optimizer state."""
    _state_of(param).set_local_optimizer_state(optim_state_key, value)
