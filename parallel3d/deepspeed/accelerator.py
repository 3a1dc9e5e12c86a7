"""`get_accelerator`: the device that this process trains on, with the interface of DeepSpeed."""

from __future__ import annotations

import os
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parallel3d.comm.environment import is_initialized, local_device
from parallel3d.monitor.memory import memory_in_use


def _host_bytes(kind: str, device_index: int | None = None) -> int:
    return memory_in_use(torch.device("cpu"))[kind]


def _do_nothing(*_: object, **__: object) -> None:
    pass


# Functions that torch.cuda has and torch.cpu lacks. Memory is that of the process; the cache and profiler ranges do nothing.
_RESIDENT, _PEAK = partial(_host_bytes, "resident"), partial(_host_bytes, "peak")
_ON_THE_HOST = SimpleNamespace(
    **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), _RESIDENT),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), _PEAK),
    **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), _do_nothing),
    **dict.fromkeys(("empty_cache", "range_push", "range_pop"), _do_nothing),
)


class Accelerator:
    """CUDA or the CPU: the functions of its torch module (torch.cuda, torch.cpu), and DeepSpeed's own methods.

    Once init_distributed has run, the device is that of the backend: the CPU under gloo, even where CUDA is available.
    """

    @property
    def _type(self) -> str:
        if is_initialized():
            return local_device().type
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def _module(self) -> ModuleType:
        return torch.cuda if self._type == "cuda" else torch.cpu

    def __getattr__(self, name: str) -> Any:
        # torch itself has the CPU's generator and types of tensors.
        for place in (self._module, torch.cuda.nvtx) if self._type == "cuda" else (self._module, _ON_THE_HOST, torch):
            if hasattr(place, name):
                return getattr(place, name)
        raise AttributeError(f"the accelerator {self._type} has no {name!r}")

    def device_name(self, device_index: int | None = None) -> str:
        """Return "cuda", or "cuda:1" for an index; always "cpu" on the CPU."""
        return self._type if device_index is None or self._type == "cpu" else f"{self._type}:{device_index}"

    def current_device_name(self) -> str:
        """Return the name of the current device, such as "cuda:1"."""
        return "cpu" if self._type == "cpu" else f"cuda:{torch.cuda.current_device()}"

    def communication_backend_name(self) -> str:
        """Return the torch.distributed backend for tensors on this device."""
        return "gloo" if self._type == "cpu" else "nccl"

    def device_count(self) -> int:
        """Return the number of devices of this host; on the CPU that of the launcher's processes on it."""
        local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
        return torch.cuda.device_count() if self._type == "cuda" else int(local)

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory; on the CPU the host's."""
        if self._type == "cpu":
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return torch.cuda.get_device_properties(device_index).total_memory

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes of the device's memory that are free; on the CPU the host's."""
        if self._type == "cpu":
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return torch.cuda.mem_get_info(device_index)[0]

    def pin_memory(self, tensor: Tensor) -> Tensor:
        """Return a copy in pinned memory; on the CPU the tensor itself."""
        return tensor if self._type == "cpu" else tensor.pin_memory()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on such a device."""
        return tensor.device.type == self._type

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generators on all devices."""
        torch.manual_seed(seed)

    manual_seed = manual_seed_all

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that weights can have."""
        dtypes = {torch.bfloat16: self.is_bf16_supported(), torch.float16: self.is_fp16_supported()}
        return [torch.float32, *(dtype for dtype, is_supported in dtypes.items() if is_supported)]

    def random(self) -> ModuleType:
        """Return the module of the generators on this device."""
        return torch.cuda.random if self._type == "cuda" else torch.random

    def is_bf16_supported(self) -> bool:
        """Return whether layers can compute in bfloat16."""
        return self._type == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return whether layers can compute in float16."""
        return True


def is_current_accelerator_supported() -> bool:
    """Return True: each device that get_accelerator returns is supported."""
    return True


@cache
def get_accelerator() -> Accelerator:
    """Return the device that this process trains on."""
    return Accelerator()
