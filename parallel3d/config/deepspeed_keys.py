"""DeepSpeed's top-level keys that no field holds, and what each means here."""

from parallel3d.config.section import known

_MONITOR = "monitors are not yet supported; the progress is printed every steps_per_print steps"

TOP_LEVEL = {
    **known(without_effect={_MONITOR: "tensorboard csv_monitor"}, keys="enabled output_path job_name"),
    **known(without_effect={_MONITOR: "wandb"}, keys="enabled group team project"),
    **known(
        without_effect={_MONITOR: "comet"},
        keys="enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
    **known(
        later={"engine.reports.profile_next_batch() records when each instruction runs": "flops_profiler"},
        keys="enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    **known(
        later={"engine.reports.profile_next_batch() records when each transfer runs": "comms_logger"},
        keys="enabled verbose prof_all debug prof_ops",
    ),
    **known(
        later={"the batch sizes and ZeRO stage that are written are used": "autotuning"},
        keys="enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
        "tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size min_train_batch_size "
        "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu num_tuning_micro_batch_sizes mp_size "
        "model_info model_info_path",
    ),
    **known(without_effect={"throughput is measured without synchronizing": "timers"}, keys="throughput"),
    **known(
        without_effect={"nothing is read from or written to NVMe": "aio"},
        keys="block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
        switch=("", ()),
    ),
    **known(
        without_effect={
            "Python's logging module sets the level": "log_level",
            "checkpoint.async_save writes while training goes on": "nebula datastates datastates_ckpt",
            "gradients are reduced dense, to the same sums": "sparse_gradients",
            "the collectives are chosen by the ZeRO stage": "disable_allgather",
            "experts are not yet distributed": "use_data_before_expert_parallelism",
            "no graph of a step is captured": "graph_harvesting",
            "Python's garbage collector is left alone": "disable_python_gc",
            "optimizers run where the parameters are": "zero_force_ds_cpu_optimizer",
            "only DeepSpeed's warning about its alignment reads it": "vocabulary_size",
            "bucket sizes stand in zero_optimization": "allgather_size",
        },
        refused={
            "experts are not yet distributed": "expert_parallel",
            "batch sizes are not searched for: give them, and elastic for fewer ranks": "elasticity",
            "an engine trains, but doesn't generate": "hybrid_engine",
            "the model is trained as it is written": "compression_training quantize_training weight_quantization eigenvalue "
            "progressive_layer_drop sparse_attention",
            "samples are dealt whole and in the loader's order": "curriculum_learning data_efficiency",
        },
    ),
    # Keys for which some values ask for what is done anyway.
    **known(
        without_effect={
            "gradients are divided before they are summed, by the weight of each loss": "prescale_gradients "
            "gradient_predivide_factor"
        },
        same=(1, False),
    ),
    **known(refused={"gradients are averaged over the batch": "gradient_allreduce_op"}, same=("mean",)),
    **known(
        refused={
            "micro-batches are counted: call engine.step() after each, or train_batch": "managed_gradient_accumulation"
        },
        same=(True,),
    ),
    **known(
        without_effect={
            "there is no sequence parallelism yet": "seq_parallel_communication_data_type seq_parallel_comm_data_type"
        },
        same=("fp32",),
    ),
    **known(
        refused={
            "tensor_parallel.sequence_parallel shares the sequences of norms; attention is not yet cut along "
            "them": "sequence_parallel_size"
        },
        same=(1,),
    ),
}
