"""Monitoring of steps: every steps_per_print a line or the bar, the breakdown of the time, and the memory in use.

Times come from the host's clock on the CPU and from events on CUDA; nothing synchronizes while a step runs.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parallel3d.comm.clock import Clock, clock_of
from parallel3d.comm.collectives import Awaited, Group, Work, all_gather_integers, all_gather_object
from parallel3d.comm.groups import ProcessGroups
from parallel3d.comm.log import LOG
from parallel3d.comm.topology import pipelines_of
from parallel3d.config import Config
from parallel3d.errors import ConfigError
from parallel3d.logs import logger
from parallel3d.monitor.memory import memory_in_use, peak_memory, phase_table
from parallel3d.monitor.progress import ProgressBar
from parallel3d.monitor.records import Breakdown, StepRecord, break_down, breakdown_table, mean_of
from parallel3d.schedule.instructions import Instruction, Op, Program
from parallel3d.schedule.timing import Span

# When each instruction of a step runs, or how much memory each holds.
Profile = Literal["time", "memory"]
# Numbers of recorded steps that are kept, and of other steps whose begin and end are kept.
_RECORDED, _OTHERS = 5, 32
# The first steps of a process load kernels, compile, and fill the allocator.
_WARM_UP = 2
_CLOCK_ROUNDS = 10
# Steps between two gatherings of values for monitors, where nothing is printed.
_UNPRINTED = 10


class StepRecorder:
    """Recorder of one step on this rank, which begins now.

    - stage: the rank's position along the pipeline.
    - side: on CUDA, a stream on which nothing else runs. A span lasts from when the current stream reaches the instruction
      to when it has passed it.
    - program: the program that the step runs; None as long as it is unknown.
    """

    def __init__(self, stage: int, clock: Clock, side: torch.cuda.Stream | None = None):
        self._stage, self._clock, self._side = stage, clock, side
        self.program: Program | None = None
        # Field of StepRecord -> (instruction, mark of its begin, mark of its end once it is there).
        self._marks: dict[str, list[tuple[Instruction, Any, list[Any]]]] = {
            name: [] for name in ("spans", "waits", "reductions", "gathers")
        }
        self._launched: list[float] = []
        self._begin = clock.mark()
        self._reduced = self._end = self._begin
        self._record: StepRecord | None = None

    def running(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Time the block as `instruction`."""
        return self._time("spans", instruction)

    def waiting(self, instruction: Instruction) -> AbstractContextManager[None]:
        """Time the block as the wait of `instruction` for other ranks."""
        return self._time("waits", instruction)

    @contextmanager
    def _time(self, name: str, instruction: Instruction) -> Iterator[None]:
        begin = self._clock.mark()
        yield
        self._marks[name].append((instruction, begin, [self._clock.mark()]))
        if name == "spans":
            self._launched.append(time.monotonic())

    def launched(self, instruction: Instruction, work: Work) -> None:
        """Record a reduction or gather that has just been launched, until it is done."""
        if isinstance(work, Awaited):
            end: list[Any] = []
            name = "gathers" if instruction.op is Op.GATHER_PARAMS else "reductions"
            self._marks[name].append((instruction, self._clock.mark(), end))
            work.when_done(lambda: end.append(self._clock.mark()), self._side)

    def reduced(self) -> None:
        """Record that the gradients are reduced."""
        self._reduced = self._clock.mark()

    def finish(self) -> None:
        """Record that the step is over."""
        self._end = self._clock.mark()

    def read(self, offset: float = 0.0) -> StepRecord:
        """Return the record, its times `offset` seconds later; waits for the device the first time."""
        if self._record is None:
            if self._side is not None:
                self._side.synchronize()
            marks = {name: [row for row in rows if row[2]] for name, rows in self._marks.items()}
            if len(marks["gathers"]) < len(self._marks["gathers"]):
                marks["gathers"] = []
            pairs = [mark for rows in marks.values() for _, begin, [end] in rows for mark in (begin, end)]
            times = iter([t + offset for t in self._clock.read([self._begin, self._reduced, self._end, *pairs])])
            begin, reduced, end = next(times), next(times), next(times)
            spans, waits, reductions, gathers = (
                tuple(Span(self._stage, i, next(times), next(times)) for i, _, _ in rows) for rows in marks.values()
            )
            launched = tuple(t + offset for t in self._launched)
            self._record = StepRecord(begin, reduced, end, spans, waits, reductions, gathers, launched)
            self._marks.clear()
        return self._record


def clock_offset(control: Group, now: Callable[[], float] = time.monotonic) -> float:
    """Return seconds to add to this rank's `now()` to get that of the group's first rank; 0 on its host. Collective.

    Hosts' clocks start anywhere. No rank leaves an exchange before all have entered it, which bounds the difference from both
    sides; the error is at most the time that the fastest of several exchanges takes.
    """
    hosts = all_gather_object(socket.gethostname(), control)
    if len(set(hosts)) == 1:
        return 0.0
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        entered = now()
        all_gather_integers([0], control)
        rounds.append((entered, now()))
    offsets = all_gather_object(offset_between(rounds, all_gather_object(rounds, control)[0]), control)
    return offsets[hosts.index(hosts[control.index])]  # one for all ranks of a host, whose clock is one


def offset_between(mine: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> float:
    """Return what to add to my times to get theirs, from when each entered and left the same exchanges."""
    pairs = list(zip(mine, theirs, strict=True))
    at_least = max(entered - my_exit for (_, my_exit), (entered, _) in pairs)
    at_most = min(left - my_entry for (my_entry, _), (_, left) in pairs)
    return (at_least + at_most) / 2


class StepMonitor:
    """Monitor of train_batch: call `begin`, `recorder_of`, `computed`, `reduced` and `finish` in every step on every rank.

    Only steps that print or are profiled are recorded (if nothing is printed, every step, and the last ones are kept); of the
    others only begin and end are marked. Nothing waits for the device before records are read.

    - peak_flops: FLOP/s of a device, of which MFU is the used share; None if unknown.
    - profiles: the profiles requested of the current step.
    - sequence: tokens of a sample, if this rank's inputs show it.
    - peak: the most bytes that CUDA allocated in any phase of a step with memory_breakdown.
    - values: speed, memory and, if recorded, times of the last step if its values were due, for monitors; else empty.
    """

    def __init__(self, config: Config, groups: ProcessGroups, device: torch.device, peak_flops: float | None = None):
        LOG.begin(config.comms_logger)
        self._every = config.steps_per_print
        self._times, self._memory = config.wall_clock_breakdown, config.memory_breakdown
        # Scripts may enable monitors only on the rank that writes, but all ranks take part in gathering the values.
        self._logs = any(row[0] for row in all_gather_integers([int(config.has_monitors)], groups.control))
        self._peak_flops = config.monitor.peak_flops or peak_flops
        self._bar = ProgressBar.of(config.monitor.progress if groups.rank == 0 else False)
        self._groups, self._device, self._stage = groups, device, groups.coordinate("pipe")
        self._clock = clock_of(device)
        self._side: torch.cuda.Stream | None = None
        self._next: frozenset[Profile] = frozenset()
        self.profiles: frozenset[Profile] = frozenset()
        self._step: StepRecorder | None = None  # the current step, whether or not it is recorded
        self._recording: StepRecorder | None = None  # the current step, if it is recorded
        self._recorded: deque[StepRecorder] = deque(maxlen=_RECORDED)
        self._others: deque[StepRecorder] = deque(maxlen=_OTHERS)
        self._steps = 0
        self.sequence: int | None = None
        self.peak = 0
        self._phases: dict[str, Mapping[str, int]] = {}
        self._offset: float | None = None
        # When values were due last, and the step and the samples so far.
        self._printed = (0.0, -1, 0)
        self._paused: float | None = None  # when an evaluation or a save began after the last step
        self.values: dict[str, float] = {}
        self._flops: float | None = None  # of this rank in one step, once they are counted
        # Tokens of this rank's inputs in the current step, since values were due, and in the step of _flops.
        self._tokens = self._recent_tokens = self._counted_tokens = 0

    def profile_next(self, what: Profile) -> None:
        """Profile the next step, whatever the configuration says."""
        self._next |= {what}

    def prints(self, step: int) -> bool:
        """Return whether rank 0 prints after this step, counted from 1."""
        return self._every is not None and step % self._every == 0

    def due(self, step: int) -> bool:
        """Return whether values of this step are gathered, to be printed or for monitors; the same on all ranks."""
        return step % (self._every or _UNPRINTED) == 0 and (self._every is not None or self._logs)

    def counts_flops(self) -> bool:
        """Return whether the current step, an unprofiled one after the first, is to count its forwards' FLOPs, for MFU."""
        wanted = self._peak_flops is not None and (self._every is not None or self._logs)
        return wanted and self._flops is None and self._steps > 0 and not self.profiles

    def pause(self) -> None:
        """Exclude the time from now until the next step begins from the speed, unless a step is in progress."""
        if self._paused is None and self._step is None and self._printed[1] >= 0:
            self._paused = self._now()

    def _now(self) -> float:
        """Wait until the device has done all that was launched, and return the time in seconds."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    def begin(self, step: int, samples: int) -> None:
        """Begin a step, counted from 1. samples: trained on so far."""
        if self._paused is not None:
            when, last_step, last_samples = self._printed
            self._printed, self._paused = (when + self._now() - self._paused, last_step, last_samples), None
        self.profiles = self._next
        due = self.prints(step) or self._every is None
        is_recorded = "time" in self.profiles or (self._times and due) or (self._logs and self.prints(step))
        if is_recorded and self._side is None and self._device.type == "cuda":
            self._side = torch.cuda.Stream(self._device)
        self._step = StepRecorder(self._stage, self._clock, self._side)
        self._recording = self._step if is_recorded else None
        self._phases, self._tokens = {}, 0
        if self._memory and self.prints(step):
            memory_in_use(self._device)  # from here on, a new peak
            self._sample("start")
        if self._printed[1] < 0:
            self._printed = (time.monotonic(), step - 1, samples)

    def recorder_of(self, program: Program) -> StepRecorder | None:
        """Return the recorder of this step, which runs the program, if it is recorded."""
        if self._step is not None:
            self._step.program = program
        return self._recording

    def count_tokens(self, inputs: Any) -> None:
        """Count the tokens of a micro-batch's inputs: the first matrix of integers, [samples, tokens], if there is one."""
        matrices = (t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim == 2)
        tokens = next((t for t in matrices if not t.is_floating_point() and t.dtype is not torch.bool), None)
        if tokens is not None:
            self.sequence = tokens.shape[1]
            self._tokens += tokens.numel()

    def launched(self, instruction: Instruction, work: Work) -> None:
        """Record a reduction of gradients or a gather of weights that has just been launched."""
        if self._recording is not None:
            self._recording.launched(instruction, work)

    def computed(self) -> None:
        """Note that the step's program has run."""
        self._sample("forward, backward")

    def reduced(self) -> None:
        """Note that the step's gradients are reduced."""
        if self._recording is not None:
            self._recording.reduced()
        self._sample("reduce")

    def finish(
        self, step: int, samples: int, describe: Callable[[], Mapping[str, str]], flops: float | None = None
    ) -> None:
        """End a step, counted from 1, and print what is due. Collective if something is.

        - samples: trained on so far. flops: of this rank, if they were counted in this step.
        - describe: returns the parts of the line but for speed and memory, on rank 0; it may wait for the device.
        """
        assert self._step is not None
        self._sample("step")
        self._steps += 1
        self._step.finish()
        if self._recording is not None:
            self._recorded.append(self._step)
        elif self._steps > _WARM_UP and not self.profiles:  # the time of a profiled step isn't typical
            self._others.append(self._step)
        is_recorded = self._recording is not None
        self._next -= self.profiles
        self._step, self._recording, self.profiles = None, None, frozenset()
        self._recent_tokens += self._tokens
        if flops is not None:
            self._flops, self._counted_tokens = flops, self._tokens
        self.values = {}
        if self._bar is not None:
            self._bar.update(step)
        if not self.due(step):
            return
        line = describe() if self.prints(step) and self._groups.rank == 0 else {}
        self.values = self._measure(step, samples)
        texts = [] if self._bar is not None or not line else [_line(step, {**line, **_speed(self.values)})]
        if is_recorded:
            parts = self.breakdown()
            self.values |= _times(mean_of(parts))
            texts += [breakdown_table(step, parts)] if self._times and self.prints(step) else []
        if self._memory and self.prints(step):
            texts.append(phase_table(step, all_gather_object(self._phases, self._groups.control)))
        if self._bar is not None:
            shown = {name: line[name] for name in ("loss", "grad norm", "lr") if name in line}
            self._bar.update(step, {**shown, **_speed(self.values)})
        if texts and self._groups.rank == 0:
            logger.info("%s", "\n".join(texts))
        self._printed, self._recent_tokens = (time.monotonic(), step, samples), 0

    def _measure(self, step: int, samples: int) -> dict[str, float]:
        """Return speed and memory since values were due last. Collective."""
        when, last_step, last_samples = self._printed
        groups, seconds, steps = self._groups, max(time.monotonic() - when, 1e-9), step - last_step
        own = peak_memory(self._device, self.peak), self._flops or 0.0
        memory, flops = zip(*all_gather_object(own, groups.control), strict=True)
        values = {
            "seconds_per_step": seconds / steps,
            "samples_per_second": (samples - last_samples) / seconds,
            "memory_gib": max(memory) / 2**30,
        }
        if self._recent_tokens:
            values["tokens_per_second"] = self._recent_tokens * groups.data.size / seconds
        if self._peak_flops is not None and sum(flops):
            # FLOPs grow with the tokens, or else with the steps.
            counted = self._recent_tokens / self._counted_tokens if self._counted_tokens else steps
            values["mfu"] = sum(flops) * counted / (seconds * self._peak_flops * len(flops))
        return values

    def _sample(self, phase: str) -> None:
        if self._memory and (self._phases or phase == "start"):
            self._phases[phase] = memory_in_use(self._device)
            self.peak = max(self.peak, self._phases[phase]["peak"])

    def records(self, most: int = _RECORDED) -> tuple[Program, list[list[StepRecord]]]:
        """Return the program of the last recorded step, and every rank's records of the last recorded steps of that program.

        Collective. Raises ConfigError when none was recorded.
        """
        program = self._recorded[-1].program if self._recorded else None
        if program is None:
            raise ConfigError(
                "no batch was profiled; call engine.reports.profile_next_batch() before train_batch, or set "
                "wall_clock_breakdown"
            )
        return program, self._read([step for step in self._recorded if step.program is program][-most:])

    def unrecorded(self, program: Program) -> list[list[StepRecord]]:
        """Return every rank's records of the last other steps of this program: only begin and end. Collective."""
        return self._read([step for step in self._others if step.program is program])

    def _read(self, steps: Sequence[StepRecorder]) -> list[list[StepRecord]]:
        """Return the records of all ranks of each step. Collective."""
        if self._offset is None:
            self._offset = clock_offset(self._groups.control)
        own = [step.read(self._offset) for step in steps]
        return [list(ranks) for ranks in zip(*all_gather_object(own, self._groups.control), strict=True)]

    def breakdown(self) -> list[Breakdown]:
        """Return the breakdown of the last recorded step for every rank of the world. Collective; raises as `records`."""
        _, [records] = self.records(most=1)
        return break_down(records, pipelines_of(self._groups.topology))


def _line(step: int, parts: Mapping[str, str]) -> str:
    return f"step {step}: " + ", ".join(f"{name} {part}".strip() for name, part in parts.items())


def _speed(values: Mapping[str, float]) -> dict[str, str]:
    """Return the parts of a step's line that show speed and memory."""
    units = {"seconds_per_step": "s/step", "samples_per_second": "samples/s", "tokens_per_second": "tokens/s"}
    parts = {"": ", ".join(f"{values[name]:.4g} {unit}" for name, unit in units.items() if name in values)}
    if "mfu" in values:
        parts["MFU"] = f"{values['mfu']:.1%}"
    return {**parts, "memory": f"{values['memory_gib']:.3g} GiB"}


def _times(parts: Breakdown) -> dict[str, float]:
    """Return a step's bubble, a share of its time, and its times under DeepSpeed's names, the mean of ranks."""
    times = {
        "forward": parts.forward,
        "backward": parts.backward + parts.reduce,
        "backward_inner": parts.backward,
        "backward_allreduce": parts.reduce,
        "step": parts.step,
    }
    named = {f"elapsed_time_ms_{name}": 1e3 * seconds for name, seconds in times.items()}
    return {"bubble": parts.bubble / (parts.total or 1.0), **named}
