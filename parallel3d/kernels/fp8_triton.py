"""Triton kernel of casts to fp8. A program rounds one square tile, and writes it and its transpose."""

import triton
import triton.language as tl


@triton.jit
def round_both(x, scale, other, out, out_t, rows, columns, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """x: [rows, columns] -> out: x * scale, out_t: [columns, rows], x^T * other; each unless it is None.

    STEP: 1 if scales are those of rows of the results, [rows] and [columns]; 0 if they are one number.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], inside).to(tl.float32)
    if out is not None:
        factor = tl.load(scale + row * STEP, row < rows)
        rounded = (tile * factor[:, None]).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64)[:, None] * columns + column[None, :], rounded, inside)
    if out_t is not None:
        factor = tl.load(other + column * STEP, column < columns)
        turned = tl.trans((tile * factor[None, :]).to(out_t.dtype.element_ty))
        turned_inside = (column < columns)[:, None] & (row < rows)[None, :]
        tl.store(out_t + column.to(tl.int64)[:, None] * rows + row[None, :], turned, turned_inside)
