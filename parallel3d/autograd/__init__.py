"""Gradients: the sink that accumulates them, split backwards, the entry of a chunk, recomputation."""
