"""Imported by processes that are forked: what Hugging Face's libraries do once in each process is done for all forks."""

import importlib.metadata
from functools import cache

import peft  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

importlib.metadata.metadata = cache(importlib.metadata.metadata)  # accelerate reads it a thousand times
get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all models' checkpoints
