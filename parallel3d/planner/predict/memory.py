"""What each stage of a layout holds of memory at most: the sum of what the runtime's components say of themselves."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from parallel3d.comm.environment import CONTEXT_BYTES
from parallel3d.comm.groups import communicator_bytes
from parallel3d.comm.peer.copies import pipeline_channels, shard_channels
from parallel3d.config.layout import Layout
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.kernels import all_reduce, reduce_scatter
from parallel3d.kernels.workspace import WORLD_SIZES
from parallel3d.optim import build_optimizer
from parallel3d.optim.memory import step_bytes
from parallel3d.parameters import ParameterInfo
from parallel3d.planner.predict.chunk_memory import ChunkMemory, Entering, chunk_memory
from parallel3d.planner.predict.flight import Flight, Replays
from parallel3d.planner.predict.profile import ModelProfile
from parallel3d.planner.search.result import StageMemory
from parallel3d.schedule.memory import ChunkBytes
from parallel3d.specs import TiedLayerSpec
from parallel3d.zero.memory import StateBytes, communicated_bytes, moments_of, piece_sizes, predict_state

# cuBLAS's own, of Hopper's size (CUBLAS_WORKSPACE_CONFIG's documentation), which PyTorch allocates for each thread that
# multiplies: the script's, and autograd's.
_LIBRARY_BYTES = 2 * 32 * 2**20
# Of what the allocator has reserved, that no tensor uses at the peak: gaps between blocks.
_GAPS = 0.05


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
        replays: Replays,
        bounds: Sequence[int],
        layout: Layout,
        capacities: Sequence[int],
        samples: float = 1,
        only: Collection[int] | None = None,
    ) -> tuple[StageMemory, ...]:
        """Of each stage, or of some.

        replays: of the program; bounds: chunk c has layers bounds[c] to bounds[c + 1]; layout: of which nothing is left open;
        capacities: bytes of the smallest device of each stage; samples: so many times its micro-batches, about.
        """
        layers = self._layers(layout)
        return tuple(
            self._stage(replays, bounds, layout, layers, stage, capacity, samples)
            for stage, capacity in enumerate(capacities)
            if only is None or stage in only
        )

    def of_layers(self, layout: Layout) -> tuple[list[float], list[float]]:
        """Bytes of each layer: of its model state, and of what a micro-batch leaves in it for its backward, about."""
        whole = (0, len(self._model.specs))
        layers = self._layers(layout)
        each = [(k, k + 1) for k in range(whole[1])]
        alone = [self._chunk((0,), bounds, layout, 0, splits=False).held.saved for bounds in each]
        # Alone each holds its output, which among others the next one may not need.
        share = self._chunk((0,), whole, layout, 0, splits=False).held.saved / max(1, sum(alone))
        policy, moments = self._model.policy(layout.zero), moments_of(self._optimizer)
        state = [
            predict_state(
                [ParameterInfo("", p, (0,)) for _, p in layer.parameters], policy, layout.replicas, moments or 2
            ).steady
            for layer in layers
        ]
        return [float(nbytes) for nbytes in state], [share * nbytes for nbytes in alone]

    def held(self, layout: Layout) -> int:
        """Bytes that a micro-batch leaves for its backward, of all layers as one chunk."""
        return self._chunk((0,), (0, len(self._model.specs)), layout, 0, splits=False).held.saved

    def _layers(self, layout: Layout) -> tuple[LayerProfile, ...]:
        return self._model.layers(layout.slices, layout.sequence_parallel, layout.micro_batch, layout.recompute)

    def flight(self, replays: Replays, bounds: Sequence[int], layout: Layout, stage: int) -> Flight:
        """Activations and messages of a stage."""
        replay, placement = replays.of(stage), replays.placement
        own = [c for c, s in enumerate(placement) if s == stage]
        return replay.flight({c: self._chunk(placement, bounds, layout, c, replay.splits) for c in own})

    def chunk_bytes(self, placement: Sequence[int], bounds: Sequence[int], layout: Layout) -> list[ChunkBytes]:
        """Of a micro-batch on each chunk, with weight gradients deferred."""
        chunks = range(len(placement))
        return [self._chunk(placement, bounds, layout, c, splits=True).held for c in chunks]

    def _chunk(
        self, placement: Sequence[int], bounds: Sequence[int], layout: Layout, chunk: int, splits: bool
    ) -> ChunkMemory:
        start, stop = bounds[chunk], bounds[chunk + 1]
        is_local = chunk > 0 and placement[chunk - 1] == placement[chunk]
        layers, interval = self._layers(layout), layout.recompute
        # The same layers behind a like one hold the same, wherever they lie. The profile keeps them, so ids stay theirs.
        before = layers[start - 1] if start > 0 else None
        key = (layout.micro_batch, interval, is_local, splits, id(before), *map(id, layers[start:stop]))
        if key not in self._chunks:
            entering = self._entering(before, is_local, layout)
            if stop == len(layers) and layers[-1].loss is not None:
                entering = replace(entering, labels=self._model.loaded(layout.micro_batch)[1])
            self._chunks[key] = chunk_memory(layers[start:stop], entering, splits, interval)
        return self._chunks[key]

    def _entering(self, before: LayerProfile | None, is_local: bool, layout: Layout) -> Entering:
        """What comes into a chunk behind a layer; from the loader behind none."""
        if before is None:
            loaded, _ = self._model.loaded(layout.micro_batch)
            return Entering(loaded, (0,) * len(loaded), how="loaded")
        gradients = tuple(b.nbytes if b.requires_grad else 0 for b in before.outputs)
        inputs = tuple(b.nbytes for b in before.outputs)
        return Entering(inputs, gradients, how="local" if is_local else "message")

    def _stage(
        self,
        replays: Replays,
        bounds: Sequence[int],
        layout: Layout,
        layers: Sequence[LayerProfile],
        stage: int,
        capacity: int,
        samples: float,
    ) -> StageMemory:
        on_cuda = self._model.device == "cuda"
        placement = replays.placement
        state = self._state(replays, bounds, layout, stage)
        flight = self.flight(replays, bounds, layout, stage)
        flight = Flight(*(round(samples * nbytes) for nbytes in (flight.between, flight.within, flight.held)))
        own = [layers[k] for c, s in enumerate(placement) if s == stage for k in range(bounds[c], bounds[c + 1])]
        shared = state.state.weights if self._shares_weights(layout) else 0
        steady = {
            "weights": state.state.weights + state.others - shared,
            "gradients": state.state.gradients,
            "masters": state.state.masters,
            "optimizer": state.state.optimizer,
            "tables": max((layer.tables for layer in own), default=0),
            "libraries": _LIBRARY_BYTES if on_cuda else 0,
        }
        kept = {"transient": state.state.transient, "communication": state.communicated}
        backward = {"activations": flight.held, "workspace": flight.within - flight.held, **kept}
        if on_cuda:
            backward["messages"] = round(samples * _in_transit(placement, bounds, layers, stage))
        update = 0 if self._steps_by_kernel else state.state.update
        step = {"update": update, "workspace": state.step, **kept}
        base = sum(steady.values())
        # A save copies tensors to the host as they are.
        extra = {"steady": {}, "backward": backward, "step": step, "save": kept}
        phases = {phase: base + sum(parts.values()) for phase, parts in extra.items()}
        most = max(phases, key=lambda phase: phases[phase])
        parts = {**steady, **extra[most]}
        allocated = phases[most]
        gaps, outside = (round(allocated * _GAPS), self._outside(layout) + shared) if on_cuda else (0, 0)
        return StageMemory(
            stage=stage,
            parts={name: nbytes for name, nbytes in parts.items() if nbytes},
            phases=phases,
            allocated=allocated,
            reserved=allocated + gaps + outside,
            outside=outside,
            capacity=capacity,
        )

    @property
    def _is_rounded(self) -> bool:
        """Whether layers compute on CUDA with weights rounded from masters."""
        return self._model.device == "cuda" and self._model.precision.weights is not None

    @property
    def _steps_by_kernel(self) -> bool:
        config = self._model.config
        adam = config.optimizer is not None and config.optimizer.type.lower() in ("adam", "adamw")
        return adam and self._is_rounded and config.kernels.optimizer_step

    def _shares_weights(self, layout: Layout) -> bool:
        """Whether weights are in memory that replicas map, which PyTorch's allocator doesn't count."""
        return self._steps_by_kernel and bool(layout.zero) and layout.replicas in WORLD_SIZES

    def _outside(self, layout: Layout) -> int:
        """What PyTorch's allocator doesn't hold: the context, and buffers of communication."""
        stages, replicas = layout.stages, layout.replicas or 1
        communicators = communicator_bytes((stages * replicas * layout.slices, replicas, layout.slices))
        config, buffers = self._model.config, 0
        if stages > 1 and config.pipeline.peer_copies:
            buffers += pipeline_channels(stages).num_bytes
        if layout.sequence_parallel and layout.slices > 1 and config.tensor_parallel.peer_copies:
            buffers += shard_channels(layout.slices).num_bytes
        if config.kernels.all_reduce and layout.slices in WORLD_SIZES:
            buffers += all_reduce.staging_bytes()
        if config.kernels.reduce_scatter and layout.zero and replicas in WORLD_SIZES:
            buffers += reduce_scatter.staging_bytes()
        return CONTEXT_BYTES + communicators + buffers

    def _state(self, replays: Replays, bounds: Sequence[int], layout: Layout, stage: int) -> _State:
        """Weights, gradients, masters and optimizer of each rank of a stage."""
        placement, splits = replays.placement, replays.of(stage).splits
        layers = self._model.layers(layout.slices, layout.sequence_parallel)
        own = [(bounds[c], bounds[c + 1]) for c, s in enumerate(placement) if s == stage]
        # Ties reach over the stages: where there are some, all of the partition counts; else which layers there are.
        where: tuple[object, ...] = (stage, tuple(bounds), tuple(placement))
        if not self._has_ties:
            where = tuple(tuple(map(id, layers[start:stop])) for start, stop in own)
        key = (where, layout.slices, layout.sequence_parallel, layout.zero, layout.replicas, splits)
        if key not in self._states:
            infos, early, others = self._parameters(placement, bounds, layout, stage)
            self._states[key] = self._predicted(infos, early if splits else set(), others, layout)
        return self._states[key]

    def _predicted(
        self, infos: Sequence[ParameterInfo], early: set[nn.Parameter], others: int, layout: Layout
    ) -> _State:
        policy, replicas = self._model.policy(layout.zero), layout.replicas or 1
        optimizer = self._optimizer
        moments = moments_of(optimizer)
        state = predict_state(infos, policy, replicas, 2 if moments is None else moments, early)
        total, largest = piece_sizes(infos, policy, replicas)
        step = step_bytes(optimizer, total, largest, 4, self._model.device == "cuda")
        return _State(state, others, communicated_bytes(infos, policy, replicas), step)

    @cached_property
    def _has_ties(self) -> bool:
        """Whether layers share a module or a parameter."""
        modules = [id(layer) for layer in self._model.specs if isinstance(layer, nn.Module)]
        return len(set(modules)) < len(modules) or any(isinstance(s, TiedLayerSpec) for s in self._model.specs)

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer:
        """The configuration's, of nothing; where the script brings its own, Adam in its place."""
        given, one = self._model.config.optimizer, nn.Parameter(torch.empty(1))
        return torch.optim.AdamW([one]) if given is None else build_optimizer(given.type, [one], given.params)

    def _parameters(
        self, placement: Sequence[int], bounds: Sequence[int], layout: Layout, stage: int
    ) -> tuple[list[ParameterInfo], set[nn.Parameter], int]:
        """What a stage trains, as PipelineModule.parameter_infos has it; of these the early ones, see LayerProfile; and bytes
        of what it doesn't train: frozen parameters and buffers.
        """
        # Whatever the micro-batches, and whether layers are recomputed.
        layers = self._model.layers(layout.slices, layout.sequence_parallel)
        infos = self._model.stage_parameters(layout.slices, layout.sequence_parallel, bounds, placement)[stage]
        own = [layers[k] for c, s in enumerate(placement) if s == stage for k in range(bounds[c], bounds[c + 1])]
        early = {parameter for layer in own for name, parameter in layer.parameters if name in layer.early}
        frozen = [parameter for layer in own for _, parameter in layer.frozen]
        return infos, early, sum(map(self._cast_bytes, frozen)) + sum(layer.buffers for layer in own)

    def _cast_bytes(self, parameter: nn.Parameter) -> int:
        dtype = self._model.precision.weights if parameter.is_floating_point() else None
        return parameter.numel() * (dtype or parameter.dtype).itemsize


def _in_transit(placement: Sequence[int], bounds: Sequence[int], layers: Sequence[LayerProfile], stage: int) -> int:
    """The last gradients sent, which the transport keeps until it sends again."""
    sent = [
        layers[bounds[c] - 1].gradient_bytes
        for c, s in enumerate(placement)
        if s == stage and c > 0 and placement[c - 1] != stage
    ]
    return max(sent, default=0)


@dataclass(frozen=True)
class _State:
    """others: of frozen parameters and buffers; communicated: copies of gradients in the dtype that they travel in; step: what
    the optimizer takes for itself.
    """

    state: StateBytes
    others: int
    communicated: int
    step: int
