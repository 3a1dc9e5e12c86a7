"""parallel3d: trains neural networks with pipeline, ZeRO data and tensor parallelism combined.

What takes long to import is imported when it is first used: the launcher and most commands do without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from parallel3d import comm
from parallel3d.comm import init_distributed
from parallel3d.deepspeed import accelerator, checkpointing, ops, runtime, utils
from parallel3d.deepspeed.accelerator import get_accelerator
from parallel3d.deepspeed.arguments import add_config_arguments
from parallel3d.deepspeed.utils import log_dist, logger
from parallel3d.errors import Parallel3DError

if TYPE_CHECKING:
    from parallel3d import pipe, zero
    from parallel3d.deepspeed.accessors import DeepSpeedEngine, PipelineEngine
    from parallel3d.deepspeed.names import DeepSpeedConfig, OnDevice
    from parallel3d.engine import Engine
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

_MODULES = {
    "DeepSpeedConfig": "deepspeed.names",
    "DeepSpeedEngine": "deepspeed.accessors",
    "Engine": "engine",
    "LayerSpec": "pipe",
    "OnDevice": "deepspeed.names",
    "PipelineEngine": "deepspeed.accessors",
    "PipelineModule": "pipe",
    "RepeatingLoader": "pipe.data",
    "TiedLayerSpec": "pipe",
    "initialize": "initialization",
    "tp_model_init": "models.huggingface.in_place",
}


def __getattr__(name: str) -> Any:
    if name in ("pipe", "zero"):
        return import_module(f"parallel3d.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'parallel3d' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"parallel3d.{_MODULES[name]}"), name)
    return value
