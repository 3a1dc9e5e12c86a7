"""What is predicted of a layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from parallel3d.config.layout import Layout
from parallel3d.costs.work import Collective
from parallel3d.planner.predict.costs import Reducing, makespan
from parallel3d.planner.predict.timing import Floats, LayoutLinks, StepCost
from parallel3d.schedule.instructions import Program
from parallel3d.schedule.timing import Cost, CriticalPath, Simulation, Timeline


@dataclass(frozen=True)
class Outlook:
    """What is predicted of a layout, uncorrected parts and all.

    makespan: of the pipeline's program, whose timeline is of `timed` micro-batches where it has too many to be simulated;
    exact: whether it is of every gradient bucket and of micro-batches as large as they are; optimizer: seconds;
    reductions: of each chunk the collectives over its replicas, with how often they run in a step; reducing: what of the
    chunks' backwards is due to them.
    """

    layout: Layout
    bounds: tuple[int, ...]
    links: LayoutLinks
    simulation: Simulation
    cost: StepCost
    timed: int
    exact: bool
    makespan: float
    optimizer: float
    seconds: float
    reductions: tuple[tuple[tuple[Collective, float], ...], ...]
    reducing: Reducing

    @property
    def program(self) -> Program:
        """With all that the executor runs."""
        return self.simulation.program

    @cached_property
    def timeline(self) -> Timeline:
        """Of the micro-batches that were timed."""
        return self.simulation.run(self.cost.cost(), self.cost.host())

    @cached_property
    def critical_path(self) -> CriticalPath:
        """Of the timeline."""
        return self.simulation.critical_path(self.cost.cost(), self.cost.host())

    @cached_property
    def exposed(self) -> float:
        """Of the makespan's seconds those that go when all links take no time."""
        alone = self.cost.without_links()
        return max(0.0, self.makespan - self._makespan(alone, alone.host()))

    @cached_property
    def hosts(self) -> float:
        """Of the makespan's seconds those that go when hosts take no time."""
        if self.cost.host() is None:
            return 0.0
        times = self.cost.times
        return self.makespan - self._makespan(replace(self.cost, times=replace(times, host=0.0 * times.host)), None)

    def _makespan(self, cost: StepCost, host: Cost | None) -> float:
        untimed = self.layout.micro_batches - self.timed
        return makespan(self.simulation.length(cost.cost(), host), cost.times, self.program.placement, untimed)

    @property
    def bubble(self) -> float:
        """Share of stages x makespan in which no forward or backward runs."""
        return max(0.0, 1.0 - self._computing(self.cost.times.total) / self.makespan)

    def _computing(self, of_chunks: Floats) -> float:
        """Seconds of a step, the mean of stages."""
        return float(of_chunks.sum()) * self.layout.micro_batches / self.layout.stages

    def breakdown(self) -> dict[str, float]:
        """Seconds of a step by what takes them, the mean of stages."""
        alone = self.cost.without_links().times
        parts = {
            "forward": self._computing(alone.forward),
            "backward": self._computing(alone.input_gradient + alone.weight_gradient),
            "exposed communication": self.exposed,
            "host": self.hosts,
            "optimizer": self.optimizer,
        }
        return {**parts, "bubble": max(0.0, self.makespan + self.optimizer - sum(parts.values()))}
