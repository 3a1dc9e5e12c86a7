"""Slabs of host memory that a CUDA device copies from and to."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys

import pytest
import torch

from parallel3d.comm.host_memory import _Memory, allocate_slab

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NBYTES = 65 * 2**20 + 4096  # 128 MiB, if it were rounded up to a power of two


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_pinned_slab_takes_its_own_size_and_copies_both_ways_without_waiting() -> None:
    torch.cuda.synchronize()
    before = resident()
    slab = allocate_slab(NBYTES, pin=True)
    assert NBYTES <= resident() - before < NBYTES + 32 * 2**20  # CUDA's own structures
    assert slab.is_pinned()
    host, part = slab.view(torch.float32), slab[4096:].view(torch.bfloat16)
    assert part.is_pinned()
    host.copy_(torch.arange(host.numel()))
    torch.cuda.set_sync_debug_mode("error")
    on_device = host.to("cuda", non_blocking=True)
    on_device.mul_(2)
    host.copy_(on_device, non_blocking=True)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(host, torch.arange(host.numel()).float() * 2)


def test_a_slab_that_is_freed_waits_for_its_copies_and_its_memory_can_be_pinned_again() -> None:
    target = torch.zeros(NBYTES // 4, device="cuda")
    before = resident()
    for number in range(1, 9):
        slab = allocate_slab(NBYTES, pin=True).view(torch.float32)
        slab.fill_(number)
        torch.cuda._sleep(10_000_000)
        target.copy_(slab, non_blocking=True)
        del slab
        gc.collect()
        assert target.eq(number).all()
    assert resident() - before < NBYTES  # eight of them went


def test_what_cuda_refuses_to_pin_is_one_warning_and_later_kernels_run() -> None:
    memory = _Memory(-1, NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(slab.data_ptr() + 8192, 4096, 0)) == 0  # so that all of it can't be registered
    with pytest.warns(UserWarning, match=r"CUDA can't pin 0\.063 GiB of host memory \(.+\); it is used unpinned"):
        memory.register(slab.data_ptr())
    assert torch.ones(1000, device="cuda").sum() == 1000  # no error is left for this kernel
    assert int(cudart.cudaHostUnregister(slab.data_ptr() + 8192)) == 0


AT_THE_END = """
import os
import torch
from parallel3d.comm.host_memory import allocate_slab
slab, other = (allocate_slab(2**25, pin=True) for _ in range(2))
target = slab.to("cuda", non_blocking=True)
pid = os.fork()
if pid == 0:  # doesn't have the pages; what it maps there now must stay
    new = allocate_slab(2**25)
    new.fill_(7)
    del slab, other
    assert new.eq(7).all()
    os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
assert torch.equal(target.cpu(), slab)
other.keeps_itself = other  # freed only when Python ends
"""


def test_children_and_the_end_of_the_process_are_quiet() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", AT_THE_END], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
