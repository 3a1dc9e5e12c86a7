"""Triton kernels of swiglu. A program computes BLOCK columns of one row, in fp32."""

import triton
import triton.language as tl


@triton.jit
def swiglu_forward(gate_up, out, size, BLOCK: tl.constexpr):
    """gate_up: [rows, 2 size] -> out: [rows, size]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, inside).to(tl.float32)
    tl.store(out + row * size + column, gate * tl.sigmoid(gate) * up, inside)


@triton.jit
def swiglu_backward(gradient, gate_up, out, result, size, BLOCK: tl.constexpr, RECOMPUTES: tl.constexpr):
    """gradient: [rows, size], gate_up: [rows, 2 size] -> out: [rows, 2 size]; if RECOMPUTES, also result: [rows, size]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, inside).to(tl.float32)
    given = tl.load(gradient + row * size + column, inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    tl.store(out + row * 2 * size + column, given * up * sigmoid * (1 + gate * (1 - sigmoid)), inside)
    tl.store(out + row * 2 * size + size + column, given * gate * sigmoid, inside)
    if RECOMPUTES:
        tl.store(result + row * size + column, gate * sigmoid * up, inside)
