"""The fp32 weights of a checkpoint, DeepSpeed's or this package's, as DeepSpeed's module of this name gives them.

As a program: `python -m parallel3d.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from parallel3d.checkpoint.deepspeed import is_deepspeed, read_deepspeed
from parallel3d.checkpoint.directory import find, latest_tag
from parallel3d.checkpoint.format import TrainingState, sources
from parallel3d.checkpoint.read import Reader
from parallel3d.errors import CheckpointError

Location = str | os.PathLike[str]

# Saved next to checkpoints.
SCRIPT = '''"""Writes the fp32 weights of a checkpoint in this directory: `python zero_to_fp32.py . OUTPUT_DIR`."""

from parallel3d.deepspeed.utils.zero_to_fp32 import *

if __name__ == "__main__":
    main()
'''


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Location, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """Return the masters where the optimizer has any, else the weights, and buffers, all in fp32, by the module's names.

    - tag: by default the one that the file `latest` names.
    - exclude_frozen_parameters: leave out what is not trained; of a checkpoint of this package, buffers too.
    - lazy_mode: without effect. The values are tensors in any case; callers of DeepSpeed's version call .contiguous() on them.

    Raises CheckpointError.
    """
    place = Path(checkpoint_dir)
    tag = tag or latest_tag(place)
    if tag is None:
        raise CheckpointError(f"{place / 'latest'} is not there; give the tag of a checkpoint")
    path = place / tag
    tensors: dict[str, Tensor] = {}
    if is_deepspeed(path):
        # With ZeRO, masters can be read without the moments; without ZeRO, the moments show which parameters masters belong to.
        whole = read_deepspeed(path, weights_only=any(path.glob("*_optim_states.pt")))
        names, groups, copies, read = list(whole.tensors), whole.groups, whole.copies, whole.tensors.__getitem__
        kept = whole.buffers
    else:
        reader = Reader(find(place, tag))
        TrainingState.check(reader.manifest, path)
        names, groups, read = list(reader.tensors), [reader.manifest.state["optimizer"]["groups"]], reader.read
        copies, kept = reader.manifest.state.get("copies", {}), frozenset()
    trained = {name for own in groups for group in own for name in group["names"]}
    for name, source in sources(names).items():
        if not exclude_frozen_parameters or name in trained or name in kept:
            tensor = read(source)
            # A copy: a part of a flat tensor would be written with all of it.
            tensors[name] = tensor.to(torch.float32 if tensor.is_floating_point() else tensor.dtype, copy=True)
    return tensors | {copy: tensors[name] for copy, name in copies.items() if name in tensors}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Location, tag: str | None = None
) -> nn.Module:
    """Load those weights into a model, which is moved to the CPU, and return it. Raises CheckpointError."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Location,
    output_dir: Location,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write those weights to pytorch_model.bin, or model.safetensors with safe_serialization, in files of at most that size.

    Raises CheckpointError, and ImportError without huggingface_hub.
    """
    from huggingface_hub import save_torch_state_dict

    tensors = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    output = Path(output_dir)
    output.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=output) as own:  # every rank of a script may write these files at once
        save_torch_state_dict(tensors, own, max_shard_size=max_shard_size, safe_serialization=safe_serialization)
        for path in Path(own).iterdir():
            path.replace(output / path.name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program with DeepSpeed's arguments."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="directory that was given to save_checkpoint")
    parser.add_argument("output_dir")
    parser.add_argument("--max_shard_size", default="5GB", help="of each file that is written (default: 5GB)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors instead of pickles")
    parser.add_argument("-t", "--tag", help="tag of the checkpoint (default: the one that the file `latest` names)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="a flag of DeepSpeed's; it changes nothing here")
    options = vars(parser.parse_args(argv))
    del options["debug"]
    convert_zero_checkpoint_to_fp32_state_dict(**options)


if __name__ == "__main__":
    main()
