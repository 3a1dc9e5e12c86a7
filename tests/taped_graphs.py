"""CUDA graphs' stand-in on the CPU: operators are recorded while they are captured, and run again into the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._ops import OpOverload
from torch.autograd import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel3d.errors import ExecutionError
from parallel3d.rng import OwnStreams


def _storages(tree: Any) -> list[int]:
    return [leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Tape(TorchDispatchMode):
    """Operators of one graph. Nothing that exists before is changed by the recording, as nothing runs in a real capture."""

    supports_higher_order_operators = True  # those of torch.compile, which seed a recomputation

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[Callable[[], Any]] = []
        self._own: set[int] = set()
        self._before: list[tuple[Tensor, Tensor]] = []
        self._empty: list[Any] = []  # memory that stays the graph's, even if no operator uses it

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return whether graphs of torch.compile, in which operators are seen, run in place of what they were made of."""
        return True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "parallel3d":  # written in Python, which a capture runs once
            with self:
                return function._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        arguments = function._schema.arguments if isinstance(function, OpOverload) else ()
        given = {a.name: v for a, v in zip(arguments, args, strict=False)} | kwargs
        written = [given[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        if function.namespace == "c10d":  # whose schemas don't say what is written
            written = tree_leaves(args)
        written = [w for w in tree_leaves(written) if isinstance(w, Tensor)]
        for tensor in written:
            if not set(_storages(tensor)) & self._own:
                self._before.append((tensor, tensor.clone()))
        result = function(*args, **kwargs)
        if function.namespace == "c10d":
            # gloo's own wait may copy to the result, which would be recorded.
            result[-1].wait()
            result = *result[:-1], FakeWork().boxed()
        aliased = set(_storages((args, kwargs)))
        new = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not set(_storages(leaf)) & aliased]
        self._own |= set(_storages(new))
        if "empty" in str(function):  # no kernel
            self._empty.append(result)
            return result.zero_()  # may be indices
        places = _storages((args, kwargs))
        self._steps.append(partial(self._again, function, args, kwargs, places, result, [*written, *new]))
        return result

    @staticmethod
    def _again(function: Any, args: Any, kwargs: Any, places: list[int], result: Any, changed: list[Tensor]) -> Any:
        if _storages((args, kwargs)) != places:
            raise RuntimeError("a kernel of a graph reads memory that a tensor has left")
        with _unsafe_preserve_version_counter(tuple(changed)):  # a replay happens behind autograd's back
            again = function(*args, **kwargs)
            if function.namespace == "c10d":
                return again[-1].wait()
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if any(old is tensor for tensor in changed) and old is not new:
                    old.copy_(new)

    def call(self, function: Callable[[], Any]) -> None:
        """Record a call of the host."""
        self._steps.append(function)

    def undo(self) -> None:
        """Restore what the recording has changed."""
        for tensor, before in reversed(self._before):
            tensor.data.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again."""
        for step in self._steps:
            step()


class TapedGraphs:
    """Stand-in of CudaGraphs."""

    def __init__(self, device: torch.device, own_streams: OwnStreams):
        self._own_streams = own_streams
        self._seeds: dict[int, int] = {}
        self._strays: list[bool] = []

    def release(self) -> None:
        """Give back memory."""

    def begin(self) -> None:
        """Begin a pool."""

    @contextmanager
    def capture(self, layers: Sequence[int]) -> Iterator[Tape]:
        """Record what the block runs."""
        self._tape, self._host = Tape(), torch.get_rng_state()
        try:
            with self._tape, self._own_streams.captured(self):
                yield self._tape
        finally:
            self._tape.undo()
            torch.set_rng_state(self._host)

    def enter(self, layer: int) -> None:
        """Begin a layer's stream."""
        self._tape.call(lambda: torch.manual_seed(self._seeds[layer]) and None)

    def begin_own(self, number: int, index: int) -> Callable[[], None]:
        ends: list[Callable[[], object]] = []
        self._tape.call(lambda: ends.append(self._own_streams.begin(index, torch.device("cpu"))))
        return lambda: self._tape.call(lambda: ends.pop()())

    @contextmanager
    def without_draws(self) -> Iterator[None]:
        """Let `drew` raise if the state changes in a replay."""
        states: list[Tensor] = []
        self._tape.call(lambda: states.append(torch.get_rng_state()))
        try:
            yield
        finally:
            self._tape.call(lambda: self._strays.append(not torch.equal(states.pop(), torch.get_rng_state())))

    def seed(self, layer: int) -> None:
        """Seed a layer's stream for the next replay."""
        self._seeds[layer] = torch.initial_seed()

    def drew(self, layers: Sequence[int]) -> Sequence[int]:
        """Return all layers."""
        if any(self._strays):
            raise ExecutionError("random numbers are drawn again in a recomputation within a layer")
        return layers
