"""The module `deepspeed` of `p3d deepspeed install`: its modules and names are those of this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

# DeepSpeed's version with these names, for libraries that ask for a minimum; the part after + tells the two apart.
VERSION = "0.19.8+parallel3d"
_NAME = "deepspeed"
# Modules whose names are all in deepspeed.names.
_SMALL = """checkpoint checkpoint.utils git_version_info moe moe.layer moe.utils ops.aio ops.op_builder runtime.bf16_optimizer
runtime.checkpoint_engine runtime.checkpoint_engine.torch_checkpoint_engine runtime.config runtime.config_utils runtime.fp16
runtime.fp16.fused_optimizer runtime.fp16.unfused_optimizer runtime.hybrid_engine runtime.precision_config
runtime.sequence_parallel runtime.sequence_parallel.ulysses_sp runtime.zero.config runtime.zero.stage3
runtime.zero.stage_1_and_2 runtime.zero.utils sequence sequence.layer utils.groups utils.torch"""
# DeepSpeed's modules whose names are elsewhere in this package.
ELSEWHERE = dict.fromkeys(_SMALL.split(), "deepspeed.names") | {
    "launcher.multinode_runner": "launcher.multinode_runner",
    "monitor.monitor": "monitor.writers",
    "profiling.flops_profiler.profiler": "deepspeed.profiling.flops_profiler",
    "runtime.activation_checkpointing": "deepspeed",
    "runtime.activation_checkpointing.checkpointing": "deepspeed.checkpointing",
    "runtime.dataloader": "pipe.data",
    "runtime.engine": "deepspeed.accessors",
    "runtime.fp16.loss_scaler": "optim.precision",
    "runtime.pipe": "pipe",
    "runtime.pipe.engine": "deepspeed.accessors",
    "runtime.pipe.module": "pipe",
    "runtime.pipe.schedule": "deepspeed.schedules",
    "runtime.pipe.topology": "deepspeed.topology",
    "utils.numa": "launcher.hosts",
    "utils.tensor_fragment": "deepspeed.utils",
}


class Alias(Loader):
    """Loads a module of this package under another name: both names are the same module."""

    def __init__(self, module: ModuleType):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing: the module has been."""
        module.__spec__ = self._spec  # importing has set that of the alias


class _Finder(MetaPathFinder):
    """Finds deepspeed.X where ELSEWHERE says, else as parallel3d.deepspeed.X, else as parallel3d.X."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top, _, rest = fullname.removeprefix("parallel3d.").partition(".")
        if top != _NAME or (fullname.startswith("parallel3d.") and rest not in ELSEWHERE):
            return None
        places = [ELSEWHERE[rest]] if rest in ELSEWHERE else [f"deepspeed.{rest}", rest]
        for name in (f"parallel3d.{place}" for place in places):
            try:
                return spec_from_loader(fullname, Alias(import_module(name)), is_package=True)
            except ModuleNotFoundError as error:
                if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                    raise  # the module is there, and lacks another one
        return None


def become_deepspeed(module: ModuleType) -> None:
    """Give the module `deepspeed` the names and the modules of this package."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())

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
