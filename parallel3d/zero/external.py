"""Declarations of a model about its sharded weights: modules gathered whole, and parameters used outside of their module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from torch import nn

from parallel3d.errors import ConfigError

_LEAF, _EXTERNAL = "_zero3_leaf", "_zero3_external"


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Gather the weights of each module of these classes together, with those of its submodules. Call it before `initialize`.

    - leaf_module_classes: classes, or their names.

    Returns the modules. Raises ConfigError if there is none.
    """
    names = {item if isinstance(item, str) else item.__name__ for item in leaf_module_classes}
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(f"no module of {type(model).__name__} is of the classes {sorted(names)}; it has {classes}")
    for module in found:
        vars(module)[_LEAF] = True
    return found


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str]) -> list[nn.Module]:
    """Undo set_z3_leaf_modules."""
    found = set_z3_leaf_modules(model, leaf_module_classes)
    for module in found:
        vars(module)[_LEAF] = False
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
            f"{type(parameter).__name__} is no torch.nn.Parameter, which register_external_parameter needs"
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
