import base64
import json
import warnings
from pathlib import Path

import hjson
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parallel3d.config import Config, KernelsConfig, load, load_sections
from parallel3d.errors import ConfigError

# Busy machines are slow: time is no part of these properties.
timeless = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
positive = st.integers(1, 10**6)
numbers = st.floats(0, 1e6, allow_nan=False)
params = st.dictionaries(
    st.sampled_from(["lr", "betas", "eps", "momentum", "foreach"]),
    st.booleans() | numbers | st.integers() | st.lists(numbers, max_size=3),
    max_size=4,
)
pipelines = st.fixed_dictionaries(
    {},
    optional={
        "stages": positive | st.none(),
        "schedule": st.sampled_from(["1f1b", "gpipe", "interleaved"]),
        "partition": st.sampled_from(["uniform", "parameters", "type:Block"])
        | st.lists(st.integers(0, 99), max_size=4)
        | st.fixed_dictionaries({"weights": st.lists(numbers, max_size=4)}),
        "activation_checkpoint_interval": st.integers(0, 8),
        "shapes": st.sampled_from(["static", "dynamic"]),
        "seed_layers": st.booleans(),
    },
)
flag = st.booleans()
dtypes = st.sampled_from(["fp32", "bf16", "fp16", "float16", "torch.bfloat16"])


def section(**keys):
    return st.fixed_dictionaries({}, optional=keys)


configurations = section(
    train_batch_size=positive,
    train_micro_batch_size_per_gpu=positive,
    gradient_accumulation_steps=positive | st.just("auto"),
    gradient_clipping=numbers,
    steps_per_print=positive | st.none(),
    seed=st.integers(0, 2**32),
    optimizer=st.fixed_dictionaries({"type": st.sampled_from(["Adam", "SGD"])}, optional={"params": params}),
    scheduler=st.fixed_dictionaries({"type": st.just("WarmupLR")}, optional={"params": params}),
    fp16=section(enabled=flag, loss_scale=numbers, initial_scale_power=st.integers(0, 127), hysteresis=positive),
    bf16=section(enabled=st.just(False), check_grad_overflow=flag),
    torch_autocast=section(
        dtype=st.sampled_from(["bfloat16", "fp16"]),
    ),
    amp=section(opt_level=st.sampled_from(["O0", "O1", "O2", "O3"])),
    communication_data_type=dtypes | st.none(),
    data_types=section(grad_accum_dtype=dtypes | st.none()),
    zero_optimization=flag
    | section(stage=st.integers(0, 2), reduce_bucket_size=positive, allgather_bucket_size=positive),
    activation_checkpointing=section(cpu_checkpointing=flag, number_checkpoints=positive | st.none()),
    dataloader_drop_last=flag,
    wall_clock_breakdown=flag,
    pipeline=pipelines,
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


FORMS = {
    "JSON": ("c.json", json.dumps),
    "Hjson": ("c.json", hjson.dumps),
    "YAML": ("c.yaml", yaml.safe_dump),
}


@timeless
@given(configurations)
@pytest.mark.parametrize("form", FORMS)
def test_a_dict_and_its_file_load_equal(tmp_path_factory, form, raw):
    name, dump = FORMS[form]
    assert load(write(tmp_path_factory.getbasetemp() / name, dump(raw))) == load(raw)


@timeless
@given(configurations, st.sampled_from([base64.b64encode, base64.urlsafe_b64encode]), st.booleans())
def test_a_dict_and_its_base64_load_equal(raw, encode, padded):
    text = encode(json.dumps(raw, ensure_ascii=False).encode()).decode()
    assert load(text if padded else text.rstrip("=")) == load(raw)


@timeless
@given(configurations)
def test_a_dumped_config_loads_to_itself(raw):
    config = load(raw)
    assert load(config.model_dump()) == config
    assert load(json.loads(config.model_dump_json())) == config
    assert load(load(config.model_dump()).model_dump()) == config


@timeless
@given(configurations, st.data())
def test_what_auto_fills_loads_as_if_it_had_been_written(raw, data):
    """Any values are taken out, "auto" put in their place, and given through auto=."""
    leaves = [(key,) for key, value in raw.items() if not isinstance(value, dict)]
    leaves += [
        (outer, key) for outer, inner in raw.items() if isinstance(inner, dict) for key in inner if key != "params"
    ]
    chosen = [path for path in leaves if data.draw(st.booleans())]
    with_autos, auto = json.loads(json.dumps(raw)), {}
    for *outer, key in chosen:
        level = with_autos[outer[0]] if outer else with_autos
        if level[key] == "auto":
            continue
        auto[".".join([*outer, key])] = level[key]
        level[key] = "auto"
    assert load(with_autos, auto=auto) == load(raw)


def test_none_is_all_defaults_and_a_config_is_itself():
    assert load(None) == load({}) == Config()
    config = load({"seed": 3})
    assert load(config) is config


def test_json_may_have_comments_and_trailing_commas(tmp_path):
    text = """// first line
    {
      "train_batch_size": 32,  // per step
      /* "seed": 1, */
      "gradient_clipping": 1e-1, # small
      "optimizer": {"type": "SGD", "params": {"lr": 1e-4, "betas": [0.9, 0.95,],}},
    }"""
    config = load(write(tmp_path / "c.json", text))
    assert (config.train_batch_size, config.gradient_clipping) == (32, 0.1)
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-4, "betas": (0.9, 0.95)}


def test_a_path_may_be_of_any_class(tmp_path):
    class Location:
        def __fspath__(self) -> str:
            return str(tmp_path / "config.json")

    (tmp_path / "config.json").write_text('{"train_batch_size": 8}')
    assert load(Location()).train_batch_size == 8


def test_a_path_may_be_text_and_a_file_may_start_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"seed": 7}', encoding="utf-8-sig")
    assert load(str(path)).seed == 7


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "+1e-04", ".1e-3", "1.e-4", "1.0e-4", "0.0001"])
def test_yaml_reads_every_form_of_a_small_number(tmp_path, number):
    text = f"gradient_clipping: {number}\noptimizer: {{type: SGD, params: {{lr: {number}}}}}\n"
    config = load(write(tmp_path / "c.yml", text))
    assert config.gradient_clipping == 1e-4
    assert config.optimizer is not None
    assert config.optimizer.params["lr"] == 1e-4


def test_yaml_reads_5e8_as_a_whole_number_and_1f1b_as_a_word(tmp_path):
    text = "zero_optimization: {reduce_bucket_size: 5e8}\npipeline: {schedule: 1f1b}\n"
    config = load(write(tmp_path / "c.yaml", text))
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert isinstance(config.zero_optimization.reduce_bucket_size, int)
    assert config.pipeline.schedule == "1f1b"


def test_yaml_anchors_may_be_merged_and_overridden(tmp_path):
    text = "optimizer:\n  type: SGD\n  params: {<<: &base {lr: 0.1, momentum: 0.9}, lr: 0.2}\n"
    config = load(write(tmp_path / "c.yaml", text))
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 0.2, "momentum": 0.9}


def test_yaml_constructs_no_python_objects(tmp_path):
    text = "optimizer: {type: SGD, params: !!python/object/apply:os.getcwd []}\n"
    with pytest.raises(ConfigError, match="line 1: could not determine a constructor"):
        load(write(tmp_path / "c.yaml", text))


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("c.json", '{"seed": 1,\n "seed": 2}', ["'seed' is given twice", "keep one"]),
        ("c.json", '{"pipeline": {"stages": 1, "stages": 2}}', ["'stages' is given twice"]),
        ("c.yaml", "seed: 1\npipeline:\n  stages: 1\n  stages: 2\n", ["line 4", "'stages' is given twice", "keep one"]),
        ("c.json", '{"seed": 1,\n "steps_per_print": }', ["line 2", "check the quotes, commas and brackets"]),
        ("c.json", '{"seed": 1', ["line 1"]),
        ("c.json", '{"a" 1}', ["line 1, column 6", "':'"]),
        ("c.yaml", "seed: 1\n  stages: 2\n", ["line 2", "check the indentation"]),
        ("c.yaml", "seed: [1\n", ["line 2"]),
        ("c.yaml", "seed: \x01", ["is not YAML"]),
        ("c.yaml", "seed: 2001-99-99", ["line 1", "'2001-99-99' is not a valid timestamp"]),
        ("c.json", "[1, 2]", ["holds a list", "one mapping"]),
        ("c.yaml", "- 1\n", ["holds a list", "one mapping"]),
        ("c.yaml", "just words", ["holds a str", "one mapping"]),
        ("c.json", " \n", ["is empty", "one mapping"]),
        ("c.yaml", "# nothing\n", ["is empty", "one mapping"]),
    ],
)
def test_a_malformed_file_is_named_with_line_and_remedy(tmp_path, name, text, parts):
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / name, text))
    for part in [str(tmp_path / name), *parts]:
        assert part in str(caught.value)


MANY = "".join(f"{new}: &{new} [{', '.join([f'*{old}'] * 12)}]\n" for old, new in zip("abcdef", "bcdefg", strict=True))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        pytest.param("c.json", "/* {", "c.json ends within a comment", id="comment"),
        pytest.param(
            "c.json", '{"seed":\n' + "1" * 5000 + "}", "c.json, line 2: 111.* is too large a number", id="digits"
        ),
        pytest.param("c.json", '{"seed":\n1e999}', "c.json, line 2: 1e999 is too large a number", id="exponent"),
        pytest.param("c.json", "[" * 5000, "c.json is nested too deep", id="brackets"),
        pytest.param(
            "c.json", '{"amp": ' + "[" * 200 + "]" * 200 + "}", "json: amp is nested more than 100 deep", id="deep"
        ),
        pytest.param(
            "c.json", "{a: n" + "," * 100_000, "line 1, .* of more than 65536 characters is read as", id="long"
        ),
        pytest.param("c.yaml", "a: 1\nb: &b\n  c: *b", "c.yaml, line 2 is nested .* or holds itself", id="recursive"),
        pytest.param(
            "c.yaml", "a: &a [x, x]\n" + MANY, "c.yaml, line [0-9]: there are more than 200000 values", id="bomb"
        ),
        pytest.param("c.yaml", "[" * 5000, "c.yaml, line 1: brackets are nested more than 100 deep", id="flow"),
        pytest.param("c.yaml", "seed: 0x" + "f" * 5000, "c.yaml: seed is too large a number", id="hexadecimal"),
        pytest.param("c.yaml", "a: 1\nseed: !!int ''", "c.yaml, line 2: '' is not a valid int", id="tag"),
        pytest.param("c.json", '{"a' + "k" * 10**6 + '": 1}', "unknown key 'akkk.*[0-9]+ characters", id="message"),
    ],
)
def test_a_file_that_asks_for_too_much_is_told_with_the_place(tmp_path, name, text, told):
    with pytest.raises(ConfigError, match=told) as caught:
        load(write(tmp_path / name, text))
    assert len(str(caught.value)) < 21_000


def test_a_missing_file_is_named_with_the_nearest_in_its_folder(tmp_path):
    write(tmp_path / "ds_config.json", "{}")
    with pytest.raises(ConfigError, match=r"no file .*ds_confg.json.*Did you mean 'ds_config.json'"):
        load(tmp_path / "ds_confg.json")
    with pytest.raises(ConfigError, match="working directory"):
        load(tmp_path / "no" / "such" / "folder.json")


def test_what_is_no_text_file_is_refused(tmp_path):
    (tmp_path / "c.json").write_bytes(b'{"seed": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load(tmp_path / "c.json")
    with pytest.raises(ConfigError, match=r"can't read .*give the path of a text file"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="a path or a mapping, not int"):
        load(3)


def test_an_error_names_the_file_and_lists_all_problems(tmp_path):
    raw = {"gradient_clipp1ng": 1.0, "seed": -1, "pipeline": {"stages": 0, "shapes": "fixed"}}
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path / "c.json", json.dumps(raw)))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'c.json'}: 4 problems\n  - ")
    for path in ("gradient_clipp1ng", "seed is -1", "pipeline.stages is 0", "pipeline.shapes is 'fixed'"):
        assert path in message


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("pipeline.receive_in_place", "no training step became faster"),
        ("kernels.all_reduce_norm", "no training step became faster"),
        ("kernels.message_wait", "2.5% slower"),
        ("kernels.all_gather", "optimizer_step gathers the weights"),
    ],
)
@pytest.mark.parametrize("value", [True, False, "auto"])
def test_removed_keys_are_errors_with_the_reason(key: str, reason: str, value: object):
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=rf"{key} was removed: .*{reason}.*; remove the key"):
        load({section: {name: value}})


def test_auto_is_the_default_of_kernels():
    assert load({"kernels": {"all_reduce": "auto", "optimizer_step": True}}).kernels == KernelsConfig(
        optimizer_step=True
    )


def test_keys_without_effect_are_named_in_one_warning():
    raw = {
        "nebula": {"enabled": True},
        "vocabulary_size": 50304,
        "prescale_gradients": True,
        "zero_optimization": {"stage": 0, "contiguous_gradients": True, "stage3_allgather_sequential": True},
        "pipeline": {"pipe_partitioned": True, "grad_partitioned": True},
    }
    with pytest.warns(UserWarning, match="without effect here") as caught:
        config = load(raw)
    assert config == Config()
    assert [str(warning.message) for warning in caught] == [
        "configuration: without effect here: nebula, vocabulary_size, "
        "zero_optimization.stage3_allgather_sequential, pipeline.pipe_partitioned, pipeline.grad_partitioned"
    ]
    assert caught[0].filename == __file__


def test_known_keys_that_are_off_are_silent():
    raw = {
        "amp": {"enabled": False, "opt_level": "O1"},
        "bf16": {"enabled": False},
        "communication_data_type": None,
        "dump_state": False,
        "elasticity": {"enabled": False, "max_train_batch_size": 2000},
        "flops_profiler": {"enabled": False, "profile_step": 1, "recompute_fwd_factor": 0.0},
        "fp16": {"enabled": False, "loss_scale": 0},
        "pipeline": {"pipe_partitioned": False},
        "scheduler": None,
        "sequence_parallel_size": 1,
        "sparse_attention": {},
        "tensorboard": {},
        "tensor_parallel": {"autotp_size": 0, "preset_model": None},
        "comms_logger": {"prof_all": True},
        "zero_optimization": {"offload_optimizer": {"device": "none", "pin_memory": True}, "overlap_comm": True},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(raw) == Config()


def test_auto_batch_sizes_and_stages_count_as_not_given():
    raw = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "pipeline": {"stages": "auto"},
    }
    assert load(raw) == Config()


def test_the_older_names_of_offload_are_read():
    section = load({"zero_optimization": {"stage": 2, "cpu_offload": True}}).zero_optimization.offload_optimizer
    assert (section.device, section.step, section.ratio) == ("cpu", "device", 1.0)
    assert load({"zero_optimization": {"cpu_offload": False, "cpu_offload_param": False}}) == Config()
    old = load({"zero_optimization": {"stage": 3, "cpu_offload_param": True}})
    assert old == load({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "max_in_cpu": "auto"}}})
    assert (old.zero_optimization.offload_param.device, old.zero_optimization.offload_param.max_in_cpu) == ("cpu", None)


def test_keys_of_stage_3_are_read_without_their_prefix():
    values = {
        "max_live_parameters": 7,
        "max_reuse_distance": 6,
        "prefetch_bucket_size": 5,
        "param_persistence_threshold": 4,
    }
    named = {f"stage3_{key}": value for key, value in values.items()}
    assert load({"zero_optimization": values}) == load({"zero_optimization": named})
    assert load({"zero_optimization": {"gather_16bit_weights_on_model_save": True}}) == Config()
    with pytest.raises(
        ConfigError, match=r"max_live_parameters is the old name of .*stage3_max_live_parameters, and both are given"
    ):
        load({"zero_optimization": {**values, **named}})


@pytest.mark.parametrize(
    ("zero", "parts"),
    [
        ({"offload_param": {"device": "cpu"}}, ["zero_optimization.offload_param: it needs stage 3"]),
        (
            {"cpu_offload_param": True, "stage": 2},
            ["zero_optimization.offload_param: it needs stage 3, but the stage is 2"],
        ),
    ],
)
def test_what_takes_more_memory_than_asked_for_warns_of_it(zero, parts):
    with pytest.warns(UserWarning, match="not yet supported") as caught:
        config = load({"zero_optimization": zero})
    assert config.zero_optimization.stage == zero.get("stage", 0)
    assert len(caught) == 1
    for part in parts:
        assert part in str(caught[0].message)


def test_what_merely_looks_like_base64_is_a_path():
    with pytest.raises(ConfigError, match="no file config"):
        load("config")
    encoded_list = base64.b64encode(b"[1, 2]").decode()
    with pytest.raises(ConfigError, match="no file"):
        load(encoded_list)


def test_a_malformed_json_in_base64_is_explained():
    text = base64.b64encode(b'{"seed": 1, "seed": 2}').decode()
    with pytest.raises(ConfigError, match="configuration in base64: key 'seed' is given twice"):
        load(text)


def test_a_pipeline_is_read_before_autos_elsewhere_are_filled():
    raw = {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}, "pipeline": {"stages": 3}}
    assert load_sections(raw, "pipeline").pipeline.stages == 3
    assert load_sections(raw, "tensor_parallel", "rng") == load_sections(None, "pipeline") == Config()
    config = Config(seed=3)
    assert load_sections(config, "pipeline") is config
    with pytest.raises(ConfigError, match=r"unknown key 'pipeline.stage'"):
        load_sections({"pipeline": {"stage": 3}}, "pipeline")


@pytest.mark.parametrize("indent", [None, 1])
def test_what_json_dump_writes_is_read(tmp_path: Path, indent: int | None):
    """Accelerate sets steps_per_print to infinity, which json.dump writes as Infinity."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"steps_per_print": float("inf"), "train_batch_size": 8}, indent=indent))
    assert load(path) == Config(steps_per_print=None, train_batch_size=8)
