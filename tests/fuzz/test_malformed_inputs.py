"""Malformed inputs end with the package's own errors, whatever they are, or are read."""

from __future__ import annotations

import base64
import gc
import json
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from kept_inputs import CLUSTERS, CONFIGS, HUGGING_FACE, INDICES, LAYOUTS, SHORT_FORMS, YAMLS
from mutations import DOCUMENTS, TEXTS, as_text, torn, with_faults
from records import make_record
from safetensors.torch import save_file
from user_configs import AUTO, FOLDER

from parallel3d.checkpoint.export import INDEX
from parallel3d.checkpoint.format import MANIFEST, TrainingState, read_manifest
from parallel3d.config import Config, batch_sizes, load, parse_layout, read_source
from parallel3d.config.files import read_mapping
from parallel3d.config.layout import configuration
from parallel3d.errors import Parallel3DError
from parallel3d.models import DecoderConfig, from_hf
from parallel3d.models.user_model import load_subject
from parallel3d.monitor.run_record import read_run_record
from parallel3d.planner.cluster.file import load_cluster

# The directory of a test is the same for all examples, each of which writes its file anew.
# Without hypothesis' explanations, which trace each line: an input's time would not be its own.
fuzzed = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)
MOST_SHOWN = 30_000  # characters of a message
MOST_SECONDS = 2.0  # of the processor, which don't grow when the machine is busy


@contextmanager
def without_hanging() -> Iterator[None]:
    """Raise TimeoutError in what computes for longer than an input may take."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"this input takes more than {MOST_SECONDS} s")

    gc.disable()  # what earlier examples left is not this input's time
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        gc.enable()


def only_own_errors(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function and return its result, None after an error of the package's own."""
    with warnings.catch_warnings(), without_hanging():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **kwargs)
        except Parallel3DError as error:
            told = str(error)
    assert 0 < len(told) < MOST_SHOWN
    return None


def corpus(*values: Any) -> Callable[[Any], Any]:
    """Let a test of one strategy run these values first."""

    def decorate(test: Any) -> Any:
        for value in values:
            test = example(value)(test)
        return test

    return decorate


def with_sizes(config: Config | None) -> None:
    if config is not None:
        only_own_errors(batch_sizes, config, pipe=2, data=3, model=1)


CONFIGURATIONS = [
    *map(read_mapping, sorted(FOLDER.glob("*.json"))),
    Config().model_dump(mode="json"),
    dict.fromkeys(Config.model_fields, "auto"),
    {"pipeline": {"stages": 2, "schedule": [["F0@0", "B0@0"], ["F0@1", "B0@1"]], "partition": [0, 1, 2]}, "seed": 1},
    {"optimizer": {"type": "Adam", "params": {"lr": "auto"}}, "scheduler": {"type": "WarmupLR", "params": {}}},
]
CONFIG_KEYS = [*Config.model_fields, *Config.known_keys, "enabled", "params", "stage"]


@fuzzed
@corpus(*CONFIGS)
@given(as_text(CONFIGURATIONS, CONFIG_KEYS))
def test_a_configuration_in_json(tmp_path: Path, text: str):
    path = tmp_path / "c.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with_sizes(only_own_errors(load, path))
    only_own_errors(load, base64.b64encode(path.read_bytes()).decode())


@fuzzed
@corpus(*YAMLS)
@given(as_text(CONFIGURATIONS, CONFIG_KEYS) | torn(st.sampled_from(YAMLS).filter(lambda text: len(text) < 500)))
def test_a_configuration_in_yaml(tmp_path: Path, text: str):
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with_sizes(only_own_errors(load, path))


@fuzzed
@given(with_faults(CONFIGURATIONS, CONFIG_KEYS) | DOCUMENTS, with_faults([{"optimizer.params.lr": 1}, *AUTO.values()]))
@example({"seed": 10**5000}, {})
@example({"attention": {"backend": [{"a": None}]}}, {})
@example({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, {"optimizer.params.lr": 10**5000})
def test_a_configuration_as_a_mapping(given: Any, auto: Any):
    with_sizes(only_own_errors(load, given))
    with_sizes(only_own_errors(load, given, auto=auto))
    if isinstance(given, dict):
        only_own_errors(configuration, parse_layout("pp2,zero2"), given, [0, 1, 2])


def test_mappings_that_hold_themselves():
    given: dict[str, Any] = {"optimizer": {"type": "Adam"}}
    given["optimizer"]["params"] = given
    with pytest.raises(Parallel3DError, match="optimizer"):
        load(given)


@fuzzed
@corpus("\0", "a" * 5000, "\udc80", "/dev/zero", "/proc/self/mem", ".", "", "c.yaml\0")
@given(st.text(max_size=12))
def test_a_path_of_a_configuration(text: str):
    only_own_errors(read_source, text)
    only_own_errors(load_cluster, text)


WORDS = st.sampled_from(
    "pp2 tp2 dp2 zero1 sp zb-h1 m8 mb2 chunks2 v half ckpt1 auto interleaved pp0 pp 2pp ² ٣".split()
)


@fuzzed
@corpus(*LAYOUTS)
@given(st.lists(WORDS | TEXTS, max_size=5).map(",".join) | TEXTS)
def test_words_of_a_layout(text: str):
    layout = only_own_errors(parse_layout, text)
    if layout is not None:
        assert layout.world_size > 0
        assert parse_layout(layout.complete().text).complete() == layout.complete()


CLUSTER_DOCUMENTS = [
    {"hosts": [{"machine": "8xH100", "count": 2}]},
    {
        "name": "two",
        "overlap": 1.5,
        "collective_seconds": "20 us",
        "devices": {"mine": {"base": "H100", "memory": "80 GB", "peak_flops": "989 TFLOP/s"}},
        "hosts": [
            {
                "name": "a",
                "gpus": [{"device": "mine", "count": 4, "memory": 8e9}],
                "nvlink": {"bandwidth": "400 Gb/s", "latency": 1e-6, "islands": [[0, 1], [2, 3]]},
                "pcie": {"bandwidth": 5e10},
                "nics": [{"bandwidth": "50 GB/s", "count": 2, "switch": "s", "gpus": [0, 1]}],
            },
            {"name": "b", "count": 2, "machine": "dgx-h100", "switch": "s"},
        ],
        "switches": [{"name": "s", "count": 2}],
        "links": [{"between": ["s0", "s1"], "bandwidth": 1e11}, {"between": ["a/nic*", "s?"], "bandwidth": 1e9}],
    },
]
CLUSTER_KEYS = "name hosts devices links between bandwidth count gpus machine islands base wiring kind measured".split()


@fuzzed
@corpus(*CLUSTERS)
@given(as_text(CLUSTER_DOCUMENTS, CLUSTER_KEYS))
def test_a_cluster_file(tmp_path: Path, text: str):
    path = tmp_path / "cluster.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    only_own_errors(load_cluster, path)


@fuzzed
@corpus(*SHORT_FORMS)
@given(st.from_regex(r"\A((0|1|2|16|9{6,8}) ?x ?){1,3}(H100|dgx-h100|A100|cpu|h)\Z") | TEXTS)
def test_a_cluster_in_short(text: str):
    only_own_errors(load_cluster, text)


MANIFESTS = [json.loads((FOLDER.parent / "checkpoint-a149018" / "global_step2" / MANIFEST).read_text())]
for document in MANIFESTS:
    document["tensors"] = dict(list(document["tensors"].items())[:4])
    del document["crc32"]


def with_checksum(body: Any) -> str:
    """Return the text of a manifest, whatever it holds, with the right checksum."""
    if isinstance(body, dict):
        compact = json.dumps(body, sort_keys=True, separators=(",", ":"))
        body = {"crc32": zlib.crc32(compact.encode()), **body}
    return json.dumps(body)


@fuzzed
@corpus("[" * 100_000, '{"crc32": ' + "1" * 5000 + "}", '{"crc32": 1e999}', "\ud800")
@given(
    with_faults(MANIFESTS, ["version", "tag", "files"]).map(with_checksum) | torn(st.just(with_checksum(MANIFESTS[0])))
)
def test_the_manifest_of_a_checkpoint(tmp_path: Path, text: str):
    (tmp_path / MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    manifest = only_own_errors(read_manifest, tmp_path)
    if manifest is not None:
        only_own_errors(TrainingState.check, manifest, tmp_path)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8},
    "torch_dtype": "float32",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
MODELS = [
    LLAMA,
    {**LLAMA, "rope_scaling": YARN, "architectures": ["MistralForCausalLM"], "sliding_window": 4},
    {**LLAMA, "rope_scaling": None, "architectures": None, "model_type": "qwen2", "use_sliding_window": True},
    {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {
        "model_type": "gpt2",
        "vocab_size": 16,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "n_inner": None,
    },
]
MODEL_KEYS = [
    "head_dim",
    "layer_types",
    "max_window_layers",
    "sliding_window",
    "rope_parameters",
    "factor",
    "dtype",
    "tied",
]


@fuzzed
@corpus(*HUGGING_FACE)
@given(as_text(MODELS, MODEL_KEYS))
def test_the_config_of_a_hugging_face_model(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    layers = only_own_errors(from_hf, tmp_path, weights=False)
    config = layers[0].module_args[0] if layers else None
    if not isinstance(config, DecoderConfig):  # refused, or an architecture that keeps the layers of transformers
        return
    sizes = [config.hidden_size, config.ffn_size, config.num_layers, config.num_heads * config.dim_of_head]
    if max(*sizes, config.vocab_size, config.max_positions, config.kv_heads * config.dim_of_head) < 100:
        run_small(tmp_path)


def run_small(directory: Path) -> None:
    """Build a model that a config describes, and compute on 8 tokens."""
    subject = load_subject(str(directory), seed=0)
    x: Any = torch.zeros(1, min(8, subject.layers[0].module_args[0].max_positions), dtype=torch.int64)
    for layer in subject.layers:
        x = layer.build()(x)


def index_of(directory: Path, text: str, weights: bytes) -> None:
    """Write a model's directory with this index, and this as one of its two files."""
    (directory / "config.json").write_text(json.dumps(LLAMA))
    (directory / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    save_file({"a": torch.ones(2)}, directory / "one.safetensors")
    (directory / "two.safetensors").write_bytes(weights)


WEIGHT_MAP = {"a": "one.safetensors", "b": "two.safetensors"}


@fuzzed
@corpus(*INDICES)
@given(as_text([{"metadata": {"total_size": 3}, "weight_map": WEIGHT_MAP}]))
def test_the_index_of_hugging_face_weights(tmp_path: Path, text: str):
    index_of(tmp_path, text, b"")
    only_own_errors(from_hf, tmp_path)


HEADER = {"a": {"dtype": "F32", "shape": [2, 1], "data_offsets": [0, 8]}, "__metadata__": {"format": "pt"}}


@fuzzed
@given(as_text([HEADER]).map(lambda text: text.encode("utf-8", "surrogatepass")), st.sampled_from([0, 1, -1, 2**40]))
def test_a_file_of_hugging_face_weights(tmp_path: Path, header: bytes, wrong: int):
    length = max(0, len(header) + wrong).to_bytes(8, "little")
    index_of(tmp_path, json.dumps({"weight_map": WEIGHT_MAP}), length + header + bytes(8))
    only_own_errors(from_hf, tmp_path, tied=True)


RECORDS = [make_record(instructions={"F@0": 1.0, "RED@0#1": 2.0}).model_dump(mode="json")]


@fuzzed
@corpus("[" * 100_000, '{"stages": ' + "1" * 5000 + "}", json.dumps({**RECORDS[0], "stages": 0}))
@given(as_text(RECORDS, ["config", "stages", "ranks", "program"]))
def test_a_run_record(tmp_path: Path, text: str):
    path = tmp_path / "run_record.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    record = only_own_errors(read_run_record, path)
    if record is not None:
        assert record.world_size > 0
        assert record.device is not None
        only_own_errors(load, record.config)
