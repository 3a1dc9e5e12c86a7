"""Structure of a pytree of tensors: what both ends of a message know before its tensors move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
