"""Kernels beside their torch references, which are also what runs where a kernel can't."""

from parallel3d.ops.rms_norm import rms_norm as rms_norm
from parallel3d.ops.swiglu import swiglu as swiglu
