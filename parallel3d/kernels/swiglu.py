"""SwiGLU, silu(gate) * up with gate and up in one tensor, in one pass forward and one backward.

torch.compile writes the gradient of the fused projection as a concatenation, which takes twice as long as its bytes need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from parallel3d.operators import define

_BLOCK = 1024


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """gate_up: [..., 2 n], gate before up -> silu(gate) * up, [..., n]. arXiv:2002.05202."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def swiglu_backward_ref(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """gradient of the result: [..., n] -> gradient of gate_up: [..., 2 n]; computed at least in fp32."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    sigmoid, gradient = gate.sigmoid(), gradient.to(wide)
    dgate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([dgate, gradient * gate * sigmoid], dim=-1).to(gate_up.dtype)


def _forward(gate_up: Tensor) -> Tensor:
    if not _has_kernel(gate_up):
        return swiglu_ref(gate_up).contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    from parallel3d.kernels.swiglu_triton import swiglu_forward  # here: PyTorch for the CPU has no Triton

    swiglu_forward[_grid(out)](gate_up.contiguous(), out, out.shape[-1], BLOCK=_BLOCK)
    return out


def _backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    if not _has_kernel(gate_up):
        return swiglu_backward_ref(gradient, gate_up)
    return _run_backward(gradient, gate_up, recomputes=False)[0]


def _backward_and_result(gradient: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    if not _has_kernel(gate_up):
        return swiglu_backward_ref(gradient, gate_up), _forward(gate_up)
    return _run_backward(gradient, gate_up, recomputes=True)


def _run_backward(gradient: Tensor, gate_up: Tensor, recomputes: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    result = torch.empty_like(gradient, memory_format=torch.contiguous_format) if recomputes else out
    from parallel3d.kernels.swiglu_triton import swiglu_backward

    sizes = {"size": gradient.shape[-1], "BLOCK": _BLOCK, "RECOMPUTES": recomputes}
    swiglu_backward[_grid(gradient)](gradient.contiguous(), gate_up.contiguous(), out, result, **sizes)
    return out, result


# torch.compile, traces on fake tensors and dispatch modes see one operator in the forward and one in the backward.
_swiglu = define(
    "swiglu",
    "(Tensor gate_up) -> Tensor",
    _forward,
    lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
)
_swiglu_backward = define(
    "swiglu_backward",
    "(Tensor gradient, Tensor gate_up) -> Tensor",
    _backward,
    lambda gradient, gate_up: torch.empty_like(gate_up, memory_format=torch.contiguous_format),
)
# For a backward that recomputes the result: it reads gate_up once.
_swiglu_backward_and_result = define(
    "swiglu_backward_and_result",
    "(Tensor gradient, Tensor gate_up) -> (Tensor, Tensor)",
    _backward_and_result,
    lambda gradient, gate_up: (
        torch.empty_like(gate_up, memory_format=torch.contiguous_format),
        torch.empty_like(gradient),
    ),
)


def _run(operator: Any, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Run the operator where something traces it, else `function`: an operator costs several times as much host time."""
    is_plain = all(type(tensor) is Tensor or type(tensor) is nn.Parameter for tensor in tensors)
    seen = torch.compiler.is_compiling() or not is_plain or torch._C._len_torch_dispatch_stack()
    result: Tensor = (operator if seen else function)(*tensors)
    return result


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _run(_swiglu, _forward, gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return _run(_swiglu_backward, _backward, gradient, gate_up)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up: [..., 2 n], gate before up -> silu(gate) * up, [..., n]. Differentiable once. arXiv:2002.05202."""
    result: Tensor = _SwiGLU.apply(gate_up)
    return result


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and x.numel() > 0


def _grid(rows: Tensor) -> tuple[int, int]:
    """Return one program for each row and each block of its columns."""
    size = rows.shape[-1]
    return rows.numel() // size, -(-size // _BLOCK)
