"""Small Hugging Face models with random weights: the reference of parallel3d.models."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

VOCAB = 257
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GQA = {**_SIZES, "num_key_value_heads": 2}
_LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**_GQA, "head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaConfig", {**_GQA, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "mistral": ("MistralConfig", {**_GQA, "sliding_window": 5}),
    "qwen2": ("Qwen2Config", {**_GQA, "tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2Config", {**_GQA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "gemma": ("GemmaConfig", {**_GQA, "head_dim": 8}),
    "gemma2": ("Gemma2Config", {**_GQA, "head_dim": 8, "sliding_window": 5, "final_logit_softcapping": 2.0}),
    "gemma2-one-kv-head": ("Gemma2Config", {**_SIZES, "num_key_value_heads": 1, "head_dim": 8}),
    "phi": ("PhiConfig", {**_SIZES}),
    "phi-norms": ("PhiConfig", {**_GQA, "qk_layernorm": True, "resid_pdrop": 0.0}),
    "phi3": ("Phi3Config", {**_GQA, "pad_token_id": 0}),
    "qwen3-odd": (
        "Qwen3Config",
        {**_SIZES, "intermediate_size": 49, "num_attention_heads": 6, "head_dim": 8, "num_key_value_heads": 3},
    ),
    "mixtral": ("MixtralConfig", {**_GQA, "num_local_experts": 2}),
    "cohere-norms": ("CohereConfig", {**_GQA, "use_qk_norm": True, "pad_token_id": 0}),
    "deepseek": (
        "DeepseekV2Config",
        {**_SIZES, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "first_k_dense_replace": 2}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    ),
    "gpt-oss": ("GptOssConfig", {**_GQA, "head_dim": 8, "num_local_experts": 2}),
    "neox": ("GPTNeoXConfig", {**_SIZES, "num_attention_heads": 8, "attention_bias": True}),
    "opt": ("OPTConfig", {"vocab_size": VOCAB, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, **_LAYERS}),
    "qwen3": ("Qwen3Config", {**_GQA, "head_dim": 8}),
    "gemma3": ("Gemma3TextConfig", {**_GQA, "head_dim": 8, "sliding_window": 5, "sliding_window_pattern": 2}),
    "olmo2": ("Olmo2Config", {**_GQA}),
    "granite": (
        "GraniteConfig",
        {**_GQA, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "smollm3": ("SmolLM3Config", {**_GQA, "pad_token_id": 0}),
    "deepseek3": (
        "DeepseekV3Config",
        {**_SIZES, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "first_k_dense_replace": 1}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 16}
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    ),
}


def transformers() -> Any:
    return pytest.importorskip("transformers", reason="transformers, of the test extra, is the reference here")


def make_model(name: str, **changes: Any) -> nn.Module:
    """In fp32, with weights, biases and norms that are all random."""
    hf = transformers()
    cls, settings = CONFIGS[name]
    torch.manual_seed(7)
    model = hf.AutoModelForCausalLM.from_config(getattr(hf, cls)(**{**settings, **changes}))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key or "ln_" in key else 0.0, 0.2)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model.eval()


def save_model(path: Path, name: str, **changes: Any) -> nn.Module:
    model = make_model(name, **changes)
    model.save_pretrained(path)
    return model


def load_model(path: str | Path) -> nn.Module:
    return transformers().AutoModelForCausalLM.from_pretrained(path).eval()


def token_ids(batch: int, seq: int, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (batch, seq), generator=torch.Generator().manual_seed(seed))


def gemma_norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.weight.shape, None, module.eps) * (1 + module.weight)


def in_double(model: nn.Module) -> nn.Module:
    """The reference in float64, its norms and scales too, which transformers has in fp32 whatever the model's dtype."""
    for path, module in list(model.named_modules()):
        if type(module).__name__ in ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(path, norm)
        elif type(module).__name__ == "GemmaRMSNorm":
            module.forward = partial(gemma_norm, module)
    model.to(torch.float64)
    if hasattr(model.get_input_embeddings(), "embed_scale"):
        model.get_input_embeddings().embed_scale.fill_(model.config.hidden_size**0.5)
    return model
