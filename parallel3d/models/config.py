"""Configuration of a decoder: sizes, and the switches in which the architectures of huggingface/config.py differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from parallel3d.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
MOST_LAYERS, MOST_SIZE = 10_000, 2**31  # limits of a decoder, so that a wrong digit is found at once
_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (arXiv:2104.09864) and how its frequencies are scaled for longer contexts.

    Aliases are the keys of Hugging Face's rope_parameters.

    - kind: linear scales all frequencies by 1 / factor; dynamic lets theta grow with a sequence longer than the decoder's
      max_positions; llama3 scales only the long wavelengths; yarn scales by a ramp over the dimensions, with a temperature
      (arXiv:2309.00071).
    - original_max_positions: max_positions before the context was extended; llama3 and yarn scale relative to it.
    """

    theta: Annotated[float, Field(alias="rope_theta", gt=1, allow_inf_nan=False)] = 10000.0
    kind: Annotated[Literal["default", "linear", "dynamic", "llama3", "yarn"], Field(alias="rope_type")] = "default"
    factor: _Above = 1.0
    original_max_positions: Annotated[
        int | None, Field(alias="original_max_position_embeddings", gt=0, lt=MOST_SIZE)
    ] = None
    low_freq_factor: _Above = 1.0
    high_freq_factor: _Above = 4.0
    beta_fast: _Above = 32.0
    beta_slow: _Above = 1.0
    attention_factor: _Finite | None = None
    mscale: _Finite | None = None
    mscale_all_dim: _Finite | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}; "
                "make the second one larger"
            )


_SIZES = ("vocab_size", "hidden_size", "ffn_size", "num_heads", "num_kv_heads", "head_dim", "max_positions")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Decoder-only transformer with pre-normalization: token ids [batch, seq] -> logits.

    - num_kv_heads: by default num_heads; with fewer, queries are grouped. head_dim: by default hidden_size / num_heads.
    - norm: "rms" (arXiv:1910.07467), "rms_plus_one", which multiplies by 1 + weight in fp32 as Gemma's does, or "layer".
    - head_norms: the query and the key of each head are normalized, before the rotary positions, as in Qwen3.
    - embedding_scale: factor of the embeddings, rounded to their dtype.
    - gated: down(act(gate(x)) * up(x)) (arXiv:2002.05202), else down(act(up(x))).
    - rope: None for max_positions learned positions.
    - windows: for each layer, the number of positions, its own included, to which a position attends, or None for all;
      empty if all layers attend to all.
    - tied: the head's weight is the embedding's. Dropouts act in training only.
    - depth_scaled_init: projections into the residual stream start smaller by sqrt(2 * num_layers), as GPT-2's.
    - huggingface: the config.json from which it was read, see HuggingFaceLayer.config_json.

    Raises ConfigError for sizes that don't fit each other.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 2048
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    head_norms: bool = False
    embedding_scale: float = 1.0
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated: bool = True
    rope: Rope | None = field(default_factory=Rope)
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    tied: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    init_std: float = 0.02
    depth_scaled_init: bool = False
    huggingface: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        most = {"num_layers": MOST_LAYERS} | dict.fromkeys(_SIZES, MOST_SIZE)
        for name, limit in most.items():
            size = getattr(self, name)
            if size is not None and not 1 <= size <= limit:
                raise ConfigError(f"{name} is {size}; give a whole number from 1 to {limit}")
        for name in ("embedding_dropout", "attention_dropout", "residual_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a number from 0 to 1")
        if self.init_std < 0:
            raise ConfigError(f"init_std is {self.init_std}; give a number >= 0")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ConfigError(
                f"{self.num_heads} heads don't divide hidden_size {self.hidden_size}; give head_dim, or another num_heads"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(f"{self.kv_heads} key-value heads don't divide {self.num_heads} heads")
        if self.rope is not None and self.dim_of_head % 2:
            raise ConfigError(
                f"rotary positions turn pairs of numbers, but head_dim is {self.dim_of_head}; make it even"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} windows for {self.num_layers} layers; give one for each, or none")
        if any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"windows are {self.windows}; a position attends to 1 position, itself, or more")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def dim_of_head(self) -> int:
        """Numbers of one head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    def window(self, layer: int) -> int | None:
        """Return the attention window of block `layer`, counted from 0, or None."""
        return self.windows[layer] if self.windows else None
