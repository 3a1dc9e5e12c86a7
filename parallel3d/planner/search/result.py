"""Result of a plan, as the report shows it and JSON stores it: predicted layouts, rejected ones, and the reasons."""

from __future__ import annotations

from collections.abc import Sequence

from parallel3d.config.layout import Layout
from parallel3d.monitor.run_record import StoredModel
from parallel3d.schedule.timing import Span

FULL = 0.95
"""Share of a rank's memory beyond which a layout is flagged."""


class StageMemory(StoredModel):
    """Peak memory of each rank of a stage, in bytes.

    - parts: what is held at the peak, by name (weights, gradients, masters, optimizer, activations, workspace, transient,
      update, messages, ...); phases: the most allocated in each phase (steady, backward, step, save).
    - allocated: at the peak, as torch.cuda.max_memory_allocated counts.
    - reserved: with the allocator's gaps and with `outside`, which is CUDA's context and NCCL's buffers.
    - capacity: of the smallest device of the stage.
    - host: of offloaded state and weights in host memory; host_capacity: of the host's memory for each rank; disk: of
      offloaded state on disk.
    """

    stage: int
    parts: dict[str, int]
    phases: dict[str, int]
    allocated: int
    reserved: int
    outside: int = 0
    capacity: int
    host: int = 0
    host_capacity: int = 1
    disk: int = 0

    @property
    def fullest(self) -> tuple[float, int, int]:
        """Used share, bytes and capacity of the device's memory, or of the host's if that is fuller."""
        sizes = (self.reserved, self.capacity), (self.host, self.host_capacity)
        return max((nbytes / capacity, nbytes, capacity) for nbytes, capacity in sizes)


def fullness_of(memory: Sequence[StageMemory]) -> float:
    """Return the share that is used of the fullest device's memory, or host's; more than 1 doesn't fit."""
    return max(stage.fullest[0] for stage in memory)


class Prediction(Layout):
    """Predicted training step of a layout.

    - layout: in words, "pp4,dp2,zero1,zbv,m16".
    - low, high: 90% interval of the measured seconds.
    - bubble: share of the step; exposed_communication: seconds in which a rank only waits for links, the mean of
      ranks.
    - breakdown: seconds of a step by what takes them, the mean of ranks (forward, backward, bubble, exposed communication,
      optimizer).
    - bounds: the partition in layers, one part per chunk.
    """

    layout: str
    seconds: float
    low: float
    high: float
    tokens_per_second: float
    mfu: float
    bubble: float
    exposed_communication: float
    breakdown: dict[str, float]
    bounds: tuple[int, ...]
    memory: tuple[StageMemory, ...]

    @property
    def peak(self) -> int:
        """Most bytes reserved on any rank."""
        return max(stage.reserved for stage in self.memory)


class LinkLoad(StoredModel):
    """Load of one kind of link in a step.

    - a, b: nodes of the cluster's graph, or groups of alike ones ("host 0-15").
    - nbytes: bytes of the busiest link of the kind, and the seconds that they take; by_axis: of pipe, data and model.
    """

    a: str
    b: str
    kind: str
    nbytes: float
    seconds: float
    by_axis: dict[str, float]


class Rejected(StoredModel):
    """Layout that lost, and why. seconds: if its step was predicted; peak: bytes of the fullest stage, if predicted."""

    layout: str
    why: str
    seconds: float | None = None
    peak: int | None = None


class RankPlace(StoredModel):
    """Device of a rank, and its coordinates."""

    rank: int
    host: str
    gpu: int
    pipe: int
    data: int
    model: int


class PlanResult(StoredModel):
    """Result of `p3d plan`.

    - best: ranked layouts, the winner first. It is empty if nothing fits; then `remedy` names the limiting memory and the
      smallest change that fits, and a rank lacks `lacking` bytes of memory.
    - rejected: alternatives, the closest first; trade_off: (peak bytes, seconds, layout) that no other one beats in both.
    - timeline, links, map: of the winner; config: a configuration to run it with.
    - layers: names of the model's layers, and halves: of its half blocks, which layouts with such units count.
    - considered: layouts of the space; simulated: those that were predicted.
    - reserve: share of each device's memory that was kept free, which capacities leave out.
    - on_gpus: whether the devices are GPUs.
    """

    model: str
    cluster: str
    num_devices: int
    global_batch: int
    seq: int
    best: tuple[Prediction, ...]
    rejected: tuple[Rejected, ...]
    trade_off: tuple[tuple[int, float, str], ...]
    timeline: tuple[Span, ...]
    links: tuple[LinkLoad, ...]
    map: tuple[RankPlace, ...]
    config: dict[str, object]
    layers: tuple[str, ...]
    halves: tuple[str, ...] = ()
    remedy: str | None = None
    lacking: int = 0
    considered: int = 0
    simulated: int = 0
    reserve: float = 0.0
    on_gpus: bool = True
