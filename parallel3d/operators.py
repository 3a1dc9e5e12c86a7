"""Operators that torch.compile takes into its graphs as they are, and numbers for the objects that they work with.

They are defined without torch's custom_op, whose wrappers cost the host tens of microseconds a call.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import library
from torch.fx.node import has_side_effect

T = TypeVar("T")


class Numbers(Generic[T]):
    """Numbers of objects. A graph holds only numbers and tensors, so an operator gets the number of its object.

    Objects are held weakly: the number of one that is gone is dropped.
    """

    def __init__(self) -> None:
        self._objects: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()
        self._next = itertools.count()

    def add(self, item: T) -> int:
        """Return a number for an object."""
        number = next(self._next)
        self._objects[number] = item
        return number

    def __getitem__(self, number: int) -> T:
        return self._objects[number]


def define(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
    has_effects: bool = False,
) -> Callable[..., Any]:
    """Define and return torch.ops.parallel3d.<name>.

    - schema: arguments and results, in the syntax of torch's operator schemas.
    - fake: returns results of the right shapes, without values.
    - tags: of torch.Tag.
    - has_effects: whether it does more than return results. Without it, graphs leave the operator out where nothing is computed
      from its results; a sum of empty tensors is not computed.


    Autograd does not differentiate it: autograd kernels in Python would cost the host 10 us more a call.
    """
    qualified = f"parallel3d::{name}"
    library.define(qualified, schema, tags=tuple(tags))
    library.impl(qualified, "default", function)
    library.register_fake(qualified, fake)
    operator: Callable[..., Any] = getattr(torch.ops.parallel3d, name).default
    return has_side_effect(operator) if has_effects else operator
