"""Configurations of DeepSpeed's users load as they are."""

import re
import warnings

import pytest
from user_configs import AUTO, FOLDER

from parallel3d.config import Config, load
from parallel3d.errors import ConfigError


def load_quietly(name: str) -> Config:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(FOLDER / name, auto=AUTO[name])


def test_every_file_is_covered():
    assert {path.name for path in FOLDER.glob("*.json")} == set(AUTO)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "auto_dict_stage2.json",
            {
                "train_batch_size": None,
                "optimizer": ("AdamW", {"lr": 1e-3}),
                "scheduler": ("WarmupLR", {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 100}),
                "precision": (False, False),
                "stage": 2,
                "gradient_clipping": 1.0,
            },
        ),
        (
            "zero2_adamw_cosine_wandb.json",
            {
                "train_batch_size": 144,
                "optimizer": ("AdamW", {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-7, "weight_decay": 1e-2}),
                "scheduler": (
                    "WarmupCosineLR",
                    {
                        "total_num_steps": 37256,
                        "warmup_min_ratio": 0.0,
                        "warmup_num_steps": 1000,
                        "cos_min_ratio": 0.0001,
                        "warmup_type": "linear",
                    },
                ),
                "precision": (True, False),
                "stage": 2,
                "gradient_clipping": 1.0,
            },
        ),
        (
            "zero2_offload_comments.json",
            {
                "train_batch_size": None,
                "optimizer": ("Adam", {"lr": 0.001}),
                "scheduler": None,
                "precision": (True, False),
                "stage": 2,
                "gradient_clipping": 0.0,
            },
        ),
        (
            "zero3_offload_auto_bf16.json",
            {
                "train_batch_size": None,
                "optimizer": ("Adam", {"lr": 2e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}),
                "scheduler": (
                    "WarmupDecayLR",
                    {"warmup_min_lr": 5e-6, "warmup_max_lr": 2e-5, "warmup_num_steps": 10, "total_num_steps": 1000},
                ),
                "precision": (False, True),
                "stage": 3,
                "gradient_clipping": 1.0,
            },
        ),
        (
            "zero3_offload_fp16.json",
            {
                "train_batch_size": 24,
                "optimizer": None,
                "scheduler": None,
                "precision": (True, False),
                "stage": 3,
                "gradient_clipping": 0.5,
            },
        ),
    ],
)
def test_a_users_file_loads_unchanged(name, expected):
    config = load_quietly(name)
    zero = config.zero_optimization
    found = {
        "train_batch_size": config.train_batch_size,
        "optimizer": config.optimizer and (config.optimizer.type, dict(config.optimizer.params)),
        "scheduler": config.scheduler and (config.scheduler.type, dict(config.scheduler.params)),
        "precision": (config.fp16.enabled, config.bf16.enabled),
        "stage": zero.stage,
        "gradient_clipping": config.gradient_clipping,
    }
    assert found == expected


def test_the_scale_of_a_users_fp16_section_is_read():
    assert load_quietly("zero2_adamw_cosine_wandb.json").fp16.initial_scale_power == 12
    fp16 = load_quietly("zero3_offload_fp16.json").fp16
    assert (fp16.loss_scale, fp16.loss_scale_window) == (0.0, 100)


def test_a_file_says_what_it_leaves_out():
    lines = []
    for name in ("zero2_offload_comments.json", "zero3_offload_fp16.json"):
        with pytest.warns(UserWarning, match=re.escape(f"{name}: ")) as caught:
            load(FOLDER / name)
        lines += [str(warning.message).partition(".json: ")[2] for warning in caught]
    assert [line.partition(":")[0] for line in lines] == ["not yet supported", "without effect here"]
    assert lines[0].split()[3].rstrip(":") == "zero_optimization.offload_param"
    assert "overlap_comm" not in lines[-1], "what holds anyway is not worth a warning"


@pytest.mark.parametrize("name", ["auto_dict_stage2.json", "zero3_offload_auto_bf16.json"])
def test_a_file_with_autos_names_all_that_nobody_fills(name):
    with pytest.raises(ConfigError) as caught:
        load(FOLDER / name)
    for path in ("optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps"):
        assert f'{path} is "auto"' in str(caught.value)
    assert 'train_batch_size is "auto"' not in str(caught.value)
