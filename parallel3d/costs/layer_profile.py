"""Profile of one layer: its work and memory at one number of samples, extrapolated to others."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import nn

from parallel3d.costs.tracing import Boundary, LayerBytes
from parallel3d.costs.work import Work


@dataclass(frozen=True)
class LayerProfile:
    """A layer at one number of samples, on the first of its tensor-parallel ranks, whose share is the largest.

    - forward: work of the forward; input_gradient, weight_gradient, backward: work of a BACKWARD_INPUT, of a BACKWARD_WEIGHT
      and of a BACKWARD. If the layer is recomputed, input_gradient and backward begin with another forward.
    - inputs: bytes of the memory of each input; outputs: the tensors that it returns.
    - whole, split: memory under schedules with whole backwards, and with split ones.
    - parameters, frozen: (name, parameter) as built, without memory.
    - early: names of the parameters whose gradients come with BACKWARD_INPUT, such as those of norms.
    - buffers: bytes, as cast in training; casts: bytes of weights in fp8 and their transposes, kept for a step.
    - tables: bytes that its first forward allocates permanently, once for all equal layers.
    - tie: key of a TiedLayerSpec; tied_gradient: bytes of the gradient of tied weights that autograd holds until all layers
      of a chunk have added to it, 0 if there is none.
    - loss: profile of the loss, whose work is part of the last layer's.
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
    casts: int = 0
    tables: int = 0
    tie: str | None = None
    tied_gradient: int = 0
    recomputed: bool = False
    loss: LayerProfile | None = None

    @property
    def output_bytes(self) -> int:
        """Bytes of the message to the next stage."""
        return sum(boundary.nbytes for boundary in self.outputs)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the message back from the next stage."""
        return sum(boundary.nbytes for boundary in self.outputs if boundary.requires_grad)

    @property
    def saved_bytes(self) -> int:
        """Bytes that the forward keeps for a whole backward, those of its inputs and of the loss included."""
        saved = self.whole.saved
        own = saved.own + sum(self.inputs[k] for k in saved.inputs)
        return own if self.loss is None else own + self.loss.saved_bytes

    def held(self, splits: bool) -> LayerBytes:
        """Return the memory by the kind of backward."""
        return self.split if splits else self.whole


# Host time to set apart the tensors that a recomputed operator saves, in operator calls: once in the forward, and twice in
# the backward, which recomputes and returns them. From steps of a 1b model with micro-batches too small for an H200.
_SAVING = 0.5


def recomputed(profile: LayerProfile) -> LayerProfile:
    """Return the profile of the same layer with recomputation: its backward begins with another forward."""
    again = profile.forward
    if profile.loss is not None:  # the loss is in no recomputed region
        loss = profile.loss.forward
        own = again.exchanges[: len(again.exchanges) - len(loss.exchanges)]
        again = replace(again.beyond(loss), exchanges=own)
    saving = Work(operators=_SAVING * again.operators)
    again += saving + saving
    return replace(
        profile,
        forward=profile.forward + saving,
        input_gradient=again + profile.input_gradient,
        backward=again + profile.backward,
        recomputed=True,
    )


class _NotLinear(Exception):
    """Raised if two profiles differ in more than numbers that grow with the samples."""


def extrapolated(one: LayerProfile, two: LayerProfile, steps: float) -> LayerProfile | None:
    """Return the profile at another number of samples, on the line through two profiles: `one` + `steps` * (`two` - `one`).

    None if they differ in more than numbers that grow with the samples: with a single sample, some copies are views.
    """

    def line(a: Any, b: Any) -> Any:
        if type(a) in (int, float) and type(b) in (int, float):
            return type(a)(a + (b - a) * steps)
        if isinstance(a, Work) and (a.kernels, a.operators) != (b.kernels, b.operators):
            raise _NotLinear
        if isinstance(a, tuple) and len(a) == len(b):
            parts = [line(x, y) for x, y in zip(a, b, strict=True)]
            return type(a)(*parts) if hasattr(a, "_fields") else tuple(parts)
        if is_dataclass(a) and not isinstance(a, type):
            names = _GROW if isinstance(a, LayerProfile) else [field.name for field in fields(a)]
            return replace(a, **{name: line(getattr(a, name), getattr(b, name)) for name in names})
        if a != b:
            raise _NotLinear
        return a

    try:
        profile: LayerProfile = line(one, two)
    except _NotLinear:
        return None
    return profile


_GROW = ("forward", "input_gradient", "weight_gradient", "backward", "inputs", "outputs", "whole", "split", "loss")
