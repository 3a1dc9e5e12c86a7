"""The gradient sink: the one way by which gradients reach their accumulators, at once or deferred.

From autograd they come by hooks; from the layers of split_backward.py as recipes, which the sink can queue.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parallel3d.errors import ExecutionError
from parallel3d.fake_device import on_cuda

# A tensor to add to, or a function that returns one and whether it holds anything yet: else it is to be overwritten.
Accumulator = Tensor | Callable[[], tuple[Tensor, bool]]
Listener = Callable[[nn.Parameter], None]

# torch.mm and addmm(..., out_dtype=): half operands, the product rounded once, into fp32. CUDA only.
_HAS_MIXED_MM = all("dtype_out" in op.overloads() for op in (torch.ops.aten.mm, torch.ops.aten.addmm))


class Product(NamedTuple):
    """left^T @ right: of a linear's weight. left: [n, out], right: [n, in]."""

    left: Tensor
    right: Tensor

    def value(self) -> Tensor:
        """As autograd has it, differentiable."""
        return self.left.t().mm(self.right)

    def add_to(self, accumulator: Tensor) -> None:
        """accumulator += value, in one GEMM if it can."""
        left, right = self.left.t(), self.right
        if left.dtype == right.dtype == accumulator.dtype:
            accumulator.addmm_(left, right)
        elif _multiplies_into(accumulator, left, right):
            torch.addmm(accumulator, left, right, out_dtype=torch.float32, out=accumulator)
        else:
            accumulator.add_(left.mm(right))

    def write_to(self, accumulator: Tensor) -> None:
        """accumulator = value, without a pass over what it held."""
        left, right = self.left.t(), self.right
        if left.dtype == right.dtype == accumulator.dtype:
            torch.mm(left, right, out=accumulator)
        elif _multiplies_into(accumulator, left, right):
            torch.mm(left, right, out_dtype=torch.float32, out=accumulator)
        else:
            accumulator.copy_(left.mm(right))


class RowSum(NamedTuple):
    """The sum over rows: of a bias. rows: [n, out]."""

    rows: Tensor

    def value(self) -> Tensor:
        """As autograd has it, differentiable."""
        return self.rows.sum(0)

    def add_to(self, accumulator: Tensor) -> None:
        """accumulator += value, summed in the wider dtype."""
        accumulator.add_(self._sum(accumulator.dtype))

    def write_to(self, accumulator: Tensor) -> None:
        """accumulator = value, summed in the wider dtype."""
        accumulator.copy_(self._sum(accumulator.dtype))

    def _sum(self, dtype: torch.dtype) -> Tensor:
        return self.rows.sum(0, dtype=torch.promote_types(self.rows.dtype, dtype))


class Scatter(NamedTuple):
    """Each row added at its index: of an embedding's weight. rows: [*indices.shape, dim]."""

    rows: Tensor
    indices: Tensor
    num_embeddings: int
    padding_idx: int

    def value(self) -> Tensor:
        """As autograd has it, differentiable."""
        embedding_dense_backward = torch.ops.aten.embedding_dense_backward
        return embedding_dense_backward(self.rows, self.indices, self.num_embeddings, self.padding_idx, False)

    def add_to(self, accumulator: Tensor) -> None:
        """accumulator += value."""
        # Not by index_add_, a fifth of the time on CUDA: its atomics make the sum depend on the run.
        accumulator.add_(self.value())

    def write_to(self, accumulator: Tensor) -> None:
        """accumulator = value."""
        accumulator.copy_(self.value())


# A gradient not computed yet.
Recipe = Product | RowSum | Scatter


def _multiplies_into(accumulator: Tensor, left: Tensor, right: Tensor) -> bool:
    half = left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16)
    return _HAS_MIXED_MM and half and on_cuda(accumulator) and accumulator.dtype == torch.float32


@dataclass(frozen=True)
class _Queued:
    """One weight gradient in a queue, and the versions that its tensors had then."""

    parameter: nn.Parameter
    gradient: Recipe
    versions: tuple[int, ...]

    def check(self, place: Hashable) -> None:
        """Raise ExecutionError if a tensor was modified since: autograd's rule for what it saves."""
        if self.versions != _versions(self.gradient):
            raise ExecutionError(
                f"an input or output gradient of a layer with weight {list(self.parameter.shape)} was modified in place "
                f"between BACKWARD_INPUT and BACKWARD_WEIGHT of {place}; use an operation that makes a new tensor"
            )


def _versions(gradient: Recipe) -> tuple[int, ...]:
    return tuple(t._version for t in gradient if isinstance(t, Tensor))


class _Hooks:
    """A sink's two hooks on a parameter. It holds neither: python's collector can't see a cycle through tensor hooks."""

    def __init__(self, sink: GradientSink, parameter: nn.Parameter):
        self.sink = weakref.ref(sink)
        self._parameter = weakref.ref(parameter)
        self._came = False

    def before_accumulation(self, gradient: Tensor | None) -> None:
        """Runs once per backward that reaches the parameter, with None if no gradient came through autograd."""
        self._came = gradient is not None
        sink, parameter = self.sink(), self._parameter()
        if torch.is_grad_enabled() and parameter is not None:
            # create_graph=True: autograd would leave a new tensor, the sum of the accumulator and the gradient.
            parameter.grad = None
        if not self._came and sink is not None and parameter is not None:
            sink._completed(parameter)

    def after_accumulation(self, parameter: Tensor) -> None:
        """Runs after autograd has written `.grad`; in some versions of PyTorch, also where it had nothing to write."""
        sink = self.sink()
        if self._came and sink is not None:
            assert isinstance(parameter, nn.Parameter)
            sink._accumulated(parameter)


def _hooks(parameter: nn.Parameter) -> list[Callable[..., Any]]:
    before: dict[int, Any] = parameter._backward_hooks or {}
    after: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return [*before.values(), *after.values()]


def _owner(hook: Callable[..., Any]) -> _Hooks | None:
    """None for a hook of the user's."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, _Hooks) else None


class GradientSink:
    """Adds gradients to slices of flat buffers, and says when a parameter has its gradient of a backward.

    From autograd they come by a hook, once per backward however often the parameter was used; from layers that
    `make_splittable` has changed, inside `deferring` or `fusing`, they come as products. A parameter with a hook of the
    user's is neither deferred nor fused: that hook sees its gradient in the backward. look: called with each gradient that
    autograd brings, and with each accumulator to which a layer has added. is_deferring: inside `deferring`.
    """

    def __init__(self) -> None:
        self.look: Callable[[nn.Parameter, Tensor], None] | None = None
        self._listener: Listener | None = None
        self._accumulators: dict[nn.Parameter, Accumulator] = {}
        self._handles: dict[nn.Parameter, list[RemovableHandle]] = {}
        self._touched: set[nn.Parameter] = set()
        self._queues: dict[Hashable, deque[_Queued]] = {}
        self.is_deferring = False
        # What the backward under way does with a weight gradient, instead of returning it to autograd...
        self._take: Callable[[nn.Parameter, Recipe], None] | None = None
        # ...and the parameters that it leaves incomplete.
        self._deferred: set[nn.Parameter] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or pickle of a sink is a new one: it takes no parameter, least of all that of a copied layer."""
        return GradientSink, ()

    def attach(self, parameter: nn.Parameter, accumulator: Accumulator) -> None:
        """Gradients of `parameter` (it must require them) are added to `accumulator` from the next `open` on.

        accumulator: [*parameter.shape] in any floating dtype on its device; or a function, called whenever a gradient
        arrives, that returns one and whether to add to it (True) or to overwrite it. Attaching again replaces it; a
        parameter that was another sink's leaves that one.
        """
        for owner in {_owner(hook) for hook in _hooks(parameter)}:
            sink = owner.sink() if owner is not None else None
            if sink is not None:
                sink.detach(parameter)
        hooks = _Hooks(self, parameter)
        self._accumulators[parameter] = accumulator
        self._handles[parameter] = [
            parameter.register_hook(hooks.before_accumulation),
            parameter.register_post_accumulate_grad_hook(hooks.after_accumulation),
        ]

    def detach(self, parameter: nn.Parameter) -> None:
        """Leave the gradients of `parameter` to autograd again."""
        del self._accumulators[parameter]
        for handle in self._handles.pop(parameter):
            handle.remove()
        parameter.grad = None

    def open(self) -> None:
        """Start a batch: nothing touched, nothing queued, and autograd adds in place where it can.

        That is where the accumulator is a tensor of the parameter's dtype: `.grad` is it. (A user's
        `zero_grad(set_to_none=True)` may have dropped it.) Any other `.grad` is None outside of a backward.
        """
        self._touched.clear()
        self._queues.clear()
        for parameter, accumulator in self._accumulators.items():
            parameter.grad = None
            if isinstance(accumulator, Tensor) and accumulator.dtype == parameter.dtype:
                parameter.grad = accumulator

    def listen(self, listener: Listener | None) -> None:
        """Call `listener` with each parameter that a backward or `run_deferred` has completed; None to stop.

        Inside `deferring`, a parameter with anything queued is not complete: `run_deferred` says so, once. A parameter
        that the graph reached without giving it a gradient is complete too; one that it did not reach is not heard of.
        """
        self._listener = listener

    def touched(self) -> set[nn.Parameter]:
        """The parameters to whose accumulators anything was added since `open`."""
        return set(self._touched)

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """accumulator += gradient, in the accumulator's dtype. gradient: [*parameter.shape]."""
        self._touched.add(parameter)
        accumulator, adds = self._accumulator(parameter)
        if adds:
            accumulator.add_(gradient)
        else:
            accumulator.copy_(gradient.to_dense())

    def add_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """accumulator += left^T @ right, in one GEMM if it can. left: [n, out], right: [n, in].

        Half operands into fp32 are multiplied and added in fp32 on CUDA; elsewhere the product is rounded to half first,
        as autograd does.
        """
        self._add(parameter, Product(left, right))

    def _add(self, parameter: nn.Parameter, gradient: Recipe) -> None:
        self._touched.add(parameter)
        accumulator, adds = self._accumulator(parameter)
        if adds:
            gradient.add_to(accumulator)
        else:
            gradient.write_to(accumulator)
        if self.look is not None:
            self.look(parameter, accumulator)

    def _accumulator(self, parameter: nn.Parameter) -> tuple[Tensor, bool]:
        accumulator = self._accumulators[parameter]
        return (accumulator, True) if isinstance(accumulator, Tensor) else accumulator()

    @contextmanager
    def deferring(self, place: Hashable) -> Iterator[None]:
        """For a BACKWARD_INPUT: splittable layers queue their weight gradients under `place`, in backward order.

        A queued item keeps the layer's input and the gradient of its output, nothing else.
        """
        queue = self._queues.setdefault(place, deque())
        self._deferred = {item.parameter for item in queue}
        self.is_deferring = True

        def enqueue(parameter: nn.Parameter, gradient: Recipe) -> None:
            self._deferred.add(parameter)
            queue.append(_Queued(parameter, gradient, _versions(gradient)))

        try:
            with self._taking(enqueue):
                yield
        finally:
            self.is_deferring = False

    @contextmanager
    def fusing(self) -> Iterator[None]:
        """For a BACKWARD: splittable layers add their weight gradients to the accumulators at once, past autograd.

        That saves autograd's copy and addition; a product of halves is not rounded to half on its way (`add_product`).
        """
        with self._taking(self._add):
            yield

    @contextmanager
    def _taking(self, take: Callable[[nn.Parameter, Recipe], None]) -> Iterator[None]:
        assert self._take is None, "deferring and fusing don't nest"
        self._take = take
        try:
            yield
        finally:
            self._take = None
            self._deferred = set()

    def pending(self, place: Hashable) -> set[nn.Parameter]:
        """The parameters that have gradients queued under `place`."""
        return {item.parameter for item in self._queues.get(place, ())}

    @torch.no_grad()
    def run_deferred(self, place: Hashable) -> None:
        """BACKWARD_WEIGHT: run what is queued under `place` in order, and free the tensors of each item after it.

        The listener hears of a parameter after its last item. Runs on the current stream, which must be that of the
        forward. Raises ExecutionError if a tensor was modified in place since it was queued.
        """
        queue = self._queues.pop(place, deque())
        left = Counter(item.parameter for item in queue)
        while queue:
            parameter = self._run(place, queue.popleft())
            left[parameter] -= 1
            if not left[parameter]:
                self._completed(parameter)

    def _run(self, place: Hashable, item: _Queued) -> nn.Parameter:
        item.check(place)
        self._add(item.parameter, item.gradient)
        return item.parameter

    def takes(self, parameter: Tensor) -> bool:
        """Whether gradients of `parameter` come here."""
        return parameter in self._accumulators

    def route(self, parameter: nn.Parameter | None, edge: Any, gradient: Recipe) -> Tensor | None:
        """In a layer's backward: the value of the gradient of its parameter if autograd has to handle it, else None.

        edge: (node, index) from the layer's backward to the parameter's.
        """
        if (
            self._take is None
            or torch.is_grad_enabled()  # create_graph=True: a gradient to differentiate
            or parameter not in self._accumulators
            or any(_owner(hook) is None for hook in _hooks(parameter))
            or not _accumulates(edge[0])
        ):
            return gradient.value()
        self._take(parameter, gradient)
        return None

    def _accumulated(self, parameter: nn.Parameter) -> None:
        """The gradient that autograd had for `parameter` is in its `.grad`."""
        gradient = parameter.grad
        self._touched.add(parameter)
        if gradient is not None and self.look is not None:
            self.look(parameter, gradient)
        if gradient is not None and gradient is not self._accumulators[parameter]:
            parameter.grad = None
            self.add(parameter, gradient.detach())
        self._completed(parameter)

    def _completed(self, parameter: nn.Parameter) -> None:
        if self._listener is not None and parameter not in self._deferred:
            self._listener(parameter)


def _accumulates(node: Any) -> bool:
    """Whether the backward under way writes the `.grad` of the leaf behind this node: not in torch.autograd.grad."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad with respect to this very leaf
        return False
