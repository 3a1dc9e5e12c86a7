"""Activation checkpointing: recompute a region's forward in its backward instead of holding its activations.

A `Checkpointer` follows one `activation_checkpointing` section. arXiv:1604.06174. Eager regions are recomputed by hooks on the
tensors that they save, in a fraction of torch.utils.checkpoint's host time; a compiler knows only torch's own function.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from parallel3d.autograd.selective import run_in_graph, selective_contexts
from parallel3d.comm.clock import Clock, clock_of
from parallel3d.comm.transfers import Copy, Transfers
from parallel3d.config import SELECTIVE, ActivationCheckpointingConfig, RecomputationPolicy
from parallel3d.errors import ExecutionError
from parallel3d.rng import Capture, same_draws

# Marks kept before they are read: with `profile`, if `times` is never called, the host waits once per this number of regions.
_MOST_MARKS = 4096


@dataclass
class RecomputationTimes:
    """Numbers of forwards and of recomputations of checkpointed regions, and their seconds."""

    num_forwards: int = 0
    forward: float = 0.0
    num_recomputations: int = 0
    recomputation: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.num_forwards} forwards {self.forward:.4g} s, {self.num_recomputations} recomputations "
            f"{self.recomputation:.4g} s"
        )


class Checkpointer:
    """Runs functions and holds only their arguments for the backward, which runs them again.

    Non-reentrant, on any device: arguments and results are any pytrees, with or without gradients. Random states, of the
    CPU and of the current GPU, are restored for the recomputation, and so is autocast. With `cpu_checkpointing` the
    arguments wait in pinned host memory. transfers: copies to and from the host. capture: returns the current capture of a
    CUDA graph, or None.

    A CUDA graph can't restore a random state: where one is captured, a function that draws random numbers is an error.
    """

    def __init__(
        self,
        settings: ActivationCheckpointingConfig | None = None,
        clock: Clock | None = None,
        transfers: Transfers | None = None,
        capture: Callable[[], Capture | None] = lambda: None,
    ):
        self.settings = settings or ActivationCheckpointingConfig()
        self._offload = HostOffload(transfers or Transfers()) if self.settings.cpu_checkpointing else None
        self._watches = self.settings.profile or self.settings.synchronize_checkpoint_boundary
        self._clock, self._capture = clock, capture
        self._marks: list[tuple[bool, Any, Any]] = []
        self._times = RecomputationTimes()

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run function(*args, **kwargs), and once more in its backward: it must compute the same from the same arguments.

        What the backward computes again is the settings' policy; all, unless that is one of SELECTIVE.
        """
        return self._run(self.settings.policy, True, function, *args, **kwargs)

    def under(self, policy: RecomputationPolicy, restores: bool = True) -> Callable[..., Any]:
        """Return a callable that runs functions as this object does, but by this policy instead of the settings'.

        restores: whether random states are restored; False for functions that seed the generators before they draw.
        """
        return partial(self._run, policy, restores)

    def _run(self, policy: object, restores: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if torch.compiler.is_compiling():
            if not self._watches and self._offload is None:
                return run_in_graph(policy, function, *args, **kwargs)
            return torch.compiler.disable(self._run)(policy, restores, function, *args, **kwargs)
        forward: list[AbstractContextManager[Any]] = []
        again: list[AbstractContextManager[Any]] = []
        if restores:
            capture = self._capture()
            again.append(same_draws() if capture is None else capture.without_draws())
        if policy in SELECTIVE:
            for contexts, own in zip((forward, again), selective_contexts(policy == "cheap")(), strict=True):
                contexts.append(own)
        if self._watches:
            forward.append(self._boundary(False))
            again.append(self._boundary(True))
        with self._offload.region(args, kwargs) if self._offload is not None else nullcontext():
            return checkpoint(function, args, kwargs, forward, again)

    @contextmanager
    def _boundary(self, recomputing: bool) -> Iterator[None]:
        """Time a region's forward or its recomputation, which ends by an exception once it has all it needs."""
        self._synchronize()
        clock = self._clock_in_use() if self.settings.profile else None
        begin = None if clock is None else clock.mark()
        try:
            yield
        finally:
            if clock is not None:
                self._marks.append((recomputing, begin, clock.mark()))
                if len(self._marks) >= _MOST_MARKS:
                    self._read_marks()
            self._synchronize()

    def _clock_in_use(self) -> Clock:
        if self._clock is None:
            cuda = torch.cuda.is_initialized()
            self._clock = clock_of(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
        return self._clock

    def _synchronize(self) -> None:
        if self.settings.synchronize_checkpoint_boundary and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _read_marks(self) -> None:
        if not self._marks or self._clock is None:
            return
        seconds = self._clock.read([mark for _, *pair in self._marks for mark in pair])
        for (recomputing, _, _), begin, end in zip(self._marks, seconds[::2], seconds[1::2], strict=True):
            if recomputing:
                self._times.num_recomputations += 1
                self._times.recomputation += end - begin
            else:
                self._times.num_forwards += 1
                self._times.forward += end - begin
        self._marks.clear()

    def times(self) -> RecomputationTimes:
        """Return the times since the last call, if `profile` is on; waits for the device once."""
        self._read_marks()
        times, self._times = self._times, RecomputationTimes()
        return times


class _ParkedRegion:
    """Tensors parked by one region, which they keep alive, and the region before it, the next one in the backward."""

    def __init__(self) -> None:
        self.parked: list[weakref.ref[_Parked]] = []
        self.before: weakref.ref[_ParkedRegion] | None = None


@dataclass(eq=False)
class _Parked:
    """Tensor on the host. back: the copy to the device, from its start until it is used."""

    host: Copy
    device: torch.device
    region: _ParkedRegion
    back: Copy | None = None
    used: bool = False


class HostOffload:
    """Keeps tensors that autograd saves on the host; while a backward uses one region's, the next region's are copied back."""

    def __init__(self, transfers: Transfers):
        self._transfers = transfers
        self._latest: weakref.ref[_ParkedRegion] | None = None

    @contextmanager
    def region(self, *arguments: Any) -> Iterator[None]:
        """Park the tensors that autograd saves in this context as one region's, except parameters, which stay on the device.

        Raises ExecutionError if the region writes into its arguments, which are being copied; autograd detects that only for
        tensors that it holds itself.
        """
        tensors = [(t, t._version) for t in tree_leaves(arguments) if isinstance(t, Tensor)]
        with torch.autograd.graph.saved_tensors_hooks(partial(self._park, _ParkedRegion()), self._fetch):
            yield
        for tensor, version in tensors:
            if tensor._version != version:
                raise ExecutionError(
                    f"a recomputed region changed its argument of shape {list(tensor.shape)} in place, which it would read "
                    "again; use an operation that makes a new tensor, or begin the region after it"
                )

    @torch.no_grad()
    def _park(self, region: _ParkedRegion, tensor: Tensor) -> Tensor | _Parked:
        if (tensor.is_leaf and tensor.requires_grad) or not tensor.numel() or not self._transfers.leaves(tensor):
            return tensor
        parked = _Parked(self._transfers.to_host(tensor), tensor.device, region)
        if not region.parked:
            region.before, self._latest = self._latest, weakref.ref(region)
        region.parked.append(weakref.ref(parked))
        return parked

    @torch.no_grad()
    def _fetch(self, parked: Tensor | _Parked) -> Tensor:
        if isinstance(parked, Tensor):
            return parked
        back = parked.back or self._transfers.to_device(parked.host, parked.device)
        parked.back, parked.used = None, True
        self._transfers.wait(back)
        self._prefetch(parked.region)
        before = parked.region.before() if parked.region.before is not None else None
        if before is not None:
            self._prefetch(before)
        return back.tensor

    def _prefetch(self, region: _ParkedRegion) -> None:
        for parked in (reference() for reference in region.parked):
            if parked is not None and parked.back is None and not parked.used:
                parked.back = self._transfers.to_device(parked.host, parked.device)


_KINDS = ("cpu", "cuda")  # of devices that have an autocast
_TENSOR = object()  # in place of a tensor among the arguments
_ADVICE = "it must compute the same from the same arguments"


class _Slot:
    """A tensor that a region saves, for autograd. value: the tensor, once it is computed again; version: its version then."""

    __slots__ = ("__weakref__", "dtype", "region", "shape", "value", "version")

    def __init__(self, region: _Region, tensor: Tensor):
        self.region, self.shape, self.dtype = region, tensor.shape, tensor.dtype
        self.value: Tensor | None = None
        self.version = 0


class _Done(Exception):
    """Ends a recomputation when all needed tensors exist. An Exception, as torch calls modules' always_call hooks for these."""


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
        # Most regions have only tensors as arguments.
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
                slot.value, slot.version = tensor, tensor._version
            if number == len(self._slots):
                raise _Done

        try:
            with saved_tensors_hooks(fill, unpack), torch.enable_grad(), ExitStack() as stack:
                self._modes.restore(stack)
                for context in self._again:
                    stack.enter_context(context)
                self._function(*args, **kwargs)
        except _Done:
            return
        raise ExecutionError(
            f"a region saved {len(self._slots)} tensors in its forward, but {number} in its recomputation; {_ADVICE}"
        )


def unpack(slot: _Slot) -> Tensor:
    """Return the tensor of a slot. Raises ExecutionError, as autograd does, if it was changed in place after it was saved."""
    if slot.value is None:
        slot.region.recompute()
    assert slot.value is not None
    if slot.value._version != slot.version:
        raise ExecutionError(
            f"a region changed a tensor {list(slot.shape)} in place after it had saved it for its backward; use an operation "
            "that makes a new tensor"
        )
    return slot.value


def checkpoint(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    forward: Iterable[AbstractContextManager[Any]] = (),
    again: Iterable[AbstractContextManager[Any]] = (),
) -> Any:
    """Return function(*args, **kwargs), for which autograd holds only the arguments; the backward runs the function again.

    The recomputation has the autocast and default device of the forward, and ends when all tensors that were saved exist again.

    - args, kwargs: with tensors anywhere in pytrees.
    - forward, again: contexts for the forward and for the recomputation.

    Raises ExecutionError in the backward if the recomputation saves other tensors than the forward.
    """
    region = _Region(function, args, kwargs, again)
    with saved_tensors_hooks(region.pack, unpack), ExitStack() as stack:
        for context in forward:
            stack.enter_context(context)
        return function(*args, **kwargs)
