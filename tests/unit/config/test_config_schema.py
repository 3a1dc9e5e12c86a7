import copy
import pickle
import warnings

import pytest
from pydantic import ValidationError

from parallel3d.config import (
    ActivationCheckpointingConfig,
    Bf16Config,
    Config,
    Fp16Config,
    PipelineConfig,
    ZeroConfig,
    load,
)
from parallel3d.config.precision import AmpConfig, TorchAutocastConfig
from parallel3d.config.schema import OptimizerConfig, SchedulerConfig


def test_defaults_are_deepspeeds():
    config = load({})
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (
        None,
        None,
        None,
    )
    assert (config.gradient_clipping, config.steps_per_print, config.seed) == (0.0, 10, 1234)
    assert (config.dataloader_drop_last, config.optimizer) == (False, None)
    assert config.zero_optimization == ZeroConfig(stage=0, reduce_bucket_size=500_000_000)
    assert config.pipeline == PipelineConfig(
        stages=None,
        schedule="1f1b",
        num_chunks=None,
        placement=None,
        partition=None,
        activation_checkpoint_interval=None,
        shapes="static",
        seed_layers=None,
    )


def test_every_section_is_read():
    config = load(
        {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8.0,
            "gradient_clipping": 1,
            "seed": 0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
            "zero_optimization": {"reduce_bucket_size": 5e8},
            "dataloader_drop_last": True,
            "pipeline": {
                "stages": 2,
                "schedule": "interleaved",
                "num_chunks": 3,
                "placement": "loop",
                "partition": "type:Block",
                "activation_checkpoint_interval": 1,
                "shapes": "dynamic",
                "seed_layers": True,
            },
        }
    )
    assert config.gradient_accumulation_steps == 8
    assert config.gradient_clipping == 1.0
    assert config.optimizer == OptimizerConfig(type="AdamW", params={"lr": 1e-3, "betas": [0.9, 0.95]})
    assert dict(**config.optimizer.params) == {"lr": 1e-3, "betas": (0.9, 0.95)}
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert (config.pipeline.schedule, config.pipeline.num_chunks, config.pipeline.placement) == (
        "interleaved",
        3,
        "loop",
    )
    assert (config.pipeline.partition, config.pipeline.activation_checkpoint_interval) == ("type:Block", 1)


@pytest.mark.parametrize(
    "pipeline",
    [
        {"schedule": "interleaved", "num_chunks": 1},
        {"schedule": "gpipe", "num_chunks": 2, "placement": "v"},
        {"schedule": "zbv", "num_chunks": 2, "placement": "v"},
        {"schedule": "zbv"},
        {"schedule": "zb-looped", "num_chunks": 4, "max_in_flight": 2},
        {"schedule": "auto", "max_in_flight": 1.5, "plan": "plan.json"},
        {"schedule": [["F0@0", "B0@0"], ["F0@1", "B0@1"]], "stages": 2},
        {"schedule": [["F0@0", "B0@0"], []]},
        {"partition": [0, 3, 8]},
        {"partition": {"weights": [1, 2.5, 0]}},
        {"activation_checkpoint_interval": 0},
    ],
)
def test_accepted_pipelines(pipeline):
    load({"pipeline": pipeline})


def test_lists_of_a_users_schedule_and_bounds_become_tuples():
    pipeline = load({"pipeline": {"schedule": [["F0@0"], ["F0@1"]], "partition": [0, 1.0, 2]}}).pipeline
    assert pipeline.schedule == (("F0@0",), ("F0@1",))
    assert pipeline.partition == (0, 1, 2)


def test_a_config_is_immutable_through_and_through():
    raw = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.9], "foreach": {"x": [1]}}},
        "pipeline": {"partition": {"weights": [1, 2]}},
    }
    config = load(raw)
    before = copy.deepcopy(config)
    raw["optimizer"]["params"]["betas"].append(0.5)
    raw["pipeline"]["partition"]["weights"].clear()
    assert config == before
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 2
    with pytest.raises(ValidationError, match="frozen"):
        config.pipeline.stages = 2
    with pytest.raises(TypeError):
        config.optimizer.params["lr"] = 1
    assert len({config, before}) == 1


def test_a_config_survives_pickling():
    config = load({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "betas": [0.9]}}, "seed": 5})
    assert pickle.loads(pickle.dumps(config)) == config


def test_direct_construction_is_checked_too():
    with pytest.raises(ValidationError):
        Config(zero_optimization=ZeroConfig(stage=4))
    with pytest.raises(ValidationError):
        PipelineConfig(num_chunks=2)


def test_defaults_of_precision_are_deepspeeds_but_for_two():
    config = load({"fp16": {"enabled": True}})
    assert config.fp16 == Fp16Config(
        enabled=True,
        auto_cast=True,  # DeepSpeed's: false
        loss_scale=0.0,
        initial_scale_power=16,
        loss_scale_window=1000,
        hysteresis=2,
        consecutive_hysteresis=False,
        min_loss_scale=1.0,
    )
    assert config.bf16 == Bf16Config(
        enabled=False, auto_cast=True, check_grad_overflow=False
    )  # the last is true in DeepSpeed
    assert config.torch_autocast == TorchAutocastConfig(enabled=False, dtype="bf16")
    assert config.amp == AmpConfig(enabled=False, opt_level="O1")
    assert config.activation_checkpointing == ActivationCheckpointingConfig(
        partition_activations=False,
        contiguous_memory_optimization=False,
        cpu_checkpointing=False,
        number_checkpoints=None,
        synchronize_checkpoint_boundary=False,
        profile=False,
    )
    assert (config.wall_clock_breakdown, config.memory_breakdown, config.dump_state) == (False, False, False)
    assert config.scheduler is None


@pytest.mark.parametrize(
    ("raw", "section", "expected"),
    [
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 5e2, "min_loss_scale": 1e-5}},
            "fp16",
            Fp16Config(enabled=True, loss_scale=128.0, loss_scale_window=500, min_loss_scale=1e-5),
        ),
        ({"bfloat16": {"enabled": True}}, "bf16", Bf16Config(enabled=True)),
        ({"amp": {"enabled": True, "opt_level": "O2"}}, "amp", AmpConfig(enabled=True, opt_level="O2")),
        (
            {
                "torch_autocast": {
                    "enabled": True,
                    "dtype": "float16",
                }
            },
            "torch_autocast",
            TorchAutocastConfig(enabled=True, dtype="fp16"),
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 10}}},
            "scheduler",
            SchedulerConfig(type="WarmupLR", params={"warmup_min_lr": 0, "warmup_num_steps": 10}),
        ),
        ({"zero_optimization": True}, "zero_optimization", ZeroConfig(stage=1)),
        ({"zero_optimization": False}, "zero_optimization", ZeroConfig(stage=0)),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4}},
            "activation_checkpointing",
            ActivationCheckpointingConfig(cpu_checkpointing=True, number_checkpoints=4),
        ),
    ],
)
def test_sections_of_deepspeed_are_read(raw, section, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert getattr(load(raw), section) == expected


@pytest.mark.parametrize(
    ("given", "read"),
    [("fp16", "fp16"), ("BF16", "bf16"), ("float32", "fp32"), ("torch.bfloat16", "bf16"), ("half", "fp16")],
)
def test_dtypes_have_deepspeeds_names(given, read):
    config = load({"communication_data_type": given, "data_types": {"grad_accum_dtype": given}})
    assert (config.communication_data_type, config.data_types.grad_accum_dtype) == (read, read)


def test_limits_of_stage_3_are_left_open_unless_they_are_given():
    keys = ["stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size"]
    found = load({"zero_optimization": dict.fromkeys([*keys, "stage3_param_persistence_threshold"], "auto")})
    assert found == load({})
    assert [getattr(found.zero_optimization, key) for key in keys] == ["auto"] * 3
    assert found.zero_optimization.stage3_param_persistence_threshold == 10**5
    assert load({"zero_optimization": {"stage3_max_live_parameters": 1e7}}).zero_optimization == ZeroConfig(
        stage3_max_live_parameters=10_000_000
    )
