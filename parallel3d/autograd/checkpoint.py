"""Recomputation of a region by hooks on the tensors that it saves, in a fraction of torch.utils.checkpoint's host time.

Only for eager code: a compiler knows torch's own function alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from parallel3d.errors import ExecutionError

_KINDS = ("cpu", "cuda")  # of devices that have an autocast
_TENSOR = object()  # in place of a tensor among the arguments
_ADVICE = "it must compute the same from the same arguments"


class _Slot:
    """A tensor that a region saves, for autograd. value: the tensor, once it is computed again."""

    __slots__ = ("__weakref__", "dtype", "region", "shape", "value")

    def __init__(self, region: _Region, tensor: Tensor):
        self.region, self.shape, self.dtype = region, tensor.shape, tensor.dtype
        self.value: Tensor | None = None


class _Done(Exception):
    """Ends a recomputation when all is there that is needed. An Exception: torch calls hooks of modules for these alone."""


class _Inputs(torch.autograd.Function):
    """Saves a region's arguments as autograd does, which notices if they are changed. Hooks around the region see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()


class _Modes:
    """Autocast and the default device, as they are at its creation."""

    def __init__(self) -> None:
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _KINDS]
        # A default device is a mode for functions.
        self._device = torch.get_default_device() if torch._C._len_torch_function_stack() else torch.device("cpu")

    def restore(self, stack: ExitStack) -> None:
        """Set them again, until the stack is left."""
        now = _Modes()
        for own, other in zip(self._autocast, now._autocast, strict=True):
            if own != other:
                stack.enter_context(torch.autocast(*own))
        if self._device != now._device:
            stack.enter_context(self._device)


class _Region:
    """One call of a function. Slots are held by autograd's nodes, and hold the region."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        again: Iterable[AbstractContextManager[Any]],
    ):
        self._function, self._again = function, again
        # Most regions have tensors alone as arguments.
        is_flat = not kwargs and all(isinstance(argument, Tensor) for argument in args)
        leaves: Sequence[Any]
        self._tree: TreeSpec | None
        leaves, self._tree = (args, None) if is_flat else tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        self._inputs: Tensor = _Inputs.apply(anchor, *tensors)
        self._slots: list[weakref.ref[_Slot]] = []
        self._modes = _Modes()

    def pack(self, tensor: Tensor) -> _Slot:
        """Return what autograd holds in place of a tensor."""
        slot = _Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def recompute(self) -> None:
        """Compute the values of the slots that are still held."""
        saved: Any = self._inputs.grad_fn
        tensors = iter(saved.saved_tensors)
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self._leaves]
        args, kwargs = (leaves, {}) if self._tree is None else tree_unflatten(leaves, self._tree)
        number = 0

        def fill(tensor: Tensor) -> None:
            nonlocal number
            slot, number = self._slots[number](), number + 1
            if slot is not None:
                if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
                    first, now = (f"{list(t.shape)} of {t.dtype}" for t in (slot, tensor))
                    raise ExecutionError(
                        f"a region saved a tensor {first} in its forward, but {now} in its recomputation; {_ADVICE}"
                    )
                slot.value = tensor
            if number == len(self._slots):
                raise _Done

        try:
            with saved_tensors_hooks(fill, unpack), torch.enable_grad(), ExitStack() as stack:
                self._modes.restore(stack)
                for context in self._again:
                    stack.enter_context(context)
                self._function(*args, **kwargs)
        except _Done:
            # Detached from the recomputation's graph; not within the contexts, where an operator may take longer.
            for slot in [reference() for reference in self._slots]:
                if slot is not None and slot.value is not None:
                    slot.value = slot.value.detach()
            return
        raise ExecutionError(
            f"a region saved {len(self._slots)} tensors in its forward, but {number} in its recomputation; {_ADVICE}"
        )


def unpack(slot: _Slot) -> Tensor:
    """Return the tensor of a slot."""
    if slot.value is None:
        slot.region.recompute()
    assert slot.value is not None
    return slot.value


def checkpoint(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    forward: Iterable[AbstractContextManager[Any]] = (),
    again: Iterable[AbstractContextManager[Any]] = (),
) -> Any:
    """Return function(*args, **kwargs), of which autograd holds the arguments alone; its backward runs the function again.

    Autocast and the default device are then those of the forward, and it ends when all tensors that were saved are there again.

    - args, kwargs: with tensors anywhere in pytrees.
    - forward, again: contexts for the forward and for the recomputation.

    Raises ExecutionError in the backward if it saves other tensors than the forward.
    """
    region = _Region(function, args, kwargs, again)
    with saved_tensors_hooks(region.pack, unpack), ExitStack() as stack:
        for context in forward:
            stack.enter_context(context)
        return function(*args, **kwargs)
