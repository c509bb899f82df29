/* Prediction on a CPU: XAttention's block scores, the assignment step of k-means, token means for the drift.
 *
 * The first two are a matrix product whose result is used up where it is made: a softmax and block sums for the scores,
 * a running minimum for k-means. The definitions are backbones/xattention.py and backbones/kmeans.py.
 * Operands are packed into panels: ROWS rows or COLS columns side by side, all of one k next to each other.
 */
#include <math.h>
#include <stdlib.h>
#include "simd.h"

#define ROWS 6
#define COLS (2 * VL)
#define DEPTH 256     /* terms of a dot product at a time: a panel slice of both operands stays in the nearest caches */
#define WIDE 256      /* columns of scores at a time: a multiple of COLS */
#define CHUNK_ROWS 96 /* rows of scores that exist at once, about */

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

static float *allocate(int64_t floats) { return aligned_alloc(64, (size_t)round_up(floats * 4 + 64, 64)); }

/* acc = a · b for one ROWS × COLS tile: a [depth][ROWS], b [depth][COLS]. */
INLINE void multiply(const float *a, const float *b, int64_t depth, vec acc[ROWS][2]) {
    for (int i = 0; i < ROWS; i++) acc[i][0] = acc[i][1] = splat(0);
    for (int64_t p = 0; p < depth; p++, a += ROWS, b += COLS) {
        vec b0 = load(b), b1 = load(b + VL);
        for (int i = 0; i < ROWS; i++) {
            acc[i][0] += a[i] * b0;
            acc[i][1] += a[i] * b1;
        }
    }
}

/* Tokens of one head: fp32 or bf16, any distance between tokens, optionally in another order. */
typedef struct {
    const void *data;
    int64_t count, width, stride;
    const int64_t *order;
    int bf16;
} tokens;

#define NO_TOKEN -1 /* padding, which is zero */

/* Where token `t` begins, in elements. */
INLINE int64_t token_at(const tokens *x, int64_t t) {
    return t < x->count ? (x->order ? x->order[t] : t) * x->stride : NO_TOKEN;
}

INLINE const char *address(const tokens *x, int64_t at) { return (const char *)x->data + at * (x->bf16 ? 2 : 4); }

/* Prefetch token `t`: tokens of one head lie apart, and the machine does not foresee the jump. Into the second
 * cache: places of the first are few for tokens that lie powers of two apart. */
INLINE void prefetch(const tokens *x, int64_t t) {
    int64_t at = token_at(x, t);
    if (at == NO_TOKEN) return;
    for (int64_t b = 0; b < x->width * (x->bf16 ? 2 : 4); b += 64) __builtin_prefetch(address(x, at) + b, 0, 2);
}

INLINE float read_one(const tokens *x, int bf16, int64_t at, int64_t d) {
    if (at == NO_TOKEN) return 0;
    return bf16 ? from_bf16(((const uint16_t *)x->data)[at + d]) : ((const float *)x->data)[at + d];
}

INLINE vec read_vec(const tokens *x, int bf16, int64_t at, int64_t d) {
    if (at == NO_TOKEN) return splat(0);
    return bf16 ? load_bf16((const uint16_t *)x->data + at + d) : load((const float *)x->data + at + d);
}

/* Token `r` of `lanes` groups of `s` tokens from `first` on: where they begin. */
INLINE void find_tokens(const tokens *x, int64_t first, int64_t s, int64_t r, int lanes, int64_t *at) {
    for (int i = 0; i < lanes; i++) at[i] = token_at(x, (first + i) * s + r);
}

/* The numbers d .. width of some tokens side by side into a panel whose rows are `wide`. */
INLINE void pack_rest(const tokens *x, int bf16, const int64_t *at, int lanes, int64_t d, float *panel, int wide) {
    for (; d < x->width; d++)
        for (int i = 0; i < lanes; i++) panel[d * wide + i] = read_one(x, bf16, at[i], d);
}

/* VL tokens into columns of a panel [width][COLS]; those that come `next` are prefetched. */
INLINE void pack_columns(const tokens *x, int bf16, const int64_t *at, const int64_t *next, float *panel) {
    int64_t d = 0;
    for (; d + VL <= x->width; d += VL) {
        vec square[VL];
        for (int i = 0; i < VL; i++) {
            square[i] = read_vec(x, bf16, at[i], d);
            __builtin_prefetch(address(x, next[i] + d), 0, 2);
        }
        transpose(square);
        for (int i = 0; i < VL; i++) store(panel + (d + i) * COLS, square[i]);
    }
    pack_rest(x, bf16, at, VL, d, panel, COLS);
}

/* Groups first .. first+COLS of `s` tokens into a panel [s · width][COLS], the tokens of a group last first. */
static void pack_keys(const tokens *x, int64_t first, int64_t s, float *panel) {
    for (int64_t lane = 0; lane < COLS; lane += VL)
        for (int64_t r = 0; r < s; r++) {
            int64_t at[VL], next[VL];
            find_tokens(x, first + lane, s, r, VL, at);
            find_tokens(x, first + lane + VL, s, r, VL, next);
            float *to = panel + (s - 1 - r) * x->width * COLS + lane;
            if (x->bf16) pack_columns(x, 1, at, next, to);
            else pack_columns(x, 0, at, next, to);
        }
}

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE __builtin_shufflevector
#endif
#endif

#ifdef SHUFFLE
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float two __attribute__((vector_size(8), aligned(4), may_alias));
typedef uint32_t four_bits __attribute__((vector_size(16)));
typedef uint16_t four_halves __attribute__((vector_size(8), aligned(2), may_alias));

INLINE four read_four(const tokens *x, int bf16, int64_t at, int64_t d) {
    if (at == NO_TOKEN) return (four){0};
    if (!bf16) return *(const four *)((const float *)x->data + at + d);
    four_halves bits = *(const four_halves *)((const uint16_t *)x->data + at + d);
    return (four)(__builtin_convertvector(bits, four_bits) << 16);
}
#endif

/* ROWS tokens into a panel [width][ROWS]. */
INLINE void pack_rows(const tokens *x, int bf16, const int64_t *at, float *panel) {
    int64_t d = 0;
#ifdef SHUFFLE
    for (; d + 4 <= x->width; d += 4) { /* four rows' next four numbers, turned, and two rows' */
        float *to = panel + d * ROWS;
        four a = read_four(x, bf16, at[0], d), b = read_four(x, bf16, at[1], d);
        four c = read_four(x, bf16, at[2], d), e = read_four(x, bf16, at[3], d);
        four f = read_four(x, bf16, at[4], d), g = read_four(x, bf16, at[5], d);
        four ab = SHUFFLE(a, b, 0, 4, 1, 5), ce = SHUFFLE(c, e, 0, 4, 1, 5), fg = SHUFFLE(f, g, 0, 4, 1, 5);
        four AB = SHUFFLE(a, b, 2, 6, 3, 7), CE = SHUFFLE(c, e, 2, 6, 3, 7), FG = SHUFFLE(f, g, 2, 6, 3, 7);
        *(four *)(to) = SHUFFLE(ab, ce, 0, 1, 4, 5);
        *(two *)(to + 4) = SHUFFLE(fg, fg, 0, 1);
        *(four *)(to + ROWS) = SHUFFLE(ab, ce, 2, 3, 6, 7);
        *(two *)(to + ROWS + 4) = SHUFFLE(fg, fg, 2, 3);
        *(four *)(to + 2 * ROWS) = SHUFFLE(AB, CE, 0, 1, 4, 5);
        *(two *)(to + 2 * ROWS + 4) = SHUFFLE(FG, FG, 0, 1);
        *(four *)(to + 3 * ROWS) = SHUFFLE(AB, CE, 2, 3, 6, 7);
        *(two *)(to + 3 * ROWS + 4) = SHUFFLE(FG, FG, 2, 3);
    }
#endif
    pack_rest(x, bf16, at, ROWS, d, panel, ROWS);
}

/* Groups first .. first+ROWS of `s` tokens into a panel [s · width][ROWS]. */
static void pack_queries(const tokens *x, int64_t first, int64_t s, float *panel) {
    for (int64_t r = 0; r < s; r++, panel += x->width * ROWS) {
        int64_t at[ROWS];
        find_tokens(x, first, s, r, ROWS, at);
        for (int i = 0; i < ROWS; i++) prefetch(x, (first + ROWS + i) * s + r); /* the next panel's */
        if (x->bf16) pack_rows(x, 1, at, panel);
        else pack_rows(x, 0, at, panel);
    }
}

/* ---- XAttention ---------------------------------------------------------------------------------------- */

/* One tile of logits: `part` terms of it. Not inlined: its inner loop wants all registers. */
static __attribute__((noinline)) void add_tile(const float *queries, const float *keys, int64_t part, int first,
                                               float *logits, int64_t ld) {
    vec acc[ROWS][2];
    multiply(queries, keys, part, acc);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2; c++) {
            float *sum = logits + r * ld + c * VL;
            store(sum, first ? acc[r][c] : load(sum) + acc[r][c]);
        }
}

/* logits [rows][ld] = queries · keys for whole panels, some columns at a time so that sums stay in the second cache. */
static void all_logits(const float *queries, const float *keys, int64_t rows, int64_t cols, int64_t depth,
                       float *logits, int64_t ld) {
    for (int64_t from = 0; from < cols; from += WIDE)
        for (int64_t p = 0; p < depth; p += DEPTH) {
            int64_t part = depth - p < DEPTH ? depth - p : DEPTH, to = from + WIDE < cols ? from + WIDE : cols;
            for (int64_t j = from; j < to; j += COLS)
                for (int64_t i = 0; i < rows; i += ROWS) {
                    const float *panel = keys + j * depth + p * COLS; /* the next one is prefetched */
                    const float *next = panel + COLS * depth + part * COLS * i / rows;
                    for (int64_t ahead = 0; ahead < part * COLS * ROWS / rows; ahead += 16)
                        __builtin_prefetch(next + ahead, 0, 2);
                    add_tile(queries + i * depth + p * ROWS, panel, part, !p, logits + i * ld + j, ld);
                }
        }
}

/* What all heads of a call share: sizes, and one thread's workspace. */
typedef struct {
    int64_t s, per_block, blocks, visible, depth, cols, ld, chunk;
    float scale, *sums, *queries, *logits;
} scorer;

/* x to 2^((x - most) scale), n numbers, whole vectors of them. */
static void weights(float *x, int64_t n, float most, float scale) {
    int64_t j = 0;
    for (; j + 4 * VL <= n; j += 4 * VL) {
        vec y[4];
        for (int i = 0; i < 4; i++) y[i] = (load(x + j + i * VL) - most) * scale;
        vexp2_each(4, y);
        for (int i = 0; i < 4; i++) store(x + j + i * VL, y[i]);
    }
    for (; j < n; j += VL) store(x + j, vexp2((load(x + j) - most) * scale));
}

/* Adds one row's softmax, summed over the groups of a block, to out [blocks]; what is not visible has no mass. */
static void add_row(const scorer *at, float *x, float *out) {
    int64_t visible = at->visible, whole = round_up(visible, VL);
    for (int64_t j = visible; j < whole; j++) x[j] = -INFINITY;
    vec top = splat(-INFINITY);
    for (int64_t j = 0; j < whole; j += VL) top = vmax(load(x + j), top);
    float most = top[0], total = 0;
    for (int i = 1; i < VL; i++) most = top[i] > most ? top[i] : most;
    weights(x, whole, most, at->scale);
    for (int64_t block = 0; block < at->blocks; block++) {
        int64_t from = block * at->per_block, to = from + at->per_block < visible ? from + at->per_block : visible;
        float sum = 0;
        vec part = {0};
        for (; from + VL <= to; from += VL) part += load(x + from);
        for (; from < to; from++) sum += x[from];
        sum += add_up(part);
        at->sums[block] = sum;
        total += sum;
    }
    float share = 1 / total;
    for (int64_t block = 0; block < at->blocks; block++) out[block] += at->sums[block] * share;
}

/* Scores of the query groups start .. start+rows of one head. */
static void score_rows(const scorer *at, const tokens *x, const float *keys, int64_t start, int64_t rows, float *out) {
    for (int64_t i = 0; i < rows; i += ROWS) pack_queries(x, start + i, at->s, at->queries + i * at->depth);
    all_logits(at->queries, keys, round_up(rows, ROWS), at->cols, at->depth, at->logits, at->ld);
    for (int64_t i = 0; i < rows; i++) {
        float *to = out + (start + i) / at->per_block * at->blocks;
        if (i % at->per_block == 0) memset(to, 0, (size_t)at->blocks * 4);
        add_row(at, at->logits + i * at->ld, to);
    }
}

struct heart_scores {
    int64_t heads;
    const void *const *q, *const *k; /* of each head: its tokens */
    float *const *out;               /* of each head: [ceil(n_q / (s * per_block))][blocks] */
    int64_t n_q, n_k, width, q_stride, k_stride;
    const int64_t *order; /* of the tokens, or NULL */
    int64_t s, per_block, blocks;
    int64_t visible; /* key groups that take part in the softmax; those without tokens have logit 0 */
    int64_t bf16, threads;
};

/* Block scores of some heads in turn. Returns 0, or 1 without memory. */
int heart_block_scores(const struct heart_scores *a) {
    int64_t s = a->s, per_block = a->per_block, blocks = a->blocks, visible = a->visible, width = a->width;
    int64_t depth = s * width, cols = round_up(visible, COLS);
    /* Rows a power of two apart would share the same few places of the caches: one more vector keeps them apart. */
    scorer shared = {s, per_block, blocks, visible, depth, cols, cols + 16, round_up(CHUNK_ROWS, per_block),
                     (float)(1.4426950408889634 / ((double)s * sqrt((double)width))), 0, 0, 0};
    int64_t groups = (a->n_q + s - 1) / s, padded = round_up(shared.chunk, ROWS);
    float *panels = allocate(shared.cols * depth);
    int failed = panels == NULL;
    if (failed) return 1;
#pragma omp parallel num_threads((int)a->threads)
    {
        scorer at = shared;
        at.sums = allocate(blocks), at.queries = allocate(padded * depth), at.logits = allocate(padded * at.ld);
        if (!at.sums || !at.queries || !at.logits) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp barrier
        for (int64_t h = 0; h < (failed ? 0 : a->heads); h++) {
            tokens queries = {a->q[h], a->n_q, width, a->q_stride, a->order, (int)a->bf16};
            tokens keys = {a->k[h], a->n_k, width, a->k_stride, a->order, (int)a->bf16};
#pragma omp for schedule(dynamic)
            for (int64_t j = 0; j < at.cols; j += COLS) pack_keys(&keys, j, s, panels + j * depth);
#pragma omp for schedule(dynamic)
            for (int64_t start = 0; start < groups; start += at.chunk)
                score_rows(&at, &queries, panels, start, groups - start < at.chunk ? groups - start : at.chunk,
                           a->out[h]);
        }
        free(at.sums);
        free(at.queries);
        free(at.logits);
    }
    free(panels);
    return failed;
}

/* ---- k-means ------------------------------------------------------------------------------------------- */

/* The nearest of `count` centroids for `rows` tokens in panels: least ‖c‖² − 2 x·c, ties to the lowest index. */
static void nearest(const float *panels, const float *centroids, const float *norms, int64_t count, int64_t width,
                    int64_t rows, float *values, int32_t *places, int64_t *labels) {
    int64_t padded = round_up(rows, ROWS);
    ivec lane;
    for (int i = 0; i < VL; i++) lane[i] = i;
    for (int64_t j = 0; j < count; j += COLS)
        for (int64_t i = 0; i < padded; i += ROWS) {
            vec acc[ROWS][2];
            multiply(panels + i * width, centroids + j * width, width, acc);
            for (int r = 0; r < ROWS; r++) {
                float *value = values + (i + r) * VL;
                int32_t *place = places + (i + r) * VL;
                vec best = j ? load(value) : splat(INFINITY);
                ivec at = j ? (ivec)load((float *)place) : (ivec){0};
                for (int c = 0; c < 2; c++) {
                    vec distance = load(norms + j + c * VL) - 2.0f * acc[r][c];
                    ivec closer = distance < best;
                    best = choose(closer, distance, best);
                    at = (ivec)choose(closer, (vec)(lane + (int32_t)(j + c * VL)), (vec)at);
                }
                store(value, best);
                store((float *)place, (vec)at);
            }
        }
    for (int64_t i = 0; i < rows; i++) {
        int found = 0;
        for (int l = 1; l < VL; l++) {
            float a = values[i * VL + l], b = values[i * VL + found];
            if (a < b || (a == b && places[i * VL + l] < places[i * VL + found])) found = l;
        }
        labels[i] = places[i * VL + found];
    }
}

#define TOKEN_ROWS 48 /* tokens that meet one panel of centroids while it is in the first cache */

struct heart_nearest {
    const float *x; /* [n][width], rows `stride` apart */
    int64_t n, width, stride;
    const float *centroids, *norms; /* [count][width], and their squares summed */
    int64_t count;
    int64_t *labels; /* [n] */
    int64_t threads;
};

/* Labels of tokens. Returns 0, or 1 without memory. */
int heart_nearest(const struct heart_nearest *a) {
    int64_t n = a->n, width = a->width, count = a->count;
    tokens from = {a->x, n, width, a->stride, NULL, 0}, middles = {a->centroids, count, width, width, NULL, 0};
    int64_t cols = round_up(count, COLS);
    float *panels = allocate(cols * width), *bounds = allocate(cols);
    int failed = !panels || !bounds;
    if (!failed) {
        for (int64_t j = 0; j < cols; j++) bounds[j] = j < count ? a->norms[j] : INFINITY; /* padding is never nearest */
#pragma omp parallel num_threads((int)a->threads)
        {
            float *rows = allocate(TOKEN_ROWS * width), *values = allocate(TOKEN_ROWS * VL);
            int32_t *places = (int32_t *)allocate(TOKEN_ROWS * VL);
            if (!rows || !values || !places) {
#pragma omp atomic write
                failed = 1;
            }
#pragma omp barrier
            if (!failed) {
#pragma omp for schedule(static)
                for (int64_t j = 0; j < cols; j += COLS) pack_keys(&middles, j, 1, panels + j * width);
#pragma omp for schedule(dynamic, 4)
                for (int64_t start = 0; start < n; start += TOKEN_ROWS) {
                    int64_t part = n - start < TOKEN_ROWS ? n - start : TOKEN_ROWS;
                    for (int64_t i = 0; i < part; i += ROWS) pack_queries(&from, start + i, 1, rows + i * width);
                    nearest(rows, panels, bounds, count, width, part, values, places, a->labels + start);
                }
            }
            free(rows);
            free(values);
            free(places);
        }
    }
    free(panels);
    free(bounds);
    return failed;
}

struct heart_sums {
    const float *x; /* [n][width], rows `stride` apart */
    int64_t n, width, stride;
    const int64_t *labels; /* [n] */
    int64_t count;
    float *sums;    /* [count][width] */
    int64_t *sizes; /* [count] */
};

/* Sums and sizes of the tokens of each label, added up in their order as PyTorch does. Returns 0. */
int heart_cluster_sums(const struct heart_sums *a) {
    int64_t width = a->width;
    memset(a->sums, 0, (size_t)(a->count * width) * 4);
    memset(a->sizes, 0, (size_t)a->count * 8);
    for (int64_t t = 0; t < a->n; t++) {
        const float *one = a->x + t * a->stride;
        float *to = a->sums + a->labels[t] * width;
        int64_t d = 0;
        for (; d + VL <= width; d += VL) store(to + d, load(to + d) + load(one + d));
        for (; d < width; d++) to[d] += one[d];
        a->sizes[a->labels[t]]++;
    }
    return 0;
}

/* ---- token means --------------------------------------------------------------------------------------- */

#define SUM_TOKENS 256 /* tokens added up in fp32 before they join the total in fp64 */

/* sums += one stretch of tokens, per number of a token. */
INLINE void add_tokens(const tokens *x, int64_t from, int64_t to, float *sums) {
    for (int64_t t = from; t < to; t++) {
        prefetch(x, t + 4);
        if (x->bf16) {
            const uint16_t *one = (const uint16_t *)x->data + t * x->stride;
            for (int64_t d = 0; d < x->width; d++) sums[d] += from_bf16(one[d]);
        } else {
            const float *one = (const float *)x->data + t * x->stride;
            for (int64_t d = 0; d < x->width; d++) sums[d] += one[d];
        }
    }
}

struct heart_means {
    int64_t heads;
    const void *const *x; /* of each head: n tokens, `stride` apart */
    int64_t n, width, stride;
    float *out; /* [heads][width] */
    int64_t bf16, threads;
};

/* Means over the tokens of each head. Returns 0, or 1 without memory. */
int heart_token_means(const struct heart_means *a) {
    int64_t n = a->n, width = a->width;
    int failed = 0;
#pragma omp parallel for num_threads((int)a->threads) schedule(dynamic)
    for (int64_t h = 0; h < a->heads; h++) {
        tokens head = {a->x[h], n, width, a->stride, NULL, (int)a->bf16};
        float *sums = allocate(width);
        double *total = (double *)allocate(2 * width);
        if (sums && total) {
            memset(total, 0, (size_t)width * 8);
            for (int64_t from = 0; from < n; from += SUM_TOKENS) {
                memset(sums, 0, (size_t)width * 4);
                add_tokens(&head, from, from + SUM_TOKENS < n ? from + SUM_TOKENS : n, sums);
                for (int64_t d = 0; d < width; d++) total[d] += sums[d];
            }
            for (int64_t d = 0; d < width; d++) a->out[h * width + d] = (float)(total[d] / (double)n);
        } else {
#pragma omp atomic write
            failed = 1;
        }
        free(sums);
        free(total);
    }
    return failed;
}
