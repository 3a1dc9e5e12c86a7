"""Optimizers by the names that configurations use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from parallel3d.errors import ConfigError, nearest

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def _adam(
    parameters: Any, *, adam_w_mode: bool = True, weight_decay: float = 0.0, **params: Any
) -> torch.optim.Optimizer:
    """DeepSpeed's Adam: decoupled weight decay unless adam_w_mode is false, and none by default."""
    cls = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    return cls(parameters, weight_decay=weight_decay, **params)


def _adamw(parameters: Any, *, weight_decay: float = 0.0, **params: Any) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW: no weight decay by default, where torch's has 0.01."""
    return torch.optim.AdamW(parameters, weight_decay=weight_decay, **params)


_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {"adam": _adam, "adamw": _adamw, "sgd": torch.optim.SGD}


def build_optimizer(
    name: str, parameters: Iterable[nn.Parameter] | Iterable[Mapping[str, Any]], params: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """The optimizer that a configuration names ("Adam", "AdamW", "SGD", in any case) with its params.

    parameters: or groups of them, as torch's optimizers take them; a rank without any gets an optimizer of nothing.
    Raises ConfigError for unknown names and params.
    """
    make = _BY_NAME.get(name.lower())
    if make is None:
        raise ConfigError(
            f"optimizer.type {name!r} is not one of Adam, AdamW, SGD; pass your own optimizer to initialize."
            + nearest(name.lower(), _BY_NAME)
        )
    groups = list(parameters) or [{"params": []}]
    if _on_cuda(groups) and not {"fused", "foreach"} & set(params):
        params = {**params, "fused": True}  # one pass over memory
    try:
        return make(groups, **params)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.params of {name} don't fit it: {error}") from None


def _on_cuda(groups: Sequence[Any]) -> bool:
    """Whether all parameters, or those of all groups, are CUDA tensors, and there is one."""
    parameters = [p for group in groups for p in (group["params"] if isinstance(group, Mapping) else [group])]
    return bool(parameters) and all(p.is_cuda for p in parameters)
