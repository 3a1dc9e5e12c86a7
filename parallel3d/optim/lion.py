"""Lion: the sign of an interpolated momentum (arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """Lion: p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p), then m <- b2 m + (1 - b2) g. arXiv:2302.06675.

    The defaults are DeepSpeed's; the paper has betas (0.9, 0.99). Its learning rate should be 3 to 10 times smaller than
    AdamW's, its weight decay as much larger. State: `exp_avg`, one element for each of the parameter, in its dtype.
    Raises ValueError for a negative lr or weight_decay, and for betas outside of [0, 1).
    """

    # Each element is updated from its own history: shards of a tensor do.
    elementwise: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ):
        if isinstance(lr, Tensor):
            raise ValueError("lr must be a number, not a tensor")
        if lr < 0:
            raise ValueError(f"lr must not be negative, but is {lr}")
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers of [0, 1), but are {betas}")
        if weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, but is {weight_decay}")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update(group)
        return loss

    def _update(self, group: Mapping[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        parameters = [p for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        gradients = [p.grad for p in parameters]
        moments = [self._moment(p) for p in parameters]
        updates = torch._foreach_lerp(moments, gradients, 1 - beta1)
        torch._foreach_sign_(updates)
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_add_(parameters, updates, alpha=-lr)
        torch._foreach_lerp_(moments, gradients, 1 - beta2)

    def _moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
        return state["exp_avg"]
