"""Activations in flight of a pipeline of linears, reported and counted by hand; on gloo and on NCCL."""

from __future__ import annotations

from typing import Any

import torch
from layouts import make_engine, own_iterator
from reference import Item
from torch import Tensor, nn

ROWS, LAYERS, MICRO_BATCHES = 256, 8, 6

# Schedule -> its chunks and placement, and where the paper says it, how many micro-batches of all its layers stage 0 of 2
# holds: 1F1B one a stage, GPipe all.
SCHEDULES = {
    "1f1b": (1, "loop", 2),
    "gpipe": (1, "loop", MICRO_BATCHES),
    "zb-h1": (1, "loop", None),
    "zbv": (2, "v", None),
}


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def report(schedule: str, width: int) -> list[dict[str, tuple[int, int]]]:
    chunks, placement, _ = SCHEDULES[schedule]
    pipeline: dict[str, Any] = {"stages": 2, "schedule": schedule, "num_chunks": chunks, "placement": placement}
    engine = make_engine(
        [Item(nn.Linear, (width, width)) for _ in range(2 * LAYERS)],
        squares,
        accumulation=MICRO_BATCHES,
        pipeline=pipeline,
        zero_optimization={"stage": 0},
    )
    batch = [(torch.randn(ROWS, width), torch.randn(ROWS, width)) for _ in range(3 * MICRO_BATCHES)]
    iterator = own_iterator(engine, batch)
    for _ in range(2):
        engine.train_batch(iterator)
    engine.reports.profile_next_batch("memory")
    engine.train_batch(iterator)
    return engine.reports.memory_report()


def check_report(schedule: str, ranks: list[dict[str, tuple[int, int]]], width: int, messages: int) -> None:
    """Activations are held as the program predicts and as the paper counts, give or take so many messages.

    On CUDA each micro-batch in flight has its inputs or labels on the device too, one message more.
    """
    message = ROWS * width * 4  # bytes of a layer's output, which the next layer saves
    for rank in ranks:
        predicted, measured = rank["activations"]
        assert abs(predicted - measured) <= messages * message, f"{predicted} predicted, {measured} measured"
        assert rank["backward"][1] >= rank["steady"][1] + measured
    micro_batches = SCHEDULES[schedule][2]
    if micro_batches is not None:
        saved = micro_batches * (LAYERS - 1) * message  # inputs of layers; what the last one returns is sent and freed
        most = saved + (messages + 1 + (messages - 1) * micro_batches) * message
        assert saved <= ranks[0]["activations"][1] <= most
