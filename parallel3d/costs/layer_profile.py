"""The profile of one layer at one number of samples, and at others."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import nn

from parallel3d.costs.tracing import Boundary, LayerBytes
from parallel3d.costs.work import Work


@dataclass(frozen=True)
class LayerProfile:
    """A layer at one number of samples, on the first of its slices, whose share is the largest.

    input_gradient and weight_gradient are what BACKWARD_INPUT and BACKWARD_WEIGHT do, backward what a BACKWARD does; where it
    is recomputed, input_gradient and backward begin with another forward. inputs: bytes of the memory of each tensor that
    comes in; whole, split: what it holds under schedules with whole backwards, and with split ones; parameters, frozen: by
    name, as built, without memory; early: the parameters whose gradients come with BACKWARD_INPUT, as norms' do; buffers:
    bytes, as they are cast; tables: bytes that its first forward makes for good, once for all alike; tie: key of a
    TiedLayerSpec; tied_gradient: bytes of the gradient of what is tied that autograd holds until all layers of a chunk have
    added to it, 0 where none is; loss: the loss function behind the last layer, whose work counts in this one.
    """

    name: str
    forward: Work
    input_gradient: Work
    weight_gradient: Work
    backward: Work
    inputs: tuple[int, ...]
    outputs: tuple[Boundary, ...]
    whole: LayerBytes
    split: LayerBytes
    parameters: tuple[tuple[str, nn.Parameter], ...] = ()
    frozen: tuple[tuple[str, nn.Parameter], ...] = ()
    early: frozenset[str] = frozenset()
    buffers: int = 0
    tables: int = 0
    tie: str | None = None
    tied_gradient: int = 0
    recomputed: bool = False
    loss: LayerProfile | None = None

    @property
    def output_bytes(self) -> int:
        """Of the message to the next stage."""
        return sum(boundary.nbytes for boundary in self.outputs)

    @property
    def gradient_bytes(self) -> int:
        """Of the message back from the next stage."""
        return sum(boundary.nbytes for boundary in self.outputs if boundary.requires_grad)

    def held(self, splits: bool) -> LayerBytes:
        """By the kind of backward."""
        return self.split if splits else self.whole


# Of an operator, that the host takes to keep apart what it saves, once in the forward and twice in the backward, which
# makes it anew and hands it out: by a 1b model's steps with micro-batches too small for an H200.
_KEPT = 0.5


def recomputed(profile: LayerProfile) -> LayerProfile:
    """The same layer, whose backward begins with another forward."""
    again = profile.forward
    if profile.loss is not None:  # is behind all regions, and runs once
        loss = profile.loss.forward
        own = again.exchanges[: len(again.exchanges) - len(loss.exchanges)]
        again = replace(again.beyond(loss), exchanges=own)
    inputs, both = again + profile.input_gradient, again + profile.backward
    forward = _kept_apart(profile.forward, _KEPT * again.operators)
    inputs, both = (_kept_apart(work, 2 * _KEPT * again.operators) for work in (inputs, both))
    return replace(profile, forward=forward, input_gradient=inputs, backward=both, recomputed=True)


def _kept_apart(work: Work, operators: float) -> Work:
    return replace(work, operators=work.operators + operators)


class _Bends(Exception):
    """Two profiles differ in more than in numbers that grow with the samples."""


def extrapolated(one: LayerProfile, two: LayerProfile, steps: float) -> LayerProfile | None:
    """The layer so many steps from one number of samples to another behind the first; None where more than numbers change.

    As where it runs other kernels: of a single sample some copies are mere views.
    """

    def line(a: Any, b: Any) -> Any:
        if type(a) in (int, float) and type(b) in (int, float):
            return type(a)(a + (b - a) * steps)
        if isinstance(a, Work) and (a.kernels, a.operators) != (b.kernels, b.operators):
            raise _Bends
        if isinstance(a, LayerProfile):
            return moved(a, b)
        if isinstance(a, tuple) and len(a) == len(b):
            parts = [line(x, y) for x, y in zip(a, b, strict=True)]
            return type(a)(*parts) if hasattr(a, "_fields") else tuple(parts)
        if is_dataclass(a) and not isinstance(a, type):
            return replace(a, **{f.name: line(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)})
        if a != b:
            raise _Bends
        return a

    def moved(a: LayerProfile, b: LayerProfile) -> LayerProfile:
        return replace(a, **{name: line(getattr(a, name), getattr(b, name)) for name in _GROW})

    try:
        return moved(one, two)
    except _Bends:
        return None


_GROW = ("forward", "input_gradient", "weight_gradient", "backward", "inputs", "outputs", "whole", "split", "loss")
