"""parallel3d: trains neural networks with pipeline, ZeRO data and tensor parallelism combined.

What it offers is imported when it is first used: the commands' help does without torch.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
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
_DEEPSPEED = ("accelerator", "checkpointing", "ops", "runtime", "utils")
_PACKAGES |= {name: f"deepspeed.{name}" for name in _DEEPSPEED}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        value: Any = import_module(f"parallel3d.{_PACKAGES[name]}")
    elif name in _MODULES:
        value = getattr(import_module(f"parallel3d.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module 'parallel3d' has no attribute {name!r}")
    globals()[name] = value
    return value


class _DeepSpeedPaths:
    """Finds DeepSpeed's import paths: `parallel3d.ops.adam` is parallel3d.deepspeed.ops.adam, and so on."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of such a module, which is the same one under both names; None for others."""
        package, _, rest = fullname.partition(".")
        if package != __name__ or rest.partition(".")[0] not in (*_DEEPSPEED, "arguments"):
            return None
        alias = import_module("parallel3d.deepspeed.aliases").Alias  # sets the paths of what is imported always
        own = f"{__name__}.deepspeed.{rest}"
        try:
            module = sys.modules.get(fullname) or import_module(own)
        except ModuleNotFoundError as error:
            if error.name != own:
                raise  # the module is there, and lacks another one
            return None
        return spec_from_loader(fullname, alias(module), is_package=True)


if _DeepSpeedPaths not in sys.meta_path:
    sys.meta_path.insert(0, _DeepSpeedPaths)
