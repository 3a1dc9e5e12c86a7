"""Declarations of a model about its sharded weights: modules gathered whole, and parameters used outside of their module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import nn

from parallel3d.config import ZeroConfig
from parallel3d.errors import ConfigError, nearest
from parallel3d.zero.weights import WeightState

_LEAF, _EXTERNAL = "_zero3_leaf", "_zero3_external"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Gather the weights of each module of these classes together, with those of its submodules. Call it before `initialize`.

    - leaf_module_classes: classes, or their names, with or without the package.

    Returns the modules, also those of subclasses. Raises ConfigError if there is none, unless raise_if_not_found is False.
    """
    names = {
        item if isinstance(item, str) else f"{item.__module__}.{item.__qualname__}" for item in leaf_module_classes
    }
    found = [module for module in model.modules() if not names.isdisjoint(_class_names(module))]
    if not found and raise_if_not_found:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(f"no module of {type(model).__name__} is of the classes {sorted(names)}; it has {classes}")
    _mark(found)
    return found


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Do what set_z3_leaf_modules does for the modules with these names in model.named_modules(), or undo it if flag is False.

    Returns the modules, and the names that none has. Raises ConfigError if there are any, unless raise_if_not_found is False.
    """
    return _mark_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Do what set_z3_leaf_modules_by_name does for the modules whose names end in one of these."""
    return _mark_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def _mark_named(
    model: nn.Module, wanted: Iterable[str], matches: Callable[[str, str], bool], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    found = {item: [module for name, module in modules.items() if matches(name, item)] for item in wanted}
    missing = [item for item, own in found.items() if not own]
    if missing and raises:
        hint = nearest(missing[0], modules)
        raise ConfigError(f"no module of {type(model).__name__} has the name or suffix {missing[0]!r}.{hint}")
    marked = list(dict.fromkeys(module for own in found.values() for module in own))
    _mark(marked, flag)
    return marked, missing


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark a module as set_z3_leaf_modules does, or undo it."""
    _mark([model], flag)


def _class_names(module: nn.Module) -> Iterator[str]:
    for kind in type(module).__mro__:
        yield kind.__name__
        yield f"{kind.__module__}.{kind.__qualname__}"


def _mark(modules: Iterable[nn.Module], leaf: bool = True) -> None:
    for module in modules:
        vars(module)[_LEAF] = leaf


def set_configured_leaf_modules(model: nn.Module, zero: ZeroConfig) -> None:
    """Do what set_z3_leaf_modules does for the modules that `leaf_module` and stage3_module_granularity_threshold choose.

    The granularity of a module is the number of its parameters for each module with parameters in it, itself included and
    containers left out: it is small for a layer of many experts. Of nested modules the outermost is chosen, but none of more
    than 1e9 parameters. Raises ConfigError for a class or name that no module has.
    """
    leaf = zero.leaf_module
    for kind in leaf.classes:
        set_z3_leaf_modules(model, [kind])
    set_z3_leaf_modules_by_name(model, leaf.names)
    set_z3_leaf_modules_by_suffix(model, leaf.name_suffixes)
    if zero.stage3_module_granularity_threshold:
        _mark(_fine_grained(model, zero.stage3_module_granularity_threshold))


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGEST_LEAF = 10**9


def _fine_grained(module: nn.Module, threshold: int) -> Iterator[nn.Module]:
    numel = sum(p.numel() for p in module.parameters())
    if not isinstance(module, _CONTAINERS) and any(True for _ in module.children()) and 0 < numel <= _LARGEST_LEAF:
        inside = [m for m in module.modules() if not isinstance(m, _CONTAINERS) and any(True for _ in m.parameters())]
        if numel // len(inside) <= threshold:
            yield module
            return
    for child in module.children():
        yield from _fine_grained(child, threshold)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Undo set_z3_leaf_modules."""
    found = set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)
    _mark(found, leaf=False)
    return found


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that set_z3_leaf_modules has marked."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module is marked by set_z3_leaf_modules."""
    return bool(vars(model).get(_LEAF))


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Gather a parameter of another module, too, when `module` runs, whose forward uses it."""
    if not isinstance(parameter, nn.Parameter):
        raise ConfigError(
            f"{type(parameter).__name__} is not a torch.nn.Parameter, which register_external_parameter needs"
        )
    external = vars(module).setdefault(_EXTERNAL, [])
    if all(other is not parameter for other in external):
        external.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Undo register_external_parameter."""
    external = vars(module).get(_EXTERNAL, [])
    external[:] = [other for other in external if other is not parameter]


def external_parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    """Return the parameters that register_external_parameter has given a module."""
    found: list[nn.Parameter] = vars(module).get(_EXTERNAL, [])
    return found


def unwatch(model: nn.Module) -> None:
    """Make parameters of modules plain dicts again, as torch.compile needs them."""
    for module in model.modules():
        if isinstance(module._parameters, WatchedParameters):
            vars(module)["_parameters"] = dict(module._parameters)


class WatchedParameters(dict[str, nn.Parameter | None]):
    """The parameters of a module; calls `on_use` when one that is not gathered is read as an attribute of the module.

    A parameter that is gathered in fp8 is gathered in its own dtype at such a read.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], on_use: Callable[[nn.Parameter], None] = lambda _: None
    ):
        super().__init__(parameters)
        self._on_use = on_use

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            status = vars(parameter).get("ds_status", WeightState.GATHERED)
            if status is WeightState.IN_FP8:
                vars(parameter)["sharded_weights"].read_whole()
            elif status is not WeightState.GATHERED:
                self._on_use(parameter)
        return parameter

    def __reduce__(self) -> tuple[type, tuple[dict[str, nn.Parameter | None]]]:
        return dict, (dict(self),)


def _named_external_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(str(k), parameter) for k, parameter in enumerate(external_parameters(module))]


def declare_deepspeed_attributes(model: nn.Module) -> None:
    """Give a model the attributes that scripts clear and read when they remove DeepSpeed's hooks.

    ds_external_parameters() returns (name, parameter) of those that register_external_parameter gave it; each parameter has an
    empty set ds_active_sub_modules.
    """
    vars(model)["ds_external_parameters"] = partial(_named_external_parameters, model)
    for parameter in model.parameters():
        vars(parameter)["ds_active_sub_modules"] = set()
