"""The all-reduce kernel's own code on a CPU, a thread for each of its threads: the sums' bits, and races by ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from parallel3d.kernels.build import find_nvcc, source_files

HARNESS = Path(__file__).with_name("all_reduce_on_threads.cpp")
KERNEL = "all_reduce.cuh"
SANITIZER = ["-Xcompiler", "-fsanitize=thread", "-Xlinker", "-ltsan"]

pytestmark = pytest.mark.skipif(
    find_nvcc() is None, reason="there is no nvcc on this machine, whose headers are needed"
)


def compiled(source: Path, target: Path, headers: Path, sanitizer: list[str]) -> bool:
    """Whether the host's compiler, called by nvcc, makes a program of it."""
    flags = "-std=c++20 -O1 -DP3D_THREADS=8 -Xcompiler -fno-strict-aliasing,-pthread,-w".split()
    command = [str(find_nvcc()), *flags, *sanitizer, "-I", str(headers), str(source), "-o", str(target)]
    return subprocess.run(command, capture_output=True, timeout=300).returncode == 0


def run(program: Path, *arguments: object) -> tuple[int, str]:
    for _ in range(5):
        done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=120)
        # Of ThreadSanitizer, where the kernel has put something else at the addresses that it wants.
        if "unexpected memory mapping" not in done.stderr:
            break
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def sanitizer(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of ThreadSanitizer, where this machine's works; not all kernels let it have its memory."""
    empty = tmp_path_factory.mktemp("empty") / "empty.cpp"
    empty.write_text("int main() {}\n")
    program = empty.with_suffix("")
    works = compiled(empty, program, empty.parent, SANITIZER) and run(program)[0] == 0
    return SANITIZER if works else []


def build(folder: Path, sanitizer: list[str], old: str = "", new: str = "") -> Path:
    """The harness with the kernel's headers, one rule of which may be changed."""
    for path in source_files():
        shutil.copy(path, folder)
    text = (folder / KERNEL).read_text()
    assert old in text
    (folder / KERNEL).write_text(text.replace(old, new) if old else text)
    assert compiled(HARNESS, folder / "program", folder, sanitizer)
    return folder / "program"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, sanitizer: list[str]) -> Path:
    return build(tmp_path_factory.mktemp("kernel"), sanitizer)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_sums_are_right_bit_by_bit_and_nothing_races(program: Path, dtype: str, world: int) -> None:
    """Of random sizes, ways, alignments and numbers of blocks, in place and not."""
    assert run(program, dtype, world, world, 800 // world) == (0, "ok\n")


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_never_comes_makes_the_sums_nan_and_is_reported(program: Path, world: int) -> None:
    assert run(program, "bf16", world, 3, 6, "absent") == (0, "ok\n")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(number % 2) * call.half", "0 * call.half"),
        ("int r = 1; r < World; ++r) value", "int r = World - 1; r > 0; --r) value"),
        ("min(start + slice, vectors)", "vectors"),
    ],
    ids=["one half", "another order of ranks", "slices without end"],
)
def test_a_broken_kernel_is_found_out(tmp_path: Path, sanitizer: list[str], old: str, new: str) -> None:
    """A race shows in most runs, not in all: it takes two threads that meet."""
    if not sanitizer and "half" in old:
        pytest.skip("ThreadSanitizer does not work on this machine, and numbers alone rarely show a race")
    broken = build(tmp_path, sanitizer, old, new)
    assert any(run(broken, "fp32", 4, seed, 150)[0] != 0 for seed in range(10))
