"""Memory that ranks of one host map, and copies into it: between stages, and between tensor-parallel ranks."""
