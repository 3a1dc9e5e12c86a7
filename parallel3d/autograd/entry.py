"""Entry of a message's tensors into a chunk's graph, where their gradients are caught."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _unsafe_preserve_version_counter

# An input that makes autograd record the entry; it never gets a gradient.
_ANCHOR = torch.empty(0, requires_grad=True)


class Entry:
    """Catches the gradients of tensors that come from another chunk.

    The tensors do not become leaves of the graph: a layer may change its input in place, as `nn.ReLU(inplace=True)` does,
    wherever the model is cut.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        # Not the tensors themselves: the chunk's graph decides how long its input is held.
        self._kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        self._gradients: dict[int, Tensor] = {}
        for k, tensor in enumerate(tensors):
            # Entering writes nothing: a chunk of this rank may have saved the tensor, its output, for the backward.
            with _unsafe_preserve_version_counter(tensor):
                _Enter.apply(_ANCHOR, tensor, self._gradients, k)

    def gradients(self) -> list[Tensor]:
        """Return a gradient for each tensor, zeros if the backward did not reach it. Call it once: gradients are not kept."""
        # The graph keeps its end of the dictionary for as long as anything keeps an input, as a deferred weight gradient does.
        found = dict(self._gradients)
        self._gradients.clear()
        return [
            found[k] if k in found else torch.zeros(shape, dtype=dtype, device=device)
            for k, (shape, dtype, device) in enumerate(self._kinds)
        ]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, gradients: dict[int, Tensor], k: int) -> Tensor:
        # Marked dirty, `tensor` itself becomes this function's output: it needs no copy and is no view.
        ctx.mark_dirty(tensor)
        ctx.gradients, ctx.k = gradients, k
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.gradients[ctx.k] = gradient
        return None, None, None, None
