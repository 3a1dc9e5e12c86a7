"""The kernels' own code on a CPU, a thread for each of theirs: numbers bit by bit, and races by ThreadSanitizer."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from parallel3d.kernels.cuda_library import find_nvcc, source_files

HERE = Path(__file__).parent
SANITIZER = ("-Xcompiler", "-fsanitize=thread", "-Xlinker", "-ltsan")
BUCKETS_OF_A_STEP = 3  # adamw_on_threads.cpp: kBuckets

pytestmark = pytest.mark.skipif(
    find_nvcc() is None, reason="there is no nvcc on this machine, whose headers are needed"
)

Programs = Callable[[str], Path]


def compiled(source: Path, target: Path, *flags: str) -> bool:
    """Whether the host's compiler, called by nvcc, makes a program of it."""
    always = "-std=c++20 -O1 -DP3D_THREADS=8 -Xcompiler -fno-strict-aliasing,-pthread,-w".split()
    command = [str(find_nvcc()), *always, *flags, str(source), "-o", str(target)]
    return subprocess.run(command, capture_output=True, timeout=300).returncode == 0


@contextmanager
def shared_folder(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder of this test run, of all its workers, for one of them at a time."""
    workers = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    folder = workers / f"kernels_on_threads_{name}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def run(program: Path, *arguments: object) -> tuple[int, str]:
    for _ in range(5):
        done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, timeout=120)
        # Of ThreadSanitizer, where the kernel has put something else at the addresses that it wants.
        if "unexpected memory mapping" not in done.stderr:
            break
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def sanitizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The flags of ThreadSanitizer, where this machine's works; not all kernels let it have its memory."""
    empty = tmp_path_factory.mktemp("empty") / "empty.cpp"
    empty.write_text("int main() {}\n")
    program = empty.with_suffix("")
    works = compiled(empty, program, *SANITIZER) and run(program)[0] == 0
    return SANITIZER if works else ()


# Of each kernel, rules: an expression, and what is there instead where the rule is broken.
BROKEN = {
    "all_reduce": {
        "one half": ("(number % 2) * call.peers.half", "0"),
        "another order of ranks": ("widen(parts[r].values[v])", "widen(parts[World - r].values[v])"),
        "parts without end": ("min(start + part, vectors)", "vectors"),
    },
    "reduce_scatter": {
        "one half": ("(number % 2) * call.peers.half", "0"),
        "another order of ranks": ("widen(parts[k][r].values[v])", "widen(parts[k][World - r].values[v])"),
        "the own part is not rounded": (
            "widen(parts[k][0].values[v])",
            "rank ? widen(parts[k][0].values[v]) : load_wide<T>((const float*)own, vector, call.size).values[v]",
        ),
        "squares of the input": (
            "double(total.values[v]) * total.values[v]",
            "double(float(own[vector])) * float(own[vector])",
        ),
    },
    "adamw": {
        "epsilon is corrected too": ("sqrtf(s) / rule.root + rule.epsilon", "(sqrtf(s) + rule.epsilon) / rule.root"),
        "one group's settings": ("call.groups[part->group]", "call.groups[0]"),
        "weights of peers are left out": ("call.weights[r]", "call.weights[0]"),
    },
}
# The all-reduce's own rounding to half precision hides orders of ranks.
DTYPE = {"all_reduce": "fp32", "reduce_scatter": "bf16", "adamw": "fp16"}


def compile_kernel(kernel: str, folder: Path, sanitizer: tuple[str, ...]) -> None:
    """Make the program of a kernel whose rules can each be broken, for all dtypes and worlds."""
    for path in source_files():
        shutil.copy(path, folder)
    header = folder / f"{kernel}.cuh"
    text = header.read_text()
    for number, (rule, instead) in enumerate(BROKEN[kernel].values(), 1):
        assert rule in text
        text = text.replace(rule, f"(broken == {number} ? ({instead}) : ({rule}))")
    header.write_text(text)
    assert compiled(HERE / f"{kernel}_on_threads.cpp", folder / "program", *sanitizer, f"-I{folder}")


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, sanitizer: tuple[str, ...]) -> Programs:
    @cache
    def program(kernel: str) -> Path:
        with shared_folder(tmp_path_factory, kernel) as folder:
            if not (folder / "program").exists():
                compile_kernel(kernel, folder, sanitizer)
            return folder / "program"

    return program


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("kernel", ["all_reduce", "reduce_scatter"])
def test_sums_are_right_bit_by_bit_and_nothing_races(
    programs: Programs, kernel: str, dtype: str, world: int, full: bool
) -> None:
    """Random sizes, algorithms, alignments and numbers of blocks, in place and not."""
    assert run(programs(kernel), dtype, world, world, (120 if full else 64) // world) == (0, "ok\n")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_steps_are_those_of_double_precision_and_readers_race_with_none(
    programs: Programs, dtype: str, world: int, full: bool
) -> None:
    """Parts of random sizes and alignments in two groups; the weights of all ranks are their masters, rounded."""
    assert run(programs("adamw"), dtype, world, world, BUCKETS_OF_A_STEP * ((40 if full else 24) // world)) == (
        0,
        "ok\n",
    )


@pytest.mark.parametrize(("kernel", "world"), [("all_reduce", 2), ("reduce_scatter", 4), ("adamw", 4)])
def test_a_rank_that_never_comes_makes_results_nan_and_is_reported(programs: Programs, kernel: str, world: int) -> None:
    assert run(programs(kernel), "bf16", world, 3, 2 * BUCKETS_OF_A_STEP, "absent") == (0, "ok\n")


@pytest.mark.parametrize(
    ("kernel", "seed"),
    [("all_reduce", 1), ("all_reduce", 3), ("reduce_scatter", 3)],
)
def test_blocks_that_wait_in_vain_leave_alone_what_others_write(programs: Programs, kernel: str, seed: int) -> None:
    """All that is theirs is NaN, and nothing else."""
    assert run(programs(kernel), "bf16", 4, seed, 1, "partly absent") == (0, "ok\n")


@pytest.mark.parametrize("fault", ["no meeting before", "no meeting after"])
def test_each_meeting_keeps_writers_of_weights_from_readers(
    programs: Programs, sanitizer: tuple[str, ...], fault: str
) -> None:
    if not sanitizer:
        pytest.skip("ThreadSanitizer does not work on this machine, and numbers alone rarely show a race")
    # A race shows in most runs, not in all: it takes two threads that meet.
    runs = (run(programs("adamw"), "bf16", 2, seed, BUCKETS_OF_A_STEP * 30, fault) for seed in range(20))
    assert any(status != 0 and "data race" in said for status, said in runs)


@pytest.mark.parametrize(("kernel", "rule"), [(kernel, rule) for kernel, rules in BROKEN.items() for rule in rules])
def test_a_broken_kernel_is_found_out(programs: Programs, sanitizer: tuple[str, ...], kernel: str, rule: str) -> None:
    """A race shows in most runs, not in all: it takes two threads that meet."""
    if not sanitizer and rule == "one half":
        pytest.skip("ThreadSanitizer does not work on this machine, and numbers alone rarely show a race")
    fault = f"broken {list(BROKEN[kernel]).index(rule) + 1}"
    program, dtype = programs(kernel), DTYPE[kernel]
    assert any(run(program, dtype, 4, seed, 15, fault)[0] not in (0, 2) for seed in range(200))
