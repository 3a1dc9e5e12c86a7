"""Run records made up for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel3d.monitor.run_record import ModelFingerprint, RankRecord, RunRecord, Timing


def timing(seconds: float) -> Timing:
    return Timing(median=seconds, spread=0.0, count=3)


def make_record(
    layout: str = "pp2,1f1b,m4,mb2",
    instructions: Mapping[str, float] | None = None,
    step: float = 1.0,
    optimizer: float = 0.1,
    ranks: Sequence[RankRecord] = (),
    parameters: tuple[int, ...] = (3, 4),
    device: str = "NVIDIA H200",
    bubble: float = 0.25,
    seq: int | None = 128,
) -> RunRecord:
    """Two stages of one layer each, four micro-batches of two samples."""
    return RunRecord(
        layout=layout,
        stages=2,
        replicas=1,
        tensor_ranks=1,
        sequence_parallel=False,
        chunks=1,
        placement="loop",
        schedule="1f1b",
        micro_batch=2,
        micro_batches=4,
        zero=0,
        recompute=0,
        bounds=(0, 1, 2),
        seq=seq,
        program=None,
        model=ModelFingerprint(layers=("Embed", "Head"), parameters=parameters),
        backend="nccl",
        versions={"torch": "2.13.0"},
        config={},
        instructions={name: timing(seconds) for name, seconds in (instructions or {}).items()},
        step=timing(step),
        optimizer=timing(optimizer),
        breakdown={"forward": 0.3, "backward": 0.6, "step": 0.1},
        bubble=bubble,
        ranks=tuple(ranks) or tuple(RankRecord(rank=r, stage=r, device=device, parts={}) for r in range(2)),
    )
