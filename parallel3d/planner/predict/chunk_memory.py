"""What a chunk holds of one micro-batch, put together from its layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.tracing import LayerBytes
from parallel3d.schedule.memory import ChunkBytes


@dataclass(frozen=True)
class Entering:
    """What comes into a chunk: bytes of each tensor of its inputs, and of the labels on the last chunk.

    gradients: bytes of each input's gradient, 0 where none is wanted; how the inputs come: as a message, by the loader, or from
    a chunk of the same rank, which holds them.
    """

    inputs: tuple[int, ...]
    gradients: tuple[int, ...]
    labels: tuple[int, ...] = ()
    how: Literal["message", "loaded", "local"] = "message"


@dataclass(frozen=True)
class ChunkMemory:
    """One micro-batch on one chunk. held: between instructions.

    While one runs: forward: the most beyond what was held before; backward: the most of this micro-batch in BACKWARD or
    BACKWARD_INPUT; weight: in BACKWARD_WEIGHT, beyond what was held before. kept_input: bytes of an input from a chunk of the
    same rank that deferred gradients keep.
    """

    held: ChunkBytes
    forward: int
    backward: int
    weight: int
    kept_input: int


def chunk_memory(layers: Sequence[LayerProfile], entering: Entering, splits: bool, interval: int) -> ChunkMemory:
    """Of a chunk of these layers, as PipelineModule.forward_chunk and Executor run them.

    splits: whether weight gradients are deferred; interval: layers recomputed together, 0 for none.
    """
    tensors = _Tensors()
    counted = [0 if entering.how == "local" else nbytes for nbytes in entering.inputs]
    inputs = [tensors.add(*pair) for pair in zip(counted, entering.gradients, strict=True)]
    labels = [tensors.add(nbytes) for nbytes in entering.labels]
    steps = _chain(layers, inputs, labels, tensors, splits)
    regions = _regions(layers, steps, interval)
    walk = _Walk(tensors, regions, steps[-1].leaving, [] if splits else _sums(layers, steps, regions))
    given = (*inputs, *labels)
    # With a loss the backward is given nothing but a number, which the forward makes.
    of_loss = layers[-1].loss is not None
    output_gradient = tensors.gradients_of(steps[-1].leaving)
    held = ChunkBytes(
        saved=walk.saved - tensors.of(given) + (output_gradient if of_loss else 0),
        received=sum(counted) if entering.how == "message" else 0,
        loaded=sum(entering.labels) + (sum(counted) if entering.how == "loaded" else 0),
        output_gradient=0 if of_loss else output_gradient,
        input_gradient=sum(entering.gradients),
        deferred=walk.deferred if splits else 0,
    )
    local = entering.inputs if entering.how == "local" else ()
    kept_input = sum(nbytes for n, nbytes in zip(inputs, local, strict=False) if n in walk.deferred_tensors)
    return ChunkMemory(held, walk.forward(given), walk.backward(), walk.weight() if splits else 0, kept_input)


@dataclass
class _Tensors:
    """Bytes of each tensor between layers, by its number, and of the gradient that it gives."""

    nbytes: list[int] = field(default_factory=list)
    gradients: list[int] = field(default_factory=list)

    def add(self, nbytes: int, gradient: int = 0) -> int:
        """Its number."""
        self.nbytes.append(nbytes)
        self.gradients.append(gradient)
        return len(self.nbytes) - 1

    def of(self, numbers: Iterable[int]) -> int:
        """Bytes of these tensors."""
        return sum(self.nbytes[n] for n in numbers)

    def gradients_of(self, numbers: Iterable[int]) -> int:
        """Bytes of their gradients."""
        return sum(self.gradients[n] for n in numbers)


class _Step(NamedTuple):
    """A layer, or the loss: the numbers of the tensors around it.

    made: those of its outputs that are no input; entering, leaving: inputs and outputs with a gradient.
    """

    held: LayerBytes
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    made: frozenset[int]
    entering: tuple[int, ...]
    leaving: tuple[int, ...]

    @property
    def kept(self) -> frozenset[int]:
        """What the graph keeps of inputs and outputs."""
        saved = self.held.saved
        return frozenset([self.inputs[k] for k in saved.inputs] + [self.outputs[k] for k in saved.outputs])

    def deferred(self) -> tuple[set[int], set[int]]:
        """What its weights' gradients keep of the tensors around it, and of their gradients."""
        held = self.held.deferred
        tensors = [self.inputs[k] for k in held.inputs] + [self.outputs[k] for k in held.outputs]
        gradients = [self.leaving[k] for k in held.output_gradients] + [self.entering[k] for k in held.input_gradients]
        return set(tensors), set(gradients)


def _chain(
    layers: Sequence[LayerProfile], inputs: Sequence[int], labels: Sequence[int], tensors: _Tensors, splits: bool
) -> list[_Step]:
    """The layers, and the loss behind the last one, each fed by the one before."""
    steps: list[_Step] = []
    current, wanting = tuple(inputs), tuple(n for n in inputs if tensors.gradients[n])
    loss = [] if layers[-1].loss is None else [layers[-1].loss]
    for layer in (*layers, *loss):
        if layer in loss:
            current = (*current, *labels)
        made, outputs = set(), []
        for boundary in layer.outputs:
            if boundary.source is None:
                number = tensors.add(boundary.storage, boundary.nbytes if boundary.requires_grad else 0)
                made.add(number)
            else:
                number = current[boundary.source]
            outputs.append(number)
        leaving = tuple(n for n, b in zip(outputs, layer.outputs, strict=True) if b.requires_grad)
        steps.append(_Step(layer.held(splits), current, tuple(outputs), frozenset(made), wanting, leaving))
        current, wanting = tuple(outputs), leaving
    return steps


class _Region(NamedTuple):
    """Layers that are recomputed together; or one, that isn't recomputed."""

    steps: Sequence[_Step]
    recomputed: bool

    @property
    def own(self) -> int:
        """Bytes of its own that it keeps from forward to backward."""
        return 0 if self.recomputed else self.steps[0].held.saved.own

    @property
    def kept(self) -> frozenset[int]:
        """What it keeps of tensors between layers."""
        return frozenset(self.steps[0].inputs) if self.recomputed else self.steps[0].kept


def _regions(layers: Sequence[LayerProfile], steps: Sequence[_Step], interval: int) -> list[_Region]:
    again = [layer.recomputed and interval > 0 for layer in layers]
    again += [False] * (len(steps) - len(layers))  # the loss
    regions = []
    for recomputed, group in groupby(zip(again, steps, strict=True), key=lambda pair: pair[0]):
        run = [step for _, step in group]
        size = interval if recomputed else 1
        regions += [_Region(run[start : start + size], recomputed) for start in range(0, len(run), size)]
    return regions


def _sums(layers: Sequence[LayerProfile], steps: Sequence[_Step], regions: Sequence[_Region]) -> list[_Sum]:
    """Of gradients of what layers share."""
    place = {id(step): r for r, region in enumerate(regions) for step in region.steps}
    users: dict[str, list[int]] = {}
    for layer, step in zip(layers, steps, strict=False):
        if layer.tie is not None:
            users.setdefault(layer.tie, []).append(place[id(step)])
    nbytes = {layer.tie: layer.tied_gradient for layer in layers}
    return [_Sum(min(at), max(at), nbytes[tie]) for tie, at in users.items()]


class _Sum(NamedTuple):
    """Bytes of a gradient that autograd holds from the last region that adds to it until the first one."""

    first: int
    last: int
    nbytes: int


class _Walk:
    """A micro-batch's way through regions and back. sums: gradients that several regions add to.

    holds: the chunk's outputs whose gradients come, which the executor keeps until the backward is done.
    first: tensor -> the first region that keeps it, behind whose backward it is freed; saved: bytes between forward and
    backward, those of inputs included; deferred: behind a BACKWARD_INPUT.
    """

    def __init__(self, tensors: _Tensors, regions: Sequence[_Region], holds: Sequence[int], sums: Sequence[_Sum] = ()):
        self._tensors, self._regions, self._leaving, self._sums = tensors, regions, holds, sums
        self.first: dict[int, int] = {}
        for n in holds:
            self.first[n] = 0
        for r, region in enumerate(regions):
            for n in region.kept:
                self.first.setdefault(n, r)
        self._own = [0, *accumulate(region.own for region in regions)]
        by_region = [0] * len(regions)
        for n, r in self.first.items():
            by_region[r] += tensors.nbytes[n]
        self._between = list(accumulate(by_region))
        self.saved = self._own[-1] + (self._between[-1] if regions else 0)
        self.deferred_tensors, self._deferred_gradients, own = set[int](), set[int](), 0
        for step in (step for region in regions for step in region.steps):
            kept, gradients = step.deferred()
            self.deferred_tensors |= kept
            self._deferred_gradients |= gradients
            own += step.held.deferred.own
        # The gradient of the chunk's inputs is counted as a message on its way.
        self._deferred_gradients -= set(regions[0].steps[0].entering)
        self.deferred = own + tensors.of(self.deferred_tensors) + tensors.gradients_of(self._deferred_gradients)

    def forward(self, given: Iterable[int]) -> int:
        """The most at any time in the forward, beyond what was given to it."""
        outside = set(given)
        kept, own, most = set[int](), 0, 0
        for region in self._regions:
            for step in region.steps:
                around = (kept | set(step.inputs)) - outside
                most = max(most, own + self._tensors.of(around) + step.held.forward_peak)
            own += region.own
            kept |= region.kept
        return most

    def backward(self) -> int:
        """The most at any time in the backward."""
        most = own = 0
        deferred, gradients = set[int](), set[int]()
        for r in range(len(self._regions) - 1, -1, -1):
            region = self._regions[r]
            left = self._tensors.of(n for n in deferred if self.first.get(n, len(self._regions)) > r)
            still = gradients - set(region.steps[-1].leaving)
            around = self._own[r] + self._between[r] + own + left + self._tensors.gradients_of(still)
            around += sum(one.nbytes for one in self._sums if one.first <= r < one.last)
            if r < len(self._regions) - 1:  # the executor holds what the backward began with
                around += self._tensors.gradients_of(set(self._leaving) - still)
            most = max(most, around + self._inside(region, r))
            for step in region.steps:
                tensors, its_gradients = step.deferred()
                deferred |= tensors
                gradients |= its_gradients
                own += step.held.deferred.own
        return most

    def _inside(self, region: _Region, place: int) -> int:
        """The most of a region's own in its backward, the gradients of its outputs included."""
        if not region.recomputed:
            (step,) = region.steps
            # What it keeps of its outputs is in its own peak.
            outputs = self._tensors.of(step.kept & step.made)
            kept = [step.inputs[k] for k in step.held.saved.inputs]
            if all(self.first[n] == place and n not in self._leaving for n in kept):
                return step.held.sole_peak - self._tensors.of(kept) - outputs
            return step.held.backward_peak - outputs
        again = _Walk(self._tensors, [_Region([step], False) for step in region.steps], ())
        inputs = self._tensors.of(n for n in region.steps[0].inputs if n in again.first)
        gradients = self._tensors.gradients_of(region.steps[-1].leaving)
        return max(again.forward(region.steps[0].inputs) + gradients, again.backward() - inputs)

    def weight(self) -> int:
        """The most in BACKWARD_WEIGHT beyond what is deferred: the last layers come first, and free theirs."""
        most = freed = 0
        for step in reversed([step for region in self._regions for step in region.steps]):
            most = max(most, step.held.weight_peak - freed)
            freed += step.held.deferred.own
        return most
