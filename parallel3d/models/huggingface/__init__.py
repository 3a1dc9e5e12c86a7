"""Hugging Face checkpoints: their config.json, the names of their tensors, reading, writing, and wrapping of models."""
