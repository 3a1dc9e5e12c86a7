"""The zero_optimization section."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from parallel3d.config.section import NonNegative, Positive, Section, key, known, own_key

STAGE_3_AS_2 = (
    "trains as stage 2: the same numbers, but each rank holds the weights of its whole pipeline stage (2 bytes a parameter "
    "in half precision, 4 in fp32); if they don't fit, split the model over more stages"
)
_STAGE_3 = "stage 3 trains as stage 2, which neither gathers nor releases weights"
_NO_DEVICE = ("device", ("none", None))
_KNOWN = {
    **known(
        later={
            "the optimizer's state and the fp32 masters stay on the device: 12 bytes a parameter for Adam, divided by the "
            "data-parallel ranks from stage 1 on": "offload_optimizer"
        },
        keys="device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload "
        "cpuadam_cores_perc",
        switch=_NO_DEVICE,
    ),
    **known(
        later={"weights stay on the device: each rank holds those of its whole pipeline stage": "offload_param"},
        keys="device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
        switch=_NO_DEVICE,
    ),
    **known(
        later={
            "the optimizer's state stays on the device": "cpu_offload",
            "weights stay on the device": "cpu_offload_param",
        },
        refused={
            "weights and gradients are never quantized": "zero_quantized_weights zero_quantized_nontrainable_weights "
            "zero_quantized_gradients zeropp_loco_param",
            "every gradient is applied in the step it belongs to": "zenflow",
        },
        without_effect={
            "nothing is offloaded": "cpu_offload_use_pin_memory sub_group_size",
            "buckets have a layout of their own": "round_robin_gradients parameter_alignment legacy_stage1",
            "checkpoints load into any layout": "elastic_checkpoint load_from_fp32_weights "
            "pipeline_loading_checkpoint stage3_gather_16bit_weights_on_model_save "
            "stage3_gather_fp16_weights_on_model_save",
            _STAGE_3: "stage3_allgather_sequential stage3_max_live_parameters stage3_max_reuse_distance "
            "stage3_model_persistence_threshold stage3_module_granularity_threshold stage3_param_persistence_threshold "
            "stage3_partition_stream_chunk_size stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params "
            "zero_hpz_partition_size mics_shard_size mics_hierarchical_params_gather memory_efficient_linear "
            "override_module_apply log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory",
        },
    ),
    **known(
        without_effect={
            "buckets are contiguous, reduce-scattered during the backward, with the norm": "contiguous_gradients "
            "reduce_scatter overlap_comm allgather_partitions compute_grad_norm use_multi_rank_bucket_allreduce",
            "a parameter that got no gradient is left alone, as PyTorch does": "ignore_unused_parameters",
        },
        same=(True,),
    ),
    **known(without_effect={_STAGE_3: "leaf_module"}, keys="classes names name_suffixes"),
}


class ZeroConfig(Section):
    """Partitioning over the data-parallel ranks, and the buckets of gradients."""

    known_keys = _KNOWN
    unset_by_auto = frozenset({"reduce_per_micro_batch", "reduce_bucket_size", "allgather_bucket_size"})

    stage: NonNegative = key(0, "0, 1, 2 or 3", differs="stage 3 trains as stage 2, with a warning", le=3)
    reduce_bucket_size: Positive = key(500_000_000, "a whole number of elements >= 1, such as 5e8")
    allgather_bucket_size: Positive = key(500_000_000, "a whole number of elements >= 1, such as 5e8")
    reduce_per_micro_batch: bool | Literal["auto"] = own_key("auto", 'true, false or "auto"')

    @property
    def effective_stage(self) -> int:
        """The stage that runs: 3 trains as 2."""
        return min(self.stage, 2)

    @model_validator(mode="after")
    def _consistent(self) -> ZeroConfig:
        if self.reduce_per_micro_batch is True and self.stage < 2:
            raise ValueError(
                f"reduce_per_micro_batch needs partitioned gradients, but stage is {self.stage}; set stage to 2, or "
                'reduce_per_micro_batch to "auto"'
            )
        return self
