"""Selective recomputation: a region keeps the results that are expensive to compute, and its backward recomputes the rest.

Matrix products, convolutions, attention and communication are kept; element-wise results (norms, activations, rotary positions,
casts, dropout) are recomputed from them. torch's own selective contexts want the same operators in forward and recomputation,
but ZeRO gathers weights in one or the other. arXiv:2205.05198, section 5, recomputes only attention.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from parallel3d.config import SELECTIVE
from parallel3d.errors import ExecutionError

# Contexts of a region's forward and of its recomputation.
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_PRODUCTS = frozenset(
    "mm addmm bmm baddbmm addbmm mv addmv dot convolution _scaled_mm _grouped_mm _scaled_grouped_mm".split()
)
_ELEMENT_WISE = frozenset({"swiglu"})  # operators of other namespaces than torch's


@dataclass
class _Kept:
    """Results that a region keeps, and what computed them.

    saved: number of tensors that autograd had saved in the region when it had saved those of this computation.
    """

    what: object
    results: Any
    versions: Any
    saved: int


class _Region:
    """Results that one region keeps, in the order of its forward. saved: number of tensors that autograd has saved in it."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()
        self.saved = 0

    def keep(self, what: object, results: Any, saves: int) -> None:
        """Keep a tensor or a tuple with tensors. saves: number of tensors that autograd will save for what computed them."""
        # An alias with the same version counter, also below autograd.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            aliases = _each(Tensor.detach, results)
        self._kept.append(_Kept(what, aliases, _versions(aliases), self.saved + saves))

    def end(self) -> None:
        """Forget the last results if autograd has saved nothing after them: the recomputation ends there."""
        if self._kept and self._kept[-1].saved == self.saved:
            last = self._kept[-1]
            last.results = _each(lambda t: t.new_empty(()).expand(t.shape), last.results)
            last.versions = _versions(last.results)

    def take(self, what: object) -> Any:
        """Return the next results. Raises ExecutionError if something else computed them, nothing did, or they have changed."""
        if not self._kept:
            raise ExecutionError(
                f"a region computes {what} in its recomputation alone; it must do the same as in its forward"
            )
        kept = self._kept.popleft()
        if kept.what != what:
            raise ExecutionError(f"a region computed {kept.what} in its forward, but {what} in its recomputation")
        if kept.versions != _versions(kept.results):
            raise ExecutionError(
                f"a result of {what}, kept for a recomputation, was changed in place; use an operation that makes a new "
                'tensor, or set activation_checkpointing.policy to "full"'
            )
        return kept.results


def _each(function: Callable[[Tensor], Any], results: Any) -> Any:
    """Apply a function to each tensor of what an operator returns: a tensor, or a tuple in which other things may be, too."""
    if isinstance(results, Tensor):
        return function(results)
    return tuple([function(result) if isinstance(result, Tensor) else result for result in results])


def _versions(results: Any) -> Any:
    return _each(lambda tensor: tensor._version, results)


class _Operators(TorchDispatchMode):
    """Keeps results of torch's operators, or takes them in place of computing them."""

    def __init__(self, region: _Region, keeps_attention: bool, is_recomputing: bool):
        super().__init__()
        self._region, self._keeps_attention, self._is_recomputing = region, keeps_attention, is_recomputing
        self._is_inside = False  # whether a computation runs whose results are kept as a whole
        self._counting: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> _Operators:
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # those of the region
        if not self._is_recomputing and hooks is not None:
            pack, unpack = hooks
            self._counting = torch.autograd.graph.saved_tensors_hooks(partial(self._count, pack), unpack)
        self._counting.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._counting.__exit__(None, None, None)
        self._counting = nullcontext()  # it refers to this object
        if not self._is_recomputing:
            self._region.end()

    def _count(self, pack: Callable[[Tensor], Any], tensor: Tensor) -> Any:
        self._region.saved += 1
        return pack(tensor)

    def __torch_dispatch__(
        self, operator: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        if self._is_inside or not _is_kept(operator, self._keeps_attention, args, kwargs):
            return operator(*args, **kwargs)
        return self.run(operator, lambda: operator(*args, **kwargs))

    def run(self, what: object, compute: Callable[[], Any], saves: int = 0) -> Any:
        """Return compute(), which is kept as a whole, or what it returned in the region's forward. saves: see _Region.keep."""
        if self._is_recomputing:
            return self._region.take(what)
        self._is_inside = True
        try:
            results = compute()
        finally:
            self._is_inside = False
        self._region.keep(what, results, saves)
        return results


def kept(what: str, compute: Callable[[], Sequence[Tensor]], saves: int) -> tuple[Tensor, ...]:
    """Return compute(); its results are kept if a selective region runs it. For functions that multiply or communicate.

    saves: number of tensors that the calling autograd function has given to save_for_backward.
    """
    operators = next((mode for mode in _get_current_dispatch_mode_stack()[::-1] if isinstance(mode, _Operators)), None)
    if operators is None:
        return tuple(map(changeable, compute()))
    results: tuple[Tensor, ...] = operators.run(what, lambda: tuple(map(changeable, compute())), saves)
    return results


def changeable(result: Tensor) -> Tensor:
    """Return the result of an autograd function such that it may be changed in place, which torch refuses for views."""
    return result.data if result._is_view() else result


def selective_contexts(keeps_attention: bool) -> Callable[[], Contexts]:
    """Return `context_fn` of torch.utils.checkpoint.checkpoint: it makes contexts for a region's forward and recomputation."""
    # Asked here, not in the function: PyTorch 2.11 calls it where torch.compiler.is_compiling() returns False again.
    return partial(_contexts, keeps_attention, torch.compiler.is_compiling())


def _contexts(keeps_attention: bool, is_compiling: bool) -> Contexts:
    # A region in which a graph breaks is left to eager execution, where no tensor is a fake one.
    if is_compiling and detect_fake_mode() is not None:
        contexts: Contexts = create_selective_checkpoint_contexts(partial(_choice_in_graph, keeps_attention))
        return contexts
    region = _Region()
    return _Operators(region, keeps_attention, False), _Operators(region, keeps_attention, True)


def recomputed_in_graph(function: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Return `function` for torch.compile: the backward of its graph recomputes by a policy, "cheap", "attention" or "full".

    Without it the graph of a layer keeps the operands of all products, which the compiler recomputes for none.
    """
    # A graph has no in-place operators left, of which torch warns at each first compilation.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    return partial(run_in_graph, policy, function)


def run_in_graph(policy: object, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run function(*args, **kwargs) by torch's function, which compilers know; recompute all, unless by one of SELECTIVE."""
    options: dict[str, Any] = {"context_fn": selective_contexts(policy == "cheap")} if policy in SELECTIVE else {}
    return checkpoint(function, *args, use_reentrant=False, **options, **kwargs)


def _choice_in_graph(
    keeps_attention: bool, region: object, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if not isinstance(operator, OpOverload) or _is_kept(operator, keeps_attention, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    name, foreign = operator.overloadpacket.__name__, operator.namespace not in ("aten", "prims")
    if _kind(operator) == "attention" and not _drops(operator, args, kwargs):
        return CheckpointPolicy.MUST_RECOMPUTE  # the compiler by itself recomputes none
    # Random masks; products and communication of this package, each in an operator.
    is_kept = torch.Tag.nondeterministic_seeded in operator.tags or (foreign and name not in _ELEMENT_WISE)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operator: OpOverload, keeps_attention: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    kind = _kind(operator)
    return kind == "product" or (kind == "attention" and keeps_attention and not _drops(operator, args, kwargs))


@cache
def _kind(operator: OpOverload) -> Literal["product", "attention", ""]:
    name = operator.overloadpacket.__name__
    if name in _PRODUCTS:
        return "product"
    return "attention" if "attention" in name or "attn" in name else ""


def _drops(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an attention has dropout. Then it is recomputed, because later masks depend on the generator after it."""
    names = [argument.name for argument in operator._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0))
