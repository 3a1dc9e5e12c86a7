"""Names of a decoder's parameters in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from parallel3d.checkpoint.export import LayerNames, Section, Stored
from parallel3d.models.config import DecoderConfig

# The smallest parts of a decoder that can be layers.
Part = Literal["embedding", "attention", "feed_forward", "final_norm", "head"]

# Module of each part -> its name in checkpoints with rotary positions, and in GPT-2's. {0} is the block's index.
# A module with two names is their concatenation; one without a name isn't there.
_MODULES: dict[Part, dict[str, tuple[str, str]]] = {
    "embedding": {"tokens": ("model.embed_tokens", "transformer.wte"), "positions": ("", "transformer.wpe")},
    "attention": {
        "attention_norm": ("model.layers.{0}.input_layernorm", "transformer.h.{0}.ln_1"),
        "query": ("model.layers.{0}.self_attn.q_proj", "transformer.h.{0}.attn.c_attn"),
        "key": ("model.layers.{0}.self_attn.k_proj", "transformer.h.{0}.attn.c_attn"),
        "value": ("model.layers.{0}.self_attn.v_proj", "transformer.h.{0}.attn.c_attn"),
        "mixing.query_norm": ("model.layers.{0}.self_attn.q_norm", ""),
        "mixing.key_norm": ("model.layers.{0}.self_attn.k_norm", ""),
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


def all_stored(config: DecoderConfig) -> Iterator[Stored]:
    """Yield how each parameter of the whole decoder is stored, in order."""
    blocks: list[tuple[Part, int]] = []
    for block in range(config.num_layers):
        blocks += [("attention", block), ("feed_forward", block)]
    for part, block in (("embedding", 0), *blocks, ("final_norm", 0), ("head", 0)):
        yield from names_of(config, part, block).values()


def names_of(config: DecoderConfig, part: Part, block: int = 0) -> LayerNames:
    """Return how the parameters of a part are stored. A tied head is stored as the embedding."""
    hidden, vocab, ffn = config.hidden_size, config.vocab_size, config.ffn_size
    heads, kv_heads = config.num_heads * config.dim_of_head, config.kv_heads * config.dim_of_head
    is_gpt2 = config.rope is None
    embeddings = {"tokens": (vocab, hidden), "positions": (config.max_positions, hidden), "logits": (vocab, hidden)}
    head_norms = dict.fromkeys(("mixing.query_norm", "mixing.key_norm"), (config.dim_of_head,))
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
    for ours, stored_names in _MODULES[part].items():
        if ours == "logits" and config.tied:
            stored_names = _MODULES["embedding"]["tokens"]
        theirs = stored_names[is_gpt2].format(block).split()
        if not theirs or (ours in head_norms and not config.head_norms):
            continue
        rows, *columns = linears.get(ours) or embeddings.get(ours) or head_norms.get(ours) or (hidden,)
        start, of = (_FUSED.index(ours) * rows, 3 * rows) if is_gpt2 and ours in _FUSED else (0, None)
        rest = {"weight": tuple(columns), "bias": ()} if biases.get(ours) else {"weight": tuple(columns)}
        for parameter, sizes in rest.items():
            sections = tuple(Section(f"{name}.{parameter}", rows, start, of) for name in theirs)
            names[f"{ours}.{parameter}"] = Stored(sections, sizes, is_gpt2 and ours in linears and sizes != ())
    return names
