"""Nested structures of tensors: the structure of a message, and a tree whose tensors can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

T = TypeVar("T")


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, and whether it requires a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Return such a tensor, without a gradient, in new memory."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Structure:
    """A pytree without the contents of its tensors; leaves may be dataclasses, with tensors or pytrees of them as fields.

    `leaves` holds a TensorSpec in place of each tensor, and all else by value.
    """

    tree: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def skeleton(self) -> Any:
        """The pytree with a TensorSpec in place of each tensor, as it is sent."""
        return tree_unflatten(self.leaves, self.tree)

    @classmethod
    def of_skeleton(cls, skeleton: Any) -> Structure:
        """Return the structure to which a received skeleton belongs."""
        leaves, tree = tree_flatten(skeleton)
        return cls(tree, tuple(leaves))

    def __str__(self) -> str:
        return str(self.skeleton)

    @cached_property
    def tensors(self) -> list[TensorSpec]:
        """All tensors, in order: they travel forward."""
        return _found(self.leaves, TensorSpec)

    @cached_property
    def gradients(self) -> list[TensorSpec]:
        """The tensors that require a gradient, in order: their gradients travel back."""
        return [spec for spec in self.tensors if spec.requires_grad]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the pytree with these tensors in place of their specs."""
        remaining = iter(tensors)

        def following(_: TensorSpec) -> Tensor:
            return next(remaining)

        return tree_unflatten([_replaced(leaf, TensorSpec, following) for leaf in self.leaves], self.tree)


def _found(value: Any, kind: type[T]) -> list[T]:
    """Return the values of type `kind` in a pytree, and in dataclasses and pytrees inside it."""
    found: list[T] = []
    for leaf in tree_leaves(value):
        found += [leaf] if isinstance(leaf, kind) else _found(list(_fields(leaf).values()), kind)
    return found


def _replaced(leaf: Any, kind: type[T], new: Callable[[T], Any]) -> Any:
    """Return new(leaf) for a leaf of type `kind`; for a dataclass with such leaves, a copy in which they are replaced."""
    if isinstance(leaf, kind):
        return new(leaf)
    held = {name: value for name, value in _fields(leaf).items() if _found(value, kind)}
    made = copy(leaf) if held else leaf
    for name, value in held.items():
        # Set without the constructor, which may compute with tensors or need more than the fields.
        object.__setattr__(made, name, tree_map(lambda x: _replaced(x, kind, new), value))
    return made


def _fields(leaf: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name; none of any other leaf."""
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return {}
    return {field.name: getattr(leaf, field.name) for field in fields(leaf)}


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a pytree, and of dataclasses and pytrees inside it."""
    return _found(value, Tensor)


def describe(value: Any) -> tuple[Structure, list[Tensor]]:
    """Split a pytree into its structure and its tensors."""
    leaves, tree = tree_flatten(value)
    tensors: list[Tensor] = []

    def taken(tensor: Tensor) -> TensorSpec:
        tensors.append(tensor)
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    return Structure(tree, tuple([_replaced(leaf, Tensor, taken) for leaf in leaves])), tensors


@dataclass(frozen=True)
class TensorTree:
    """A pytree of tensors, to be made again with other tensors."""

    structure: Structure
    tensors: list[Tensor]

    @classmethod
    def of(cls, value: Any) -> TensorTree:
        """Return the tree of a layer's output, or of a sample."""
        return cls(*describe(value))

    def with_tensors(self, tensors: Sequence[Tensor]) -> TensorTree:
        """Return the same tree with these tensors; it keeps none of its own alive."""
        return TensorTree(self.structure, list(tensors))

    def value(self) -> Any:
        """Return the pytree."""
        return self.structure.rebuild(self.tensors)

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
        return self.structure.tree, kinds
