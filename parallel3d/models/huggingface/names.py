"""Which tensors of a Hugging Face checkpoint the parameters of a decoder's pieces are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from parallel3d.checkpoint.export import LayerNames, Section, Stored, all_of
from parallel3d.models.config import DecoderConfig


class Piece(NamedTuple):
    """The smallest that a layer of the list may be. layer: which attention or feed-forward network, from 0 on."""

    kind: Literal["embedding", "attention", "feed_forward", "final_norm", "head"]
    layer: int = 0


EMBEDDING, FINAL_NORM, HEAD = Piece("embedding"), Piece("final_norm"), Piece("head")


def pieces_of(config: DecoderConfig) -> Iterator[Piece]:
    """All of a decoder, in their order."""
    yield EMBEDDING
    for layer in range(config.num_layers):
        yield Piece("attention", layer)
        yield Piece("feed_forward", layer)
    yield FINAL_NORM
    yield HEAD


def names_of(config: DecoderConfig, piece: Piece) -> LayerNames:
    """How a piece's parameters are stored. A tied head is stored as the embedding."""
    family = _llama if config.rope is not None else _gpt2
    return family(config, piece)


def _llama(config: DecoderConfig, piece: Piece) -> LayerNames:
    hidden, vocab, ffn = config.hidden_size, config.vocab_size, config.ffn_size
    embedding, block = "model.embed_tokens.weight", f"model.layers.{piece.layer}."
    if piece.kind == "embedding":
        return {"tokens.weight": all_of(embedding, vocab, hidden)}
    if piece.kind == "final_norm":
        return _norm("norm", "model.norm", config)
    if piece.kind == "head":
        return {"logits.weight": all_of(embedding if config.tied else "lm_head.weight", vocab, hidden)}
    if piece.kind == "feed_forward":
        mlp = block + "mlp."
        ups = [mlp + "gate_proj", mlp + "up_proj"] if config.gated else [mlp + "up_proj"]
        return {
            **_norm("mlp_norm", block + "post_attention_layernorm", config),
            **_rows("up", ups, ffn, hidden, config.mlp_bias),
            **_rows("down", [mlp + "down_proj"], hidden, ffn, config.mlp_bias),
        }
    attention = block + "self_attn."
    query, key = config.num_heads * config.dim_of_head, config.kv_heads * config.dim_of_head
    return {
        **_norm("attention_norm", block + "input_layernorm", config),
        **_rows("query", [attention + "q_proj"], query, hidden, config.qkv_bias),
        **_rows("key", [attention + "k_proj"], key, hidden, config.qkv_bias),
        **_rows("value", [attention + "v_proj"], key, hidden, config.qkv_bias),
        **_rows("attention_out", [attention + "o_proj"], hidden, query, config.attention_out_bias),
    }


def _rows(ours: str, theirs: Iterable[str], out: int, size: int, bias: bool) -> dict[str, Stored]:
    """A linear that is one or several of theirs, [out, size] each, one behind the other."""
    names = {f"{ours}.weight": Stored(tuple(Section(name + ".weight", out) for name in theirs), (size,))}
    if bias:
        names[f"{ours}.bias"] = Stored(tuple(Section(name + ".bias", out) for name in theirs))
    return names


def _gpt2(config: DecoderConfig, piece: Piece) -> LayerNames:
    hidden, vocab, ffn = config.hidden_size, config.vocab_size, config.ffn_size
    embedding, block = "transformer.wte.weight", f"transformer.h.{piece.layer}."
    if piece.kind == "embedding":
        positions = all_of("transformer.wpe.weight", config.max_positions, hidden)
        return {"tokens.weight": all_of(embedding, vocab, hidden), "positions.weight": positions}
    if piece.kind == "final_norm":
        return _norm("norm", "transformer.ln_f", config)
    if piece.kind == "head":
        return {"logits.weight": all_of(embedding if config.tied else "lm_head.weight", vocab, hidden)}
    if piece.kind == "feed_forward":
        return {
            **_norm("mlp_norm", block + "ln_2", config),
            **_columns("up", block + "mlp.c_fc", ffn, hidden),
            **_columns("down", block + "mlp.c_proj", hidden, ffn),
        }
    names = _norm("attention_norm", block + "ln_1", config)
    for k, ours in enumerate(("query", "key", "value")):
        names |= _columns(ours, block + "attn.c_attn", hidden, hidden, start=k * hidden, of=3 * hidden)
    return names | _columns("attention_out", block + "attn.c_proj", hidden, hidden)


def _columns(ours: str, theirs: str, out: int, size: int, start: int = 0, of: int | None = None) -> dict[str, Stored]:
    """A linear that is some columns of one of theirs, transposed, with a bias."""
    weight = Stored((Section(theirs + ".weight", out, start, of),), (size,), transposed=True)
    return {f"{ours}.weight": weight, f"{ours}.bias": Stored((Section(theirs + ".bias", out, start, of),))}


def _norm(ours: str, theirs: str, config: DecoderConfig) -> dict[str, Stored]:
    parts = ("weight", "bias") if config.norm == "layer" else ("weight",)
    return {f"{ours}.{part}": all_of(f"{theirs}.{part}", config.hidden_size) for part in parts}
