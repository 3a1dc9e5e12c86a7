"""Imported by processes that are forked: what Hugging Face's libraries do once in each process is done for all forks."""

import importlib.metadata
from functools import cache

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

for name in ("peft", "transformers.models.llama.modeling_llama"):
    importlib.import_module(name)
importlib.metadata.metadata = cache(importlib.metadata.metadata)  # accelerate reads it a thousand times
get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all models' checkpoints
