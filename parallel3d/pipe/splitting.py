"""The layers of each chunk: what layers cost by the partition method, and what stages may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from statistics import median
from typing import Any

import torch
from torch import nn

from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import Config, PipelineConfig, load_layout, load_precision, read, resolve_batch
from parallel3d.config.load import Source
from parallel3d.costs.layer_costs import LayerCost, Ruler, Sample
from parallel3d.costs.profiling import Profiler
from parallel3d.costs.roofline import Tracer
from parallel3d.errors import PartitionError, ScheduleError
from parallel3d.optim import build_optimizer
from parallel3d.optim.precision import make_precision
from parallel3d.parameters import ParameterInfo
from parallel3d.partition import MEASURED, Partition, StageLimit, resolve_partition
from parallel3d.pipe.settings import BuildSettings
from parallel3d.rng import generator_states, set_generator_states
from parallel3d.schedule.builders import build, placement_of
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.schedule.memory import ChunkBytes, bytes_in_flight
from parallel3d.schedule.search import Memory, search
from parallel3d.schedule.simulate import decoder_cost, simulate
from parallel3d.schedule.zero_bubble import DEFAULT_MAX_IN_FLIGHT
from parallel3d.specs import BuildContext, Layer, LayerSpec, TiedLayerSpec, blueprint, layer_name
from parallel3d.zero.memory import moments_of, predict_state
from parallel3d.zero.policy import ZeroPolicy, make_policy

_MICRO_BATCHES_A_STAGE = 4

LossFunction = Callable[[Any, Any], Any] | LayerSpec | None


def make_sample(inputs: Any, labels: Any, loss_fn: LossFunction, config: Source) -> Sample | None:
    """The sample of PipelineModule's arguments, in the configuration's precision; None without inputs."""
    if inputs is None:
        return None
    return Sample(inputs, labels, loss_fn, make_precision(load_precision(config)))


class Splitter:
    """Splits a list of layers over the chunks of `placement`. Collective where costs are measured.

    recomputes: (place in the list, layer) -> whether its activations are recomputed; a layer's cost is then a forward more.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        settings: BuildSettings,
        placement: Sequence[int],
        context: BuildContext,
        sample: Sample | None,
        recomputes: Callable[[int, Any], bool],
    ):
        self._layers, self._settings, self._placement = layers, settings, placement
        self._context, self._sample = context, sample
        self._names = [layer_name(layer) for layer in layers]
        self._ties = [layer.key if isinstance(layer, TiedLayerSpec) else None for layer in layers]
        self._recomputed: list[bool] = []
        self._parameters: list[list[nn.Parameter]] = []
        for k, layer in enumerate(layers):
            module = blueprint(layer, context)
            self._parameters.append([p if module is layer else _weightless(p) for p in module.parameters()])
            seen = layer if not isinstance(layer, (LayerSpec, nn.Module)) else module
            self._recomputed.append(settings.activation_checkpoint_interval > 0 and recomputes(k, seen))

    def split(self, config: Source) -> Partition:
        """The partition that the settings ask for. Raises PartitionError; config: read whole for max_stage_bytes alone."""
        settings = self._settings
        return resolve_partition(
            settings.partition_method,
            self._costs(),
            self._names,
            self._ties,
            len(self._placement),
            what=f"{settings.num_stages} stages x {settings.num_chunks} chunks",
            placement=self._placement,
            limit=None if settings.max_stage_bytes is None else self._limit(settings.max_stage_bytes, config),
            step=partial(
                step_length,
                load_layout(config).pipeline,
                settings.num_stages,
                settings.num_chunks,
                settings.placement,
            ),
        )

    def _costs(self) -> list[float]:
        method = self._settings.partition_method
        kind = method.lower() if isinstance(method, str) else None
        if kind not in MEASURED or len(self._placement) == 1:  # nothing to split needs no sample
            return [float(sum(p.numel() for p in parameters)) for parameters in self._parameters]
        if self._sample is None:
            raise PartitionError(
                f"partition method {method!r} runs the layers on a sample, and there is none; pass sample_input= (the inputs "
                "of one micro-batch) to PipelineModule, on every rank, or use 'parameters'"
            )
        ruler = (Tracer if kind == "flops" else Profiler)(self._sample, self._context)
        costs = self._found(ruler)
        return [
            cost.backward + cost.forward * (2 if recomputed else 1)
            for cost, recomputed in zip(costs, self._recomputed, strict=True)
        ]

    def _found(self, ruler: Ruler) -> list[LayerCost]:
        """The median over all ranks, so that all split alike; the generators go on as if no layer had run."""
        states = generator_states(self._context.device)
        found: list[LayerCost] | str
        try:
            found = ruler.measure_all(self._layers)
        except PartitionError as error:
            found = str(error)
        finally:
            set_generator_states(states, self._context.device)
        everyone = all_gather_object(found, self._context.groups.control)
        for rank, answer in enumerate(everyone):
            if isinstance(answer, str):
                raise PartitionError(answer if len(everyone) == 1 else f"rank {rank}: {answer}")
        return [_median(of_ranks) for of_ranks in zip(*everyone, strict=True)]

    def _limit(self, limit: int, source: Source) -> StageLimit:
        config = source if isinstance(source, Config) else read(source).config
        costs = [LayerCost(0.0, 0.0)] * len(self._layers)
        if self._sample is not None:
            costs = self._found(Tracer(self._sample, self._context))
        activations = [c.given if r else c.saved for c, r in zip(costs, self._recomputed, strict=True)]
        if self._context.sequence_parallel:  # all that is held is shared; otherwise count it as if no rank shared any
            activations = [held // self._context.groups.model.size for held in activations]
        return StageLimit(limit, self._state(config), activations, self._in_flight(config), self._ties)

    def _state(self, config: Config) -> list[int]:
        """Bytes of each layer's weights, gradients, masters and optimizer state, between and during updates."""
        replicas, moments = self._context.groups.data.size, _moments(config)
        infos = [[ParameterInfo("", p, (0,)) for p in own if p.requires_grad] for own in self._parameters]
        policy = self._policy(config, infos)
        frozen = [sum(p.nbytes for p in own if not p.requires_grad) for own in self._parameters]
        state = [predict_state(own, policy, replicas, moments) for own in infos]
        return [s.steady + s.update + other for s, other in zip(state, frozen, strict=True)]

    def _policy(self, config: Config, infos: Sequence[Sequence[ParameterInfo]]) -> ZeroPolicy:
        weights = make_precision(config).weights
        policy = make_policy(config, [i for own in infos for i in own], self._context.device, weights)
        # "auto" looks at a stage's size, which isn't known yet: count what takes more.
        chosen = config.zero_optimization.reduce_per_micro_batch is True
        return replace(policy, reduce_per_micro_batch=policy.stage == 2 and chosen)

    def _in_flight(self, config: Config) -> list[int]:
        """The most micro-batches whose activations each chunk holds at once, by the program that will run."""
        settings, groups = self._settings, self._context.groups
        sizes = resolve_batch(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            pipe=settings.num_stages,
            data=groups.data.size,
            model=groups.model.size,
        )
        given = config.pipeline
        if (
            given.schedule == "auto"
        ):  # whichever it plans, this bounds what a stage holds, a share for each of its chunks
            most = ceil((given.max_in_flight or DEFAULT_MAX_IN_FLIGHT) * settings.num_stages)
            return [min(most, sizes.num_micro_batches)] * len(self._placement)
        program = build(
            given.schedule,
            settings.num_stages,
            sizes.num_micro_batches,
            settings.num_chunks,
            settings.placement,
            given.max_in_flight,
        )
        one = ChunkBytes(saved=1, deferred=1)
        return [max(bytes_in_flight(program, rank, {c: one})) for c, rank in enumerate(self._placement)]


def step_length(given: PipelineConfig, num_stages: int, num_chunks: int, kind: str, costs: Sequence[float]) -> float:
    """How long a step takes with chunks of these costs, simulated, by the configured schedule.

    By what "auto" would find where that isn't one for so many chunks: another may be given to initialize. kind: of
    placement. Of four micro-batches a stage, for how many there will be isn't known yet; a chunk's cost is divided as a
    decoder's is.
    """
    placement = placement_of(kind, num_stages, num_chunks)
    whole = sum(decoder_cost(Instruction(op, 0, 0)) for op in (Op.FORWARD, Op.BACKWARD))
    num_micro_batches = _MICRO_BATCHES_A_STAGE * num_stages

    def cost(i: Instruction) -> float:
        return decoder_cost(i) / whole * costs[i.chunk]

    try:
        program = build(given.schedule, num_stages, num_micro_batches, num_chunks, kind, given.max_in_flight)
    except ScheduleError:
        most = (given.max_in_flight or DEFAULT_MAX_IN_FLIGHT) * len(placement)
        memory = Memory.of_activations(placement, max(most, num_chunks))
        program = search("auto", placement, num_micro_batches, memory, cost)
    return simulate(program, cost).makespan


def _weightless(parameter: nn.Parameter) -> nn.Parameter:
    """Its shape and dtype alone: what a blueprint had to be built with isn't kept."""
    return parameter if parameter.is_meta else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _moments(config: Config) -> int:
    """Elements of optimizer state an element; Adam's two for an optimizer of the script's own or of an unknown kind."""
    if config.optimizer is None:
        return 2
    one = nn.Parameter(torch.empty(1))
    moments = moments_of(build_optimizer(config.optimizer.type, [one], config.optimizer.params))
    return 2 if moments is None else moments


def _median(costs: Sequence[LayerCost]) -> LayerCost:
    return replace(costs[0], forward=median(c.forward for c in costs), backward=median(c.backward for c in costs))
