"""Counts work and live bytes, operator by operator."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.costs.counting import OpCost, bytes_of, cost_of, storage_of, tensors_of
from parallel3d.costs.fakes import refuse_collective
from parallel3d.costs.remade import Remade
from parallel3d.costs.work import Collective, Exchange, Work

# For messages of layers that communicate by themselves.
INSTEAD = "communicate by parallel3d.tensor_parallel alone"
_CALLS = 9  # of operators, that starting and awaiting a collective takes the host: 0.27 ms where one takes 30 us
_IS_DEVICE = torch.ops.prim.device.default  # FakeTensor.device
# Products into a given tensor of another dtype, which tensors without memory can do without: PyTorch 2.11 can't run the second.
_PRODUCTS_INTO = [op.dtype_out for op in (torch.ops.aten.mm, torch.ops.aten.addmm) if "dtype_out" in op.overloads()]


class Memory:
    """A tensor's storage, as long as something else keeps it."""

    def __init__(self, tensor: Tensor):
        storage = tensor.untyped_storage()
        self.key, self.nbytes, self._storage = storage._cdata, storage.nbytes(), weakref.ref(storage)

    @property
    def is_held(self) -> bool:
        """Whether something does."""
        return self._storage() is not None

    def when_freed(self, tell: Callable[[int], None]) -> int:
        """Call tell(bytes) then; the bytes that something keeps now."""
        storage = self._storage()
        if storage is None:
            return 0
        weakref.finalize(storage, tell, self.nbytes).atexit = False
        return self.nbytes


class Watch(TorchDispatchMode):
    """Counts what runs inside. nbytes: of the storages that operators inside made and that are alive; peak: the most of them,
    with what an operator takes for itself; weights: storages of weights and of their gradients' accumulators, see Work.

    fuses: whether torch.compile runs the layers. Then all that lies between products of matrices, attention, collectives and
    kernels of this project's own counts as one kernel, which reads what comes from outside once and writes what outlives it;
    what doesn't is never in memory. At the end of a forward `make_anew` says what of it the backward doesn't need.
    """

    def __init__(self, fuses: bool = False):
        super().__init__()
        self.weights: frozenset[int] = frozenset()
        self.nbytes = self.peak = 0
        self.others = self.peak_with_others = 0
        self._fuses = fuses
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._gemm = self._attention = self._moved = self._operands = self._weights = 0.0
        self._kernels = self._operators = 0
        self._exchanges: list[Exchange] = []
        self._parts: list[tuple[Collective, Work]] = []  # of the exchange under way
        self._awaited = 0
        self._before = Work()  # what was counted when its last collective started
        # Of the fused kernel under way: bytes of what it reads from outside, and of what it makes, not counted yet.
        self._read: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        self._remade = Remade()
        self._uncounted: set[int] = set()  # alive here, but in no memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while layers are traced, and what would see to that takes longer than the rest.
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _IS_DEVICE:
            return function(*args)
        refuse_collective(function, INSTEAD)
        kwargs = kwargs or {}
        read = tensors_of((args, kwargs) if kwargs else args)
        result = kwargs["out"] if function in _PRODUCTS_INTO else function(*args, **kwargs)
        written = tensors_of(result)
        cost = cost_of(function, args, kwargs, read, written, result)
        self._operators += any(cost)
        joins = self._fuses and bool(cost.moved) and function.namespace == "aten"
        if not joins and any(cost):
            self._end_kernel()
            self._count(cost)
            if cost.gemm_flops:
                self._count_operands([*tensors_of(args), *written])
        if self._fuses and any(cost):
            self._remade.read([t.untyped_storage() for t in read], self._pending)
        self._see(read, written, joins)
        if joins:
            self._note_sources(function, read, written)
        if cost.attention_flops:
            self.note_need(_attention_workspace(function, args))
        return result

    def _see(self, read: Sequence[Tensor], written: Sequence[Tensor], joins: bool) -> None:
        """New storages among what an operator returned; joins: it is part of the kernel under way."""
        given = {}
        for tensor in read:
            storage = tensor.untyped_storage()
            given[storage._cdata] = min(tensor.nbytes, storage.nbytes()) if joins else 0
        if joins:
            self._read.update({key: nbytes for key, nbytes in given.items() if key not in self._pending})
        for tensor in written:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._alive or key in given:
                continue
            nbytes = storage.nbytes()
            self._alive[key] = weakref.ref(storage, partial(self._freed, key, nbytes))
            if joins:
                self._pending[key] = nbytes
            else:
                self._add(nbytes)

    def _note_sources(self, function: Any, read: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """What an operator of the kernel under way makes, it may make of its operands again."""
        made = {storage_of(t) for t in written} & self._pending.keys()
        for key in made:
            self._remade.made(key, function, [t.untyped_storage() for t in read], self._pending)

    def make_anew(self, outputs: Sequence[Memory]) -> None:
        """A forward, which returned these, is through: stop counting what a compiled backward makes anew."""
        for key in self._remade.take({memory.key for memory in outputs}):
            storage = self._alive[key]()
            if storage is not None:
                self._uncounted.add(key)
                self.nbytes -= storage.nbytes()

    def _freed(self, key: int, nbytes: int, _: Any) -> None:
        del self._alive[key]
        self._remade.freed(key)
        if key in self._uncounted:
            self._uncounted.discard(key)
        elif self._pending.pop(key, None) is None:
            self.nbytes -= nbytes

    def _add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.note_need(0)

    def note_need(self, nbytes: int) -> None:
        """An operator takes so much for itself."""
        self.peak = max(self.peak, self.nbytes + nbytes)
        self.peak_with_others = max(self.peak_with_others, self.nbytes + self.others + nbytes)

    def count_with_others(self, memories: Sequence[Memory]) -> None:
        """From now on follow a second peak, with these for as long as something keeps them."""
        self.others = sum(memory.when_freed(self._free) for memory in memories)
        self.peak_with_others = self.nbytes + self.others

    def _free(self, nbytes: int) -> None:
        self.others -= nbytes

    def _count(self, cost: OpCost) -> None:
        self._gemm += cost.gemm_flops
        self._attention += cost.attention_flops
        self._moved += cost.moved
        self._kernels += 1

    def _count_operands(self, tensors: Sequence[Tensor]) -> None:
        """Each is read or written once; an accumulator is among them twice, for it is both."""
        for tensor in tensors:
            if storage_of(tensor) in self.weights:
                self._weights += bytes_of(tensor)
            else:
                self._operands += bytes_of(tensor)

    def _end_kernel(self) -> None:
        if self._read or self._pending:
            written = sum(self._pending.values())
            self._moved += written + sum(self._read.values())
            self._kernels += 1
            self._read.clear()
            self._pending.clear()
            self._add(written)

    def note(self, kind: str, nbytes: int) -> Noted:
        """A collective of the slice group starts."""
        self._end_kernel()
        self._operators += _CALLS
        self._credit()
        kinds: Any = kind
        self._parts.append((Collective(kinds, nbytes), Work()))
        self._awaited += 1
        return Noted(self._waited)

    def _waited(self) -> None:
        self._end_kernel()
        self._awaited -= 1
        if not self._awaited:
            self._end_exchange()

    def _credit(self) -> None:
        """What was computed since the last collective's start goes on behind it."""
        now = self._counted()
        if self._parts:
            collective, _ = self._parts[-1]
            self._parts[-1] = collective, now.beyond(self._before)
        self._before = now

    def _end_exchange(self) -> None:
        self._credit()
        self._exchanges.append(Exchange(tuple(self._parts)))
        self._parts = []

    def _counted(self) -> Work:
        counted = self._gemm, self._attention, self._moved, self._kernels, self._operands, self._weights
        return Work(*counted, self._operators)

    def take(self) -> Work:
        """What was counted since the last call."""
        self._end_kernel()
        if self._parts:
            self._awaited = 0
            self._end_exchange()
        work = replace(self._counted(), exchanges=tuple(self._exchanges))
        self._gemm = self._attention = self._moved = self._operands = self._weights = 0.0
        self._kernels = self._operators = 0
        self._exchanges = []
        return work


class Noted:
    """A collective of ranks that aren't there, to be waited for."""

    def __init__(self, waited: Callable[[], None]):
        self._waited: Callable[[], None] | None = waited

    def is_completed(self) -> bool:
        """See Work of comm."""
        return self._waited is None

    def wait(self) -> None:
        """See Work of comm."""
        waited, self._waited = self._waited, None
        if waited is not None:
            waited()


def _attention_workspace(function: Any, args: Any) -> int:
    """Bytes that a fused attention's backward takes for itself: queries' gradients in fp32, and a number a row.

    As FlashAttention-2 accumulates them (arXiv:2307.08691, section 3.2), and cuDNN's kernel does; on the CPU there is none.
    """
    name = function._schema.name
    if "backward" not in name or name.endswith("for_cpu_backward"):
        return 0
    query = args[1]
    return int(4 * query.numel() + 4 * query.shape[:-1].numel())
