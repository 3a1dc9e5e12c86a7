"""The native decoder computes what transformers computes, for every switch that a config.json has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_models import load_model, make_model, save_model, token_ids
from safetensors.torch import load_file
from torch import Tensor, nn

from parallel3d.errors import CheckpointError, ConfigError, DataError
from parallel3d.models import CausalLMLoss, DecoderConfig, PackedDocuments, Rope, decoder, from_hf, save_hf
from parallel3d.models.huggingface.weights import Weights, load_layer
from parallel3d.pipe import LayerSpec, PipelineModule

NATIVE = ["llama", "llama-tied", "mistral", "qwen2", "qwen2-sliding", "qwen3-odd", "gemma", "gpt2"]
WRAPPED = ["gemma2", "phi"]


def run(layers: list[LayerSpec], inputs: Any) -> Tensor:
    model = PipelineModule(layers, num_stages=1).eval()
    with torch.no_grad():
        return model(inputs)


def logits_of(model: nn.Module, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs).logits


@pytest.mark.parametrize("name", NATIVE)
def test_logits_of_a_directory_equal_transformers(tmp_path, name: str):
    model = save_model(tmp_path, name)
    ids = token_ids(2, 17)
    torch.testing.assert_close(run(from_hf(tmp_path), ids), logits_of(model, input_ids=ids), rtol=1e-5, atol=1e-5)


def train_once(
    layers: list[LayerSpec], inputs: dict[str, Tensor], labels: Tensor
) -> tuple[Tensor, Tensor, list[Tensor], PipelineModule]:
    """Logits, loss, the gradient of each parameter, and the module."""
    module = PipelineModule(layers, num_stages=1)
    logits = module(inputs)
    loss = CausalLMLoss(shift=True)(logits, labels)
    assert isinstance(loss, Tensor)
    loss.backward()
    return logits.detach(), loss.detach(), [p.grad for p in module.parameters()], module


@pytest.mark.parametrize("name", ["llama-tied", "qwen2-sliding", "gpt2"])
def test_halves_compute_what_blocks_and_transformers_do(tmp_path, name: str):
    model = save_model(tmp_path / "in", name)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 8:] = 0
    inputs = {"input_ids": token_ids(2, 11), "attention_mask": mask}
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)
    logits, loss, gradients, module = train_once(from_hf(tmp_path / "in", units="half"), inputs, labels)
    names = [type(layer).__name__ for layer in module.layers.values()]
    assert names == ["TokenEmbedding", *["Attention", "FeedForward"] * 2, "FinalNorm", "Head"]
    # The same operations in the same order: not a bit differs.
    block_logits, block_loss, block_gradients, _ = train_once(from_hf(tmp_path / "in"), inputs, labels)
    assert torch.equal(logits, block_logits)
    assert torch.equal(loss, block_loss)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(gradients, block_gradients, strict=True))
    wanted = model(**inputs, labels=labels)
    wanted.loss.backward()
    torch.testing.assert_close(logits[mask.bool()], wanted.logits[mask.bool()], rtol=1e-5, atol=1e-5)
    # Transformers' gradients, read as if they were weights, at the same places.
    stored = Weights({name: p.grad for name, p in model.named_parameters()})
    for layer in module.layers.values():
        found = {name: p.grad.clone() for name, p in layer.named_parameters()}
        load_layer(layer, layer.stored(), stored)
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_halves_are_exported_bit_for_bit(tmp_path):
    for name in ("llama", "qwen3-odd", "gemma", "gpt2"):
        save_model(tmp_path / name, name)
        save_hf(PipelineModule(from_hf(tmp_path / name, units="half"), num_stages=1), tmp_path / f"{name}-out")
        stored, written = (load_file(tmp_path / f / "model.safetensors") for f in (name, f"{name}-out"))
        assert stored.keys() == written.keys()
        assert all(torch.equal(stored[key], written[key]) for key in stored)


def test_units_that_there_are_not():
    config = DecoderConfig(vocab_size=9, hidden_size=8, ffn_size=8, num_layers=1, num_heads=1)
    with pytest.raises(ConfigError, match=r"units is 'halve'.*Did you mean 'half'\?"):
        decoder(config, units="halve")
    with pytest.raises(ConfigError, match="units can't be given for a model that keeps its own layers"):
        from_hf(make_model("phi"), units="half")


@pytest.mark.parametrize("name", NATIVE + WRAPPED)
def test_masks_and_positions_equal_transformers(name: str):
    model = make_model(name)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 8:], mask[1, :3] = 0, 0
    inputs = {
        "input_ids": token_ids(2, 11),
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
    }
    got, wanted = run(from_hf(model), inputs), logits_of(model, **inputs)
    # What a padding position gives is nobody's.
    torch.testing.assert_close(got[mask.bool()], wanted[mask.bool()], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NATIVE + WRAPPED)
def test_packed_documents_don_t_attend_to_each_other(name: str):
    model = make_model(name)
    documents = [token_ids(1, seq, seed=seq)[0].tolist() for seq in (3, 1, 9, 7)]
    rows = [inputs for inputs, _ in PackedDocuments(documents, 20)]
    packed = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    got = run(from_hf(model), packed).flatten(0, 1)[:20]
    # Each document alone, as plain tokens.
    wanted = torch.cat([logits_of(model, input_ids=torch.tensor([ids]))[0] for ids in documents])
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", WRAPPED)
def test_logits_of_other_architectures_are_their_own(name: str):
    model = make_model(name)
    ids = token_ids(2, 9)
    wanted = logits_of(model, input_ids=ids)
    torch.testing.assert_close(run(from_hf(model), ids), wanted, rtol=1e-5, atol=1e-5)
    # The model itself is still whole.
    torch.testing.assert_close(logits_of(model, input_ids=ids), wanted, rtol=0, atol=0)


ROPES = [
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "beta_fast": 4.0,
        "truncate": False,
    },
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope['rope_type']}-{len(rope)}")
def test_scaled_rotary_positions_equal_transformers(rope: dict[str, Any]):
    model = make_model("llama", max_position_embeddings=24, rope_parameters={"rope_theta": 100.0, **rope})
    for seq in (12, 40):  # within the model's positions, and beyond
        ids = token_ids(1, seq)
        got = run(from_hf(model), ids)
        torch.testing.assert_close(got, logits_of(model, input_ids=ids), rtol=1e-5, atol=1e-5)
        positions = torch.arange(seq)[None]
        by_ids = run(from_hf(model), {"input_ids": ids, "position_ids": positions})
        torch.testing.assert_close(by_ids, got, rtol=1e-5, atol=1e-5)


NATIVE_CONFIGS = {
    "LlamaForCausalLM": {"rope": Rope(kind="llama3", factor=8.0, original_max_positions=32), "qkv_bias": True}
    | {"attention_out_bias": True, "num_kv_heads": 2, "head_dim": 6},
    "MistralForCausalLM": {"windows": (6, 6, 6), "tied": True},
    "Qwen2ForCausalLM": {"windows": (None, 4, 4), "qkv_bias": True, "rope": Rope(theta=500.0)},
    "GPT2LMHeadModel": {"rope": None, "norm": "layer", "gated": False, "activation": "gelu_tanh", "tied": True}
    | {"qkv_bias": True, "attention_out_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("architecture", NATIVE_CONFIGS)
def test_a_decoder_of_ones_own_becomes_an_architecture_of_hugging_face(tmp_path, architecture: str):
    config = DecoderConfig(
        vocab_size=101, hidden_size=32, ffn_size=40, num_layers=3, num_heads=4, **NATIVE_CONFIGS[architecture]
    )
    module = PipelineModule(decoder(config), num_stages=1).eval()
    save_hf(module, tmp_path / "out")
    model = load_model(tmp_path / "out")
    assert type(model).__name__ == architecture
    ids = token_ids(2, 13) % 101
    with torch.no_grad():
        torch.testing.assert_close(module(ids), logits_of(model, input_ids=ids), rtol=1e-5, atol=1e-5)


def test_switches_that_no_architecture_has_together_are_refused(tmp_path):
    config = DecoderConfig(vocab_size=9, hidden_size=8, ffn_size=8, num_layers=1, num_heads=1, norm="layer")
    with pytest.raises(CheckpointError, match="norm='layer'"):
        save_hf(PipelineModule(decoder(config), num_stages=1), tmp_path / "out")


def test_fresh_weights_are_normal_with_the_configured_deviation():
    config = DecoderConfig(
        vocab_size=400, hidden_size=128, ffn_size=256, num_layers=8, num_heads=4, init_std=0.05, depth_scaled_init=True
    )
    module = PipelineModule(decoder(config, dtype=torch.bfloat16), num_stages=1)
    block = module.layers["3"]
    deviations = {"query": 0.05, "up": 0.05, "attention_out": 0.0125, "down": 0.0125}
    for name, deviation in deviations.items():
        weight = block.get_parameter(f"{name}.weight")
        assert weight.dtype == torch.bfloat16
        assert float(weight.detach().float().std()) == pytest.approx(deviation, rel=0.05)
    assert bool((block.attention_norm.weight == 1).all())


def test_dropout_acts_in_training_alone():
    model = make_model("gpt2", resid_pdrop=0.5, attn_pdrop=0.5, embd_pdrop=0.5)
    module = PipelineModule(from_hf(model), num_stages=1)
    ids = token_ids(1, 8)
    wanted = logits_of(model, input_ids=ids)
    torch.testing.assert_close(module.eval()(ids), wanted, rtol=1e-5, atol=1e-5)
    assert float((module.train()(ids) - wanted).norm() / wanted.norm()) > 0.1


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"ids": torch.zeros(1, 2)}, "input_ids"),
        (torch.zeros(1, 65, dtype=torch.long), "max_positions is 64"),
        # Transformers adds it to the scores; as bools, it would hide what attends.
        ({"input_ids": torch.zeros(1, 2, dtype=torch.long), "attention_mask": torch.zeros(1, 1, 2, 2)}, "give bools"),
    ],
)
def test_inputs_that_fit_no_decoder(inputs: Any, told: str):
    module = PipelineModule(from_hf(make_model("gpt2")), num_stages=1)
    with pytest.raises(DataError, match=told):
        module(inputs)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_heads": 3}, "3 heads don't divide hidden_size 32"),
        ({"num_kv_heads": 3}, "3 key-value heads don't divide 4 heads"),
        ({"head_dim": 5}, "head_dim is 5"),
        ({"windows": (4,)}, "1 windows for 2 layers"),
        ({"windows": (4, 0)}, "itself"),
    ],
)
def test_sizes_that_do_not_fit_each_other(changes: dict[str, Any], told: str):
    sizes = {"vocab_size": 9, "hidden_size": 32, "ffn_size": 8, "num_layers": 2, "num_heads": 4}
    with pytest.raises(ConfigError, match=told):
        DecoderConfig(**{**sizes, **changes})


@pytest.mark.parametrize("units", ["block", "half"])
def test_every_module_with_a_hook_is_called(units: str):
    """check_numerics needs that to name the module that made a NaN; a replaced module is called as well."""

    class Doubled(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    config = DecoderConfig(vocab_size=7, hidden_size=8, ffn_size=12, num_layers=1, num_heads=2, max_positions=4)
    layers = nn.Sequential(*(spec.build(None) for spec in decoder(config, units=units)))
    ids = torch.arange(4)[None]
    before = layers(ids)
    inner = {name: m for name, m in layers.named_modules() if not list(m.children()) and not isinstance(m, nn.Dropout)}
    called: set[str] = set()
    for name, module in inner.items():
        module.register_forward_hook(lambda m, x, y, name=name: called.add(name))
    assert torch.equal(layers(ids), before)
    assert {name for name in inner if "dropout" not in name} <= called
    block = next(m for m in layers if hasattr(m, "mlp_norm"))
    block.mlp_norm = Doubled(8, eps=config.norm_eps)
    assert not torch.allclose(layers(ids), before)
