"""Names of a decoder's parameters in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from parallel3d.checkpoint.export import LayerNames, Section, Stored
from parallel3d.models.config import DecoderConfig


class Piece(NamedTuple):
    """Smallest part of a decoder that can be a layer. layer: index of the attention or feed-forward network."""

    kind: Literal["embedding", "attention", "feed_forward", "final_norm", "head"]
    layer: int = 0


EMBEDDING, FINAL_NORM, HEAD = Piece("embedding"), Piece("final_norm"), Piece("head")

# Module of each kind of piece -> its name in checkpoints with rotary positions, and in GPT-2's. {0} is the layer's index.
# A module with two names is their concatenation; one without a name isn't there.
_MODULES: dict[str, dict[str, tuple[str, str]]] = {
    "embedding": {"tokens": ("model.embed_tokens", "transformer.wte"), "positions": ("", "transformer.wpe")},
    "attention": {
        "attention_norm": ("model.layers.{0}.input_layernorm", "transformer.h.{0}.ln_1"),
        "query": ("model.layers.{0}.self_attn.q_proj", "transformer.h.{0}.attn.c_attn"),
        "key": ("model.layers.{0}.self_attn.k_proj", "transformer.h.{0}.attn.c_attn"),
        "value": ("model.layers.{0}.self_attn.v_proj", "transformer.h.{0}.attn.c_attn"),
        "attention_out": ("model.layers.{0}.self_attn.o_proj", "transformer.h.{0}.attn.c_proj"),
    },
    "feed_forward": {
        "mlp_norm": ("model.layers.{0}.post_attention_layernorm", "transformer.h.{0}.ln_2"),
        "up": ("model.layers.{0}.mlp.gate_proj model.layers.{0}.mlp.up_proj", "transformer.h.{0}.mlp.c_fc"),
        "down": ("model.layers.{0}.mlp.down_proj", "transformer.h.{0}.mlp.c_proj"),
    },
    "final_norm": {"norm": ("model.norm", "transformer.ln_f")},
    "head": {"logits": ("lm_head", "lm_head")},
}
# GPT-2 stores these one after the other in one tensor.
_FUSED = ("query", "key", "value")


def pieces_of(config: DecoderConfig) -> Iterator[Piece]:
    """Yield all pieces of a decoder in order."""
    yield EMBEDDING
    for layer in range(config.num_layers):
        yield Piece("attention", layer)
        yield Piece("feed_forward", layer)
    yield FINAL_NORM
    yield HEAD


def names_of(config: DecoderConfig, piece: Piece) -> LayerNames:
    """Return how a piece's parameters are stored. A tied head is stored as the embedding."""
    hidden, vocab, ffn = config.hidden_size, config.vocab_size, config.ffn_size
    heads, kv_heads = config.num_heads * config.dim_of_head, config.kv_heads * config.dim_of_head
    is_gpt2 = config.rope is None
    embeddings = {"tokens": (vocab, hidden), "positions": (config.max_positions, hidden), "logits": (vocab, hidden)}
    linears = {
        "query": (heads, hidden),
        "key": (kv_heads, hidden),
        "value": (kv_heads, hidden),
        "attention_out": (hidden, heads),
        "up": (ffn, hidden),
        "down": (hidden, ffn),
    }
    biases = {
        **dict.fromkeys(_FUSED, config.qkv_bias),
        "attention_out": config.attention_out_bias,
        **dict.fromkeys(("up", "down"), config.mlp_bias),
        **dict.fromkeys(("attention_norm", "mlp_norm", "norm"), config.norm == "layer"),
    }
    names: dict[str, Stored] = {}
    for ours, stored_names in _MODULES[piece.kind].items():
        if ours == "logits" and config.tied:
            stored_names = _MODULES["embedding"]["tokens"]
        theirs = stored_names[is_gpt2].format(piece.layer).split()
        if not theirs:
            continue
        rows, *columns = linears.get(ours) or embeddings.get(ours) or (hidden,)
        start, of = (_FUSED.index(ours) * rows, 3 * rows) if is_gpt2 and ours in _FUSED else (0, None)
        rest = {"weight": tuple(columns), "bias": ()} if biases.get(ours) else {"weight": tuple(columns)}
        for parameter, sizes in rest.items():
            sections = tuple(Section(f"{name}.{parameter}", rows, start, of) for name in theirs)
            names[f"{ours}.{parameter}"] = Stored(sections, sizes, is_gpt2 and ours in linears and sizes != ())
    return names
