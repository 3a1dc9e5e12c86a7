"""Names of DeepSpeed's `runtime` and of some modules in it, at `parallel3d.runtime`; aliases.py says of which.

Each parameter of a learning-rate schedule is a constant, too: WARMUP_MIN_LR is "warmup_min_lr".
"""

# ruff: noqa: F401 (names that are imported are what scripts import from here)

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from parallel3d.comm.groups import PipelineParallelGrid
from parallel3d.comm.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from parallel3d.config.zero import OffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig
from parallel3d.config.zero import OffloadParamConfig as DeepSpeedZeroOffloadParamConfig
from parallel3d.deepspeed import names
from parallel3d.deepspeed.accelerator import get_accelerator
from parallel3d.deepspeed.aliases import PLACES
from parallel3d.errors import TopologyError
from parallel3d.logs import logger
from parallel3d.monitor.memory import memory_in_use
from parallel3d.optim.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from parallel3d.partition.chain import segment_costs
from parallel3d.partition.split import partition_layers
from parallel3d.rng import set_random_seed
from parallel3d.zero.external import register_external_parameter, unregister_external_parameter
from parallel3d.zero.gathered import GatheredParameters
from parallel3d.zero.init import Init
from parallel3d.zero.weights import WeightState as ZeroParamStatus

# The modules in it whose names are all here.
lr_schedules = utils = zero = partition_parameters = offload_config = sys.modules[__name__]
add_tuning_arguments, get_config_from_args = (
    vars(names)[name] for name in ("add_tuning_arguments", "get_config_from_args")
)
VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR = VALID_LR_SCHEDULES
WARMUP_LOG_RATE, WARMUP_LINEAR_RATE = "log", "linear"
for _schedule in (LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR):
    globals().update({_name.upper(): _name for _name in signature(_schedule).parameters})
_orig_torch_arange = torch.arange


def __getattr__(name: str) -> Any:
    """Import a module when it is used, because importing takes long; DeepSpeed imports them all at once."""
    if f"runtime.{name}" not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"parallel3d.{PLACES[f'runtime.{name}']}")


class OffloadDeviceEnum(StrEnum):
    """Devices of offloaded state."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """Kinds of state: weights and gradients of the layers (lp), and masters (hp) and state of the optimizer."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


def zero_wrapper_for_fp_tensor_constructor(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """Return a constructor of tensors as it is: zero.Init changes the dtype of none. Transformers replaces this function."""
    return function


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Gather all weights of an engine at once, and take out the hooks that gather them one by one; yield the engine."""
    with GatheredParameters(model.parameters()):
        blocks = getattr(model.optimizer, "parameter_offload", None)
        if blocks is not None:
            blocks.remove_hooks()
        try:
            yield model
        finally:
            if blocks is not None:
                blocks._register_deepspeed_module(blocks.module)


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return bounds [0, ..., num_items] of `num_parts` parts, as `partition_balanced` for items of equal weight."""
    return partition_balanced([1.0] * num_items, num_parts)


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Return bounds [0, ..., n] of parts of the n >= 1 items, of which the heaviest is as light as possible.

    With fewer items than parts the last parts are empty.
    """
    names = [str(k) for k in range(len(weights))]
    split = partition_layers(segment_costs(weights, names, None), min(num_parts, len(weights)))
    return [*split.bounds, *[len(weights)] * (num_parts - len(weights))]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` and this process's memory, with its peak, in GiB. Without `force` do nothing, as in DeepSpeed."""
    if force:
        sizes = {"peak on the host": memory_in_use(torch.device("cpu"))["peak"]}
        if torch.cuda.is_available():
            sizes |= {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
            sizes["peak allocated"] = torch.cuda.max_memory_allocated()
        logger.info("%s | %s", message, ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sizes.items()))


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number >= 1, each as often as it divides the number."""
    from sympy import factorint

    if number < 1:
        raise TopologyError(f"{number} has no prime factors; give a whole number >= 1")
    factors: list[int] = factorint(number, multiple=True)
    return factors
