"""The configuration that a layout in words stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel3d.config.run_layout import RunLayout
from parallel3d.errors import ConfigError


def accumulation(layout: RunLayout, base: Mapping[str, Any]) -> int:
    """Micro-batches for each replica in a step: as written, as configured, or two a stage."""
    configured = base.get("gradient_accumulation_steps")
    return layout.micro_batches or (configured if isinstance(configured, int) else 2 * layout.stages)


def config_of(layout: RunLayout, base: Mapping[str, Any], seed: int, dtype: str) -> dict[str, Any]:
    """A base configuration with what the layout says in place of its own, quiet, all seeds given. Raises ConfigError."""
    config = {key: value for key, value in base.items() if key != "train_batch_size"}
    if layout.micro_batch is not None:
        raise ConfigError(
            f"layout {layout.text!r}: how many samples a micro-batch has, the subject's micro_batch() says; leave mb out"
        )
    if layout.units is not None:
        raise ConfigError(
            f"layout {layout.text!r}: what a layer is, the subject's layers say; leave half out, and return them in half blocks"
        )
    if config.get("train_micro_batch_size_per_gpu") in (None, "auto"):
        config["train_micro_batch_size_per_gpu"] = 1
    config["gradient_accumulation_steps"] = accumulation(layout, base)
    config.setdefault("optimizer", {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})
    config |= {
        "seed": seed,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "dump_state": False,
        "run_record": {},
    }
    config["bf16"] = {"enabled": dtype == "bfloat16"}
    pipeline = {
        "schedule": layout.schedule,
        "num_chunks": layout.chunks,
        "placement": layout.placement,
        "activation_checkpoint_interval": layout.recompute,
    }
    own = {key: value for key, value in pipeline.items() if value is not None}
    config["pipeline"] = {**_section(base, "pipeline"), **own, "stages": layout.stages, "seed_layers": True}
    sliced = {"size": layout.slices, "sequence_parallel": layout.sequence_parallel}
    config["tensor_parallel"] = {**_section(base, "tensor_parallel"), **sliced}
    if layout.zero is not None:
        config["zero_optimization"] = {**_section(base, "zero_optimization"), "stage": layout.zero}
    return config


def _section(base: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A section of a configuration as given; empty where it is absent, or no mapping."""
    given = base.get(key)
    return given if isinstance(given, Mapping) else {}
