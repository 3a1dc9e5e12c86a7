"""Kernels beside their torch references, which are also what runs where a kernel can't: swiglu.py, rms_norm.py."""
