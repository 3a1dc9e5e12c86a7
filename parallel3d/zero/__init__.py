"""Gradient buckets, and the sharding of gradients and optimizer state over data-parallel ranks (arXiv:1910.02054)."""
