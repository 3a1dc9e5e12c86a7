"""The sections of ZeRO: partitioning, and offload to host memory and NVMe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from parallel3d.config.section import (
    NonEmpty,
    NonNegative,
    Positive,
    Section,
    key,
    own_key,
    read_only,
    whole,
)


def _read_names(value: object) -> object:
    return (value,) if isinstance(value, str) else read_only(value)


Names = Annotated[tuple[NonEmpty, ...], BeforeValidator(_read_names, json_schema_input_type=str | list[str])]


class LeafModuleConfig(Section):
    """Modules whose weights are gathered together with those of all modules inside them (stage 3)."""

    classes: Names = key((), 'names of classes, such as "MixtralSparseMoeBlock" or with its package')
    names: Names = key((), 'names of modules, such as "model.layers.0.mlp"')
    name_suffixes: Names = key((), 'ends of names of modules, such as "mlp"')


OffloadDevice = Literal["none", "cpu", "nvme"]
Ratio = Annotated[float, Field(ge=0, le=1)]


class _Offload(Section):
    device: OffloadDevice | None = key("none", '"none", "cpu" or "nvme"')
    nvme_path: NonEmpty | None = key(None, "a directory on a local disk, for device nvme")
    pin_memory: bool = key(True, "true or false", differs="true by default: copies overlap only with pinned memory")

    @model_validator(mode="after")
    def _has_place(self) -> _Offload:
        if self.device == "nvme" and self.nvme_path is None:
            raise ValueError("device is nvme, but nvme_path is missing; give a directory on a local disk")
        return self


class OffloadOptimizerConfig(_Offload, keys="offload_optimizer"):
    """Masters and optimizer state in host memory or on NVMe; the step runs on the device, or on the CPU."""

    unset_by_auto = frozenset({"device", "buffer_count", "pin_memory"})

    step: Literal["device", "cpu"] = own_key(
        "device", '"device" to pass the state through a window of the device\'s memory, or "cpu" to update on the CPU'
    )
    ratio: Ratio | Literal["auto"] = key(
        1.0,
        'the share of the state from 0 to 1 that is offloaded, such as 0.5, or "auto" for what the device has no room for',
        differs='of the elements, in whole buckets; "auto" measures the device\'s free memory after the second step',
    )
    host_ratio: Ratio = own_key(
        0.0, "the share from 0 to 1 of the offloaded state that stays in host memory, for device nvme"
    )
    buffer_count: Annotated[int, Field(ge=2), BeforeValidator(whole)] = key(
        4, "a whole number of buffers >= 2 in the window"
    )

    @model_validator(mode="after")
    def _splits_state(self) -> OffloadOptimizerConfig:
        if self.device != "nvme" and self.host_ratio:
            raise ValueError(f"host_ratio is {self.host_ratio:g}, but only device nvme splits its state; drop it")
        if self.device == "nvme" and self.step == "cpu":
            raise ValueError(
                'step is cpu, but state on nvme passes through the device; use "device": "cpu", or drop step'
            )
        return self


class OffloadParamConfig(_Offload, keys="offload_param"):
    """Shards of weights in host memory or on NVMe (stage 3), copied to the device when they are gathered."""

    unset_by_auto = frozenset({"device", "max_in_cpu", "pin_memory", "buffer_count"})

    max_in_cpu: NonNegative | None = key(
        None,
        "a whole number of elements >= 0 in host memory, such as 1e9, or null",
        differs='of a rank\'s shards: the others stay on the device, or with "nvme" on disk; null: all, with "nvme" none',
    )
    buffer_count: Annotated[int, Field(ge=2), BeforeValidator(whole)] = key(
        5,
        "a whole number of buffers >= 2 in host memory, for device nvme",
        differs="each has the size of the largest shard",
    )
    fill_freed_memory: bool = own_key(
        True,
        "true or false, whether more weights stay gathered while activations take less memory than at its peak (CUDA)",
    )


def _read_cpu_offload(value: object) -> object:
    """Read DeepSpeed's older cpu_offload and cpu_offload_param, true or false."""
    return {"device": "cpu" if value else "none"} if isinstance(value, bool) else value


# Keys of stage 3 that DeepSpeed also takes without "stage3_".
_OF_STAGE_3 = """max_live_parameters max_reuse_distance prefetch_bucket_size param_persistence_threshold
module_granularity_threshold gather_16bit_weights_on_model_save model_persistence_threshold use_all_reduce_for_fetch_params
allgather_sequential""".split()


class ZeroConfig(Section, keys="zero_optimization"):
    """Partitioning over the data-parallel ranks, and the buckets of gradients."""

    renamed: ClassVar[Mapping[str, str]] = {
        "cpu_offload": "offload_optimizer",
        "cpu_offload_param": "offload_param",
        **{name: f"stage3_{name}" for name in _OF_STAGE_3},
    }
    unset_by_auto = frozenset({"reduce_bucket_size", "allgather_bucket_size", "stage3_param_persistence_threshold"})

    stage: NonNegative = key(0, "0, 1, 2 or 3", le=3)
    reduce_bucket_size: Positive = key(500_000_000, "a whole number of elements >= 1, such as 5e8")
    allgather_bucket_size: Positive = key(500_000_000, "a whole number of elements >= 1, such as 5e8")
    reduce_per_micro_batch: bool | Literal["auto"] = own_key("auto", 'true, false or "auto"')
    stage3_max_live_parameters: Positive | Literal["auto"] = key(
        "auto",
        'a whole number of elements >= 1, such as 1e9, or "auto"',
        differs='"auto" by default: as many as take a tenth of the device\'s memory, but at least the two largest layers',
    )
    stage3_max_reuse_distance: NonNegative | Literal["auto"] = key(
        "auto", 'a whole number of elements >= 0, such as 1e9, or "auto"', differs='"auto" by default: any distance'
    )
    stage3_prefetch_bucket_size: NonNegative | Literal["auto"] = key(
        "auto",
        'a whole number of elements >= 0, such as 5e7, or "auto"',
        differs='"auto" by default: the largest layer',
    )
    stage3_param_persistence_threshold: NonNegative = key(
        100_000,
        "a whole number of elements >= 0, such as 1e5",
        differs="it is compared with all parameters of a layer together, which are gathered together",
    )
    stage3_module_granularity_threshold: NonNegative = key(
        0,
        "a whole number >= 0: modules with at most this number of parameters for each module inside are gathered together",
    )
    leaf_module: LeafModuleConfig = LeafModuleConfig()
    peer_copies: bool = own_key(
        False,
        "true or false: whether, with stage 3, replicas of one host gather weights by copies out of each other's memory, else "
        "by NCCL",
    )
    sub_group_size: Positive = key(
        1_000_000_000,
        "a whole number of elements >= 1, such as 1e7",
        differs="elements in a buffer that offloaded optimizer state passes through; more than 2^24 count as 2^24",
    )
    offload_optimizer: Annotated[
        OffloadOptimizerConfig,
        BeforeValidator(_read_cpu_offload, json_schema_input_type=OffloadOptimizerConfig | bool),
    ] = OffloadOptimizerConfig()
    offload_param: Annotated[
        OffloadParamConfig, BeforeValidator(_read_cpu_offload, json_schema_input_type=OffloadParamConfig | bool)
    ] = OffloadParamConfig()

    @model_validator(mode="after")
    def _consistent(self) -> ZeroConfig:
        if self.reduce_per_micro_batch is True and self.stage < 2:
            raise ValueError(
                f"reduce_per_micro_batch needs partitioned gradients, but stage is {self.stage}; set stage to 2, or "
                'reduce_per_micro_batch to "auto"'
            )
        return self


class AioConfig(Section, keys="aio"):
    """Requests to the disk of state that is offloaded to nvme."""

    renamed: ClassVar[Mapping[str, str]] = {"thread_count": "intra_op_parallelism"}

    block_size: Positive = key(
        8 << 20, "a number of bytes, a multiple of 4096", differs="8 MiB by default", multiple_of=4096
    )
    queue_depth: Positive = key(8, "a whole number of requests >= 1 of a thread")
    intra_op_parallelism: Positive = key(
        1,
        "a whole number of threads >= 1",
        differs="each of the queue_depth x intra_op_parallelism requests a direction has a thread, up to 64",
    )


class OffloadConfig(Section):
    """Limits of all offloaded state."""

    host_memory_gib: Annotated[float, Field(gt=0)] | None = own_key(
        None, "GiB > 0 that all ranks of a host may take for offloaded state, or null for the cgroup's limit"
    )
