"""Library of the CUDA kernels of csrc/: compiled, found by the hash of its sources, and loaded once per process.

A stale library is never loaded. Nothing here needs torch: setup.py compiles where there is none yet.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from parallel3d.atomic_write import atomic_path
from parallel3d.errors import KernelError

_HERE = Path(__file__).parent
# Machine code for A100 and H100, and PTX for later GPUs. CUDA's runtime is linked statically, and PyTorch is not used, so the
# library depends on no other version.
_FLAGS = (
    "-O3 -std=c++17 -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 "
    "-gencode arch=compute_90,code=compute_90 --threads 0 -cudart static -shared -Xcompiler -fPIC"
).split()
_TIMEOUT_S = 600
_SHOWN_LINES = 12
REMEDY = "install CUDA's toolkit, or set CUDA_HOME to it, and run: p3d build-kernels"


def source_files(directory: Path | None = None) -> list[Path]:
    """Return the files to compile: csrc/ of the checkout, or the copy that an installed package carries.

    Raises KernelError if there are none.
    """
    carried = _HERE / "csrc"
    found = directory or (carried if carried.is_dir() else _HERE.parents[1] / "csrc")
    files = sorted([*found.glob("*.cu"), *found.glob("*.cuh")])
    if not files:
        raise KernelError(f"{found} has no CUDA sources; install parallel3d again, from a checkout or its sdist")
    return files


def library_name(sources: list[Path] | None = None) -> str:
    """Return the library's file name: a hash of the sources and compiler flags, and the machine's architecture."""
    content = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sources or source_files():
        text = path.read_bytes()
        content.update(f"\n{path.name} {len(text)}\n".encode() + text)
    return f"libparallel3d-{platform.machine()}-{content.hexdigest()[:16]}.so"


def cache_directory() -> Path:
    """Return the user's cache directory, where `p3d build-kernels` puts the library. Raises KernelError without a home."""
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "parallel3d" / "kernels"
    except RuntimeError as error:
        raise KernelError(f"there is no directory for compiled kernels: {error}; set XDG_CACHE_HOME to one") from None


def find_library() -> Path | None:
    """Return the library of these sources: in the package, from setup.py, or in the user's cache; None if it is in neither."""
    places = [_HERE]
    with suppress(KernelError):  # a user without a home has no cache
        places.append(cache_directory())
    name = library_name()
    return next((path for path in (place / name for place in places) if path.is_file()), None)


def find_nvcc() -> str | None:
    """Return CUDA's compiler, from CUDA_HOME, the PATH, or the usual place of installation; None if there is none."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = next((found for home in homes if (found := shutil.which("nvcc", path=f"{home}/bin"))), None)
    return named or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def build(directory: Path | None = None, sources: list[Path] | None = None) -> Path:
    """Compile the sources into a directory (default: the user's cache), unless that is done, and return the library's path.

    If the user's cache has the library, it is copied. Several processes may call this at once. Raises KernelError if there is
    no nvcc, or with nvcc's output.
    """
    sources = sources or source_files()
    path = (directory or cache_directory()) / library_name(sources)
    if path.is_file():
        return path
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelError(f"there is no nvcc to compile CUDA kernels; {REMEDY}")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with atomic_path(path) as part:
            if not _copy_cached(path.name, part):
                _compile(nvcc, [str(source) for source in sources if source.suffix == ".cu"], part)
            part.chmod(0o755)
    except OSError as error:
        raise KernelError(f"{path} can't be written: {error}; set XDG_CACHE_HOME to a directory of your own") from error
    return path


def _copy_cached(name: str, target: Path) -> bool:
    """Copy the library of this name from the user's cache, if it is there and nobody else may have written it."""
    with suppress(KernelError, FileNotFoundError):
        cached = cache_directory() / name
        _check_private(cached)
        shutil.copyfile(cached, target)
        return True
    return False


def _compile(nvcc: str, sources: list[str], target: Path) -> None:
    command = [nvcc, *_FLAGS, *sources, "-o", str(target)]
    try:
        # The compiler is named by the user's environment, and its arguments by this file.
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)  # noqa: S603 (nvcc)
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"{nvcc} took more than {_TIMEOUT_S} s; see what else the host is busy with") from error
    if done.returncode:
        output = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_SHOWN_LINES:])
        raise KernelError(
            f"{nvcc} failed with exit code {done.returncode}; it needs CUDA 12 or later. It said:\n{output}"
        )


_INT, _POINTER, _LONG = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
_ADDRESSES = ctypes.POINTER(ctypes.c_uint64)
# staging, pads; state, report; half, limit
_STAGING = (_ADDRESSES, _ADDRESSES, _POINTER, _POINTER, _LONG, ctypes.c_uint64)
_LAUNCH = (_INT, _INT, _POINTER)  # blocks, device, stream

# name -> (result type, argument types), as csrc/ declares them.
FUNCTIONS: Mapping[str, tuple[Any, Sequence[Any]]] = {
    "p3d_error": (ctypes.c_char_p, (_INT,)),
    "p3d_all_reduce_threads": (_INT, ()),
    # two_shot, dtype, world, rank; input, output, size; ...
    "p3d_all_reduce": (_INT, (_INT,) * 4 + (_POINTER, _POINTER, _LONG) + _STAGING + _LAUNCH),
    # dtype, wide, world, rank; input, output, squares; stride, size, accumulate; ...
    "p3d_reduce_scatter": (_INT, (_INT,) * 4 + (_POINTER,) * 3 + (_LONG, _LONG, _INT) + _STAGING + _LAUNCH),
    # graph, replaced, device
    "p3d_replace_memsets": (_INT, (_POINTER, ctypes.POINTER(_INT), _INT)),
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
    """Load the library at a path and declare its functions.

    Raises KernelError if it can't be loaded, or if it is in a cache into which others may write: loading it runs its code.
    """
    if path.is_relative_to(cache_directory()):
        _check_private(path)
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path} can't be loaded: {error}; remove it and run: p3d build-kernels") from error
    return library


def _check_private(path: Path) -> None:
    """Raise KernelError if another user than root may have written a file, or may replace it or a folder above it."""
    file = path.resolve()
    for place in (file, *file.parents):
        status = place.stat()
        # Other users may add files to a folder with the sticky bit, such as /tmp, but can't replace any.
        others = stat.S_IWOTH if status.st_mode & stat.S_ISVTX == 0 else 0
        near = stat.S_IWGRP if place in (file, file.parent) else 0
        if status.st_uid not in (0, os.getuid()) or status.st_mode & (others | near):
            raise KernelError(
                f"{path} is not loaded: other users may write {place} (owner {status.st_uid}, mode "
                f"{stat.S_IMODE(status.st_mode):o}); remove it, or take their rights by chmod go-w, and run: p3d build-kernels"
            )


@cache
def load_library() -> ctypes.CDLL:
    """Return the library of these sources, the same for the whole process.

    Raises KernelError, a reason and a remedy, if it isn't compiled or can't be loaded.
    """
    if (path := find_library()) is not None:
        return open_library(path)
    if find_nvcc() is None:
        raise KernelError(f"not compiled, and there is no nvcc; {REMEDY}")
    raise KernelError("not compiled; run: p3d build-kernels")


def check(library: ctypes.CDLL, name: str, status: int) -> None:
    """Raise KernelError if a function of the library has returned a CUDA error."""
    if status:
        raise KernelError(f"{name} failed: {library.p3d_error(status).decode()} (CUDA error {status}); run: p3d doctor")


def addresses(pointers: Sequence[int]) -> Any:
    """Return addresses as an array for C."""
    return (ctypes.c_uint64 * len(pointers))(*pointers)
