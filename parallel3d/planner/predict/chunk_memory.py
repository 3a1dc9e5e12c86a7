"""Memory of a chunk for one micro-batch, composed from its layers' profiles, and of all chunks of a stage in flight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, NamedTuple

import numpy as np

from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.tracing import LayerBytes
from parallel3d.pipe.calls import in_groups
from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.memory import ChunkBytes


@dataclass(frozen=True)
class ChunkMemory:
    """Bytes of one micro-batch on one chunk.

    - held: between instructions.
    - kept_input: bytes of an input from a chunk of the same rank that deferred gradients keep.
    - find_runs: finds `runs`.
    """

    held: ChunkBytes
    kept_input: int
    find_runs: Callable[[], Mapping[Op, Sequence[int]]]

    @cached_property
    def runs(self) -> Mapping[Op, Sequence[int]]:
        """The most that each run of a layer in an instruction adds to what was held before it, by the operation.

        Runs of layers that are recomputed together count as one each time. The loss is part of the last layer's run.
        """
        return self.find_runs()

    @cached_property
    def within(self) -> Mapping[Op, int]:
        """The most that an instruction adds while it runs to what was held before, by its operation."""
        return {op: max(own, default=0) for op, own in self.runs.items()}


def chunk_memory(
    layers: Sequence[LayerProfile],
    inputs: Sequence[tuple[int, int]],
    labels: Sequence[int],
    source: Literal["message", "loader", "local"],
    splits: bool,
    interval: int,
    sends: bool = False,
) -> ChunkMemory:
    """Return the memory of a chunk of these layers, as PipelineModule.forward_chunk and Executor run them.

    - inputs: bytes of each tensor that enters the chunk, and of its gradient, 0 if none is wanted.
    - labels: bytes of each tensor of the labels, if the chunk ends with the loss.
    - source: of the inputs. "local" ones come from a chunk of the same rank, which holds them.
    - splits: whether weight gradients are deferred; interval: layers recomputed together, 0 for none.
    - sends: whether the output is sent, to a chunk of another rank, and then freed.
    """
    entering = [_Tensor(0 if source == "local" else nbytes, gradient) for nbytes, gradient in inputs]
    input_bytes = _bytes(entering)
    given = [*entering, *(_Tensor(nbytes, 0) for nbytes in labels)]
    regions = _regions(_chain(layers, entering, given[len(entering) :], splits), interval)
    outputs = regions[-1].steps[-1].leaving
    walk = _Walk(regions, outputs, [] if splits else _shared_gradients(regions), [] if sends else outputs)
    # With a loss, the backward's only input is a number, which the forward computes.
    has_loss = layers[-1].loss is not None
    output_gradient = _gradient_bytes(outputs)
    held = ChunkBytes(
        saved=walk.saved - _bytes(given) + (output_gradient if has_loss else 0),
        received=input_bytes if source == "message" else 0,
        loaded=sum(labels) + (input_bytes if source == "loader" else 0),
        output_gradient=0 if has_loss else output_gradient,
        input_gradient=_gradient_bytes(entering),
        deferred=walk.deferred if splits else 0,
        output=_bytes(set(outputs).difference(walk.first)),
    )

    def find_runs() -> Mapping[Op, Sequence[int]]:
        before = held.saved + held.received + held.loaded + held.output_gradient
        forward, backward = walk.forward(given), [most - before for most in walk.backward()]
        if has_loss:
            forward[-2:], backward[:2] = [max(forward[-2:])], [max(backward[:2])]
        runs = {Op.FORWARD: forward, Op.BACKWARD: backward, Op.BACKWARD_INPUT: backward}
        return {**runs, Op.BACKWARD_WEIGHT: [walk.weight()]} if splits else runs

    kept = [nbytes for tensor, (nbytes, _) in zip(entering, inputs, strict=True) if tensor in walk.deferred_tensors]
    return ChunkMemory(held, sum(kept) if source == "local" else 0, find_runs)


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

    leaving: outputs with a gradient; kept: inputs and outputs that the graph keeps; deferred, deferred_gradients: tensors that
    its weights' gradients keep, and tensors whose gradients they keep.
    """

    layer: LayerProfile
    held: LayerBytes
    inputs: Sequence[_Tensor]
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
        leaving = [tensor for tensor, b in zip(outputs, layer.outputs, strict=True) if b.requires_grad]
        held = layer.held(splits)
        kept, deferred = (
            {current[k] for k in which.inputs} | {outputs[k] for k in which.outputs}
            for which in (held.saved, held.deferred)
        )
        gradients = {leaving[k] for k in held.deferred.output_gradients}
        gradients |= {entering[k] for k in held.deferred.input_gradients}
        steps.append(_Step(layer, held, current, leaving, kept, deferred, gradients))
        current, entering = outputs, leaving
    return steps


class _Region(NamedTuple):
    """Layers that are recomputed together, or one that isn't recomputed. own, kept: what the region holds for its backward."""

    steps: Sequence[_Step]
    is_recomputed: bool
    own: int
    kept: Collection[_Tensor]

    @staticmethod
    def of(steps: Sequence[_Step], is_recomputed: bool) -> _Region:
        if is_recomputed:
            return _Region(steps, True, 0, set(steps[0].inputs))
        return _Region(steps, False, steps[0].held.saved.own, steps[0].kept)


def _regions(steps: Sequence[_Step], interval: int) -> list[_Region]:
    regions = []
    for group, again in in_groups(steps, interval, lambda step: step.layer.recomputed):
        regions += [_Region.of(own, again) for own in ([group] if again else [[step] for step in group])]
    return regions


# Gradient that autograd holds from the last region that adds to it until the first one: both, and its bytes.
_SharedGradient = tuple[int, int, int]


def _shared_gradients(regions: Sequence[_Region]) -> list[_SharedGradient]:
    """Return the gradients of tied weights, to which several layers add."""
    found: dict[str, _SharedGradient] = {}
    for r, region in enumerate(regions):
        for layer in (step.layer for step in region.steps):
            if layer.tie is not None:
                first, *_ = found.get(layer.tie, (r,))
                found[layer.tie] = first, r, layer.tied_gradient
    return list(found.values())


class _Walk:
    """A micro-batch's way through the regions and back.

    - outputs: outputs of the chunk whose gradients come; the executor keeps these until the backward is done.
    - held: outputs that the executor keeps as long.
    - shared: gradients that several regions add to.
    - first: the first region that keeps each tensor, whose backward frees it.
    - saved: bytes between forward and backward, inputs included; deferred: bytes after a BACKWARD_INPUT.
    """

    def __init__(
        self,
        regions: Sequence[_Region],
        outputs: Sequence[_Tensor] = (),
        shared: Sequence[_SharedGradient] = (),
        held: Sequence[_Tensor] = (),
    ):
        self._regions, self._outputs, self._shared, self._held = regions, set(outputs), shared, set(held)
        self.first = dict.fromkeys(held, 0)
        for r, region in enumerate(regions):
            for tensor in region.kept:
                self.first.setdefault(tensor, r)
        self.saved = _bytes(self.first) + sum(region.own for region in regions)
        self._steps = [step for region in regions for step in region.steps]
        self.deferred_tensors = set[_Tensor]().union(*(step.deferred for step in self._steps))
        gradients = set[_Tensor]().union(*(step.deferred_gradients for step in self._steps))
        # The gradients of the chunk's inputs are counted as messages on their way.
        gradients -= {tensor for tensor in self._steps[0].inputs if tensor.gradient}
        self.deferred = _bytes(self.deferred_tensors) + _gradient_bytes(gradients)
        self.deferred += sum(step.held.deferred.own for step in self._steps)

    def forward(self, given: Iterable[_Tensor]) -> list[int]:
        """Return the peak of each step of the forward, beyond what was given to it."""
        there, nbytes, peaks = set(given), 0, []
        for region in self._regions:
            peaks += [nbytes + _bytes(set(step.inputs) - there) + step.held.forward_peak for step in region.steps]
            kept = set(region.kept) - there
            nbytes += region.own + _bytes(kept)
            there |= kept
        return peaks

    def backward(self) -> list[int]:
        """Return the peak of each step of the backward; those of a recomputed region have that of the region."""
        peaks: list[int] = []
        # Bytes of tensors held, and of gradients that wait besides those of the region's outputs.
        nbytes, gradient_bytes = self.saved, 0
        deferred, waiting = set[_Tensor](), set[_Tensor]()
        freed: dict[int, set[_Tensor]] = defaultdict(set)
        for tensor, first in self.first.items():
            freed[first].add(tensor)
        for r, region in reversed(list(enumerate(self._regions))):
            nbytes -= region.own
            arrived = waiting.intersection(region.steps[-1].leaving) - self._outputs
            shared = sum(size for first, last, size in self._shared if first <= r < last)
            around = nbytes + gradient_bytes - _gradient_bytes(arrived) + shared
            peaks += [around + self._inside(region, r)] * (2 * len(region.steps) - 1)
            # From the first region on the executor holds what the backward began with.
            gradients = self._outputs.union(*(step.deferred_gradients for step in region.steps)) - waiting
            waiting |= gradients
            gradient_bytes += _gradient_bytes(gradients)
            kept = set[_Tensor]().union(*(step.deferred for step in region.steps)) - deferred
            deferred |= kept
            nbytes += _bytes(t for t in kept if self.first.get(t, r + 1) > r) - _bytes(freed[r] - deferred)
            nbytes += sum(step.held.deferred.own for step in region.steps)
        return peaks

    def _inside(self, region: _Region, number: int) -> int:
        """Return the peak of a region's own bytes in its backward, the gradients of its outputs included."""
        if not region.is_recomputed:
            (step,) = region.steps
            # What it keeps of its outputs is in its own peak.
            outputs = _bytes(step.kept - set(step.inputs))
            kept = [step.inputs[k] for k in step.held.saved.inputs]
            if all(self.first[tensor] == number and tensor not in self._held for tensor in kept):
                return step.held.sole_peak - _bytes(kept) - outputs
            return step.held.backward_peak - outputs
        again = _Walk([_Region.of([step], False) for step in region.steps])
        inputs = _bytes(tensor for tensor in region.steps[0].inputs if tensor in again.first)
        gradients = _gradient_bytes(region.steps[-1].leaving)
        return max(max(again.forward(region.steps[0].inputs)) + gradients, max(again.backward()) - inputs)

    def weight(self) -> int:
        """Return the peak of BACKWARD_WEIGHT beyond what is deferred: the last layers come first, and free theirs."""
        most = freed = 0
        for step in reversed(self._steps):
            most = max(most, step.held.weight_peak - freed)
            freed += step.held.deferred.own
        return most


class ActivationPeak(NamedTuple):
    """Peak bytes of activations, messages and their gradients on a rank.

    within: inside an instruction, with what it needs for itself; held: then, of what is held between instructions.
    """

    within: int
    held: int


_Bytes = np.ndarray[tuple[int], np.dtype[np.int64]]
_WITH_WEIGHTS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)  # computes that need their layers' weights
_Kind = tuple[Op, int, bool]  # operation, chunk, whether it hands over an output: see _prepare


class MemoryReplay:
    """Replays a lowered program's stages."""

    def __init__(self, program: Program):
        self.placement = program.placement
        self._prepared = cache(lambda stage: _prepare(program.instructions[stage]))

    def splits(self, stage: int) -> bool:
        """Whether the stage defers weight gradients."""
        return any(op is Op.BACKWARD_WEIGHT for op, _, _ in self._prepared(stage)[0])

    def peak(self, stage: int, chunks: Mapping[int, ChunkMemory]) -> ActivationPeak:
        """Return the peak of a stage. chunks: bytes of one micro-batch on each of the stage's chunks."""
        before, after, own = self._held(stage, chunks)
        # What arrives without an instruction's own need, such as a message's buffer, is there between instructions.
        around = np.maximum(before, after)
        within = np.maximum(before + own, around)
        most = int(within.argmax())
        return ActivationPeak(int(within[most]), int(around[most]))

    def runs(self, stage: int, chunks: Mapping[int, ChunkMemory]) -> list[int]:
        """Return the peak bytes in each run of a layer in a stage's forwards and backwards. chunks: see `peak`."""
        kinds, order = self._prepared(stage)
        every = zip(order.tolist(), self._held(stage, chunks)[0].tolist(), strict=True)
        computes = ((kinds[k], before) for k, before in every if kinds[k][0] in _WITH_WEIGHTS)
        return [before + most for (op, chunk, _), before in computes for most in chunks[chunk].runs[op]]

    def _held(self, stage: int, chunks: Mapping[int, ChunkMemory]) -> tuple[_Bytes, _Bytes, _Bytes]:
        """Return the bytes held before and after each instruction of a stage, and the most that it adds while it runs."""
        kinds, order = self._prepared(stage)
        changes, own = np.array([_bytes_of(kind, chunks) for kind in kinds], dtype=np.int64)[order].T
        after = np.cumsum(changes)
        return after - changes, after, own


def _prepare(instructions: Sequence[Instruction]) -> tuple[list[_Kind], np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return the kinds of instruction, and the number of each instruction's kind.

    An output that a chunk of the same rank uses counts for the chunk that made it until its backward, and from then on for
    the chunk that used it, if its deferred gradients keep it: the backward hands it over.
    """
    kinds: dict[_Kind, int] = {}
    # (chunk, micro-batch) with deferred gradients -> whether it was handed over
    deferred: dict[tuple[int, int], bool] = {}
    order = []
    for op, chunk, micro_batch, *_ in instructions:
        if op is Op.BACKWARD_WEIGHT:
            hands = deferred.pop((chunk, micro_batch), False)
        else:
            if op is Op.BACKWARD_INPUT:
                deferred[chunk, micro_batch] = False
            hands = op in (Op.BACKWARD, Op.BACKWARD_INPUT) and (chunk + 1, micro_batch) in deferred
            if hands:
                deferred[chunk + 1, micro_batch] = True
        order.append(kinds.setdefault((op, chunk, hands), len(kinds)))
    return list(kinds), np.array(order, dtype=np.int64)


def _bytes_of(kind: _Kind, chunks: Mapping[int, ChunkMemory]) -> tuple[int, int]:
    """Return by how much an instruction changes the bytes that are held, and the most that it adds while it runs."""
    op, chunk, hands = kind
    if chunk not in chunks:  # tied weights' gradients are summed with those of another stage's chunk
        return 0, 0
    change = chunks[chunk].held.change(Instruction(op, chunk, 0))
    if hands:
        change += -chunks[chunk].kept_input if op is Op.BACKWARD_WEIGHT else chunks[chunk + 1].kept_input
    return change, chunks[chunk].within.get(op, 0)
