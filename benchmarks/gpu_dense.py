"""Dense attention in Triton, written like our sparse kernel: what its inner loop is measured against."""

import triton
import triton.language as tl

from heart_attention.kernels.triton_code import absorb, rows_of


@triton.jit
def dense(
    q_ptr, k_ptr, v_ptr, k_tiles, v_tiles, out_ptr,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, heads, n, scale_log2,
    D: tl.constexpr, TILED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries against all keys; `n` is a multiple of both tiles."""
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    q = rows_of(q_ptr + b.to(tl.int64) * sqb + h.to(tl.int64) * sqh, m, sqn, d, m < n, False, D, D)
    k_base = k_ptr + b.to(tl.int64) * skb + h.to(tl.int64) * skh
    v_base = v_ptr + b.to(tl.int64) * svb + h.to(tl.int64) * svh
    top = tl.full([BLOCK_M], -3.0e38, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for pos in range(0, n, BLOCK_N):
        if TILED:
            k = tl.reshape(k_tiles.load([b, h, pos, 0]), [BLOCK_N, D])
            v = tl.reshape(v_tiles.load([b, h, pos, 0]), [BLOCK_N, D])
        else:
            key = pos + tl.arange(0, BLOCK_N)
            k = rows_of(k_base, key, skn, d, m < n, False, D, D)
            v = rows_of(v_base, key, svn, d, m < n, False, D, D)
        acc, mass, top = absorb(q, tl.trans(k), v, m < n, m, acc, mass, top, scale_log2, False, False, PRECISION)
    out = out_ptr + b.to(tl.int64) * sob + h.to(tl.int64) * soh + m[:, None] * son + d[None, :]
    tl.store(out, (acc / mass[:, None]).to(out_ptr.dtype.element_ty))
