"""One layer, traced on fake tensors as the executor runs it: what it asks of the device, and what it holds.

A layer is traced between two others that keep nothing: what enters has a graph behind it, what leaves is let go at once, so
that the bytes counted are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from parallel3d.autograd.entry import Entry
from parallel3d.autograd.sink import GradientSink
from parallel3d.costs.counting import storage_of
from parallel3d.costs.watch import Memory, Watch
from parallel3d.costs.work import Work
from parallel3d.optim.precision import Precision

_HOST = torch.device("cpu")


class Boundary(NamedTuple):
    """A tensor between two layers: bytes as a message, bytes of its memory, and whether a gradient comes back.

    source: the place among the layer's inputs of the one in whose memory it is, None of one that it made.
    """

    nbytes: int
    storage: int
    source: int | None
    requires_grad: bool


@dataclass(frozen=True)
class Held:
    """Some of a layer's tensors in memory: bytes of its own, and the places of inputs, outputs and of gradients of both."""

    own: int = 0
    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    output_gradients: frozenset[int] = frozenset()
    input_gradients: frozenset[int] = frozenset()


@dataclass(frozen=True)
class LayerBytes:
    """What a layer holds of one micro-batch, traced with whole backwards or with split ones.

    saved: from the forward to the backward; deferred: from a BACKWARD_INPUT to its BACKWARD_WEIGHT, of inputs' gradients what
    is needed beside their way back. forward_peak: the most at any time in the forward, beyond the inputs; backward_peak: in
    BACKWARD, or BACKWARD_INPUT, beyond the inputs and what the layers before it hold, saved and the gradient of the outputs
    included; sole_peak: the same with the inputs that it keeps, where nothing else does, for as long as it does;
    weight_peak: in BACKWARD_WEIGHT, beyond what is deferred.
    """

    saved: Held
    deferred: Held
    forward_peak: int
    backward_peak: int
    sole_peak: int
    weight_peak: int


@dataclass(frozen=True)
class Traced:
    """One trace: work of the forward, of the backward (all of it, or the inputs' part) and of the weights' deferred part.

    tables: bytes that the layer made for all micro-batches to come, which count in nothing else; early: the places of the
    parameters whose gradients come with the backward even where it is split.
    """

    inputs: tuple[int, ...]
    outputs: tuple[Boundary, ...]
    forward: Work
    backward: Work
    weight: Work
    held: LayerBytes
    tables: int
    early: frozenset[int]


@dataclass
class Template:
    """A pytree of tensors to make anew: those of dataclasses among its leaves too, as of sliced logits."""

    leaves: list[Any]
    tree: TreeSpec
    opened: dict[int, tuple[Any, list[str]]]

    @classmethod
    def of(cls, value: Any) -> Template:
        """Of an output, or of a sample's inputs."""
        leaves, tree = tree_flatten(value)
        opened: dict[int, tuple[Any, list[str]]] = {}
        for k, leaf in enumerate(leaves):
            if is_dataclass(leaf) and not isinstance(leaf, type):
                names = [f.name for f in fields(leaf) if isinstance(getattr(leaf, f.name), Tensor)]
                opened[k] = (leaf, names)
                leaves[k] = [getattr(leaf, name) for name in names]
        return cls(leaves, tree, opened)

    @property
    def tensors(self) -> list[Tensor]:
        """In order."""
        flat = [t for leaf in self.leaves for t in (leaf if isinstance(leaf, list) else [leaf])]
        return [t for t in flat if isinstance(t, Tensor)]

    def with_tensors(self, tensors: Sequence[Tensor]) -> Template:
        """The same with others in their places."""
        rest = iter(tensors)

        def renewed(leaf: Any) -> Any:
            if isinstance(leaf, list):
                return [next(rest) for _ in leaf]
            return next(rest) if isinstance(leaf, Tensor) else leaf

        opened = {
            k: (replace(leaf, **dict.fromkeys(names)), names) if names else (leaf, names)
            for k, (leaf, names) in self.opened.items()
        }
        return Template([renewed(leaf) for leaf in self.leaves], self.tree, opened)

    def value(self) -> Any:
        """The pytree."""
        leaves = list(self.leaves)
        for k, (leaf, names) in self.opened.items():
            leaves[k] = replace(leaf, **dict(zip(names, self.leaves[k], strict=True)))
        return tree_unflatten(leaves, self.tree)

    def anew(self) -> Template:
        """With new tensors, of the same shapes and strides, which need no gradients."""
        return self.with_tensors([torch.empty_like(t.detach()) for t in self.tensors])

    def wanting_like(self, other: Template) -> Template:
        """These tensors, which need gradients where the other's do."""
        for tensor, its in zip(self.tensors, other.tensors, strict=True):
            tensor.requires_grad_(its.requires_grad)
        return self

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others to a layer."""
        of_tensors = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in self.tensors)
        return self.tree, of_tensors


class _Follow(torch.autograd.Function):
    """The layer behind: keeps nothing of what it is given, and makes gradients for it, whose memory is noted in `made`."""

    @staticmethod
    def forward(ctx: Any, made: list[Memory], *given: Tensor) -> Tensor:
        ctx.made, ctx.kinds = made, [(t.shape, t.dtype, t.device) for t in given]
        return given[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds]
        ctx.made += [Memory(gradient) for gradient in gradients]
        return None, *gradients


def _held(memories: Sequence[Memory]) -> frozenset[int]:
    """Which of these something keeps."""
    return frozenset(k for k, memory in enumerate(memories) if memory.is_held)


class LayerTrace:
    """Traces a layer, with its weights as they are trained.

    function: runs it; parameters: those to train, whose gradients `sink` takes; watch: counts, the collectives too;
    accumulators: that the sink's gradients are added to.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        parameters: Sequence[nn.Parameter],
        sink: GradientSink,
        precision: Precision,
        watch: Watch,
        accumulators: Sequence[Tensor] = (),
    ):
        self._function, self._parameters, self._sink = function, list(parameters), sink
        self._weights = frozenset(map(storage_of, (*parameters, *accumulators)))
        self._precision, self._watch = precision, watch

    def run(self, inputs: Template, splits: bool) -> tuple[Traced, Template]:
        """One forward and one backward, split in two if `splits`; also what the layer returns, to be made anew."""
        one = _Pass(self._watch)
        self._watch.weights = self._weights
        self._sink.open()
        with torch.enable_grad():
            returned = one.forward(inputs, self._call)
            one.backward(self._sink.deferring(one) if splits else self._whole())
            touched = self._sink.touched()
            one.weights(lambda: self._sink.run_deferred(one))
        early = frozenset(k for k, parameter in enumerate(self._parameters) if parameter in touched)
        return one.traced(early), returned

    def _call(self, x: Any) -> Any:
        with self._precision.autocasting(_HOST):
            return self._function(x)

    def _whole(self) -> AbstractContextManager[None]:
        """As GradientReducer.backward."""
        return self._sink.fusing() if self._precision.weights else nullcontext()


class _Pass:
    """One micro-batch's way through a layer and back."""

    def __init__(self, watch: Watch):
        self._watch, self._base = watch, watch.nbytes
        self._inputs: list[Memory] = []
        self._outputs: list[Memory] = []
        self._coming: list[Memory] = []  # gradients of the outputs
        self._leaving: list[Memory] = []  # those of the inputs
        self._entry: Entry | None = None
        self._root: Tensor | None = None
        self._boundaries: list[Boundary] = []
        self._works: list[Work] = []
        self._peaks: list[int] = []

    @contextmanager
    def _watching(self, base: int) -> Iterator[None]:
        """Count what runs inside, and its peak beyond `base`."""
        self._watch.peak = self._watch.nbytes
        with self._watch:
            yield
        self._works.append(self._watch.take())
        self._peaks.append(self._watch.peak - base)

    def forward(self, inputs: Template, run: Callable[[Any], Any]) -> Template:
        """All that runs forward; nothing but the graph is left of it."""
        given = inputs.anew()
        self._inputs = [Memory(t) for t in given.tensors]
        pairs = zip(given.tensors, inputs.tensors, strict=True)
        wanting = [t for t, template in pairs if template.requires_grad]
        self._entry = Entry(wanting) if wanting else None
        x = given.value()
        del given, wanting, pairs
        with self._watching(self._base):
            output = Template.of(run(x))
        del x
        returned = output.anew().wanting_like(output)
        self._leave(output.tensors)
        del output
        self._watch.make_anew(self._outputs)
        self._saved = self._what_is_held()
        return returned

    def _leave(self, tensors: Sequence[Tensor]) -> None:
        entered = {memory.key: k for k, memory in enumerate(self._inputs)}
        for tensor in tensors:
            memory = Memory(tensor)
            source = entered.get(memory.key)
            storage = 0 if memory.key in {m.key for m in self._outputs} else memory.nbytes
            self._outputs.append(memory)
            self._boundaries.append(Boundary(tensor.nbytes, storage, source, tensor.requires_grad))
        outgoing = [t for t in tensors if t.requires_grad]
        self._root = _Follow.apply(self._coming, *outgoing) if outgoing else None

    def backward(self, how: AbstractContextManager[None]) -> None:
        """From gradients of the outputs to those of the inputs."""
        self._watch.count_with_others(self._inputs)
        with self._watching(self._base), how:
            if self._root is not None:
                self._root.backward(torch.empty_like(self._root))
        self._sole_peak = self._watch.peak_with_others - self._base
        self._root = None
        gradients = self._entry.gradients() if self._entry is not None else []
        self._leaving = [Memory(gradient) for gradient in gradients]
        self._entry = None
        del gradients
        self._deferred = self._what_is_held()

    def weights(self, run: Callable[[], None]) -> None:
        """What was deferred."""
        before = self._watch.nbytes
        with self._watching(before):
            run()

    def _what_is_held(self) -> Held:
        outputs, coming, leaving = (_held(m) for m in (self._outputs, self._coming, self._leaving))
        own = self._watch.nbytes - self._base
        made = {self._outputs[k].key: self._outputs[k].nbytes for k in outputs if self._boundaries[k].source is None}
        made |= {self._coming[k].key: self._coming[k].nbytes for k in coming}
        made |= {self._leaving[k].key: self._leaving[k].nbytes for k in leaving}
        return Held(own - sum(made.values()), _held(self._inputs), outputs, coming, leaving)

    def traced(self, early: frozenset[int]) -> Traced:
        """What was found."""
        lasting = self._watch.nbytes - self._base
        saved, deferred = (replace(held, own=held.own - lasting) for held in (self._saved, self._deferred))
        forward, backward, weight = self._works
        forward_peak, backward_peak, weight_peak = self._peaks
        backward_peaks = backward_peak - lasting, self._sole_peak - lasting
        held = LayerBytes(saved, deferred, forward_peak - lasting, *backward_peaks, weight_peak)
        return Traced(
            tuple(memory.nbytes for memory in self._inputs),
            tuple(self._boundaries),
            forward,
            backward,
            weight,
            held,
            lasting,
            early,
        )
