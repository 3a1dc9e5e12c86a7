"""Configuration of a check: a subject's own, in a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from parallel3d.config.layout import PartialLayout, configuration
from parallel3d.errors import ConfigError


def accumulation(layout: PartialLayout, base: Mapping[str, Any]) -> int:
    """Return the micro-batches of each replica in a step: as the layout or the configuration says, else two a stage."""
    configured = base.get("gradient_accumulation_steps")
    default = configured if isinstance(configured, int) else 2 * layout.stages
    return layout.decided("micro_batches") or default


def config_of(layout: PartialLayout, base: Mapping[str, Any], seed: int, dtype: str) -> dict[str, Any]:
    """Return a base configuration with what the layout says in place of its own, quiet, all seeds given.

    Raises ConfigError for words about what the subject itself determines.
    """
    if layout.decided("micro_batch") is not None:
        raise ConfigError(
            f"layout {layout.text!r}: how many samples a micro-batch has, the subject's micro_batch() says; leave mb out"
        )
    if layout.units is not None:
        raise ConfigError(
            f"layout {layout.text!r}: what a layer is, the subject's layers say; leave half out, and return them in half blocks"
        )
    config = configuration(layout, base)
    if config.get("train_micro_batch_size_per_gpu") in (None, "auto"):
        config["train_micro_batch_size_per_gpu"] = 1
    config["gradient_accumulation_steps"] = accumulation(layout, base)
    config.setdefault("optimizer", {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})
    config["pipeline"]["seed_layers"] = True
    return config | {
        "seed": seed,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "dump_state": False,
        "run_record": {},
        "bf16": {"enabled": dtype == "bfloat16"},
    }
