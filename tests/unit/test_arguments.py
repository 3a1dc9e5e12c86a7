"""Where initialize takes its configuration from."""

import argparse
import base64
import json
import re
from types import SimpleNamespace

import pytest
from parallel3d.arguments import find_config

from parallel3d import add_config_arguments
from parallel3d.config import load
from parallel3d.errors import ConfigError

SMALL = {"train_batch_size": 8}


def test_a_configuration_may_come_from_each_place(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(SMALL))
    args = SimpleNamespace(deepspeed_config=str(path), local_rank=-1)
    assert find_config(args, None, None) == str(path)
    assert find_config(None, SMALL, None) is SMALL
    assert find_config(None, None, SMALL) is SMALL
    with pytest.warns(UserWarning, match="--deepscale_config is the old name of --deepspeed_config"):
        assert find_config(SimpleNamespace(deepscale_config=str(path)), None, None) == str(path)


def test_two_places_may_say_the_same(tmp_path):
    path = tmp_path / "c.json"
    path.write_text("// a comment\n" + json.dumps(SMALL))
    args = SimpleNamespace(deepspeed_config=str(path))
    encoded = base64.b64encode(json.dumps(SMALL).encode()).decode()
    assert load(find_config(args, SMALL, encoded)) == load(SMALL)


@pytest.mark.parametrize(
    ("args", "config", "params", "part"),
    [
        (None, None, None, "initialize needs config=, or args with deepspeed_config"),
        (SimpleNamespace(deepspeed_config=None), None, None, "initialize needs config="),
        (None, SMALL, {"train_batch_size": 4}, "config= (a dict) and config_params= (a dict) are different"),
        (SimpleNamespace(local_rank=5), SMALL, None, "args.local_rank is 5, but the launcher's LOCAL_RANK is 0; drop"),
    ],
)
def test_no_configuration_or_two_is_refused(monkeypatch, args, config, params, part):
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match=re.escape(part)):
        find_config(args, config, params)


def test_a_file_that_differs_from_config_is_named(tmp_path):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(SMALL))
    args = SimpleNamespace(deepspeed_config=str(path))
    with pytest.raises(ConfigError, match=rf"config= \(a dict\) and args.deepspeed_config \({re.escape(str(path))}\)"):
        find_config(args, {**SMALL, "seed": 5}, None)


def test_arguments_are_deepspeeds():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "c.json", "--local_rank", "3"])
    assert (args.deepspeed, args.deepspeed_config, args.deepscale, args.deepscale_config) == (
        True,
        "c.json",
        False,
        None,
    )
    late = add_config_arguments(argparse.ArgumentParser())
    late.add_argument("--local_rank", type=int, default=-1)
    args = late.parse_args(["--local_rank=1", "--deepscale", "--deepscale_config=d.json"])
    assert (args.local_rank, args.deepspeed, args.deepscale, args.deepscale_config) == (1, False, True, "d.json")
