"""Kernels beside their torch references, which are also what runs where a kernel can't."""

from parallel3d.ops.swiglu import swiglu as swiglu
