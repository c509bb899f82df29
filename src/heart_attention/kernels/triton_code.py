"""The device code of the Triton kernels, and nothing else; `triton_attention` and `triton_predict` launch it.

Importing this file needs Triton, so nothing imports it until a kernel is really asked for. Whether the
kernels run on a GPU or in Triton's interpreter (`TRITON_INTERPRET=1`) is settled when it is imported.
Upper-case parameters are compile-time constants. Offsets inside one head are 32-bit: the launchers check it.
"""

import triton
import triton.language as tl

# A kept run of at most 16 keys is packed in one int32: first position << 5 | length (see `triton_attention`).
RUN_BITS = tl.constexpr(5)
RUN_MASK = tl.constexpr(31)


@triton.jit
def absorb(
    q, k, v, ok, bias, acc, mass, top, scale_log2, MASKED: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr
):
    """Take one tile of keys into the online softmax: k [D, N], v [N, D]; `ok` [N] if MASKED, `bias` [N] if BIASED.

    The scale (positive) stands inside the exponential: one fused product a logit. `top` starts at a finite number, so
    that a tile of nothing but -inf gives weights of 0 and not NaN, without a test for it.
    """
    s = tl.dot(q, k, input_precision=PRECISION)  # [M, N]
    if MASKED:
        s = tl.where(ok[None, :], s, float("-inf"))
    if BIASED:
        s = s * scale_log2 + bias[None, :]
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.math.exp2(s - new_top[:, None])
    else:
        new_top = tl.maximum(top, tl.max(s, 1) * scale_log2)
        p = tl.math.exp2(s * scale_log2 - new_top[:, None])
    fade = tl.math.exp2(top - new_top)
    mass = mass * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
    return acc, mass, new_top


@triton.jit
def rows_of(base, index, step, d, ok, MASKED: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """Rows of a head by their indices, [N, D_PAD]; zeros where not `ok` and from D on."""
    cells = base + index[:, None] * step + d[None, :]
    if MASKED:
        return tl.load(cells, mask=ok[:, None] & (d < D)[None, :], other=0.0)
    if D < D_PAD:
        return tl.load(cells, mask=(d < D)[None, :], other=0.0)
    return tl.load(cells)


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, k_tiles, v_tiles, out_ptr, lse_ptr, work_ptr, list_ptr, q_perm_ptr, k_perm_ptr,
    k_mean_ptr, v_mean_ptr, bias_ptr, rest_ptr,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, sob, soh, son, q_perm_step, k_perm_step, bias_step,
    heads, n_k, groups, lse_step, scale_log2,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr, PERM: tl.constexpr, LSE: tl.constexpr,
    REST: tl.constexpr, SHARE: tl.constexpr, TILED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one tile of a query row against the keys that row keeps, with an online softmax.

    `work[pid]` = (batch·heads + head, first position, end position, first list entry, end list entry, and the same two of
    the list of groups it approximates).
    BLOCK > 0: list entries are key blocks of that size. BLOCK = 0: they are packed runs of up to RUN keys, and a
    tile of BLOCK_N keys takes BLOCK_N/RUN of them, so that clusters of a few tokens still fill a tile.
    TILED: k_tiles and v_tiles are tensor descriptors of [B, H, n_k, D] with tiles of BLOCK_N keys.
    LSE: the log of each query's sum is written too, and a query may have no key at all.
    REST: what the row leaves out counts too, as group means [B·H, groups, D] with the log2 of their sizes as bias.
    SHARE (with REST, without LSE): the share of each query's sum that these means have is written in place of log-sums.
    """
    item = work_ptr + tl.program_id(0) * 7
    bh = tl.load(item)
    q0 = tl.load(item + 1)
    q1 = tl.load(item + 2)
    e0 = tl.load(item + 3)
    e1 = tl.load(item + 4)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)

    m = q0 + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D_PAD)
    m_ok = m < q1
    qi = m
    if PERM:
        qi = tl.load(q_perm_ptr + bh.to(tl.int64) * q_perm_step + m, mask=m_ok, other=0)
    q = rows_of(q_ptr + b * sqb + h * sqh, qi, sqn, d, m_ok, True, D, D_PAD)  # [M, D]
    k_base = k_ptr + b * skb + h * skh
    v_base = v_ptr + b * svb + h * svh
    k_perm_base = k_perm_ptr + bh.to(tl.int64) * k_perm_step

    top = tl.full([BLOCK_M], -3.0e38, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if BLOCK > 0:
        PER_BLOCK: tl.constexpr = (BLOCK + BLOCK_N - 1) // BLOCK_N  # tiles
        whole = 0  # tiles that need no mask: all but those of a cut last block, which stands last in its row
        if BLOCK % BLOCK_N == 0:
            if e1 > e0:
                cut = (tl.load(list_ptr + e1 - 1) + 1) * BLOCK > n_k
                whole = (e1 - e0 - cut.to(tl.int32)) * PER_BLOCK
        for tile in range(0, whole):
            pos = tl.load(list_ptr + e0 + tile // PER_BLOCK) * BLOCK + (tile % PER_BLOCK) * BLOCK_N
            if TILED:
                k = tl.reshape(k_tiles.load([b.to(tl.int32), h.to(tl.int32), pos, 0]), [BLOCK_N, D_PAD])
                v = tl.reshape(v_tiles.load([b.to(tl.int32), h.to(tl.int32), pos, 0]), [BLOCK_N, D_PAD])
            else:
                ki = pos + n
                if PERM:
                    ki = tl.load(k_perm_base + pos + n)
                k = rows_of(k_base, ki, skn, d, m_ok, False, D, D_PAD)
                v = rows_of(v_base, ki, svn, d, m_ok, False, D, D_PAD)
            acc, mass, top = absorb(q, tl.trans(k), v, m_ok, m_ok, acc, mass, top, scale_log2, False, False, PRECISION)
        for tile in range(whole, (e1 - e0) * PER_BLOCK):
            inside = (tile % PER_BLOCK) * BLOCK_N + n
            ki = tl.load(list_ptr + e0 + tile // PER_BLOCK) * BLOCK + inside
            ok = (inside < BLOCK) & (ki < n_k)
            if TILED:
                pos = tl.load(list_ptr + e0 + tile // PER_BLOCK) * BLOCK + (tile % PER_BLOCK) * BLOCK_N
                k = tl.reshape(k_tiles.load([b.to(tl.int32), h.to(tl.int32), pos, 0]), [BLOCK_N, D_PAD])
                v = tl.reshape(v_tiles.load([b.to(tl.int32), h.to(tl.int32), pos, 0]), [BLOCK_N, D_PAD])
            else:
                if PERM:
                    ki = tl.load(k_perm_base + ki, mask=ok, other=0)
                k = rows_of(k_base, ki, skn, d, ok, True, D, D_PAD)
                v = rows_of(v_base, ki, svn, d, ok, True, D, D_PAD)
            acc, mass, top = absorb(q, tl.trans(k), v, ok, ok, acc, mass, top, scale_log2, True, False, PRECISION)
    else:
        for tile in range(0, tl.cdiv(e1 - e0, BLOCK_N // RUN)):
            entry = e0 + tile * (BLOCK_N // RUN) + n // RUN
            run = tl.load(list_ptr + entry, mask=entry < e1, other=0)
            ok = (n % RUN) < (run & RUN_MASK)
            ki = tl.load(k_perm_base + (run >> RUN_BITS) + n % RUN, mask=ok, other=0)
            k = rows_of(k_base, ki, skn, d, ok, True, D, D_PAD)
            v = rows_of(v_base, ki, svn, d, ok, True, D, D_PAD)
            acc, mass, top = absorb(q, tl.trans(k), v, ok, ok, acc, mass, top, scale_log2, True, False, PRECISION)
    if REST:
        kept = mass
        kept_top = top
        r1 = tl.load(item + 6)
        mean_step = bh.to(tl.int64) * groups * D
        for first in range(tl.load(item + 5), r1, BLOCK_N):
            ok = first + n < r1
            group = tl.load(rest_ptr + first + n, mask=ok, other=0)
            bias = tl.load(bias_ptr + bh.to(tl.int64) * bias_step + group, mask=ok, other=0.0)
            k = rows_of(k_mean_ptr + mean_step, group, D, d, ok, True, D, D_PAD)
            v = rows_of(v_mean_ptr + mean_step, group, D, d, ok, True, D, D_PAD)
            acc, mass, top = absorb(q, tl.trans(k), v, ok, bias, acc, mass, top, scale_log2, True, True, PRECISION)
        if SHARE:
            share = 1.0 - kept * tl.math.exp2(kept_top - top) / mass
            tl.store(lse_ptr + bh.to(tl.int64) * lse_step + qi, share, mask=m_ok)
    if LSE:
        tl.store(lse_ptr + bh.to(tl.int64) * lse_step + qi, (top + tl.math.log2(mass)) * 0.6931471805599453, mask=m_ok)
        mass = tl.where(mass == 0.0, 1.0, mass)
    out_tile = out_ptr + b * sob + h * soh + qi[:, None] * son + d[None, :]
    ok = m_ok[:, None] & (d < D)[None, :]
    tl.store(out_tile, (acc / mass[:, None]).to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def antidiagonal_sums(
    q_ptr, k_ptr, perm_ptr, sum_ptr, top_ptr,
    sqb, sqh, sqn, skb, skh, skn, heads, n_q, n_k, q_groups, k_groups, k_blocks, k_tiles, scale_log2,
    D: tl.constexpr, D_STEP: tl.constexpr, STRIDE: tl.constexpr, GROUPS: tl.constexpr, PERM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """XAttention, first pass: a tile of antidiagonal logits, kept only as its row maxima and per-block sums.

    sums[bh, i, J] = Σ_{j in block J} exp2(A[i, j] − top[bh, i, tile]): 1/GROUPS of the score matrix is ever written.
    Tokens from n_q, n_k on read as zero; key groups from k_groups on take no mass; GROUPS = block / stride.
    """
    bh = tl.program_id(2)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    q_base = q_ptr + b * sqb + h * sqh
    k_base = k_ptr + b * skb + h * skh
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, STRIDE * ((D + D_STEP - 1) // D_STEP)):
        r = step % STRIDE
        d = (step // STRIDE) * D_STEP + tl.arange(0, D_STEP)
        d_ok = d < D
        tq = i * STRIDE + (STRIDE - 1 - r)
        tk = j * STRIDE + r
        q_ok = tq < n_q
        k_ok = tk < n_k
        if PERM:
            tq = tl.load(perm_ptr + tq, mask=q_ok, other=0)
            tk = tl.load(perm_ptr + tk, mask=k_ok, other=0)
        q = tl.load(q_base + tq[:, None] * sqn + d[None, :], mask=q_ok[:, None] & d_ok[None, :], other=0.0)
        k = tl.load(k_base + tk[None, :] * skn + d[:, None], mask=k_ok[None, :] & d_ok[:, None], other=0.0)
        acc = tl.dot(q, k, acc, input_precision=PRECISION)
    s = tl.where((j < k_groups)[None, :], acc * scale_log2, float("-inf"))
    top = tl.max(s, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.math.exp2(s - base[:, None])
    sums = tl.sum(tl.reshape(p, [BLOCK_M, BLOCK_N // GROUPS, GROUPS]), 2)  # [M, blocks of this tile]
    row = bh.to(tl.int64) * q_groups + i
    block = tl.program_id(1) * (BLOCK_N // GROUPS) + tl.arange(0, BLOCK_N // GROUPS)
    i_ok = i < q_groups
    tl.store(sum_ptr + row[:, None] * k_blocks + block[None, :], sums, mask=i_ok[:, None] & (block < k_blocks)[None, :])
    tl.store(top_ptr + row * k_tiles + tl.program_id(1), top, mask=i_ok)


@triton.jit
def antidiagonal_blocks(
    sum_ptr, top_ptr, out_ptr, q_groups, valid_q_groups, k_blocks, k_tiles, q_blocks,
    GROUPS: tl.constexpr, PER_TILE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """XAttention, second pass: one query block: normalise each row over all key blocks, then add the rows up."""
    bh = tl.program_id(1)
    i = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    i_ok = i < valid_q_groups  # query groups that are wholly padding score nothing
    row = bh.to(tl.int64) * q_groups + i
    n = tl.arange(0, BLOCK_N)
    top = tl.full([GROUPS], float("-inf"), tl.float32)
    for tile in range(0, k_tiles):
        top = tl.maximum(top, tl.load(top_ptr + row * k_tiles + tile, mask=i_ok, other=0.0))
    mass = tl.zeros([GROUPS], tl.float32)
    for j in range(0, k_blocks, BLOCK_N):
        ok = i_ok[:, None] & (j + n < k_blocks)[None, :]
        s = tl.load(sum_ptr + row[:, None] * k_blocks + (j + n)[None, :], mask=ok, other=0.0)
        t = tl.load(top_ptr + row[:, None] * k_tiles + ((j + n) // PER_TILE)[None, :], mask=ok, other=0.0)
        mass += tl.sum(tl.where(ok, s * tl.math.exp2(t - top[:, None]), 0.0), 1)
    mass = tl.where(i_ok, mass, 1.0)
    for j in range(0, k_blocks, BLOCK_N):
        ok = i_ok[:, None] & (j + n < k_blocks)[None, :]
        s = tl.load(sum_ptr + row[:, None] * k_blocks + (j + n)[None, :], mask=ok, other=0.0)
        t = tl.load(top_ptr + row[:, None] * k_tiles + ((j + n) // PER_TILE)[None, :], mask=ok, other=0.0)
        share = tl.where(ok, s * tl.math.exp2(t - top[:, None]), 0.0) / mass[:, None]
        out = out_ptr + (bh.to(tl.int64) * q_blocks + tl.program_id(0)) * k_blocks + j + n
        tl.store(out, tl.sum(share, 0), mask=j + n < k_blocks)


@triton.jit
def nearest_centroid(
    x_ptr, c_ptr, norm_ptr, label_ptr, sxb, sxh, sxn, heads, n, clusters, part_step,
    D: tl.constexpr, D_STEP: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """k-means assignment: the index of the nearest centroid, ties to the lowest, without a distance matrix.

    x [B, H, N, D] by strides; centroids as PARTS summands [PARTS, B·H, C, D] and their squared norms [B·H, C];
    labels int32 [B·H, N]. Products are taken D_STEP features at a time: whole rows of both do not fit the registers.
    """
    bh = tl.program_id(1)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_N)
    x_base = x_ptr + b * sxb + h * sxh
    c_base = c_ptr + bh.to(tl.int64) * clusters * D
    best = tl.full([BLOCK_M], float("inf"), tl.float32)
    label = tl.zeros([BLOCK_M], tl.int32)
    for first in range(0, clusters, BLOCK_N):
        ok = first + c < clusters
        product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for d0 in range(0, D, D_STEP):
            d = d0 + tl.arange(0, D_STEP)
            x_ok = (m < n)[:, None] & (d < D)[None, :]
            x = tl.load(x_base + m[:, None] * sxn + d[None, :], mask=x_ok, other=0.0).to(c_ptr.dtype.element_ty)
            c_ok = ok[None, :] & (d < D)[:, None]
            for part in tl.static_range(PARTS):
                c_tile = c_base + part * part_step + (first + c)[None, :] * D + d[:, None]
                centroid = tl.load(c_tile, mask=c_ok, other=0.0)
                product = tl.dot(x, centroid, product, input_precision=PRECISION)
        norm = tl.load(norm_ptr + bh.to(tl.int64) * clusters + first + c, mask=ok, other=float("inf"))
        least, where = tl.min(norm[None, :] - 2.0 * product, 1, return_indices=True, return_indices_tie_break_left=True)
        label = tl.where(least < best, first + where, label)
        best = tl.minimum(best, least)
    tl.store(label_ptr + bh.to(tl.int64) * n + m, label, mask=m < n)


@triton.jit
def cluster_means(
    x_ptr, perm_ptr, start_ptr, c_ptr, sxb, sxh, sxn, heads, perm_step, start_step, clusters,
    D: tl.constexpr, D_PAD: tl.constexpr, PERM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Group means: one program a cluster or block adds its tokens up in a fixed order; an empty one writes nothing."""
    bh = tl.program_id(1)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    edge = start_ptr + bh.to(tl.int64) * start_step + tl.program_id(0)
    first = tl.load(edge)
    end = tl.load(edge + 1)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    d_ok = d < D
    total = tl.zeros([D_PAD], tl.float32)
    for pos in range(first, end, BLOCK_M):
        ok = pos + m < end
        token = pos + m
        if PERM:
            token = tl.load(perm_ptr + bh.to(tl.int64) * perm_step + token, mask=ok, other=0)
        x_tile = x_ptr + b * sxb + h * sxh + token[:, None] * sxn + d[None, :]
        total += tl.sum(tl.load(x_tile, mask=ok[:, None] & d_ok[None, :], other=0.0).to(tl.float32), 0)
    out = c_ptr + (bh.to(tl.int64) * clusters + tl.program_id(0)) * D + d
    if end > first:
        tl.store(out, (total / (end - first).to(tl.float32)).to(c_ptr.dtype.element_ty), mask=d_ok)


@triton.jit
def pooled_sums(
    x_ptr, out_ptr, sxb, sxh, sxn, heads, n, span, splits,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Token sums of one span of one head, fp32: [B·H, splits, D]; no atomics, so the mean is the same every time."""
    bh = tl.program_id(1)
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    first = tl.program_id(0) * span
    end = tl.minimum(first + span, n)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    d_ok = d < D
    total = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for pos in range(first, end, BLOCK_M):
        x_tile = x_ptr + b * sxb + h * sxh + (pos + m)[:, None] * sxn + d[None, :]
        total += tl.load(x_tile, mask=(pos + m < end)[:, None] & d_ok[None, :], other=0.0).to(tl.float32)
    out = out_ptr + (bh.to(tl.int64) * splits + tl.program_id(0)) * D + d
    tl.store(out, tl.sum(total, 0), mask=d_ok)


@triton.jit
def larger(a, b):
    """The larger of two numbers, for scans."""
    return tl.maximum(a, b)


@triton.jit
def kept_runs(
    col_ptr, first_ptr, count_ptr, start_ptr, run_ptr, found_ptr, rows, groups, room,
    RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Kept clusters of one query cluster as packed runs of keys, from run_ptr[row · room] on, and how many there are.

    Clusters that touch in sorted order are one stretch: it is written by the entry that closes it.
    """
    row = tl.program_id(0)
    head = row // rows
    cols = col_ptr + tl.load(first_ptr + row + head)  # int64: each head has one boundary more than rows
    starts = start_ptr + head * (groups + 1)
    count = tl.load(count_ptr + row)
    i = tl.arange(0, BLOCK)
    ok = i < count
    begin = tl.load(starts + tl.load(cols + i, mask=ok, other=0), mask=ok, other=0)
    end = tl.load(starts + tl.load(cols + i, mask=ok, other=0) + 1, mask=ok, other=0)
    later = ok & (i > 0)
    before = tl.load(starts + tl.load(cols + i - 1, mask=later, other=0) + 1, mask=later, other=-1)
    earlier = i + 1 < count
    after = tl.load(starts + tl.load(cols + i + 1, mask=earlier, other=0), mask=earlier, other=-1)
    opened = tl.associative_scan(tl.where(ok & (begin != before), begin, 0), 0, larger)  # positions ascend
    pieces = tl.where(ok & (end != after), (end - opened + RUN - 1) // RUN, 0)
    tl.store(found_ptr + row, tl.sum(pieces, 0))
    place = run_ptr + row.to(tl.int64) * room + tl.cumsum(pieces, 0) - pieces
    for j in range(0, tl.max(pieces, 0)):
        position = opened + j * RUN
        tl.store(place + j, (position << RUN_BITS) | tl.minimum(end - position, RUN), mask=j < pieces)
