"""What a plan says: predictions of layouts, what was rejected and why, as the report shows them and JSON stores them."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from parallel3d.config.layout import Layout


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StageMemory(_Result):
    """Bytes that each rank of a stage holds at most.

    parts: of what is held at the peak, by name (weights, gradients, masters, optimizer, activations, workspace, transient,
    update, messages, ...); phases: the most allocated in each (steady, backward, step, save); allocated: at the peak, as
    torch.cuda.max_memory_allocated counts; reserved: with the allocator's gaps and with what is outside of it, CUDA's context
    and NCCL's buffers; capacity: of the smallest device that the stage lies on.
    """

    stage: int
    parts: dict[str, int]
    phases: dict[str, int]
    allocated: int
    reserved: int
    outside: int = 0
    capacity: int


class Prediction(Layout):
    """One layout. layout: in words, "pp4,dp2,zero1,zbv,m16"; numbers as predicted for one training step.

    low, high: of the seconds, where a measured step is expected in nine cases of ten; bubble: share of the pipeline's time;
    exposed_communication: seconds in which a rank only waits for links, the mean of ranks; breakdown: seconds of a step by what
    takes them, the mean of ranks (forward, backward, bubble, exposed communication, optimizer); bounds: of the partition in
    layers, one part a chunk.
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
        """The most bytes reserved on any rank."""
        return max(stage.reserved for stage in self.memory)


class TimelineSpan(NamedTuple):
    """One instruction of one stage in seconds from the step's begin; op: the value of its schedule Op, "F", "B", "RED", ...

    A tuple, and a list in JSON: a step has hundreds of thousands of them.
    """

    stage: int
    op: str
    chunk: int
    micro_batch: int
    start: float
    end: float
    bucket: int | None = None


class LinkLoad(_Result):
    """What one kind of link carries in a step. a, b: nodes of the cluster's graph, or groups of alike ones ("host 0-15").

    nbytes: of a step, the busiest of its kind; seconds: that these take; by_axis: the bytes of each axis (pipe, data, model).
    """

    a: str
    b: str
    kind: str
    nbytes: float
    seconds: float
    by_axis: dict[str, float]


class Rejected(_Result):
    """A layout that lost, and why: seconds, where its step was predicted, and the fullest stage's bytes, where these were."""

    layout: str
    why: str
    seconds: float | None = None
    peak: int | None = None


class RankPlace(_Result):
    """Where a rank runs, and what it is."""

    rank: int
    host: str
    gpu: int
    pipe: int
    data: int
    model: int


class PlanResult(_Result):
    """What `p3d plan` found.

    best: ranked, the winner first; empty where nothing fits, and then `remedy` says what binds and the smallest change that
    fits. rejected: alternatives, the closest first; trade_off: (peak bytes, seconds, layout) that no other beats in both;
    timeline, links, map: of the winner; config: a configuration to run it with; layers: names, one a layer of the model, and
    halves: of the model of half blocks, which layouts with such units have.
    considered: layouts in the search; simulated: those whose program was built and timed.
    """

    model: str
    cluster: str
    num_devices: int
    global_batch: int
    seq: int
    best: tuple[Prediction, ...]
    rejected: tuple[Rejected, ...]
    trade_off: tuple[tuple[int, float, str], ...]
    timeline: tuple[TimelineSpan, ...]
    links: tuple[LinkLoad, ...]
    map: tuple[RankPlace, ...]
    config: dict[str, object]
    layers: tuple[str, ...]
    halves: tuple[str, ...] = ()
    remedy: str | None = None
    considered: int = 0
    simulated: int = 0
