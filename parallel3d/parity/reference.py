"""Reference training on one process in plain PyTorch, which shares only seeds and optimizer names with this package.

There is no engine, executor, schedule, bucket or partition: layers are built one after the other and called in turn. Only fp8
linears are the package's, because torch has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only

from parallel3d.autograd.fp8 import Fp8
from parallel3d.autograd.sink import GradientSink
from parallel3d.comm.collectives import Group
from parallel3d.config import Config
from parallel3d.engine.fp8 import linears_between, use_fp8
from parallel3d.errors import ConfigError, ExecutionError, Parallel3DError
from parallel3d.models.user_model import Subject, describe, load_subject
from parallel3d.optim import build_optimizer, build_scheduler
from parallel3d.parity.settings import Settings
from parallel3d.rng import layer_seed, stream_seed
from parallel3d.specs import Layer, LayerSpec, TiedLayerSpec, function_of

# Tensors on the CPU: whole ones by name, or a rank's parts of them.
Tensors = TypeVar("Tensors")


@dataclass(frozen=True)
class Step(Generic[Tensors]):
    """Results of one step: the mean loss, the gradient norm before clipping, and the weights after it."""

    loss: float
    norm: float
    weights: Tensors


@dataclass(frozen=True)
class Trained(Generic[Tensors]):
    """Results of one process or rank: its steps, and the gradients of the first, before clipping."""

    steps: Sequence[Step[Tensors]]
    gradients: Tensors


Whole = dict[str, Tensor]


class Reference:
    """A subject's model, trained by `step`.

    gradients: of the last step's mean loss, before clipping, on the CPU.
    """

    def __init__(self, subject: Subject, config: Config, seed: int, dtype: torch.dtype, device: torch.device):
        self._subject, self._config, self._seed, self._dtype, self._device = subject, config, seed, dtype, device
        self._steps = 0
        self._modules = _build(subject.layers, seed, device)
        loss_fn = subject.loss_fn
        self._loss_fn = loss_fn.build() if isinstance(loss_fn, LayerSpec) else loss_fn
        self._computing = _name_parameters(subject.layers, self._modules)
        # As in mixed precision, half-precision weights are rounded from the masters that the optimizer updates.
        self.masters = {name: nn.Parameter(p.detach().clone()) for name, p in self._computing.items()}
        for module in self._modules:
            if module is not None and dtype == torch.bfloat16:
                module.to(dtype)
        if config.fp8.enabled:
            layers = ((k, module) for k, module in enumerate(self._modules) if module is not None)
            linears = linears_between(layers, len(self._modules))
            use_fp8(linears, Fp8(config.fp8), GradientSink(), Group((0,), None))
        optimizer = config.optimizer
        if optimizer is None:
            raise ConfigError("no optimizer: set optimizer.type in the configuration")
        self._optimizer = build_optimizer(optimizer.type, list(self.masters.values()), optimizer.params)
        schedule = config.scheduler
        self._schedule = build_scheduler(schedule.type, self._optimizer, schedule.params) if schedule else None
        self.gradients: dict[str, Tensor] = {}

    def step(self, num_micro_batches: int) -> Step[Whole]:
        """Train on the next `num_micro_batches` micro-batches of the world, in their global order."""
        sums: dict[str, Tensor] = {}
        total, count = 0.0, 0.0
        for index in range(num_micro_batches):
            loss, number = self._loss(index, self._steps * num_micro_batches + index)
            total, count = total + float(loss.detach().double()), count + number
            if loss.requires_grad:
                loss.backward()
            for name, p in self._computing.items():
                if p.grad is not None:
                    # A gradient has the weights' dtype; their sum the masters'.
                    gradient = p.grad.to(self.masters[name].dtype)
                    sums[name] = sums[name] + gradient if name in sums else gradient
                    p.grad = None
        for name, master in self.masters.items():
            master.grad = sums[name] / count if name in sums else None
        # A copy: clipping writes into the original.
        grads = {name: torch.zeros_like(m) if m.grad is None else m.grad for name, m in self.masters.items()}
        self.gradients = {name: gradient.to("cpu", copy=True) for name, gradient in grads.items()}
        norm = sum(float(g.double().square().sum()) for g in self.gradients.values()) ** 0.5
        self._update()
        return Step(total / count, norm, {name: m.detach().cpu().clone() for name, m in self.masters.items()})

    def _loss(self, index: int, number: int) -> tuple[Tensor, float]:
        """Return the loss, or the sum of losses, of micro-batch `index` of the step, the `number`-th of all; and its count."""
        inputs, labels = self._subject.batch(number, self._seed)
        x, y = tree_map_only(Tensor, lambda t: t.to(self._device), (inputs, labels))
        if self._dtype == torch.bfloat16:
            x = tree_map_only(Tensor, lambda t: t.to(self._dtype) if t.is_floating_point() else t, x)
        # Other attention kernels draw their dropout masks in another order.
        with sdpa_kernel(SDPBackend.MATH) if self._config.rng.layout_independent else nullcontext():
            for k, (layer, module) in enumerate(zip(self._subject.layers, self._modules, strict=True)):
                torch.manual_seed(stream_seed(self._config.seed, self._seed, self._steps, index, k))
                x = function_of(layer, module)(x)
        loss = x if self._loss_fn is None else self._loss_fn(x, y)
        return (loss[0], float(loss[1])) if isinstance(loss, (tuple, list)) else (loss, 1.0)

    @torch.no_grad()
    def _update(self) -> None:
        if self._config.gradient_clipping > 0:
            nn.utils.clip_grad_norm_(self.masters.values(), self._config.gradient_clipping)
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()
        for name, p in self._computing.items():
            p.copy_(self.masters[name])
        self._steps += 1


def train_reference(
    target: str, config: Config, settings: Settings, per_step: int, uses_gpu: bool
) -> tuple[Trained[Whole], Trained[Whole]]:
    """Train the model of `target` on one process, in `per_step` micro-batches a step.

    Returns the results in the dtype of the settings, and those in the dtype that layers are made in: the same but for half
    precision. Raises Parallel3DError if it can't be done.
    """
    device = torch.device("cuda", 0) if uses_gpu else torch.device("cpu")
    trained = []
    for dtype in dict.fromkeys((settings.torch_dtype, settings.building_dtype)):
        subject = load_subject(target, settings.seed)
        with torch.random.fork_rng(devices=[device] if uses_gpu else []):
            try:
                reference = Reference(subject, config, settings.seed, dtype, device)
                first = reference.step(per_step)
                gradients = reference.gradients
                steps = [first, *(reference.step(per_step) for _ in range(settings.steps - 1))]
                trained.append(Trained(steps, gradients))
            except Parallel3DError:
                raise
            except Exception as error:
                raise ExecutionError(f"on one process, where layers get no context: {describe(error)}") from error
    return trained[0], trained[-1]


def _build(layers: Sequence[Layer], seed: int, device: torch.device) -> list[nn.Module | None]:
    """Return the module of each layer, None for a function. Tied layers share a module, or the weights that they name."""
    modules: list[nn.Module | None] = []
    for k, layer in enumerate(layers):
        module = layer if isinstance(layer, nn.Module) else None
        if isinstance(layer, LayerSpec):
            tie = _tie_of(layers[:k], layer)
            module = next((modules[j] for j, other in tie.items() if other.builds_like(layer)), None)
            if module is None:
                torch.manual_seed(layer_seed(seed, k))
                with device:
                    module = layer.build()
                for j, first in list(tie.items())[:1]:
                    _share_weights(first, modules[j], layer, module)
        modules.append(None if module is None else module.to(device).train())
    return modules


def _tie_of(layers: Sequence[Layer], layer: Layer) -> dict[int, TiedLayerSpec]:
    """Return index -> layer of the layers that share weights with `layer`; empty if it isn't tied."""
    if not isinstance(layer, TiedLayerSpec):
        return {}
    tied = ((j, other) for j, other in enumerate(layers) if isinstance(other, TiedLayerSpec))
    return {j: other for j, other in tied if other.key == layer.key}


def _share_weights(theirs: TiedLayerSpec, source: nn.Module | None, mine: Any, module: nn.Module) -> None:
    """Put the tied parameters of `source`, built from the spec `theirs`, into `module`, built from `mine`."""
    assert source is not None
    for attribute, other in zip(mine.tied_weight_attr, theirs.tied_weight_attr, strict=True):
        for name, _ in list(module.named_parameters(remove_duplicate=False)):
            if name == attribute or name.startswith(attribute + "."):
                path, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(path), leaf, source.get_parameter(other + name[len(attribute) :]))


def _name_parameters(layers: Sequence[Layer], modules: Sequence[nn.Module | None]) -> dict[str, nn.Parameter]:
    """Return the trainable parameters, each once, by their names in the engine: "layers.<place>.<name in the layer>".

    Of several names in a layer the tied one counts.
    """
    names: dict[nn.Parameter, str] = {}
    for k, (layer, module) in enumerate(zip(layers, modules, strict=True)):
        tied: tuple[str, ...] = ()
        if isinstance(layer, TiedLayerSpec) and not all(o.builds_like(layer) for o in _tie_of(layers, layer).values()):
            tied = tuple(f"{attribute}." for attribute in layer.tied_weight_attr)
        parameters = [] if module is None else list(module.named_parameters(remove_duplicate=False))
        for name, p in sorted(parameters, key=lambda item: not f"{item[0]}.".startswith(tied)):
            if p.requires_grad:
                names.setdefault(p, f"layers.{k}.{name}")
    return {name: p for p, name in names.items()}
