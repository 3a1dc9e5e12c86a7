"""`p3d ckpt`: list, verify, import, export and compare checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from parallel3d.checkpoint.dcp import export_dcp, is_dcp, read_dcp
from parallel3d.checkpoint.deepspeed import is_deepspeed, read_deepspeed
from parallel3d.checkpoint.directory import (
    OWN,
    check_complete,
    complete_checkpoints,
    find,
    latest_tag,
    save_folders,
    tag_of,
)
from parallel3d.checkpoint.export import export_checkpoint
from parallel3d.checkpoint.format import MANIFEST, MODEL, Manifest, TrainingState
from parallel3d.checkpoint.read import Reader
from parallel3d.errors import CheckpointError
from parallel3d.parameters import DTYPES

_MOST = 20  # differences that are printed
_WIDTH = 1000  # so that nothing is cut


def locate(path: Path) -> Path:
    """Return the directory of one checkpoint. Raises CheckpointError if there is none that is complete."""
    if (path / MANIFEST).is_file():
        return path
    tag = latest_tag(path)
    if tag is not None:
        return find(path, tag)
    complete = complete_checkpoints(path)
    if not complete:
        raise CheckpointError(
            f"{path} is not a checkpoint and holds none that is complete; `p3d ckpt ls` says what there is"
        )
    return complete[-1].path


def list_checkpoints(options: argparse.Namespace) -> int:
    """Run `p3d ckpt ls`. Raises CheckpointError."""
    directory: Path = options.directory
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    complete, latest = complete_checkpoints(directory), latest_tag(directory)
    columns = (Column(name, no_wrap=True) for name in ("tag", "saved", "GB", "steps", "layout", ""))
    table = Table(*columns, box=None)
    for found in complete:
        mark = "latest" if found.tag == latest else ""
        table.add_row(escape(found.tag), *_described(found.manifest), mark)
    Console(width=_WIDTH).print(table)
    known = {found.path for found in complete}
    for path in sorted(directory.iterdir()):
        if path.is_dir() and path not in known and path.name != OWN:
            try:
                check_complete(path)
            except CheckpointError as error:
                print(f"not complete: {error}")
    for folder in save_folders(directory):
        print(f"not complete: {folder} is of a save of {tag_of(folder)!r} that is running or was ended")
    if latest is not None and latest not in {found.tag for found in complete}:
        print(f"latest names {latest!r}, which is not complete")
    return 0


def _described(manifest: Manifest) -> tuple[str, str, str, str]:
    saved = datetime.fromtimestamp(manifest.saved, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    size = sum(file.num_bytes for file in manifest.files.values()) / 1e9
    try:
        state = TrainingState.model_validate(manifest.state)
    except ValidationError:  # the checkpoint has only weights
        return saved, f"{size:.3g}", "", ""
    layout = f"pp{state.layout['pipe']} tp{state.layout['model']} dp{state.layout['data']}"
    return saved, f"{size:.3g}", str(state.counters.get("global_steps", "")), layout


def verify(options: argparse.Namespace) -> int:
    """Run `p3d ckpt verify`; return 1 if something differs from its checksum. Raises CheckpointError."""
    path = locate(options.checkpoint)
    reader = Reader(path)
    problems = list(reader.verify_all())
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{path}: {len(reader.tensors)} tensors in {len(reader.manifest.files)} files match their checksums")
    return 1 if problems else 0


def export(options: argparse.Namespace) -> int:
    """Run `p3d ckpt export`. Raises CheckpointError."""
    path, dtype = locate(options.checkpoint), DTYPES.get(options.dtype)
    if options.format == "dcp":
        if options.dtype or options.masters or options.plain:
            raise CheckpointError(
                "--format dcp writes masters under the model's own names; drop --dtype, --masters and --plain"
            )
        export_dcp(path, options.directory)
        print(f"{options.directory}: the weights and the optimizer's state of {path}, for torch.distributed.checkpoint")
        return 0
    as_theirs = export_checkpoint(path, options.directory, dtype, options.masters, options.plain)
    names = "in Hugging Face's form" if as_theirs else "under the model's own names"
    print(f"{options.directory}: the weights of {path}, {names}")
    return 0


def import_foreign(options: argparse.Namespace) -> int:
    """Run `p3d ckpt import`. Raises CheckpointError."""
    source: Path = options.source.absolute()  # so that `.` has a name
    tag = options.tag or (None if is_dcp(source) or is_deepspeed(source) else latest_tag(source))
    source = source / tag if tag else source
    if not (is_dcp(source) or is_deepspeed(source)):
        raise CheckpointError(f"{source} holds no checkpoint of DeepSpeed's or torch.distributed.checkpoint's")
    whole = (read_dcp if is_dcp(source) else read_deepspeed)(source, options.weights_only)
    for reason in whole.write(options.target, source.name):
        print(f"left out: {reason}")
    weights = sum(name.startswith(MODEL) for name in whole.tensors)
    print(
        f"{options.target / source.name}: {weights} weights and {len(whole.tensors) - weights} other tensors of {source}"
    )
    return 0


def diff(options: argparse.Namespace) -> int:
    """Run `p3d ckpt diff`; return 1 if the checkpoints differ. Raises CheckpointError."""
    first, second = Reader(locate(options.first)), Reader(locate(options.second))
    alone = ((one, one.tensors.keys() - other.tensors.keys()) for one, other in ((first, second), (second, first)))
    lines = [f"{name} is in {one.directory} alone" for one, names in alone for name in sorted(names)]
    lines += _changed(first, second, options.tolerance)
    for line in lines[:_MOST]:
        print(line)
    if len(lines) > _MOST:
        print(f"and {len(lines) - _MOST} more")
    common = len(first.tensors.keys() & second.tensors.keys())
    print(f"{common} tensors in both, {len(lines)} differences")
    return 1 if lines else 0


def _changed(first: Reader, second: Reader, tolerance: float) -> Iterator[str]:
    for name in sorted(first.tensors.keys() & second.tensors.keys()):
        a, b = first.tensors[name], second.tensors[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            yield f"{name} is {a.dtype} {list(a.shape)} in one and {b.dtype} {list(b.shape)} in the other"
            continue
        left, right = (reader.read(name) for reader in (first, second))
        if torch.equal(left, right):
            continue
        left, right = left.double(), right.double()
        off = float((left - right).norm()) / max(float(left.norm()), 1e-30)
        if not off <= tolerance:
            yield f"{name} differs by {off:.2e}, and an element by at most {float((left - right).abs().max()):.2e}"
