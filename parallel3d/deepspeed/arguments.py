"""Configuration from a training script's own objects: its command line, its optimizer and its loader."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from parallel3d.comm.environment import get_local_rank
from parallel3d.config import Config, read_source
from parallel3d.errors import ConfigError

_OLD_FLAG, _FLAG = "deepscale_config", "deepspeed_config"


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed, --deepspeed_config FILE and their old names --deepscale, --deepscale_config; return the parser.

    --deepspeed is a flag for the script only. As with DeepSpeed, a script that is started with --local_rank declares that
    option itself, before or after this call; `initialize` checks the value.
    """
    group = parser.add_argument_group("DeepSpeed", "the configuration of the training")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script; it changes nothing here")
    group.add_argument(f"--{_FLAG}", metavar="FILE", help="configuration file: JSON with comments, Hjson or YAML")
    group.add_argument("--deepscale", action="store_true", help="old name of --deepspeed")
    group.add_argument(f"--{_OLD_FLAG}", metavar="FILE", help="old name of --deepspeed_config")
    return parser


def find_config(
    args: Any,
    config: str | Path | Mapping[str, Any] | Config | None,
    config_params: str | Path | Mapping[str, Any] | None,
) -> str | Path | Mapping[str, Any] | Config:
    """Return the one configuration that initialize's config=, config_params= and args give.

    Raises ConfigError when there is none, when two differ, or when args.local_rank is not this process's.
    """
    local_rank = getattr(args, "local_rank", None)
    # -1 is the default that scripts declare.
    if isinstance(local_rank, int) and local_rank >= 0 and local_rank != get_local_rank():
        raise ConfigError(
            f"args.local_rank is {local_rank}, but the launcher's LOCAL_RANK is {get_local_rank()}; drop --local_rank, or "
            "start the script by parallel3d, torchrun or srun"
        )
    if getattr(args, _OLD_FLAG, None) is not None:
        warnings.warn(f"--{_OLD_FLAG} is the old name of --{_FLAG}; use that", stacklevel=3)
    sources = {
        "config=": config,
        "config_params=": config_params,
        f"args.{_FLAG}": getattr(args, _FLAG, None),
        f"args.{_OLD_FLAG}": getattr(args, _OLD_FLAG, None),
    }
    given = {name: source for name, source in sources.items() if source is not None}
    if not given:
        raise ConfigError(f"initialize needs config=, or args with {_FLAG}; give at least the batch sizes")
    (first, source), *others = given.items()
    for name, other in others:
        if _content(other) != _content(source):
            raise ConfigError(
                f"{first} ({_shown(source)}) and {name} ({_shown(other)}) are different configurations; give one"
            )
    return source


def known_values(optimizer: object, training_data: object) -> dict[str, Any]:
    """Return values for keys that may be "auto", by dotted key, from the script's own objects.

    An optimizer gives its arguments, and the learning rate to warm up to (a list where its groups differ); a DataLoader
    gives the samples of a micro-batch.
    """
    values: dict[str, Any] = {}
    if isinstance(optimizer, torch.optim.Optimizer):
        for name, value in optimizer.defaults.items():
            values[f"optimizer.params.{name}"] = value
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        if rates:
            values["optimizer.params.lr"] = rates[0]
            values["scheduler.params.warmup_max_lr"] = rates[0] if len(set(rates)) == 1 else rates
    if isinstance(training_data, DataLoader) and training_data.batch_size is not None:
        values["train_micro_batch_size_per_gpu"] = training_data.batch_size
    return values


def _content(source: object) -> object:
    return source if isinstance(source, Config) else read_source(source)[1]


def _shown(source: object) -> str:
    return str(source) if isinstance(source, (str, Path)) else f"a {type(source).__name__}"
