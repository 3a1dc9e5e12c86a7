"""DeepSpeed's functions for the state of a parameter, whole or this rank's part, at its import path `parallel3d.utils`.

Every replica that holds the parameter must call them at the same point; under a pipeline only the ranks of its stage hold it.
Of a frozen parameter there is no state: reading gives None, and writing raises ConfigError.

- `..._full_...`: the whole tensor, in the parameter's shape. `..._local_...`: this rank's part, flat; see WholeState.
- `..._fp32_param`: the master, in fp32 or wider, which the weights follow when it is written.
- `..._grad`: the gradient over all replicas, from the step's last backward on: of the mean loss, or of the sum where losses are
  (sum, count), whose total count is known in the step. Raises ExecutionError before that backward, unless each micro-batch's
  gradients are summed (reduce_per_micro_batch).
- `..._optimizer_state`: that of a key, such as "exp_avg"; None as long as there is none, as before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

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


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str, local: bool = False) -> Tensor | None:
    """Return a state of a parameter, or with `local` this rank's part of it."""
    is_frozen = not param.requires_grad and whole_state(param) is None
    return None if is_frozen else _state_of(param).read(optim_state_key, local)


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: Tensor, optim_state_key: str, local: bool = False
) -> None:
    """Write a state of a parameter, or with `local` this rank's part of it."""
    _state_of(param).write(optim_state_key, value, local)


safe_get_full_fp32_param = partial(safe_get_full_optimizer_state, optim_state_key=MASTER)
safe_set_full_fp32_param = partial(safe_set_full_optimizer_state, optim_state_key=MASTER)
safe_get_full_grad = partial(safe_get_full_optimizer_state, optim_state_key=GRADIENT)
safe_set_full_grad = partial(safe_set_full_optimizer_state, optim_state_key=GRADIENT)
safe_get_local_optimizer_state = partial(safe_get_full_optimizer_state, local=True)
safe_set_local_optimizer_state = partial(safe_set_full_optimizer_state, local=True)
safe_get_local_fp32_param = partial(safe_get_full_fp32_param, local=True)
safe_set_local_fp32_param = partial(safe_set_full_fp32_param, local=True)
safe_get_local_grad = partial(safe_get_full_grad, local=True)
safe_set_local_grad = partial(safe_set_full_grad, local=True)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the whole gradient of each parameter by update_func(gradient, parameter)."""
    for param in param_list:
        if (gradient := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(gradient, param))
