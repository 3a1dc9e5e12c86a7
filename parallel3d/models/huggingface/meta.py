"""Models of transformers on the meta device, with weights from a directory."""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.read import differences
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.models.huggingface.weights import COMPUTED, Weights, open_directory
from parallel3d.zero.weights import keep_in_file


def load_wrapped(directory: Path, dtype: torch.dtype, weights: bool) -> tuple[nn.Module, Weights | None]:
    """Return a causal language model of transformers and the weights that its parts are to read, None if there are none.

    The model is on the meta device, with its buffers on the CPU. Only one whose stored tensors transformers converts when it
    loads them, such as single experts, is whole in memory.

    - weights: whether the directory's weights are wanted.

    Raises ConfigError if transformers has no such model, CheckpointError for weights that don't fit it.
    """
    model = _without_weights(directory, dtype)
    if not weights:
        _move_buffers(model, (), torch.device("cpu"))
        return model, None
    stored = _open(model, directory)
    try:
        remedy = "put the config.json and the weights of one model into it"
        name_of = _names_in_files(model, stored, directory, remedy)
    except CheckpointError:
        import transformers

        kinds: Any = transformers.AutoModelForCausalLM
        model, found = kinds.from_pretrained(
            directory, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
        )
        misshapen = {name: (wanted, shape) for name, shape, wanted in found["mismatched_keys"]}
        if differences(found["missing_keys"], found["unexpected_keys"], misshapen):
            raise
        return model, None
    _move_buffers(model, name_of, torch.device("cpu"))
    for name, tensor in model.state_dict(keep_vars=True).items():
        stored.alias(name, name_of[tensor])
        if not tensor.is_meta:
            tensor.data.copy_(stored.elements(name, 0, tensor.numel()).view(tensor.shape))
    return model, stored


def _without_weights(directory: Path, dtype: torch.dtype) -> nn.Module:
    """Return the model of a config.json on the meta device. Raises ConfigError."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            f"the architecture in {directory} is run by transformers; install it: pip install transformers"
        ) from None
    try:
        config = AutoConfig.from_pretrained(directory)
        quantized = getattr(config, "quantization_config", None) is not None
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:  # each architecture checks its values in its own way, or not at all
        raise ConfigError(
            f"transformers has no causal language model for {directory / 'config.json'}: {error}"
        ) from error
    if quantized:
        raise ConfigError(
            f"the weights in {directory} are quantized, which can't be trained; take a directory in bf16 or fp32"
        )
    return model


def read_when_needed(model: nn.Module, directory: Path, device: torch.device) -> None:
    """Move a model from the meta device to `device`; its parameters are read from safetensors when they are needed.

    Buffers get their values at once: those of the files, or those that the model's own initialization computes. Parameters that
    are not on the meta device get the files' values if there are any.

    Raises CheckpointError if tensors are missing, unknown or misshapen, ConfigError for a buffer that nothing computes.
    """
    weights = _open(model, directory)
    remedy = "if transformers converts them, load the model by from_pretrained in parallel3d.zero.Init"
    name_of = _names_in_files(model, weights, directory, remedy)
    _move_buffers(model, name_of, device)
    for tensor, name in name_of.items():
        read = partial(weights.elements, name)
        if isinstance(tensor, nn.Parameter) and tensor.is_meta:
            keep_in_file(tensor, read, device)
        else:
            tensor.data.copy_(read(0, tensor.numel()).view(tensor.shape))


def _open(model: nn.Module, directory: Path) -> Weights:
    prefix = getattr(model, "base_model_prefix", "")
    return open_directory(directory, f"{prefix}." if prefix and hasattr(model, prefix) else "")


def _names_in_files(model: nn.Module, weights: Weights, directory: Path, remedy: str) -> dict[Tensor, str]:
    """Return the stored name of each parameter and persistent buffer. Raises CheckpointError if they don't fit each other."""
    shapes = weights.shapes()
    tensors = model.state_dict(keep_vars=True)  # parameters, by all their names, and persistent buffers
    # A file needs to hold but one of a tied parameter's names.
    name_of = {tensor: name for name, tensor in tensors.items() if name in shapes}
    missing = [name for name, tensor in tensors.items() if tensor.is_meta and tensor not in name_of]
    unknown = [name for name in shapes if name not in tensors and not name.endswith(COMPUTED)]
    misshapen = {n: (tuple(t.shape), shapes[n]) for n, t in tensors.items() if shapes.get(n, t.shape) != t.shape}
    if faults := differences(missing, unknown, misshapen):
        raise CheckpointError(f"the tensors of {directory} don't fit {type(model).__name__}; {faults}; {remedy}")
    return name_of


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
