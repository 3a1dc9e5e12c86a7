"""`get_accelerator`: the device that this process trains on, with the interface of DeepSpeed."""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any

import torch

from parallel3d.comm.environment import is_initialized, local_device


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
        return getattr(self._module, name)

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
