"""RMSNorm that also returns its input: its backward adds the gradient of the residual path in the same pass.

arXiv:1910.07467. In plain autograd, the sum of the two gradients is a separate kernel over all hidden states.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from parallel3d.fake_device import has_memory, on_cuda

_LONGEST = 16384  # elements of a row that a program holds
_PROGRAMS_A_MULTIPROCESSOR = 4
_ASSUMED = 132  # number of multiprocessors (an H100's or H200's) if there is no device to ask

# Operator that traces on fake tensors see instead of a kernel; it says what the kernel reads and writes.
library.define("parallel3d::rms_norm_pass", "(Tensor[] read, Tensor(a!)[] written) -> ()")
library.register_fake("parallel3d::rms_norm_pass", lambda read, written: None)


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the same as `rms_norm`."""
    return F.rms_norm(x, weight.shape, weight, eps), x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x: [..., n], weight: [n] -> (x / sqrt(mean(x^2) + eps) * weight, x). Differentiable once; use the returned x."""
    if torch.compiler.is_compiling() or not _has_kernel(x, weight):
        return rms_norm_ref(x, weight, eps)
    result: tuple[Tensor, Tensor] = _RMSNorm.apply(x, weight, eps)
    return result


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    floating = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
    plain = type(x) in (Tensor, nn.Parameter, FakeTensor)
    return plain and on_cuda(x) and floating and x.numel() > 0 and x.shape[-1] <= _LONGEST


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        rows, size = x.numel() // x.shape[-1], x.shape[-1]
        given, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(given, weight, scale)
        if not has_memory(x):
            torch.ops.parallel3d.rms_norm_pass([given, weight], [out, scale])
            return out, x.view_as(x)
        from parallel3d.kernels.rms_norm_triton import rms_norm_forward  # here: PyTorch for the CPU has no Triton

        rms_norm_forward[(rows,)](given, weight, out, scale, size, eps, BLOCK=_power_of_two(size))
        return out, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, handed_on: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return handed_on, None, None
        x, weight, scale = ctx.saved_tensors
        rows, size = scale.numel(), x.shape[-1]
        on_device = has_memory(x)
        number = torch.cuda.get_device_properties(x.device).multi_processor_count if on_device else _ASSUMED
        programs = min(rows, _PROGRAMS_A_MULTIPROCESSOR * number)
        dx = torch.empty_like(x)
        partial = torch.empty(programs, size, dtype=torch.float32, device=x.device)
        adds, given = handed_on is not None, gradient.contiguous()
        other = gradient if handed_on is None else handed_on.contiguous()
        if not on_device:
            torch.ops.parallel3d.rms_norm_pass([given, other, x, weight, scale], [dx, partial])
        else:
            from parallel3d.kernels.rms_norm_triton import rms_norm_backward

            launch = rms_norm_backward[(programs,)]
            launch(given, other, x, weight, scale, dx, partial, rows, size, ADDS=adds, BLOCK=_power_of_two(size))
        return dx, partial.sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None, None


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
