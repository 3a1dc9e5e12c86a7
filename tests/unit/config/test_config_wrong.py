"""Wrong configurations, each with the error that its user needs: the key, its value, and the remedy."""

import pytest

from parallel3d.config import load
from parallel3d.errors import ConfigError

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
    ({"zero": {"stage": 2}}, "unknown key 'zero'. Did you mean 'zero_optimization'?"),
    ({"micro_batch_size": 2}, "unknown key 'micro_batch_size'. Did you mean 'train_micro_batch_size_per_gpu'?"),
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
    ({"optimizer": "AdamW"}, "optimizer is 'AdamW': give a mapping such as {\"type\": ...}"),
    ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing: give the name of an optimizer"),
    ({"optimizer": {"type": ""}}, "optimizer.type is ''"),
    ({"optimizer": {"type": "SGD", "params": [0.1]}}, "optimizer.params is [0.1]: give a mapping"),
    ({"zero_optimization": 2}, 'zero_optimization is 2: give a mapping such as {"stage": 0}'),
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
    ({"pipeline": {"partition": ""}}, "X"),
    ({"pipeline": {"partition": [0, 2.5]}}, "pipeline.partition is [0, 2.5]: give"),
    ({"pipeline": {"partition": {"weight": [1]}}}, '{"weights": [one number a layer]}'),
    ({"pipeline": {"partition": {"weights": ["1"]}}}, '{"weights": [one number a layer]}'),
    ({"pipeline": {"activation_checkpoint_interval": -1}}, "where 0 recomputes nothing"),
    ({"attention": {"backend": "cuddn"}}, "Did you mean 'cudnn'?"),
    (
        {"attention": {"backend": ["math", "fused"]}},
        'give "auto" for PyTorch\'s choice, or "cudnn", "flash", "efficient", "math" or a list of them',
    ),
    ({"attention": {"backend": []}}, "attention.backend is []"),
    ({"pipeline": {"shapes": "dynamik"}}, "Did you mean 'dynamic'?"),
    ({"fp16": 3}, 'fp16 is 3: give a mapping such as {"enabled": false}'),
    ({"fp16": "auto"}, 'fp16 is "auto", which nothing fills in: give a mapping such as {"enabled": false}, there'),
    ({"pipeline": {"shapes": "fixed"}}, 'pipeline.shapes is \'fixed\': give "static" or "dynamic"'),
    # contradictions
    (
        {"pipeline": {"num_chunks": 2}},
        'schedule "1f1b" needs num_chunks 1, but num_chunks is 2 and placement is None; set that, or schedule to "int',
    ),
    (
        {"pipeline": {"schedule": "gpipe", "num_chunks": 1, "placement": "v"}},
        "num_chunks is 1 and placement is 'v'; set num_chunks to 2, or placement to \"loop\"",
    ),
    (
        {"pipeline": {"schedule": "interleaved", "num_chunks": 2, "placement": "v"}},
        'schedule "interleaved" needs placement "loop"',
    ),
    (
        {"pipeline": {"schedule": "zb-h1", "num_chunks": 2}},
        'schedule "zb-h1" needs num_chunks 1, but num_chunks is 2 and placement is None; set that, or schedule to "zb-l',
    ),
    (
        {"pipeline": {"schedule": "zbv", "num_chunks": 2, "placement": "loop"}},
        "needs num_chunks 2 and placement \"v\", but num_chunks is 2 and placement is 'loop'; set that",
    ),
    ({"pipeline": {"schedule": "zbv", "num_chunks": 3}}, 'needs num_chunks 2 and placement "v", but num_chunks is 3'),
    (
        {"pipeline": {"schedule": "zb-looped", "placement": "v"}},
        'needs placement "loop", but num_chunks is None and placement is \'v\'; set that, or schedule to "zbv"',
    ),
    ({"pipeline": {"schedule": "zbv", "max_in_flight": 2}}, 'max_in_flight bounds schedules "zb-looped" and "auto"'),
    ({"pipeline": {"plan": "plan.json"}}, 'plan is the file of schedule "auto"; set schedule to that'),
    ({"pipeline": {"schedule": "zb-looped", "max_in_flight": 0}}, "pipeline.max_in_flight is 0: give a number > 0"),
    ({"pipeline": {"schedule": [["F0@0"]], "stages": 2}}, "for 1 stages, but stages is 2; give one list a stage"),
    # not yet supported
    ({"zero_optimization": {"stage": 1, "reduce_per_micro_batch": True}}, "but stage is 1; set stage to 2"),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "host_ratio": 0.5}}}, "host_ratio is 0.5, but only"),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/n", "step": "cpu"}}},
        "step is cpu, but state on nvme passes through the device",
    ),
    ({"elasticity": {"enabled": True}}, "set elasticity.enabled to false"),
    ({"gradient_allreduce_op": "max"}, 'gradient_allreduce_op is \'max\': give "mean" over the replicas, or "sum"'),
    # precision
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        "fp16 and bf16 are enabled at once; set enabled to false in all of them but one",
    ),
    ({"amp": {"enabled": True}, "bf16": {"enabled": True}}, "bf16 and amp are enabled at once"),
    ({"amp": {"enabled": True}, "torch_autocast": {"enabled": True}}, "torch_autocast and amp are enabled at once"),
    (
        {"bf16": {"enabled": False}, "bfloat16": {"enabled": True}},
        "bfloat16 is the old name of bf16, and both are given",
    ),
    ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale is -1: give a number >= 0, where 0 lets the scale adapt"),
    ({"fp16": {"loss_scale": True}}, "fp16.loss_scale is True: give a number"),
    (
        {"fp16": {"initial_scale_power": 200}},
        "fp16.initial_scale_power is 200: give a whole number of powers of two from 0",
    ),
    ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window is 0: give a whole number of steps >= 1"),
    ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis is 0: give a whole number of overflows >= 1"),
    ({"fp16": {"min_loss_scale": 0.0}}, "fp16.min_loss_scale is 0.0: give a number > 0, such as 1"),
    (
        {"fp16": {"fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads is not yet supported (masters, their gradients and the optimizer's state are kept "
        "in fp32",
    ),
    ({"bf16": {"bf16_optimizer_states": True}}, "bf16.bf16_optimizer_states is not yet supported"),
    ({"torch_autocast": {"dtype": "fp8"}}, 'torch_autocast.dtype is \'fp8\': give "bfloat16" or "float16"'),
    ({"torch_autocast": {"dtype": "float32"}}, "torch_autocast.dtype is 'float32': give"),
    ({"amp": {"opt_level": "o1"}}, 'amp.opt_level is \'o1\': give "O0", "O1", "O2" or "O3"'),
    ({"amp": {"optlevel": "O1"}}, "unknown key 'amp.optlevel'. Did you mean 'opt_level'?"),
    ({"communication_data_type": "int8"}, 'communication_data_type is \'int8\': give "fp32", "bf16" or "fp16"'),
    ({"data_types": {"param_dtype": "fp16"}}, "data_types.param_dtype is not yet supported (fp16 and bf16 choose"),
    # the optimizer and its schedule
    (
        {"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 0.5}}},
        "max_grad_norm is not an argument of an optimizer; set gradient_clipping to 0.5 at the top level instead",
    ),
    ({"scheduler": {"params": {}}}, 'scheduler.type is missing: give the name of a schedule, such as "WarmupLR"'),
    ({"scheduler": {"type": "WarmupLR", "param": {}}}, "unknown key 'scheduler.param'. Did you mean 'params'?"),
    ({"warmup_num_steps": 3}, "unknown key 'warmup_num_steps'."),
    # ZeRO and parallelism
    ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4: give 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is True: give 0, 1, 2 or 3"),
    (
        {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
        "unknown key 'zero_optimization.offload_optimizer.devise'. Did you mean 'device'?",
    ),
    ({"offload_param": {"device": "cpu"}}, "Did you mean 'zero_optimization.offload_param'?"),
    (
        {"zero_optimization": {"zero_quantized_gradients": True}},
        "zero_optimization.zero_quantized_gradients is not yet supported (weights and gradients are never quantized), and "
        "without it the results would differ: remove it",
    ),
    (
        {"tensor_parallel": {"autotp_size": -1}},
        "tensor_parallel.autotp_size is -1: give a whole number of ranks >= 0 over which",
    ),
    (
        {"tensor_parallel": {"size": 1, "sequence_parallel": True}},
        "but size is 1; set size, or sequence_parallel to false",
    ),
    ({"sequence_parallel_size": 2}, "remove it or set it to 1"),
    ({"managed_gradient_accumulation": False}, "managed_gradient_accumulation is not yet supported"),
    # activation checkpointing and logging
    (
        {"activation_checkpointing": {"number_checkpoints": 0}},
        "activation_checkpointing.number_checkpoints is 0: give a",
    ),
    (
        {"activation_checkpointing": {"partitioned_activations": True}},
        "unknown key 'activation_checkpointing.partitioned_activations'. Did you mean 'partition_activations'?",
    ),
    ({"wall_clock_breakdown": "on"}, "wall_clock_breakdown is 'on': give true or false"),
    ({"wandb": {"enabled": True, "projct": "x"}}, "unknown key 'wandb.projct'. Did you mean 'project'?"),
    # "auto"
    ({"gradient_clipping": "auto"}, 'gradient_clipping is "auto", which nothing fills in: give a number >= 0'),
    ({"bf16": {"enabled": "auto"}}, 'bf16.enabled is "auto"'),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, 'optimizer.params.lr is "auto"'),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, "auto"]}}},
        'optimizer.params.betas[1] is "auto", which nothing fills in: give its value, there, or',
    ),
]


@pytest.mark.parametrize(("raw", "part"), WRONG)
def test_a_wrong_configuration_is_refused_with_its_key_and_a_remedy(raw, part):
    with pytest.raises(ConfigError) as caught:
        load(raw)
    assert part in str(caught.value)
    assert "problems" not in str(caught.value)
