"""Selective recomputation: a region keeps the results that are expensive to compute, and its backward recomputes the rest.

Matrix products, convolutions, attention and communication are kept; element-wise results (norms, activations, rotary positions,
casts, dropout) are recomputed from them. torch's own selective contexts want the same operators in forward and recomputation,
but ZeRO gathers weights in one or the other. arXiv:2205.05198, section 5, recomputes attention alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel3d.errors import ExecutionError

_PRODUCTS = frozenset(
    "mm addmm bmm baddbmm addbmm mv addmv dot convolution _scaled_mm _grouped_mm _scaled_grouped_mm".split()
)


class _Region:
    """Results that one region keeps, each with what computed it, in the order of the forward."""

    def __init__(self) -> None:
        self._kept: deque[tuple[object, Any, list[int]]] = deque()

    def keep(self, what: object, results: Any) -> None:
        """Keep tensors in any pytree."""
        # An alias with the same version counter, also below autograd.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            aliases = tree_map_only(Tensor, Tensor.detach, results)
        self._kept.append((what, aliases, _versions(aliases)))

    def take(self, what: object) -> Any:
        """Return the next results. Raises ExecutionError if something else computed them, or if they have changed."""
        if not self._kept:
            raise ExecutionError(
                "a recomputed region has given its results to an earlier backward; run one backward, or set "
                'activation_checkpointing.policy to "full"'
            )
        computed_by, results, versions = self._kept.popleft()
        if computed_by != what:
            raise ExecutionError(f"a region computed {computed_by} in its forward, but {what} in its recomputation")
        if versions != _versions(results):
            raise ExecutionError(
                f"a result of {what}, kept for a recomputation, was changed in place; use an operation that makes a new "
                'tensor, or set activation_checkpointing.policy to "full"'
            )
        return results


def _versions(results: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


class _Operators(TorchDispatchMode):
    """Keeps results of torch's operators, or takes them in place of computing them."""

    def __init__(self, region: _Region, keeps_attention: bool, is_recomputing: bool):
        super().__init__()
        self._region, self._keeps_attention, self._is_recomputing = region, keeps_attention, is_recomputing
        self._is_inside = False  # of what is kept as a whole

    def __torch_dispatch__(
        self, operator: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        kwargs, name = kwargs or {}, operator.overloadpacket.__name__
        attends = (
            self._keeps_attention and ("attention" in name or "attn" in name) and not _drops(operator, args, kwargs)
        )
        keeps = not self._is_inside and (name in _PRODUCTS or attends)
        return self.run(operator, lambda: operator(*args, **kwargs)) if keeps else operator(*args, **kwargs)

    def run(self, what: object, compute: Callable[[], Any]) -> Any:
        """Return compute(), which is kept as a whole, or what it returned in the region's forward."""
        if self._is_recomputing:
            return self._region.take(what)
        self._is_inside = True
        try:
            results = compute()
        finally:
            self._is_inside = False
        self._region.keep(what, results)
        return results


def kept(what: str, compute: Callable[[], Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Return compute(); its results are kept if a selective region runs it. For functions that multiply or communicate."""
    operators = next((mode for mode in _get_current_dispatch_mode_stack()[::-1] if isinstance(mode, _Operators)), None)
    if operators is None:
        return tuple(compute())
    results: tuple[Tensor, ...] = operators.run(what, lambda: tuple(compute()))
    return results


def selective_contexts(keeps_attention: bool) -> tuple[_Operators, _Operators]:
    """Return contexts for a region's forward and for its recomputation: `context_fn` of torch.utils.checkpoint.checkpoint."""
    region = _Region()
    return _Operators(region, keeps_attention, False), _Operators(region, keeps_attention, True)


def _drops(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an attention drops probabilities. Then it is recomputed: later masks are drawn from the state after it."""
    names = [argument.name for argument in operator._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0))
