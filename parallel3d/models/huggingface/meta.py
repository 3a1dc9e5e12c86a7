"""Plain models that were built on the meta device, with weights from a directory."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.read import differences
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.models.huggingface.weights import COMPUTED, open_directory
from parallel3d.zero.values import keep_in_file


def read_when_needed(model: nn.Module, directory: Path, device: torch.device) -> None:
    """Move a model from the meta device to `device`; its parameters are read from safetensors when they are needed.

    Buffers get their values at once: those of the files, or those that the model's own initialization computes. Parameters that
    are not on the meta device get the files' values if there are any.

    Raises CheckpointError if tensors are missing, unknown or misshapen, ConfigError for a buffer that nothing computes.
    """
    prefix = getattr(model, "base_model_prefix", "")
    weights = open_directory(directory, f"{prefix}." if prefix and hasattr(model, prefix) else "")
    shapes = weights.shapes()
    tensors = model.state_dict(keep_vars=True)  # parameters, by all their names, and persistent buffers
    # A file needs to hold but one of a tied parameter's names.
    name_of = {tensor: name for name, tensor in tensors.items() if name in shapes}
    missing = [name for name, tensor in tensors.items() if tensor.is_meta and tensor not in name_of]
    unknown = [name for name in shapes if name not in tensors and not name.endswith(COMPUTED)]
    misshapen = {n: (tuple(t.shape), shapes[n]) for n, t in tensors.items() if shapes.get(n, t.shape) != t.shape}
    if faults := differences(missing, unknown, misshapen):
        raise CheckpointError(
            f"the tensors of {directory} don't fit {type(model).__name__}; {faults}; if transformers converts them, load the "
            "model by from_pretrained in parallel3d.zero.Init"
        )
    _move_buffers(model, name_of, device)
    for tensor, name in name_of.items():
        read = partial(weights.elements, name)
        if tensor.is_meta:
            keep_in_file(tensor, read, device)
        else:
            tensor.data.copy_(read(0, tensor.numel()).view(tensor.shape))


@torch.no_grad()
def _move_buffers(model: nn.Module, stored: Container[Tensor], device: torch.device) -> None:
    """Move buffers from the meta device. Those that are not stored get the values that the model's initialization computes."""
    initialize: Any = getattr(model, "_init_weights", None)  # transformers' own, of one module
    for path, module in model.named_modules():
        moved = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
        for buffer in moved.values():
            torch.utils.swap_tensors(buffer, torch.empty_like(buffer, device=device))
        computed = {name: buffer for name, buffer in moved.items() if buffer not in stored}
        if computed and initialize is not None:
            initialize(module)
        if unknown := [name for name, buffer in computed.items() if not buffer._version]:
            raise ConfigError(
                f"buffers {unknown} of {path or 'the model'} ({type(module).__name__}) are on the meta device, and nothing "
                "computes their values; build the model in accelerate's init_empty_weights(), which leaves buffers on the CPU"
            )
