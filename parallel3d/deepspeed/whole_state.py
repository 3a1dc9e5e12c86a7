"""DeepSpeed's functions for the state of a parameter, whole or this rank's part, at its import path `parallel3d.utils`.

Every replica that holds the parameter must call them at the same point; under a pipeline only the ranks of its stage hold it.
Of a frozen parameter there is no state: reading gives None, and writing raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from parallel3d.errors import ConfigError
from parallel3d.zero.whole_state import GRADIENT, MASTER, WholeState, whole_state


def _state_of(parameter: nn.Parameter) -> WholeState:
    found = whole_state(parameter)
    if found is None:
        raise ConfigError(
            f"no engine trains this parameter of shape {list(parameter.shape)}; pass one of the model's trainable parameters, "
            "after initialize"
        )
    return found


def _read(parameter: nn.Parameter, what: str, local: bool = False) -> Tensor | None:
    is_frozen = not parameter.requires_grad and whole_state(parameter) is None
    return None if is_frozen else _state_of(parameter).read(what, local)


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the whole fp32 (or wider) master of a parameter, in its shape."""
    return _read(param, MASTER)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole master of a parameter; the weights follow."""
    _state_of(param).write(MASTER, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the whole gradient of a parameter, summed over the replicas, between the last backward and the step."""
    return _read(param, GRADIENT)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write the whole gradient of a parameter, between the last backward and the step."""
    _state_of(param).write(GRADIENT, value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the whole gradient of each parameter by update_func(gradient, parameter)."""
    for param in param_list:
        if (gradient := _read(param, GRADIENT)) is not None:
            _state_of(param).write(GRADIENT, update_func(gradient, param))


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a whole optimizer state of a parameter, such as "exp_avg"; None if there is none, as before the first step."""
    return _read(param, optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write a whole optimizer state of a parameter."""
    _state_of(param).write(optim_state_key, value)


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the master of a parameter, flat; see WholeState. Without ZeRO, that is all of it."""
    return _read(param, MASTER, local=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of the master of a parameter; the weights follow."""
    _state_of(param).write(MASTER, value, local=True)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return this rank's part of the gradient of a parameter, flat."""
    return _read(param, GRADIENT, local=True)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Write this rank's part of the gradient of a parameter."""
    _state_of(param).write(GRADIENT, value, local=True)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return this rank's part of an optimizer state of a parameter, flat; None if there is none."""
    return _read(param, optim_state_key, local=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's part of an optimizer state of a parameter."""
    _state_of(param).write(optim_state_key, value, local=True)
