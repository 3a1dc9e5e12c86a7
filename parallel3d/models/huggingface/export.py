"""`save_hf`: what `from_pretrained` reads, from any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from parallel3d.activity import Phase
from parallel3d.checkpoint.export import MAX_FILE_BYTES, LayerNames, Stored, check_empty, write_weights
from parallel3d.comm.collectives import all_gather_object, receive_bytes, send_bytes
from parallel3d.comm.groups import ProcessGroups
from parallel3d.errors import CheckpointError
from parallel3d.models.huggingface.wrap import WrappedPart
from parallel3d.models.layers import DecoderLayer
from parallel3d.parameters import Slicing, slicing_of, whole_shape
from parallel3d.pipe.module import PipelineModule


class Update(Protocol):
    """The part of an engine that holds the masters."""

    def master_weights(self) -> Mapping[nn.Parameter, Tensor]:
        """Return the whole masters, on the host of the first replica's ranks. Collective."""


class Trained(Protocol):
    """An engine, as an export needs it."""

    module: nn.Module

    @property
    def update(self) -> Update:
        """The part that holds the masters."""


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
) -> None:
    """Write config.json and safetensors, which transformers' from_pretrained and `from_hf` read, of a model of `models`.

    directory: must not exist, or be empty; it appears whole, by one rename. masters: the values that the optimizer updates,
    in fp32, instead of the weights rounded to what the layers compute with. dtype: what the values are converted to. Files
    hold up to max_file_bytes, or one tensor. Rank 0 writes, holding one file's tensors at a time. Collective over all
    ranks; raises CheckpointError on all.
    """
    module = engine if isinstance(engine, PipelineModule) else engine.module
    if not isinstance(module, PipelineModule):
        raise CheckpointError(
            f"a {type(module).__name__} is no PipelineModule of from_hf's layers; save it by its own save_pretrained"
        )
    with module.groups.activity.untimed(Phase.SAVING):
        _save(engine, module, Path(directory), dtype, masters, max_file_bytes)


def _save(
    engine: Trained | PipelineModule,
    module: PipelineModule,
    directory: Path,
    dtype: torch.dtype | None,
    masters: bool,
    max_file_bytes: int,
) -> None:
    values: Mapping[nn.Parameter, Tensor] = {}
    if masters and not isinstance(engine, PipelineModule):
        values = engine.update.master_weights()
    module.wait_for_weights(module)
    own = _own_pieces(module, values) if module.groups.coordinate("data") == 0 else _Own()
    if module.groups.rank == 0:
        own.error = own.error or check_empty(directory)
    everyone = all_gather_object((own.pieces, own.config, own.error), module.groups.control)
    _raise_first([error for _, _, error in everyone])
    config = next(config for _, config, _ in everyone if config)
    plan = _Plan([pieces for pieces, _, _ in everyone])
    error = None
    if module.groups.rank == 0:
        error = _write(plan, _Gathering(own.values, module.groups), directory, config, dtype, max_file_bytes)
    else:
        for key, held in plan.tensors.items():
            if module.groups.rank in held:
                send_bytes(own.values[key], 0, module.groups.control)
    _raise_first(all_gather_object(error, module.groups.control))


def _raise_first(errors: Sequence[str | None]) -> None:
    """On all ranks, what one of them has met."""
    found = next((error for error in errors if error is not None), None)
    if found is not None:
        raise CheckpointError(found)


# A parameter's place in the whole model: layer and name.
Key = tuple[int, str]


@dataclass
class _Own:
    """A rank's contribution, or why it has none."""

    pieces: dict[Key, Piece] = field(default_factory=dict)
    values: dict[Key, Tensor] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    error: str | None = None


def _own_pieces(module: PipelineModule, values: Mapping[nn.Parameter, Tensor]) -> _Own:
    """values: of the parameters that are not to be written as they are."""
    own = _Own()
    for place, layer in module.layers.items():
        if isinstance(layer, (DecoderLayer, WrappedPart)):
            own.config = layer.config_json()
        elif next(layer.parameters(), None) is not None:
            kind = type(layer).__name__
            own.error = (
                f"layer {place}, a {kind}, is none of from_hf's or decoder's: Hugging Face has no name for its weights"
            )
            return own
        else:
            continue
        names: LayerNames = layer.stored()
        for name, parameter in layer.named_parameters():
            value = values.get(parameter, parameter)
            piece = Piece(names[name], tuple(value.shape), whole_shape(parameter), value.dtype, slicing_of(parameter))
            own.pieces[int(place), name], own.values[int(place), name] = piece, value
    return own


class _Plan:
    """Which ranks hold a piece of each tensor, in the order of the layers; of a tied one, of its first place."""

    def __init__(self, everyone: Sequence[Mapping[Key, Piece]]):
        self.tensors: dict[Key, dict[int, Piece]] = {}
        written: dict[Stored, Key] = {}
        for key in sorted({key for pieces in everyone for key in pieces}):
            held: dict[int, Piece] = {}
            for rank, pieces in enumerate(everyone):
                # Of ranks that hold the same, the first is enough.
                if key in pieces and all(pieces[key].slicing != piece.slicing for piece in held.values()):
                    held[rank] = pieces[key]
            if written.setdefault(next(iter(held.values())).stored, key) == key:
                self.tensors[key] = held

    def pieces(self) -> dict[Key, Piece]:
        """One of each tensor."""
        return {key: next(iter(held.values())) for key, held in self.tensors.items()}


class _Gathering:
    """Rank 0's side: whole tensors, from the ranks that hold their pieces."""

    def __init__(self, own: Mapping[Key, Tensor], groups: ProcessGroups):
        self._own, self._groups = own, groups

    def whole(self, key: Key, held: Mapping[int, Piece]) -> Tensor:
        """One tensor, on the host. The other ranks send in the plan's order."""
        first = next(iter(held.values()))
        whole = torch.empty(first.whole, dtype=first.dtype, device="cpu")
        for rank, piece in held.items():
            if rank == self._groups.rank:
                value = self._own[key].detach()
            else:
                value = receive_bytes(piece.shape, piece.dtype, rank, self._groups.control)
            if piece.slicing is None:
                return value.cpu()
            piece.slicing.write(whole, value)
        return whole


def _write(
    plan: _Plan,
    gathering: _Gathering,
    directory: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> str | None:
    """Write all on rank 0; returns what went wrong, once all other ranks have been received from."""
    tensors = ((key, gathering.whole(key, held)) for key, held in plan.tensors.items())
    error = None
    try:
        targets = {key: (piece.stored, piece.dtype) for key, piece in plan.pieces().items()}
        write_weights(directory, targets, tensors, config, dtype, max_file_bytes)
    except CheckpointError as raised:
        error = str(raised)
    for _ in tensors:  # what the other ranks still send
        pass
    return error
