"""Small names of DeepSpeed's modules, and names that have no counterpart here; aliases.py says in which module each is found.

A name without a counterpart can be imported: no object is an instance of it, and calling it raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from pydantic import ConfigDict
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only

from parallel3d.comm.environment import get_world_size
from parallel3d.config import Bf16Config, Config, Fp16Config, batch_sizes, load
from parallel3d.config.section import Section
from parallel3d.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from parallel3d.errors import ConfigError

ADAM_OPTIMIZER = "adam"
DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizerConfig
DeepSpeedZeroOffloadParamConfig = OffloadParamConfig
DeepSpeedFP16Config, DeepSpeedBF16Config = Fp16Config, Bf16Config
DeepSpeedConfigModel, DeepSpeedConfigError = Section, ConfigError
ZeRORuntimeException = ConfigError
ZeroStageEnum = IntEnum("ZeroStageEnum", ["disabled", "optimizer_states", "gradients", "weights"], start=0)

torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version()[:2])) if torch.cuda.is_available() else "0.0",
    "hip_version": "0.0",
}

_NO_EXPERTS = "experts are not distributed; use a model whose experts are plain modules, such as Mixtral"
_NO_WRAPPER = "engine.optimizer is torch's own; utils.safe_get_full_optimizer_state reads the state that is sharded"
_NO_ENGINE = "an engine trains, evaluates by engine.eval_batch or engine(...), and generates by engine.generate"
_NO_GLOBALS = "process groups belong to an engine; engine.mpu has them, such as engine.mpu.get_data_parallel_group()"
_NO_SEQUENCES = "attention is not sharded along the sequence; tensor_parallel.sequence_parallel shards the norms"
_NO_FILES = "checkpoints are safetensors files; read them by `p3d ckpt`, or by engine.load_checkpoint"
_NO_ESTIMATE = (
    "`p3d plan` predicts the memory of a model in each layout, and engine.reports.memory_report() measures it"
)
_NO_TIMER = "`wall_clock_breakdown` prints the parts of a step's time, and engine.reports.time_breakdown() returns them"
_NO_TUNING = "schedules are those of the configuration's section `scheduler`, such as LRRangeTest with its params"
_NO_BUILDER = "kernels are PyTorch's, or this package's own, which `p3d build-kernels` compiles"
_NO_COUNTERPART = {
    "MoE": _NO_EXPERTS,
    **dict.fromkeys(("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer"), _NO_WRAPPER),
    **dict.fromkeys(("FP16_Optimizer", "FP16_UnfusedOptimizer", "DeepSpeedOptimizer"), _NO_WRAPPER),
    **dict.fromkeys(("init_inference", "InferenceEngine", "DeepSpeedHybridEngine"), _NO_ENGINE),
    **dict.fromkeys(("UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter", "DistributedAttention"), _NO_SEQUENCES),
    **dict.fromkeys((f"_get_sequence_parallel_{what}" for what in ("group", "rank", "world_size")), _NO_SEQUENCES),
    **{
        f"_get_{of}_parallel_{what}": remedy
        for of, remedy in {"data": _NO_GLOBALS, "model": _NO_GLOBALS, "expert": _NO_EXPERTS}.items()
        for what in ("group", "rank", "world_size")
    },
    **dict.fromkeys(("SynchronizedWallClockTimer", "ThroughputTimer", "NoopTimer"), _NO_TIMER),
    **dict.fromkeys(("add_tuning_arguments", "get_config_from_args"), _NO_TUNING),
    **dict.fromkeys(("TorchCheckpointEngine", "get_model_ckpt_name_for_rank", "fragment_address"), _NO_FILES),
    **{
        f"estimate_zero{stage}_model_states_mem_needs{what}": _NO_ESTIMATE
        for stage in (2, 3)
        for what in ("", "_all_live", "_all_cold")
    },
}
_BUILDERS = {
    "CPUAdam": "cpu_adam",
    "FusedAdam": "fused_adam",
    "FusedLamb": "fused_lamb",
    "Utils": "utils",
    "AsyncIO": "async_io",
}


def _absent(name: str, remedy: str, **attributes: str) -> type:
    def refuse(*_: Any, **__: Any) -> None:
        raise ConfigError(f"DeepSpeed's {name} has no counterpart: {remedy}")

    return type(name, (), {"__new__": refuse, "__doc__": f"No object is a {name}: {remedy}.", **attributes})


globals().update({_name: _absent(_name, _remedy) for _name, _remedy in _NO_COUNTERPART.items()})
globals().update(
    {f"{_name}Builder": _absent(f"{_name}Builder", _NO_BUILDER, NAME=_key) for _name, _key in _BUILDERS.items()}
)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Return whether PyTorch's version is within these limits, each of which may be None."""
    own = TorchVersion(torch.__version__)
    return (min_version is None or own >= str(min_version)) and (max_version is None or own <= str(max_version))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | list[Mapping[str, Any]] | tuple[Mapping[str, Any], ...], max_group_size: float = 0
) -> list[Mapping[str, Any]]:
    """Return the parameter groups as a list. Raises ConfigError for parameters of DeepSpeed's expert parallelism."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else list(param_groups)
    if any(not getattr(p, "allreduce", True) for group in groups for p in group["params"]):
        raise ConfigError(f"a parameter is marked as an expert's by allreduce=False: {_NO_EXPERTS}")
    return groups


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a copy of nested containers whose tensors own their memory, so that torch.save writes no more than them."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone().to(device), item)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which on CUDA runs in a range of NVTX with its name, for profilers."""

    @wraps(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.nvtx.range(func.__qualname__) if torch.cuda.is_available() else nullcontext():
            return func(*args, **kwargs)

    return run


@contextmanager
def OnDevice(dtype: torch.dtype, device: str = "meta", enabled: bool = True) -> Iterator[None]:
    """Make tensors and modules inside on `device`, and with `dtype` as the default."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


class DeepSpeedConfig(Config):
    """The configuration that a script reads and changes before `initialize`, with its three batch sizes.

    They are those for the replicas of `mpu`, or else of the world. Keys can be set; inside their sections they can't.
    """

    model_config = ConfigDict(frozen=False, validate_assignment=True)
    _replicas: int

    def __init__(self, config: str | Path | Mapping[str, Any], mpu: Any = None, mesh_device: Any = None) -> None:
        super().__init__()
        vars(self).update(load(config))
        self._replicas = get_world_size() if mpu is None else mpu.get_data_parallel_world_size()
        self._configure_train_batch_size()

    def _configure_train_batch_size(self) -> None:
        """Fill in the batch sizes that are None. Raises ConfigError if the three don't multiply up."""
        sizes = batch_sizes(self, pipe=1, data=self._replicas, model=1)
        self.train_batch_size, self.train_micro_batch_size_per_gpu = sizes.train_batch_size, sizes.micro_batch_size
        self.gradient_accumulation_steps = sizes.num_micro_batches


class DeepSpeedZeroConfig(ZeroConfig):
    """The section zero_optimization of DeepSpeed's keys. They are read without "stage3_", those without effect here, too."""

    def __init__(self, **keys: Any) -> None:
        section = load({"zero_optimization": keys}).zero_optimization
        super().__init__(**{name: getattr(section, name) for name in section.model_fields_set})
        values = {"overlap_comm": self.stage == 3, "pipeline_loading_checkpoint": False} | vars(self) | keys
        short = {name.replace("_fp16_", "_16bit_").removeprefix("stage3_"): value for name, value in values.items()}
        vars(self).update({name: value for name, value in short.items() if name not in type(self).model_fields})


def get_bfloat16_config(config: Mapping[str, Any]) -> Any:
    """Return the section bf16 of a configuration."""
    return load(config).bf16
