"""Products of matrices in fp8 that a GEMM adds to a matrix in fp32, by the C interface of cuBLASLt.

torch._scaled_mm can only overwrite its output: a weight's gradient would be written, then read again to be added.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from parallel3d.errors import KernelError

# Constants of cublasLt.h and library_types.h.
_COMPUTE_32F, _R_32F, _OP_T = 68, 0, 1
_TRANSA, _A_SCALE, _B_SCALE, _FAST_ACCUM = 3, 17, 18, 25
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)
_TYPES = {torch.float32: _R_32F, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_LARGEST_ALIGNMENT = 256  # bytes
_WORKSPACE_BYTES = 32 << 20  # as NVIDIA recommends for Hopper


class _Heuristic(ctypes.Structure):
    """Algorithm for a product, cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """Return the cuBLASLt that torch has loaded; None if it can't be found."""
    try:
        return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None


def _status(name: str, *args: Any) -> int:
    status: int = getattr(_library(), name)(*args)
    return status


def _call(name: str, *args: Any) -> None:
    if status := _status(name, *args):
        raise KernelError(f"{name} failed with status {status} of cuBLAS; set fp8.weight_gradient to 'bf16'")


@cache
def _handle(device: int) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", byref(handle))
    return handle


class Descriptors:
    """Descriptors of out [m, n] (+)= a [m, k] @ b [n, k]^T, all row by row: out^T = b a^T for cuBLASLt's order of columns."""

    def __init__(self, m: int, n: int, k: int, a: torch.dtype, b: torch.dtype):
        self.product = c_void_p()
        _call("cublasLtMatmulDescCreate", byref(self.product), _COMPUTE_32F, _R_32F)
        self.set(_TRANSA, c_int32(_OP_T))
        self.set(_FAST_ACCUM, c_int8(1))
        shapes = (b, k, n, k), (a, k, m, k), (torch.float32, n, m, n)
        self.left, self.right, self.out = (c_void_p() for _ in shapes)
        for layout, (dtype, rows, columns, stride) in zip((self.left, self.right, self.out), shapes, strict=True):
            size = c_uint64(rows), c_uint64(columns), c_int64(stride)
            _call("cublasLtMatrixLayoutCreate", byref(layout), _TYPES[dtype], *size)

    def set(self, attribute: int, value: Any) -> None:
        """Set an attribute of the product."""
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.product, attribute, byref(value), size)


class _Plan:
    """Algorithm for one shape of a product and alignment of its matrices. lock: guards the descriptors, which hold pointers."""

    def __init__(
        self, device: int, sizes: tuple[int, int, int], dtypes: Sequence[torch.dtype], alignments: Sequence[int]
    ):
        self.lock, self.descriptors = Lock(), Descriptors(*sizes, *dtypes)
        self.algorithm: _Heuristic | None = None
        self._device, self._alignments = device, alignments

    def find(self) -> _Heuristic | None:
        """Return the algorithm; None if cuBLASLt has none. The descriptors must have their pointers, which count."""
        if self.algorithm is None:
            d, preference, found, count = self.descriptors, c_void_p(), _Heuristic(), c_int()
            _call("cublasLtMatmulPreferenceCreate", byref(preference))
            limits: list[tuple[int, Any]] = [(_WORKSPACE, c_uint64(_WORKSPACE_BYTES))]
            limits += [(key, c_uint32(size)) for key, size in zip(_ALIGNMENTS, self._alignments, strict=True)]
            for key, value in limits:
                size = ctypes.c_size_t(ctypes.sizeof(value))
                _call("cublasLtMatmulPreferenceSetAttribute", preference, key, byref(value), size)
            layouts = d.left, d.right, d.out, d.out
            given = _handle(self._device), d.product, *layouts, preference, 1, byref(found), byref(count)
            status = _status("cublasLtMatmulAlgoGetHeuristic", *given)
            _call("cublasLtMatmulPreferenceDestroy", preference)
            if status or not count.value or found.state:
                return None
            self.algorithm = found
        return self.algorithm


_plan = cache(_Plan)


def accumulate(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, out: Tensor, adds: bool, factor: float) -> bool:
    """out += factor * (a a_scale) @ (b b_scale)^T if `adds`, else out = that product. Return False if no GEMM can do it.

    - a: [m, k], b: [n, k] in fp8, not both in e5m2, contiguous, on CUDA. 16 must divide k and n.
    - a_scale, b_scale: [] in fp32.
    - out: [m, n] in fp32, contiguous.

    Sums with fewer bits than fp32, as torch._scaled_mm with use_fast_accum.
    """
    if _library() is None:
        return False
    (m, k), n, device = a.shape, len(b), out.device.index
    pointers = b.data_ptr(), a.data_ptr(), out.data_ptr(), out.data_ptr()
    alignments = tuple(min(p & -p, _LARGEST_ALIGNMENT) for p in pointers)
    plan = _plan(device, (m, n, k), (a.dtype, b.dtype), alignments)
    with plan.lock, torch.cuda.device(device):
        d = plan.descriptors
        d.set(_A_SCALE, c_void_p(b_scale.data_ptr()))
        d.set(_B_SCALE, c_void_p(a_scale.data_ptr()))
        found = plan.find()
        if found is None:
            return False
        workspace = torch.empty(found.workspace, dtype=torch.uint8, device=out.device)
        left, right, target, _ = map(c_void_p, pointers)
        numbers = byref(c_float(factor)), byref(c_float(float(adds)))
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        _call(
            "cublasLtMatmul",
            *(_handle(device), d.product, numbers[0], left, d.left, right, d.right, numbers[1]),
            *(target, d.out, target, d.out, byref(found.algorithm)),
            *(c_void_p(workspace.data_ptr()), ctypes.c_size_t(found.workspace), stream),
        )
    return True
