"""config.json of the architectures that the native decoder knows, to the decoder's switches and back."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import ValidationError

from parallel3d.errors import ConfigError, nearest
from parallel3d.models.config import DecoderConfig, Rope
from parallel3d.models.huggingface.rope import Json, RopeJson, refuse, rope_section

# Keys that don't change what is computed, or only in generation.
_NEUTRAL = frozenset(
    """architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id
    sep_token_id pretraining_tp _name_or_path name_or_path _attn_implementation attn_implementation return_dict
    output_attentions output_hidden_states output_scores id2label label2id problem_type num_labels task_specific_params
    tokenizer_class prefix finetuning_task gradient_checkpointing initializer_factor n_ctx max_length min_length do_sample
    temperature top_k top_p typical_p repetition_penalty length_penalty num_beams num_return_sequences
    no_repeat_ngram_size chunk_size_feed_forward _commit_hash is_decoder unsloth_version
    summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout""".split()
)
_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh", "relu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class Family(Json):
    """Keys of config.json that every architecture has; `decoder` returns its DecoderConfig."""

    architecture: ClassVar[str]
    model_type: ClassVar[str]
    base: ClassVar[str] = "model."

    vocab_size: int
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    @abstractmethod
    def decoder(self) -> DecoderConfig:
        """Its switches."""

    @classmethod
    @abstractmethod
    def of(cls, config: DecoderConfig) -> dict[str, Any]:
        """The keys for a decoder, as well as this architecture can have it."""


class _Rotary(Family):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeJson | None = None
    rope_parameters: RopeJson | None = None
    attention_dropout: float | None = 0.0

    def _decoder(self, **switches: Any) -> DecoderConfig:
        scaling = self.rope_parameters or self.rope_scaling or RopeJson()
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            ffn_size=self.intermediate_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            max_positions=self.max_position_embeddings,
            norm_eps=self.rms_norm_eps,
            activation=_activation("hidden_act", self.hidden_act),
            rope=scaling.rope(self.rope_theta),
            tied=self.tie_word_embeddings,
            attention_dropout=self.attention_dropout or 0.0,
            init_std=self.initializer_range,
            **switches,
        )

    @classmethod
    def _keys(cls, config: DecoderConfig) -> dict[str, Any]:
        rope = RopeJson.of(config.rope or Rope())
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.ffn_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.dim_of_head,
            "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.norm_eps,
            # As transformers 4 and 5 both read it.
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if config.rope is None or config.rope.kind == "default" else scaling,
            "attention_dropout": config.attention_dropout,
            "initializer_range": config.init_std,
            "tie_word_embeddings": config.tied,
        }


class Llama(_Rotary):
    """Biases by attention_bias and mlp_bias."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    attention_bias: bool = False
    mlp_bias: bool = False

    def decoder(self) -> DecoderConfig:
        """Return the decoder of this configuration."""
        biases = {"qkv_bias": self.attention_bias, "attention_out_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        return self._decoder(**biases)

    @classmethod
    def of(cls, config: DecoderConfig) -> dict[str, Any]:
        """Return the keys of config.json for a decoder."""
        return {**cls._keys(config), "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


class Qwen2(_Rotary):
    """Biases of query, key and value; a sliding window in the last layers."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None

    def decoder(self) -> DecoderConfig:
        """Return the decoder of this configuration."""
        window = self.sliding_window if self.use_sliding_window else None
        slides = [k >= self.max_window_layers for k in range(self.num_hidden_layers)]
        if self.layer_types is not None:
            slides = [kind == "sliding_attention" for kind in self.layer_types]
        windows = tuple(window if there else None for there in slides)
        return self._decoder(qkv_bias=True, windows=windows if any(windows) else ())

    @classmethod
    def of(cls, config: DecoderConfig) -> dict[str, Any]:
        """Return the keys of config.json for a decoder."""
        first = next((k for k, window in enumerate(config.windows) if window is not None), config.num_layers)
        window = config.windows[first] if first < config.num_layers else None
        return {
            **cls._keys(config),
            "use_sliding_window": window is not None,
            "sliding_window": window,
            "max_window_layers": first,
        }


class Mistral(_Rotary):
    """One sliding window in all layers, or none."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"
    max_position_embeddings: int = 131072
    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096

    def decoder(self) -> DecoderConfig:
        """Return the decoder of this configuration."""
        return self._decoder(windows=(self.sliding_window,) * self.num_hidden_layers if self.sliding_window else ())

    @classmethod
    def of(cls, config: DecoderConfig) -> dict[str, Any]:
        """Return the keys of config.json for a decoder."""
        return {**cls._keys(config), "sliding_window": config.windows[0] if config.windows else None}


class Gpt2(Family):
    """Learned positions, LayerNorm, biases everywhere."""

    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    base = "transformer."
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_positions: int = 1024
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    tie_word_embeddings: bool = True
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    reorder_and_upcast_attn: Literal[False] = False
    add_cross_attention: Literal[False] = False

    def decoder(self) -> DecoderConfig:
        """Return the decoder of this configuration."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.n_embd,
            ffn_size=4 * self.n_embd if self.n_inner is None else self.n_inner,
            num_layers=self.n_layer,
            num_heads=self.n_head,
            num_kv_heads=self.n_head,
            head_dim=self.n_embd // self.n_head,
            max_positions=self.n_positions,
            norm="layer",
            norm_eps=self.layer_norm_epsilon,
            activation=_activation("activation_function", self.activation_function),
            gated=False,
            rope=None,
            qkv_bias=True,
            attention_out_bias=True,
            mlp_bias=True,
            tied=self.tie_word_embeddings,
            embedding_dropout=self.embd_pdrop,
            attention_dropout=self.attn_pdrop,
            residual_dropout=self.resid_pdrop,
            init_std=self.initializer_range,
            depth_scaled_init=True,
        )

    @classmethod
    def of(cls, config: DecoderConfig) -> dict[str, Any]:
        """Return the keys of config.json for a decoder."""
        return {
            "vocab_size": config.vocab_size,
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_positions": config.max_positions,
            "n_inner": config.ffn_size,
            "activation_function": {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation),
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.residual_dropout,
            "embd_pdrop": config.embedding_dropout,
            "attn_pdrop": config.attention_dropout,
            "initializer_range": config.init_std,
            "tie_word_embeddings": config.tied,
        }


FAMILIES: tuple[type[Family], ...] = (Llama, Mistral, Qwen2, Gpt2)


def _activation(key: str, name: str) -> Literal["silu", "gelu", "gelu_tanh", "relu"]:
    if name not in _ACTIVATIONS:
        raise ConfigError(
            f"{key} {name!r} is not known to the native decoder;{nearest(name, _ACTIVATIONS)} it has {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def family_of(raw: Mapping[str, Any]) -> type[Family] | None:
    """The architecture that a config.json names, where the native decoder knows it."""
    named = raw.get("architectures")
    if named:
        return next((family for family in FAMILIES if family.architecture == named[0]), None)
    return next((family for family in FAMILIES if family.model_type == raw.get("model_type")), None)


def parse(raw: Mapping[str, Any], ignore: Collection[str] = ()) -> tuple[type[Family], DecoderConfig]:
    """The architecture of a config.json and its switches. ignore: keys that may be there although nobody knows them.

    Raises ConfigError, naming the key, for an unknown architecture, key, or value.
    """
    family = family_of(raw)
    if family is None:
        name = (raw.get("architectures") or [raw.get("model_type")])[0]
        raise ConfigError(
            f"architecture {name!r} is not known to the native decoder, which has "
            f"{', '.join(f.architecture for f in FAMILIES)}; load the model with transformers and give from_hf the model itself"
        )
    unknown = [key for key in raw if key not in family.model_fields and key not in _NEUTRAL and key not in ignore]
    refuse(f"of a {family.architecture}", {key: raw[key] for key in unknown}, family.model_fields)
    given = dict(raw)
    for section in ("rope_scaling", "rope_parameters"):
        if section in family.model_fields and isinstance(raw.get(section), Mapping):
            given[section] = rope_section(section, raw[section])
    try:
        parsed = family.model_validate({key: value for key, value in given.items() if key in family.model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"{key} = {first['input']!r} in the config.json of a {family.architecture} is not supported: {first['msg']}"
        ) from error
    config = parsed.decoder()
    return family, config


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """config.json of a decoder: the one it came from, or that of an architecture that has all its switches.

    Raises ConfigError where none has.
    """
    if config.huggingface:
        return {**config.huggingface, "tie_word_embeddings": config.tied}
    for family in FAMILIES:
        keys = {"architectures": [family.architecture], "model_type": family.model_type, **family.of(config)}
        if _same_model(parse(keys)[1], config):
            return keys
    raise ConfigError(
        f"no Hugging Face architecture among {', '.join(f.architecture for f in FAMILIES)} has all the switches of {config}"
    )


def _same_model(a: DecoderConfig, b: DecoderConfig) -> bool:
    """Whether both compute the same, however they were initialized."""

    def shown(config: DecoderConfig) -> DecoderConfig:
        return replace(config, num_kv_heads=config.kv_heads, head_dim=config.dim_of_head, depth_scaled_init=False)

    return shown(a) == shown(b)
