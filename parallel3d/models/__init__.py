"""Decoder language models as layer specs, and Hugging Face's checkpoints in and out."""

from parallel3d.models.blocks import decoder
from parallel3d.models.config import DecoderConfig, Rope
from parallel3d.models.huggingface.export import save_hf
from parallel3d.models.huggingface.load import from_hf
from parallel3d.models.loss import CausalLMLoss, SlicedLogits, causal_lm_loss
from parallel3d.models.packing import PackedDocuments
