"""Reading and writing Hugging Face directories: what fits, what doesn't, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import load_model, make_model, save_model, token_ids, transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from parallel3d.checkpoint.export import Section, Stored
from parallel3d.errors import CheckpointError, ConfigError
from parallel3d.models import from_hf, save_hf
from parallel3d.models.huggingface.load import sizes_of
from parallel3d.models.huggingface.weights import Weights, load_layer
from parallel3d.models.huggingface.wrap import Layer, wrap
from parallel3d.parameters import Slicing
from parallel3d.pipe import PipelineModule

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def write_config(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**PLAIN, **changes}))
    return path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"architectures": ["PhiForCausalLM"]}, "transformers has no causal language model for .*model_type"),
        ({"architectures": None, "model_type": "t5"}, "transformers has no causal language model for .*T5Config"),
        (
            {"architectures": None, "model_type": "phi", "quantization_config": {"bits": 4}},
            "are quantized, .* in bf16 or fp32",
        ),
        ({"hidden_act": "geglu"}, "hidden_act = 'geglu'.*'gelu'"),
        ({"attention_chunk": 128}, "'attention_chunk' = 128"),
        ({"is_causal": False}, "is_causal = False .* is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, r"rope_scaling.rope_type = 'longrope'"),
        ({"rope_scaling": {"rope_type": "default", "short_factor": [1.0]}}, "short_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": "wide"}, "hidden_size = 'wide'"),
        ({"num_attention_heads": 0}, r"config.json: num_heads is 0; give a whole number from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ({"hidden_act": ["silu"]}, r"hidden_act = \['silu'\]"),
        ({"architectures": {"a": 1}}, "not a config.json of a model: architectures: .* not {'a': 1}"),
        ({"model_type": 3}, "not a config.json of a model: model_type: "),
        ({"attention_dropout": 2.0}, "attention_dropout is 2.0"),
        ({"rope_theta": -1.0, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_theta = -1.0"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling is of type 'linear', but has no factor"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}},
            "rope_parameters is of type 'yarn', but has no factor; .*max_position_embeddings / original",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "factor = 0"),
        ({"architectures": ["GPT2LMHeadModel"], "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
    ],
)
def test_a_config_that_the_decoder_does_not_know_is_told_by_its_key(tmp_path, changes: dict[str, Any], told: str):
    if changes.get("architectures") == ["GPT2LMHeadModel"]:
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 11, **changes}))
    else:
        write_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=told):
        from_hf(tmp_path, weights=False)


def test_switched_off_and_ignored_keys_are_accepted(tmp_path):
    write_config(tmp_path, use_qk_norm=False, extra_section=None, my_note="x")
    assert len(from_hf(tmp_path, weights=False, ignore=["my_note"])) == 4


def test_rotary_settings_of_transformers_4_and_5_are_the_same(tmp_path):
    scaling = {"factor": 4.0, "original_max_position_embeddings": 16}
    write_config(tmp_path, rope_theta=77.0, rope_scaling={"type": "yarn", **scaling})
    four = from_hf(tmp_path, weights=False)[0].module_args[0]
    write_config(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 77.0, **scaling})
    five = from_hf(tmp_path, weights=False)[0].module_args[0]
    assert four == five
    assert (four.rope.kind, four.rope.theta, four.rope.factor) == ("yarn", 77.0, 4.0)


def test_all_tensors_at_fault_are_listed(tmp_path):
    save_model(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(31)
    del tensors["lm_head.weight"], tensors["model.layers.1.mlp.up_proj.bias"]
    tensors["model.layers.2.extra"] = torch.ones(1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # of old checkpoints, computed
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        from_hf(tmp_path)
    told = str(error.value)
    assert "2 missing: lm_head.weight, model.layers.1.mlp.up_proj.bias" in told
    assert "1 not known to the model: model.layers.2.extra" in told
    assert "1 of another shape: model.norm.weight is [31], not [32]" in told


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda path: None, "model.safetensors.index.json"),
        (lambda path: (path / "pytorch_model.bin").touch(), "pytorch_model.bin is a pickle"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\0" * 20), "can't be read as safetensors"),
        (
            lambda path: (path / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone.safetensors"}}'
            ),
            "not there: gone.safetensors",
        ),
        *(
            (lambda path, text=text: (path / "model.safetensors.index.json").write_text(text), told)
            for text, told in (
                (
                    '{"weight_map": {"a": "../outside.safetensors"}}',
                    "'../outside.safetensors' is not the name of a file in the dir",
                ),
                ('{"weight_map": {"a": "/etc/passwd"}}', "'/etc/passwd' is not the name of a file in the directory"),
                ('{"weight_map": ["a"]}', "not an index of weights: weight_map: "),
                ('{"weight_map": {"a": 1}}', r"not an index of weights: weight_map.a: "),
                ("{}", "weight_map: is missing"),
                ("[]", "holds a list"),
                ("{", "not JSON"),
            )
        ),
    ],
)
def test_directories_without_readable_weights(tmp_path, prepare: Any, told: str):
    prepare(write_config(tmp_path))
    with pytest.raises(CheckpointError, match=told):
        from_hf(tmp_path)


def test_no_config_and_no_json(tmp_path):
    with pytest.raises(ConfigError, match=r"no file .*config\.json"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        from_hf(tmp_path)


def test_sharded_files_and_names_without_the_base_are_read(tmp_path):
    model = make_model("gpt2")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    model.transformer.save_pretrained(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    ids = token_ids(1, 6)
    with torch.no_grad():
        for name in ("sharded", "base"):
            module = PipelineModule(from_hf(tmp_path / name), num_stages=1).eval()
            torch.testing.assert_close(module(ids), model(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_head_can_be_untied_but_not_lost(tmp_path):
    model = save_model(tmp_path, "qwen2")
    module = PipelineModule(from_hf(tmp_path, tied=False), num_stages=1).eval()
    with torch.no_grad():
        module.layers["4"].logits.weight.mul_(2)
        torch.testing.assert_close(module(token_ids(1, 5)), 2 * model(token_ids(1, 5)).logits, rtol=1e-5, atol=1e-5)
        save_hf(module, tmp_path / "out")
        loaded = load_model(tmp_path / "out")
        torch.testing.assert_close(loaded(token_ids(1, 5)).logits, module(token_ids(1, 5)), rtol=1e-5, atol=1e-5)
    save_model(tmp_path, "mistral")
    with pytest.raises(ConfigError, match="tied=True would drop"):
        from_hf(tmp_path, tied=True)


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gemma2"])
def test_a_tied_head_with_values_of_its_own_is_not_dropped(tmp_path: Path, name: str):
    """Transformers doesn't tie it, whatever config.json says."""
    embedding = save_model(tmp_path, name).get_input_embeddings().weight.detach()
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    from_hf(tmp_path)  # a copy of the embedding's
    save_file({**tensors, "lm_head.weight": 2 * embedding}, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path)
    options = {}
    if name != "gemma2":  # which keeps its own layers
        options["tied"] = False
        for source in (tmp_path, model):
            with pytest.raises(CheckpointError, match=r"ties lm_head.weight to .* give tied=False"):
                from_hf(source)
    with torch.no_grad():
        for source in (tmp_path, model):
            module = PipelineModule(from_hf(source, **options), num_stages=1).eval()
            torch.testing.assert_close(module(token_ids(1, 5)), model(token_ids(1, 5)).logits, rtol=1e-5, atol=1e-5)


class Recording(Weights):
    """Notes what is read."""

    def __init__(self, tensors: dict[str, Tensor]):
        super().__init__(tensors)
        self.numbers_read: dict[str, int] = {}

    def read(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        tensor = super().read(name, dim, start, stop)
        self.numbers_read[name] = self.numbers_read.get(name, 0) + tensor.numel()
        return tensor


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dim", "ranges"), [(0, ((1, 3), (5, 9))), (0, ((4, 6),)), (1, ((0, 2), (3, 4))), (1, ((2, 2),))]
)
def test_a_slice_reads_its_own_numbers_alone(dim: int, ranges: tuple[tuple[int, int], ...], transposed: bool):
    """A parameter [10, 5], its rows 0 to 3 in one tensor, 4 to 9 in another behind two rows of something else."""
    whole = torch.arange(50.0).view(10, 5)
    first, second = whole[:4], torch.cat([torch.zeros(2, 5), whole[4:]])
    stored = Stored((Section("a", 4), Section("b", 6, start=2, of=8)), (5,), transposed)
    weights = Recording({"a": first.t() if transposed else first, "b": second.t() if transposed else second})
    wanted = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    layer = nn.Module()
    layer.weight = nn.Parameter(torch.full_like(wanted, -1.0))
    layer.weight.slicing = Slicing(dim, whole.shape[dim], ranges)
    load_layer(layer, {"weight": stored}, weights)
    assert torch.equal(layer.weight, wanted)
    if dim == 0:
        assert sum(weights.numbers_read.values()) == wanted.numel()


def test_a_wrapped_model_shares_weights_of_embedding_and_head_alone():
    model = make_model("phi")
    with pytest.raises(ConfigError, match="dtype can't be given"):
        from_hf(model, dtype=torch.float64)
    model.model.layers[0].mlp.fc1.weight = model.model.layers[1].mlp.fc1.weight
    with pytest.raises(ConfigError, match=r"shares its weight layer\.mlp\.fc1\.weight"):
        from_hf(model)
    with pytest.raises(ConfigError, match="Linear has no config"):
        from_hf(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_what_a_model_does_not_train_is_not_trained(name: str):
    model = make_model(name)
    model.get_input_embeddings().requires_grad_(False)
    model.base_model.get_submodule("layers" if name == "llama-tied" else "h")[1].requires_grad_(False)
    module = PipelineModule(from_hf(model), num_stages=1)
    trained = {name.split(".")[1] for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == {"1", "3", *(("0",) if name == "gpt2" else ())}  # of 0, the positions
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == sum(
        p.numel() for p in model.parameters() if p.requires_grad
    )


def test_a_weight_of_two_is_trained_or_not():
    model = make_model("llama")
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    with pytest.raises(
        ConfigError,
        match=r"layers\.0\.mlp\.gate_proj\.weight and model\.layers\.0\.mlp\.up_proj\.weight are one weight here",
    ):
        PipelineModule(from_hf(model), num_stages=1)


class Between(nn.Module):
    """A layer's place in which a model calls the layer otherwise than a pipeline can."""

    def __init__(self, layer: nn.Module, call: Any):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.layer, *args, **kwargs)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda layer, h, **kwargs: layer(2 * h, **kwargs),
            r"layer 1 isn't called with the hidden states .* unchanged",
        ),
        (lambda layer, h, **kwargs: layer(h.mul_(2), **kwargs), "it changes hidden states in place after a layer"),
        (
            lambda layer, h, **kwargs: layer(h, memory=object(), **kwargs),
            "layer 1 takes memory, a object, which can't be sent",
        ),
        (lambda layer, h, **kwargs: h, "layer 1 isn't called"),
        (
            lambda layer, h, **kwargs: layer(h, **kwargs)["hidden"],
            "its code around the layers fails on hidden states alone",
        ),
    ],
)
def test_a_model_whose_layers_take_more_than_hidden_states_is_refused(call: Any, told: str):
    """Phi's loop over its layers, with something else at the second one."""
    model = make_model("phi")
    base, modules, kind = model.model, nn.ModuleList, type(model.model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = self.layers
        self._modules["layers"] = modules([layers[0], Between(layers[1], call)])
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            self._modules["layers"] = layers

    base.__class__ = type("Changed", (kind,), {"forward": forward})
    with pytest.raises(
        ConfigError, match=f"PhiForCausalLM can't be split into pipeline stages: {told}.*train it without"
    ):
        from_hf(model)


def test_a_norm_that_is_also_before_the_layers_is_refused():
    model = make_model("phi")
    kind, norm = type(model.model), model.model.final_layernorm
    base = type(
        "Changed",
        (kind,),
        {
            "forward": lambda self, input_ids, **options: kind.forward(
                self, inputs_embeds=norm(self.embed_tokens(input_ids)), **options
            )
        },
    )
    model.model.__class__ = base
    with pytest.raises(ConfigError, match="final_layernorm is called before the layers, and again after them"):
        from_hf(model)


@pytest.mark.parametrize(
    ("name", "key", "value"), [("mixtral", "output_router_logits", True), ("opt", "layerdrop", 0.1)]
)
def test_what_a_model_computes_besides_its_layers_is_refused(name: str, key: str, value: Any):
    with pytest.raises(ConfigError, match=rf"what {key} asks for; set it to (false|0) in the config"):
        from_hf(make_model(name, **{key: value}))


def test_a_classifier_of_sequences_is_refused():
    """It takes the last token that is no padding, which hidden states don't tell."""
    hf = transformers()
    model = hf.AutoModelForSequenceClassification.from_config(make_model("phi").config)
    module = PipelineModule(from_hf(model), num_stages=1)
    with pytest.raises(
        ConfigError, match=r"PhiForSequenceClassification returns \[1, 2\] for hidden states \[1, 5, 32\]"
    ):
        module(token_ids(1, 5))


def test_a_model_with_two_lists_of_layers_is_refused():
    model = make_model("phi")
    model.model.more = nn.ModuleList([nn.Identity(), nn.Identity()])
    with pytest.raises(ConfigError, match=r"has 2 lists of 2 layers: model\.layers, model\.more"):
        from_hf(model)


def test_a_checkpoint_of_another_model_is_told_by_its_tensors(tmp_path):
    """Read by name, and converted by transformers."""
    for name, other in (("phi", "gemma2"), ("mixtral", "phi")):
        save_model(tmp_path, other)
        make_model(name).config.save_pretrained(tmp_path)
        with pytest.raises(
            CheckpointError,
            match=r"don't fit \w+ForCausalLM; \d+ missing: .* \d+ not known to the model: .* of one model",
        ):
            from_hf(tmp_path)


def test_a_name_of_the_hub_is_looked_up_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no directory 'org/tiny', and no model .* hf download org/tiny"):
        from_hf("org/tiny")
    with pytest.raises(ConfigError, match="no file"):
        from_hf("tiny")
    cache = tmp_path / "models--org--tiny"
    save_model(cache / "snapshots" / "abc", "gemma")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    assert len(from_hf("org/tiny")) == 5
    for file in ("model.safetensors", "config.json"):
        (cache / "snapshots" / "abc" / file).unlink()
        with pytest.raises((CheckpointError, ConfigError), match=rf"has no {file}.* download it: hf download org/tiny"):
            from_hf("org/tiny")


def test_the_sizes_of_a_text_model_may_be_in_a_section_of_its_config():
    model: Any = make_model("phi")
    model.config = transformers().PreTrainedConfig(text_config=model.config)
    layers = from_hf(model)
    assert sizes_of(layers).max_positions == 64
    assert all(spec.build().max_positions == 64 for spec in layers)


def test_an_export_is_whole_or_not_there(tmp_path):
    module = PipelineModule(from_hf(make_model("llama")), num_stages=1)
    out = tmp_path / "deep" / "out"
    (tmp_path / "deep" / ".out.partial").mkdir(parents=True)  # the user's
    save_hf(module, out, max_file_bytes=30_000)
    assert sorted(p.name for p in out.parent.iterdir()) == [".out.partial", "out"]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    sizes = {file: (out / file).stat().st_size for file in index["weight_map"].values()}
    assert len(sizes) > 1
    assert all(size < 30_000 + 32 * 257 * 4 for size in sizes.values())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in module.parameters())
    with pytest.raises(CheckpointError, match="is there already"):
        save_hf(module, out)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="can't be written"):
        save_hf(module, tmp_path / "file" / "out")


@pytest.mark.parametrize("name", ["llama", "phi"])  # a native decoder, and a model that keeps its own layers
def test_settings_of_generation_are_saved_as_transformers_saves_them(tmp_path: Path, name: str):
    model: Any = make_model(name)
    model.generation_config.update(eos_token_id=[2, 5], do_sample=True, temperature=0.6, top_p=0.9)
    model.save_pretrained(tmp_path / "in")
    wanted = json.loads((tmp_path / "in" / "generation_config.json").read_text())
    assert wanted["eos_token_id"] == [2, 5]
    config = {key: value for key, value in model.config.to_dict().items() if "temperature" in key}
    for k, source in enumerate((tmp_path / "in", model)):
        save_hf(PipelineModule(from_hf(source), num_stages=1), tmp_path / f"out{k}")
        assert json.loads((tmp_path / f"out{k}" / "generation_config.json").read_text()) == wanted
        found = json.loads((tmp_path / f"out{k}" / "config.json").read_text())
        assert {key: value for key, value in found.items() if "temperature" in key or "generation" in key} == config
        assert load_model(tmp_path / f"out{k}").generation_config.eos_token_id == [2, 5]


def test_layers_that_hugging_face_has_no_name_for(tmp_path):
    layers = [*from_hf(make_model("llama")), nn.Linear(257, 2)]
    with pytest.raises(CheckpointError, match="layer 5, a Linear"):
        save_hf(PipelineModule(layers, num_stages=1), tmp_path / "out")
    with pytest.raises(CheckpointError, match="a Linear is no PipelineModule"):
        save_hf(SimpleNamespace(module=nn.Linear(1, 1)), tmp_path / "out")


def test_wrapped_layers_of_a_kind_share_one_graph():
    """Of more layers than the number of graphs that torch compiles of one function."""
    torch.compiler.reset()
    number = torch._dynamo.config.recompile_limit + 2
    layers = [spec.build(None) for spec in wrap(make_model("phi", num_hidden_layers=number))]
    torch._dynamo.utils.counters.clear()
    x = token_ids(2, 4)
    for layer in layers:
        if isinstance(layer, Layer):
            layer.compile(backend="eager")
        x = layer(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
