"""The CUDA kernels compile, are found by what they were made of, and load; an installation works without nvcc too."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from warm import run_codes

from parallel3d.cli import main
from parallel3d.errors import KernelError
from parallel3d.kernels import cuda_library as kernel_library
from parallel3d.kernels.cuda_library import (
    FUNCTIONS,
    build,
    check,
    find_library,
    find_nvcc,
    library_name,
    open_library,
    source_files,
)
from parallel3d.kernels.fused_adamw import MAX_GROUPS

ROOT = Path(__file__).parents[3]
needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc on this machine")
FAKE_NVCC = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && target=$2; shift; done
{body}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "parallel3d" / "kernels"


def fake_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """A compiler that does what `body` says, $target being what it shall write."""
    bin = tmp_path / "cuda" / "bin"
    bin.mkdir(parents=True)
    (bin / "nvcc").write_text(FAKE_NVCC.format(body=body))
    (bin / "nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(bin.parent))


def without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "find_nvcc", lambda: None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library that setup.py compiled from these sources in a minute, else compile it by the command."""
    if (found := find_library()) is not None:
        return found
    directory = tmp_path_factory.mktemp("kernels")
    assert main(["build-kernels", "--out", str(directory)]) == 0
    return directory / library_name()


@needs_nvcc
def test_what_is_compiled_loads_with_every_function(built: Path) -> None:
    library = open_library(built)
    assert all(getattr(library, name).argtypes is not None for name in FUNCTIONS)
    assert library.p3d_all_reduce_threads() % 32 == 0
    check(library, "nothing", 0)
    with pytest.raises(KernelError, match=r"p3d_all_reduce failed: invalid argument \(CUDA error 1\)"):
        check(library, "p3d_all_reduce", 1)


@needs_nvcc
@pytest.mark.parametrize(
    ("world", "rank", "size", "blocks"),
    [
        (16, 0, 1, 1),
        (0, 0, 1, 1),
        (-1, 0, 1, 1),
        (2, 2, 1, 1),
        (2, -1, 1, 1),
        (2, 0, -1, 1),
        (2, 0, 1, 0),
        (2, 0, 1, 1 << 20),
    ],
)
def test_launchers_refuse_what_there_is_no_kernel_for(
    built: Path, world: int, rank: int, size: int, blocks: int
) -> None:
    library, no_memory, launch = open_library(built), (None, None, None, None), (blocks, 0, None)
    assert library.p3d_all_reduce(0, 0, world, rank, None, None, size, *no_memory, 16, 1, *launch) == 1
    assert library.p3d_reduce_scatter(0, 1, world, rank, None, None, None, 1, size, 0, *no_memory, 16, 1, *launch) == 1
    update = (None, size, None, 1, None, None, 0, None, 0, 0, None, None, None, 1)
    assert library.p3d_adamw(1, 1, world, rank, *update, *launch) == 1


@needs_nvcc
def test_a_message_larger_than_its_staging_buffer_is_refused(built: Path) -> None:
    library = open_library(built)
    for dtype, most in ((0, 4), (1, 8), (2, 8)):
        arguments = (None, None, None, None, 16, 1, 1, 0, None)
        assert library.p3d_all_reduce(0, dtype, 2, 0, None, None, most + 1, *arguments) == 1


@needs_nvcc
def test_parts_are_laid_out_as_the_kernel_reads_them(built: Path) -> None:
    library = open_library(built)
    assert library.p3d_adamw_part_bytes() == 9 * 8, "the rows that tests/unit/zero/test_fused_adamw.py reads"
    assert library.p3d_adamw_groups() == MAX_GROUPS


C_TYPES = {
    "int": ctypes.c_int,
    "int*": ctypes.POINTER(ctypes.c_int),
    "float": ctypes.c_float,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "const char*": ctypes.c_char_p,
    "void*": ctypes.c_void_p,
    "const void*": ctypes.c_void_p,
    "const uint64_t*": ctypes.POINTER(ctypes.c_uint64),
    "const double*": ctypes.POINTER(ctypes.c_double),
}


def test_functions_are_declared_as_the_sources_have_them() -> None:
    """The compiler can't see that: a wrong order of arguments would be found on a GPU alone."""
    text = " ".join(path.read_text() for path in source_files())
    found = {}
    for result, name, arguments in re.findall(r'extern "C" ([\w ]+\*?) (\w+)\(([^)]*)\)', text):
        kinds = [" ".join(argument.split()[:-1]) for argument in arguments.split(",") if argument.strip()]
        found[name] = C_TYPES[result], tuple(C_TYPES[kind] for kind in kinds)
    assert found == {name: (result, tuple(arguments)) for name, (result, arguments) in FUNCTIONS.items()}


def test_a_library_is_named_by_all_that_it_is_made_of(tmp_path: Path) -> None:
    first, second = tmp_path / "a.cu", tmp_path / "b.cuh"
    first.write_text("one")
    second.write_text("two")
    sources = source_files(tmp_path)
    assert sources == [first, second]
    names = {library_name(sources), library_name([first])}
    second.write_text("three")
    names.add(library_name(sources))
    second.rename(tmp_path / "c.cuh")
    names.add(library_name(source_files(tmp_path)))
    first.write_text("onetwo")
    names.add(library_name(source_files(tmp_path)))
    assert len(names) == 5
    assert library_name(source_files(tmp_path)) in names


def test_the_command_builds_into_the_users_cache(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_nvcc(tmp_path, monkeypatch, "echo no library > $target")
    assert main(["build-kernels"]) == 2
    assert "can't be loaded" in capsys.readouterr().err
    assert find_library() == cache / library_name()


def test_a_wheel_gets_a_copy_of_what_the_user_has_compiled(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path, monkeypatch, "echo compiled > $target")
    cache.mkdir(parents=True, mode=0o755)
    cached = cache / library_name()
    cached.write_text("cached")
    assert kernel_library.build(tmp_path / "wheel").read_text() == "cached"
    cached.chmod(0o666)
    assert kernel_library.build(tmp_path / "other").read_text() == "compiled\n", "others may have written it"


def test_a_stale_library_is_not_found(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "csrc" / "kernel.cu"
    source.parent.mkdir()
    source.write_text("old")
    monkeypatch.setattr(kernel_library, "source_files", lambda directory=None: [source])
    fake_nvcc(tmp_path, monkeypatch, "echo library > $target")
    path = build()
    assert find_library() == path
    source.write_text("new")
    assert find_library() is None
    assert build() != path


def test_several_processes_build_at_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sees a whole library or none, and nothing else stays behind."""
    fake_nvcc(tmp_path, monkeypatch, "echo half > $target; sleep 0.3; echo whole >> $target")
    script = "from parallel3d.kernels.cuda_library import build; print(build().read_text().split())"
    with ThreadPoolExecutor(1) as pool:
        runs = pool.submit(run_codes, script, tmp_path / "runs", [dict(os.environ)] * 3)
        while not runs.done():
            assert not (path := cache / library_name()).exists() or path.read_text().split() == ["half", "whole"]
            time.sleep(0.01)
    assert [run.stdout.strip() for run in runs.result()] == ["['half', 'whole']"] * 3
    assert os.listdir(cache) == [library_name()]


def test_what_nvcc_says_is_told_and_nothing_is_left(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvcc(tmp_path, monkeypatch, "echo half > $target; echo 'kernel.cu(3): error: no such thing' >&2; exit 2")
    with pytest.raises(KernelError, match=r"exit code 2.*\n.*kernel.cu\(3\): error"):
        build()
    assert os.listdir(cache) == []


def test_without_nvcc_the_command_says_what_to_do(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_nvcc(monkeypatch)
    assert main(["build-kernels"]) == 2
    assert "no nvcc" in (said := capsys.readouterr().err)
    assert "CUDA_HOME" in said


TRAINS = """
import shutil, warnings
shutil.which = lambda *args, **kwargs: None
import torch, parallel3d
torch.manual_seed(3)
config = {
    "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.01}},
    "zero_optimization": {"stage": 1}, "kernels": {"optimizer_step": True}, "steps_per_print": None,
}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model = parallel3d.pipe.PipelineModule([torch.nn.Linear(4, 4)], 1, loss_fn=torch.nn.functional.mse_loss)
    engine, *_ = parallel3d.initialize(model=model, config=config)
    print(*(engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))])).item() for _ in range(3)))
print(*(warning.message for warning in caught), sep="\\n")
"""


def test_training_works_without_nvcc_and_ninja_with_one_warning(tmp_path: Path) -> None:
    bare = dict.fromkeys(("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES"), "")
    bare |= {"PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    [done] = run_codes(TRAINS, tmp_path, [os.environ | bare])
    assert done.returncode == 0, done.stderr
    losses, warning = done.stdout.splitlines()
    assert warning.startswith("kernels.optimizer_step: ")
    torch.manual_seed(3)
    model, wanted = torch.nn.Linear(4, 4), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        wanted.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert list(map(float, losses.split())) == pytest.approx(wanted, rel=1e-5)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file be another user's, who is not root."""
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)


@pytest.mark.parametrize(
    "place", ["file", "folder", "above", "another's", None], ids=["file", "folder", "folder above", "owner", "private"]
)
def test_a_library_that_others_may_write_is_not_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str | None
) -> None:
    """What is in the file doesn't matter: the refusal comes before it is opened."""
    fake_nvcc(tmp_path, monkeypatch, "echo no library > $target")
    old = os.umask(0o002)
    try:
        path = build()
    finally:
        os.umask(old)
    if place == "file":
        path.chmod(0o775)
    if place == "folder":
        path.parent.chmod(0o775)
    if place == "above":
        path.parent.parent.chmod(0o777)
    if place == "another's":
        give_away(path, monkeypatch)
    with pytest.raises(
        KernelError, match="can't be loaded" if place is None else r"is not loaded: other users may write "
    ):
        open_library(path)


def test_a_damaged_library_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_text("no library")
    with pytest.raises(KernelError, match=r"library\.so can't be loaded.*p3d build-kernels"):
        open_library(path)


def test_sdist_and_wheel_carry_sources_and_page_and_need_no_nvcc(tmp_path: Path) -> None:
    """Built from a copy of the files in git; without torch, as in pip's isolated environment."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "csrc", "parallel3d"):
        os.symlink(ROOT / name, copy / name)
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PATH": "/nonexistent", "CUDA_HOME": "", "CUDA_PATH": ""}
    hidden = "import shutil, sys; shutil.which = lambda *a, **k: None; sys.argv = ['setup.py'] + sys.argv[1:];"
    run = [sys.executable, "-c", f"{hidden} import runpy; runpy.run_path('setup.py', run_name='__main__')"]
    base = ["egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run(
        [*run, *base, "build_py", "--build-lib", str(tmp_path / "lib"), "sdist", "--dist-dir", str(tmp_path / "dist")],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "without CUDA kernels: there is no nvcc" in done.stderr
    names = {path.name for path in source_files()}
    assert {path.name for path in (tmp_path / "lib" / "parallel3d" / "kernels" / "csrc").iterdir()} == names
    page = "parallel3d/planner/report/page"
    assert {path.name for path in (tmp_path / "lib" / page).iterdir()} == {
        path.name for path in (ROOT / page).iterdir()
    }
    data = {path.relative_to(ROOT) for path in (ROOT / "parallel3d").rglob("*.yaml")}
    assert {path.relative_to(tmp_path / "lib") for path in (tmp_path / "lib").rglob("*.yaml")} == data != set()
    (archive,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        inside = {Path(name).name for name in packed.getnames() if Path(name).parent.name == "csrc"}
    assert inside == names


def test_without_a_home_there_is_no_library_but_no_crash(monkeypatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(kernel_library, "_HERE", Path("/nowhere"))
    monkeypatch.setattr(kernel_library, "library_name", lambda: "lib.so")
    assert find_library() is None
    with pytest.raises(KernelError, match="set XDG_CACHE_HOME"):
        kernel_library.cache_directory()


@pytest.mark.parametrize(("body", "tag"), [("exit 1", "any"), ("echo > $target", sysconfig.get_platform())])
def test_a_wheel_says_for_which_platform_it_is(tmp_path, monkeypatch, cache, body: str, tag: str) -> None:
    """One with compiled kernels is for this platform alone; without them it is for any."""
    fake_nvcc(tmp_path, monkeypatch, body)
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("parallel3d", "csrc"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", tmp_path / "dist"]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"parallel3d-0.1.0-py3-none-{tag.replace('-', '_').replace('.', '_')}.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith(".so") for name in archive.namelist()) == (tag != "any")
        assert "parallel3d/planner/report/page/page.html" in archive.namelist()
        metadata = archive.read("parallel3d-0.1.0.dist-info/METADATA").decode()
    assert "Classifier: Operating System :: POSIX :: Linux" in metadata
    assert re.search(r"\]\((?!https)", metadata) is None  # an index page has no files beside it
