import copy
import pickle

import pytest
from pydantic import ValidationError

from parallel3d.config import Config, OptimizerConfig, PipelineConfig, ZeroConfig, load
from parallel3d.errors import ConfigError


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
        Config(zero_optimization=ZeroConfig(stage=3))
    with pytest.raises(ValidationError):
        PipelineConfig(num_chunks=2)


WRONG = [
    # unknown keys
    ({"gradient_clipp1ng": 1.0}, "unknown key 'gradient_clipp1ng'. Did you mean 'gradient_clipping'?"),
    ({"pipeline": {"scedule": "1f1b"}}, "unknown key 'pipeline.scedule'. Did you mean 'schedule'?"),
    ({"micro_batch_size_per_gpu": 1}, "Did you mean 'train_micro_batch_size_per_gpu'?"),
    ({"zero_optimisation": {"stage": 0}}, "Did you mean 'zero_optimization'?"),
    ({"zero_optimization": {"stages": 0}}, "unknown key 'zero_optimization.stages'"),
    ({"zero_optimization": {"stage3_max_live_params": 1}}, "Did you mean 'stage3_max_live_parameters'?"),
    ({"tensorbord": {}}, "Did you mean 'tensorboard'?"),
    ({"optimizer": {"type": "SGD", "parms": {}}}, "unknown key 'optimizer.parms'. Did you mean 'params'?"),
    ({"optimizer": {"type": "Adam", "lr": 1e-3}}, "unknown key 'optimizer.lr'. Known here: type, params."),
    ({"fp16": {"enabled": False, "loss_scal": 0}}, "unknown key 'fp16.loss_scal'. Did you mean 'loss_scale'?"),
    ({"num_chunks": 2}, "unknown key 'num_chunks'. Did you mean 'pipeline.num_chunks'?"),
    ({"pipeline": {"gradient_clipping": 1}}, "unknown key 'pipeline.gradient_clipping'. It belongs at the top level."),
    ({3: 4}, "unknown key '3'. Known here: train_batch_size"),
    # wrong values
    ({"train_batch_size": 0}, "train_batch_size is 0: give a whole number >= 1"),
    ({"train_batch_size": "32"}, "train_batch_size is '32': give a whole number"),
    ({"train_micro_batch_size_per_gpu": 1.5}, "train_micro_batch_size_per_gpu is 1.5"),
    ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps is True"),
    ({"gradient_clipping": -1}, "gradient_clipping is -1: give a number >= 0, where 0 turns clipping off"),
    ({"gradient_clipping": float("nan")}, "gradient_clipping is nan"),
    ({"gradient_clipping": None}, "gradient_clipping is None: give a number"),
    ({"steps_per_print": 0}, "steps_per_print is 0: give a whole number of steps >= 1, or null"),
    ({"seed": -3}, "seed is -3"),
    ({"optimizer": "AdamW"}, 'optimizer is \'AdamW\': give a mapping {"type": ..., "params": {...}}'),
    ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing: give the name of an optimizer"),
    ({"optimizer": {"type": ""}}, "optimizer.type is ''"),
    ({"optimizer": {"type": "SGD", "params": [0.1]}}, "optimizer.params is [0.1]: give a mapping"),
    ({"zero_optimization": True}, 'zero_optimization is True: give a mapping {"stage": 0}'),
    ({"zero_optimization": {"reduce_bucket_size": 0}}, "zero_optimization.reduce_bucket_size is 0"),
    ({"zero_optimization": {"reduce_bucket_size": 1.5e-3}}, "such as 5e8"),
    ({"dataloader_drop_last": "yes"}, "dataloader_drop_last is 'yes': give true or false"),
    ({"dataloader_drop_last": 1}, "dataloader_drop_last is 1: give true or false"),
    ({"pipeline": "1f1b"}, "pipeline is '1f1b': give a mapping"),
    ({"pipeline": {"stages": 0}}, "pipeline.stages is 0"),
    ({"pipeline": {"schedule": "1F1B"}}, "Did you mean '1f1b'?"),
    ({"pipeline": {"schedule": "gpip"}}, "Did you mean 'gpipe'?"),
    (
        {"pipeline": {"schedule": []}},
        'pipeline.schedule is []: give "1f1b", "gpipe", "interleaved", "zb-h1", "zbv", "zb-lo',
    ),
    ({"pipeline": {"schedule": "zb-v"}}, "Did you mean 'zbv'?"),
    ({"pipeline": {"schedule": ["F0@0"]}}, "its list of instructions"),
    ({"pipeline": {"schedule": [["F0@0", 3]]}}, "its list of instructions"),
    ({"pipeline": {"num_chunks": 0}}, "pipeline.num_chunks is 0: give a whole number of chunks a stage >= 1"),
    ({"pipeline": {"placement": "w"}}, 'pipeline.placement is \'w\': give "loop" or "v"'),
    ({"pipeline": {"partition": ""}}, "pipeline.partition is '': give \"uniform\""),
    ({"pipeline": {"partition": [0, 2.5]}}, "pipeline.partition is [0, 2.5]: give"),
    ({"pipeline": {"partition": {"weight": [1]}}}, '{"weights": [one number a layer]}'),
    ({"pipeline": {"partition": {"weights": ["1"]}}}, '{"weights": [one number a layer]}'),
    ({"pipeline": {"activation_checkpoint_interval": -1}}, "where 0 recomputes nothing"),
    ({"pipeline": {"shapes": "fixed"}}, 'pipeline.shapes is \'fixed\': give "static" or "dynamic"'),
    # contradictions
    ({"pipeline": {"num_chunks": 2}}, 'num_chunks is 2; set schedule to "interleaved" or "gpipe", or num_chunks to 1'),
    (
        {"pipeline": {"schedule": "gpipe", "num_chunks": 1, "placement": "v"}},
        'num_chunks is 1; set num_chunks to 2, or placement to "loop"',
    ),
    (
        {"pipeline": {"schedule": "interleaved", "num_chunks": 2, "placement": "v"}},
        'schedule "interleaved" needs placement "loop"',
    ),
    (
        {"pipeline": {"schedule": "zb-h1", "num_chunks": 2}},
        'schedule "zb-h1" runs 1 chunk a stage, but num_chunks is 2; set schedule to "zb-looped", or num_chunks to 1',
    ),
    (
        {"pipeline": {"schedule": "zbv", "num_chunks": 2, "placement": "loop"}},
        "needs num_chunks 2 and placement \"v\", but num_chunks is 2 and placement is 'loop'; set both",
    ),
    ({"pipeline": {"schedule": "zbv", "num_chunks": 3}}, 'needs num_chunks 2 and placement "v", but num_chunks is 3'),
    (
        {"pipeline": {"schedule": "zb-looped", "placement": "v"}},
        'needs placement "loop"; set that, or schedule to "zbv"',
    ),
    ({"pipeline": {"schedule": "zbv", "max_in_flight": 2}}, 'max_in_flight bounds schedule "zb-looped"'),
    ({"pipeline": {"schedule": "zb-looped", "max_in_flight": 0}}, "pipeline.max_in_flight is 0: give a number > 0"),
    ({"pipeline": {"schedule": [["F0@0"]], "stages": 2}}, "for 1 stages, but stages is 2; give one list a stage"),
    # not yet supported
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler is not yet supported"),
    ({"fp16": {"enabled": True}}, "fp16.enabled is True: not yet supported; set it to false"),
    ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3: not yet supported; set stage to 0, 1 or 2"),
    ({"zero_optimization": {"stage": 1, "reduce_per_micro_batch": True}}, "but stage is 1; set stage to 2"),
    ({"amp": {"enabled": True}}, "amp is not yet supported, and without it the results would differ: remove it or set"),
    ({"amp": {"opt_level": "O1"}}, "amp is not yet supported"),
    ({"elasticity": {"enabled": True}}, "set elasticity.enabled to false"),
    ({"communication_data_type": "fp16"}, 'communication_data_type is \'fp16\': give "fp32" or "bf16"'),
    ({"gradient_allreduce_op": "sum"}, "remove it or set it to 'mean'"),
    # "auto"
    ({"gradient_clipping": "auto"}, 'gradient_clipping is "auto", which nothing fills in: give a number >= 0'),
    ({"bf16": {"enabled": "auto"}}, 'bf16.enabled is "auto"'),
    ({"zero_optimization": {"reduce_bucket_size": "auto"}}, "leave the key out for the default, 500000000"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, 'optimizer.params.lr is "auto"'),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, "auto"]}}}, 'optimizer.params.betas[1] is "auto"'),
]


@pytest.mark.parametrize(("raw", "part"), WRONG)
def test_a_wrong_configuration_is_refused_with_its_key_and_a_remedy(raw, part):
    with pytest.raises(ConfigError) as caught:
        load(raw)
    assert part in str(caught.value)
    assert "problems" not in str(caught.value)
