"""Which tensors of a Hugging Face checkpoint the parameters of each layer are."""

from __future__ import annotations

from parallel3d.checkpoint.stored import LayerNames, Section, Stored, all_of
from parallel3d.models.config import DecoderConfig


def num_places(config: DecoderConfig) -> int:
    """Layers in the list: embedding, blocks, final norm, head."""
    return config.num_layers + 3


def layer_names(config: DecoderConfig, place: int) -> LayerNames:
    """Of the layer at a place in the list. A tied head is stored as the embedding."""
    family = _llama if config.rope is not None else _gpt2
    return family(config, place)


def _llama(config: DecoderConfig, place: int) -> dict[str, Stored]:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = "model.embed_tokens.weight"
    if place == 0:
        return {"tokens.weight": all_of(embedding, vocab, hidden)}
    if place == config.num_layers + 1:
        return _norm("norm", "model.norm", config)
    if place == config.num_layers + 2:
        return {"logits.weight": all_of(embedding if config.tied else "lm_head.weight", vocab, hidden)}
    block = f"model.layers.{place - 1}."
    attention, mlp = block + "self_attn.", block + "mlp."
    query, key = config.num_heads * config.dim_of_head, config.kv_heads * config.dim_of_head
    ups = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
    names = {
        **_norm("attention_norm", block + "input_layernorm", config),
        **_norm("mlp_norm", block + "post_attention_layernorm", config),
    }
    for ours, theirs, out, size, bias in [
        ("query", [attention + "q_proj"], query, hidden, config.qkv_bias),
        ("key", [attention + "k_proj"], key, hidden, config.qkv_bias),
        ("value", [attention + "v_proj"], key, hidden, config.qkv_bias),
        ("attention_out", [attention + "o_proj"], hidden, query, config.attention_out_bias),
        ("up", [mlp + up for up in ups], config.ffn_size, hidden, config.mlp_bias),
        ("down", [mlp + "down_proj"], hidden, config.ffn_size, config.mlp_bias),
    ]:
        names[f"{ours}.weight"] = Stored(tuple(Section(n + ".weight", out) for n in theirs), (size,))
        if bias:
            names[f"{ours}.bias"] = Stored(tuple(Section(n + ".bias", out) for n in theirs))
    return names


def _gpt2(config: DecoderConfig, place: int) -> dict[str, Stored]:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = "transformer.wte.weight"
    if place == 0:
        positions = all_of("transformer.wpe.weight", config.max_positions, hidden)
        return {"tokens.weight": all_of(embedding, vocab, hidden), "positions.weight": positions}
    if place == config.num_layers + 1:
        return _norm("norm", "transformer.ln_f", config)
    if place == config.num_layers + 2:
        return {"logits.weight": all_of(embedding if config.tied else "lm_head.weight", vocab, hidden)}
    block = f"transformer.h.{place - 1}."
    names = {**_norm("attention_norm", block + "ln_1", config), **_norm("mlp_norm", block + "ln_2", config)}
    for ours, theirs, out, size, start, of in [
        ("query", "attn.c_attn", hidden, hidden, 0, 3 * hidden),
        ("key", "attn.c_attn", hidden, hidden, hidden, 3 * hidden),
        ("value", "attn.c_attn", hidden, hidden, 2 * hidden, 3 * hidden),
        ("attention_out", "attn.c_proj", hidden, hidden, 0, hidden),
        ("up", "mlp.c_fc", config.ffn_size, hidden, 0, config.ffn_size),
        ("down", "mlp.c_proj", hidden, config.ffn_size, 0, hidden),
    ]:
        names[f"{ours}.weight"] = Stored(
            (Section(block + theirs + ".weight", out, start, of),), (size,), transposed=True
        )
        names[f"{ours}.bias"] = Stored((Section(block + theirs + ".bias", out, start, of),))
    return names


def _norm(ours: str, theirs: str, config: DecoderConfig) -> dict[str, Stored]:
    parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{ours}.{part}": all_of(f"{theirs}.{part}", config.hidden_size) for part in parts}
