"""Policy "auto": what the backward of each layer recomputes, so that every stage fits a budget of memory at the least cost.

Each step gives one layer the policy that costs the least time for the memory it saves. Under schedule "auto" the policies are
chosen together with the program: what is recomputed makes room for more micro-batches in flight, and so for a shorter bubble.
Work and memory are those of the layers' traces (costs/model_traces.py), on which the planner's predictions rest too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from math import ceil, inf
from operator import add

import numpy as np
import torch

from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import SELECTIVE, Config, RecomputationPolicy
from parallel3d.costs.devices import compute_seconds, preset_devices
from parallel3d.costs.layer_profile import LayerProfile, recomputed
from parallel3d.costs.model_traces import TracedModel, rows_of
from parallel3d.costs.trained_layer import Sample
from parallel3d.costs.work import Work
from parallel3d.errors import ConfigError
from parallel3d.schedule.auto import Measured, most_held, shortest_program
from parallel3d.schedule.instructions import COMPUTE_OPS, Op, Program, chunks_by_rank
from parallel3d.schedule.search import ALL_RULES, SPLIT_OPS, TIGHT_RULES, Rule
from parallel3d.specs import BuildContext, Layer

_DEVICE = "H100"  # Layers are timed with this device's rates. Only the ratios of the times count.
_NUMBERS = 5  # How many numbers of micro-batches in flight are tried, from 1 to the most.
_SHARE = 0.9  # Budget without memory_budget, as a share of the device's memory; the rest is for other use than tensors.

# (stage, bytes that a micro-batch holds on each chunk until its backward, and with deferred weight gradients) -> most bytes.
InFlight = Callable[[int, Mapping[int, int], Mapping[int, int]], int]
Traces = Mapping[RecomputationPolicy, Sequence[LayerProfile]]


@dataclass(frozen=True)
class Option:
    """A layer under a policy.

    Seconds of a micro-batch: seconds, its recomputation; times, its forward, input gradient and weight gradient. Bytes of a
    micro-batch: saved for its backward, the layer's inputs included; deferred, held for weight gradients after it; within,
    what its backward takes besides.
    """

    policy: RecomputationPolicy
    seconds: float
    saved: int
    deferred: int
    within: int
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)


def trace_policies(layers: Sequence[Layer], sample: Sample, config: Config, context: BuildContext) -> Traces:
    """Return the layers' profiles under each policy. Raises PartitionError for a layer that can't be traced."""
    model = TracedModel(sample.loss_fn, (sample.inputs, sample.labels), config, context.device.type)
    how, rows = (model.add(layers), (context.groups.model.size, context.sequence_parallel)), rows_of(model.sample)
    # Plain layers last: if those with a policy can be traced on fake tensors only, all are.
    cheap, attention = (model.profiles(*how, policy, rows) for policy in SELECTIVE)
    plain = model.profiles(*how, None, rows)
    return {"none": plain, "cheap": cheap, "attention": attention, "full": [recomputed(profile) for profile in plain]}


def options_of(traces: Traces, k: int, splits: bool) -> list[Option]:
    """Return layer k under each policy, "none" first. splits: whether weight gradients are deferred."""
    plain = _seconds_of(traces["none"][k].forward + traces["none"][k].backward)
    options = []
    for policy, profiles in traces.items():
        profile = profiles[k]
        held, every = profile.held(splits), policy == "full"
        own, kept = (0, range(len(profile.inputs))) if every else (held.saved.own, held.saved.inputs)
        saved, within = own + sum(profile.inputs[i] for i in kept), held.backward_peak - own
        if profile.loss is not None:  # the loss is in no recomputed region
            loss = profile.loss.whole
            saved += loss.saved.own + sum(profile.loss.inputs[i] for i in loss.saved.inputs)
            within = max(within, loss.forward_peak, loss.backward_peak - loss.saved.own)
        outputs = [boundary.nbytes for boundary in profile.outputs if boundary.requires_grad]
        later = held.deferred
        deferred = later.own + sum(profile.inputs[i] for i in later.inputs)
        deferred += sum(outputs[i] for i in later.output_gradients)
        seconds = _seconds_of(profile.forward + profile.backward) - plain
        forward, given, weight = profile.forward, profile.input_gradient, profile.weight_gradient
        times = _seconds_of(forward), _seconds_of(given), _seconds_of(weight)
        options.append(Option(policy, seconds, saved, splits * deferred, within, times))
    return options


def _seconds_of(work: Work) -> float:
    devices = preset_devices()
    links = devices.wiring(_DEVICE)
    assert links is not None
    sent = sum(collective.nbytes for collective in work.collectives)
    return compute_seconds(work, devices.device(_DEVICE)) + sent / (links.nvlink or links.pcie).bandwidth


@dataclass(frozen=True)
class Choice:
    """Policies of all layers, and the bytes of each stage, which are more than the budget if nothing more can be saved.

    With schedule "auto" also the seconds of the shortest program that fits, and the times and bytes of the chunks for which it
    was found.
    """

    policies: Sequence[RecomputationPolicy]
    held: Sequence[float]
    makespan: float = inf
    measured: Measured | None = None

    def rank(self, budget: float) -> tuple[bool, float]:
        """Order choices: those that fit by the program's length, then the others by their bytes."""
        return max(self.held) > budget, max(self.held) if max(self.held) > budget else self.makespan


@dataclass(frozen=True)
class LayerOptions:
    """Layers of a pipeline, each with the options of its recomputation, and the bytes that a stage may take.

    - options: of each layer, the first of which saves nothing. bounds, placement: of the chunks in layers, and their stages.
    - state: bytes of each layer that don't depend on micro-batches. budget: bytes of a stage.
    """

    options: Sequence[Sequence[Option]]
    bounds: Sequence[int]
    placement: Sequence[int]
    state: Sequence[int]
    budget: float

    def choose(self, in_flight: InFlight) -> Choice:
        """Return the policies that cost the least."""
        chosen, found = [own[0] for own in self.options], []
        for stage, own in enumerate(chunks_by_rank(self.placement)):
            chunks = {c: range(self.bounds[c], self.bounds[c + 1]) for c in own}
            least = _Stage(self.options, chunks, self.state, partial(in_flight, stage)).fit(self.budget)
            found.append(least.nbytes())
            for k, option in least.chosen.items():
                chosen[k] = option
        return Choice([option.policy for option in chosen], found)

    def choose_with_program(self, num_micro_batches: int, max_in_flight: float) -> Choice:
        """Return the policies whose shortest program that fits is the shortest.

        Candidates are each policy alone, and the cheapest policies for some numbers of micro-batches in flight: the same number
        on all chunks, the same with deferred weight gradients, and numbers in proportion to the time until a micro-batch comes
        back. Further candidates are the cheapest policies for the programs of these. Programs of candidates are searched
        roughly; the program of the chosen policies is searched in full.

        - max_in_flight: the most activations in flight, as a multiple of those of 1F1B on its first rank.
        """
        single = dict.fromkeys(option.policy for own in self.options for option in own)
        candidates: list[Sequence[RecomputationPolicy]] = [
            [policy if any(o.policy == policy for o in own) else own[0].policy for own in self.options]
            for policy in single
        ]
        stages = chunks_by_rank(self.placement)
        most = min(num_micro_batches, max_in_flight * len(stages))
        ways = self.measure(candidates[0], max_in_flight)[0].ways()
        first = sum(ways[c] for c in stages[0]) / len(stages[0])
        ways_of_first = [way / first for way in ways]
        for k, (shares, defers) in product(range(_NUMBERS), (([1.0] * len(ways), True), (ways_of_first, False))):
            number = 1 + k / (_NUMBERS - 1) * (most - 1)
            in_flight: InFlight = partial(_of_each, [max(1.0, number * share) for share in shares], defers)
            candidates.append(self.choose(in_flight).policies)
        weigh = cache(partial(self._weigh, num_micro_batches, max_in_flight, TIGHT_RULES))
        found = []
        for policies in dict.fromkeys(map(tuple, candidates)):
            choice, program = weigh(policies)
            found.append(choice)
            if program is not None:
                found.append(weigh(tuple(self.choose(ProgramBytes(program)).policies))[0])
        best = min(found, key=lambda choice: choice.rank(self.budget))
        return self._weigh(num_micro_batches, max_in_flight, ALL_RULES, best.policies)[0]

    def _weigh(
        self,
        num_micro_batches: int,
        max_in_flight: float,
        rules: Sequence[Rule],
        policies: Sequence[RecomputationPolicy],
    ) -> tuple[Choice, Program | None]:
        """Return these policies with the shortest program that fits, and that program; None if no micro-batch fits."""
        measured, others = self.measure(policies, max_in_flight)
        held: Sequence[float] = [sum(measured.held[c] for c in own) for own in chunks_by_rank(self.placement)]
        makespan, program = inf, None
        if max(map(add, held, others)) <= self.budget:  # one micro-batch fits
            makespan, program = shortest_program(self.placement, num_micro_batches, measured, rules)
            held = most_held(program, measured)
        return Choice(policies, list(map(add, held, others)), makespan, measured), program

    def measure(self, policies: Sequence[RecomputationPolicy], max_in_flight: float) -> tuple[Measured, list[int]]:
        """Return the times and bytes of the chunks, and the bytes of each stage besides those of micro-batches."""
        chosen = [next(o for o in own if o.policy == p) for own, p in zip(self.options, policies, strict=True)]
        chunks = [range(*own) for own in pairwise(self.bounds)]
        times = {op: [sum(chosen[k].times[n] for k in own) for own in chunks] for n, op in enumerate(SPLIT_OPS)}
        held = [max(1, sum(chosen[k].saved for k in own)) for own in chunks]
        deferred = [max(1, sum(chosen[k].deferred for k in own)) for own in chunks]
        layers = [[k for c in own for k in chunks[c]] for own in chunks_by_rank(self.placement)]
        others = [sum(self.state[k] for k in own) + max((chosen[k].within for k in own), default=0) for own in layers]
        measured = Measured.of(
            self.placement,
            lambda i: times[i.op][i.chunk] if i.op in times else 0.0,
            held,
            deferred,
            max_in_flight,
            [self.budget - own for own in others],
        )
        return measured, others


def _of_each(
    numbers: Sequence[float], defers: bool, _: int, saved: Mapping[int, int], deferred: Mapping[int, int]
) -> int:
    return ceil(sum(numbers[c] * max(nbytes, defers * deferred.get(c, 0)) for c, nbytes in saved.items()))


class _Stage:
    """Layers of a stage's chunks, each under one of its options."""

    def __init__(
        self,
        options: Sequence[Sequence[Option]],
        chunks: Mapping[int, range],
        state: Sequence[int],
        in_flight: Callable[[Mapping[int, int], Mapping[int, int]], int],
    ):
        self._chunks, self._in_flight = chunks, in_flight
        self._options = {k: options[k] for own in chunks.values() for k in own}
        self.chosen = {k: own[0] for k, own in self._options.items()}
        self._state = sum(state[k] for k in self.chosen)
        # A chunk counts as often as it has micro-batches in flight.
        self._times = {k: max(1, in_flight({c: 1}, {})) for c, own in chunks.items() for k in own}

    def nbytes(self) -> int:
        """Return the most bytes that the stage takes."""
        saved = {c: sum(self.chosen[k].saved for k in own) for c, own in self._chunks.items()}
        deferred = {c: sum(self.chosen[k].deferred for k in own) for c, own in self._chunks.items()}
        within = max((option.within for option in self.chosen.values()), default=0)
        return self._state + self._in_flight(saved, deferred) + within

    def fit(self, budget: float) -> _Stage:
        """Save memory, the cheapest first, until the stage fits; then give back what turns out to be too much.

        A single policy of all layers is taken where it fits and is cheaper, or where nothing fits and it saves more.
        """
        found = [
            {k: next((o for o in own if o.policy == policy), own[0]) for k, own in self._options.items()}
            for policy in dict.fromkeys(option.policy for own in self._options.values() for option in own)
        ]
        self._save(budget)
        self._take_best([self.chosen, *found], budget)
        # The last step may have saved too much: one of the dearest layers may save less, and others a little more.
        dearest = max((option.seconds for option in self.chosen.values()), default=0.0)
        of_chunks = [next((k for k in own if self.chosen[k].seconds == dearest), None) for own in self._chunks.values()]
        found = [self.chosen]
        for k in (k for k in of_chunks if k is not None):
            for other in (o for o in self._options[k] if o.seconds < dearest):
                self.chosen = {**found[0], k: other}
                self._save(budget, dearest)
                found.append(self.chosen)
        self._take_best(found, budget)
        return self

    def _take_best(self, found: Sequence[dict[int, Option]], budget: float) -> None:
        """Choose the best of some choices, with what it saves too much given back, the dearest first."""
        self.chosen = min(found, key=partial(self._rank, budget))
        for k, option in sorted(self.chosen.items(), key=lambda item: -item[1].seconds):
            for other in sorted(self._options[k], key=lambda other: other.seconds):
                self.chosen[k] = other
                if other is option or self.nbytes() <= budget:
                    break

    def _save(self, budget: float, below: float = inf) -> None:
        """Save memory in the cheapest steps, to options of less than some seconds, until the stage fits or none is left."""
        while self.nbytes() > budget and (moves := [move for move in self._moves() if move[2].seconds < below]):
            _, k, option = min(moves, key=lambda move: move[:2])
            self.chosen[k] = option

    def _rank(self, budget: float, chosen: dict[int, Option]) -> tuple[bool, float]:
        """Order choices: those that fit by their seconds, then the others by their bytes."""
        self.chosen = chosen
        nbytes = self.nbytes()
        return nbytes > budget, nbytes if nbytes > budget else sum(option.seconds for option in chosen.values())

    def _moves(self) -> Iterator[tuple[float, int, Option]]:
        """Yield (seconds for each byte, layer, option) of the options that save more."""
        for k, now in self.chosen.items():
            for option in self._options[k]:
                saved = self._times[k] * (now.saved - option.saved)
                if saved > 0:
                    yield (option.seconds - now.seconds) / saved, k, option


def budget_of(given: float | None, context: BuildContext) -> float:
    """Return the bytes that the tensors of a rank may take, of all ranks the least. given: memory_budget. Collective."""
    device = context.device
    if device.type == "cuda":
        share = _SHARE if given is None else given
        own = share * torch.cuda.mem_get_info(device)[1] if share <= 1 else share * 2**30
    elif given is None:
        raise ConfigError(
            'activation_checkpointing.policy "auto" needs memory_budget in GiB where tensors are on the CPU'
        )
    else:
        own = given * 2**30
    return min(all_gather_object(own, context.groups.control))


class ProgramBytes:
    """Most bytes that the micro-batches in flight of a program hold on a stage, as an InFlight."""

    def __init__(self, program: Program):
        self._program, self._counts = program, cache(self._count)

    def __call__(self, stage: int, saved: Mapping[int, int], deferred: Mapping[int, int]) -> int:
        """Return the bytes. saved, deferred: of a micro-batch on each chunk; chunks that are left out hold none."""
        chunks, counts = self._counts(stage)
        return int((counts @ [own.get(chunk, 0) for own in (saved, deferred) for chunk in chunks]).max())

    def _count(self, stage: int) -> tuple[list[int], np.ndarray[tuple[int, int], np.dtype[np.int64]]]:
        """Return the stage's chunks, and different numbers of micro-batches saved and deferred on each, [times, 2 x chunks]."""
        chunks = [chunk for chunk, own in enumerate(self._program.placement) if own == stage]
        number = {chunk: k for k, chunk in enumerate(chunks)}
        computes = [i for i in self._program.instructions[stage] if i.op in COMPUTE_OPS]
        changes = np.zeros((len(computes), 2, len(chunks)), dtype=np.int64)
        for row, (op, chunk, *_) in enumerate(computes):
            if op is not Op.BACKWARD_WEIGHT:
                changes[row, 0, number[chunk]] = 1 if op is Op.FORWARD else -1
            if op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT):
                changes[row, 1, number[chunk]] = 1 if op is Op.BACKWARD_INPUT else -1
        return chunks, np.unique(changes.reshape(len(computes), -1).cumsum(axis=0), axis=0)


def describe_choice(choice: Choice, bounds: Sequence[int], placement: Sequence[int]) -> str:
    """Format how many layers of each stage have each policy, and the bytes of its tensors."""
    lines = []
    for stage, nbytes in enumerate(choice.held):
        own = [
            choice.policies[k] for c, s in enumerate(placement) if s == stage for k in range(bounds[c], bounds[c + 1])
        ]
        counts = ", ".join(f"{number} {policy}" for policy, number in Counter(own).items())
        lines.append(f"stage {stage}: layers {counts}; {nbytes / 2**30:.4g} GiB")
    return "\n".join(lines)
