"""Tied layers: which entries of the list share a module or a parameter, and which chunks therefore hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn
from torch.utils._pytree import tree_leaves

from parallel3d.comm.collectives import Group, all_gather_object, broadcast
from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import PartitionError
from parallel3d.parameters import ParameterInfo
from parallel3d.specs import Layer, LayerSpec, TiedLayerSpec


class TieIndex:
    """Ties of a list of layers. It is read from the specs alone, so that every rank knows the ties of all ranks.

    - part_of: layer -> chunk.
    - builder[k]: the index of the layer that layer k's module is built as: the first one with its key that builds the same
      module, else k itself. The methods name a module by this index.
    """

    def __init__(self, layers: Sequence[Layer], part_of: Callable[[int], int]):
        self._layers = layers
        self._tied = {k: layer for k, layer in enumerate(layers) if isinstance(layer, TiedLayerSpec)}
        # key -> the builders of that key
        self._builders: dict[str, list[int]] = {}
        self.builder = tuple(self._builder(k) for k in range(len(layers)))
        # builder -> the chunks that use its module
        self._users: dict[int, set[int]] = {}
        for k, builder in enumerate(self.builder):
            self._users.setdefault(builder, set()).add(part_of(k))

    def _builder(self, k: int) -> int:
        layer = self._tied.get(k)
        if layer is None:
            # A module object that is listed several times is one module. A spec object builds a module each time.
            layers = self._layers
            return next((j for j in range(k) if layers[j] is layers[k]), k) if isinstance(layers[k], nn.Module) else k
        builders = self._builders.setdefault(layer.key, [])
        builder = next((j for j in builders if self._tied[j].builds_like(layer)), k)
        if builder == k:
            builders.append(k)
        return builder

    def origin(self, builder: int, name: str) -> tuple[int, str]:
        """Return (layer, name) of the parameter that parameter `name` of module `builder` is tied to; itself if untied.

        Raises PartitionError when the layers of a key name different numbers of attributes.
        """
        attribute = self._attribute(builder, name)
        if attribute is None:
            return builder, name
        layer = self._tied[builder]
        first = self._builders[layer.key][0]
        source = self._tied[first]
        if len(source.tied_weight_attr) != len(layer.tied_weight_attr):
            raise PartitionError(
                f"layers {first} and {builder} of tie {layer.key!r} name {source.tied_weight_attr} and "
                f"{layer.tied_weight_attr}; name equally many attributes"
            )
        return first, source.tied_weight_attr[layer.tied_weight_attr.index(attribute)] + name[len(attribute) :]

    def _attribute(self, builder: int, name: str) -> str | None:
        """Return the tied attribute of module `builder` that is parameter `name`, or the submodule that contains it."""
        return next((a for a in self.attributes(builder) if name == a or name.startswith(a + ".")), None)

    def attributes(self, builder: int) -> tuple[str, ...]:
        """Return the attributes of module `builder` that are tied to other modules.

        Empty for a module that is not tied, or that all layers of its key share whole.
        """
        layer = self._tied.get(builder)
        return layer.tied_weight_attr if layer is not None and len(self._builders[layer.key]) > 1 else ()

    def owners(self, builder: int, name: str) -> tuple[int, ...]:
        """Return the chunks that hold parameter `name` of module `builder`."""
        if self._attribute(builder, name) is not None:
            return self._key_users(self._tied[builder].key)
        return tuple(sorted(self._users[builder]))

    def _key_users(self, key: str) -> tuple[int, ...]:
        return tuple(sorted(set().union(*(self._users[b] for b in self._builders[key]))))

    def shared_owners(self) -> list[tuple[int, ...]]:
        """Return all sets of two or more chunks that may share a parameter, in the same order on every rank."""
        whole_modules = {tuple(sorted(users)) for users in self._users.values()}
        by_attribute = {self._key_users(key) for key in self._builders}
        return sorted(owners for owners in whole_modules | by_attribute if len(owners) > 1)


def tied_parameters(module: nn.Module, attribute: str) -> dict[str, nn.Parameter]:
    """Return the parameters named by an attribute (a dotted path): one, or all of a submodule.

    Raises PartitionError, with the names that the module has, when the attribute names no parameter.
    """
    everything = dict(module.named_parameters(remove_duplicate=False))
    found = {name: p for name, p in everything.items() if name == attribute or name.startswith(attribute + ".")}
    if not found:
        raise PartitionError(
            f"tied_weight_attr {attribute!r} is not a parameter of {type(module).__name__}; it has {list(everything)}"
        )
    return found


def share_tied_parameters(modules: Iterable[tuple[int, nn.Module]], ties: TieIndex) -> None:
    """Make each parameter tied by attribute one object in all of this rank's modules, given as (builder, module)."""
    first: dict[tuple[int, str], nn.Parameter] = {}
    for layer, module in modules:
        for attribute in ties.attributes(layer):
            for name, parameter in tied_parameters(module, attribute).items():
                shared = first.setdefault(ties.origin(layer, name), parameter)
                if shared is not parameter:
                    _replace_parameter(module, parameter, shared)


def _replace_parameter(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put `new` wherever `module` has the parameter `old`. Raises PartitionError when their shapes differ."""
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter is old:
            if old.shape != new.shape:
                raise PartitionError(
                    f"tied parameter {name!r} of {type(module).__name__} is {list(old.shape)}, the one it is tied to "
                    f"{list(new.shape)}; tied parameters need one shape"
                )
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, new)


def broadcast_tied(
    infos: Iterable[ParameterInfo],
    groups: ProcessGroups,
    placement: Sequence[int],
    replica_groups: Mapping[tuple[int, ...], Group],
) -> None:
    """Give all copies of each tied parameter the bits of its first owner. Collective.

    Raises PartitionError on all ranks when a copy is missing, or differs in shape, dtype or requires_grad.
    """
    shared = {info.name: info for info in infos if info.shared}
    mine = {}
    for name, info in shared.items():
        p = info.parameter
        # All copies of a tied parameter must have this in common.
        mine[name] = info.owners, f"{list(p.shape)} {p.dtype} requires_grad={p.requires_grad}"
    everyone = all_gather_object(mine, groups.control)
    _check_copies([everyone[rank] for rank in groups.pipe.ranks], placement)
    for _, info in sorted(shared.items()):
        first_owner = groups.pipe.ranks[placement[info.owners[0]]]
        broadcast(info.parameter.data, first_owner, replica_groups[info.owners])


def _check_copies(stages: Sequence[Mapping[str, tuple[tuple[int, ...], str]]], placement: Sequence[int]) -> None:
    """Raise PartitionError unless the copies of each tied parameter exist and are alike.

    stages: for each stage, its tied parameters as name -> (owners, kind).
    """
    for name in sorted({name for there in stages for name in there}):
        found = {stage: there[name] for stage, there in enumerate(stages) if name in there}
        owners, _ = next(iter(found.values()))
        missing = {placement[c] for c in owners} - set(found)
        if missing:
            raise PartitionError(
                f"tied parameter {name} is on stages {sorted(found)} but the layer tied to it on stage {min(missing)} has no "
                "such parameter; name the same ones by tied_weight_attr"
            )
        if len(set(found.values())) > 1:
            kinds = " and ".join(f"{kind} on stage {stage}" for stage, (_, kind) in found.items())
            raise PartitionError(f"the copies of tied parameter {name} differ: {kinds}; make them alike")


def given_parameters(layer: Layer, module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters, by all their names, that the built layer `module` was given rather than made itself.

    These are all parameters of a layer that is a module, and those in the arguments of a spec.
    """
    named = dict(module.named_parameters(remove_duplicate=False))
    if not isinstance(layer, LayerSpec):
        return named
    arguments = tree_leaves((layer.module_args, layer.module_kwargs))
    outside = {p for leaf in arguments if isinstance(leaf, nn.Module) for p in leaf.parameters()}
    outside |= {leaf for leaf in arguments if isinstance(leaf, nn.Parameter)}
    return {name: parameter for name, parameter in named.items() if parameter in outside}


def refuse_untied_sharing(
    given: Sequence[Mapping[str, nn.Parameter]], ties: TieIndex, part_of: Callable[[int], int]
) -> None:
    """Raise PartitionError for different modules on different chunks that share a parameter.

    No tie adds up their gradients, so the copies would drift apart.

    given: see given_parameters, of each layer.
    """
    holder: dict[nn.Parameter, tuple[int, set[tuple[int, str]]]] = {}
    for k, named in enumerate(given):
        origins: dict[nn.Parameter, set[tuple[int, str]]] = {}
        for name, parameter in named.items():
            origins.setdefault(parameter, set()).add(ties.origin(ties.builder[k], name))
        for parameter, own in origins.items():
            j, other = holder.setdefault(parameter, (k, own))
            if own.isdisjoint(other) and part_of(j) != part_of(k):
                raise PartitionError(
                    f"layers {j} and {k} share a parameter but lie on chunks {part_of(j)} and {part_of(k)}; "
                    "use TiedLayerSpec for both"
                )
