"""Layers and samples as tensors without memory: fake tensors, or tensors on the meta device.

With fake tensors operators choose the same kernels as in training; on the meta device, attention takes another path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from parallel3d.errors import PartitionError
from parallel3d.fake_device import on_cuda
from parallel3d.kernels.rms_norm import rms_norm
from parallel3d.parameters import replace_tensors
from parallel3d.specs import BuildContext, Layer, LayerSpec

T = TypeVar("T")


class Fakes:
    """Makes fake copies of samples and layers, to be used under `mode`. Layers are built in `context`.

    instead: advice of the error for a layer that can't be faked.
    """

    def __init__(self, context: BuildContext, instead: str):
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode: AbstractContextManager[Any] = self._fake
        self.device, self._context, self._instead = context.device, context, instead

    def place(self, tree: Any) -> Any:
        """Return a pytree with fake tensors on the context's device."""

        def fake(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            with self._fake:
                return self._fake.from_tensor(leaf.detach()).to(self.device)

        return tree_map(fake, tree)

    def first_that_works(self, layer: Layer, use: Callable[[Any], T]) -> T:
        """Return use(fake layer), for the first way to make a fake layer with which `use` doesn't fail.

        Raises PartitionError, with the last failure and the remedy, if all ways fail.
        """
        failures: list[Exception] = []
        for build in self._ways(layer):
            try:
                result = use(build())
                failures.clear()  # they keep the locals of their frames alive, in a cycle
                return result
            except PartitionError:
                raise
            except Exception as error:  # whatever a layer's own code raises
                failures.append(error)
        raise PartitionError(
            f"it can't be traced on fake tensors: {type(failures[-1]).__name__}: {failures[-1]}; let it not look at values of "
            f"tensors (.item(), .numpy(), if tensor:), or {self._instead}"
        ) from failures[-1]

    def _ways(self, layer: Layer) -> Iterator[Callable[[], Any]]:
        """Yield functions that make a fake layer: the first needs no memory, the last builds the real layer."""
        if not isinstance(layer, LayerSpec):
            yield lambda: self._faked(layer)
            return
        # Copies: what a layer keeps in its arguments, such as shared tables, must not become fake for training.
        try:
            spec = layer.map_arguments(self._copied)
        except Exception as error:
            raise PartitionError(f"its arguments can't be copied for a trace: {error}; {self._instead}") from error

        def on_meta() -> nn.Module:
            with torch.device("meta"):
                module = spec.build(self._context)
            with self.mode:
                replace_tensors(module, lambda t: torch.empty_like(t, device=self.device))
            return module

        def on_device() -> nn.Module:
            with self.mode, self.device:
                return spec.build(self._context)

        yield on_meta
        yield on_device
        yield lambda: self._faked(layer.build(self._context))

    def _faked(self, value: Any) -> Any:
        with FakeCopyMode(self._fake):
            return copy.deepcopy(value)

    def _copied(self, argument: Any) -> Any:
        """Return a fake copy of a constructor's argument, or the argument if it can't be copied and holds no tensors.

        The copy of a module on the meta device, which has no memory either, keeps its parameters' class.
        """
        if isinstance(argument, nn.Module) and {p.is_meta for p in argument.parameters()} == {True}:
            return copy.deepcopy(argument)
        try:
            return self._faked(argument)
        except Exception:  # open files, locks and the like, with errors of their own
            if isinstance(argument, (Tensor, nn.Module, list, tuple, dict)):
                raise
            return argument


class MetaFakes(Fakes):
    """Makes copies on the meta device: several times as fast as fake tensors, for layers that don't look at devices.

    For functions, and for specs without tensors among their arguments.
    """

    def __init__(self, context: BuildContext, instead: str):
        super().__init__(context, instead)
        self.mode, self.device = nullcontext(), torch.device("meta")

    def place(self, tree: Any) -> Any:
        """Return a pytree with its tensors on the meta device."""
        return tree_map(lambda leaf: leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf, tree)

    def _ways(self, layer: Layer) -> Iterator[Callable[[], Any]]:
        return islice(super()._ways(layer), 1)

    def _faked(self, value: Any) -> Any:
        if isinstance(value, (Tensor, nn.Module)):
            raise PartitionError(f"it holds tensors that are not on the meta device; {self._instead}")
        return copy.deepcopy(value)


class CudaFunctions(TorchFunctionMode):
    """Function mode in which attention, dropout and RMSNorm of stand-ins for CUDA tensors call the operators that run on CUDA.

    Other functions, and tensors on other devices, are left alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _ON_CUDA.get(func, func)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by a fused kernel, which saves queries, keys, values, result and a number per row.

    cuDNN's kernel for half precision, the memory-efficient one for other dtypes; which kernel it is doesn't change what is
    saved, but the memory-efficient one needs copies of shared key and value heads.
    """
    if not on_cuda(query) or query.dim() != 4:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    aten: Any = torch.ops.aten
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # PyTorch turns a boolean mask into one that is added to the scores.
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -torch.inf)
    if query.dtype in (torch.bfloat16, torch.float16):
        cudnn = aten._scaled_dot_product_cudnn_attention
        outputs = cudnn(query, key, value, attn_mask, keeps, dropout_p, is_causal, False, scale=scale)
    else:
        if key.shape[1] != query.shape[1]:
            key, value = (heads.repeat_interleave(query.shape[1] // heads.shape[1], 1) for heads in (key, value))
        efficient = aten._scaled_dot_product_efficient_attention
        outputs = efficient(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)
    result: Tensor = outputs[0]
    return result


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Apply dropout by CUDA's operator, whose mask takes a byte per element."""
    if not on_cuda(input) or not training or inplace or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Apply RMSNorm by one kernel, which saves its input and a number per row."""
    if not on_cuda(input) or weight is None or len(normalized_shape) != 1:
        return F.rms_norm(input, list(normalized_shape), weight, eps)
    return rms_norm(input, weight, torch.finfo(input.dtype).eps if eps is None else eps)[0]


# A mode doesn't see the calls inside a Python function that it was given: this one's code runs with our functions.
_multi_head_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "scaled_dot_product_attention": _attention, "dropout": _dropout},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_ON_CUDA: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout,
    F.rms_norm: _rms_norm,
    F.multi_head_attention_forward: _multi_head_attention,
}
