/* Prediction on a CPU: XAttention's block scores, and token means for the drift.
 *
 * The scores are a matrix product whose result is used up where it is made, by a softmax and block sums. The definition
 * is backbones/xattention.py.
 */
#include <math.h>

#include "panels.h"

#define DEPTH 256     /* terms of a dot product at a time: a panel slice of both operands stays in the nearest caches */
#define WIDE 256      /* columns of scores at a time: a multiple of COLS */
#define CHUNK_ROWS 96 /* rows of scores that exist at once, about */

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
