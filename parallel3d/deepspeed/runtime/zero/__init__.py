"""`parallel3d.deepspeed.runtime.zero`, where DeepSpeed scripts look for names of ZeRO-3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parallel3d.deepspeed.runtime.zero import offload_config, partition_parameters
from parallel3d.deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus
from parallel3d.zero.external import register_external_parameter, unregister_external_parameter

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Gather all weights of an engine at once, and take out the hooks that gather them one by one; yield the engine."""
    with GatheredParameters(model.parameters()):
        blocks = getattr(model.optimizer, "parameter_offload", None)
        if blocks is not None:
            blocks.remove_hooks()
        try:
            yield model
        finally:
            if blocks is not None:
                blocks._register_deepspeed_module(blocks.module)
