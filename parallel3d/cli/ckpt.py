"""`p3d ckpt`: list, verify, import, export and compare checkpoints."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

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

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHECKPOINT = "directory of a checkpoint, or of several: then the one that `latest` names is used, or else the newest"
_MOST = 20  # differences that are printed
_WIDTH = 1000  # so that nothing is cut


def add_command(commands: Any) -> None:
    """Add `ckpt` to the subcommands of an argparse parser."""
    parser = commands.add_parser("ckpt", help="list, verify, import, export and compare checkpoints")
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    listing = actions.add_parser("ls", help="list the checkpoints of a directory, and what else is in it")
    listing.add_argument("directory", type=Path)
    listing.set_defaults(run=_list)

    verify = actions.add_parser(
        "verify", help="compare everything with its checksums; the exit code is 1 if one differs"
    )
    verify.add_argument("checkpoint", type=Path, help=_CHECKPOINT)
    verify.set_defaults(run=_verify)

    importing = actions.add_parser(
        "import",
        help="make a checkpoint of one that DeepSpeed or torch.distributed.checkpoint saved",
        description="Write TARGET/<tag> and TARGET/latest, which load_checkpoint and resume read in any layout.",
    )
    importing.add_argument("source", type=Path, help="directory that was given to save_checkpoint, or one of its tags")
    importing.add_argument("target", type=Path, help="directory of checkpoints to write to")
    importing.add_argument("--tag", help="the tag to import (default: the one that the file `latest` names)")
    importing.add_argument("--weights-only", action="store_true", help="leave out the optimizer's state")
    importing.set_defaults(run=_import)

    export = actions.add_parser(
        "export",
        help="write the weights in Hugging Face's form",
        description="Write a directory that from_pretrained accepts, for a model of parallel3d.models; for any other model, or "
        "with --plain, write safetensors under the model's own names. With --format dcp, write the weights and the optimizer's "
        "state for torch.distributed.checkpoint.load.",
    )
    export.add_argument("checkpoint", type=Path, help=_CHECKPOINT)
    export.add_argument("directory", type=Path, help="directory to write; it must not exist or must be empty")
    export.add_argument("--dtype", choices=list(_DTYPES), help="dtype of floating-point tensors (default: as saved)")
    export.add_argument("--masters", action="store_true", help="write the fp32 master weights, if there are any")
    export.add_argument("--plain", action="store_true", help="use the model's own names")
    export.add_argument("--format", choices=["safetensors", "dcp"], default="safetensors", help="of the files")
    export.set_defaults(run=_export)

    diff = actions.add_parser("diff", help="compare the tensors of two checkpoints; the exit code is 1 if they differ")
    diff.add_argument("first", type=Path, help=_CHECKPOINT)
    diff.add_argument("second", type=Path)
    diff.add_argument(
        "--tolerance", type=float, default=0.0, metavar="X", help="relative difference that passes (default: 0)"
    )
    diff.set_defaults(run=_diff)


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
            f"{path} is no checkpoint and holds none that is complete; `p3d ckpt ls` says what there is"
        )
    return complete[-1].path


def _list(options: argparse.Namespace) -> int:
    directory: Path = options.directory
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory")
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
    saved = datetime.fromtimestamp(manifest.saved, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    size = sum(file.num_bytes for file in manifest.files.values()) / 1e9
    try:
        state = TrainingState.model_validate(manifest.state)
    except ValidationError:  # weights alone
        return saved, f"{size:.3g}", "", ""
    layout = f"pp{state.layout['pipe']} tp{state.layout['model']} dp{state.layout['data']}"
    return saved, f"{size:.3g}", str(state.counters.get("global_steps", "")), layout


def _verify(options: argparse.Namespace) -> int:
    path = locate(options.checkpoint)
    reader = Reader(path)
    problems = list(reader.verify_all())
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{path}: {len(reader.tensors)} tensors in {len(reader.manifest.files)} files match their checksums")
    return 1 if problems else 0


def _export(options: argparse.Namespace) -> int:
    path, dtype = locate(options.checkpoint), _DTYPES.get(options.dtype)
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


def _import(options: argparse.Namespace) -> int:
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


def _diff(options: argparse.Namespace) -> int:
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
