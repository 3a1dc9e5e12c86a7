"""The compiled kernels as functions of C, loaded once a process."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from parallel3d.errors import KernelError
from parallel3d.kernels.build import find_library

_INT, _POINTER, _LONG = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
_ADDRESSES = ctypes.POINTER(ctypes.c_uint64)
# staging, pads; state, report; half, limit
_STAGING = (_ADDRESSES, _ADDRESSES, _POINTER, _POINTER, _LONG, ctypes.c_uint64)
_LAUNCH = (_INT, _INT, _POINTER)  # blocks, device, stream

# name -> (what it returns, what it takes), as csrc/ declares them.
FUNCTIONS: Mapping[str, tuple[Any, Sequence[Any]]] = {
    "p3d_error": (ctypes.c_char_p, (_INT,)),
    "p3d_all_reduce_threads": (_INT, ()),
    # two_shot, dtype, world, rank; input, output, size; ...
    "p3d_all_reduce": (_INT, (_INT,) * 4 + (_POINTER, _POINTER, _LONG) + _STAGING + _LAUNCH),
    # dtype, wide, world, rank; input, output, squares; stride, size, accumulate; ...
    "p3d_reduce_scatter": (_INT, (_INT,) * 4 + (_POINTER,) * 3 + (_LONG, _LONG, _INT) + _STAGING + _LAUNCH),
    "p3d_adamw_part_bytes": (_INT, ()),
    "p3d_adamw_groups": (_INT, ()),
    # dtype, wide, world, rank; parts, vectors, groups, num_groups; divisor, skip, clear; weights, meets_before,
    # meets_after; pads, state, report, limit; ...
    "p3d_adamw": (
        _INT,
        (_INT,) * 4
        + (_POINTER, _LONG, ctypes.POINTER(ctypes.c_double), _INT)
        + (_POINTER, _POINTER, _INT)
        + (_ADDRESSES, _INT, _INT)
        + (_ADDRESSES, _POINTER, _POINTER, ctypes.c_uint64)
        + _LAUNCH,
    ),
}


def open_library(path: Path) -> ctypes.CDLL:
    """The library of a path, its functions declared. Raises KernelError where it can't be loaded."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path} can't be loaded: {error}; remove it and run: p3d build-kernels") from error
    return library


@cache
def load_library() -> ctypes.CDLL | None:
    """The library of these sources, the same for the whole process; None where it isn't compiled. Raises KernelError."""
    path = find_library()
    return None if path is None else open_library(path)


def check(library: ctypes.CDLL, name: str, status: int) -> None:
    """Raises KernelError where a function of the library has returned a CUDA error."""
    if status:
        raise KernelError(f"{name} failed: {library.p3d_error(status).decode()} (CUDA error {status}); run: p3d doctor")


def addresses(pointers: Sequence[int]) -> Any:
    """As C takes an array of them."""
    return (ctypes.c_uint64 * len(pointers))(*pointers)
