"""Recomputation of a region by hooks on the tensors that it saves, in a fraction of torch.utils.checkpoint's host time.

Only for eager code: a compiler knows torch's own function alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel3d.autograd.selective import Contexts
from parallel3d.errors import ExecutionError

_ADVICE = "it must compute the same from the same arguments"


class _Slot:
    """A tensor that a region saves, for autograd. value: the tensor, once it is computed again."""

    __slots__ = ("__weakref__", "dtype", "region", "shape", "value")

    def __init__(self, region: _Region, tensor: Tensor):
        self.region, self.shape, self.dtype = region, tensor.shape, tensor.dtype
        self.value: Tensor | None = None


class _Done(BaseException):
    """Ends a recomputation when all is there that is needed. Not an Exception, which the region's code might catch."""


class _Inputs(torch.autograd.Function):
    """Saves a region's arguments as autograd does, which notices if they are changed. Hooks around the region see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()


class _Settings:
    """Random states, autocast and the default device, as they are at its creation."""

    def __init__(self) -> None:
        self._cuda = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._states = self._random_states()
        self._autocast = self._autocasts()
        self._device = torch.get_default_device()

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *([] if self._cuda is None else [torch.cuda.get_rng_state(self._cuda)])]

    def _autocasts(self) -> dict[str, tuple[bool, torch.dtype]]:
        kinds = ["cpu", "cuda"] if self._cuda is not None else ["cpu"]
        return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}

    def _set_random(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, self._cuda or 0)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore them for the block, and after it those from before."""
        states = self._random_states()
        self._set_random(self._states)
        with ExitStack() as stack:
            stack.callback(self._set_random, states)
            if self._autocast != self._autocasts():
                for kind, (enabled, dtype) in self._autocast.items():
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            if self._device != torch.get_default_device():
                stack.enter_context(self._device)
            yield


class _Region:
    """One call of a function. Slots are held by autograd's nodes, and hold the region."""

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], again: AbstractContextManager[Any]):
        self._function, self._again = function, again
        self._places = [k for k, argument in enumerate(arguments) if isinstance(argument, Tensor)]
        self._arguments = [None if isinstance(argument, Tensor) else argument for argument in arguments]
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        self._inputs: Tensor = _Inputs.apply(anchor, *(arguments[k] for k in self._places))
        self._slots: list[weakref.ref[_Slot]] = []
        self._settings = _Settings()

    def pack(self, tensor: Tensor) -> _Slot:
        """Return what autograd holds in place of a tensor."""
        slot = _Slot(self, tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def _recompute(self) -> None:
        """Compute the values of the slots that are still held."""
        arguments, number = list(self._arguments), 0
        saved: Any = self._inputs.grad_fn
        for place, tensor in zip(self._places, saved.saved_tensors, strict=True):
            arguments[place] = tensor

        def fill(tensor: Tensor) -> None:
            nonlocal number
            slot, number = self._slots[number](), number + 1
            if slot is not None:
                if (tensor.shape, tensor.dtype) != (slot.shape, slot.dtype):
                    first, now = (f"{list(t.shape)} of {t.dtype}" for t in (slot, tensor))
                    raise ExecutionError(
                        f"a region saved a tensor {first} in its forward, but {now} in its recomputation; {_ADVICE}"
                    )
                slot.value = tensor.detach()
            if number == len(self._slots):
                raise _Done

        try:
            with saved_tensors_hooks(fill, unpack), self._settings.restored(), self._again, torch.enable_grad():
                self._function(*arguments)
        except _Done:
            return
        raise ExecutionError(
            f"a region saved {len(self._slots)} tensors in its forward, but {number} in its recomputation; {_ADVICE}"
        )


def unpack(slot: _Slot) -> Tensor:
    """Return the tensor of a slot."""
    if slot.value is None:
        slot.region._recompute()
    assert slot.value is not None
    return slot.value


def checkpoint(
    function: Callable[..., Any],
    arguments: Sequence[Any],
    contexts: Contexts,
) -> Any:
    """Return function(*arguments), of which autograd holds the arguments alone; its backward runs the function again.

    contexts: for the forward, and for the recomputation, which ends when all tensors that were saved are there again. Random
    states of the CPU and of the current GPU, autocast and the default device are restored for it. Raises ExecutionError in the
    backward if it saves other tensors than the forward.
    """
    forward, again = contexts
    region = _Region(function, arguments, again)
    with saved_tensors_hooks(region.pack, unpack), forward:
        return function(*arguments)
