"""`save_hf`: writes a trained model, from any layout, as a directory that `from_pretrained` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from parallel3d.activity import Phase
from parallel3d.checkpoint.export import (
    MAX_FILE_BYTES,
    HuggingFaceLayer,
    Stored,
    all_of,
    appearing,
    check_empty,
    write_weights,
)
from parallel3d.comm.collectives import all_gather_object, receive_bytes, send_bytes
from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import CheckpointError, message_of
from parallel3d.models.huggingface.adapters import PREFIX, is_saved, merged, merged_name, save_adapters
from parallel3d.models.huggingface.wrap import WrappedPart
from parallel3d.parameters import Slicing, slicing_of, whole_shape
from parallel3d.pipe.module import PipelineModule
from parallel3d.zero.weights import GatheredParameters


class Trained(Protocol):
    """The part of an engine that an export needs."""

    module: nn.Module

    @property
    def update(self) -> Any:
        """The object whose master_weights() returns the whole masters on the first replica's ranks."""


# A parameter's place in the whole model: index of the layer, name in the layer.
Key = tuple[int, str]
K = TypeVar("K", Key, str)


@dataclass(frozen=True)
class Piece:
    """A rank's part of a stored parameter, of shape `shape`; `whole` is the shape of all parts together."""

    stored: Stored
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    slicing: Slicing | None


def save_hf(
    engine: Trained | PipelineModule,
    directory: str | Path,
    dtype: torch.dtype | None = None,
    masters: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    merge_adapters: bool = False,
) -> None:
    """Write config.json and safetensors of a model of `models`, which from_pretrained and `from_hf` read.

    Of a PeftModel it writes the adapters alone, in PEFT's files, which PeftModel.from_pretrained reads.

    Rank 0 writes, and holds the tensors of one file at a time. Collective over all ranks; raises CheckpointError on all.

    - directory: must not exist, or be empty; it appears complete, by one rename.
    - masters: write the values that the optimizer updates, in fp32, instead of the rounded weights of the layers.
    - dtype: to which values are converted.
    - max_file_bytes: size of a file, which may hold a single larger tensor.
    - merge_adapters: write the whole model, in whose weights the active adapters of a PeftModel are merged.
    """
    module = engine if isinstance(engine, PipelineModule) else engine.module
    if not isinstance(module, PipelineModule):
        raise CheckpointError(
            f"a {type(module).__name__} is no PipelineModule of from_hf's layers; save it by its own save_pretrained"
        )
    with module.groups.activity.untimed(Phase.SAVING):
        values: Mapping[nn.Parameter, Tensor] = {}
        if masters and not isinstance(engine, PipelineModule):
            values = engine.update.master_weights()
        module.wait_for_weights(module)
        _save(module, values, _Directory(Path(directory), dtype, max_file_bytes, merge_adapters))


def whole_state_dict(module: PipelineModule, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
    """Return all weights by Hugging Face's names, of a PeftModel the adapters alone, in host memory on rank 0; None elsewhere.

    Collective over all ranks; raises CheckpointError on all.
    """
    output = _StateDict({}, exclude_frozen_parameters)
    with module.groups.activity.untimed(Phase.SAVING):
        module.wait_for_weights(module)
        _save(module, {}, output)
    return output.state if module.groups.rank == 0 else None


def whole_module_state(
    module: nn.Module, groups: ProcessGroups, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor] | None:
    """Return the state_dict of a module that each replica holds, in host memory on rank 0; None elsewhere.

    Weights that live as shards are gathered module by module, and the parts of tensor-parallel ranks put together. Collective.
    """
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    modules: list[tuple[nn.Module, dict[str, Tensor]]] = []
    pieces: dict[str, Piece] = {}
    for path, submodule in module.named_modules():
        own: dict[str, Tensor] = {}
        submodule._save_to_state_dict(own, f"{path}." if path else "", keep_vars=True)
        own = {name: tensor for name, tensor in own.items() if not (exclude_frozen_parameters and name in frozen)}
        modules.append((submodule, own))
        pieces |= {name: _piece(all_of(name), tensor, tensor.dtype) for name, tensor in own.items()}
    holders = _holders(all_gather_object(pieces if groups.coordinate("data") == 0 else {}, groups.control))
    state: dict[str, Tensor] = {}
    for submodule, own in modules:
        with GatheredParameters(submodule.parameters(recurse=False)):
            for name, tensor in own.items():
                if groups.rank == 0:
                    state[name] = _whole(holders[name], tensor.detach, groups)
                elif groups.rank in holders[name]:
                    send_bytes(tensor.detach(), 0, groups.control)
    return state if groups.rank == 0 else None


@dataclass(frozen=True)
class _StateDict:
    """A state_dict as the output of an export."""

    state: dict[str, Tensor]
    trained_only: bool
    directory: None = None
    merge: bool = False

    def write(
        self, pieces: Mapping[Key, Piece], tensors: Iterable[tuple[Key, Tensor]], config: Mapping[str, Any], peft: Any
    ) -> None:
        """Hold copies of whole tensors."""
        for key, tensor in tensors:
            pieces[key].stored.write(self.state, tensor)
        for name in list(self.state) if peft is not None else ():
            self.state[PREFIX + name] = self.state.pop(name)


@dataclass(frozen=True)
class _Directory:
    """Form and place of an export; the fields are arguments of save_hf."""

    directory: Path
    dtype: torch.dtype | None
    max_file_bytes: int
    merge: bool
    trained_only: bool = False

    def write(
        self, pieces: Mapping[Key, Piece], tensors: Iterable[tuple[Key, Tensor]], config: Mapping[str, Any], peft: Any
    ) -> None:
        """Write whole tensors, or the adapters or merged weights that they make up. pieces: one of each tensor."""
        if peft is None:
            targets: dict[Any, Any] = {key: (piece.stored, piece.dtype) for key, piece in pieces.items()}
            write_weights(self.directory, targets, tensors, config, self.dtype, self.max_file_bytes)
            return
        names = {key: piece.stored.sections[0].name for key, piece in pieces.items()}
        named = ((names[key], tensor) for key, tensor in tensors)
        if self.merge:
            final = {merged_name(names[key]): piece for key, piece in pieces.items()}
            targets = {name: (all_of(name, *p.whole), p.dtype) for name, p in final.items() if name is not None}
            write_weights(self.directory, targets, merged(peft, named), config, self.dtype, self.max_file_bytes)
        else:
            with appearing(self.directory) as hidden:
                save_adapters(peft, hidden, {name: t.to(self.dtype or t.dtype, copy=True) for name, t in named})


def _save(module: PipelineModule, masters: Mapping[nn.Parameter, Tensor], output: _Directory | _StateDict) -> None:
    """Gather the pieces of all ranks on rank 0, which writes them. masters: written instead of their parameters."""
    groups = module.groups
    layers = {int(place): layer for place, layer in module.layers.items() if next(layer.parameters(), None) is not None}
    peft: Any = next((part.whole.peft for part in module.layers.values() if isinstance(part, WrappedPart)), None)
    pieces: dict[Key, Piece] = {}
    config = error = None
    try:
        if groups.rank == 0 and output.directory is not None and (problem := check_empty(output.directory)):
            raise CheckpointError(problem)
        if output.merge and peft is None and layers:
            raise CheckpointError("merge_adapters is True, but the model has no adapters; leave it out")
        pieces, config = _own_pieces(layers, peft, masters, output)
    except Exception as raised:
        error = message_of(raised)
    everyone = all_gather_object((pieces if groups.coordinate("data") == 0 else {}, config, error), groups.control)
    _raise_first([error for _, _, error in everyone])
    holders = _holders([pieces for pieces, _, _ in everyone])
    with _Values(layers, masters) as values:
        if groups.rank == 0:
            config = next(config for _, config, _ in everyone if config)
            error = _write(holders, values, groups, output, config, peft)
        else:
            for key, held in holders.items():
                # Weights that live as shards are gathered by all replicas of the rank that holds them.
                if groups.data.ranks[0] in held:
                    value = values.of(key)
                    if groups.rank in held:
                        send_bytes(value, 0, groups.control)
    _raise_first(all_gather_object(error, groups.control))


def _own_pieces(
    layers: Mapping[int, nn.Module], peft: Any, masters: Mapping[nn.Parameter, Tensor], output: _Directory | _StateDict
) -> tuple[dict[Key, Piece], Mapping[str, Any] | None]:
    """Return the pieces in these layers, and the content of config.json if there are layers. Raises CheckpointError."""
    pieces: dict[Key, Piece] = {}
    config = None if peft is None else peft.config.to_dict()
    for place, layer in layers.items():
        if not isinstance(layer, HuggingFaceLayer):
            raise CheckpointError(
                f"layer {place}, a {type(layer).__name__}, is none of from_hf's or decoder's: Hugging Face has no name for its "
                "weights"
            )
        config = config or layer.config_json()
        for name, stored in layer.stored().items():
            tensor = attrgetter(name)(layer)
            if output.trained_only and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
                continue
            if peft is not None and not output.merge and not is_saved(peft, name, tensor):
                continue
            pieces[place, name] = _piece(stored, tensor, masters.get(tensor, tensor).dtype)
    return pieces, config


def _piece(stored: Stored, tensor: Tensor, dtype: torch.dtype) -> Piece:
    return Piece(stored, tuple(tensor.shape), whole_shape(tensor), dtype, slicing_of(tensor))


class _Values:
    """The values of a rank's pieces, in whole layers: weights that live as shards are gathered, one layer at a time.

    masters: taken instead of their parameters. Collective over the replicas, which ask for the same keys.
    """

    def __init__(self, layers: Mapping[int, nn.Module], masters: Mapping[nn.Parameter, Tensor]):
        self._layers, self._masters = layers, masters
        self._gathered, self._place = ExitStack(), -1

    def __enter__(self) -> _Values:
        return self

    def __exit__(self, *_: object) -> None:
        self._gathered.close()

    def of(self, key: Key) -> Tensor:
        """Return the value of a piece; it is valid until that of another layer is asked for."""
        place, name = key
        if place != self._place:
            self._gathered.close()
            self._gathered.enter_context(GatheredParameters(self._layers[place].parameters()))
            self._place = place
        tensor = attrgetter(name)(self._layers[place])
        return self._masters.get(tensor, tensor).detach()


def _raise_first(errors: Sequence[str | None]) -> None:
    """Raise the first rank's error, on all ranks."""
    if found := next(filter(None, errors), None):
        raise CheckpointError(found)


def _holders(everyone: Sequence[Mapping[K, Piece]]) -> dict[K, dict[int, Piece]]:
    """Return which ranks hold a piece of each tensor, in the order of the layers; a tied tensor at its first place only."""
    holders: dict[K, dict[int, Piece]] = {}
    written: set[Stored] = set()
    for key in sorted({key for pieces in everyone for key in pieces}):
        held: dict[int, Piece] = {}
        for rank, pieces in enumerate(everyone):
            # If several ranks hold the same piece, the first is enough.
            if key in pieces and all(pieces[key].slicing != piece.slicing for piece in held.values()):
                held[rank] = pieces[key]
        stored = next(iter(held.values())).stored
        if stored not in written:
            written.add(stored)
            holders[key] = held
    return holders


def _whole(held: Mapping[int, Piece], own: Callable[[], Tensor], groups: ProcessGroups) -> Tensor:
    """Return a whole tensor, on the host of rank 0, to which the other ranks that hold a piece send theirs.

    own: returns the piece of rank 0, if it holds one.
    """
    first = next(iter(held.values()))
    whole = torch.empty(first.whole, dtype=first.dtype, device="cpu")
    for rank, piece in held.items():
        value = own() if rank == groups.rank else receive_bytes(piece.shape, piece.dtype, rank, groups.control)
        if piece.slicing is None:
            whole.copy_(value)
        else:
            piece.slicing.write(whole, value)
    return whole


def _write(
    holders: Mapping[Key, Mapping[int, Piece]],
    own: _Values,
    groups: ProcessGroups,
    output: _Directory | _StateDict,
    config: Mapping[str, Any],
    peft: Any,
) -> str | None:
    """Write all tensors on rank 0, and return the error, if any, once all pieces of other ranks have been received."""
    tensors = ((key, _whole(held, partial(own.of, key), groups)) for key, held in holders.items())
    error = None
    try:
        output.write({key: next(iter(held.values())) for key, held in holders.items()}, tensors, config, peft)
    except Exception as raised:
        error = message_of(raised)
    for _ in tensors:  # receives what the other ranks still send
        pass
    return error
