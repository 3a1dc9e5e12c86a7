"""Scratch files on disk: what is written comes back, and errors say where and why."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from random import Random
from threading import Barrier, Event, Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel3d.comm.host_memory import allocate_slab
from parallel3d.config import load
from parallel3d.errors import ConfigError, OffloadError
from parallel3d.zero import disk
from parallel3d.zero.disk import ScratchFile

PAGE = 4096
FORK = multiprocessing.get_context("fork")


def pages(seed: int, count: int) -> Tensor:
    """A slab of random bytes."""
    slab = allocate_slab(count * PAGE)
    slab.copy_(torch.frombuffer(bytearray(Random(seed).randbytes(count * PAGE)), dtype=torch.uint8))
    return slab


def content(file: ScratchFile) -> bytes:
    slab = allocate_slab(file.nbytes)
    file.read(0, slab).wait()
    return bytes(slab.numpy())


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let the kernel refuse larger files, whoever runs the test. (Python ignores the signal.)"""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


SIZE = 40
PLACES = st.integers(0, SIZE - 1).flatmap(lambda at: st.tuples(st.just(at), st.integers(1, SIZE - at)))


@given(places=st.lists(PLACES, min_size=1, max_size=6), block=st.integers(1, 9), in_flight=st.integers(1, 12))
@settings(max_examples=15)
def test_random_writes_and_reads_do_what_they_do_to_a_bytearray(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]], block: int, in_flight: int
) -> None:
    wanted = bytearray(SIZE * PAGE)
    with closing(ScratchFile(tmp_path_factory.getbasetemp(), SIZE * PAGE, block * PAGE, in_flight)) as file:
        for seed, (at, count) in enumerate(places):
            slab = pages(seed, count)
            wanted[at * PAGE : (at + count) * PAGE] = bytes(slab.numpy())
            file.write(at * PAGE, slab).wait()
            back = allocate_slab(count * PAGE)
            file.read(at * PAGE, back).wait()
            assert torch.equal(back, slab)
        assert content(file) == wanted
        moved = sum(count for _, count in places) * PAGE
        assert (file.writes.nbytes, file.reads.nbytes) == (moved, moved + SIZE * PAGE)


def test_transfers_of_any_dtype_run_at_once(tmp_path: Path) -> None:
    with closing(ScratchFile(tmp_path, 12 << 20, block_bytes=1 << 16)) as file:
        slab = pages(1, (12 << 20) // PAGE)
        parts = slab.split(3 << 20)
        kinds = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
        sent = [
            (i * (3 << 20), part.view(kind).view(2, -1))
            for i, (part, kind) in enumerate(zip(parts, kinds, strict=True))
        ]
        for transfer in [file.write(at, part) for at, part in sent]:
            transfer.wait()
        into = [(at, allocate_slab(3 << 20).view(part.dtype).view(2, -1)) for at, part in reversed(sent)]
        for transfer in [file.read(at, part) for at, part in into]:
            transfer.wait()
        for (_, got), (_, part) in zip(reversed(into), sent, strict=True):
            assert torch.equal(got.view(torch.uint8), part.view(torch.uint8))
        assert content(file) == bytes(slab.numpy())


def test_reads_do_not_wait_for_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = Event(), os.pwritev
    monkeypatch.setattr(disk.os, "pwritev", lambda *args: real(*args) if read.wait(20) else 0)
    with closing(ScratchFile(tmp_path, 2 * PAGE, in_flight=1)) as file:
        written = file.write(0, pages(1, 1))
        file.read(PAGE, allocate_slab(PAGE)).wait()
        read.set()
        written.wait()


def test_o_direct_is_used_where_the_file_system_has_it(tmp_path: Path) -> None:
    (tmp_path / "probe").write_bytes(bytes(PAGE))
    copied = ["dd", f"if={tmp_path}/probe", "of=/dev/null", "iflag=direct", f"bs={PAGE}"]
    has_it = subprocess.run(copied, capture_output=True).returncode == 0
    with warnings.catch_warnings(record=True) as warned, closing(ScratchFile(tmp_path, PAGE)) as file:
        assert file.is_direct is has_it
    assert ["without O_DIRECT" in str(w.message) for w in warned] == [True] * (not has_it)


def test_without_o_direct_one_warning_and_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = disk.fcntl.fcntl

    def refuse(file: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(file, command, flags)

    monkeypatch.setattr(disk.fcntl, "fcntl", refuse)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")  # python's own
        for _ in range(2):
            with closing(ScratchFile(tmp_path, 3 * PAGE)) as file:
                assert not file.is_direct
                slab = pages(2, 3)
                file.write(0, slab).wait()
                assert content(file) == bytes(slab.numpy())
    assert ["without O_DIRECT" in str(w.message) for w in warned] == [True]


@pytest.mark.parametrize("is_read", [True, False])
def test_requests_that_the_kernel_fills_in_part_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """The kernel moves 2 and a half pages at most: the next request begins at a page again."""
    name, rng, calls = "preadv" if is_read else "pwritev", Random(3), []
    real = getattr(os, name)

    def move_some(file: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        count = rng.randint(1, 2) * PAGE
        moved = real(file, [buffers[0][:count]], offset)
        return min(moved, len(buffers[0]), count + PAGE // 2 if moved == count else moved)

    slab = pages(4, 20)
    with closing(ScratchFile(tmp_path, 20 * PAGE, 8 * PAGE)) as file:
        if is_read:
            file.write(0, slab).wait()
        monkeypatch.setattr(os, name, move_some)
        if not is_read:
            file.write(0, slab).wait()
        assert content(file) == bytes(slab.numpy())
    assert len(calls) > 9
    assert all(offset % PAGE == 0 for offset in calls)


def test_a_read_of_what_is_no_longer_there_is_an_error(tmp_path: Path) -> None:
    with closing(ScratchFile(tmp_path, 8 * PAGE, 4 * PAGE)) as file:
        os.truncate(file._file.fileno(), 6 * PAGE)
        into = allocate_slab(8 * PAGE)
        with pytest.raises(
            OffloadError, match=rf"reading 8192 bytes at 24576 of .*{tmp_path} failed: only 0 bytes were moved;"
        ):
            file.read(0, into).wait()
        file.read(0, into[: 6 * PAGE]).wait()


def test_a_disk_that_is_too_small_is_found_at_once_with_numbers(tmp_path: Path) -> None:
    space = os.statvfs(tmp_path)
    size = (space.f_bavail * space.f_frsize) + (64 << 30)
    with pytest.raises(OffloadError) as caught:
        ScratchFile(tmp_path, size)
    text = str(caught.value)
    assert text.startswith(
        f"a scratch file of {size / 2**30:.3f} GiB for this rank's offloaded state can't be made in {tmp_path}"
    )
    free = float(text.partition("(free: ")[2].partition(" GiB")[0])
    assert abs(free - space.f_bavail * space.f_frsize / 2**30) < 32  # others use the disk, too
    assert "No space left on device; free space there, set nvme_path" in text


def test_an_allocation_that_the_kernel_refuses_leaves_nothing(tmp_path: Path) -> None:
    with largest_file(1 << 20):
        with pytest.raises(
            OffloadError, match=rf"of 0\.002 GiB .* in {tmp_path} \(free: .* GiB, .*\): File too large; free"
        ):
            ScratchFile(tmp_path, 2 << 20)
        ScratchFile(tmp_path, 1 << 20).close()
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_says_where(tmp_path: Path) -> None:
    """The kernel takes the pages below the limit, and refuses the next."""
    slab = pages(5, 16)
    with closing(ScratchFile(tmp_path, 16 * PAGE, 8 * PAGE)) as file:
        with largest_file(11 * PAGE):
            transfer = file.write(0, slab)
            with pytest.raises(
                OffloadError, match=rf"writing 20480 bytes at 45056 of .*{tmp_path} failed: File too large; "
            ):
                transfer.wait()
        assert file.writes.nbytes == 8 * PAGE
        assert content(file) == bytes(slab[: 11 * PAGE].numpy()) + bytes(5 * PAGE)


# Directories that are missing, not a directory, or not to be written to by anyone, root included.
@pytest.mark.parametrize("directory", ["{tmp_path}/missing", "{tmp_path}/file", "/proc/self/fdinfo"])
def test_a_directory_that_takes_no_files_is_an_error(tmp_path: Path, directory: str) -> None:
    (tmp_path / "file").touch()
    path = directory.format(tmp_path=tmp_path)
    with pytest.raises(
        OffloadError, match=rf"can't be made in {path} \(free: unknown.*set nvme_path to an existing directory"
    ):
        ScratchFile(path, PAGE)


def test_tensors_that_o_direct_cannot_take_are_refused(tmp_path: Path) -> None:
    slab = allocate_slab(8 * PAGE)
    with closing(ScratchFile(tmp_path, 4 * PAGE)) as file:
        for offset, tensor in (
            (512, slab[:PAGE]),
            (0, slab[: PAGE + 512]),
            (0, slab[512 : 512 + PAGE]),
            (0, slab.view(2, -1)[:, :PAGE]),
            (PAGE, slab[: 4 * PAGE]),
            (-PAGE, slab[:PAGE]),
        ):
            with pytest.raises(
                OffloadError, match="must lie inside, be contiguous, and begin and end at multiples of 4096"
            ):
                file.write(offset, tensor)
    with pytest.raises(ConfigError, match=r"aio.block_size.* multiple of 4096"):
        load({"aio": {"block_size": 1000}})


def fill_and_wait(directory: Path, seed: int, ready: Semaphore, go: Semaphore) -> None:
    file = ScratchFile(directory, 64 * PAGE, 4 * PAGE)
    slab = pages(seed, 64)
    file.write(0, slab).wait()
    ready.release()
    go.acquire()
    os._exit(content(file) != bytes(slab.numpy()))


def test_processes_share_a_directory_and_leave_nothing_in_it_when_killed(tmp_path: Path) -> None:
    ready, go = FORK.Semaphore(0), FORK.Semaphore(0)
    owners = [FORK.Process(target=fill_and_wait, args=(tmp_path, seed, ready, go), daemon=True) for seed in (6, 7, 8)]
    for owner in owners:
        owner.start()
    for _ in owners:
        assert ready.acquire(timeout=60)
    files = [
        os.stat(f"/proc/{owner.pid}/fd/{name}")
        for owner in owners
        for name in os.listdir(f"/proc/{owner.pid}/fd")
        if os.readlink(f"/proc/{owner.pid}/fd/{name}").startswith(str(tmp_path))
    ]
    # The kernel frees the blocks of a file without a name when its last owner ends.
    assert [(file.st_nlink, file.st_blocks >= 64 * PAGE // 512) for file in files] == [(0, True)] * 3
    os.kill(owners[0].pid, signal.SIGKILL)
    owners[0].join()
    with closing(ScratchFile(tmp_path, 64 * PAGE)) as file:  # the next start
        file.write(0, pages(9, 64)).wait()
        for _ in owners:
            go.release()
        for owner in owners:
            owner.join()
        assert content(file) == bytes(pages(9, 64).numpy())
    assert [owner.exitcode for owner in owners] == [-signal.SIGKILL, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_seconds_in_which_requests_overlap_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(disk.time, "perf_counter", lambda: clock[0])
    traffic, both = disk.Traffic(), Barrier(2)

    def other() -> None:
        with traffic.moving(10):
            both.wait()
            both.wait()  # the first one's end

    thread = Thread(target=other)
    with traffic.moving(5):
        clock[0] = 1.0
        thread.start()
        both.wait()
        clock[0] = 3.0
    both.wait()
    thread.join()
    clock[0] = 10.0
    with suppress(OSError), traffic.moving(100):
        clock[0] = 10.5
        raise OSError
    assert (traffic.nbytes, traffic.seconds) == (15, 3.5)
