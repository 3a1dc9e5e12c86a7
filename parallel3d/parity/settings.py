"""Settings of a check, and the configuration that a layout runs with in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallel3d.config.layout import PartialLayout, configuration, given_section
from parallel3d.errors import ConfigError

TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 5e-2}
# If a layout rounds the last bit of an operand differently, fp8 may round it to the next number, up to 25% away.
FP8_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Settings:
    """Settings of a check.

    - steps: the number of optimizer steps.
    - dtype: dtype of the weights, a key of TOLERANCES.
    - tolerance: relative difference that passes; None for the dtype's, or that of fp8.
    """

    steps: int = 3
    seed: int = 1234
    dtype: str = "float32"
    tolerance: float | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def building_dtype(self) -> torch.dtype:
        """The default dtype under which layers and data are made: half-precision weights are rounded from fp32 masters."""
        return torch.float32 if self.dtype == "bfloat16" else self.torch_dtype


def accumulation(layout: PartialLayout, base: Mapping[str, Any]) -> int:
    """Return the micro-batches of each replica in a step: the layout's, else the configuration's, else two per stage."""
    configured = base.get("gradient_accumulation_steps")
    return layout.decided("micro_batches") or (configured if isinstance(configured, int) else 2 * layout.stages)


def check_config(layout: PartialLayout, base: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return a base configuration with the layout's keys in place of its own, all seeds given, and nothing reported.

    Raises ConfigError for words of the layout that only the model's function can carry out.
    """
    if layout.decided("micro_batch") is not None:
        raise ConfigError(
            f"layout {layout.text!r}: the size of a micro-batch is what the function's micro_batch() returns; leave mb out"
        )
    if layout.units is not None:
        raise ConfigError(
            f"layout {layout.text!r}: the layers are those that the function returns; leave half out, and return half blocks"
        )
    config = configuration(layout, base)
    if config.get("train_micro_batch_size_per_gpu") in (None, "auto"):
        config["train_micro_batch_size_per_gpu"] = 1
    config["gradient_accumulation_steps"] = accumulation(layout, base)
    config.setdefault("optimizer", {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})
    config["pipeline"]["seed_layers"] = True
    zero = given_section(config, "zero_optimization")
    if zero.get("stage") == 3:
        # By default the weights of small layers stay whole: small models would train as stage 2.
        config["zero_optimization"] = {"stage3_param_persistence_threshold": 0, **zero}
    return config | {
        "seed": settings.seed,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "dump_state": False,
        "run_record": {},
        "bf16": {"enabled": settings.dtype == "bfloat16"},
    }
