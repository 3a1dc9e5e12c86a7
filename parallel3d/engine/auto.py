"""Schedule "auto": measures the first steps, plans a program from them, and runs it from then on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import median

import torch
from pydantic import ValidationError

from parallel3d.atomic_write import atomic_write
from parallel3d.comm.collectives import all_gather_object
from parallel3d.config import PipelineConfig
from parallel3d.errors import ConfigError, ScheduleError
from parallel3d.logs import logger
from parallel3d.monitor.memory import MemoryProfile
from parallel3d.monitor.records import StepRecord, instruction_times, time_for_host, traffic_times
from parallel3d.monitor.steps import Profile, StepMonitor
from parallel3d.pipe.module import PipelineModule
from parallel3d.pipe.programs import Programs
from parallel3d.schedule.auto import Measured, Plan, make_plan
from parallel3d.schedule.builders import DEFAULT_MAX_IN_FLIGHT
from parallel3d.schedule.instructions import SEND_OPS
from parallel3d.schedule.memory import learn_chunks
from parallel3d.schedule.traffic import Traffic, whole_backwards

# Profile to record in each of the first steps. Steps with None load kernels and compile layers.
_STEPS: tuple[Profile | None, ...] = (None, None, "memory", None, "time", "time", "time", "time")
# From this step on, every other micro-batch's backward is whole. Whole and split backwards are timed in the same steps: a
# device's clock rate falls with its load, so steps of one kind each would be timed at different clock rates.
_MIXED_FROM = 3
# Usable share of the device's memory: the allocator leaves gaps between blocks.
_USABLE = 0.9


class AutoSchedule:
    """Chooses the program of an engine with schedule "auto".

    Call `wants` before a training batch and `learn` after it, on every rank. If the plan's file exists, nothing is measured.
    Raises ConfigError for a file without a plan for this pipeline.
    """

    def __init__(self, model: PipelineModule, programs: Programs, config: PipelineConfig, monitor: StepMonitor):
        self._model, self._programs, self._config, self._monitor = model, programs, config, monitor
        self._done = 0
        self._recorded: list[list[StepRecord]] = []
        self._memory: MemoryProfile | None = None
        if (stored := self._stored_plan()) is not None:
            self._adopt(stored, "read from " + str(config.plan))
            self._done = len(_STEPS)

    @property
    def plan(self) -> Plan | None:
        """The plan, made or read from the file; None while steps are measured."""
        return self._programs.plan if self._done == len(_STEPS) else None

    def wants(self) -> Profile | None:
        """Return the profile to record in the next training batch, if any."""
        return _STEPS[self._done] if self._done < len(_STEPS) else None

    def learn(self, num_micro_batches: int, full: int, memory: MemoryProfile | None, can_capture: bool) -> None:
        """Use the measurements of a training batch, and plan when there are enough. Collective.

        - num_micro_batches: the number in this batch. A batch with fewer than `full` is not used.
        - full: the configured number of micro-batches; when it changes, measuring starts over.
        - memory: the batch's memory profile, if one was recorded.
        - can_capture: whether this rank can capture CUDA graphs.
        """
        plan = self._programs.plan
        if self._done == len(_STEPS) or plan is None:
            return
        if plan.num_micro_batches != full:
            self._done, self._recorded = 0, []
            self._programs.replan(None)
            self._programs.get(full, training=True)  # sets the first plan
        if num_micro_batches != plan.num_micro_batches or plan.num_micro_batches != full:
            return
        profile = _STEPS[self._done]
        if profile == "time":
            self._recorded += self._monitor.records(most=1)[1]
        elif profile == "memory":
            self._memory = memory
        self._done += 1
        if self._done == len(_STEPS):
            self._make(plan.num_micro_batches, can_capture)
        elif self._done == _MIXED_FROM:
            m = plan.num_micro_batches
            program = whole_backwards(plan.program(m), range(1, m, 2))
            lists = tuple(tuple(map(str, rank)) for rank in program.instructions)
            self._programs.replan(plan.model_copy(update={"instructions": lists}))

    def _make(self, num_micro_batches: int, can_capture: bool) -> None:
        """Make the plan on rank 0 and run it on all ranks. If its file can't be written, only a warning is given."""
        measured, first = self._measured(), self._model.groups.rank == 0
        made = make_plan(self._model.placement, num_micro_batches, measured) if first else None
        plans, able = zip(*all_gather_object((made, can_capture), self._model.groups.control), strict=True)
        waits = max(time_for_host(records) for records in zip(*self._recorded, strict=True)) if all(able) else 0.0
        plan = plans[0].model_copy(update={"waits_for_host": waits})
        self._adopt(plan, "planned")
        self._recorded = []
        self._memory = None
        if first and self._config.plan is not None:
            try:
                atomic_write(Path(self._config.plan), plan.model_dump_json(indent=1) + "\n")
            except OSError as error:
                warnings.warn(
                    f"pipeline.plan '{self._config.plan}' could not be written: {error}; the run continues with the plan",
                    stacklevel=2,
                )

    def _adopt(self, plan: Plan, how: str) -> None:
        self._programs.replan(plan)
        if self._model.groups.rank == 0:
            logger.info("schedule auto, %s: %s", how, describe(plan))

    def _measured(self) -> Measured:
        """Return the measurements of all ranks, the same on every rank. Collective."""
        held, deferred, room = self._bytes()
        samples = instruction_times(self._recorded, self._model.groups.topology)
        seconds = {i: median(times) for i, times in samples.items()}
        gather, reductions = traffic_times(samples, len(self._model.placement))
        return Measured.of(
            self._model.placement,
            lambda i: seconds.get(i, 0.0),
            held,
            deferred,
            self._config.max_in_flight or DEFAULT_MAX_IN_FLIGHT,
            room,
            median([s for i, times in samples.items() if i.op in SEND_OPS for s in times] or [0.0]),
            Traffic(
                gather=gather,
                reductions=reductions,
                reduces_every_micro_batch=self._programs.reduce_per_micro_batch,
            ),
        )

    def _bytes(self) -> tuple[tuple[float, ...], tuple[float, ...], list[float]]:
        """Return bytes (held, deferred, room): for each chunk the largest of all replicas, for each stage the least room."""
        assert self._memory is not None
        batch = self._memory.batch
        learned = learn_chunks([(i, change) for i, change, _ in batch.held])
        own = {c: (b.saved + b.received + b.loaded, b.deferred) for c, b in learned.items()}
        # Memory beyond what is held for backwards: workspace, and an output that waits to be sent.
        others = batch.peak - batch.most_held + max((b.output for b in learned.values()), default=0)
        mine = (self._model.stage_id, own, _room(self._model.device, batch.start, others))
        everyone = all_gather_object(mine, self._model.groups.control)
        of_chunk = [[o[c] for _, o, _ in everyone if c in o] for c in range(len(self._model.placement))]
        # At least one byte: a chunk that holds nothing could run ahead without limit.
        held, deferred = (tuple(max(1.0, *(pair[k] for pair in pairs)) for pairs in of_chunk) for k in (0, 1))
        # A memory budget for which recomputation was chosen holds for the program, too.
        most = [inf] * self._model.num_stages if self._model.predicted is None else self._model.predicted.limit
        room = [min(most[s], *(r for stage, _, r in everyone if stage == s)) for s in range(self._model.num_stages)]
        return held, deferred, room

    def _stored_plan(self) -> Plan | None:
        """Return the plan in the configured file, as the first rank reads it; None without a file. Collective."""
        if self._config.plan is None:
            return None
        path, control = Path(self._config.plan), self._model.groups.control
        found = _read(path) if self._model.groups.rank == 0 else (None, None)
        text, problem = all_gather_object(found, control)[0]
        if problem is not None:
            raise ConfigError(f"pipeline.plan is '{path}', but {problem}; name a file that can be read and written")
        if text is None:
            return None
        try:
            plan = Plan.model_validate_json(text)
            plan.check(self._model.placement)
        except (ValidationError, ScheduleError) as error:
            raise ConfigError(f"pipeline.plan '{path}' can't be run: {error}. Delete it to measure again") from error
        return plan


def _read(path: Path) -> tuple[str | None, str | None]:
    """Return (contents, problem): the file's text, None if there is no file; why it can't be read or written, or None."""
    if not os.access(path.parent, os.W_OK) or not path.parent.is_dir():
        return None, f"there is no directory '{path.parent}' to write into"
    try:
        return path.read_text(encoding="utf-8"), None
    except FileNotFoundError:
        return None, None
    except (OSError, UnicodeError) as error:
        return None, f"it can't be read: {error}"


def _room(device: torch.device, start: int, workspace: int) -> float:
    """Return the bytes left for what backwards need on this rank's device, besides state and workspace; infinite on the CPU."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return _USABLE * (free + torch.cuda.memory_reserved(device)) - start - workspace


def describe(plan: Plan) -> str:
    """Format a plan: its order, its predicted times, and the measurements from which it was made."""
    lines = [
        f"{plan.name!r} for {plan.num_micro_batches} micro-batches, {plan.makespan * 1e3:.4g} ms with a bubble of "
        f"{plan.bubble:.1%}"
    ]
    m = plan.measured
    rows: Sequence[tuple[str, Sequence[float]]] = (
        ("forward", m.forward),
        ("input gradient", m.input_gradient),
        ("weight gradient", m.weight_gradient),
        ("whole backward", m.backward),
    )
    lines += [f"  {name:15} " + " ".join(f"{t * 1e3:8.3f}" for t in times) + " ms a chunk" for name, times in rows]
    held = " ".join(f"{h / 2**20:,.0f}/{most / 2**20:,.0f}" for h, most in zip(plan.held, m.limit, strict=True))
    lines.append(f"  transfer {m.transfer * 1e3:.3f} ms; activations, of at most: {held} MiB a stage")
    if any(m.gather) or m.has_reductions:
        busy = m.busy(plan.placement, plan.num_micro_batches)
        exposed = f"{plan.exposed * 1e3:.4g} ms exposed"
        lines.append(f"  gathers and reductions of up to {busy * 1e3:.4g} ms a stage, {exposed}")
    if plan.captures:
        lines.append(f"  CUDA graphs, as a device waits for its host in {plan.waits_for_host:.0%} of its compute time")
    return "\n".join(lines)
