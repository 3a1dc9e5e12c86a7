"""Which places in the list of layers share a module or a parameter, and which chunks therefore hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from parallel3d.errors import PartitionError
from parallel3d.pipe.specs import Layer, LayerSpec, TiedLayerSpec


class TieIndex:
    """Ties of a list of layers, read off the specs alone, so that every rank knows those of all ranks.

    part_of: layer -> chunk. `builder[k]` is the layer that layer k's module is built as: the first of its key that
    builds the same, else k itself.
    """

    def __init__(self, layers: Sequence[Layer], part_of: Callable[[int], int]):
        self._layers = layers
        self._first: dict[str, list[int]] = {}
        self.builder = tuple(self._builder(k) for k in range(len(layers)))
        self._users: dict[int, set[int]] = {}
        for k, builder in enumerate(self.builder):
            self._users.setdefault(builder, set()).add(part_of(k))

    def _builder(self, k: int) -> int:
        layer = self._layers[k]
        if not isinstance(layer, TiedLayerSpec):
            # One module object at several places is one module; so is one spec only where it is tied.
            return next((j for j in range(k) if isinstance(layer, nn.Module) and self._layers[j] is layer), k)
        builders = self._first.setdefault(layer.key, [])
        for j in builders:
            other = self._layers[j]
            if isinstance(other, LayerSpec) and other.builds_like(layer):
                return j
        builders.append(k)
        return k

    def origin(self, builder: int, name: str) -> tuple[int, str]:
        """(layer, name in it) of the parameter that parameter `name` of module `builder` is: itself unless tied."""
        layer = self._layers[builder]
        if isinstance(layer, TiedLayerSpec) and name in layer.tied_weight_attr:
            first = self._first[layer.key][0]
            source = self._layers[first]
            assert isinstance(source, TiedLayerSpec)
            if len(source.tied_weight_attr) != len(layer.tied_weight_attr):
                raise PartitionError(
                    f"layers {first} and {builder} of tie {layer.key!r} name {source.tied_weight_attr} and "
                    f"{layer.tied_weight_attr}; name equally many attributes"
                )
            return first, source.tied_weight_attr[layer.tied_weight_attr.index(name)]
        return builder, name

    def owners(self, builder: int, name: str) -> tuple[int, ...]:
        """The chunks that hold parameter `name` of module `builder`."""
        layer = self._layers[builder]
        if isinstance(layer, TiedLayerSpec) and name in layer.tied_weight_attr:
            return self._key_users(layer.key)
        return tuple(sorted(self._users[builder]))

    def _key_users(self, key: str) -> tuple[int, ...]:
        return tuple(sorted(set().union(*(self._users[b] for b in self._first[key]))))

    def shared_owners(self) -> list[tuple[int, ...]]:
        """All sets of several chunks that may hold a parameter together, in one order on every rank."""
        whole = {tuple(sorted(users)) for users in self._users.values()}
        return sorted(owners for owners in whole | {self._key_users(key) for key in self._first} if len(owners) > 1)


def replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Make the parameter at dotted path `name` this one. Raises PartitionError when the shapes differ."""
    path, _, leaf = name.rpartition(".")
    old = tied_parameter(module, name)
    if old.shape != parameter.shape:
        raise PartitionError(
            f"tied parameter {name!r} of {type(module).__name__} is {list(old.shape)}, the one it is tied to "
            f"{list(parameter.shape)}; tied parameters need one shape"
        )
    setattr(module.get_submodule(path), leaf, parameter)


def tied_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """The parameter at dotted path `name`. Raises PartitionError, naming those that are there."""
    try:
        return module.get_parameter(name)
    except AttributeError:
        there = [n for n, _ in module.named_parameters()]
        raise PartitionError(
            f"tied_weight_attr {name!r} is not a parameter of {type(module).__name__}; it has {there}"
        ) from None
