"""Sums of matrix products of linear layers, and the boundaries through which their inputs enter and their outputs leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

# Pairs (left [..., k], right [k, n]) whose matrix products are added up; k may differ.
Factors = Sequence[tuple[Tensor, Tensor]]
# Weight and bias (None without one) of a linear layer.
Pair = tuple[Tensor, "Tensor | None"]


def multiply(factors: Factors, out: Tensor | None = None) -> Tensor:
    """Return the sum of left @ right, [..., n], in one buffer. out: [rows, n], that buffer; then it is not differentiable."""
    (left, right), *others = factors
    total = rows_of(left).mm(right) if out is None else torch.mm(rows_of(left), right, out=out)
    for other, weight in others:
        total.addmm_(rows_of(other), weight)
    return total if left.dim() == 2 else total.view(*left.shape[:-1], right.shape[1])


def rows_of(x: Tensor) -> Tensor:
    """Flatten [..., n] to [rows, n]."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


class RegionBoundary:
    """Boundary of a region of linear layers, through which their input enters or their output leaves. This one does nothing.

    Tensor parallelism communicates there. Every method starts the communication and returns a function that waits for its
    result, so that a backward overlaps it with the layers' matrix products. Under torch.is_grad_enabled() the result must be
    differentiable.

    kinds: all kinds by name. described: arguments of an operator of a compiled graph, from which it makes this boundary again:
    the kind's name, and the arguments of `of`.
    """

    kinds: ClassVar[dict[str, type[RegionBoundary]]] = {}

    def __init_subclass__(cls) -> None:
        cls.kinds[cls.__name__] = cls

    @property
    def described(self) -> tuple[str, int, int | None]:
        """The kind's name, the group's number, and the length of the whole sequence."""
        return "RegionBoundary", -1, None

    @classmethod
    def of(cls, group: int, length: int | None) -> RegionBoundary:
        """Return the boundary of this kind with these properties."""
        return NO_BOUNDARY

    def entered(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape in which an input of this shape enters."""
        return shape

    def left(self, shape: Sequence[int]) -> Sequence[int]:
        """Return the shape in which an output of this shape leaves."""
        return shape

    def enter(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to make the input of the matrix products from the input of the region."""
        return lambda: x

    def enter_products(self, x: Tensor, pairs: Sequence[Pair]) -> Sequence[Tensor]:
        """Return F.linear of the entered input for each pair; a part of it may enter while another is multiplied."""
        entered = self.enter(x)()
        return [F.linear(entered, *pair) for pair in pairs]

    def enter_kept(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the entered input, and its product with weight [in, out]."""
        entered = self.enter(x)()
        return entered, multiply([(entered, weight)])

    def leave(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Start to apply the transpose of `enter` to the gradient of the entered input, which may be overwritten."""
        return lambda: gradient

    def leave_products(self, factors: Factors, hidden: bool = False) -> Callable[[], Tensor]:
        """Start to `leave` with the sum of these products; a part of it may leave while the rest is multiplied.

        hidden: whether other work runs before the caller waits, so that it hides the communication.
        """
        return self.leave(multiply(factors))


RegionBoundary.kinds["RegionBoundary"] = RegionBoundary
NO_BOUNDARY = RegionBoundary()


def products_through(boundary: RegionBoundary, leaves: bool, x: Tensor, pairs: Sequence[Pair]) -> Sequence[Tensor]:
    """Return F.linear of x for each pair: x enters through the boundary or, if `leaves`, the output of the one pair leaves."""
    if not leaves:
        return boundary.enter_products(x, pairs)
    ((weight, _),) = pairs
    return [boundary.leave_products([(x, weight.t())])()]


def backward_of_linears(
    boundary: RegionBoundary,
    leaves: bool,
    x: Tensor | None,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    hides: bool,
    give: Callable[[int, Tensor, Tensor | None], None],
) -> Tensor | None:
    """Return the gradient of the input of linear layers; of several, it is summed in one buffer.

    - leaves: see products_through. If it is false, the gradient of x leaves; else those of the output enter.
    - x: [..., in], the input before it enters; None if no weight's gradient is needed.
    - weights: [out, in] of each layer; empty if the gradient of x is not needed: then None is returned.
    - gradients: [..., out] of the outputs, not all None.
    - hides: whether `give` multiplies, while the gradient of x leaves.
    - give: called for each layer with a gradient with (its index, gradient [rows, out], entered x [rows, in] or None).
    """
    used = [(k, gradient) for k, gradient in enumerate(gradients) if gradient is not None]
    if leaves:
        ((_, gradient),) = used
        entered, dx = boundary.enter_kept(gradient, weights[0]) if weights else (boundary.enter(gradient)(), None)
        give(0, rows_of(entered), None if x is None else rows_of(x))
        return dx
    entering = None if x is None else boundary.enter(x)
    leaving = None
    if weights:
        leaving = boundary.leave_products([(gradient, weights[k]) for k, gradient in used], hides and x is not None)
    entered_x = None if entering is None else rows_of(entering())
    for k, gradient in used:
        give(k, rows_of(gradient), entered_x)
    return None if leaving is None else leaving()
