"""Gradients on their way: the sink that collects them, split backwards, the entry of a chunk, recomputation."""
