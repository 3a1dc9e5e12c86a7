"""Nested structures of tensors: the structure of a message, and a tree whose tensors can be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


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
    """A pytree without the contents of its tensors; leaves may be dataclasses with tensors as fields.

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
        """Return the structure that a skeleton was sent of."""
        leaves, tree = tree_flatten(skeleton)
        return cls(tree, tuple(leaves))

    def __str__(self) -> str:
        return str(self.skeleton)

    @cached_property
    def tensors(self) -> list[TensorSpec]:
        """All tensors, in order: they travel forward."""
        specs: list[TensorSpec] = []
        for leaf in self.leaves:
            specs += [leaf] if isinstance(leaf, TensorSpec) else _fields(leaf, TensorSpec).values()
        return specs

    @cached_property
    def gradients(self) -> list[TensorSpec]:
        """The tensors that require a gradient, in order: their gradients travel back."""
        return [spec for spec in self.tensors if spec.requires_grad]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the pytree with these tensors in place of their specs."""
        remaining = iter(tensors)

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, TensorSpec):
                return next(remaining)
            specs = _fields(leaf, TensorSpec)
            return replace(leaf, **{name: next(remaining) for name in specs}) if specs else leaf

        return tree_unflatten(map(filled, self.leaves), self.tree)


def _fields(leaf: Any, kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass that hold values of a kind, by name; none of any other leaf."""
    if not is_dataclass(leaf) or isinstance(leaf, type):
        return {}
    values = {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    return {name: value for name, value in values.items() if isinstance(value, kind)}


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a pytree, and of dataclasses and pytrees inside it."""
    tensors: list[Tensor] = []
    for leaf in tree_leaves(value):
        tensors += [leaf] if isinstance(leaf, Tensor) else tensors_of(list(_fields(leaf, object).values()))
    return tensors


def describe(value: Any) -> tuple[Structure, list[Tensor]]:
    """Split a pytree into its structure and its tensors."""
    leaves, tree = tree_flatten(value)
    tensors: list[Tensor] = []

    def taken(tensor: Tensor) -> TensorSpec:
        tensors.append(tensor)
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[k] = taken(leaf)
        elif found := _fields(leaf, Tensor):
            leaves[k] = replace(leaf, **{name: taken(tensor) for name, tensor in found.items()})
    return Structure(tree, tuple(leaves)), tensors


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
