"""Names of a decoder's parameters in a Hugging Face checkpoint, and its weights, of which each rank reads only its part.

Also models of transformers on the meta device, whose parts read weights from a directory.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Container, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ValidationError
from torch import Tensor, nn

from parallel3d.checkpoint.export import INDEX, SINGLE, LayerNames, Section, Stored
from parallel3d.checkpoint.read import differences, open_safetensors
from parallel3d.config.files import explain, parse_json, read_mapping
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.models.config import DecoderConfig
from parallel3d.parameters import Slicing, slicing_of, whole_shape
from parallel3d.zero.weights import keep_in_file

# Module of a decoder -> its name in checkpoints with rotary positions, and in GPT-2's. {0} is the block's index.
# A module with two names is their concatenation; one without a name isn't there.
_MODULES: dict[str, tuple[str, str]] = {
    "tokens": ("model.embed_tokens", "transformer.wte"),
    "positions": ("", "transformer.wpe"),
    "attention_norm": ("model.layers.{0}.input_layernorm", "transformer.h.{0}.ln_1"),
    "query": ("model.layers.{0}.self_attn.q_proj", "transformer.h.{0}.attn.c_attn"),
    "key": ("model.layers.{0}.self_attn.k_proj", "transformer.h.{0}.attn.c_attn"),
    "value": ("model.layers.{0}.self_attn.v_proj", "transformer.h.{0}.attn.c_attn"),
    "mixing.query_norm": ("model.layers.{0}.self_attn.q_norm", ""),
    "mixing.key_norm": ("model.layers.{0}.self_attn.k_norm", ""),
    "attention_out": ("model.layers.{0}.self_attn.o_proj", "transformer.h.{0}.attn.c_proj"),
    "mlp_norm": ("model.layers.{0}.post_attention_layernorm", "transformer.h.{0}.ln_2"),
    "up": ("model.layers.{0}.mlp.gate_proj model.layers.{0}.mlp.up_proj", "transformer.h.{0}.mlp.c_fc"),
    "down": ("model.layers.{0}.mlp.down_proj", "transformer.h.{0}.mlp.c_proj"),
    "norm": ("model.norm", "transformer.ln_f"),
    "logits": ("lm_head", "lm_head"),
}
# GPT-2 stores these one after the other in one tensor.
_FUSED = ("query", "key", "value")
# Matrices that GPT-2 stores as the parameters are; it transposes all others.
_LOOKED_UP = ("tokens", "positions", "logits")


def stored_as(config: DecoderConfig, block: int, name: str, parameter: Tensor) -> Stored:
    """Return how a decoder's parameter, whole or sharded, is stored. A tied head is stored as the embedding.

    block: index of its block; name: in its layer.
    """
    module, _, kind = name.rpartition(".")
    is_gpt2, shape = config.rope is None, whole_shape(parameter)
    theirs = names_of("tokens" if module == "logits" and config.tied else module, is_gpt2, block)
    rows = shape[0] // len(theirs)
    start, of = (_FUSED.index(module) * rows, 3 * rows) if is_gpt2 and module in _FUSED else (0, None)
    sections = tuple(Section(f"{their}.{kind}", rows, start, of) for their in theirs)
    return Stored(sections, shape[1:], is_gpt2 and len(shape) == 2 and module not in _LOOKED_UP)


def names_of(module: str, is_gpt2: bool, block: int = 0) -> list[str]:
    """Return the names under which a decoder's module is stored."""
    return _MODULES[module][is_gpt2].format(block).split()


HEAD = "lm_head.weight"
# Buffers in old checkpoints, which are computed.
COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


_COMPARED_ROWS = 4096


class Weights:
    """Named tensors, each a torch tensor or a safetensors slice, which is read from its file when it is asked for."""

    def __init__(self, tensors: Mapping[str, Any]):
        self._tensors = dict(tensors)
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""
        return {name: self._shape(name) for name in self._tensors}

    def _shape(self, name: str) -> tuple[int, ...]:
        tensor = self._tensors[name]
        return tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())

    def is_frozen(self, stored: Stored) -> bool:
        """Return whether a weight is made of parameters that require no gradient. Raises ConfigError if only a part is."""
        given = {section.name: self._tensors.get(section.name) for section in stored.sections}
        frozen = {isinstance(tensor, nn.Parameter) and not tensor.requires_grad for tensor in given.values()}
        if len(frozen) > 1:
            raise ConfigError(f"{' and '.join(given)} are one weight here; let both require a gradient, or none")
        return True in frozen

    def alias(self, name: str, other: str) -> None:
        """Give the tensor `other` the second name `name`, unless that name is taken or there is no tensor `other`."""
        if other in self._tensors:
            self._tensors.setdefault(name, self._tensors[other])

    def put(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, or replace that of this name."""
        self._tensors[name] = tensor

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a tensor along dim; nothing else is read from a file."""
        part: Tensor = self._tensors[name][(slice(None),) * dim + (slice(start, stop),)]
        return part.detach()

    def are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same values; those of files are read a few rows at a time."""
        if self._tensors[name] is self._tensors[other]:
            return True
        rows, steps = self._shape(name)[0], range(0, self._shape(name)[0], _COMPARED_ROWS)
        parts = ((self.read(key, 0, k, min(k + _COMPARED_ROWS, rows)) for key in (name, other)) for k in steps)
        return self._shape(name) == self._shape(other) and all(bool((a == b).all()) for a, b in parts)

    def scratch(self, like: Tensor) -> Tensor:
        """Return memory on the CPU for values like these, the same in each call: new buffers would leave holes in the heap."""
        if self._scratch.numel() < like.nbytes:
            self._scratch = torch.empty(like.nbytes, dtype=torch.uint8)
        return self._scratch[: like.nbytes].view(like.dtype).view(like.shape)

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a flattened tensor; of a file only the rows with these are read."""
        if start >= stop:
            return torch.empty(0)
        tensor, shape = self._tensors[name], self._shape(name)
        row = math.prod(shape[1:])
        first = start // row
        rows: Tensor = tensor[first : -(-stop // row)] if shape else tensor[...]
        return rows.reshape(-1)[start - first * row : stop - first * row]


def _plain(name: str) -> str:
    if not name.isprintable() or Path(name).name != name or len(os.fsencode(name)) > 255:
        raise ValueError(f"{name!r} is not the name of a file in the directory")
    return name


class _Index(BaseModel):
    """The index of several files. weight_map: tensor -> name of its file."""

    weight_map: dict[str, Annotated[str, AfterValidator(_plain)]]


def open_directory(directory: Path, base: str) -> Weights:
    """Return the weights in a directory, which holds one file, or several with an index.

    base: prefix of the names that a checkpoint of the model without its head leaves out, such as "transformer.".
    Raises CheckpointError if there are no weights.
    """
    tensors: dict[str, Any] = {}
    for path in _files_of(directory):
        file = open_safetensors(path)
        tensors |= {name: file.get_slice(name) for name in list(file.keys())}
    if not any(name.startswith(base) for name in tensors):
        tensors = {name if name == HEAD else base + name: tensor for name, tensor in tensors.items()}
    return Weights(tensors)


def _files_of(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        try:
            index = _Index.model_validate(read_mapping(directory / INDEX, parse_json))
        except ConfigError as error:
            raise CheckpointError(str(error)) from None
        except ValidationError as error:
            raise CheckpointError(f"{directory / INDEX} is not an index of weights: {explain(error)}") from None
        files = sorted({directory / file for file in index.weight_map.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{directory / INDEX} names files that are not there: {', '.join(missing)}{download_of(directory)}"
            )
        return files
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    others = sorted(p.name for p in directory.glob("*.bin")) if directory.is_dir() else []
    hint = f"; {others[0]} is a pickle: save it again with transformers' save_pretrained" if others else ""
    raise CheckpointError(f"{directory} has no {SINGLE} and no {INDEX}{hint or download_of(directory)}")


def download_of(directory: Path) -> str:
    """Return the remedy for what is missing in a directory of the hub's local cache; of any other directory, nothing."""
    model = re.search("/models--([^/]+)/snapshots/", directory.as_posix())
    return f"; download it: hf download {model[1].replace('--', '/', 1)}" if model else ""


def check_weights(weights: Weights, wanted: Iterable[Stored], config: DecoderConfig, where: str) -> None:
    """Raise CheckpointError, naming all faults, unless the weights have the wanted names and shapes.

    A tied head whose values are not the embedding's is an error, too.
    """
    shapes = weights.shapes()
    expected = {name: shape for stored in wanted for name, shape in stored.shapes.items()}
    # Hugging Face's files may or may not contain a tied head's weight.
    extra = [n for n in shapes if n not in expected and not n.endswith(COMPUTED)]
    unknown = [n for n in extra if not (config.tied and n == HEAD)]
    misshapen = {name: (s, shapes[name]) for name, s in expected.items() if shapes.get(name, s) != s}
    if faults := differences(set(expected) - set(shapes), unknown, misshapen):
        raise CheckpointError(f"the tensors of {where} don't fit its config.json; {faults}")
    embedding = f"{names_of('tokens', config.rope is None)[0]}.weight"
    if config.tied and HEAD in shapes and not weights.are_equal(HEAD, embedding):
        raise CheckpointError(
            f"{where} ties {HEAD} to {embedding}, but they have different values; give tied=False to train both, as "
            "transformers does, or remove the one that is not the model's"
        )


@torch.no_grad()
def load_layer(module: nn.Module, names: LayerNames, weights: Weights) -> None:
    """Fill a layer's parameters, whole or sharded, in their dtype."""
    for name, parameter in module.named_parameters():
        _read_into(parameter, slicing_of(parameter), names[name], weights)


def load_layer_later(module: nn.Module, names: LayerNames, weights: Weights, device: torch.device) -> None:
    """Move a layer from the meta device to `device`; its parameters, whole or sharded, are read when they are needed."""
    for name, parameter in module.named_parameters():
        # Values are read in the parameter's dtype, on the CPU.
        like = torch.empty_like(parameter, device="meta")
        keep_in_file(parameter, partial(_read, like, slicing_of(parameter), names[name], weights), device)


def _read(like: Tensor, slicing: Slicing | None, stored: Stored, weights: Weights, start: int, stop: int) -> Tensor:
    """Return elements of a parameter like `like`, flat. Of one that is not sliced, only the rows with these are read."""
    if start >= stop:
        return torch.empty(0)
    if slicing is not None:
        values = weights.scratch(like)
        _read_into(values, slicing, stored, weights)
        return values.view(-1)[start:stop]
    row = like[0].numel()
    first, last = start // row, -(-stop // row)
    values = weights.scratch(like[first:last])
    _read_range(values, stored, 0, first, last, weights)
    return values.view(-1)[start - first * row : stop - first * row]


def _read_into(target: Tensor, slicing: Slicing | None, stored: Stored, weights: Weights) -> None:
    dim, ranges = (0, ((0, target.shape[0]),)) if slicing is None else (slicing.dim, slicing.ranges)
    parts = target.split([stop - start for start, stop in ranges], dim)
    for part, (start, stop) in zip(parts, ranges, strict=True):
        _read_range(part, stored, dim, start, stop, weights)


def _read_range(target: Tensor, stored: Stored, dim: int, start: int, stop: int, weights: Weights) -> None:
    """Fill target with elements start to stop, along dim, of the parameter."""
    begin = 0
    for section in stored.sections:
        if dim == 0:
            low, high = max(start, begin) - begin, min(stop, begin + section.size) - begin
            here = target.narrow(0, begin + low - start, high - low) if low < high else None
            low, high = low + section.start, high + section.start
        else:
            # A range of columns of all the section's rows. If the section is only a part of the rows, they are cut afterwards.
            low, high, here = start, stop, target.narrow(0, begin, section.size)
        if here is not None:
            read = weights.read(section.name, 1 - dim if stored.transposed else dim, low, high)
            here.copy_((read.t() if stored.transposed else read) if dim == 0 else stored.rows_of(read, section))
        begin += section.size


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
    # The files need to hold only one of a tied parameter's names.
    name_of = {tensor: name for name, tensor in tensors.items() if name in shapes}
    missing = [name for name, tensor in tensors.items() if tensor.is_meta and tensor not in name_of]
    unknown = [name for name in shapes if name not in tensors and not name.endswith(COMPUTED)]
    misshapen = {n: (tuple(t.shape), shapes[n]) for n, t in tensors.items() if shapes.get(n, t.shape) != t.shape}
    if faults := differences(missing, unknown, misshapen):
        raise CheckpointError(f"the tensors of {directory} don't fit {type(model).__name__}; {faults}; {remedy}")
    differing = [n for n, t in tensors.items() if n in shapes and not weights.are_equal(n, name_of[t])]
    if differing:  # transformers does not tie them
        raise CheckpointError(
            f"{type(model).__name__} ties {differing[0]} to other weights of {directory}, which have different values; {remedy}"
        )
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
