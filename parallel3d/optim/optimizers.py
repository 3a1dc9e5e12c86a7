"""Optimizers by the names that configurations use, and calls of classes with a configuration's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from parallel3d.errors import ConfigError, nearest

T = TypeVar("T")


def classes_of(module: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Return a module's subclasses of `base`, by name, without `base` itself."""
    classes = {name: cls for name, cls in vars(module).items() if inspect.isclass(cls)}
    return {name: cls for name, cls in classes.items() if issubclass(cls, base) and cls is not base}


def call(
    make: Callable[..., T],
    first: Any,
    params: Mapping[str, Any],
    where: str,
    more: Iterable[str] = (),
    remedies: Mapping[str, str] | None = None,
) -> T:
    """Return make(first, **params).

    - where: description of the params, for errors.
    - more: further valid names, which the caller took out of params.
    - remedies: remedy for each of some invalid names.

    Raises ConfigError for names and values that don't fit.
    """
    parameters = list(inspect.signature(make).parameters.values())[1:]
    known = [*(p.name for p in parameters), *more]
    for key in params:
        if key not in known:
            remedy = (remedies or {}).get(key)
            hint = f": {remedy}" if remedy else f"; it takes {', '.join(known)}.{nearest(key, known)}"
            raise ConfigError(f"{where}: there is no {key!r}{hint}")
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in params]
    if missing:
        raise ConfigError(f"{where}: {', '.join(missing)} must be given; it takes {', '.join(known)}")
    try:
        return make(first, **params)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} don't fit it: {error}; they are {dict(params)}{_hint_of_texts(params)}") from error


def _hint_of_texts(params: Mapping[str, Any]) -> str:
    """Return a hint about a number that was read as text, as YAML reads 1e-3 (without a dot)."""
    for key, value in params.items():
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                continue
            return f"; {key} is the text {value!r}, write the number {number:g}"
    return ""


class Lion(torch.optim.Optimizer):
    """Lion: p <- p - lr (sign(b1 m + (1 - b1) g) + weight_decay p), then m <- b2 m + (1 - b2) g. arXiv:2302.06675.

    The defaults are DeepSpeed's; the paper has betas (0.9, 0.99). Its learning rate should be 3 to 10 times smaller than
    AdamW's, its weight decay as much larger. State: `exp_avg`, one element for each of the parameter, in its dtype.
    Raises ValueError for a negative lr or weight_decay, and for betas outside of [0, 1).
    """

    # Each element is updated from its own history, so the optimizer can work on shards of a tensor.
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
            lr, (beta1, beta2) = group["lr"], group["betas"]
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            for p in parameters:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            gradients = [p.grad for p in parameters]
            moments = [self.state[p]["exp_avg"] for p in parameters]
            updates = torch._foreach_lerp(moments, gradients, 1 - beta1)
            torch._foreach_sign_(updates)
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-lr)
            torch._foreach_lerp_(moments, gradients, 1 - beta2)
        return loss


_TORCH_CLASSES = classes_of(torch.optim, torch.optim.Optimizer)
_CLASSES: dict[str, type[torch.optim.Optimizer]] = {**_TORCH_CLASSES, "Lion": Lion}
_BY_LOWER_NAME = {name.lower(): cls for name, cls in _CLASSES.items()}

# Classes of torch.optim that a distributed step can't drive.
_UNUSABLE = {
    "lbfgs": "evaluates the model several times within a step, by a closure, which a pipeline's step can't run; use AdamW",
    "sparseadam": "takes sparse gradients alone, and gradients are reduced as dense ones; use Adam",
}
# DeepSpeed's optimizers that are missing here, and the nearest alternatives.
_NOT_YET = {
    "onebitadam": "Adam",
    "zerooneadam": "Adam",
    "onebitlamb": "AdamW",
    "lamb": "AdamW",
    "muadam": "Adam",
    "muadamw": "AdamW",
    "musgd": "SGD",
}

Parameters: TypeAlias = Iterable[nn.Parameter] | Iterable[Mapping[str, Any]]

# Arguments of DeepSpeed's own kernels that these classes lack: with these values they do the same, None means any.
_STATES: dict[str, bool | None] = {"fp32_optimizer_states": True}
_ADAM = {**_STATES, "set_grad_none": None, "bias_correction": True}
_IMPLIED: dict[type[torch.optim.Optimizer], dict[str, bool | None]] = {
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.Adagrad: {**_STATES, "amsgrad": False},
    Lion: {**_STATES, "set_grad_none": None},
}
_ONE_BIT = "it is an argument of the 1-bit optimizers, which are not yet supported; drop it"
_REMEDIES = {
    "learning_rate": "its name is 'lr'",
    "max_grad_norm": "set gradient_clipping, at the top level of the configuration",
    **dict.fromkeys(("freeze_step", "var_freeze_step", "cuda_aware", "comm_backend_name"), _ONE_BIT),
}


def build_optimizer(name: str, parameters: Parameters, params: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return the optimizer that a configuration names, in any case, with its params.

    name: "Lion" or a class of torch.optim. "Adam" and "AdamW" are DeepSpeed's: weight decay is decoupled unless
    {"adam_w_mode": false} is among Adam's params, and 0 by default (torch's 0.01 with {"torch_adam": true}).
    parameters: or groups of them, as torch's optimizers take them; a rank without any gets an optimizer without parameters.
    CUDA parameters are updated by torch's fused kernel where the class has one, unless params say how.
    Raises ConfigError for unknown names and params.
    """
    return _build(name, parameters, params, lambda cls: cls)


def empty_optimizer(name: str, params: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer as `build_optimizer` does, but without parameters, for its class and settings.

    Adding parameters would make torch import its compiler, which takes most of a second.
    """
    parameter = nn.Parameter(torch.empty(1, 1))  # Muon takes only matrices
    return _build(name, [parameter], params, lambda cls: type(cls.__name__, (_TakesNone, cls), {}))


class _TakesNone(torch.optim.Optimizer):
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Leave the group out."""


def _build(
    name: str, parameters: Parameters, params: Mapping[str, Any], variant: Callable[[type], type]
) -> torch.optim.Optimizer:
    cls = class_of(name)
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    implied = _IMPLIED.get(cls, {})
    own = [*implied]  # names of params that only DeepSpeed has
    _drop_implied(name, params, implied)
    if cls in (torch.optim.Adam, torch.optim.AdamW):
        own += ["adam_w_mode", "torch_adam"]
        decoupled = _flag(name, params, "adam_w_mode", True) or cls is torch.optim.AdamW
        if not _flag(name, params, "torch_adam", False):
            params.setdefault("weight_decay", 0.0)
        cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    groups = _groups(parameters)
    tensors = [p for group in groups for p in group["params"]]
    chosen = bool({"fused", "foreach", "differentiable"} & set(params))
    # SGD's first step leaves out dampening, and so would `_start_momentum`.
    is_dampened = any(settings.get("dampening") for settings in (params, *groups))
    if not chosen and _has_fused_kernel(cls, tensors) and not is_dampened:
        params["fused"] = True  # one pass over memory
    if cls is torch.optim.Muon:
        check_matrices(tensors)
    optimizer: torch.optim.Optimizer = call(variant(cls), groups, params, f"optimizer.params of {name}", own, _REMEDIES)
    if cls is torch.optim.SGD:
        optimizer.register_step_pre_hook(_start_momentum)
    return optimizer


def class_of(name: str) -> type[torch.optim.Optimizer]:
    """Return the class that a name of the configuration stands for. Raises ConfigError."""
    key = name.lower()
    if key in _UNUSABLE:
        raise ConfigError(f"optimizer.type {name!r} {_UNUSABLE[key]}")
    if key in _NOT_YET:
        raise ConfigError(f"optimizer.type {name!r} is not yet supported; the nearest that is: {_NOT_YET[key]!r}")
    if key not in _BY_LOWER_NAME:
        usable = [known for known in _CLASSES if known.lower() not in _UNUSABLE]
        raise ConfigError(
            f"optimizer.type {name!r} is not one of {', '.join(sorted(usable))}; give one of these, or pass your own "
            f"optimizer to initialize.{nearest(name, usable)}"
        )
    return _BY_LOWER_NAME[key]


def _flag(name: str, params: dict[str, Any], key: str, default: bool) -> bool:
    """Remove a bool from the params, and return it."""
    value = params.pop(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"optimizer.params of {name}: {key} is {value!r}; give true or false")
    return value


def _drop_implied(name: str, params: dict[str, Any], implied: Mapping[str, bool | None]) -> None:
    """Remove params whose only value is implied. Raises ConfigError for another value."""
    for key, only in implied.items():
        if params.pop(key, only) is not only and only is not None:
            raise ConfigError(
                f"optimizer.params of {name}: {key} can only be {str(only).lower()} here; drop it, or pass your own "
                "optimizer to initialize"
            )


def _groups(parameters: Iterable[Any]) -> list[dict[str, Any]]:
    """Return groups of parameters, each with a list of its parameters, which may have been an iterator."""
    items = list(parameters)
    if not items or not isinstance(items[0], Mapping):
        return [{"params": items}]
    members = [[item["params"]] if isinstance(item["params"], Tensor) else list(item["params"]) for item in items]
    return [{**item, "params": own} for item, own in zip(items, members, strict=True)]


def _has_fused_kernel(cls: type[torch.optim.Optimizer], tensors: Sequence[Tensor]) -> bool:
    """Return whether torch has a fused kernel of this optimizer for these tensors: at least one, and all on CUDA."""
    if not tensors or not all(t.is_cuda and t.is_floating_point() for t in tensors):
        return False
    if "fused" not in inspect.signature(cls).parameters:
        return False
    make: Any = cls
    probe = torch.zeros(1, dtype=tensors[0].dtype, device=tensors[0].device)
    probe.grad = torch.zeros_like(probe)
    try:
        make([probe], fused=True).step()
    except RuntimeError:  # Adagrad had a fused kernel for the CPU before it had one for CUDA, which its step finds out
        return False
    return True


def _start_momentum(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Give torch's fused SGD the momentum it would start with: zeros, which the first step turns into the gradient.

    By itself it raises when a parameter gets its first gradient later than others, and keeps whatever the memory held
    when `found_inf` makes it skip its first step.
    """
    for group in optimizer.param_groups:
        if not (group["fused"] and group["momentum"]) or group["dampening"]:
            continue
        for p in group["params"]:
            if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


def check_matrices(tensors: Iterable[Tensor]) -> None:
    """Raise ConfigError for a tensor that Muon can't update."""
    other = next((t for t in tensors if t.dim() != 2), None)
    if other is not None:
        raise ConfigError(
            f"optimizer.type 'Muon' updates matrices alone, but there is a parameter of shape {list(other.shape)}; pass "
            "initialize the matrices as model_parameters, or your own optimizer that updates the others by another rule"
        )


# Memory that a step needs besides the optimizer's state

# The most tensors of a parameter's size that torch's loops over parameters hold at once, those that the previous parameter
# left included; a weight decay that isn't decoupled needs one more.
_LOOPS = 3


def step_bytes(optimizer: torch.optim.Optimizer, total: int, largest: int, on_cuda: bool) -> int:
    """Return the most bytes that a step of weights in fp32 needs.

    A fused kernel needs none; torch's foreach implementation, its choice on CUDA otherwise, and Lion a copy of all
    parameters; a loop over parameters some copies of the largest.

    - total: elements that the step updates; largest: elements of the largest tensor.
    """
    settings = optimizer.defaults
    cls = type(optimizer)
    fused = settings.get("fused") or (on_cuda and settings.get("fused") is None and cls.__name__ in _FUSED)
    if fused:
        return 0
    if issubclass(cls, Lion) or settings.get("foreach") or (on_cuda and settings.get("foreach", False) is None):
        return 4 * total
    decays = bool(settings.get("weight_decay")) and not settings.get("decoupled_weight_decay", cls.__name__ == "AdamW")
    copies = 2 * decays + bool(settings.get("nesterov")) if cls.__name__ == "SGD" else _LOOPS + decays
    return 4 * copies * largest


# By build_optimizer on CUDA, unless params say how.
_FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
