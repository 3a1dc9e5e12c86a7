"""What a run says of its steps, every steps_per_print: a line, where the time went, what memory was used."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from parallel3d.clock import clock_of
from parallel3d.comm.collectives import Work, all_gather_object
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.errors import ConfigError
from parallel3d.monitor.breakdown import Breakdown, break_down
from parallel3d.monitor.report import breakdown_table, phase_table, step_line
from parallel3d.monitor.timers import StepRecord, StepRecorder, clock_offset
from parallel3d.monitor.usage import memory_in_use, start_peak
from parallel3d.schedule.instructions import Instruction, Program


@dataclass(frozen=True)
class StepSummary:
    """A step that is done. loss and grad_norm: scalars on the device; samples: trained on so far, over all replicas."""

    step: int
    samples: int
    loss: Tensor
    grad_norm: Tensor | None
    lr: Sequence[float]
    momentum: Sequence[object] = ()
    skipped: int = 0


# Of recorded steps the last so many are kept, and of all others the begins and ends of the last so many.
_RECORDED, _OTHERS = 5, 32
# The first steps of a process load kernels, compile, and fill the allocator.
_WARM_UP = 2


class StepMonitor:
    """Watches train_batch: call `begin`, `recorder_of`, `computed`, `reduced` and `finish` in every step on every rank.

    Only the steps that print are recorded (where nothing is printed, each, and the last ones kept): of the others no more is
    marked than when they begin and end. Nothing waits for the device before what was recorded is asked for.

    sequence: tokens of a sample of the last recorded step, where this rank's inputs tell; peak: the most bytes that CUDA
    allocated in any phase of a step with memory_breakdown.
    """

    def __init__(self, config: Config, groups: ProcessGroups, device: torch.device):
        self._every = config.steps_per_print
        self._times, self._memory = config.wall_clock_breakdown, config.memory_breakdown
        self._groups, self._device = groups, device
        self._clock = clock_of(device)
        self._record_next = False
        self._recorder: StepRecorder | None = None
        self._recorded: deque[StepRecorder] = deque(maxlen=_RECORDED)
        self._beside: torch.cuda.Stream | None = None
        self._program: Program | None = None
        self._begin: Any = None
        self._steps = 0
        self._leave_out = False
        self.sequence: int | None = None
        self.peak = 0
        # Begin, end and program of steps that were not recorded.
        self._others: deque[tuple[Any, Any, Program | None]] = deque(maxlen=_OTHERS)
        self._phases: dict[str, Mapping[str, int]] = {}
        self._offset: float | None = None
        self._printed: tuple[float, int, int] | None = None  # when, and the step and the samples so far

    def record_next(self) -> None:
        """Record the next step, whatever the configuration says."""
        self._record_next = True

    def leave_out_next(self) -> None:
        """The next step takes other time than its like: it is no part of `step_seconds`."""
        self._leave_out = True

    def prints(self, step: int) -> bool:
        """Whether rank 0 prints after this step, counted from 1."""
        return bool(self._every) and step % (self._every or 1) == 0

    def begin(self, step: int, samples: int) -> None:
        """A step begins, counted from 1, `samples` after the run's beginning."""
        due = self.prints(step) or self._every is None
        wanted = self._record_next or (self._times and due)
        self._recorder = self._make_recorder() if wanted else None
        self._program, self._begin = None, self._clock.mark()
        self._phases = {}
        if self._memory and self.prints(step):
            start_peak(self._device)
            self._sample("start")
        if self._printed is None:
            self._printed = (time.monotonic(), step - 1, samples)

    def _make_recorder(self) -> StepRecorder:
        if self._beside is None and self._device.type == "cuda":
            self._beside = torch.cuda.Stream(self._device)
        return StepRecorder(self._groups.coordinate("pipe"), self._clock, self._beside)

    def recorder_of(self, program: Program, inputs: Any = None) -> StepRecorder | None:
        """What records the step under way, which runs this program, if anything does. inputs: of a micro-batch, if any."""
        self._program = program
        if self._recorder is not None:
            self.sequence = _tokens(inputs)
            self._recorder.program = program
        return self._recorder

    def launched(self, instruction: Instruction, work: Work) -> None:
        """A reduction of gradients or a gather of weights has just been launched."""
        if self._recorder is not None:
            self._recorder.launched(instruction, work)

    def computed(self) -> None:
        """The program of the step is through."""
        self._sample("forward, backward")

    def reduced(self) -> None:
        """The gradients of the step are reduced."""
        if self._recorder is not None:
            self._recorder.reduced()
        self._sample("reduce")

    def finish(self, summary: StepSummary) -> None:
        """The step is done: print what is due. Collective where something is."""
        self._sample("step")
        self._steps += 1
        if self._recorder is not None:
            self._recorder.finish()
            self._recorded.append(self._recorder)
            self._recorder, self._record_next = None, False
        elif self._steps > _WARM_UP and not self._leave_out:
            self._others.append((self._begin, self._clock.mark(), self._program))
        self._leave_out = False
        if not self.prints(summary.step):
            return
        self._print_line(summary)
        if self._times:
            self._print(breakdown_table(summary.step, self.breakdown()))
        if self._memory:
            self._print(phase_table(summary.step, all_gather_object(self._phases, self._groups.control)))
        self._printed = (time.monotonic(), summary.step, summary.samples)

    def _print_line(self, summary: StepSummary) -> None:
        if self._groups.rank != 0 or self._printed is None:
            return
        loss = float(summary.loss)  # waits for the device
        norm = None if summary.grad_norm is None else float(summary.grad_norm)
        when, step, samples = self._printed
        seconds = max(time.monotonic() - when, 1e-9)
        rates = (seconds / (summary.step - step), (summary.samples - samples) / seconds)
        self._print(step_line(summary.step, loss, norm, summary.lr, summary.momentum, summary.skipped, *rates))

    def _print(self, text: str) -> None:
        if self._groups.rank == 0:
            print(text, flush=True)

    def _sample(self, phase: str) -> None:
        if self._memory and (self._phases or phase == "start"):
            self._phases[phase] = memory_in_use(self._device)
            self.peak = max(self.peak, self._phases[phase]["peak"])
            start_peak(self._device)

    def records(self) -> tuple[Program, list[StepRecord]]:
        """The program of the last recorded step, and every rank's record of it. Collective.

        Raises ConfigError when none was recorded.
        """
        program, own = self._own_records()
        return program, all_gather_object(own[-1], self._groups.control)

    def last_records(self) -> tuple[Program, list[list[StepRecord]]]:
        """The program of the last recorded step, and of the last steps that were recorded of it every rank's records.

        Collective; raises as `records`.
        """
        program, own = self._own_records(most=_RECORDED)
        everyone = all_gather_object(own, self._groups.control)
        return program, [list(ranks) for ranks in zip(*everyone, strict=True)]

    def _own_records(self, most: int = 1) -> tuple[Program, list[StepRecord]]:
        program = self._recorded[-1].program if self._recorded else None
        if program is None:
            raise ConfigError(
                "no batch was profiled; call engine.reports.profile_next_batch() before train_batch, or set "
                "wall_clock_breakdown"
            )
        if self._offset is None:
            self._offset = clock_offset(self._groups.control)
        same = [recorder for recorder in self._recorded if recorder.program is program]
        return program, [recorder.read(self._offset) for recorder in same[-most:]]

    def step_seconds(self, program: Program) -> list[float]:
        """Of the last steps that ran this program without being recorded, from when the last rank began until all were
        through. Collective."""
        same = [(begin, end) for begin, end, ran in self._others if ran is program]
        times = self._clock.read([mark for pair in same for mark in pair])
        if self._offset is None:
            self._offset = clock_offset(self._groups.control)
        own = [t + self._offset for t in times]
        everyone = all_gather_object(list(zip(own[::2], own[1::2], strict=True)), self._groups.control)
        return [
            max(end for _, end in ranks) - max(begin for begin, _ in ranks) for ranks in zip(*everyone, strict=True)
        ]

    def breakdown(self) -> list[Breakdown]:
        """Where the time of the last recorded step went, of every rank of the world. Collective; raises as `records`."""
        _, records = self.records()
        reduced = max(record.reduced for record in records)
        parts: dict[int, Breakdown] = {}
        for ranks in self._groups.topology.get_axis_comm_lists("pipe") or [[rank] for rank in range(len(records))]:
            parts.update(zip(ranks, break_down([records[rank] for rank in ranks], reduced), strict=True))
        return [parts[rank] for rank in range(len(records))]


def _tokens(inputs: Any) -> int | None:
    """The length of the first matrix of integers among these inputs: [samples, tokens]."""
    matrices = (t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point())
    return next((t.shape[1] for t in matrices if t.dtype is not torch.bool), None)
