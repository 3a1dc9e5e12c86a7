"""parallel3d: trains neural networks with pipeline, ZeRO data and tensor parallelism combined.

Public names are imported when they are first used, so that the help of the commands needs no torch.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from parallel3d.deepspeed.aliases import PLACES, Finder

if TYPE_CHECKING:
    from parallel3d import comm, pipe, zero
    from parallel3d.comm import init_distributed
    from parallel3d.deepspeed import accelerator, checkpointing, ops, runtime, utils
    from parallel3d.deepspeed.accelerator import get_accelerator
    from parallel3d.deepspeed.accessors import DeepSpeedEngine, PipelineEngine
    from parallel3d.deepspeed.arguments import add_config_arguments
    from parallel3d.deepspeed.names import DeepSpeedConfig, OnDevice
    from parallel3d.deepspeed.utils import log_dist, logger
    from parallel3d.engine import Engine
    from parallel3d.errors import Parallel3DError
    from parallel3d.initialization import initialize
    from parallel3d.models.huggingface.in_place import tp_model_init
    from parallel3d.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from parallel3d.pipe.data import RepeatingLoader

__version__ = "0.1.0"

__all__ = [
    "DeepSpeedConfig",
    "DeepSpeedEngine",
    "Engine",
    "LayerSpec",
    "OnDevice",
    "Parallel3DError",
    "PipelineEngine",
    "PipelineModule",
    "RepeatingLoader",
    "TiedLayerSpec",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "pipe",
    "runtime",
    "tp_model_init",
    "utils",
    "zero",
]

# Names that are not modules -> the modules that define them.
_PLACES = {
    "Engine": "engine",
    "Parallel3DError": "errors",
    "RepeatingLoader": "pipe.data",
    "add_config_arguments": "deepspeed.arguments",
    "get_accelerator": "deepspeed.accelerator",
    "init_distributed": "comm",
    "initialize": "initialization",
    "tp_model_init": "models.huggingface.in_place",
    **dict.fromkeys(("DeepSpeedConfig", "OnDevice"), "deepspeed.names"),
    **dict.fromkeys(
        ("InferenceEngine", "add_tuning_arguments", "init_inference"), "deepspeed.names"
    ),  # each is refused
    **dict.fromkeys(("DeepSpeedEngine", "PipelineEngine"), "deepspeed.accessors"),
    **dict.fromkeys(("LayerSpec", "PipelineModule", "TiedLayerSpec"), "pipe"),
    **dict.fromkeys(("log_dist", "logger"), "deepspeed.utils"),
}


def __getattr__(name: str) -> Any:
    if name not in {*__all__, *_PLACES, *PLACES}:
        raise AttributeError(f"module 'parallel3d' has no attribute {name!r}")
    place = _PLACES.get(name)
    value: Any = import_module(f"parallel3d.{place or name}")
    globals()[name] = value = value if place is None else getattr(value, name)
    return value


sys.meta_path.append(Finder("parallel3d"))
