"""Outline of a Hugging Face model: its list of layers and the modules after it, found by one run without weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from parallel3d.errors import ConfigError

_Call = tuple[str, tuple[Any, ...], Any]  # name of a module, its arguments and its result
# Values besides tensors that travel between stages.
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class Recorder(nn.Module):
    """Replacement of a layer that records its arguments and returns the hidden states, in a tuple if its model expects one."""

    def __init__(self, layer: nn.Module, in_tuple: bool):
        super().__init__()
        # A model may ask its layers what kind of attention each has.
        for name, value in vars(layer).items():
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self._in_tuple = in_tuple
        self.forget()

    def forget(self) -> None:
        """Drop what was recorded."""
        self.hidden: Tensor | None = None
        self.version = 0
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Record the call."""
        self.hidden, self.version, self.call = hidden_states, hidden_states._version, (args, kwargs)
        return (hidden_states,) if self._in_tuple else hidden_states


@dataclass(frozen=True)
class Outline:
    """Parts of a causal language model.

    - base: name of the module whose forward runs the layers. layers: name of their list in it.
    - after: names of the modules in it that it calls after the layers, each with the output of the one before.
    - in_tuples: whether it expects a tuple of each layer.
    """

    base: str
    layers: str
    after: tuple[str, ...]
    in_tuples: bool

    @classmethod
    def of(cls, model: nn.Module) -> Outline:
        """Return the outline of a model, whose base runs on two tokens with recorders as layers and zeros as weights.

        Raises ConfigError unless only hidden states pass from layer to layer, and unchanged, or if the layers take values that
        a pipeline can't send.
        """
        name = type(model).__name__
        base, _, layers = list_of_layers(model).rpartition(".")
        failures = []
        for in_tuples in (False, True):
            try:
                return cls(base, layers, _modules_after(model.get_submodule(base), layers, in_tuples), in_tuples)
            except _Unfit as error:
                failures.append(str(error))
            except Exception as error:  # whatever the model's own code raises
                failures.append(
                    f"its code around the layers fails on hidden states alone: {type(error).__name__}: {error}"
                )
        raise ConfigError(
            f"{name} can't be split into pipeline stages: {failures[0]}; train it without stages (parallel3d.initialize takes "
            "the model as it is), or write its layers as LayerSpecs"
        )


class _Unfit(Exception):
    """Raised for a model that can't be split. The text follows the model's name."""


def list_of_layers(model: nn.Module) -> str:
    """Return the name of the one list that has as many modules as the model has layers."""
    hf: Any = model
    number = getattr(hf.config.get_text_config(), "num_hidden_layers", None)
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, nn.ModuleList) and len(module) == number and not inside:
            found.append(name)
    if len(found) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} lists of {number} layers{': ' if found else ''}{', '.join(found)}, and "
            "from_hf takes models with one; write its layers as LayerSpecs"
        )
    return found[0]


def _modules_after(base: nn.Module, layers: str, in_tuples: bool) -> tuple[str, ...]:
    """Return the names of the modules that the base calls after its layers. Raises _Unfit."""
    recorders = [Recorder(layer, in_tuples) for layer in base.get_submodule(layers).children()]
    calls, last = _calls(base, layers, recorders)
    hidden = recorders[0].hidden
    for k, recorder in enumerate(recorders):
        if recorder.hidden is None or not _same(recorder.hidden, hidden):
            raise _Unfit(f"layer {k} isn't called with the hidden states that the layer before it returned, unchanged")
        args, kwargs = recorder.call
        for key, value in (*enumerate(args, 1), *kwargs.items()):
            for leaf in tree_leaves(value):
                if not isinstance(leaf, (Tensor, *_PLAIN)):
                    raise _Unfit(f"layer {k} takes {key}, a {type(leaf).__name__}, which can't be sent between stages")
    places = [name for name, *_ in calls]
    number = places.index(f"{layers}.{len(recorders) - 1}") + 1
    before, after = places[:number], calls[number:]
    for name, given, result in after:
        if name in before:
            raise _Unfit(f"{name} is called before the layers, and again after them")
        if len(given) != 1 or not _same(given[0], hidden):
            raise _Unfit(f"{name} isn't called with what the layers, or the module before it, returned")
        hidden = result
    if recorders[0].hidden is not None and recorders[0].hidden._version != recorders[0].version:
        raise _Unfit("it changes hidden states in place after a layer")
    if not _same(last, hidden):
        raise _Unfit(f"it computes something from what {after[-1][0] if after else 'the last layer'} returned")
    return tuple(name for name, *_ in after)


def _calls(base: nn.Module, layers: str, recorders: Sequence[nn.Module]) -> tuple[list[_Call], Any]:
    """Run the base on two tokens with these layers. Return the calls of its modules in their order, and its hidden states."""
    others = {name: copy.copy(module) for name, module in base.named_children() if name != layers}
    calls: list[_Call] = []
    hooks = [
        module.register_forward_hook(lambda _, args, output, name=name: calls.append((name, args, output)))
        for name, module in {**others, **{f"{layers}.{k}": layer for k, layer in enumerate(recorders)}}.items()
    ]
    probe = with_modules(base, {**others, layers: nn.ModuleList(recorders)})
    try:
        ids = torch.zeros(1, 2, dtype=torch.int64, device=next((b.device for b in base.buffers()), "cpu"))
        zeros = {
            key: torch.zeros((), dtype=p.dtype, device=ids.device).expand(p.shape)
            for key, p in probe.named_parameters()
        }
        with torch.no_grad(), torch.device(ids.device):
            output = functional_call(probe, zeros, (), {"input_ids": ids, "use_cache": False})
    finally:
        for hook in hooks:
            hook.remove()
    return calls, output.last_hidden_state


def _same(a: Any, b: Any) -> bool:
    """Return whether both are one tensor, or views of one."""
    if a is b:
        return True
    both = isinstance(a, Tensor) and isinstance(b, Tensor)
    return both and (a.shape, a.data_ptr()) == (b.shape, b.data_ptr())


def with_modules(module: nn.Module, replaced: Mapping[str, nn.Module]) -> nn.Module:
    """Return the module with others inside, by their dotted names; it shares everything else with `module`."""
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    for name, new in replaced.items():
        first, _, rest = name.partition(".")
        old = clone._modules[first]
        assert old is not None
        clone._modules[first] = with_modules(old, {rest: new}) if rest else new
    return clone
