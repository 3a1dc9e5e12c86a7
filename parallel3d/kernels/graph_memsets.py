"""CUDA graphs that clear memory by kernels, see csrc/graph_memsets.cu."""

from __future__ import annotations

import ctypes

import torch

from parallel3d.errors import KernelError
from parallel3d.kernels.cuda_library import check, load_library


def clear_by_kernels(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
    """Replace a captured graph's memset nodes by kernels, before it is instantiated; return their number.

    A memset between two kernels, as each of cuDNN's attention backwards has one, delays the second by about 10 us. Does
    nothing where the CUDA kernels are not compiled.
    """
    try:
        library = load_library()
    except KernelError:
        return 0
    replaced = ctypes.c_int()
    status = library.p3d_replace_memsets(graph.raw_cuda_graph(), ctypes.byref(replaced), device.index or 0)
    check(library, "p3d_replace_memsets", status)
    return replaced.value
