"""The gradient sink: adds gradients to their accumulators, at once or deferred, and knows which have arrived.

Autograd brings them by hooks; the layers of split_backward.py bring them as recipes, which the sink can queue.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from parallel3d.autograd.recipes import Recipe, Value
from parallel3d.errors import ExecutionError

# A tensor to add to, or a function that returns one when a gradient arrives.
Accumulator = Tensor | Callable[[], Tensor]


class _Queued(NamedTuple):
    """A queued weight gradient, with the version counters that its tensors had then."""

    parameter: nn.Parameter
    gradient: Recipe
    versions: list[int]


def _versions(gradient: Recipe) -> list[int]:
    return [t._version for t in vars(gradient).values() if isinstance(t, Tensor)]


class _Hooks:
    """A sink's two hooks on a parameter, which run in each micro-batch.

    It refers to neither of them, nor to the parameter's entry: Python's collector can't see a cycle through hooks.
    """

    def __init__(self, sink: GradientSink, parameter: nn.Parameter, entry: _Entry):
        self.sink, self._parameter, self._entry = weakref.ref(sink), weakref.ref(parameter), weakref.ref(entry)
        self._came = False

    def before_accumulation(self, gradient: Tensor | None) -> None:
        """Run once per backward that reaches the parameter. gradient: None if none came through autograd."""
        self._came = gradient is not None
        sink, parameter = self.sink(), self._parameter()
        if sink is None or parameter is None:
            return
        if sink._on_gradient is not None:
            sink._on_gradient(parameter)
        if sink._factor != 1.0 or torch.is_grad_enabled():
            # create_graph=True: autograd would leave a new tensor, the sum of the accumulator and the gradient. And a gradient
            # that is to be multiplied must come alone.
            parameter.grad = None
        if gradient is None:
            sink._complete(parameter)

    def after_accumulation(self, parameter: nn.Parameter) -> None:
        """Run after autograd has written `.grad`; in some versions of PyTorch, also if it had nothing to write."""
        sink, entry = self.sink(), self._entry()
        if self._came and sink is not None and entry is not None:
            sink._take_grad(parameter, entry)


def _hooks(parameter: nn.Parameter) -> list[Callable[..., Any]]:
    before: dict[int, Any] = parameter._backward_hooks or {}
    after: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
    return [*before.values(), *after.values()]


def _num_hooks(parameter: nn.Parameter) -> int:
    return len(parameter._backward_hooks or ()) + len(parameter._post_accumulate_grad_hooks or ())


def _owner(hook: Callable[..., Any]) -> _Hooks | None:
    """Return the _Hooks to which a hook belongs; None for a hook of the user."""
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, _Hooks) else None


@dataclass(eq=False)
class _Entry:
    """Ledger entry of one parameter.

    name: for messages.
    accumulator: where its gradients are added, or a function that returns that tensor when a gradient arrives.
    overwrites: the first gradient overwrites the accumulator, the others are added.
    holds_gradient: the accumulator holds a gradient, so that the next one is added.
    touched: a gradient has arrived since `open`.
    """

    name: str
    accumulator: Accumulator
    overwrites: bool
    handles: Sequence[RemovableHandle] = ()
    holds_gradient: bool = False
    touched: bool = False


class GradientSink:
    """Adds gradients to accumulators and keeps the ledger of which gradients have arrived.

    Gradients come from autograd by a hook, once per backward however often the parameter was used; from layers that
    `make_splittable` has changed, inside `deferring` or `fusing`, they come as recipes. Gradients of a parameter with a user's
    hook are neither deferred nor fused, so that the hook sees them in the backward.

    on_complete: called with a group given to `expecting` when all of its gradients have arrived.
    on_value: called with each gradient that autograd brings, and with each accumulator to which a layer has added.
    on_gradient: called with the parameter before autograd writes its gradient.
    is_deferring: whether a backward runs inside `deferring`.
    """

    def __init__(
        self,
        on_complete: Callable[[Any], None] | None = None,
        on_value: Callable[[nn.Parameter, Tensor], None] | None = None,
        on_gradient: Callable[[nn.Parameter], None] | None = None,
    ) -> None:
        self._on_complete, self._on_value, self._on_gradient = on_complete, on_value, on_gradient
        self._ledger: dict[nn.Parameter, _Entry] = {}
        # The groups to report, in order, each with the parameters whose gradients are still to come...
        self._missing: dict[Any, set[nn.Parameter]] = {}
        # ...and the group of each of their parameters.
        self._group_of: dict[nn.Parameter, Any] = {}
        self._queues: dict[Hashable, deque[_Queued]] = {}
        self.is_deferring = False
        # The current backward calls this with a weight gradient, instead of returning it to autograd.
        self._take: Callable[[nn.Parameter, Recipe], None] | None = None
        self._factor = 1.0  # of the gradients of the current backward
        self._lost: list[str] = []  # parameters that are another sink's now

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle a sink as a new one without parameters: it must not take gradients of a copied layer."""
        return GradientSink, ()

    def attach(
        self, parameter: nn.Parameter, accumulator: Accumulator, overwrites: bool = False, name: str | None = None
    ) -> None:
        """Add the gradients of `parameter` (it must require them) to `accumulator` from the next `open` on.

        accumulator: [*parameter.shape] in any floating dtype on its device; or a function, called whenever a gradient
            arrives, that returns such a tensor.
        overwrites: the first gradient after `open`, or after `collect`, overwrites what is in the accumulator, which
            saves a pass over memory to clear it. Not for a tensor of the parameter's dtype: autograd itself adds there.
        name: names the parameter in error messages, instead of its shape.

        Attaching again replaces the accumulator; a parameter that was another sink's leaves that one.
        """
        named = name or f"of shape {list(parameter.shape)}"
        for owner in {_owner(hook) for hook in _hooks(parameter)}:
            sink = owner.sink() if owner is not None else None
            if sink is not None:
                sink.detach(parameter)
                sink._lost += [named] if sink is not self else []
        entry = self._ledger[parameter] = _Entry(named, accumulator, overwrites)
        hooks = _Hooks(self, parameter, entry)
        entry.handles = [
            parameter.register_hook(hooks.before_accumulation),
            parameter.register_post_accumulate_grad_hook(hooks.after_accumulation),
        ]

    def detach(self, parameter: nn.Parameter) -> None:
        """Leave the gradients of `parameter` to autograd again."""
        for handle in self._ledger.pop(parameter).handles:
            handle.remove()
        parameter.grad = None

    def open(self) -> None:
        """Start a batch: nothing has arrived, nothing is queued, and autograd adds in place where it can.

        If the accumulator is a tensor of the parameter's dtype, it becomes `.grad`, because a user's
        `zero_grad(set_to_none=True)` may have dropped it. Any other `.grad` is None outside of a backward.

        Raises ExecutionError if another sink has taken a parameter since.
        """
        if self._lost:
            raise ExecutionError(
                f"{len(self._lost)} parameters of this engine, such as {self._lost[0]}, are another one's that was made later; "
                "have one engine train a module that contains all that shares them"
            )
        self._queues.clear()
        for parameter, entry in self._ledger.items():
            entry.touched = entry.holds_gradient = False
            accumulator = entry.accumulator
            if isinstance(accumulator, Tensor) and accumulator.dtype == parameter.dtype:
                parameter.grad = accumulator
            else:
                parameter.grad = None

    def replayed(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that the replay of a CUDA graph has added to these parameters' accumulators."""
        for entry in map(self._ledger.__getitem__, parameters):
            entry.touched = entry.holds_gradient = True

    def touched(self) -> set[nn.Parameter]:
        """Return the parameters to whose accumulators anything was added since `open`."""
        return {parameter for parameter, entry in self._ledger.items() if entry.touched}

    def collect(self, parameters: Sequence[nn.Parameter], keep: bool) -> set[int]:
        """Return which of these parameters' accumulators hold a gradient, by index; the others' contents are undefined.

        keep: True to add later gradients to all accumulators, after the caller has cleared the undefined ones; False to
        overwrite them.
        """
        entries = [self._ledger[parameter] for parameter in parameters]
        held = {k for k, entry in enumerate(entries) if entry.holds_gradient}
        for entry in entries:
            entry.holds_gradient = keep
        return held

    @contextmanager
    def expecting(self, groups: Mapping[Any, Sequence[nn.Parameter]], place: Hashable = None) -> Iterator[None]:
        """Report these groups in order, each as soon as the backward run inside has brought all of its gradients.

        Groups that still miss one at the end (the graph did not reach the parameter) are reported then.

        groups: what `on_complete` is called with -> its parameters.
        place: wait for no more than the gradients queued there; by default for those of all parameters.

        Raises ExecutionError if a parameter gets another gradient after its group was reported.
        """
        queued = None if place is None else self.pending(place)
        for group, parameters in groups.items():
            self._missing[group] = set(parameters) if queued is None else queued.intersection(parameters)
            self._group_of.update(dict.fromkeys(parameters, group))
        try:
            self._report()
            yield
            for missing in self._missing.values():
                missing.clear()
            self._report()
        finally:
            self._missing.clear()
            self._group_of.clear()

    def _report(self) -> None:
        """Report the first groups as long as nothing is missing in them."""
        while self._missing:
            group = next(iter(self._missing))
            if self._missing[group]:
                return
            del self._missing[group]
            if self._on_complete is not None:
                self._on_complete(group)

    def _complete(self, parameter: nn.Parameter) -> None:
        """Note that the current backward has brought the whole gradient of a parameter, or found that there is none."""
        group = self._group_of.get(parameter) if self._group_of else None
        if group is None:
            return
        missing = self._missing.get(group)
        if missing is None:
            # Each backward inside the backward, as of a reentrant checkpoint, completes the parameter's gradient once more.
            raise ExecutionError(
                f"parameter {self._ledger[parameter].name} got another gradient after the reduction of its gradient had "
                "started: it is used in several regions with a backward of their own; checkpoint them with "
                "use_reentrant=False, as parallel3d.checkpointing.checkpoint does"
            )
        missing.discard(parameter)
        if not missing:
            self._report()

    def add(self, parameter: nn.Parameter, gradient: Recipe) -> None:
        """accumulator += gradient, or accumulator = gradient where it is overwritten, in the accumulator's dtype."""
        accumulator = self._accumulate(self._ledger[parameter], gradient)
        if self._on_value is not None:
            self._on_value(parameter, accumulator)

    def _accumulate(self, entry: _Entry, gradient: Recipe) -> Tensor:
        accumulator = entry.accumulator if isinstance(entry.accumulator, Tensor) else entry.accumulator()
        gradient.put(accumulator, entry.holds_gradient or not entry.overwrites, self._factor)
        entry.touched = entry.holds_gradient = True
        return accumulator

    def foreign_grads(self) -> dict[nn.Parameter, Tensor]:
        """Return the `.grad` of each parameter that a script has put there: no accumulator, and left by no backward."""
        held = ((parameter, entry, parameter.grad) for parameter, entry in self._ledger.items())
        return {
            parameter: grad for parameter, entry, grad in held if grad is not None and grad is not entry.accumulator
        }

    def _take_grad(self, parameter: nn.Parameter, entry: _Entry) -> None:
        """Add what autograd has left in the `.grad` of a parameter, unless that is the accumulator itself."""
        gradient = parameter.grad
        entry.touched = True
        if gradient is not None:
            if self._on_value is not None:
                self._on_value(parameter, gradient)
            if gradient is not entry.accumulator:
                parameter.grad = None
                self._accumulate(entry, Value(gradient.detach()))
        self._complete(parameter)

    def deferring(self, place: Hashable) -> AbstractContextManager[None]:
        """Return the context of a BACKWARD_INPUT, in which splittable layers queue their weight gradients under `place`.

        The queue is in backward order. An item keeps the layer's input and the gradient of its output, nothing else.
        """
        assert not self._missing, "a BACKWARD_INPUT completes no gradient"
        queue = self._queues.setdefault(place, deque())
        return self._taking(lambda parameter, gradient: queue.append(_Queued(parameter, gradient, _versions(gradient))))

    def fusing(self) -> AbstractContextManager[None]:
        """Return the context of a BACKWARD, in which splittable layers add their weight gradients directly to the accumulators.

        That saves autograd's copy and addition. Half operands into fp32 are multiplied and added in fp32 on CUDA;
        elsewhere the product is rounded to half first, as autograd does.
        """
        return self._taking(self.add)

    @contextmanager
    def scaling(self, factor: float) -> Iterator[None]:
        """Multiply the gradients of a backward inside by `factor`."""
        self._factor = factor
        try:
            yield
        finally:
            self._factor = 1.0

    @contextmanager
    def _taking(self, take: Callable[[nn.Parameter, Recipe], None]) -> Iterator[None]:
        assert self._take is None, "deferring and fusing don't nest"
        self._take, self.is_deferring = take, take != self.add
        try:
            yield
        finally:
            self._take, self.is_deferring = None, False

    def pending(self, place: Hashable) -> set[nn.Parameter]:
        """Return the parameters that have gradients queued under `place`."""
        return {item.parameter for item in self._queues.get(place, ())}

    @torch.no_grad()
    def run_deferred(self, place: Hashable) -> None:
        """Run a BACKWARD_WEIGHT: compute the gradients queued under `place` in order, and free the tensors of each.

        A parameter is complete after its last item. Runs on the current stream, which must be that of the forward.
        Raises ExecutionError if a tensor was modified in place since it was queued.
        """
        queue = self._queues.pop(place, deque())
        left = Counter(item.parameter for item in queue)
        while queue:
            parameter = self._run(place, *queue.popleft())
            left[parameter] -= 1
            if not left[parameter]:
                self._complete(parameter)

    def _run(self, place: Hashable, parameter: nn.Parameter, gradient: Recipe, versions: list[int]) -> nn.Parameter:
        if versions != _versions(gradient):  # autograd's rule for what it saves
            raise ExecutionError(
                f"an input or output gradient of a layer with weight {list(parameter.shape)} was modified in place "
                f"between BACKWARD_INPUT and BACKWARD_WEIGHT of {place}; use an operation that makes a new tensor"
            )
        self.add(parameter, gradient)
        return parameter

    def __contains__(self, parameter: Tensor) -> bool:
        """Return whether gradients of `parameter` come here."""
        return parameter in self._ledger

    def route(self, parameter: nn.Parameter | None, edge: Any, gradient: Recipe) -> Tensor | None:
        """Take the gradient of a layer's parameter in its backward, or return its value if autograd has to handle it.

        edge: (node, index) from the layer's backward to the parameter's.
        """
        if (
            self._take is None
            or torch.is_grad_enabled()  # create_graph=True: a gradient to differentiate
            or parameter not in self._ledger
            or _num_hooks(parameter) > 2  # there are hooks of the user's besides the sink's
            or not accumulates(edge[0])
        ):
            return gradient.value()
        self._take(parameter, gradient)
        return None


def accumulates(node: Any) -> bool:
    """Return whether the current backward writes the `.grad` of this node's leaf: torch.autograd.grad does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad with respect to this very leaf
        return False
