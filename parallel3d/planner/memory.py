"""What each stage of a layout holds of memory at most: the sum of what the runtime's components say of themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from parallel3d.comm.memory import CONTEXT_BYTES, communicator_bytes
from parallel3d.comm.peer_copies import buffer_bytes
from parallel3d.config.run_layout import RunLayout
from parallel3d.kernels.all_reduce import WORLD_SIZES, staging_bytes
from parallel3d.optim import build_optimizer
from parallel3d.optim.memory import step_bytes
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.specs import TiedLayerSpec
from parallel3d.planner.chunk_memory import ChunkMemory, Entering, chunk_memory
from parallel3d.planner.layer_profile import LayerProfile
from parallel3d.planner.parameters import stage_parameters
from parallel3d.planner.profile import ModelProfile
from parallel3d.planner.result import StageMemory
from parallel3d.schedule.builders import one_f_one_b
from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.zero.memory import StateBytes, communicated_bytes, moments_of, piece_sizes, predict_state

# cuBLAS's own, of Hopper's size (CUBLAS_WORKSPACE_CONFIG's documentation), which PyTorch allocates for each thread that
# multiplies: the script's, and autograd's.
_LIBRARY_BYTES = 2 * 32 * 2**20
# Of what the allocator has reserved, that no tensor uses at the peak: gaps between blocks.
_GAPS = 0.05


@dataclass(frozen=True)
class Flight:
    """Most bytes of activations, messages and their gradients that a rank holds: between instructions, and within one with
    what it needs for itself; held: between instructions, when the latter is reached.
    """

    between: int
    within: int
    held: int


def replay(program: Program, stage: int, chunks: Mapping[int, ChunkMemory]) -> Flight:
    """A stage's list of instructions, with what each of its chunks holds of a micro-batch."""
    total = between = within = held = 0
    moved: dict[tuple[int, int], bool] = {}
    for i in program.instructions[stage]:
        if i.chunk not in chunks:
            continue
        chunk = chunks[i.chunk]
        during = total + _within(i, chunk)
        change = chunk.held.change(i) + _handed(i, chunks, moved)
        # What comes without an instruction's own need, as a message's buffer.
        during = max(during, total, total + change)
        if during > within:
            within, held = during, max(total, total + change)
        total += change
        between = max(between, total)
    return Flight(between, within, held)


def _within(i: Instruction, chunk: ChunkMemory) -> int:
    """The most that `i` adds while it runs."""
    held = chunk.held
    own = held.saved + held.received + held.loaded + held.output_gradient
    added = {Op.FORWARD: chunk.forward, Op.BACKWARD: chunk.backward - own, Op.BACKWARD_INPUT: chunk.backward - own}
    return chunk.weight if i.op is Op.BACKWARD_WEIGHT else added.get(i.op, 0)


def _handed(i: Instruction, chunks: Mapping[int, ChunkMemory], moved: dict[tuple[int, int], bool]) -> int:
    """What `i` adds to the bytes held of outputs that a chunk of the same rank takes.

    Such a one counts for the chunk that made it until its backward, and from then on for the one that took it, where its
    deferred gradients keep it. moved: (chunk, micro-batch) with deferred gradients -> whether that has happened.
    """
    place, after = (i.chunk, i.micro_batch), (i.chunk + 1, i.micro_batch)
    if i.op is Op.BACKWARD_WEIGHT and moved.pop(place, False):
        return -chunks[i.chunk].kept_input
    if i.op is Op.BACKWARD_INPUT and chunks[i.chunk].kept_input:
        moved[place] = False
    if i.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and after in moved:
        moved[after] = True
        return chunks[i.chunk + 1].kept_input
    return 0


class MemoryModel:
    """Predicts the memory of a model's layouts; what chunks hold is found once for all that have the same ones.

    Of the runtime's components each says what it takes, by a pure function beside it.
    """

    def __init__(self, model: ModelProfile):
        self._model = model
        self._chunks: dict[object, ChunkMemory] = {}
        self._states: dict[object, _State] = {}

    def stages(
        self,
        program: Program,
        bounds: Sequence[int],
        layout: RunLayout,
        capacities: Sequence[int],
        samples: float = 1,
        only: Collection[int] | None = None,
    ) -> tuple[StageMemory, ...]:
        """Of each stage, or of some.

        program: lowered; bounds: chunk c has layers bounds[c] to bounds[c + 1]; layout: of which nothing is left open;
        capacities: bytes of the smallest device of each stage; samples: so many times its micro-batches, about.
        """
        layers = self._layers(layout)
        return tuple(
            self._stage(program, bounds, layout, layers, stage, capacity, samples)
            for stage, capacity in enumerate(capacities)
            if only is None or stage in only
        )

    def of_layers(self, layout: RunLayout) -> tuple[list[float], list[float]]:
        """Bytes of each layer: of its model state, and of what a micro-batch leaves in it for its backward, about."""
        whole = (0, len(self._model.specs))
        program, layers = one_f_one_b(1, 1), self._layers(layout)
        each = [(k, k + 1) for k in range(whole[1])]
        alone = [self._chunk(program, bounds, layout, 0, splits=False).held.saved for bounds in each]
        # Alone each holds its output, which among others the next one may not need.
        share = self._chunk(program, whole, layout, 0, splits=False).held.saved / max(1, sum(alone))
        policy, moments = self._model.policy(layout.zero or 0), moments_of(self._optimizer)
        state = [
            predict_state(
                [ParameterInfo("", p, (0,)) for _, p in layer.parameters], policy, layout.replicas, moments or 2
            ).steady
            for layer in layers
        ]
        return [float(nbytes) for nbytes in state], [share * nbytes for nbytes in alone]

    def held(self, layout: RunLayout) -> int:
        """Bytes that a micro-batch leaves for its backward, of all layers as one chunk."""
        program = one_f_one_b(1, 1)
        return self._chunk(program, (0, len(self._model.specs)), layout, 0, splits=False).held.saved

    def _layers(self, layout: RunLayout) -> tuple[LayerProfile, ...]:
        return self._model.layers(
            layout.slices, layout.sequence_parallel, layout.micro_batch or 1, layout.recompute or 0
        )

    def flight(self, program: Program, bounds: Sequence[int], layout: RunLayout, stage: int) -> Flight:
        """Activations and messages of a stage."""
        splits = _splits(program, stage)
        own = [c for c, s in enumerate(program.placement) if s == stage]
        return replay(program, stage, {c: self._chunk(program, bounds, layout, c, splits) for c in own})

    def _chunk(
        self, program: Program, bounds: Sequence[int], layout: RunLayout, chunk: int, splits: bool
    ) -> ChunkMemory:
        start, stop = bounds[chunk], bounds[chunk + 1]
        is_local = chunk > 0 and program.placement[chunk - 1] == program.placement[chunk]
        numbers = (layout.slices, layout.sequence_parallel, layout.micro_batch, layout.recompute)
        key = (start, stop, is_local, splits, numbers)
        if key not in self._chunks:
            layers = self._layers(layout)
            loaded, labels = self._model.loaded(layout.micro_batch or 1)
            if start == 0:
                entering = Entering(loaded, (0,) * len(loaded), how="loaded")
            else:
                before = layers[start - 1].outputs
                gradients = tuple(b.nbytes if b.requires_grad else 0 for b in before)
                inputs = tuple(b.nbytes for b in before)
                entering = Entering(inputs, gradients, how="local" if is_local else "message")
            if stop == len(layers) and layers[-1].loss is not None:
                entering = replace(entering, labels=labels)
            interval = layout.recompute or 0
            self._chunks[key] = chunk_memory(layers[start:stop], entering, splits, interval)
        return self._chunks[key]

    def _stage(
        self,
        program: Program,
        bounds: Sequence[int],
        layout: RunLayout,
        layers: Sequence[LayerProfile],
        stage: int,
        capacity: int,
        samples: float,
    ) -> StageMemory:
        on_cuda = self._model.device == "cuda"
        state = self._state(program, bounds, layout, stage)
        flight = self.flight(program, bounds, layout, stage)
        flight = Flight(*(round(samples * nbytes) for nbytes in (flight.between, flight.within, flight.held)))
        own = [
            layers[k] for c, s in enumerate(program.placement) if s == stage for k in range(bounds[c], bounds[c + 1])
        ]
        steady = {
            "weights": state.state.weights + state.others,
            "gradients": state.state.gradients,
            "masters": state.state.masters,
            "optimizer": state.state.optimizer,
            "tables": max((layer.tables for layer in own), default=0),
            "libraries": _LIBRARY_BYTES if on_cuda else 0,
        }
        kept = {"transient": state.state.transient, "communication": state.communicated}
        backward = {"activations": flight.held, "workspace": flight.within - flight.held, **kept}
        if on_cuda:
            backward["messages"] = round(samples * self._in_transit(program, bounds, layout, stage))
        step = {"update": state.state.update, "workspace": state.step, **kept}
        base = sum(steady.values())
        phases = {
            "steady": base,
            "backward": base + sum(backward.values()),
            "step": base + sum(step.values()),
            "save": base + sum(kept.values()),  # tensors go to the host as they are
        }
        most = max(phases, key=lambda phase: phases[phase])
        parts = {**steady, **{"backward": backward, "step": step, "save": kept}.get(most, {})}
        allocated = phases[most]
        gaps, outside = (round(allocated * _GAPS), self._outside(layout)) if on_cuda else (0, 0)
        return StageMemory(
            stage=stage,
            parts={name: nbytes for name, nbytes in parts.items() if nbytes},
            phases=phases,
            allocated=allocated,
            reserved=allocated + gaps + outside,
            outside=outside,
            capacity=capacity,
        )

    def _in_transit(self, program: Program, bounds: Sequence[int], layout: RunLayout, stage: int) -> int:
        """The last gradients sent, which the transport keeps until it sends again."""
        layers = self._layers(layout)
        sent = [
            layers[bounds[c] - 1].gradient_bytes
            for c, s in enumerate(program.placement)
            if s == stage and c > 0 and program.placement[c - 1] != stage
        ]
        return max(sent, default=0)

    def _outside(self, layout: RunLayout) -> int:
        """What PyTorch's allocator doesn't hold: the context, and buffers of communication."""
        stages, replicas = layout.stages, layout.replicas or 1
        communicators = communicator_bytes((stages * replicas * layout.slices, replicas, layout.slices))
        peers = buffer_bytes(stages) if stages > 1 else 0
        sums = self._model.config.kernels.wants_all_reduce and layout.slices in WORLD_SIZES
        return CONTEXT_BYTES + communicators + peers + (staging_bytes() if sums else 0)

    def _state(self, program: Program, bounds: Sequence[int], layout: RunLayout, stage: int) -> _State:
        """Weights, gradients, masters and optimizer of each rank of a stage."""
        placement, splits = program.placement, _splits(program, stage)
        own = tuple((bounds[c], bounds[c + 1]) for c, s in enumerate(placement) if s == stage)
        # Ties reach over the stages: where there are some, all of the partition counts.
        ties = tuple(bounds) if any(isinstance(layer, TiedLayerSpec) for layer in self._model.specs) else ()
        placed = tuple(placement) if ties else ()
        key = (own, ties, placed, layout.slices, layout.sequence_parallel, layout.zero, layout.replicas, splits)
        if key not in self._states:
            infos, early, others = self._parameters(placement, bounds, layout, stage)
            self._states[key] = self._predicted(infos, early if splits else set(), others, layout)
        return self._states[key]

    def _predicted(
        self, infos: Sequence[ParameterInfo], early: set[nn.Parameter], others: int, layout: RunLayout
    ) -> _State:
        policy, replicas = self._model.policy(layout.zero or 0), layout.replicas or 1
        optimizer = self._optimizer
        moments = moments_of(optimizer)
        state = predict_state(infos, policy, replicas, 2 if moments is None else moments, early)
        total, largest = piece_sizes(infos, policy, replicas)
        step = step_bytes(optimizer, total, largest, 4, self._model.device == "cuda")
        return _State(state, others, communicated_bytes(infos, policy, replicas), step)

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        """The configuration's, of nothing; where the script brings its own, Adam in its place."""
        given, one = self._model.config.optimizer, nn.Parameter(torch.empty(1))
        return torch.optim.AdamW([one]) if given is None else build_optimizer(given.type, [one], given.params)

    def _parameters(
        self, placement: Sequence[int], bounds: Sequence[int], layout: RunLayout, stage: int
    ) -> tuple[list[ParameterInfo], set[nn.Parameter], int]:
        """What a stage trains, as PipelineModule.parameter_infos has it; of these the early ones, see LayerProfile; and bytes
        of what it doesn't train: frozen parameters and buffers.
        """
        layers, specs = self._layers(layout), self._model.specs
        infos = stage_parameters(specs, layers, bounds, placement)[stage]
        own = [layers[k] for c, s in enumerate(placement) if s == stage for k in range(bounds[c], bounds[c + 1])]
        early = {parameter for layer in own for name, parameter in layer.parameters if name in layer.early}
        frozen = [parameter for layer in own for _, parameter in layer.frozen]
        return infos, early, sum(map(self._cast_bytes, frozen)) + sum(layer.buffers for layer in own)

    def _cast_bytes(self, parameter: nn.Parameter) -> int:
        dtype = self._model.precision.weights if parameter.is_floating_point() else None
        return parameter.numel() * (dtype or parameter.dtype).itemsize


def _splits(program: Program, stage: int) -> bool:
    """Whether a stage's weight gradients are deferred."""
    return any(i.op is Op.BACKWARD_WEIGHT for i in program.instructions[stage])


@dataclass(frozen=True)
class _State:
    """others: of frozen parameters and buffers; communicated: copies of gradients in the dtype that they travel in; step: what
    the optimizer takes for itself.
    """

    state: StateBytes
    others: int
    communicated: int
    step: int
