"""Failures: which rank is at fault, said once and the same on all ranks, and an end for all of them."""
