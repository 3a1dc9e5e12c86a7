"""The configuration that a layout runs with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from parallel3d.config.run_layout import RunLayout


def configuration(layout: RunLayout, base: Mapping[str, Any], bounds: Sequence[int] | None = None) -> dict[str, Any]:
    """`base` with what a layout, of which nothing is left open, says in place of its own.

    bounds: of the partition in layers. ZeRO-2 reduces in every micro-batch, without which it saves nothing, unless `base`
    says no.
    """
    assert layout.micro_batch is not None
    assert layout.micro_batches is not None
    config = {key: value for key, value in base.items() if key != "train_batch_size"}
    config["train_micro_batch_size_per_gpu"] = layout.micro_batch
    config["gradient_accumulation_steps"] = layout.micro_batches
    pipeline: dict[str, Any] = {
        "stages": layout.stages,
        "schedule": layout.schedule,
        "num_chunks": layout.chunks,
        "placement": layout.placement,
        "activation_checkpoint_interval": layout.recompute,
    }
    if bounds is not None:
        pipeline["partition"] = list(bounds)
    sliced = {"size": layout.slices, "sequence_parallel": layout.sequence_parallel}
    zero: dict[str, Any] = {"stage": layout.zero}
    asked = base.get("zero_optimization")
    each = asked.get("reduce_per_micro_batch") if isinstance(asked, Mapping) else None
    if layout.zero == 2:
        zero["reduce_per_micro_batch"] = each is not False
    elif each is True:  # which other stages refuse
        zero["reduce_per_micro_batch"] = "auto"
    for section, own in (("pipeline", pipeline), ("tensor_parallel", sliced), ("zero_optimization", zero)):
        given = base.get(section)
        config[section] = {**(given if isinstance(given, Mapping) else {}), **own}
    return config
