"""How "auto" is filled: by the caller, by the script's own objects, by another key, or refused by name."""

import json
import re

import pytest
import torch
from parallel3d.arguments import known_values
from torch import nn
from torch.utils.data import DataLoader

from parallel3d.config import load
from parallel3d.errors import ConfigError

ADAM = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto"}},
}


@pytest.mark.parametrize(
    "auto",
    [
        {
            "optimizer.params.lr": 0.1,
            "optimizer.params.betas": [0.8, 0.9],
            "bf16.enabled": True,
            "gradient_clipping": 2,
        },
        {
            "optimizer": {"params": {"lr": 0.1, "betas": [0.8, 0.9]}},
            "bf16": {"enabled": True},
            "gradient_clipping": 2,
        },
        {
            "optimizer": {"params.lr": 0.1},
            "optimizer.params": {"betas": [0.8, 0.9]},
            "bf16.enabled": True,
            "gradient_clipping": 2,
        },
    ],
    ids=["dotted", "nested", "mixed"],
)
def test_auto_may_be_dotted_or_nested(auto):
    raw = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
    }
    plain = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.8, 0.9]}},
        "bf16": {"enabled": True},
        "gradient_clipping": 2,
    }
    before = json.dumps([raw, auto])
    assert load(raw, auto=auto) == load(plain)
    assert json.dumps([raw, auto]) == before


def test_an_own_optimizer_fills_its_arguments_and_the_rate_to_warm_up_to():
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=3e-4, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2)
    config = load(ADAM, known=known_values(optimizer, None))
    assert config.optimizer is not None
    assert config.scheduler is not None
    assert config.optimizer.params == {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.2}
    assert config.scheduler.params["warmup_max_lr"] == 3e-4


def test_groups_with_rates_of_their_own_warm_up_to_these():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    groups = [{"params": a.parameters(), "lr": 0.1}, {"params": b.parameters(), "lr": 0.2}]
    known = known_values(torch.optim.SGD(groups, lr=1.0), None)
    assert known["scheduler.params.warmup_max_lr"] == [0.1, 0.2]


def test_a_loader_fills_the_micro_batch_and_what_the_caller_gives_wins():
    known = known_values(None, DataLoader([1, 2, 3, 4], batch_size=2))
    raw = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    assert load(raw, known=known).train_micro_batch_size_per_gpu == 2
    assert load(raw, known=known).train_batch_size is None
    assert load(raw, auto={"train_micro_batch_size_per_gpu": 3}, known=known).train_micro_batch_size_per_gpu == 3


def test_the_rate_to_warm_up_to_is_the_optimizers():
    raw = {**ADAM, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    config = load(raw, auto={"optimizer.params.lr": 0.5})
    assert config.scheduler is not None
    assert config.scheduler.params["warmup_max_lr"] == 0.5


def test_sizes_that_are_auto_count_as_not_given():
    raw = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "pipeline": {"stages": "auto"},
        "zero_optimization": {"reduce_bucket_size": "auto", "stage": 2},
    }
    assert load(raw) == load({"zero_optimization": {"stage": 2}})
    assert load(raw, auto={"zero_optimization.reduce_bucket_size": 1e6}).zero_optimization.reduce_bucket_size == 10**6


def test_all_that_is_left_is_refused_at_once_by_name_with_what_to_give():
    with pytest.raises(ConfigError) as caught:
        load({**ADAM, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"})
    message = str(caught.value)
    for part in [
        "7 problems",
        'optimizer.params.lr is "auto", which nothing fills in: give a learning rate, such as 1e-4',
        'auto={"optimizer.params.lr": ...}',
        "optimizer.params.betas",
        "two numbers, such as [0.9, 0.999]",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params.warmup_max_lr",
        "fp16.enabled",
        "give true or false",
        "gradient_clipping",
        "leave the key out for the default, 0.0",
    ]:
        assert part in message


def test_a_schedules_params_without_a_default_are_to_be_given():
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto"}
    with pytest.raises(ConfigError) as caught:
        load({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    _, warmup, total = str(caught.value).splitlines()
    assert warmup.endswith("or leave the key out for the default")
    assert total.endswith('there or as auto={"scheduler.params.total_num_steps": ...}')


@pytest.mark.parametrize(
    ("raw", "auto", "part"),
    [
        (
            {"seed": 1},
            {"seed": 2},
            'auto gives seed = 2, but the configuration has 1 there, not "auto"; drop one of the two',
        ),
        (
            {"seed": 1},
            {"bf16.enabled": True},
            'auto gives bf16.enabled = True, but the configuration has no "auto" there',
        ),
        (
            {"gradient_clipping": "auto"},
            {"gradient_cliping": 1.0},
            "Did you mean 'gradient_clipping'?",
        ),
        ({"optimizer": {"type": "auto"}}, {"optimizer": {"params": {"lr": 1}}}, "auto gives optimizer.params.lr = 1"),
        ({"gradient_clipping": "auto"}, {"gradient_clipping": -1}, "gradient_clipping is -1: give a number >= 0"),
        ({"gradient_clipping": "auto"}, {"gradient_clipping": "auto"}, 'gradient_clipping is "auto"'),
        ({"gradient_clipping": "auto"}, [1.0], "give a mapping of the keys"),
    ],
)
def test_auto_that_does_not_fit_is_refused(raw, auto, part):
    with pytest.raises(ConfigError, match=re.escape(part)):
        load(raw, auto=auto)


def test_a_config_takes_no_auto():
    config = load({"seed": 3})
    with pytest.raises(ConfigError, match='a Config has no "auto" left'):
        load(config, auto={"seed": 4})
