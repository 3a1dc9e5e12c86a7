"""Prediction of one training step of a layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from parallel3d.config.layout import Layout
from parallel3d.planner.predict.costs import Reducing, Reductions, StepCost
from parallel3d.planner.predict.links import LayoutLinks
from parallel3d.planner.predict.timing import Floats
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.timing import CriticalPath, Simulation, Timeline


@dataclass(frozen=True)
class StepPrediction:
    """Predicted step of a layout.

    - simulation: of the pipeline's program, with fewer micro-batches than the layout's if these are too many.
    - makespan: seconds of the program; optimizer: seconds of the optimizer's step; seconds: of the whole step.
    - reductions, reducing: of each chunk, see SplitLayout.
    """

    layout: Layout
    bounds: tuple[int, ...]
    links: LayoutLinks
    simulation: Simulation
    cost: StepCost
    makespan: float
    optimizer: float
    seconds: float
    reductions: tuple[Reductions, ...]
    reducing: Reducing

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
