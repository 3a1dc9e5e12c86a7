"""Operator counter: the work of all operators that run inside it, and the bytes of their live results."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from parallel3d.costs.operators import MetaResults, bytes_of, cost_of, storage_of, tensors_of
from parallel3d.costs.work import Collective, Exchange, Work
from parallel3d.errors import PartitionError

_COLLECTIVES = {"c10d", "_c10d_functional"}  # namespaces of operators
# Host time to start and await a collective, in operator calls: 0.27 ms where an operator takes 30 us.
_CALLS_PER_COLLECTIVE = 9
# Host time to replay a layer's forward or backward as a CUDA graph, in operator calls: 10 us.
_REPLAY = 1 / 3
_IS_DEVICE = torch.ops.prim.device.default  # FakeTensor.device
# GEMMs into a given tensor of another dtype. They needn't run on tensors without memory; PyTorch 2.11 can't run the second.
_GEMMS_INTO = [op.dtype_out for op in (torch.ops.aten.mm, torch.ops.aten.addmm) if "dtype_out" in op.overloads()]
_GEMMS_INTO += [torch.ops.aten._scaled_mm.out]
# The compiler recomputes them like element-wise operators.
_COPIES = {"aten::_to_copy", "aten::clone"}


class Memory:
    """Weak reference to a tensor's storage."""

    def __init__(self, tensor: Tensor):
        storage = tensor.untyped_storage()
        self.key, self.nbytes, self._storage = storage._cdata, storage.nbytes(), weakref.ref(storage)

    @property
    def is_held(self) -> bool:
        """Whether something keeps the storage."""
        return self._storage() is not None

    def when_freed(self, callback: Callable[[int], None]) -> int:
        """Call callback(bytes) when the storage is freed; return the bytes that are held now."""
        storage = self._storage()
        if storage is None:
            return 0
        weakref.finalize(storage, callback, self.nbytes).atexit = False
        return self.nbytes


class _Recomputable:
    """Storages that the backward of a compiled region can recompute, and so does not save.

    The compiler's partitioner cuts a region's graph where the fewest bytes pass from the forward to the backward, which
    recomputes element-wise operators (torch._functorch.partitioners). This class finds the storages that follow from
    tensors that are saved anyway. Storages are identified by their keys (_cdata).
    """

    def __init__(self) -> None:
        # Storage made by a region that nothing outside it has read -> the region's inputs that it is computed from.
        self._sources: dict[int, Mapping[int, weakref.ref[UntypedStorage]]] = {}

    def read(self, storages: Sequence[UntypedStorage], region: Collection[int]) -> None:
        """Note that an operator reads these storages. Those that the current region has not made must be in memory.

        region: keys of the storages that the current region has made.
        """
        for storage in storages:
            if storage._cdata not in region:
                self._sources.pop(storage._cdata, None)

    def made(self, key: int, function: Any, storages: Sequence[UntypedStorage], region: Collection[int]) -> None:
        """Note that an operator of the current region makes, or changes, storage `key` from these."""
        sources: dict[int, weakref.ref[UntypedStorage]] = dict(self._sources.pop(key, {}))
        for storage in storages:
            if storage._cdata not in region:
                sources[storage._cdata] = weakref.ref(storage)
            elif storage._cdata in self._sources:
                sources.update(self._sources[storage._cdata])
            elif storage._cdata != key:
                return
        # The partitioner recomputes element-wise operators that draw no random numbers.
        if torch.Tag.nondeterministic_seeded in function.tags:
            return
        if torch.Tag.pointwise in function.tags or function._schema.name in _COPIES:
            self._sources[key] = sources

    def freed(self, key: int) -> None:
        """Forget a storage that nothing keeps."""
        self._sources.pop(key, None)

    def take(self, outputs: Collection[int]) -> list[int]:
        """End a forward: return the keys of what its backward recomputes, without the forward's outputs."""
        followed, self._sources = self._sources, {}
        recomputed = {key for key, sources in followed.items() if all(ref() is not None for ref in sources.values())}
        return sorted(recomputed.difference(outputs))


# Field of Work -> the field that counts the same work in float32 or wider dtypes.
_FP32_FIELDS = {"gemm_flops": "fp32_gemm_flops", "attention_flops": "fp32_attention_flops"}


class OperatorCounter(TorchDispatchMode):
    """Counts the work of the operators that run inside it, and the bytes of storages that they made and that are alive.

    - instead: advice of the error raised for a layer that calls a collective of torch.distributed.
    - fuses: torch.compile runs the layers. All operators between matrix products, attention, collectives and this
      project's own kernels then count as one kernel, which reads each input from outside once and writes what outlives it;
      the rest is never in memory. At the end of a forward, `drop_recomputed` leaves out what the backward recomputes.
    - in_graphs: layers run as CUDA graphs: the host replays one in place of calling operators.

    weights: storages of weights and of their gradients' accumulators, see Work; nbytes: live bytes; peak: the maximum of
    nbytes, with the workspace of operators; peak_with_others: the same with the tensors of `count_with_others`.
    """

    def __init__(self, instead: str, fuses: bool = False, in_graphs: bool = False):
        super().__init__()
        self.weights: frozenset[int] = frozenset()
        self.nbytes = self.peak = 0
        self.peak_with_others = self._others = 0
        self._instead, self._fuses, self._in_graphs = instead, fuses, in_graphs
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._counts: dict[str, Any] = defaultdict(float)  # fields of Work
        self._exchanges: list[Exchange] = []
        self._parts: list[tuple[Collective, Work]] = []  # of the current exchange
        self._awaited = 0
        self._before = Work()  # counted until its last collective started
        # The current fused kernel: bytes that it reads from outside, and bytes that it makes, which aren't counted yet.
        self._read: dict[int, int] = {}
        self._pending: dict[int, int] = {}
        self._recomputable = _Recomputable()
        self._uncounted: set[int] = set()  # storages that are alive here, but would not be in compiled training
        self._results = MetaResults()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled while layers are traced; the check for it would take longer than the rest.
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is _IS_DEVICE:
            return function(*args)
        if getattr(function, "namespace", None) in _COLLECTIVES:
            raise PartitionError(
                "it communicates with other ranks while it is traced; let it take its groups from a BuildContext "
                f"(context=), or {self._instead}"
            )
        kwargs = kwargs or {}
        if function.is_view:
            return function(*args, **kwargs)
        read = tensors_of((args, kwargs) if kwargs else args)
        result = kwargs["out"] if function in _GEMMS_INTO else self._results.call(function, args, kwargs, read)
        written = tensors_of(result)
        field, number = cost_of(function, args, kwargs, read, written, result)
        joins = self._fuses and field == "moved" and number > 0 and function.namespace == "aten"
        if number:
            self._counts["operators"] += 1
            if not joins:
                self._end_kernel()
                self._counts[field] += number
                if field in _FP32_FIELDS and all(tensor.dtype.itemsize >= 4 for tensor in read):
                    self._counts[_FP32_FIELDS[field]] += number
                self._counts["kernels"] += 1
            if self._fuses:
                self._recomputable.read([t.untyped_storage() for t in read], self._pending)
        # Each tensor that a GEMM reads or writes; an accumulator is among them twice, since it is read and written.
        for tensor in (*tensors_of(args), *written) if field in ("gemm_flops", "fp8_flops") else ():
            self._counts["weights" if storage_of(tensor) in self.weights else "operands"] += bytes_of(tensor)
        self._register(read, written, joins)
        if joins:
            for key in {storage_of(t) for t in written} & self._pending.keys():
                self._recomputable.made(key, function, [t.untyped_storage() for t in read], self._pending)
        if field == "attention_flops":
            self._update_peaks(_attention_workspace(function, args))
        return result

    def _register(self, read: Sequence[Tensor], written: Sequence[Tensor], joins: bool) -> None:
        """Register the new storages among an operator's results. joins: it is part of the current fused kernel."""
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

    def drop_recomputed(self, outputs: Sequence[Memory]) -> None:
        """End a forward, which returned `outputs`: stop counting what a compiled backward recomputes."""
        for key in self._recomputable.take({memory.key for memory in outputs}):
            storage = self._alive[key]()
            if storage is not None:
                self._uncounted.add(key)
                self.nbytes -= storage.nbytes()

    def _freed(self, key: int, nbytes: int, _: Any) -> None:
        del self._alive[key]
        self._recomputable.freed(key)
        if key in self._uncounted:
            self._uncounted.discard(key)
        elif self._pending.pop(key, None) is None:
            self.nbytes -= nbytes

    def _add(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._update_peaks(0)

    def _update_peaks(self, workspace: int) -> None:
        self.peak = max(self.peak, self.nbytes + workspace)
        self.peak_with_others = max(self.peak_with_others, self.nbytes + self._others + workspace)

    def count_with_others(self, memories: Sequence[Memory]) -> None:
        """Restart the second peak, which includes these storages for as long as something keeps them."""
        self._others = sum(memory.when_freed(self._free_other) for memory in memories)
        self.peak_with_others = self.nbytes + self._others

    def _free_other(self, nbytes: int) -> None:
        # The current kernel may have read it: then its results were in memory at the same time.
        self._update_peaks(sum(self._pending.values()))
        self._others -= nbytes

    def _end_kernel(self) -> None:
        if self._read or self._pending:
            written = sum(self._pending.values())
            self._counts["moved"] += written + sum(self._read.values())
            self._counts["kernels"] += 1
            self._read.clear()
            self._pending.clear()
            self._add(written)

    def start_collective(self, kind: str, nbytes: int) -> CountedCollective:
        """Count a collective over the tensor-parallel group, in the form that an ImaginedGroup calls."""
        self._end_kernel()
        self._counts["operators"] += _CALLS_PER_COLLECTIVE
        self._credit()
        kinds: Any = kind
        self._parts.append((Collective(kinds, nbytes), Work()))
        self._awaited += 1
        return CountedCollective(self._waited)

    def _waited(self) -> None:
        self._end_kernel()
        self._awaited -= 1
        if not self._awaited:
            self._end_exchange()

    def _credit(self) -> None:
        """Credit what was computed since the last collective started to that collective: it can overlap with it."""
        now = Work(**self._counts)
        if self._parts:
            collective, _ = self._parts[-1]
            self._parts[-1] = collective, now.beyond(self._before)
        self._before = now

    def _end_exchange(self) -> None:
        self._credit()
        self._exchanges.append(tuple(self._parts))
        self._parts = []

    def start_trace(self, weights: Iterable[Tensor]) -> None:
        """Drop the counts that a failed trace has left, and count these tensors as weights."""
        self.take()
        self.weights = frozenset(map(storage_of, weights))

    def restart_peak(self) -> None:
        """Begin the peak with the bytes that are live now."""
        self.peak = self.nbytes

    def take(self) -> Work:
        """Return what was counted since the last call, and start from zero."""
        self._end_kernel()
        if self._parts:
            self._awaited = 0
            self._end_exchange()
        if self._in_graphs and self._counts["operators"]:
            self._counts["operators"] = _REPLAY
        work = Work(**self._counts, exchanges=tuple(self._exchanges))
        self._counts, self._exchanges = defaultdict(float), []
        return work


class CountedCollective:
    """Collective with ranks that do not exist; waiting for it ends it in the counter."""

    def __init__(self, waited: Callable[[], None]):
        self._waited: Callable[[], None] | None = waited

    def is_completed(self) -> bool:
        """Return whether somebody waited for it."""
        return self._waited is None

    def wait(self) -> None:
        """End the collective."""
        waited, self._waited = self._waited, None
        if waited is not None:
            waited()


def _attention_workspace(function: Any, args: Any) -> int:
    """Return the bytes of workspace of a fused attention's backward: fp32 gradients of queries, and a number per row.

    FlashAttention-2 (arXiv:2307.08691, section 3.2) and cuDNN's kernel accumulate so; the CPU's kernel has no workspace.
    """
    name = function._schema.name
    if "backward" not in name or name.endswith("for_cpu_backward"):
        return 0
    query = args[1]
    return int(4 * query.numel() + 4 * query.shape[:-1].numel())
