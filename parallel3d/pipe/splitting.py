"""Split of the list of layers over chunks, by the costs of layers and the bytes that a stage may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from statistics import median
from typing import Any

from torch import nn

from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import Config, PipelineConfig, RecomputationPolicy, batch_sizes, load_sections
from parallel3d.config.load import Source
from parallel3d.config.section import ReadOnlyMapping
from parallel3d.costs.layer_profile import LayerProfile
from parallel3d.costs.model_traces import trace_layers
from parallel3d.costs.profilers import TimeProfiler
from parallel3d.costs.trained_layer import Sample
from parallel3d.errors import ConfigError, PartitionError, ScheduleError
from parallel3d.logs import logger
from parallel3d.optim.optimizers import empty_optimizer
from parallel3d.optim.precision import make_precision
from parallel3d.parameters import ParameterInfo
from parallel3d.partition import MEASURED, Partition, StageLimit, resolve_partition
from parallel3d.pipe.calls import Policies, policy_rule
from parallel3d.pipe.policies import (
    Choice,
    LayerOptions,
    ProgramBytes,
    budget_of,
    describe_choice,
    options_of,
    trace_policies,
)
from parallel3d.pipe.settings import BuildSettings
from parallel3d.pipe.ties import TieIndex, given_parameters, refuse_untied_sharing
from parallel3d.rng import generator_states, set_generator_states
from parallel3d.schedule.auto import Measured
from parallel3d.schedule.builders import DEFAULT_MAX_IN_FLIGHT, build, placement_of
from parallel3d.schedule.instructions import Instruction, Op
from parallel3d.schedule.memory import most_in_flight
from parallel3d.schedule.search import Memory, search
from parallel3d.schedule.timing import decoder_cost, simulate
from parallel3d.specs import BuildContext, Layer, LayerSpec, LossFunction, TiedLayerSpec, blueprint, layer_name
from parallel3d.zero.memory import moments_of, predict_state
from parallel3d.zero.policy import make_policy

# The simulated step has this many micro-batches per stage: the real number is not known when the module is built.
_MICRO_BATCHES_PER_STAGE = 4
# Sections of the configuration that say in which precision layers are trained.
_PRECISION = ("fp16", "bf16", "torch_autocast", "amp")
_INSTEAD = "use partition method 'profile' or 'parameters'"
_MORE_THAN_BUDGET = (
    "that is more than the budget, though no choice of policies takes less; raise activation_checkpointing.memory_budget, or "
    "use more stages, more tensor-parallel ranks or smaller micro-batches"
)


def make_sample(inputs: Any, labels: Any, loss_fn: LossFunction, config: Source) -> Sample | None:
    """Return the sample of PipelineModule's arguments, in the configuration's precision; None without inputs."""
    if inputs is None:
        return None
    return Sample(inputs, labels, loss_fn, make_precision(load_sections(config, *_PRECISION)))


class LayerSplitter:
    """Splits a list of layers over the chunks of `placement`. Collective where costs are measured."""

    def __init__(
        self,
        layers: Sequence[Layer],
        settings: BuildSettings,
        placement: Sequence[int],
        context: BuildContext,
        sample: Sample | None,
    ):
        self._layers, self._settings, self._placement = layers, settings, placement
        self._context, self._sample = context, sample
        self._ties = [layer.key if isinstance(layer, TiedLayerSpec) else None for layer in layers]
        self._policies: list[RecomputationPolicy] = []
        repeats, names = settings.activation_checkpoint_interval > 0, [layer_name(layer) for layer in layers]
        policies = policy_rule(settings.checkpointable_layers, settings.checkpoint_policy, names)
        self._parameters: list[list[nn.Parameter]] = []
        self._given: list[dict[str, nn.Parameter]] = []
        built: list[tuple[LayerSpec, nn.Module]] = []  # one blueprint for all specs that build equal modules
        for k, layer in enumerate(layers):
            spec = layer if isinstance(layer, LayerSpec) else None
            module = next((known for other, known in built if spec is not None and spec.builds_like(other)), None)
            if module is None:
                module = blueprint(layer, context, k)
                built += [] if spec is None else [(spec, module)]
            self._given.append(given_parameters(layer, module))
            self._parameters.append([p if module is layer else _on_meta(p) for p in module.parameters()])
            shown = module if isinstance(layer, (LayerSpec, nn.Module)) else layer
            self._policies.append(policies(k, shown) if repeats else "none")
        self._recomputed = [policy == "full" for policy in self._policies]

    def split(self, config: Source) -> tuple[Partition, Policies, Measured | None]:
        """Return the partition that the settings ask for, and the layers' policies of recomputation.

        Where these are "auto", and schedule "auto" chooses the program, also what is predicted of its chunks under them.

        config: sections besides `pipeline` are read only for max_stage_bytes, and for policy "auto". Raises PartitionError, and
        ConfigError if policies are "auto" and there is no sample.
        """
        settings = self._settings
        shape = settings.num_stages, settings.num_chunks, settings.placement
        partition = resolve_partition(
            settings.partition_method,
            self._costs(config),
            [layer_name(layer) for layer in self._layers],
            self._ties,
            len(self._placement),
            what=f"{settings.num_stages} stages x {settings.num_chunks} chunks",
            placement=self._placement,
            limit=None if settings.max_stage_bytes is None else self._limit(settings.max_stage_bytes, config),
            step=partial(step_length, load_sections(config, "pipeline").pipeline, *shape),
        )
        refuse_untied_sharing(self._given, TieIndex(self._layers, partition.part_of), partition.part_of)
        return partition, *self._choose_policies(partition, config)

    def _choose_policies(self, partition: Partition, source: Source) -> tuple[Policies, Measured | None]:
        """Return the settings' policies; if some are "auto", a policy for each layer, by its index. See split. Collective."""
        if "auto" not in self._policies:
            return self._settings.checkpoint_policy, None
        config = load_sections(source)
        if self._sample is None:
            raise ConfigError(
                'activation_checkpointing.policy "auto" traces the layers on a sample, and there is none; pass sample_input= '
                "(the inputs of one micro-batch) to PipelineModule, on every rank, or use another policy"
            )
        budget = budget_of(config.activation_checkpointing.memory_budget, self._context)
        pipeline, number, first = config.pipeline, self._num_micro_batches(config), self._context.groups.rank == 0
        program = None if pipeline.schedule == "auto" else self._settings.program(pipeline, number)
        splits = program is None or any(i.op is Op.BACKWARD_WEIGHT for own in program.instructions for i in own)
        traces = trace_policies(self._layers, self._sample, config, self._context)
        options = [options_of(traces, k, splits) for k in range(len(self._layers))]
        options = [[o for o in own if p in ("auto", o.policy)] for own, p in zip(options, self._policies, strict=True)]
        bounds, placement = partition.bounds, self._placement
        able = LayerOptions(options, bounds, placement, self._state(config), budget)
        choice: Choice | None = None
        if program is not None:
            choice = able.choose(ProgramBytes(program))
        elif first:
            number = min(number, _MICRO_BATCHES_PER_STAGE * self._settings.num_stages)
            most = pipeline.max_in_flight or DEFAULT_MAX_IN_FLIGHT
            choice = able.choose_with_program(number, most)
        choice = all_gather_object(choice, self._context.groups.control)[0]
        assert choice is not None
        if first:
            what = f"recomputation for {budget / 2**30:.4g} GiB:\n{describe_choice(choice, bounds, placement)}"
            if max(choice.held) <= budget:
                logger.info("%s", what)
            else:
                logger.warning("%s\n%s", what, _MORE_THAN_BUDGET)
        chosen: dict[str, RecomputationPolicy] = {
            str(k): policy for k, policy in enumerate(choice.policies) if policy != "none"
        }
        return ReadOnlyMapping(chosen | {"default": "none"}), choice.measured

    def _costs(self, source: Source) -> list[float]:
        method = self._settings.partition_method
        kind = method.lower() if isinstance(method, str) else None
        if kind not in MEASURED or len(self._placement) == 1:  # a single chunk needs no sample
            return [float(sum(p.numel() for p in parameters)) for parameters in self._parameters]
        if self._sample is None:
            raise PartitionError(
                f"partition method {method!r} runs the layers on a sample, and there is none; pass sample_input= (the inputs "
                "of one micro-batch) to PipelineModule, on every rank, or use 'parameters'"
            )
        sample, context = self._sample, self._context
        if kind == "flops":
            costs = self._agreed(lambda: [_flops(profile) for profile in self._traced(source, sample)])
        else:
            costs = self._agreed(lambda: TimeProfiler(sample, context).measure_all(self._layers))
        return [sum(cost) + cost[0] * recomputed for cost, recomputed in zip(costs, self._recomputed, strict=True)]

    def _traced(self, source: Source, sample: Sample) -> Sequence[LayerProfile]:
        """Return the profiles of this rank's layers, from traces without memory; layers are not compiled."""
        given = load_sections(source, *_PRECISION)
        config = Config(**{name: getattr(given, name) for name in _PRECISION})
        return trace_layers(self._layers, sample, config, self._context, _INSTEAD)

    def _agreed(self, find: Callable[[], Sequence[Sequence[float]]]) -> list[tuple[float, ...]]:
        """Return the medians of what all ranks find for each layer; the random generators keep their states.

        Raises PartitionError on all ranks if it is raised on one. Collective.
        """
        states = generator_states(self._context.device)
        own: Sequence[Sequence[float]] | str
        try:
            own = find()
        except PartitionError as error:
            own = str(error)
        finally:
            set_generator_states(states, self._context.device)
        everyone = all_gather_object(own, self._context.groups.control)
        for rank, answer in enumerate(everyone):
            if isinstance(answer, str):
                raise PartitionError(answer if len(everyone) == 1 else f"rank {rank}: {answer}")
        return [tuple(map(median, zip(*of_ranks, strict=True))) for of_ranks in zip(*everyone, strict=True)]

    # Bytes of a stage, for pipeline.max_stage_bytes

    def _limit(self, limit: int, source: Source) -> StageLimit:
        config = load_sections(source)
        activations, sample = [0.0] * len(self._layers), self._sample
        if sample is not None:
            held = self._agreed(lambda: [(p.saved_bytes, sum(p.inputs)) for p in self._traced(config, sample)])
            activations = [own[recomputed] for own, recomputed in zip(held, self._recomputed, strict=True)]
        return StageLimit(limit, self._state(config), activations, self._in_flight(config), self._ties)

    def _state(self, config: Config) -> list[int]:
        """Return the bytes of each layer's weights, gradients, masters and optimizer state, and of the update."""
        infos = [[ParameterInfo("", p, (0,)) for p in own if p.requires_grad] for own in self._parameters]
        every = [info for own in infos for info in own]
        policy = make_policy(config, every, self._context.device, make_precision(config).weights)
        # "auto" depends on a stage's size, which is not known yet: count the larger case, without these reductions.
        chosen = config.zero_optimization.reduce_per_micro_batch is True
        policy = replace(policy, reduce_per_micro_batch=policy.stage >= 2 and chosen)
        replicas, moments = self._context.groups.data.size, configured_moments(config)
        frozen = [sum(p.nbytes for p in own if not p.requires_grad) for own in self._parameters]
        state = [predict_state(own, policy, replicas, moments) for own in infos]
        return [s.steady + s.update + other for s, other in zip(state, frozen, strict=True)]

    def _in_flight(self, config: Config) -> list[int]:
        """Return, for each chunk, the largest number of micro-batches whose activations it holds in the configured program."""
        settings, given, num_micro_batches = self._settings, config.pipeline, self._num_micro_batches(config)
        if given.schedule == "auto":
            # No planned program exceeds this number on a stage, and so none does on a single chunk.
            most = ceil((given.max_in_flight or DEFAULT_MAX_IN_FLIGHT) * settings.num_stages)
            return [min(most, num_micro_batches)] * len(self._placement)
        return most_in_flight(settings.program(given, num_micro_batches))

    def _num_micro_batches(self, config: Config) -> int:
        stages, groups = self._settings.num_stages, self._context.groups
        return batch_sizes(config, pipe=stages, data=groups.data.size, model=groups.model.size).num_micro_batches


def step_length(given: PipelineConfig, num_stages: int, num_chunks: int, kind: str, costs: Sequence[float]) -> float:
    """Simulate a step of the configured schedule with chunks of these costs; return its length in the costs' unit.

    A chunk's cost is divided over forward and backward as in a decoder. If the configured schedule doesn't support this
    number of chunks, the one that "auto" would find is simulated, because `initialize` may be given another schedule.

    kind: the placement, "loop" or "v".
    """
    placement = placement_of(kind, num_stages, num_chunks)
    whole = sum(decoder_cost(Instruction(op, 0, 0)) for op in (Op.FORWARD, Op.BACKWARD))
    num_micro_batches = _MICRO_BATCHES_PER_STAGE * num_stages

    def cost(i: Instruction) -> float:
        return decoder_cost(i) / whole * costs[i.chunk]

    try:
        program = build(given.schedule, num_stages, num_micro_batches, num_chunks, kind, given.max_in_flight)
    except ScheduleError:
        most = (given.max_in_flight or DEFAULT_MAX_IN_FLIGHT) * len(placement)
        memory = Memory.of_activations(placement, max(most, num_chunks))
        program = search("auto", placement, num_micro_batches, memory, cost)
    return simulate(program, cost).makespan


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter without its contents, so that a blueprint built with memory is not kept."""
    return parameter if parameter.is_meta else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def configured_moments(config: Config) -> int:
    """Return the elements of optimizer state per parameter element; 2, as for Adam, if the optimizer is not known."""
    if config.optimizer is None:
        return 2
    moments = moments_of(empty_optimizer(config.optimizer.type, config.optimizer.params))
    return 2 if moments is None else moments


def _flops(profile: LayerProfile) -> tuple[float, float]:
    """Return the costs of a forward and of a backward, in FLOPs."""
    return profile.forward.flops_and_bytes, profile.backward.flops_and_bytes
