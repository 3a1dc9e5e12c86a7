"""`save_hf`: writes a trained model, from any layout, as a directory that `from_pretrained` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

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
from parallel3d.models.huggingface.wrap import WrappedModel, WrappedPart
from parallel3d.parameters import Slicing, slicing_of, whole_shape
from parallel3d.pipe.module import PipelineModule
from parallel3d.zero.gathered import GatheredParameters


class Trained(Protocol):
    """The part of an engine that an export needs."""

    module: nn.Module

    @property
    def update(self) -> Any:
        """The object whose master_weights() returns the whole masters on the first replica's ranks."""


# A tensor's place in the whole model: index of the layer, name in the layer.
Key = tuple[int, str]


@dataclass(frozen=True)
class Piece:
    """A rank's part of a stored parameter, of shape `shape`; `whole` is the shape of all parts together."""

    stored: Stored
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: torch.dtype
    slicing: Slicing | None


# Writes whole tensors on rank 0, given a piece of each, the tensors, the content of config.json, and the PeftModel if any.
Write = Callable[[Mapping[Key, Piece], Iterable[tuple[Key, Tensor]], Any, Any], None]


def save_hf(
    engine: Trained | PipelineModule,
    directory: str | Path,
    dtype: torch.dtype | None = None,
    masters: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    merge_adapters: bool = False,
) -> None:
    """Write config.json and safetensors of a model of `models`, which from_pretrained and `from_hf` read.

    It also writes generation_config.json, if the model has one. For a PeftModel it writes only the adapters, in PEFT's files,
    which PeftModel.from_pretrained reads.

    Rank 0 writes, and holds the tensors of one file at a time. Collective over all ranks; raises CheckpointError on all.

    - directory: must not exist, or be empty; it appears complete, by one rename.
    - masters: write the values that the optimizer updates, in fp32, instead of the rounded weights of the layers.
    - dtype: dtype to which values are converted; None to keep theirs.
    - max_file_bytes: size of a file, which may hold a single larger tensor.
    - merge_adapters: write the whole model, with the active adapters of a PeftModel merged into its weights.
    """
    module = engine if isinstance(engine, PipelineModule) else engine.module
    if not isinstance(module, PipelineModule):
        raise CheckpointError(
            f"a {type(module).__name__} is no PipelineModule of from_hf's layers; save it by its own save_pretrained"
        )
    place = Path(directory)

    def write(pieces: Mapping[Key, Piece], tensors: Iterable[tuple[Key, Tensor]], config: Any, peft: Any) -> None:
        if peft is None:
            targets: dict[Any, Any] = {key: (piece.stored, piece.dtype) for key, piece in pieces.items()}
            write_weights(place, targets, tensors, config, dtype, max_file_bytes)
            return
        names = {key: piece.stored.sections[0].name for key, piece in pieces.items()}
        named = ((names[key], tensor) for key, tensor in tensors)
        if merge_adapters:
            final = {merged_name(names[key]): piece for key, piece in pieces.items()}
            targets = {name: (all_of(name, *p.whole), p.dtype) for name, p in final.items() if name is not None}
            write_weights(place, targets, merged(peft, named), config, dtype, max_file_bytes)
        else:
            with appearing(place) as hidden:
                save_adapters(peft, hidden, {name: t.to(dtype or t.dtype, copy=True) for name, t in named})

    with module.groups.activity.untimed(Phase.SAVING):
        values: Mapping[nn.Parameter, Tensor] = {}
        if masters and not isinstance(engine, PipelineModule):
            values = engine.update.master_weights()
        module.wait_for_weights(module)
        _save(module, values, write, place, merge_adapters)


def whole_state_dict(module: PipelineModule, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
    """Return all weights (of a PeftModel only the adapters) by Hugging Face's names, on rank 0's host; None on other ranks.

    Collective over all ranks; raises CheckpointError on all.
    """
    state: dict[str, Tensor] = {}

    def hold(pieces: Mapping[Key, Piece], tensors: Iterable[tuple[Key, Tensor]], config: Any, peft: Any) -> None:
        for key, tensor in tensors:
            pieces[key].stored.write(state, tensor)
        for name in list(state) if peft is not None else ():
            state[PREFIX + name] = state.pop(name)

    with module.groups.activity.untimed(Phase.SAVING):
        module.wait_for_weights(module)
        _save(module, {}, hold, trained_only=exclude_frozen_parameters)
    return state if module.groups.rank == 0 else None


def whole_module_state(
    module: nn.Module, groups: ProcessGroups, exclude_frozen_parameters: bool = False
) -> dict[str, Tensor] | None:
    """Return the state_dict of a module that each replica holds, in host memory on rank 0; None elsewhere.

    Weights that live as shards are gathered module by module, and the parts of tensor-parallel ranks put together. Collective.
    """
    pieces: dict[Key, Piece] = {}
    names: dict[Key, str] = {}
    for k, (path, submodule) in enumerate(module.named_modules()):
        own: dict[str, Tensor] = {}
        submodule._save_to_state_dict(own, "", keep_vars=True)
        for name, tensor in own.items():
            if not (exclude_frozen_parameters and _is_frozen(tensor)):
                names[k, name] = f"{path}.{name}" if path else name
                pieces[k, name] = _piece(all_of(names[k, name]), tensor, tensor.dtype)
    holders = _holders(all_gather_object(pieces if groups.coordinate("data") == 0 else {}, groups.control))
    with _Values(dict(enumerate(module.modules())), {}, recurse=False) as values:
        state = {names[key]: tensor for key, tensor in _whole_tensors(holders, values, groups)}
    return state if groups.rank == 0 else None


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _save(
    module: PipelineModule,
    masters: Mapping[nn.Parameter, Tensor],
    write: Write,
    place: Path | None = None,
    merge: bool = False,
    trained_only: bool = False,
) -> None:
    """Gather the pieces of all ranks on rank 0, which writes them, at an empty place if one is given.

    masters: written instead of their parameters. merge: adapters are to be merged.
    """
    groups = module.groups
    layers = {int(place): layer for place, layer in module.layers.items() if next(layer.parameters(), None) is not None}
    whole = next((part.whole for part in module.layers.values() if isinstance(part, WrappedPart)), None)
    peft = None if whole is None else whole.peft
    pieces: dict[Key, Piece] = {}
    config = error = None
    try:
        if groups.rank == 0 and place is not None and (problem := check_empty(place)):
            raise CheckpointError(problem)
        if merge and peft is None and layers:
            raise CheckpointError("merge_adapters is True, but the model has no adapters; leave it out")
        pieces, config = _own_pieces(layers, whole, masters, merge, trained_only)
    except Exception as raised:
        error = message_of(raised)
    everyone = all_gather_object((pieces if groups.coordinate("data") == 0 else {}, config, error), groups.control)
    _raise_first([error for _, _, error in everyone])
    holders = _holders([pieces for pieces, _, _ in everyone])
    with _Values(layers, masters) as values:
        tensors = _whole_tensors(holders, values, groups)
        try:
            if groups.rank == 0:
                config = next(config for _, config, _ in everyone if config)
                write({key: next(iter(held.values())) for key, held in holders.items()}, tensors, config, peft)
        except Exception as raised:
            error = message_of(raised)
        for _ in tensors:  # sends; on rank 0, after an error, receives what the other ranks still send
            pass
    _raise_first(all_gather_object(error, groups.control))


def _own_pieces(
    layers: Mapping[int, nn.Module],
    whole: WrappedModel | None,
    masters: Mapping[nn.Parameter, Tensor],
    merge: bool,
    trained_only: bool,
) -> tuple[dict[Key, Piece], Mapping[str, Any] | None]:
    """Return the pieces in these layers, and the content of config.json if there are layers. Raises CheckpointError."""
    pieces: dict[Key, Piece] = {}
    peft = None if whole is None else whole.peft
    config = None if whole is None or peft is None else whole.config_json()
    for place, layer in layers.items():
        if not isinstance(layer, HuggingFaceLayer):
            raise CheckpointError(
                f"layer {place}, a {type(layer).__name__}, is none of from_hf's or decoder's: Hugging Face has no name for its "
                "weights"
            )
        config = config or layer.config_json()
        for name, stored in layer.stored().items():
            tensor = attrgetter(name)(layer)
            is_left_out = peft is not None and not merge and not is_saved(peft, name, tensor)
            if is_left_out or (trained_only and _is_frozen(tensor)):
                continue
            pieces[place, name] = _piece(stored, tensor, masters.get(tensor, tensor).dtype)
    return pieces, config


def _piece(stored: Stored, tensor: Tensor, dtype: torch.dtype) -> Piece:
    return Piece(stored, tuple(tensor.shape), whole_shape(tensor), dtype, slicing_of(tensor))


class _Values:
    """Values of a rank's pieces. Weights that live as shards are gathered, one layer at a time.

    masters: used instead of their parameters. recurse: whether a layer includes the parameters of modules inside it.
    Collective over the replicas, which ask for the same keys.
    """

    def __init__(self, layers: Mapping[int, nn.Module], masters: Mapping[nn.Parameter, Tensor], recurse: bool = True):
        self._layers, self._masters, self._recurse = layers, masters, recurse
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
            self._gathered.enter_context(GatheredParameters(self._layers[place].parameters(self._recurse)))
            self._place = place
        tensor = attrgetter(name)(self._layers[place])
        return self._masters.get(tensor, tensor).detach()


def _raise_first(errors: Sequence[str | None]) -> None:
    """Raise the first rank's error, on all ranks."""
    if found := next(filter(None, errors), None):
        raise CheckpointError(found)


def _holders(everyone: Sequence[Mapping[Key, Piece]]) -> dict[Key, dict[int, Piece]]:
    """Return which ranks hold a piece of each tensor, in the order of the layers; a tied tensor at its first place only."""
    holders: dict[Key, dict[int, Piece]] = {}
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


def _whole_tensors(
    holders: Mapping[Key, Mapping[int, Piece]], own: _Values, groups: ProcessGroups
) -> Iterator[tuple[Key, Tensor]]:
    """Yield all tensors on rank 0; other ranks send their pieces, and yield nothing."""
    for key, held in holders.items():
        if groups.rank == 0:
            yield key, _whole(held, partial(own.of, key), groups)
        # Weights that live as shards are gathered by all replicas of the rank that holds them.
        elif groups.data.ranks[0] in held:
            value = own.of(key)
            if groups.rank in held:
                send_bytes(value, 0, groups.control)
