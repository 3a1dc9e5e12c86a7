"""Nested structures of tensors: the structure of a message, and a tree whose tensors can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from parallel3d.comm.peer.copies import TensorKind


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, and whether it requires a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def on(self, device: torch.device) -> TensorKind:
        """Return the kind of such a tensor on a device."""
        return TensorKind(self.shape, self.dtype, device)


@dataclass(frozen=True)
class Structure:
    """A pytree without the contents of its tensors.

    `leaves` holds a TensorSpec in place of each tensor, and all other leaves by value.
    """

    tree: TreeSpec
    leaves: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[[Any], Structure], tuple[Any]]:
        # Pickled as the pytree with specs in place of tensors: containers pickle in every torch version, TreeSpecs don't.
        return _from_skeleton, (tree_unflatten(self.leaves, self.tree),)

    def __str__(self) -> str:
        return str(tree_unflatten(self.leaves, self.tree))

    @cached_property
    def tensors(self) -> list[TensorSpec]:
        """All tensors, in order: they travel forward."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorSpec)]

    @cached_property
    def gradients(self) -> list[TensorSpec]:
        """The tensors that require a gradient, in order: their gradients travel back."""
        return [leaf for leaf in self.tensors if leaf.requires_grad]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the pytree with these tensors in place of their specs."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.tree)


def _from_skeleton(skeleton: Any) -> Structure:
    leaves, tree = tree_flatten(skeleton)
    return Structure(tree, tuple(leaves))


def describe(value: Any) -> tuple[Structure, list[Tensor]]:
    """Split a pytree into its structure and its tensors."""
    leaves, tree = tree_flatten(value)
    tensors: list[Tensor] = []
    specs: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            specs.append(TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad))
        else:
            specs.append(leaf)
    return Structure(tree, tuple(specs)), tensors


@dataclass(frozen=True)
class TensorTree:
    """A pytree of tensors, to be made again with other tensors; its leaves may be dataclasses with tensors as fields.

    - tensors: all tensors, in order.
    - leaves: (leaf of the pytree, names of its fields that hold tensors). The class Tensor is in place of a tensor, None in
      place of a field's.
    """

    tensors: list[Tensor]
    tree: TreeSpec
    leaves: list[tuple[Any, list[str]]]

    @classmethod
    def of(cls, value: Any) -> TensorTree:
        """Return the tree of a layer's output, or of a sample."""
        found, tree = tree_flatten(value)
        tensors: list[Tensor] = []
        leaves: list[tuple[Any, list[str]]] = []
        for leaf in found:
            names: list[str] = []
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                leaf = Tensor
            elif is_dataclass(leaf) and not isinstance(leaf, type):
                names = [f.name for f in fields(leaf) if isinstance(getattr(leaf, f.name), Tensor)]
                tensors += [getattr(leaf, name) for name in names]
                leaf = replace(leaf, **dict.fromkeys(names))
            leaves.append((leaf, names))
        return cls(tensors, tree, leaves)

    def with_tensors(self, tensors: Sequence[Tensor]) -> TensorTree:
        """Return the same tree with these tensors; it keeps none of its own alive."""
        return TensorTree(list(tensors), self.tree, self.leaves)

    def value(self) -> Any:
        """Return the pytree."""
        remaining = iter(self.tensors)

        def filled(leaf: Any, names: list[str]) -> Any:
            if leaf is Tensor:
                return next(remaining)
            return replace(leaf, **{name: next(remaining) for name in names}) if names else leaf

        return tree_unflatten([filled(*leaf) for leaf in self.leaves], self.tree)

    def empty_like(self, keep_requires_grad: bool = False) -> TensorTree:
        """Return the tree with new tensors of the same shapes and strides, which are leaves.

        keep_requires_grad: they require gradients where these tensors do, instead of none.
        """
        new = [torch.empty_like(t.detach()) for t in self.tensors]
        if keep_requires_grad:
            new = [a.requires_grad_(b.requires_grad) for a, b in zip(new, self.tensors, strict=True)]
        return self.with_tensors(new)

    @property
    def key(self) -> tuple[Any, ...]:
        """Structure, and shape, strides, dtype and requires_grad of each tensor: all that a traced layer can depend on."""
        kinds = tuple((tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in self.tensors)
        return self.tree, kinds
