"""Conversion between the native decoder's configuration and the config.json of the architectures that it knows."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from parallel3d.checkpoint.export import GENERATION
from parallel3d.config.files import explain, parse_json, read_mapping
from parallel3d.errors import ConfigError, nearest
from parallel3d.models.config import MOST_LAYERS, Activation, DecoderConfig, Rope

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
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def _activation(name: Any) -> Activation:
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(f"the native decoder has {', '.join(_ACTIVATIONS)}.{nearest(str(name), _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


_Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]  # before a list has an entry for each
_KnownActivation = Annotated[Activation, BeforeValidator(_activation)]
_Rate = Annotated[float, BeforeValidator(lambda rate: 0.0 if rate is None else rate)]
_FIELDS = {field.name for field in fields(DecoderConfig)}


class Family(BaseModel):
    """Keys of an architecture's config.json. A field that DecoderConfig has too sets that field; its alias is the key.

    - base: prefix of the names that a checkpoint without the head leaves out.
    - constant: fields of DecoderConfig that are the same in all models of the architecture.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False)
    architecture: ClassVar[str]
    model_type: ClassVar[str]
    base: ClassVar[str] = "model."
    constant: ClassVar[Mapping[str, Any]] = {}

    vocab_size: int
    init_std: float = Field(0.02, alias="initializer_range")
    tied: bool = Field(False, alias="tie_word_embeddings")
    is_causal: Literal[True] = True

    @classmethod
    def keys(cls) -> dict[str, str]:
        """Return the keys of config.json by the names of their fields."""
        return {name: field.alias or name for name, field in cls.model_fields.items()}

    def decoder(self) -> DecoderConfig:
        """Return the decoder of this configuration."""
        same = {name: getattr(self, name) for name in _FIELDS.intersection(self.keys())}
        return DecoderConfig(**same, **self.constant, **self.switches())

    @classmethod
    def json_of(cls, config: DecoderConfig) -> dict[str, Any]:
        """Return config.json of a decoder, as well as this architecture can describe it."""
        resolved = replace(config, num_kv_heads=config.kv_heads, head_dim=config.dim_of_head)
        same = {key: getattr(resolved, name) for name, key in cls.keys().items() if name in _FIELDS}
        own = {"architectures": [cls.architecture], "model_type": cls.model_type}
        return {**own, **same, **cls.other_keys(resolved)}

    def switches(self) -> dict[str, Any]:
        """Return the fields of DecoderConfig that no single key gives."""
        return {}

    @classmethod
    def other_keys(cls, config: DecoderConfig) -> dict[str, Any]:
        """Return the keys that are not the value of a single field, the inverse of `switches`."""
        return {}


class _Rotary(Family):
    hidden_size: int
    ffn_size: int = Field(alias="intermediate_size")
    num_layers: _Layers = Field(alias="num_hidden_layers")
    num_heads: int = Field(alias="num_attention_heads")
    num_kv_heads: int | None = Field(None, alias="num_key_value_heads")
    head_dim: int | None = None
    activation: _KnownActivation = Field("silu", alias="hidden_act")
    max_positions: int = Field(2048, alias="max_position_embeddings")
    norm_eps: float = Field(1e-6, alias="rms_norm_eps")
    attention_dropout: _Rate = 0.0
    rope_theta: float = 10000.0
    rope_scaling: Rope | None = None
    rope_parameters: Rope | None = None

    def switches(self) -> dict[str, Any]:
        rope = self.rope_parameters or self.rope_scaling or Rope(theta=self.rope_theta)
        # The key attention_bias, in the architectures that have it, is for all four projections.
        return {"rope": rope, "attention_out_bias": getattr(self, "qkv_bias", False)}

    @classmethod
    def other_keys(cls, config: DecoderConfig) -> dict[str, Any]:
        scaling = rope_json(config.rope or Rope())
        return {
            "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation),
            # As transformers 4 and 5 both read it.
            "rope_theta": scaling.pop("rope_theta"),
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        }


class Llama(_Rotary):
    """Llama: biases by attention_bias and mlp_bias."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"
    qkv_bias: bool = Field(False, alias="attention_bias")
    mlp_bias: bool = False


class Qwen2(_Rotary):
    """Qwen2: biases of query, key and value; a sliding window in the last layers."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"
    constant = {"qkv_bias": True}
    max_positions: int = Field(32768, alias="max_position_embeddings")
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None

    def switches(self) -> dict[str, Any]:
        """Return the fields of DecoderConfig that no single key gives."""
        window = self.sliding_window if self.use_sliding_window else None
        slides = [k >= self.max_window_layers for k in range(self.num_layers)]
        if self.layer_types is not None:
            slides = [kind == "sliding_attention" for kind in self.layer_types]
        windows = tuple(window if there else None for there in slides)
        return {**super().switches(), "windows": windows if any(windows) else ()}

    @classmethod
    def other_keys(cls, config: DecoderConfig) -> dict[str, Any]:
        """Return the keys that are not the value of a single field."""
        first = next((k for k, window in enumerate(config.windows) if window is not None), config.num_layers)
        window = config.windows[first] if first < config.num_layers else None
        sliding = {"use_sliding_window": window is not None, "sliding_window": window, "max_window_layers": first}
        return {**super().other_keys(config), **sliding}


class Qwen3(Qwen2):
    """Qwen3: norms of each head's query and key; biases by attention_bias."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    constant = {"head_norms": True}
    qkv_bias: bool = Field(False, alias="attention_bias")
    num_kv_heads: int | None = Field(32, alias="num_key_value_heads")
    head_dim: int | None = 128


def _tanh(name: Any) -> Activation:
    return "gelu_tanh" if name == "gelu" else _activation(name)


class Gemma(_Rotary):
    """Gemma: norms with the factor 1 + weight, scaled embeddings, and a hidden_act "gelu" that means the tanh approximation."""

    architecture = "GemmaForCausalLM"
    model_type = "gemma"
    constant = {"norm": "rms_plus_one"}
    activation: Annotated[Activation, BeforeValidator(_tanh)] = Field("gelu_tanh", alias="hidden_act")
    hidden_activation: str | None = None  # read by no version of transformers since 5
    max_positions: int = Field(8192, alias="max_position_embeddings")
    num_kv_heads: int | None = Field(16, alias="num_key_value_heads")
    head_dim: int | None = 256
    qkv_bias: bool = Field(False, alias="attention_bias")
    tied: bool = Field(True, alias="tie_word_embeddings")

    def switches(self) -> dict[str, Any]:
        """Return the fields of DecoderConfig that no single key gives."""
        return {**super().switches(), "embedding_scale": math.sqrt(self.hidden_size)}


class Mistral(_Rotary):
    """Mistral: one sliding window in all layers, or none."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"
    max_positions: int = Field(131072, alias="max_position_embeddings")
    num_kv_heads: int | None = Field(8, alias="num_key_value_heads")
    sliding_window: int | None = 4096

    def switches(self) -> dict[str, Any]:
        """Return the fields of DecoderConfig that no single key gives."""
        windows = (self.sliding_window,) * self.num_layers if self.sliding_window else ()
        return {**super().switches(), "windows": windows}

    @classmethod
    def other_keys(cls, config: DecoderConfig) -> dict[str, Any]:
        """Return the keys that are not the value of a single field."""
        return {**super().other_keys(config), "sliding_window": config.windows[0] if config.windows else None}


class Gpt2(Family):
    """GPT-2: learned positions, LayerNorm, biases everywhere."""

    architecture = "GPT2LMHeadModel"
    model_type = "gpt2"
    base = "transformer."
    constant = {"norm": "layer", "gated": False, "rope": None, "depth_scaled_init": True} | dict.fromkeys(
        ("qkv_bias", "attention_out_bias", "mlp_bias"), True
    )
    hidden_size: int = Field(768, alias="n_embd")
    num_layers: _Layers = Field(12, alias="n_layer")
    num_heads: int = Field(12, alias="n_head")
    max_positions: int = Field(1024, alias="n_positions")
    n_inner: int | None = None
    activation: _KnownActivation = Field("gelu_tanh", alias="activation_function")
    norm_eps: float = Field(1e-5, alias="layer_norm_epsilon")
    residual_dropout: float = Field(0.1, alias="resid_pdrop")
    embedding_dropout: float = Field(0.1, alias="embd_pdrop")
    attention_dropout: float = Field(0.1, alias="attn_pdrop")
    tied: bool = Field(True, alias="tie_word_embeddings")
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    reorder_and_upcast_attn: Literal[False] = False
    add_cross_attention: Literal[False] = False

    def switches(self) -> dict[str, Any]:
        """Return the fields of DecoderConfig that no single key gives."""
        return {"ffn_size": 4 * self.hidden_size if self.n_inner is None else self.n_inner}

    @classmethod
    def other_keys(cls, config: DecoderConfig) -> dict[str, Any]:
        """Return the keys that are not the value of a single field."""
        activation = {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation)
        return {"n_inner": config.ffn_size, "activation_function": activation}


FAMILIES: tuple[type[Family], ...] = (Llama, Mistral, Qwen2, Qwen3, Gemma, Gpt2)


class _Names(BaseModel):
    """Keys of any config.json that name its architecture."""

    architectures: tuple[str, ...] | None = None
    model_type: str | None = None


def family_of(raw: Mapping[str, Any]) -> type[Family] | None:
    """Return the architecture that a config.json names, or None if the native decoder does not know it.

    Raises ConfigError if it is not a config.json.
    """
    try:
        names = _Names.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"this is not a config.json of a model: {explain(error)}") from None
    if names.architectures:
        return next((family for family in FAMILIES if family.architecture == names.architectures[0]), None)
    return next((family for family in FAMILIES if family.model_type == names.model_type), None)


def parse(raw: Mapping[str, Any], ignore: Collection[str] = ()) -> tuple[type[Family], DecoderConfig]:
    """Return the architecture of a config.json, and its decoder. ignore: unknown keys that are accepted.

    Raises ConfigError, naming the key, for an unknown architecture, key, or value.
    """
    family = family_of(raw)
    if family is None:
        name = (raw.get("architectures") or [raw.get("model_type")])[0]
        raise ConfigError(
            f"architecture {name!r} is not known to the native decoder, which has "
            f"{', '.join(f.architecture for f in FAMILIES)}; load the model with transformers and give from_hf the model itself"
        )
    known = family.keys().values()
    accepted = {*known, *_NEUTRAL, *ignore}
    refuse(f"of a {family.architecture}", {key: raw[key] for key in raw if key not in accepted}, known)
    given = {key: raw[key] for key in known if key in raw}
    for section in ("rope_scaling", "rope_parameters"):
        if isinstance(given.get(section), Mapping):
            given[section] = rope_section(section, given[section], given.get("rope_theta"))
    try:
        return family, family.model_validate(given).decoder()
    except ValidationError as error:
        first = error.errors()[0]
        key, why = ".".join(str(part) for part in first["loc"]), first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{key} = {reprlib.repr(first['input'])} in the config.json of a {family.architecture} is not supported: {why}"
        ) from error


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """Return config.json of a decoder: the one it came from, or that of an architecture that has all its switches.

    Raises ConfigError if no architecture has them all.
    """
    if config.huggingface:
        return {**config.huggingface, "tie_word_embeddings": config.tied}
    for family in FAMILIES:
        keys = family.json_of(config)
        if _computed(parse(keys)[1]) == _computed(config):
            return keys
    raise ConfigError(
        f"no Hugging Face architecture among {', '.join(f.architecture for f in FAMILIES)} has all the switches of {config}"
    )


def generation_of(model: Any, directory: Path | None = None) -> dict[str, Any]:
    """Return the content of GENERATION under its name, as in the directory, or else as save_pretrained writes it; or nothing.

    model: a model of transformers; any other object is ignored.
    """
    if directory is not None and (directory / GENERATION).is_file():
        return {GENERATION: dict(read_mapping(directory / GENERATION, parse_json))}
    own = getattr(model, "generation_config", None)
    return {} if own is None else {GENERATION: json.loads(own.to_json_string(keys_to_pop=["compile_config"]))}


def _computed(config: DecoderConfig) -> DecoderConfig:
    """Return a normal form of the configuration: equal for decoders that compute the same, whatever their initialization."""
    return replace(config, num_kv_heads=config.kv_heads, head_dim=config.dim_of_head, depth_scaled_init=False)


# The rotary section of a config.json

_ROPE = TypeAdapter(Rope)
_KNOWN = _ROPE.dump_python(Rope(), by_alias=True).keys()

_LLAMA3 = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
# The keys that each kind has besides rope_theta and rope_type.
_KEYS_OF_KIND = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": _LLAMA3,
    "yarn": (*_LLAMA3[:2], "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}


def rope_json(rope: Rope) -> dict[str, Any]:
    """Return the section of a config.json that describes `rope`."""
    values = _ROPE.dump_python(rope, by_alias=True, exclude_none=True)
    keys = ("rope_theta", "rope_type", *_KEYS_OF_KIND[rope.kind])
    return {key: values[key] for key in keys if key in values}


def rope_section(name: str, section: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    """Return a section of this name, written by transformers 4 or 5, with only the keys of Rope.

    theta: the rope_theta of the whole config, for a section that has none. Raises ConfigError for an unknown key, and for a
    missing factor.
    """
    renamed = {("rope_type" if key == "type" else key): value for key, value in section.items()}
    if renamed.get("partial_rotary_factor") == 1.0:
        del renamed["partial_rotary_factor"]
    refuse(f"in {name}", {key: value for key, value in renamed.items() if key not in _KNOWN}, _KNOWN)
    given = {key: value for key, value in renamed.items() if value is not None}
    kind = str(given.get("rope_type"))
    if "factor" in _KEYS_OF_KIND.get(kind, ()) and "factor" not in given:
        raise ConfigError(
            f"{name} is of type {kind!r}, but has no factor; give that of the model's training, mostly "
            "max_position_embeddings / original_max_position_embeddings"
        )
    return given if theta is None else {"rope_theta": theta, **given}


def refuse(where: str, unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ConfigError for the first unknown key that is switched on."""
    for key, value in unknown.items():
        if value is not None and value is not False:
            raise ConfigError(
                f"key {key!r} = {reprlib.repr(value)} {where} is not known to the native decoder.{nearest(key, known)} If "
                f"what is computed doesn't depend on it, pass from_hf(..., ignore=[{key!r}])"
            )
