"""`p3d config`: what it says is what load and initialize do."""

import json
import re
from pathlib import Path

import pytest
from user_configs import AUTO, FOLDER

from parallel3d.cli import main
from parallel3d.cli.config import explain, keys_as_markdown
from parallel3d.config import Config, load, read
from parallel3d.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs"


def test_every_value_in_force_has_its_origin():
    raw = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        "data_types": {"grad_accum_dtype": "bfloat16"},
    }
    explanation = explain(read(raw, {"optimizer.params.lr": 0.1}), world=8, pipe=2)
    found = {value.path: (value.value, value.why) for value in explanation.values}
    expected = {
        "train_batch_size": (32, "derived"),
        "train_micro_batch_size_per_gpu": (4, "given"),
        "gradient_accumulation_steps": (2, "given"),
        "optimizer.type": ("AdamW", "given"),
        "optimizer.params.lr": (0.1, "filled by auto"),
        "optimizer.params.eps": (1e-6, "given"),
        "scheduler.params.warmup_max_lr": (0.1, "filled from optimizer.params.lr"),
        "bf16.enabled": (True, "given"),
        "fp16.enabled": (False, "default"),
        "zero_optimization.stage": (3, "given"),
        "zero_optimization.reduce_bucket_size": (500_000_000, "default"),
        "data_types.grad_accum_dtype": ("bf16", "given"),
        "communication_data_type": ("bf16", "derived"),
        "pipeline.stages": (2, "derived"),
        "pipeline.partition": (None, "argument of PipelineModule"),
        "seed": (1234, "default"),
    }
    assert expected.items() <= found.items()
    assert "fp16.loss_scale" not in found, "values of a section that is off are not in force"
    assert (explanation.pipe, explanation.data, explanation.model) == (2, 4, 1)


def test_all_that_is_left_out_is_there_with_its_reason():
    raw = {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_size": 1e8},
            "overlap_comm": True,
            "cpu_offload_use_pin_memory": True,
        },
        "nebula": {"enabled": True},
    }
    whys = {item.path: item.why for item in explain(read(raw), world=1).left_out}
    assert list(whys) == [
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.cpu_offload_use_pin_memory",
        "nebula",
        "zero_optimization.overlap_comm",
    ]
    size = whys["zero_optimization.offload_param.buffer_size"]
    assert size == "without effect: buffers have the size of the largest shard"
    assert whys["zero_optimization.cpu_offload_use_pin_memory"].startswith(
        "without effect: offload_optimizer.pin_memory"
    )
    assert whys["zero_optimization.overlap_comm"] == "in effect already"


@pytest.mark.parametrize(
    ("raw", "world", "pipe", "part"),
    [
        (
            {"train_batch_size": 8},
            6,
            4,
            "6 ranks can't be 4 stages x 1 tensor-parallel ranks x dp; give a multiple of 4 ranks",
        ),
        ({"train_batch_size": 8, "pipeline": {"stages": 2}}, 4, 4, "--pp is 4, but pipeline.stages is 2"),
        (
            {"train_batch_size": 8, "tensor_parallel": {"size": 3}},
            4,
            None,
            "4 ranks can't be 1 stages x 3 tensor-parallel ranks x dp; give a multiple of 3 ranks",
        ),
        ({"train_batch_size": 7}, 4, 2, "7 is not a multiple of 2. Set train_batch_size to 6 or 8."),
    ],
)
def test_a_world_that_does_not_fit_is_refused(raw, world, pipe, part):
    with pytest.raises(ConfigError, match=re.escape(part)):
        explain(read(raw), world, pipe)


@pytest.mark.parametrize(
    ("name", "world", "more", "equation"),
    [
        ("auto_dict_stage2.json", 6, {"train_batch_size": 48}, "48 = 8 x 1 x 6"),
        ("zero2_adamw_cosine_wandb.json", 1, {}, "144 = 24 x 6 x 1"),
        ("zero2_offload_comments.json", 4, {}, "256 = 16 x 4 x 4"),
        ("zero3_offload_auto_bf16.json", 6, {"train_micro_batch_size_per_gpu": 2}, "12 = 2 x 1 x 6"),
        ("zero3_offload_fp16.json", 24, {}, "24 = 1 x 1 x 24"),
    ],
)
def test_the_command_explains_a_users_file(capsys, monkeypatch, name, world, more, equation):
    monkeypatch.setenv("COLUMNS", "200")
    autos = dict(_leaves(AUTO[name] | more, ""))
    arguments = [f"--auto={path}={json.dumps(value)}" for path, value in autos.items()]
    assert main(["config", str(FOLDER / name), "--world", str(world), *arguments]) == 0
    printed = capsys.readouterr().out
    assert f"world = tp x pp x dp = 1 x 1 x {world} = {world} ranks" in printed
    assert equation in printed
    for path in autos:
        assert re.search(rf"{re.escape(path)} .*filled by auto", printed)


def _leaves(tree, path):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "give a configuration file and --world N"),
        (["no.json"], "no file no.json"),
        ([str(FOLDER / "zero2_adamw_cosine_wandb.json")], "can be read; give --world N"),
        (
            ["c.json", "--world", "1", "--auto", "lr"],
            "--auto is 'lr'; give KEY=VALUE, such as optimizer.params.lr=1e-4",
        ),
        (["c.json", "--world", "1", "--auto", "lr=[1"], "--auto lr=[1, line 1"),
    ],
)
def test_a_wrong_command_says_what_to_give(capsys, arguments, part):
    assert main(["config", *arguments]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({"optimizer": {"type": "Adamm"}}, "Did you mean 'Adam'?"),
        ({"optimizer": {"type": "Adam", "params": {"bettas": [0.9, 0.95]}}}, "Did you mean 'betas'?"),
        ({"scheduler": {"type": "WarmupLRR"}}, "Did you mean 'WarmupLR'?"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}}, ""),
    ],
)
def test_the_command_knows_what_initialize_refuses(capsys, tmp_path, section, part):
    (tmp_path / "c.json").write_text(json.dumps({"train_batch_size": 8, **section}))
    assert main(["config", str(tmp_path / "c.json"), "--world", "1"]) == (2 if part else 0)
    assert part in capsys.readouterr().err


def test_the_documented_table_is_the_schemas():
    assert (DOCS / "configuration_keys.md").read_text(encoding="utf-8") == keys_as_markdown(), (
        "run: p3d config --keys > docs/configuration_keys.md"
    )


def test_the_command_prints_table_and_schema(capsys):
    assert main(["config", "--keys"]) == 0
    assert capsys.readouterr().out == keys_as_markdown()
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == Config.model_json_schema()


def test_the_schema_allows_what_loads_and_says_what_to_give():
    schema = Config.model_json_schema()
    section = {name: schema["$defs"][definition]["properties"] for name, definition in [("fp16", "Fp16Config")]}
    assert section["fp16"]["loss_scale"]["default"] == 0.0
    assert {"const": "auto"} in section["fp16"]["enabled"]["anyOf"]
    assert schema["properties"]["bfloat16"]["deprecated"]
    assert {"type": "boolean"} in schema["properties"]["zero_optimization"]["anyOf"]
    for name in AUTO:
        assert set(read(FOLDER / name, AUTO[name]).given) <= set(schema["properties"])
    assert not schema["additionalProperties"]


# What DeepSpeed's documentation and 0.19.8's source name, by section; "" is the top level.
DEEPSPEED = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation optimizer "
    "scheduler communication_data_type seq_parallel_communication_data_type gradient_allreduce_op prescale_gradients "
    "gradient_predivide_factor sparse_gradients fp16 bf16 bfloat16 amp torch_autocast gradient_clipping zero_optimization "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio tensor_parallel hybrid_engine expert_parallel "
    "disable_python_gc steps_per_print wall_clock_breakdown memory_breakdown dump_state autotuning flops_profiler "
    "activation_checkpointing data_efficiency curriculum_learning tensorboard wandb comet csv_monitor comms_logger checkpoint "
    "compile data_types pipeline elasticity eigenvalue progressive_layer_drop quantize_training compression_training "
    "sparse_attention nebula datastates_ckpt weight_quantization timers log_level vocabulary_size dataloader_drop_last "
    "disable_allgather use_data_before_expert_parallelism graph_harvesting sequence_parallel_size",
    "optimizer": "type params legacy_fusion",
    "scheduler": "type params",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "amp": "enabled opt_level",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
    "activation_checkpointing": "partition_activations number_checkpoints contiguous_memory_optimization "
    "synchronize_checkpoint_boundary profile cpu_checkpointing",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
    "allgather_partitions allgather_bucket_size overlap_comm compute_grad_norm load_from_fp32_weights elastic_checkpoint "
    "offload_param offload_optimizer zenflow sub_group_size cpu_offload_param cpu_offload_use_pin_memory cpu_offload "
    "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
    "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters legacy_stage1 round_robin_gradients "
    "parameter_alignment zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
    "log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module mics_shard_size "
    "mics_hierarchical_params_gather zeropp_loco_param",
    "zero_optimization.offload_param": "device nvme_path pin_memory buffer_count buffer_size max_in_cpu",
    "zero_optimization.offload_optimizer": "device nvme_path pin_memory ratio buffer_count fast_init pipeline_read "
    "pipeline_write super_offload cpuadam_cores_perc",
    "aio": "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
    "tensorboard": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "comet": "enabled workspace project samples_log_interval experiment_name api_key experiment_key online mode",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
    "flops_profiler": "enabled profile_step module_depth top_modules detailed output_file",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write",
    "tensor_parallel": "autotp_size preset_model tp_overlap_comm vocab_parallel_lm_head partition_config",
    "autotuning": "enabled results_dir exps_dir overwrite metric start_profile_step end_profile_step fast max_train_batch_size "
    "mp_size num_tuning_micro_batch_sizes tuner_type tuner_early_stopping tuner_num_trials arg_mappings",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section", DEEPSPEED, ids=lambda name: name or "top level")
def test_every_key_of_deepspeeds_is_known(section):
    """A key may be refused for its value or as unsupported, but never as unknown; a misspelled one is unknown."""
    for key in DEEPSPEED[section].split():
        for name, unknown in ((key, False), (f"{key}_x", True)):
            raw = {name: "some value"}
            for outer in reversed(section.split(".") if section else []):
                raw = {outer: raw}
            try:
                load(raw)
                message = ""
            except ConfigError as error:
                message = str(error)
            assert ("unknown key" in message) == unknown, (name, message)
