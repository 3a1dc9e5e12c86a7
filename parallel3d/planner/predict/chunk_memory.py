"""Memory of a chunk for one micro-batch, composed from its layers' profiles."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.tracing import LayerBytes
from parallel3d.schedule.memory import ChunkBytes


@dataclass(frozen=True)
class Entering:
    """Bytes of each tensor that enters a chunk: inputs, and labels on the last chunk.

    - gradients: bytes of each input's gradient, 0 if none is wanted.
    - how: inputs come as a message, from the loader, or from a chunk of the same rank, which holds them.
    """

    inputs: tuple[int, ...]
    gradients: tuple[int, ...]
    labels: tuple[int, ...] = ()
    how: Literal["message", "loaded", "local"] = "message"


@dataclass(frozen=True)
class ChunkMemory:
    """Bytes of one micro-batch on one chunk.

    - held: between instructions.
    - forward: peak of a FORWARD, beyond what was held before; backward: peak of this micro-batch in a BACKWARD or
      BACKWARD_INPUT; weight: peak of a BACKWARD_WEIGHT, beyond what was held before.
    - kept_input: bytes of an input from a chunk of the same rank that deferred gradients keep.
    """

    held: ChunkBytes
    forward: int
    backward: int
    weight: int
    kept_input: int


def chunk_memory(layers: Sequence[LayerProfile], entering: Entering, splits: bool, interval: int) -> ChunkMemory:
    """Return the memory of a chunk of these layers, as PipelineModule.forward_chunk and Executor run them.

    splits: whether weight gradients are deferred; interval: layers recomputed together, 0 for none.
    """
    counted = [0 if entering.how == "local" else nbytes for nbytes in entering.inputs]
    inputs = [_Tensor(*pair) for pair in zip(counted, entering.gradients, strict=True)]
    given = [*inputs, *(_Tensor(nbytes, 0) for nbytes in entering.labels)]
    steps = _chain(layers, inputs, given[len(inputs) :], splits)
    regions = _regions(layers, steps, interval)
    outputs = steps[-1].leaving
    walk = _Walk(regions, outputs, [] if splits else _shared_gradients(layers, steps, regions))
    # With a loss the backward is given nothing but a number, which the forward makes.
    has_loss = layers[-1].loss is not None
    output_gradient = _gradient_bytes(outputs)
    held = ChunkBytes(
        saved=walk.saved - _bytes(given) + (output_gradient if has_loss else 0),
        received=sum(counted) if entering.how == "message" else 0,
        loaded=sum(entering.labels) + (sum(counted) if entering.how == "loaded" else 0),
        output_gradient=0 if has_loss else output_gradient,
        input_gradient=sum(entering.gradients),
        deferred=walk.deferred if splits else 0,
    )
    local = entering.inputs if entering.how == "local" else ()
    kept_input = sum(nbytes for tensor, nbytes in zip(inputs, local, strict=False) if tensor in walk.deferred_tensors)
    return ChunkMemory(held, walk.forward(given), walk.backward(), walk.weight() if splits else 0, kept_input)


@dataclass(frozen=True, eq=False)
class _Tensor:
    """A tensor between layers: its bytes, and those of its gradient."""

    nbytes: int
    gradient: int


def _bytes(tensors: Iterable[_Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _gradient_bytes(tensors: Iterable[_Tensor]) -> int:
    return sum(tensor.gradient for tensor in tensors)


class _Step(NamedTuple):
    """A layer, or the loss.

    made: outputs that are no input; entering, leaving: inputs and outputs with a gradient; kept: inputs and outputs that the
    graph keeps; deferred, deferred_gradients: tensors that its weights' gradients keep, and tensors whose gradients they keep.
    """

    held: LayerBytes
    inputs: Sequence[_Tensor]
    made: set[_Tensor]
    entering: Sequence[_Tensor]
    leaving: Sequence[_Tensor]
    kept: set[_Tensor]
    deferred: set[_Tensor]
    deferred_gradients: set[_Tensor]


def _chain(
    layers: Sequence[LayerProfile], inputs: Sequence[_Tensor], labels: Sequence[_Tensor], splits: bool
) -> list[_Step]:
    """Return the layers, and the loss after the last one, each with the outputs of the one before as its inputs."""
    steps: list[_Step] = []
    current, entering = list(inputs), [tensor for tensor in inputs if tensor.gradient]
    loss = layers[-1].loss
    for layer in (*layers, loss) if loss is not None else layers:
        if layer is loss:
            current = [*current, *labels]
        outputs = [
            _Tensor(b.storage, b.nbytes * b.requires_grad) if b.source is None else current[b.source]
            for b in layer.outputs
        ]
        made = {tensor for tensor, b in zip(outputs, layer.outputs, strict=True) if b.source is None}
        leaving = [tensor for tensor, b in zip(outputs, layer.outputs, strict=True) if b.requires_grad]
        held = layer.held(splits)
        kept, deferred = (
            {current[k] for k in which.inputs} | {outputs[k] for k in which.outputs}
            for which in (held.saved, held.deferred)
        )
        gradients = {leaving[k] for k in held.deferred.output_gradients}
        gradients |= {entering[k] for k in held.deferred.input_gradients}
        steps.append(_Step(held, current, made, entering, leaving, kept, deferred, gradients))
        current, entering = outputs, leaving
    return steps


class _Region(NamedTuple):
    """Layers that are recomputed together; or one that isn't recomputed. own, kept: what it holds until its backward."""

    steps: Sequence[_Step]
    recomputed: bool
    own: int
    kept: Collection[_Tensor]

    @staticmethod
    def of(steps: Sequence[_Step], recomputed: bool) -> _Region:
        if recomputed:
            return _Region(steps, True, 0, set(steps[0].inputs))
        return _Region(steps, False, steps[0].held.saved.own, steps[0].kept)


def _regions(layers: Sequence[LayerProfile], steps: Sequence[_Step], interval: int) -> list[_Region]:
    again = [layer.recomputed and interval > 0 for layer in layers]
    again += [False] * (len(steps) - len(layers))  # the loss
    regions = []
    for recomputed, group in groupby(zip(again, steps, strict=True), key=lambda pair: pair[0]):
        run = [step for _, step in group]
        size = interval if recomputed else 1
        regions += [_Region.of(run[start : start + size], recomputed) for start in range(0, len(run), size)]
    return regions


# Of a gradient that autograd holds from the last region that adds to it until the first one: both, and its bytes.
_SharedGradient = tuple[int, int, int]


def _shared_gradients(
    layers: Sequence[LayerProfile], steps: Sequence[_Step], regions: Sequence[_Region]
) -> list[_SharedGradient]:
    """Return the gradients of what layers share."""
    region_of = {id(step): r for r, region in enumerate(regions) for step in region.steps}
    users: dict[str, list[int]] = {}
    for layer, step in zip(layers, steps, strict=False):
        if layer.tie is not None:
            users.setdefault(layer.tie, []).append(region_of[id(step)])
    nbytes = {layer.tie: layer.tied_gradient for layer in layers}
    return [(min(at), max(at), nbytes[tie]) for tie, at in users.items()]


class _Walk:
    """A micro-batch's way through the regions and back.

    - outputs: outputs of the chunk whose gradients come, which the executor keeps until the backward is done.
    - shared: gradients that several regions add to.
    - first: the first region that keeps each tensor, whose backward frees it.
    - saved: bytes between forward and backward, inputs included; deferred: bytes after a BACKWARD_INPUT.
    """

    def __init__(
        self, regions: Sequence[_Region], outputs: Sequence[_Tensor] = (), shared: Sequence[_SharedGradient] = ()
    ):
        self._regions, self._outputs, self._shared = regions, outputs, shared
        self.first = dict.fromkeys(outputs, 0)
        for r, region in enumerate(regions):
            for tensor in region.kept:
                self.first.setdefault(tensor, r)
        own = [0, *accumulate(region.own for region in regions)]
        between = accumulate(_bytes(t for t, first in self.first.items() if first == r) for r in range(len(regions)))
        # What the regions up to each hold: tensors between layers, and their own without that region's.
        self._until = [before + tensors for before, tensors in zip(own, between, strict=False)]
        self.saved = self._until[-1] + regions[-1].own
        self._steps = [step for region in regions for step in region.steps]
        self.deferred_tensors = set[_Tensor]().union(*(step.deferred for step in self._steps))
        gradients = set[_Tensor]().union(*(step.deferred_gradients for step in self._steps))
        # The gradients of the chunk's inputs are counted as messages on their way.
        gradients -= set(self._steps[0].entering)
        self.deferred = _bytes(self.deferred_tensors) + _gradient_bytes(gradients)
        self.deferred += sum(step.held.deferred.own for step in self._steps)

    def forward(self, given: Iterable[_Tensor]) -> int:
        """Return the peak of the forward, beyond what was given to it."""
        outside = set(given)
        kept, own, most = set[_Tensor](), 0, 0
        for region in self._regions:
            for step in region.steps:
                around = (kept | set(step.inputs)) - outside
                most = max(most, own + _bytes(around) + step.held.forward_peak)
            own += region.own
            kept |= set(region.kept)
        return most

    def backward(self) -> int:
        """Return the peak of the backward."""
        most = own = 0
        deferred, gradients = set[_Tensor](), set[_Tensor]()
        for r, region in reversed(list(enumerate(self._regions))):
            left = (tensor for tensor in deferred if self.first.get(tensor, len(self._regions)) > r)
            still = gradients - set(region.steps[-1].leaving)
            around = self._until[r] + own + _bytes(left) + _gradient_bytes(still)
            around += sum(nbytes for first, last, nbytes in self._shared if first <= r < last)
            if r < len(self._regions) - 1:  # the executor holds what the backward began with
                around += _gradient_bytes(set(self._outputs) - still)
            most = max(most, around + self._inside(region, r))
            for step in region.steps:
                deferred |= step.deferred
                gradients |= step.deferred_gradients
                own += step.held.deferred.own
        return most

    def _inside(self, region: _Region, number: int) -> int:
        """Return the peak of a region's own bytes in its backward, the gradients of its outputs included."""
        if not region.recomputed:
            (step,) = region.steps
            # What it keeps of its outputs is in its own peak.
            outputs = _bytes(step.kept & step.made)
            kept = [step.inputs[k] for k in step.held.saved.inputs]
            if all(self.first[tensor] == number and tensor not in self._outputs for tensor in kept):
                return step.held.sole_peak - _bytes(kept) - outputs
            return step.held.backward_peak - outputs
        again = _Walk([_Region.of([step], False) for step in region.steps])
        inputs = _bytes(tensor for tensor in region.steps[0].inputs if tensor in again.first)
        gradients = _gradient_bytes(region.steps[-1].leaving)
        return max(again.forward(region.steps[0].inputs) + gradients, again.backward() - inputs)

    def weight(self) -> int:
        """Return the peak of BACKWARD_WEIGHT beyond what is deferred: the last layers come first, and free theirs."""
        most = freed = 0
        for step in reversed(self._steps):
            most = max(most, step.held.weight_peak - freed)
            freed += step.held.deferred.own
        return most
