"""A rank's files: its boxes, on the disk when this returns, with their checksums."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from parallel3d.checkpoint.directory import sync
from parallel3d.checkpoint.format import StoredBox, StoredFile, StoredTensor
from parallel3d.checkpoint.parts import Part
from parallel3d.errors import CheckpointError

# So much is on its way from the device to a file at once.
_FILE_BYTES = 2 << 30


def to_host(parts: Sequence[Part], copied: bool) -> list[Part]:
    """The parts with values in host memory; copied: in memory of their own, which training doesn't touch.

    From CUDA into pinned memory, all at once; when this returns, the values are there.
    """
    device = next((part.values.device for part in parts if part.values.is_cuda), None)
    moved = []
    for part in parts:
        values = part.values
        if copied or values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=values.is_cuda)
            values = host.copy_(values, non_blocking=True)
        moved.append(Part(part.name, part.shape, part.box, values))
    if device is not None:
        torch.cuda.synchronize(device)
    return moved


def write_parts(
    directory: Path, rank: int, parts: Sequence[Part], may_thread: bool
) -> tuple[dict[str, StoredFile], dict[str, StoredTensor]]:
    """Write a rank's parts; returns its files and what is in them. Raises CheckpointError that names the file.

    may_thread: whether another thread may take the checksums meanwhile; while the interpreter ends, none can be started.
    """
    files: dict[str, StoredFile] = {}
    tensors: dict[str, StoredTensor] = {}
    for number, own in enumerate(_portions(parts)):
        path = directory / f"rank{rank:05}-{number:02}.safetensors"
        keys = {f"{part.name}#{place}": part for place, part in enumerate(own)}
        # Device memory is moved one file at a time, unless it was before.
        values = dict(zip(keys, _apart(part.values.contiguous() for part in to_host(own, copied=False)), strict=True))
        try:
            files[path.name], checksums = _write_file(path, values, may_thread)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} can't be written: {error}; free some space, or save elsewhere") from error
        for key, part in keys.items():
            box = StoredBox(start=part.box.start, shape=part.box.shape, file=path.name, key=key, crc32=checksums[key])
            before = tensors[part.name].boxes if part.name in tensors else ()
            dtype = str(part.values.dtype).removeprefix("torch.")
            tensors[part.name] = StoredTensor(dtype=dtype, shape=part.shape, boxes=(*before, box))
    return files, tensors


def _apart(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, each in memory of its own: safetensors takes no two names of one, as of a buffer that layers share."""
    seen: set[int] = set()
    for tensor in tensors:
        yield tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())


def _portions(parts: Sequence[Part]) -> Iterator[list[Part]]:
    portion: list[Part] = []
    size = 0
    for part in parts:
        if portion and size + part.values.nbytes > _FILE_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(part)
        size += part.values.nbytes
    if portion:
        yield portion


def _write_file(path: Path, values: Mapping[str, Tensor], may_thread: bool) -> tuple[StoredFile, dict[str, int]]:
    def checksums() -> dict[str, int]:
        return {key: checksum(value) for key, value in values.items()}

    if not may_thread:
        return _save(path, values), checksums()
    # Both release the interpreter's lock: the checksums, of the memory and not of the file, cost next to no time.
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(checksums)
        return _save(path, values), taken.result()


def _save(path: Path, values: Mapping[str, Tensor]) -> StoredFile:
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(values), path)
    path.chmod(mode)  # safetensors makes files that only their owner may read
    sync(path)
    return stored_file(path)


def checksum(values: Tensor) -> int:
    """CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(values.detach().reshape(-1).view(torch.uint8).numpy().data)


def stored_file(path: Path) -> StoredFile:
    """Return the manifest's entry for a file. Raises OSError."""
    with path.open("rb") as file:
        length = file.read(8)
        header = file.read(min(int.from_bytes(length, "little"), path.stat().st_size))
    return StoredFile(num_bytes=path.stat().st_size, header_crc32=zlib.crc32(length + header))
