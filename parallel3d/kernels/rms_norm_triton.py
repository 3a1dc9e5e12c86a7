"""Triton kernels of rms_norm. A program holds a row of `size` elements in fp32."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_forward(x, weight, out, scale, size, eps, BLOCK: tl.constexpr):
    """x: [rows, size], weight: [size] -> out: [rows, size], scale: [rows], 1 / sqrt(mean(x^2) + eps)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * size + column, inside, other=0.0).to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / size + eps)
    tl.store(scale + row, factor)
    gain = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, value * factor * gain, inside)


@triton.jit
def rms_norm_backward(
    gradient, other, x, weight, scale, dx, partial, rows, size, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    """gradient: of out, other: of x itself where ADDS -> dx: [rows, size], partial: [programs, size], whose sum is dweight."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < size
    gain = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        start = row.to(tl.int64) * size
        factor = tl.load(scale + row)
        normed = tl.load(x + start + column, inside, other=0.0).to(tl.float32) * factor
        given = tl.load(gradient + start + column, inside, other=0.0).to(tl.float32)
        total += given * normed
        given = given * gain
        result = factor * (given - normed * (tl.sum(given * normed, axis=0) / size))
        if ADDS:
            result += tl.load(other + start + column, inside, other=0.0).to(tl.float32)
        tl.store(dx + start + column, result, inside)
    tl.store(partial + program * size + column, total, inside)
