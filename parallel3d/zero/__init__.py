"""Gradient buckets and, stage by stage, the sharding of what data-parallel ranks hold twice (arXiv:1910.02054)."""
