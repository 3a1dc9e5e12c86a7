"""Peak memory of each stage of a layout: the sum of what the runtime's components predict of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from parallel3d.comm.environment import CONTEXT_BYTES
from parallel3d.comm.groups import communicator_bytes
from parallel3d.comm.peer.copies import pipeline_channels, shard_channels
from parallel3d.config.layout import Layout
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.kernels.all_reduce import AllReduce
from parallel3d.kernels.reduce_scatter import ReduceScatter
from parallel3d.kernels.workspace import WORLD_SIZES
from parallel3d.optim.optimizers import empty_optimizer, step_bytes
from parallel3d.parameters import ParameterInfo
from parallel3d.pipe.splitting import configured_moments
from parallel3d.planner.predict.chunk_memory import ChunkMemory, MemoryReplay, chunk_memory
from parallel3d.planner.predict.chunks import Chunks
from parallel3d.planner.predict.profile import ModelProfile, frozen_infos
from parallel3d.planner.search.result import StageMemory
from parallel3d.schedule.memory import ChunkBytes
from parallel3d.specs import TiedLayerSpec
from parallel3d.zero.memory import communicated_bytes, piece_sizes, predict_state, unit_sizes
from parallel3d.zero.policy import ZeroPolicy

# cuBLAS's workspace, of Hopper's size (CUBLAS_WORKSPACE_CONFIG's documentation), which PyTorch allocates for each thread that
# multiplies: the script's, and autograd's.
_LIBRARY_BYTES = 2 * 32 * 2**20
# Gaps between blocks: share of the allocator's reserved memory that no tensor uses at the peak.
_GAPS = 0.05


class Room(NamedTuple):
    """Bytes of the smallest device of a stage, and of its host's memory for each rank."""

    device: int
    host: int


class _State(NamedTuple):
    """Model state of a stage's ranks in bytes, by name.

    - steady: always; kept: from the first backward on; step: while the optimizer runs.
    - shared: bytes of weights in memory that replicas map, which PyTorch's allocator doesn't count; host, disk: of what is
      offloaded there.
    """

    steady: dict[str, int]
    kept: dict[str, int]
    step: dict[str, int]
    shared: int
    host: int
    disk: int


class MemoryModel:
    """Predicts the memory of a model's layouts, with what chunks hold found once for all layouts that have the same chunks.

    gaps: bytes of gaps between an allocator's blocks, over those of tensors at the peak. moments: elements of optimizer state
    for each of a parameter.
    """

    def __init__(self, model: ModelProfile):
        self.model, self.gaps = model, _GAPS if model.device == "cuda" else 0.0
        self._chunks: dict[object, ChunkMemory] = {}
        self._states: dict[object, _State] = {}
        given = model.config.optimizer
        # Adam stands in for an optimizer that the script brings.
        self._optimizer = empty_optimizer("AdamW", {}) if given is None else empty_optimizer(given.type, given.params)
        self.moments = configured_moments(model.config)
        adam = given is not None and given.type.lower() in ("adam", "adamw")
        is_rounded = model.device == "cuda" and model.precision.weights is not None
        self._steps_by_kernel = adam and is_rounded and model.config.kernels.optimizer_step
        self._copies = step_bytes(self._optimizer, 1, 1, model.device == "cuda") > 0
        modules = [id(layer) for layer in model.specs if isinstance(layer, nn.Module)]
        self._has_ties = len(set(modules)) < len(modules) or any(isinstance(s, TiedLayerSpec) for s in model.specs)

    def stage(
        self, replay: MemoryReplay, split: Chunks, stage: int, room: Room, samples: float = 1, gathered: int = 0
    ) -> StageMemory:
        """Predict the memory of a stage.

        - replay: of the program of the layout's chunks.
        - samples: estimate micro-batches of this many times the layout's.
        - gathered: most bytes of sharded weights that are gathered at a time.
        """
        on_cuda, layers = self.model.device == "cuda", self.model.layers(split.layout)
        model, chunks = self._state(split, stage, replay.splits(stage)), self.chunks(replay, split, stage)
        within, held = (round(samples * nbytes) for nbytes in replay.peak(stage, chunks))
        # The transport keeps the last tensors sent until it sends again.
        messages = (chunk.held for chunk in chunks.values())
        sent = max(max(one.output, one.input_gradient if one.received else 0) for one in messages)
        tables = max((layers[k].tables for k in split.layers_on(stage)), default=0)
        steady = {**model.steady, "tables": tables, "libraries": _LIBRARY_BYTES if on_cuda else 0}
        kept = {**model.kept, "messages": round(samples * sent) if on_cuda else 0}
        extra = {
            "steady": {},
            "backward": {"activations": held, "workspace": within - held, "gathered": gathered, **kept},
            "step": {**model.step, **model.kept},
            "save": model.kept,  # a save copies tensors to the host as they are
        }
        base = sum(steady.values())
        phases = {phase: base + sum(parts.values()) for phase, parts in extra.items()}
        most = max(phases, key=lambda phase: phases[phase])
        allocated = phases[most]
        gaps, outside = round(allocated * self.gaps), self._outside(split.layout) + model.shared if on_cuda else 0
        return StageMemory(
            stage=stage,
            parts={name: nbytes for name, nbytes in {**steady, **extra[most]}.items() if nbytes},
            phases=phases,
            allocated=allocated,
            reserved=allocated + gaps + outside,
            outside=outside,
            capacity=room.device,
            host=model.host,
            host_capacity=room.host,
            disk=model.disk,
        )

    def of_layers(self, layout: Layout) -> tuple[list[float], list[float]]:
        """Return about the bytes of each layer: of its model state, and of what it saves of a micro-batch for its backward."""
        layers = self.model.layers(layout)
        alone = (Chunks(layout, (0,), (k, k + 1)) for k in range(len(layers)))
        each = [self._chunk(one, 0, splits=False).held.saved for one in alone]
        # A single layer holds its output, which the next layer may not need.
        share = self.held(layout)[0] / max(1, sum(each))
        policy, moments = self.model.policy(layout.zero), self.moments or 2
        alike = {id(layer): [ParameterInfo("", p, (0,)) for _, p in layer.parameters] for layer in layers}
        state = {key: predict_state(own, policy, layout.replicas, moments).steady for key, own in alike.items()}
        return [float(state[id(layer)]) for layer in layers], [share * nbytes for nbytes in each]

    def held(self, layout: Layout) -> tuple[int, int]:
        """Return the bytes of a micro-batch in all layers as one chunk: saved for its backward, deferred by a split one."""
        every = Chunks.one(layout, len(self.model.specs))
        whole, split = (self._chunk(every, 0, splits) for splits in (False, True))
        return whole.held.saved, split.held.deferred

    def chunks(self, replay: MemoryReplay, split: Chunks, stage: int) -> dict[int, ChunkMemory]:
        """Return the memory of a micro-batch on each chunk of a stage."""
        splits = replay.splits(stage)
        return {chunk: self._chunk(split, chunk, splits) for chunk in split.on_stage(stage)}

    def chunk_bytes(self, split: Chunks) -> list[ChunkBytes]:
        """Return the bytes of a micro-batch on each chunk, with weight gradients deferred."""
        return [self._chunk(split, chunk, splits=True).held for chunk in range(len(split.placement))]

    def _chunk(self, split: Chunks, chunk: int, splits: bool) -> ChunkMemory:
        layout, placement = split.layout, split.placement
        start, stop = split.bounds[chunk], split.bounds[chunk + 1]
        is_local = chunk > 0 and placement[chunk - 1] == placement[chunk]
        sends = chunk + 1 < len(placement) and placement[chunk + 1] != placement[chunk]
        layers, interval = self.model.layers(layout), layout.recompute
        # The same layers after an equal one hold the same, wherever they are. The profile keeps them, so ids stay valid.
        before = layers[start - 1] if start > 0 else None
        key = (layout.micro_batch, interval, is_local, sends, splits, id(before), *map(id, layers[start:stop]))
        if key not in self._chunks:
            loaded, labels = self.model.loaded(layout.micro_batch)
            inputs = [(nbytes, 0) for nbytes in loaded]
            if before is not None:
                inputs = [(b.nbytes, b.nbytes * b.requires_grad) for b in before.outputs]
            self._chunks[key] = chunk_memory(
                layers[start:stop],
                inputs,
                labels if layers[stop - 1].loss is not None else (),
                "loader" if before is None else "local" if is_local else "message",
                splits,
                interval,
                sends,
            )
        return self._chunks[key]

    def _outside(self, layout: Layout) -> int:
        """Return the bytes outside of PyTorch's allocator: CUDA's context, and buffers of communication."""
        stages, replicas = layout.stages, layout.replicas
        communicators = communicator_bytes((layout.world_size, replicas, layout.tensor_ranks))
        config, buffers = self.model.config, 0
        if stages > 1 and config.pipeline.peer_copies:
            buffers += pipeline_channels(stages).num_bytes
        if layout.sequence_parallel and layout.tensor_ranks > 1 and config.tensor_parallel.peer_copies:
            buffers += shard_channels(layout.tensor_ranks).num_bytes
        if config.kernels.all_reduce and layout.tensor_ranks in WORLD_SIZES:
            buffers += AllReduce.staging_bytes()
        if config.kernels.reduce_scatter and layout.zero and replicas in WORLD_SIZES:
            buffers += ReduceScatter.staging_bytes()
        return CONTEXT_BYTES + communicators + buffers

    def _state(self, split: Chunks, stage: int, splits: bool) -> _State:
        """Predict the model state of each rank of a stage: what it trains, and frozen parameters and buffers.

        splits: whether the stage defers weight gradients.
        """
        model, layout = self.model, split.layout
        # The same for any micro-batch, and whether layers are recomputed or not.
        layers = model.layers(layout.model_copy(update={"recompute": 0}), 1)
        owned = split.layers_on(stage)
        own = [layers[k] for k in owned]
        # Ties connect stages: if there are some, all of the partition counts; else which layers the stage has.
        chunks = tuple(len(split.span(chunk)) for chunk in split.on_stage(stage))
        ties = stage, split.bounds, split.placement
        where: tuple[object, ...] = ties if self._has_ties else (chunks, *map(id, own))
        key = (where, layout.tensor_ranks, layout.sequence_parallel, layout.zero, layout.replicas, splits)
        if key not in self._states:
            infos = model.stage_parameters(split)[stage]
            replicas, frozen = layout.replicas, frozen_infos(layers, owned)
            policy = model.policy(layout.zero, replicas, [*infos, *frozen])
            early = {parameter for layer in own for name, parameter in layer.parameters if name in layer.early}
            others = self._untrained(own, frozen, policy, replicas)
            state = predict_state(infos, policy, replicas, self.moments, early if splits else set(), frozen)
            shared = state.weights if self._steps_by_kernel and layout.zero and replicas in WORLD_SIZES else 0
            total, largest = piece_sizes(infos, policy, replicas) if self._copies else (0, 0)
            if policy.offload is not None:
                total = largest = 0 if policy.offload.on_cpu else min(total, policy.offload.window)
            self._states[key] = _State(
                steady={
                    "weights": state.weights - shared + others,
                    "gradients": state.gradients,
                    "masters": state.masters,
                    "optimizer": state.optimizer,
                },
                kept={
                    "transient": state.transient,
                    "communication": communicated_bytes(infos, policy, replicas),
                },
                step={
                    "window": state.window,
                    "update": 0 if self._steps_by_kernel else state.update,
                    "workspace": step_bytes(self._optimizer, total, largest, model.device == "cuda"),
                },
                shared=shared,
                host=state.host,
                disk=state.disk,
            )
        return self._states[key]

    def _untrained(
        self, layers: Sequence[LayerProfile], frozen: Sequence[ParameterInfo], policy: ZeroPolicy, replicas: int
    ) -> int:
        """Return the bytes of a rank's frozen parameters on its device, of buffers, and of casts of weights."""
        kept, cast = [info.parameter for info in frozen], self.model.precision.weights
        size = sum(p.numel() * (cast if cast and p.is_floating_point() else p.dtype).itemsize for p in kept)
        nbytes = sum(layer.buffers for layer in layers) + size // (replicas if policy.stage == 3 else 1)
        nbytes += sum(layer.casts for layer in layers) if policy.stage < 3 else 0  # gathered weights' aren't kept
        return nbytes - sum(unit.host for unit in unit_sizes([], frozen, policy, replicas).values())
