"""zero.Init: models whose weights are sharded while they are built, so that no rank ever holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.comm.collectives import Group, broadcast
from parallel3d.comm.environment import local_device
from parallel3d.comm.groups import whole_world
from parallel3d.config import Config, load_sections
from parallel3d.errors import ConfigError
from parallel3d.zero.gathered import GatheredParameters
from parallel3d.zero.host_shards import HostShards
from parallel3d.zero.weights import ShardedWeights, weights_of


def shards_weights(config: str | Path | Mapping[str, Any] | Config | None) -> bool:
    """Return whether a configuration shards weights: whether there is one, and its zero_optimization.stage is 3."""
    return config is not None and load_sections(config, "zero_optimization").zero_optimization.stage == 3


def host_shards(config: str | Path | Mapping[str, Any] | Config | None) -> HostShards | None:
    """Return the HostShards that keep shards while a model is built, if the configuration offloads them; else None."""
    if not shards_weights(config):
        return None
    assert config is not None
    section = load_sections(config, "zero_optimization").zero_optimization.offload_param
    return HostShards(local_device(), pin=False) if section.device not in ("none", None) else None


@torch.no_grad()
def shard_parameter(parameter: nn.Parameter, group: Group, host: HostShards | None = None) -> None:
    """Keep only this rank's shard of a parameter. The values are those that the first rank of the group has. Collective.

    host: keeps the shard, also where it is the whole parameter; None to keep it on the device.
    """
    is_alone = group.size == 1 and host is None
    if is_alone or weights_of(parameter) is not None or not parameter.is_floating_point():
        return
    numel, size = parameter.numel(), -(-parameter.numel() // group.size)
    whole = parameter.new_zeros(size * group.size)
    whole[:numel] = parameter.reshape(-1)
    broadcast(whole, group.ranks[0], group)
    view = whole[:numel].view(parameter.shape)
    parameter.data = view
    shard = whole[group.index * size :][:size]
    ShardedWeights(whole, shard.clone() if host is None else host.keep(shard), [parameter], [view], group, host)


class Init:
    """Context in which the parameters of modules are sharded over all ranks as soon as each module is built. DeepSpeed's API.

    - module: shard the parameters of this module, too, which is built already.
    - config_dict_or_path (or config): a configuration; without ZeRO stage 3 the context does nothing.
    - dtype: cast the parameters to it, before they are sharded.
    - remote_device: "cpu" or "nvme" to keep the shards in host memory until `initialize` is called, also those of a single
      rank. A configuration with offload_param has the same effect.
    - enabled: False to do nothing. Other arguments of DeepSpeed's are accepted and have no effect.

    All ranks must build the same modules in the same order, and get the first rank's values. `module.apply(function)` gathers
    the parameters of each submodule around the function; functions of torch.nn.init gather what they write. A PipelineModule
    needs no such context: it shards its layers itself.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: object = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: str | Path | Mapping[str, Any] | Config | None = None,
        config: str | Path | Mapping[str, Any] | Config | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **others: object,
    ):
        if data_parallel_group is not None:
            raise ConfigError("zero.Init shards over all ranks; leave data_parallel_group out")
        given = config_dict_or_path if config_dict_or_path is not None else config
        self._enabled = enabled and (given is None or shards_weights(given))
        self._host = HostShards(local_device(), pin=False) if remote_device in ("cpu", "nvme") else host_shards(given)
        self._dtype = dtype
        self._building: list[nn.Module] = []
        self._restore = ExitStack()
        if self._enabled and module is not None:
            for each in module.modules():
                self._shard(each)

    def __enter__(self) -> Init:
        if self._enabled:
            whole_world()  # joins it, before the first module is built
            for kind in list(_classes(nn.Module)):
                self._wrap(kind)
            self._replace(nn.Module, "__init_subclass__", classmethod(lambda kind, **kwargs: self._wrap(kind)))
            self._replace(nn.Module, "apply", _apply_gathered)
            for name, function in list(vars(nn.init).items()):
                if name.startswith("_no_grad_"):  # what torch.nn.init writes with
                    self._replace(nn.init, name, partial(_initialize_gathered, function))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._building.clear()
        self._restore.close()

    def _replace(self, kind: Any, name: str, value: Any) -> None:
        """Set an attribute of a class or module until the end of the context."""
        if name in vars(kind):
            self._restore.callback(setattr, kind, name, vars(kind)[name])
        else:
            self._restore.callback(delattr, kind, name)
        setattr(kind, name, value)

    def _wrap(self, kind: type[nn.Module]) -> None:
        """Shard the parameters of each new instance of a class when its own class's constructor has returned."""
        original: Callable[..., None] | None = vars(kind).get("__init__")
        if original is None or kind is nn.Module:
            return

        @wraps(original)
        def build(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if any(module is outer for outer in self._building):  # called by a subclass
                original(module, *args, **kwargs)
                return
            self._building.append(module)
            try:
                original(module, *args, **kwargs)
            finally:
                if self._building:
                    self._building.pop()
            self._shard(module)

        self._replace(kind, "__init__", build)

    def _shard(self, module: nn.Module) -> None:
        """Shard a module's own parameters; once none is being built, also those inside that were on the meta device."""
        group = whole_world()
        for parameter in module.parameters(recurse=not self._building):
            if weights_of(parameter) is None and not parameter.is_meta:
                cast = parameter.is_floating_point() and self._dtype is not None
                parameter.data = parameter.data.to(local_device(), self._dtype if cast else None)
                shard_parameter(parameter, group, self._host)


def _classes(kind: type) -> Iterator[type]:
    yield kind
    inner: type
    for inner in type.__subclasses__(kind):
        yield from _classes(inner)


def _apply_gathered(module: nn.Module, function: Callable[[nn.Module], None]) -> nn.Module:
    """Do what nn.Module.apply does, with each module's parameters whole while the function runs; keep the first rank's."""
    for child in module.children():
        child.apply(function)
    with GatheredParameters(module.parameters(recurse=False), modifier_rank=0):
        function(module)
    return module


def _initialize_gathered(function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a function of torch.nn.init on a whole parameter; keep the first rank's values."""
    if weights_of(tensor) is None:
        return function(tensor, *args, **kwargs)
    assert isinstance(tensor, nn.Parameter)
    with GatheredParameters(tensor, modifier_rank=0):
        return function(tensor, *args, **kwargs)
