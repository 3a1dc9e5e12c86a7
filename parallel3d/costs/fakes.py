"""Layers and samples as fake tensors: shapes and dtypes alone, no memory, no device.

Not the meta device: on that attention takes another path than in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_map

from parallel3d.costs.layer_costs import replace_tensors
from parallel3d.errors import PartitionError
from parallel3d.specs import BuildContext, Layer, LayerSpec

_COLLECTIVES = {"c10d", "_c10d_functional"}


def refuse_collective(func: Any, instead: str) -> None:
    """Raise PartitionError for an operator that communicates with ranks which a trace doesn't have. instead: as Fakes'."""
    if getattr(func, "namespace", None) in _COLLECTIVES:
        raise PartitionError(
            "it communicates with other ranks while it is traced; let it take its groups from a BuildContext (context=), "
            f"or {instead}"
        )


class Fakes:
    """Makes fake ones, to be used under `mode`, of layers that are built in `context`.

    instead: what else a user can do about a layer that can't be had as a fake, for messages.
    """

    def __init__(self, context: BuildContext, instead: str):
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode: AbstractContextManager[Any] = self._fake
        self.device, self._context, self._instead = context.device, context, instead

    def place(self, tree: Any) -> Any:
        """A pytree with fake tensors on the context's device."""

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with self._fake:
                return self._fake.from_tensor(leaf.detach()).to(self.device)

        return tree_map(fake, tree)

    def first_that_works(self, layer: Layer, use: Callable[[Any], Any]) -> Any:
        """use(a fake of the layer), with the first way to get one with which that doesn't fail.

        Raises PartitionError, with the last failure and the remedy, where all do.
        """
        failures: list[Exception] = []
        for build in self._ways(layer):
            try:
                found = use(build())
                failures.clear()  # they keep what their frames hold, in a cycle
                return found
            except PartitionError:
                raise
            except Exception as error:  # whatever a layer's own code raises
                failures.append(error)
        raise PartitionError(
            f"it can't be traced on fake tensors: {type(failures[-1]).__name__}: {failures[-1]}; let it not look at values of "
            f"tensors (.item(), .numpy(), if tensor:), or {self._instead}"
        ) from failures[-1]

    def _ways(self, layer: Layer) -> Iterator[Callable[[], Any]]:
        """How to get a fake layer: the first needs nothing, the last really builds it."""
        if not isinstance(layer, LayerSpec):
            yield lambda: self._faked(layer)
            return
        spec = copy.copy(layer)
        # Copies: what a layer remembers in its arguments, as shared tables, must not become fake for training.
        try:
            spec.module_args = tuple(map(self._copied, layer.module_args))
            spec.module_kwargs = {key: self._copied(value) for key, value in layer.module_kwargs.items()}
        except Exception as error:
            raise PartitionError(f"its arguments can't be copied for a trace: {error}; {self._instead}") from error

        def on_meta() -> nn.Module:
            with torch.device("meta"):
                module = spec.build(self._context)
            with self.mode:
                replace_tensors(module, lambda t: torch.empty_like(t, device=self.device))
            return module

        def on_device() -> nn.Module:
            with self.mode, self.device:
                return spec.build(self._context)

        yield on_meta
        yield on_device
        yield lambda: self._faked(layer.build(self._context))

    def _faked(self, value: Any) -> Any:
        """A copy with fake tensors."""
        with FakeCopyMode(self._fake):
            return copy.deepcopy(value)

    def _copied(self, argument: Any) -> Any:
        """The same of a constructor's argument, or the argument itself where it can't be copied and holds no tensors."""
        try:
            return self._faked(argument)
        except Exception:  # open files, locks and the like, with errors of their own
            if isinstance(argument, (Tensor, nn.Module, list, tuple, dict)):
                raise
            return argument


class MetaFakes(Fakes):
    """Tensors on the meta device in place of fake ones: several times as fast, where it is no matter that devices differ.

    For layers that are built, by specs without tensors among their arguments, and for functions.
    """

    def __init__(self, context: BuildContext, instead: str):
        super().__init__(context, instead)
        self.mode, self.device = nullcontext(), torch.device("meta")

    def place(self, tree: Any) -> Any:
        """See Fakes."""
        return tree_map(lambda leaf: leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf, tree)

    def first_that_works(self, layer: Layer, use: Callable[[Any], Any]) -> Any:
        """See Fakes; there is one way."""
        if isinstance(layer, nn.Module):
            raise PartitionError(f"it is built already; {self._instead}")
        try:
            if not isinstance(layer, LayerSpec):
                return use(layer)
            spec = copy.copy(layer)
            spec.module_args, spec.module_kwargs = copy.deepcopy((layer.module_args, layer.module_kwargs))
            if any(isinstance(a, (Tensor, nn.Module)) for a in (*spec.module_args, *spec.module_kwargs.values())):
                raise PartitionError(f"there are tensors among its arguments; {self._instead}")
            with torch.device("meta"):
                module = spec.build(self._context)
            return use(module)
        except Exception as error:  # whatever a layer's own code raises
            raise PartitionError(f"it can't be traced on the meta device: {error}; {self._instead}") from error
