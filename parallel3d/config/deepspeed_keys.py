"""DeepSpeed's top-level keys that no field holds, and what each means here."""

from __future__ import annotations

from collections.abc import Mapping

from parallel3d.config.section import KnownKey, Support, known

_MONITOR = "monitors are not yet supported; the progress is printed every steps_per_print steps"
_ANY_VALUE: tuple[str, tuple[object, ...]] = ("", ())

_MONITORS = {
    **known(Support.WITHOUT_EFFECT, _MONITOR, "tensorboard csv_monitor", keys=("enabled", "output_path", "job_name")),
    **known(Support.WITHOUT_EFFECT, _MONITOR, "wandb", keys=("enabled", "group", "team", "project")),
    **known(
        Support.WITHOUT_EFFECT,
        _MONITOR,
        "comet",
        keys=tuple(
            "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode".split()
        ),
    ),
}
_PROFILING = {
    **known(
        Support.LATER,
        "engine.reports.profile_next_batch() records when each instruction runs",
        "flops_profiler",
        keys=tuple("enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file".split()),
    ),
    **known(
        Support.LATER,
        "engine.reports.profile_next_batch() records when each transfer runs",
        "comms_logger",
        keys=("enabled", "verbose", "prof_all", "debug", "prof_ops"),
    ),
    **known(
        Support.LATER,
        "the batch sizes and ZeRO stage that are written are used",
        "autotuning",
        keys=tuple(
            "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path tuner_type "
            "tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
            "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size "
            "model_info model_info_path".split()
        ),
    ),
    **known(Support.WITHOUT_EFFECT, "throughput is measured without synchronizing", "timers", keys=("throughput",)),
    **known(Support.WITHOUT_EFFECT, "Python's logging module sets the level", "log_level"),
}
_STORAGE = {
    **known(
        Support.WITHOUT_EFFECT,
        "checkpoint.async_save writes while training goes on",
        "nebula datastates datastates_ckpt",
    ),
    **known(
        Support.WITHOUT_EFFECT,
        "nothing is read from or written to NVMe",
        "aio",
        keys=tuple(
            "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds".split()
        ),
        switch=_ANY_VALUE,
    ),
}
_REDUCTIONS = {
    **known(
        Support.WITHOUT_EFFECT,
        "gradients are always divided before they are summed, by the weight of each loss",
        "prescale_gradients gradient_predivide_factor",
        same=(1, False),
    ),
    **known(Support.REFUSED, "gradients are averaged over the batch", "gradient_allreduce_op", same=("mean",)),
    **known(Support.WITHOUT_EFFECT, "gradients are reduced dense, to the same sums", "sparse_gradients"),
    **known(Support.WITHOUT_EFFECT, "the collectives are chosen by the ZeRO stage", "disable_allgather"),
    **known(
        Support.REFUSED,
        "the engine counts micro-batches: call engine.step() after each, or train_batch",
        "managed_gradient_accumulation",
        same=(True,),
    ),
    **known(
        Support.WITHOUT_EFFECT,
        "there is no sequence parallelism yet",
        "seq_parallel_communication_data_type seq_parallel_comm_data_type",
        same=("fp32",),
    ),
}
_PARALLELISM = {
    **known(
        Support.REFUSED,
        "tensor_parallel.sequence_parallel shares the sequences of norms; attention is not yet cut along them",
        "sequence_parallel_size",
        same=(1,),
    ),
    **known(Support.REFUSED, "experts are not yet distributed", "expert_parallel"),
    **known(Support.WITHOUT_EFFECT, "experts are not yet distributed", "use_data_before_expert_parallelism"),
    **known(
        Support.REFUSED,
        "batch sizes are not searched for: give them, and elastic for fewer ranks",
        "elasticity",
    ),
    **known(Support.REFUSED, "an engine trains, but doesn't generate", "hybrid_engine"),
}
_COMPRESSION = known(
    Support.REFUSED,
    "the model is trained as it is written",
    "compression_training quantize_training weight_quantization eigenvalue progressive_layer_drop sparse_attention",
)
_DATA = known(
    Support.REFUSED, "samples are dealt whole and in the loader's order", "curriculum_learning data_efficiency"
)
_HOST = {
    **known(Support.WITHOUT_EFFECT, "no graph of a step is captured", "graph_harvesting"),
    **known(Support.WITHOUT_EFFECT, "Python's garbage collector is left alone", "disable_python_gc"),
    **known(Support.WITHOUT_EFFECT, "optimizers run where the parameters are", "zero_force_ds_cpu_optimizer"),
    **known(Support.WITHOUT_EFFECT, "only DeepSpeed's warning about its alignment reads it", "vocabulary_size"),
    **known(Support.WITHOUT_EFFECT, "bucket sizes stand in zero_optimization", "allgather_size"),
}

TOP_LEVEL: Mapping[str, KnownKey] = {
    **_MONITORS,
    **_PROFILING,
    **_STORAGE,
    **_REDUCTIONS,
    **_PARALLELISM,
    **_COMPRESSION,
    **_DATA,
    **_HOST,
}
