"""Choice of the PyTorch kernels that compute attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from parallel3d.errors import ConfigError

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# The smallest compute capability for which PyTorch has kernels.
_CAPABILITIES = {"cudnn": (8, 0), "flash": (8, 0), "efficient": (5, 0)}


def attention_context(names: Sequence[str] | None, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes contexts in which scaled_dot_product_attention uses only these backends.

    On CUDA the backends are tried in this order; None allows all. Run forwards and their recomputations in such a context. A
    backward uses the kernel of its forward, and a compiled layer keeps the kernel that it was compiled with. Raises
    ConfigError if the device has none of the backends.
    """
    if names is None:
        return nullcontext
    reasons = [missing(name, device) for name in names]
    if all(reasons):
        asked = " and ".join(f"{name} ({reason})" for name, reason in zip(names, reasons, strict=True))
        usable = [name for name in _BACKENDS if missing(name, device) is None]
        raise ConfigError(
            f"attention.backend is {asked}, which can't run; leave it out for PyTorch's choice, or give some of "
            f"{', '.join(usable)}"
        )
    return partial(sdpa_kernel, [_BACKENDS[name] for name in names], set_priority=True)


def missing(name: str, device: torch.device) -> str | None:
    """Return why no kernel of the backend `name` can run on this device; None if one can."""
    if name == "math":
        return None
    if device.type == "cpu":
        return None if name == "flash" else "it needs a CUDA device"
    if name == "cudnn" and not torch.backends.cudnn.is_available():
        return "PyTorch is built without cuDNN"
    if name == "flash" and not torch.backends.cuda.is_flash_attention_available():
        return "PyTorch is built without it"
    found, least = torch.cuda.get_device_capability(device), _CAPABILITIES[name]
    if found < least:
        return f"it needs compute capability {least[0]}.{least[1]}, the device has {found[0]}.{found[1]}"
    return None
