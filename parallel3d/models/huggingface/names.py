"""Which tensors of a Hugging Face checkpoint the parameters of each layer are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from parallel3d.models.config import DecoderConfig


@dataclass(frozen=True)
class Stored:
    """How a parameter is stored: these tensors, one after the other along its dim 0, of these sizes there.

    rest: the parameter's other sizes. transposed: each is stored as [in, out] where the parameter is [out, in].
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rest: tuple[int, ...] = ()
    transposed: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each tensor, as stored."""
        whole = {name: (size, *self.rest) for name, size in zip(self.names, self.sizes, strict=True)}
        return {name: shape[::-1] if self.transposed else shape for name, shape in whole.items()}

    def split(self, whole: Tensor) -> dict[str, Tensor]:
        """The tensors, as stored, of a whole parameter."""
        if whole.dim() == 0:
            return {self.names[0]: whole}
        parts = zip(self.names, whole.split(list(self.sizes)), strict=True)
        return {name: (part.t() if self.transposed else part).contiguous() for name, part in parts}


# Of a parameter by its name in the layer.
LayerNames = Mapping[str, Stored]


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
        return {"tokens.weight": Stored((embedding,), (vocab,), (hidden,))}
    if place == config.num_layers + 1:
        return _norm("norm", "model.norm", config)
    if place == config.num_layers + 2:
        return {"logits.weight": Stored((embedding if config.tied else "lm_head.weight",), (vocab,), (hidden,))}
    block = f"model.layers.{place - 1}."
    attention, mlp = block + "self_attn.", block + "mlp."
    query, key = config.num_heads * config.dim_of_head, config.kv_heads * config.dim_of_head
    ups = ("gate_proj", "up_proj") if config.gated else ("up_proj",)
    names = {
        **_norm("attention_norm", block + "input_layernorm", config),
        **_norm("mlp_norm", block + "post_attention_layernorm", config),
    }
    for ours, theirs, outs, size, bias in [
        ("qkv", [attention + f"{n}_proj" for n in "qkv"], (query, key, key), hidden, config.qkv_bias),
        ("attention_out", [attention + "o_proj"], (hidden,), query, config.attention_out_bias),
        ("up", [mlp + up for up in ups], (config.ffn_size,) * len(ups), hidden, config.mlp_bias),
        ("down", [mlp + "down_proj"], (hidden,), config.ffn_size, config.mlp_bias),
    ]:
        names[f"{ours}.weight"] = Stored(tuple(n + ".weight" for n in theirs), outs, (size,))
        if bias:
            names[f"{ours}.bias"] = Stored(tuple(n + ".bias" for n in theirs), outs)
    return names


def _gpt2(config: DecoderConfig, place: int) -> dict[str, Stored]:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = "transformer.wte.weight"
    if place == 0:
        positions = Stored(("transformer.wpe.weight",), (config.max_positions,), (hidden,))
        return {"tokens.weight": Stored((embedding,), (vocab,), (hidden,)), "positions.weight": positions}
    if place == config.num_layers + 1:
        return _norm("norm", "transformer.ln_f", config)
    if place == config.num_layers + 2:
        return {"logits.weight": Stored((embedding if config.tied else "lm_head.weight",), (vocab,), (hidden,))}
    block = f"transformer.h.{place - 1}."
    names = {**_norm("attention_norm", block + "ln_1", config), **_norm("mlp_norm", block + "ln_2", config)}
    for ours, theirs, out, size in [
        ("qkv", "attn.c_attn", 3 * hidden, hidden),
        ("attention_out", "attn.c_proj", hidden, hidden),
        ("up", "mlp.c_fc", config.ffn_size, hidden),
        ("down", "mlp.c_proj", hidden, config.ffn_size),
    ]:
        names[f"{ours}.weight"] = Stored((block + theirs + ".weight",), (out,), (size,), transposed=True)
        names[f"{ours}.bias"] = Stored((block + theirs + ".bias",), (out,))
    return names


def _norm(ours: str, theirs: str, config: DecoderConfig) -> dict[str, Stored]:
    parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{ours}.{part}": Stored((f"{theirs}.{part}",), (config.hidden_size,)) for part in parts}
