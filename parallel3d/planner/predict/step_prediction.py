"""Prediction of one training step of a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallel3d.config.layout import Layout
from parallel3d.planner.predict.costs import SplitLayout, StepCost
from parallel3d.planner.predict.timing import Floats
from parallel3d.planner.search.result import StageMemory
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.timing import CriticalPath, Simulation, Timeline

# A layout of half blocks counts as this much longer than it is: it has to be worth building other layers.
WORTH_HALVES = 0.998


def fullness_of(memory: Sequence[StageMemory]) -> float:
    """Return the reserved share of the fullest device's memory; more than 1 doesn't fit."""
    return max(stage.reserved / stage.capacity for stage in memory)


@dataclass(frozen=True)
class StepPrediction:
    """Predicted step and memory of a layout.

    - split: the layout with its layers as they are split.
    - simulation: of the pipeline's program, with fewer micro-batches than the layout's if these are too many.
    - makespan: seconds of the program; optimizer: seconds of the optimizer's step; seconds: of the whole step.
    - memory: of each stage.
    """

    split: SplitLayout
    simulation: Simulation
    cost: StepCost
    makespan: float
    optimizer: float
    seconds: float
    memory: tuple[StageMemory, ...]

    @property
    def layout(self) -> Layout:
        """Layout that was predicted."""
        return self.split.layout

    @property
    def fits(self) -> bool:
        """Whether it fits into every device."""
        return fullness_of(self.memory) <= 1.0

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: what fits comes first, then the shorter step."""
        return not self.fits, self.seconds / (WORTH_HALVES if self.layout.units else 1.0)

    @property
    def program(self) -> Program:
        """The program with all that the executor runs."""
        return self.simulation.program

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the micro-batches that were timed."""
        return self.simulation.run(self.cost.cost(), self.cost.host())

    @cached_property
    def critical_path(self) -> CriticalPath:
        """Critical path of the timeline."""
        return self.simulation.critical_path(self.cost.cost(), self.cost.host())

    @cached_property
    def exposed(self) -> float:
        """Seconds by which the makespan is shorter if links take no time."""
        alone = self.cost.without_links()
        return max(0.0, self.makespan - alone.makespan(self.simulation, self.layout.micro_batches))

    @cached_property
    def hosts(self) -> float:
        """Seconds by which the makespan is shorter if hosts take no time."""
        if self.cost.host() is None:
            return 0.0
        times = self.cost.times
        without = replace(self.cost, times=replace(times, host=0.0 * times.host))
        return self.makespan - without.makespan(self.simulation, self.layout.micro_batches)

    @property
    def bubble(self) -> float:
        """Share of stages x makespan in which no forward or backward runs."""
        return max(0.0, 1.0 - self._computing(self.cost.times.total) / self.makespan)

    def _computing(self, of_chunks: Floats) -> float:
        """Return the seconds of a step from those of chunks and one micro-batch, the mean of stages."""
        return float(of_chunks.sum()) * self.layout.micro_batches / self.layout.stages

    def breakdown(self) -> dict[str, float]:
        """Return the seconds of a step by what takes them, the mean of stages."""
        forward, inputs, weights = self.cost.without_links().times.compute
        parts = {
            "forward": self._computing(forward),
            "backward": self._computing(inputs + weights),
            "exposed communication": self.exposed,
            "host": self.hosts,
            "optimizer": self.optimizer,
        }
        return {**parts, "bubble": max(0.0, self.makespan + self.optimizer - sum(parts.values()))}
