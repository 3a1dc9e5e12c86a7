"""A decoder as a list of layer specs."""

from __future__ import annotations

from typing import Any, Literal

import torch

from parallel3d.errors import ConfigError, nearest
from parallel3d.models.blocks import Attention, Block, FeedForward
from parallel3d.models.config import DecoderConfig
from parallel3d.models.huggingface.weights import Weights
from parallel3d.models.layers import DecoderLayer, FinalNorm, Head, TokenEmbedding
from parallel3d.models.tables import Tables
from parallel3d.specs import LayerSpec, TiedLayerSpec


def decoder(
    config: DecoderConfig,
    dtype: torch.dtype | None = None,
    weights: Weights | None = None,
    units: Literal["block", "half"] = "block",
) -> list[LayerSpec]:
    """Return the layers of a decoder for a PipelineModule: token ids [batch, seq] -> logits [batch, seq, vocab].

    dtype: of the weights, torch's default one for None. weights: read by the layers that a rank builds, instead of drawn.
    units: each block one layer, or two, its attention and its feed-forward, between which a stage may end, so that stages
    can be balanced to half a block. The inputs may also be a dict, see TokenEmbedding. Raises ConfigError for other units.
    """
    if units not in ("block", "half"):
        raise ConfigError(f'units is {units!r}; give "block" or "half".{nearest(str(units), ("block", "half"))}')
    tables = Tables(config)
    given: dict[str, Any] = {"weights": weights, "dtype": dtype}
    kinds: tuple[type[DecoderLayer], ...] = (Block,) if units == "block" else (Attention, FeedForward)
    blocks = [LayerSpec(kind, config, k, tables, **given) for k in range(config.num_layers) for kind in kinds]
    norm = LayerSpec(FinalNorm, config, **given)
    if not config.tied:
        return [LayerSpec(TokenEmbedding, config, **given), *blocks, norm, LayerSpec(Head, config, **given)]
    # Tied by the weight, not as a module: learned positions are the embedding's alone.
    embedding = TiedLayerSpec("embedding", TokenEmbedding, config, tied_weight_attr="tokens.weight", **given)
    return [
        embedding,
        *blocks,
        norm,
        TiedLayerSpec("embedding", Head, config, tied_weight_attr="logits.weight", **given),
    ]
