"""Weights of fp8 linears that live as shards (ZeRO-3), and are gathered in fp8, a byte an element, while they don't change."""

from __future__ import annotations

import dis
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from parallel3d.autograd.split_backward import has_hooks
from parallel3d.comm.collectives import Work, all_gather_into
from parallel3d.config import Config
from parallel3d.logs import logger
from parallel3d.zero.weights import ShardedWeights, WeightState

# (out in fp8, x, scale): out = x * scale, all flat.
Round = Callable[[Tensor, Tensor, Tensor], None]


def can_gather_in_fp8(config: Config) -> bool:
    """Return whether weights of fp8 linears can be gathered in fp8.

    Row-wise scales of a weight and its transpose differ, and shards on the host are copied to the device as they are: there
    weights are gathered in their own dtype.
    """
    zero, fp8 = config.zero_optimization, config.fp8
    on_host = zero.offload_param.device not in ("none", None)
    return fp8.enabled and fp8.recipe == "tensorwise" and zero.stage >= 3 and not on_host


def mark_weights(module: nn.Module, linears: Collection[nn.Module]) -> None:
    """Let buckets that are made from now on gather the weights of these fp8 linears of a module in fp8, and no other weights.

    Weights that other code may read are left out: parameters that another module holds too, those of linears with hooks, and
    those that the forward of an enclosing module reads, as nn.MultiheadAttention's does.
    """
    for parameter in module.parameters():
        let_gather_in_fp8(parameter, False)
    if not linears:
        return
    modules = list(module.modules())
    readers = Counter(p for m in modules for p in tree_leaves(list(vars(m).values())) if isinstance(p, nn.Parameter))
    read = {linear for m in modules for linear in _read_by_forward(m)}
    for linear in linears:
        weight = linear.get_parameter("weight")
        if readers[weight] == 1 and linear not in read and not has_hooks(linear):
            let_gather_in_fp8(weight, True)


def _read_by_forward(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules inside `module` whose weight an enclosing module's forward reads as `<name>.weight`."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    if code is not None and (names := _names_before_weight(code)):
        yield from (inner for path, inner in module.named_modules() if path.rpartition(".")[2] in names)


@cache
def _names_before_weight(code: CodeType) -> set[str]:
    return {before.argval for before, load in pairwise(dis.get_instructions(code)) if load.argval == "weight"}


def let_gather_in_fp8(parameter: nn.Parameter, lets: bool) -> None:
    """Let buckets that are made from now on gather a parameter in fp8 if it is sharded: only its fp8 linear reads it."""
    vars(parameter)["in_fp8"] = lets


def is_in_fp8(parameter: Tensor) -> bool:
    """Return whether buckets may gather a parameter in fp8."""
    return bool(vars(parameter).get("in_fp8"))


class Fp8Weights(ShardedWeights):
    """Sharded weights that `gather` gathers in e4m3 while they have scales; their parameters stay placeholders then.

    Each element is what a cast of the whole weight would give, because the scale is the whole weight's.
    """

    def __init__(self, whole: Tensor, *args: Any):
        self._scales: Sequence[Tensor] = ()  # of the parameters; none while they are gathered in their own dtype
        self._gathers_fp8 = self._reads_whole = False
        super().__init__(whole, *args)
        self._values = torch.empty(whole.numel(), dtype=torch.float8_e4m3fn, device=whole.device)
        self._casts: dict[nn.Parameter, tuple[int, Tensor]] = {}
        for k, (parameter, view) in enumerate(self._views):
            at = int(view.storage_offset()) - int(whole.storage_offset())
            self._casts[parameter] = k, self._values[at : at + view.numel()].view(view.shape)
        self._values.untyped_storage().resize_(0)

    def use_scales(self, scales: Tensor | None, round_into: Round) -> None:
        """Gather in fp8 from now on, with these scales of the parameters, [parameters] in fp32; with None no longer."""
        self._round, self._scales = round_into, ()
        if scales is not None and not self._reads_whole:
            self._scales = scales.unbind()
            # cuBLAS reads scales only at addresses that 16 divides.
            self._inverses = F.pad(scales.reciprocal().unsqueeze(1), (0, 3))[:, 0].unbind()

    def cast_of(self, parameter: nn.Parameter) -> tuple[Tensor, Tensor] | None:
        """Return a parameter in fp8, and its inverse scale, []; None if it is not gathered in fp8."""
        if self.state is not WeightState.IN_FP8:
            return None
        k, values = self._casts[parameter]
        return values, self._inverse[k]

    @property
    def live_bytes(self) -> int:
        """Bytes of what is gathered now."""
        return min(super().live_bytes, self.numel) if self._gathers_fp8 else super().live_bytes

    @torch.no_grad()
    def gather(self) -> Work:
        """Start to gather the weights, unless they are; see `wait`. Raises ExecutionError if a placeholder was written."""
        if self.state is not WeightState.SHARDED:
            return self._work
        if not self._scales:
            return super().gather()
        self._check_shard()
        self._values.untyped_storage().resize_(self._values.nbytes)
        size = self.shard.numel()
        own = self._values[self.partition.index * size :][:size]
        for piece, scale in zip(self.pieces, self._scales, strict=True):
            start = piece.storage_offset() - self.shard.storage_offset()
            if piece.numel():
                self._round(own[start : start + piece.numel()], piece, scale)
        self._inverse, self._gathers_fp8 = self._inverses, True
        # As bytes: not all backends know fp8.
        self._work = all_gather_into(self._values.view(torch.uint8), own.view(torch.uint8), self.partition)
        self._enter(WeightState.GATHERING)
        return self._work

    def gather_whole(self) -> Work:
        """Start to gather the weights in their own dtype, also if they are gathered in fp8."""
        if self._gathers_fp8:
            self.release()
        return super().gather_whole()

    def read_whole(self) -> None:
        """Gather the weights in their own dtype, now and from now on, because not only the fp8 linear reads them."""
        if self.partition.index == 0:
            shapes = [list(parameter.shape) for parameter in self.parameters]
            logger.info("not only fp8 linears read weights of shapes %s: they are no longer gathered in fp8", shapes)
        self._reads_whole, self._scales = True, ()
        self.gather_whole()
        self.wait()

    def keep_changes(self, replica: int) -> None:
        """Copy what a replica has written into its gathered weights to the shards, which drops the scales. Collective."""
        self._scales = ()
        super().keep_changes(replica)

    def wait(self) -> None:
        """Return (CUDA: let the stream go on) when the weights are gathered."""
        super().wait()
        if self._gathers_fp8 and self.state is WeightState.GATHERED:
            self._enter(WeightState.IN_FP8)

    def release(self) -> None:
        """Free the memory of what is gathered. What is enqueued on the current stream may still read it."""
        self.wait()
        if self.state is WeightState.IN_FP8:
            self._values.untyped_storage().resize_(0)
            self._enter(WeightState.SHARDED)
        self._gathers_fp8 = False
        super().release()


def kind_of_shards(in_fp8: bool) -> type[ShardedWeights]:
    """Return the class of sharded weights. in_fp8: whether they may be gathered in fp8."""
    return Fp8Weights if in_fp8 else ShardedWeights
