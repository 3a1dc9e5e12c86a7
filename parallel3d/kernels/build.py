"""csrc/ compiled to one library, which is found again by what it was made of: a stale one is never loaded.

Without torch: setup.py compiles where there is none yet.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from parallel3d.atomic_write import whole
from parallel3d.errors import KernelError

_HERE = Path(__file__).parent
# Machine code for A100 and H100, and PTX for what comes after. No PyTorch, and CUDA's runtime inside: nothing else to match.
_FLAGS = (
    "-O3 -std=c++17 -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90 "
    "-gencode arch=compute_90,code=compute_90 --threads 0 -cudart static -shared -Xcompiler -fPIC"
).split()
_TIMEOUT_S = 600
_SHOWN_LINES = 12
REMEDY = "install CUDA's toolkit, or set CUDA_HOME to it, and run: p3d build-kernels"


def source_files(directory: Path | None = None) -> list[Path]:
    """What is compiled: csrc/ of the checkout, or the copy that an installed package carries.

    Raises KernelError where there is none.
    """
    carried = _HERE / "csrc"
    found = directory or (carried if carried.is_dir() else _HERE.parents[1] / "csrc")
    files = sorted([*found.glob("*.cu"), *found.glob("*.cuh")])
    if not files:
        raise KernelError(f"{found} has no CUDA sources; install parallel3d anew, from a checkout or its sdist")
    return files


def library_name(sources: list[Path] | None = None) -> str:
    """The library's file name, by the content of the sources, how they are compiled, and the kind of machine."""
    content = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sources or source_files():
        text = path.read_bytes()
        content.update(f"\n{path.name} {len(text)}\n".encode() + text)
    return f"libparallel3d-{platform.machine()}-{content.hexdigest()[:16]}.so"


def cache_directory() -> Path:
    """The user's, where `p3d build-kernels` puts the library."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "parallel3d" / "kernels"


def find_library() -> Path | None:
    """The library of these sources: what setup.py compiled into the package, else the user's; None where there is neither."""
    name = library_name()
    return next((path for path in (_HERE / name, cache_directory() / name) if path.is_file()), None)


def find_nvcc() -> str | None:
    """CUDA's compiler: of CUDA_HOME, the PATH, or where CUDA is usually installed."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    named = next((found for home in homes if (found := shutil.which("nvcc", path=f"{home}/bin"))), None)
    return named or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def build(directory: Path | None = None, sources: list[Path] | None = None) -> Path:
    """Compile the sources into a directory, by default the user's cache, unless that is done, and return the library's path.

    Several processes may do so at once. Raises KernelError without nvcc, and with what nvcc says.
    """
    sources = sources or source_files()
    path = (directory or cache_directory()) / library_name(sources)
    if path.is_file():
        return path
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelError(f"there is no nvcc to compile CUDA kernels; {REMEDY}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            _compile(nvcc, [str(source) for source in sources if source.suffix == ".cu"], part)
    except OSError as error:
        raise KernelError(f"{path} can't be written: {error}; set XDG_CACHE_HOME to a directory of your own") from error
    return path


def _compile(nvcc: str, sources: list[str], target: Path) -> None:
    command = [nvcc, *_FLAGS, *sources, "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise KernelError(f"{nvcc} took more than {_TIMEOUT_S} s; see what else the host is busy with") from error
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-_SHOWN_LINES:])
        raise KernelError(
            f"{nvcc} failed with exit code {done.returncode}; it needs CUDA 12 or later. It said:\n{said}"
        )
