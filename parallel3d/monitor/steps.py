"""Monitoring of steps: every steps_per_print a line, the breakdown of the time, and the memory in use."""

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
from parallel3d.monitor.breakdown import Breakdown, break_down, breakdown_table, pipelines_of
from parallel3d.monitor.memory import memory_in_use, phase_table
from parallel3d.monitor.records import StepRecord, StepRecorder, clock_offset
from parallel3d.schedule.instructions import Instruction, Program


@dataclass(frozen=True)
class StepSummary:
    """A finished step.

    - samples: trained on so far, over all replicas.
    - loss, grad_norm: scalars on the device.
    - lr, momentum: of each parameter group.
    - skipped: number of skipped steps so far.
    """

    step: int
    samples: int
    loss: Tensor
    grad_norm: Tensor | None
    lr: Sequence[float]
    momentum: Sequence[object] = ()
    skipped: int = 0

    def line(self, loss: float, grad_norm: float | None, seconds: float, samples: float) -> str:
        """Return the printed line. loss, grad_norm: their values; seconds: per step; samples: per second."""
        norm = "-" if grad_norm is None else f"{grad_norm:.4g}"
        rates = " ".join(f"{rate:.4g}" for rate in self.lr)
        moments = f", mom {' '.join(str(m) for m in self.momentum)}" if self.momentum else ""
        return (
            f"step {self.step}: loss {loss:.4f}, grad norm {norm}, lr {rates}{moments}, skipped {self.skipped}, "
            f"{seconds:.4g} s/step, {samples:.4g} samples/s"
        )


# Numbers of recorded steps that are kept, and of other steps whose begin and end are kept.
_RECORDED, _OTHERS = 5, 32
# The first steps of a process load kernels, compile, and fill the allocator.
_WARM_UP = 2


class StepMonitor:
    """Monitor of train_batch: call `begin`, `recorder_of`, `computed`, `reduced` and `finish` in every step on every rank.

    Only steps that print are recorded (if nothing is printed, every step, and the last ones are kept); of the others only
    begin and end are marked. Nothing waits for the device before records are read.

    - sequence: tokens of a sample of the last recorded step, if this rank's inputs show it.
    - peak: the most bytes that CUDA allocated in any phase of a step with memory_breakdown.
    """

    def __init__(self, config: Config, groups: ProcessGroups, device: torch.device):
        self._every = config.steps_per_print
        self._times, self._memory = config.wall_clock_breakdown, config.memory_breakdown
        self._groups, self._device = groups, device
        self._clock = clock_of(device)
        self._record_next = False
        self._recorder: StepRecorder | None = None
        self._recorded: deque[tuple[Program | None, StepRecorder]] = deque(maxlen=_RECORDED)
        self._side: torch.cuda.Stream | None = None
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
        # When the last line was printed, and the step and the samples so far.
        self._printed = (0.0, -1, 0)

    def profile_next(self, record: bool) -> None:
        """Record the next step, whatever the configuration says, or leave it out of `step_seconds`: its time isn't typical."""
        if record:
            self._record_next = True
        else:
            self._leave_out = True

    def prints(self, step: int) -> bool:
        """Return whether rank 0 prints after this step, counted from 1."""
        return bool(self._every) and step % (self._every or 1) == 0

    def begin(self, step: int, samples: int) -> None:
        """Begin a step, counted from 1. samples: trained on so far."""
        due = self.prints(step) or self._every is None
        self._recorder = None
        if self._record_next or (self._times and due):
            if self._side is None and self._device.type == "cuda":
                self._side = torch.cuda.Stream(self._device)
            self._recorder = StepRecorder(self._groups.coordinate("pipe"), self._clock, self._side)
        self._program, self._begin = None, self._clock.mark()
        self._phases = {}
        if self._memory and self.prints(step):
            memory_in_use(self._device)  # from here on, a new peak
            self._sample("start")
        if self._printed[1] < 0:
            self._printed = (time.monotonic(), step - 1, samples)

    def recorder_of(self, program: Program, inputs: Any = None) -> StepRecorder | None:
        """Return the recorder of this step, which runs the program, if it is recorded. inputs: of a micro-batch, if any."""
        self._program = program
        if self._recorder is not None:
            self.sequence = _tokens(inputs)
        return self._recorder

    def launched(self, instruction: Instruction, work: Work) -> None:
        """Record a reduction of gradients or a gather of weights that has just been launched."""
        if self._recorder is not None:
            self._recorder.launched(instruction, work)

    def computed(self) -> None:
        """Note that the step's program has run."""
        self._sample("forward, backward")

    def reduced(self) -> None:
        """Note that the step's gradients are reduced."""
        if self._recorder is not None:
            self._recorder.reduced()
        self._sample("reduce")

    def finish(self, summary: StepSummary) -> None:
        """End the step and print what is due. Collective if something is."""
        self._sample("step")
        self._steps += 1
        if self._recorder is not None:
            self._recorder.finish()
            self._recorded.append((self._program, self._recorder))
            self._recorder, self._record_next = None, False
        elif self._steps > _WARM_UP and not self._leave_out:
            self._others.append((self._begin, self._clock.mark(), self._program))
        self._leave_out = False
        if not self.prints(summary.step):
            return
        texts = [self._line(summary)] if self._groups.rank == 0 else []
        if self._times:
            texts.append(breakdown_table(summary.step, self.breakdown()))
        if self._memory:
            texts.append(phase_table(summary.step, all_gather_object(self._phases, self._groups.control)))
        if self._groups.rank == 0:
            print("\n".join(texts), flush=True)
        self._printed = (time.monotonic(), summary.step, summary.samples)

    def _line(self, summary: StepSummary) -> str:
        loss = float(summary.loss)  # waits for the device
        norm = None if summary.grad_norm is None else float(summary.grad_norm)
        when, step, samples = self._printed
        seconds = max(time.monotonic() - when, 1e-9)
        return summary.line(loss, norm, seconds / (summary.step - step), (summary.samples - samples) / seconds)

    def _sample(self, phase: str) -> None:
        if self._memory and (self._phases or phase == "start"):
            self._phases[phase] = memory_in_use(self._device)
            self.peak = max(self.peak, self._phases[phase]["peak"])

    def records(self, most: int = _RECORDED) -> tuple[Program, list[list[StepRecord]]]:
        """Return the program of the last recorded step, and every rank's records of the last recorded steps of that program.

        Collective. Raises ConfigError when none was recorded.
        """
        program = self._recorded[-1][0] if self._recorded else None
        if program is None:
            raise ConfigError(
                "no batch was profiled; call engine.reports.profile_next_batch() before train_batch, or set "
                "wall_clock_breakdown"
            )
        offset, same = self._clock_offset(), [recorder for ran, recorder in self._recorded if ran is program]
        everyone = all_gather_object([recorder.read(offset) for recorder in same[-most:]], self._groups.control)
        return program, [list(ranks) for ranks in zip(*everyone, strict=True)]

    def _clock_offset(self) -> float:
        """Return what to add to times of this rank's clock. Collective the first time."""
        if self._offset is None:
            self._offset = clock_offset(self._groups.control)
        return self._offset

    def step_seconds(self, program: Program) -> list[float]:
        """Return the times of the last unrecorded steps of this program, from when the last rank began until all had ended.

        Collective.
        """
        same = [(begin, end) for begin, end, ran in self._others if ran is program]
        times = self._clock.read([mark for pair in same for mark in pair])
        offset = self._clock_offset()
        own = [(begin + offset, end + offset) for begin, end in zip(times[::2], times[1::2], strict=True)]
        everyone = all_gather_object(own, self._groups.control)
        return [
            max(end for _, end in ranks) - max(begin for begin, _ in ranks) for ranks in zip(*everyone, strict=True)
        ]

    def breakdown(self) -> list[Breakdown]:
        """Return the breakdown of the last recorded step for every rank of the world. Collective; raises as `records`."""
        _, [records] = self.records(most=1)
        return break_down(records, pipelines_of(self._groups.topology))


def _tokens(inputs: Any) -> int | None:
    """Return the length of the first matrix of integers among the inputs, [samples, tokens]; None if there is none."""
    matrices = (t for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point())
    return next((t.shape[1] for t in matrices if t.dtype is not torch.bool), None)
