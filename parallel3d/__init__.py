"""parallel3d: trains neural networks with pipeline, ZeRO data and tensor parallelism combined.

What it offers is imported when it is first used: the commands' help does without torch.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING, Any

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

# Name -> the module that defines it; the modules themselves are named by _PACKAGES.
_MODULES = {
    "DeepSpeedConfig": "deepspeed.names",
    "DeepSpeedEngine": "deepspeed.accessors",
    "Engine": "engine",
    "LayerSpec": "pipe",
    "OnDevice": "deepspeed.names",
    "Parallel3DError": "errors",
    "PipelineEngine": "deepspeed.accessors",
    "PipelineModule": "pipe",
    "RepeatingLoader": "pipe.data",
    "TiedLayerSpec": "pipe",
    "add_config_arguments": "deepspeed.arguments",
    "get_accelerator": "deepspeed.accelerator",
    "init_distributed": "comm",
    "initialize": "initialization",
    "log_dist": "deepspeed.utils",
    "logger": "deepspeed.utils",
    "tp_model_init": "models.huggingface.in_place",
}
_PACKAGES = {name: name for name in ("comm", "pipe", "zero")}
_PACKAGES |= {name: f"deepspeed.{name}" for name in ("accelerator", "checkpointing", "ops", "runtime", "utils")}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        value: Any = import_module(f"parallel3d.{_PACKAGES[name]}")
    elif name in _MODULES:
        value = getattr(import_module(f"parallel3d.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'parallel3d' has no attribute {name!r}")
    globals()[name] = value
    return value


class _Finder(MetaPathFinder):
    """Finds parallel3d.ops and others by DeepSpeed's import paths; parallel3d.deepspeed has them, and takes long to import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != __name__ or (name != "arguments" and _PACKAGES.get(name, name) == name):
            return None
        alias = import_module("parallel3d.deepspeed.aliases").Alias
        return spec_from_loader(fullname, alias(sys.modules.pop(fullname)), is_package=True)


sys.meta_path.append(_Finder())
