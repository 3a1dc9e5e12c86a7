"""Limits of host memory, from made-up cgroup trees, and the exact size of slabs."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
import torch

from parallel3d.comm.host_memory import allocate_slab, check_host_memory, host_capacity
from parallel3d.errors import OffloadError

GIB = 2**30


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n" if text != "" else "")


def process(tmp_path: Path, cgroup: str, *mounts: str) -> Path:
    """A process's directory in /proc."""
    lines = "\n".join(f"{30 + i} 23 0:{i} {mount}" for i, mount in enumerate(mounts))
    write(tmp_path / "proc", cgroup=cgroup, mountinfo=lines, status=Path("/proc/self/status").read_text().strip())
    return tmp_path / "proc"


def write_v2(folder: Path, limit: object, used: int, cached: int = 0, high: object = "max") -> None:
    stat = f"anon 5\nfile 999\ninactive_file {cached // 4}\nactive_file {cached - cached // 4}"
    write(folder, memory__max=limit, memory__high=high, memory__current=used, memory__stat=stat)


def write_v1(folder: Path, limit: int, used: int, cached: int) -> None:
    stat = f"inactive_file 7\nactive_file 7\ntotal_inactive_file {cached}\ntotal_active_file 0"
    write(folder, memory__limit_in_bytes=limit, memory__usage_in_bytes=used, memory__stat=stat)


def test_nested_cgroups_leave_their_limits_less_what_is_used_and_not_cached(tmp_path: Path) -> None:
    top = tmp_path / "sys"
    write(top, cgroup__procs="")  # the root has no limit
    write_v2(top / "jobs", 100 * GIB, 60 * GIB, 20 * GIB)
    write_v2(top / "jobs/step", "max", 50 * GIB, high=64 * GIB)
    write_v2(top / "jobs/step/rank", "max", 10 * GIB)
    write_v2(top / "other", GIB, GIB)
    proc = process(tmp_path, "0::/jobs/step/rank", f"/ {top} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")
    wanted = {f"{top}/jobs/step/memory.high": 14 * GIB, f"{top}/jobs/memory.max": 60 * GIB}
    assert host_capacity(proc=proc) == wanted
    assert host_capacity(limit_gib=1.5, proc=proc) == {"offload.host_memory_gib": 3 * GIB // 2}


V1 = "4:cpu,memory:/docker/ab/in\n1:name=systemd:/\n0::/"


@pytest.mark.parametrize(("root", "inside"), [("/", "docker/ab/in"), ("/docker/ab", "in"), ("/elsewhere", "")])
def test_version_1_is_found_through_what_a_container_mounts(tmp_path: Path, root: str, inside: str) -> None:
    top = tmp_path / "sys"
    write_v1(top, 9223372036854771712, 80 * GIB, 0)
    write_v1(top / inside, 8 * GIB, 5 * GIB, 2 * GIB)
    mounts = (
        f"{root} {top} rw - cgroup cgroup rw,memory",
        f"/ {tmp_path} rw - cgroup2 none rw",
        "/ /x rw - proc proc rw",
    )
    capacity = host_capacity(proc=process(tmp_path, V1, *mounts))
    assert capacity == {str(top / inside / "memory.limit_in_bytes"): 5 * GIB}


def test_without_a_limit_the_capacity_is_not_known_and_refuses_nothing(tmp_path: Path) -> None:
    write_v2(tmp_path / "sys/a", "max", 5)
    proc = process(tmp_path, "0::/a", f"/ {tmp_path / 'sys'} rw - cgroup2 cgroup2 rw")
    assert host_capacity(proc=proc) == {} == host_capacity(proc=tmp_path / "none")
    check_host_memory([2**60, 2**60], [{}, {}], 0)


def test_memory_that_is_used_already_leaves_nothing(tmp_path: Path) -> None:
    write_v2(tmp_path / "sys/a", GIB, GIB + 5)  # it may pass its limit for a moment
    proc = process(tmp_path, "0::/a", f"/ {tmp_path / 'sys'} rw - cgroup2 cgroup2 rw")
    assert list(host_capacity(proc=proc).values()) == [0]


@pytest.mark.parametrize("name", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_limits_of_the_process_count_and_its_slabs_keep_them(tmp_path: Path, name: str) -> None:
    kind = getattr(resource, name)
    before = resource.getrlimit(kind)
    used = {"RLIMIT_AS": "VmSize", "RLIMIT_DATA": "VmData"}[name]
    size = int(re.findall(rf"{used}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) * 1024
    try:
        resource.setrlimit(kind, (size + 2 * GIB, before[1]))
        left = host_capacity(proc=process(tmp_path, ""))[f"{name} of process {os.getpid()}"]
        assert 1.9 * GIB < left < 2.1 * GIB
        assert allocate_slab(GIB).numel() == GIB
        with pytest.raises(
            OffloadError, match=r"3\.000 GiB of host memory can't be had: Cannot allocate memory; see `ulimit"
        ):
            allocate_slab(3 * GIB)
    finally:
        resource.setrlimit(kind, before)


def test_the_error_says_who_needs_what_and_which_limit_is_short() -> None:
    shared = [{"memory.max": 10 * GIB}, {"memory.max": 9 * GIB}]  # the second looked later
    check_host_memory([5 * GIB, 4 * GIB], shared, 0)
    with pytest.raises(OffloadError) as caught:
        check_host_memory([5 * GIB, 4 * GIB + 2**20], shared, 1)
    start = "offloaded state needs 9.001 GiB of host memory (by local rank: 5.000 by 0, 4.001 by 1 (this one)), but memory.max"
    assert str(caught.value).startswith(f"{start} leaves 9.000 GiB; offload less (a lower offload_optimizer.ratio), ")


def test_ranks_share_a_limit_only_if_both_name_it() -> None:
    own = [{"step": 10, "task 0": 5}, {"step": 10, "task 1": 5}]
    check_host_memory([5, 5], own, 0)
    with pytest.raises(OffloadError, match=r"by 0 \(this one\)\), but task 0 leaves"):
        check_host_memory([6, 1], own, 0)
    with pytest.raises(OffloadError, match=r"by 1\), but task 1 leaves"):  # the other one's, so that all ranks raise
        check_host_memory([1, 6], own, 0)


def mapped(address: int) -> tuple[int, int] | None:
    """Size and resident bytes of the mapping that begins at an address, by Linux's count."""
    found = re.search(
        rf"^{address:x}-.*?^Size:\s+(\d+).*?^Rss:\s+(\d+)", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    return found and (int(found[1]) * 1024, int(found[2]) * 1024)


@pytest.mark.parametrize("nbytes", [4096, 33 * 2**20 + 4096])
def test_a_slab_takes_its_pages_and_no_more_until_its_last_view_is_gone(nbytes: int) -> None:
    slab = allocate_slab(nbytes, pin=not torch.cuda.is_available())
    address = slab.data_ptr()
    assert (slab.dtype, slab.shape, slab.device.type, address % 4096) == (torch.uint8, (nbytes,), "cpu", 0)
    assert mapped(address) == (nbytes, 0)
    assert not slab[:: 2**20].any()
    part = slab.view(torch.bfloat16)[: nbytes // 4]
    slab.fill_(0)
    part.fill_(2.5)
    assert mapped(address) == (nbytes, nbytes)
    del slab
    assert part.eq(2.5).all()
    assert mapped(address) == (nbytes, nbytes)
    del part
    assert mapped(address) is None


def test_an_empty_slab_and_one_beyond_the_ram_are_slabs() -> None:
    assert allocate_slab(0, pin=True).numel() == 0
    ram = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    slab = allocate_slab(2 * ram)  # a virtual machine's RAM grows as it is used
    slab[-1] = 3
    assert slab[-4096:].sum() == 3
