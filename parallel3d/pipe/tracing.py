"""FLOPs, and bytes held, of layers on fake tensors: shapes and dtypes alone, no memory, no device.

Not the meta device: on that attention takes another path than in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from parallel3d.errors import PartitionError
from parallel3d.parameters import slicing_of
from parallel3d.pipe.costs import LayerCost, Ruler, Run, Sample, bound, made_ready, replace_tensors
from parallel3d.pipe.specs import BuildContext, Layer, LayerSpec, blueprint

# What moves data without a formula for its FLOPs takes as long as so many FLOPs a byte: an H200 sustains some 690e12 FLOP/s
# in bf16 GEMMs and 4.3e12 byte/s, an A100 some 260e12 and 1.7e12.
FLOPS_PER_BYTE = 160
_SCALED = "_scaled_dot_product_"
# They read as much as they write, however large the table is.
_LOOKUPS = {"embedding", "index_select", "index", "gather"}
_COLLECTIVES = {"c10d", "_c10d_functional"}


class _Counter(TorchDispatchMode):
    """Sums the FLOPs of what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "namespace", None) in _COLLECTIVES:
            raise PartitionError(
                "it communicates with other ranks while it is traced; let it take its groups from a BuildContext (context=), "
                "or use 'profile' or 'parameters'"
            )
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.flops += _flops(func, args, kwargs, out)
        return out


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    packet = getattr(func, "_overloadpacket", func)
    name = getattr(packet, "__name__", "")
    if name.startswith(_SCALED):
        return _attention_flops(func, args, kwargs)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    return FLOPS_PER_BYTE * float(_bytes_moved(func, name, (args, kwargs), out))


def _attention_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Of fused attention, on whatever device: two products of matrices forward, five backward; half of each where causal.

    torch's own formulas know neither the kernel for the CPU, nor causal masks, nor heads that share keys and values.
    """
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = given["query"], given["key"], given["value"]
    batch_heads, (rows, dim) = query.shape[:-2].numel(), query.shape[-2:]
    columns, width = value.shape[-2:]
    scores = 2 * batch_heads * rows * columns
    assert key.shape[-2] == columns
    # Backward: the scores once more, the gradients of probabilities and values, of queries and keys.
    matmuls = (3 * dim + 2 * width) if "backward" in func._schema.name else dim + width
    return scores * matmuls / (2 if given.get("is_causal") else 1)


def _bytes_moved(func: Any, name: str, given: Any, out: Any) -> int:
    """Bytes that an operator reads and writes; of views and of memory that isn't written none."""
    written = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
    if not written or name.startswith(("empty", "new_empty", "detach", "alias", "lift")) or func.is_view:
        return 0
    read = [t for t in tree_leaves(given) if isinstance(t, Tensor)]
    if not func._schema.is_mutable and all(_storage(w) in set(map(_storage, read)) for w in written):
        return 0  # a view that goes by another name
    result = sum(map(_size, written))
    return 2 * result if name in _LOOKUPS else result + sum(map(_size, read))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _size(tensor: Tensor) -> int:
    """Bytes behind a tensor: of an expanded one those that are there."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


class Tracer(Ruler):
    """Costs in FLOPs. Layers that slice themselves are built whole, without any other rank, and counted by their share."""

    def __init__(self, sample: Sample, context: BuildContext):
        super().__init__(sample, context)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._whole = replace(context, groups=context.groups.unsliced(), sequence_parallel=False)
        loss = sample.loss_fn
        self._loss = (loss.build(self._whole) if isinstance(loss, LayerSpec) else loss) if sample.has_loss else None

    def place(self, tree: Any) -> Any:
        """Fake ones on the device."""

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with self._mode:
                return self._mode.from_tensor(leaf.detach()).to(self.context.device)

        return tree_map(fake, tree)

    def measure(self, layer: Layer, x: Any, labels: Any, is_last: bool) -> tuple[LayerCost, Any]:
        """See Ruler."""
        failures: list[Exception] = []
        for build in self._ways(layer):
            try:
                cost, output = self._trace(layer, build(), x, labels, is_last)
                share = self.context.groups.model.size if self._is_sliced(layer) else 1
                return replace(cost, forward=cost.forward / share, backward=cost.backward / share), output
            except PartitionError:
                raise
            except Exception as error:  # whatever a layer's own code raises
                failures.append(error)
        raise PartitionError(
            f"it can't be traced on fake tensors: {type(failures[-1]).__name__}: {failures[-1]}; let it not look at values of "
            "tensors (.item(), .numpy(), if tensor:), or use partition method 'profile' or 'parameters'"
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
            raise PartitionError(
                f"its arguments can't be copied for a trace: {error}; use partition method 'profile' or 'parameters'"
            ) from error

        def on_meta() -> nn.Module:
            with torch.device("meta"):
                module = spec.build(self._whole)
            with self._mode:
                replace_tensors(module, lambda t: torch.empty_like(t, device=self.context.device))
            return module

        def on_device() -> nn.Module:
            with self._mode, self.context.device:
                return spec.build(self._whole)

        yield on_meta
        yield on_device
        yield lambda: self._faked(layer.build(self._whole))

    def _faked(self, value: Any) -> Any:
        """A copy with fake tensors."""
        with FakeCopyMode(self._mode):
            return copy.deepcopy(value)

    def _copied(self, argument: Any) -> Any:
        """The same of a constructor's argument, or the argument itself where it can't be copied and holds no tensors."""
        try:
            return self._faked(argument)
        except Exception:  # open files, locks and the like, with errors of their own
            if isinstance(argument, (Tensor, nn.Module, list, tuple, dict)):
                raise
            return argument

    def _is_sliced(self, layer: Layer) -> bool:
        if self.context.groups.model.size == 1 or not isinstance(layer, LayerSpec):
            return False
        return any(slicing_of(parameter) is not None for parameter in blueprint(layer, self.context).parameters())

    def _trace(self, layer: Layer, module: Any, x: Any, labels: Any, is_last: bool) -> tuple[LayerCost, Any]:
        with self._mode:
            parameters = made_ready(module, self.context.device, self.sample.precision.weights)
            function = bound(layer, module, self._loss if is_last else None, labels)
            run = Run(function, x, parameters, self.sample.precision.autocasting(self.context.device))
            saved: dict[int, int] = {}
            with _Counter() as counter, _saving(saved):
                run.forward()
            forward = counter.flops
            with counter:
                run.backward()
        for parameter in parameters:
            saved.pop(_storage(parameter), None)
        given = {_storage(t): t.untyped_storage().nbytes() for t in tree_leaves(x) if isinstance(t, Tensor)}
        held, inputs = sum(saved.values()), sum(given.values())
        return LayerCost(forward, counter.flops - forward, held, inputs), run.handed_on()


@contextmanager
def _saving(storages: dict[int, int]) -> Iterator[None]:
    """Note the bytes of each storage that is saved for a backward inside."""

    def pack(tensor: Tensor) -> Tensor:
        storages[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
