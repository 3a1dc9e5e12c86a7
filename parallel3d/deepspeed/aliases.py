"""DeepSpeed's modules by their import paths in `parallel3d`, and in the module `deepspeed` of `p3d deepspeed install`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

# DeepSpeed's version with these names, for libraries that ask for a minimum; the part after + marks this package.
VERSION = "0.19.8+parallel3d"
_NAME, _OWN = "deepspeed", "parallel3d"
# Modules whose names are all in deepspeed.names.
_SMALL = """checkpoint checkpoint.utils git_version_info moe moe.layer moe.utils ops.aio ops.op_builder
runtime.bf16_optimizer runtime.checkpoint_engine runtime.checkpoint_engine.torch_checkpoint_engine runtime.config
runtime.config_utils runtime.fp16 runtime.fp16.fused_optimizer runtime.fp16.unfused_optimizer runtime.hybrid_engine
runtime.precision_config runtime.sequence_parallel runtime.sequence_parallel.ulysses_sp runtime.zero.config runtime.zero.stage3
runtime.zero.stage_1_and_2 runtime.zero.utils sequence sequence.layer utils.groups utils.timer utils.torch"""
# Modules whose names are all in deepspeed.runtime.
_RUNTIME = """runtime runtime.lr_schedules runtime.pipe.topology runtime.utils runtime.zero runtime.zero.offload_config
runtime.zero.partition_parameters"""
# DeepSpeed's modules -> where their names are in this package.
PLACES = {
    **dict.fromkeys(_SMALL.split(), "deepspeed.names"),
    **dict.fromkeys(_RUNTIME.split(), "deepspeed.runtime"),
    **dict.fromkeys(("ops", "ops.adagrad", "ops.adam", "ops.lion"), "deepspeed.ops"),
    **dict.fromkeys(("utils", "utils.logging", "utils.tensor_fragment"), "deepspeed.utils"),
    "accelerator": "deepspeed.accelerator",
    "arguments": "deepspeed.arguments",
    "checkpointing": "deepspeed.checkpointing",
    "launcher.runner": "launcher.deepspeed",
    "monitor.monitor": "monitor.writers",
    **dict.fromkeys(
        ("profiling", "profiling.flops_profiler", "profiling.flops_profiler.profiler"),
        "deepspeed.profiling.flops_profiler",
    ),
    "runtime.activation_checkpointing": "deepspeed",
    "runtime.activation_checkpointing.checkpointing": "deepspeed.checkpointing",
    "runtime.dataloader": "pipe.data",
    "runtime.engine": "deepspeed.accessors",
    "runtime.fp16.loss_scaler": "optim.precision",
    "runtime.pipe": "pipe",
    "runtime.pipe.engine": "deepspeed.accessors",
    "runtime.pipe.module": "pipe",
    "runtime.pipe.schedule": "deepspeed.schedules",
    "utils.numa": "launcher.hosts",
}


class Alias(Loader):
    """Loads a module of this package under another name: both names are the same module."""

    def __init__(self, module: ModuleType):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the module has been executed already."""
        module.__spec__ = self._spec  # importing has set that of the alias


class Finder(MetaPathFinder):
    """Finds parallel3d.X and parallel3d.deepspeed.X where PLACES says, and deepspeed.X there or as a module of this package.

    top: "parallel3d", for a finder after those of real modules, or "deepspeed", for one before them.
    """

    def __init__(self, top: str):
        self._top = top

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module under its other name; None for a name that is not found."""
        top, _, rest = fullname.partition(".")
        if top != self._top:
            return None
        place = PLACES.get(rest.removeprefix("deepspeed."))
        places = [place] if place is not None else [f"deepspeed.{rest}", rest] if top == _NAME else []
        for name in (f"{_OWN}.{place}" for place in places):
            try:
                return spec_from_loader(fullname, Alias(import_module(name)), is_package=True)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise  # the module is there, and lacks another one
        return None


def become_deepspeed(module: ModuleType) -> None:
    """Give the module `deepspeed` the names and the modules of this package."""
    if _NAME not in (finder._top for finder in sys.meta_path if isinstance(finder, Finder)):
        sys.meta_path.insert(0, Finder(_NAME))

    def find(name: str) -> Any:
        for place in ("parallel3d", "parallel3d.deepspeed.names"):
            if not name.startswith("__") and hasattr(own := import_module(place), name):
                return getattr(own, name)
        try:
            return import_module(f"{_NAME}.{name}")
        except ModuleNotFoundError:
            raise AttributeError(f"module {_NAME!r} of parallel3d has no attribute {name!r}") from None

    numbers = dict(zip(("major", "minor", "patch"), map(int, VERSION.partition("+")[0].split(".")), strict=True))
    vars(module).update({f"__version_{name}__": number for name, number in numbers.items()})
    vars(module).update(__getattr__=find, __version__=VERSION, __git_hash__=None, __git_branch__=None)
