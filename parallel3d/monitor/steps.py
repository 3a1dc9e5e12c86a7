"""What a run says of its steps, every steps_per_print: a line, where the time went, what memory was used."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel3d.clock import clock_of
from parallel3d.comm.collectives import all_gather_object
from parallel3d.comm.groups import ProcessGroups
from parallel3d.config import Config
from parallel3d.errors import ConfigError
from parallel3d.monitor.breakdown import Breakdown, break_down
from parallel3d.monitor.report import breakdown_table, phase_table, step_line
from parallel3d.monitor.timers import StepRecord, StepRecorder, clock_offset
from parallel3d.monitor.usage import memory_in_use, start_peak
from parallel3d.schedule.instructions import Program


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


class StepMonitor:
    """Watches train_batch: call `begin`, `recorder_of`, `computed`, `reduced` and `finish` in every step on every rank.

    Only the steps that print are recorded (where nothing is printed, each, and the last one kept), so between prints
    nothing waits for the device, and no more events are alive than one program has instructions.
    """

    def __init__(self, config: Config, groups: ProcessGroups, device: torch.device):
        self._every = config.steps_per_print
        self._times, self._memory = config.wall_clock_breakdown, config.memory_breakdown
        self._groups, self._device = groups, device
        self._clock = clock_of(device)
        self._record_next = False
        self._recorder: StepRecorder | None = None
        self._latest: StepRecorder | None = None
        self._phases: dict[str, Mapping[str, int]] = {}
        self._offset: float | None = None
        self._printed: tuple[float, int, int] | None = None  # when, and the step and the samples so far

    def record_next(self) -> None:
        """Record the next step, whatever the configuration says."""
        self._record_next = True

    def prints(self, step: int) -> bool:
        """Whether rank 0 prints after this step, counted from 1."""
        return bool(self._every) and step % (self._every or 1) == 0

    def begin(self, step: int, samples: int) -> None:
        """A step begins, counted from 1, `samples` after the run's beginning."""
        due = self.prints(step) or self._every is None
        wanted = self._record_next or (self._times and due)
        self._recorder = StepRecorder(self._groups.coordinate("pipe"), self._clock) if wanted else None
        self._phases = {}
        if self._memory and self.prints(step):
            start_peak(self._device)
            self._sample("start")
        if self._printed is None:
            self._printed = (time.monotonic(), step - 1, samples)

    def recorder_of(self, program: Program) -> StepRecorder | None:
        """What records the step under way, which runs this program, if anything does."""
        if self._recorder is not None:
            self._recorder.program = program
        return self._recorder

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
        if self._recorder is not None:
            self._recorder.finish()
            self._latest, self._recorder, self._record_next = self._recorder, None, False
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
            start_peak(self._device)

    def records(self) -> tuple[Program, list[StepRecord]]:
        """The program of the last recorded step, and every rank's record of it. Collective.

        Raises ConfigError when none was recorded.
        """
        if self._latest is None or self._latest.program is None:
            raise ConfigError(
                "no batch was profiled; call engine.profile_next_batch() before train_batch, or set wall_clock_breakdown"
            )
        if self._offset is None:
            self._offset = clock_offset(self._groups.control)
        return self._latest.program, all_gather_object(self._latest.read(self._offset), self._groups.control)

    def breakdown(self) -> list[Breakdown]:
        """Where the time of the last recorded step went, of every rank of the world. Collective; raises as `records`."""
        _, records = self.records()
        reduced = max(record.reduced for record in records)
        parts: dict[int, Breakdown] = {}
        for ranks in self._groups.topology.get_axis_comm_lists("pipe") or [[rank] for rank in range(len(records))]:
            parts.update(zip(ranks, break_down([records[rank] for rank in ranks], reduced), strict=True))
        return [parts[rank] for rank in range(len(records))]
