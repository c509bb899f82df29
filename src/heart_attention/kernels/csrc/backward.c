/* Backward of block-sparse attention, for several cotangents at once, as calibration wants it.
 *
 * Tokens come sorted by block, rows of `dim` floats, dim a multiple of 2 VL. As in cpu.c the lanes are queries, two
 * vectors of them at a time. Their scores for all kept keys are computed once; for each cotangent g and tile of keys
 *   P = softmax(q kᵀ),  dS = P ∘ (g vᵀ − ⟨g, out⟩),  dq = dS k,  dk = dSᵀ q,  dv = Pᵀ g.
 * The means of groups that are approximated follow the tokens as further keys and values, with a bias on their scores.
 * A head's dk and dv belong to one thread. */
#include <stdlib.h>

#include "micro.h"

#define LANES (2 * VL)
#define TILE 128

struct heart_backward {
    int64_t heads, count, dim, n_q, n_k, q_blocks, k_blocks; /* count: cotangents; n_k: tokens and means */
    const float *q, *k, *v;        /* [heads][n][dim] */
    const float *g, *inner;        /* [heads][count][n_q][dim], and ⟨g, out⟩ [heads][count][n_q] */
    float *dq, *dk, *dv;           /* [heads][count][n][dim], zeroed */
    const int64_t *row_ptr;        /* [heads][q_blocks + 1] */
    const int32_t *cols;
    const int64_t *rest_ptr;       /* [heads][q_blocks + 1], or NULL if nothing is approximated */
    const int32_t *rest_cols;
    const float *bias;             /* [heads][k_blocks]: logarithm of each group's size */
    const int32_t *q_starts, *k_starts; /* [heads][blocks + 1] */
    double scale;
    int64_t threads;
};

struct workspace {
    float *queries, *cotangents; /* transposed panels [dim][LANES], [count][dim][LANES] */
    float *scaled;               /* queries times the scale, [LANES][dim] */
    float *weights, *tile;       /* P [n_k][LANES], dS [TILE][LANES] */
    int32_t *at;                 /* where each kept key begins, then each mean */
    float *bias;                 /* of the means */
};

static float *floats(int64_t n) { return aligned_alloc(64, (size_t)((n * 4 + 63) / 64 * 64 + 64)); }

static int make_workspace(struct workspace *s, const struct heart_backward *a) {
    s->queries = floats(a->dim * LANES), s->cotangents = floats(a->count * a->dim * LANES);
    s->scaled = floats(LANES * a->dim), s->weights = floats(a->n_k * LANES), s->tile = floats(TILE * LANES);
    s->at = malloc((size_t)(a->n_k + AHEAD) * sizeof *s->at), s->bias = floats(a->k_blocks);
    return s->queries && s->cotangents && s->scaled && s->weights && s->tile && s->at && s->bias;
}

static void free_workspace(struct workspace *s) {
    free(s->queries), free(s->cotangents), free(s->scaled), free(s->weights), free(s->tile), free(s->at);
    free(s->bias);
}

/* Rows [lanes][dim] into a panel [dim][LANES]; missing lanes are zero. */
static void to_panel(const float *rows, int64_t lanes, int64_t dim, float *panel) {
    for (int64_t d = 0; d < dim; d++)
        for (int64_t r = 0; r < LANES; r++) panel[d * LANES + r] = r < lanes ? rows[r * dim + d] : 0;
}

/* Where the keys of a row's kept blocks begin, then the means of its approximated ones; how many keys and means. */
static int64_t list_keys(const struct heart_backward *a, int64_t head, int64_t block, struct workspace *s,
                         int64_t *means) {
    const int64_t *row = a->row_ptr + head * (a->q_blocks + 1) + block;
    const int32_t *starts = a->k_starts + head * (a->k_blocks + 1);
    int64_t n = 0;
    for (int64_t i = row[0]; i < row[1]; i++)
        for (int64_t key = starts[a->cols[i]]; key < starts[a->cols[i] + 1]; key++) s->at[n++] = (int32_t)(key * a->dim);
    *means = 0;
    if (a->rest_ptr) {
        row = a->rest_ptr + head * (a->q_blocks + 1) + block;
        for (int64_t i = row[0]; i < row[1]; i++) {
            s->bias[(*means)++] = a->bias[head * a->k_blocks + a->rest_cols[i]];
            s->at[n++] = (int32_t)((starts[a->k_blocks] + a->rest_cols[i]) * a->dim);
        }
    }
    for (int64_t i = 0; n && i < AHEAD; i++) s->at[n + i] = s->at[i % n];
    return n;
}

/* The bias of the last `means` of n scores [n][LANES]; logarithms of sizes are not negative, so maxima only grow. */
static void add_bias(float *scores, const float *bias, int64_t n, int64_t means, vec *top) {
    for (int64_t i = 0; i < means; i++)
        for (int j = 0; j < 2; j++) {
            float *at = scores + (n - means + i) * LANES + j * VL;
            vec x = load(at) + bias[i];
            store(at, x);
            top[j] = vmax(x, top[j]);
        }
}

/* Scores [n][LANES] to weights, in place: each lane's softmax. */
static void softmax_lanes(float *scores, int64_t n, const vec *top, float c) {
    vec sum[2] = {{0}, {0}};
    for (int64_t i = 0; i < n; i++) {
        vec weight[2];
        for (int j = 0; j < 2; j++) weight[j] = (load(scores + i * LANES + j * VL) - top[j]) * c;
        vexp2_each(2, weight);
        for (int j = 0; j < 2; j++) store(scores + i * LANES + j * VL, weight[j]), sum[j] += weight[j];
    }
    vec share[2] = {1.0f / sum[0], 1.0f / sum[1]};
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < 2; j++) {
            float *at = scores + i * LANES + j * VL;
            store(at, load(at) * share[j]);
        }
}

/* to[at[r]] += sum over lanes i of weight[r][i] * rows[i], two vectors wide. */
INLINE void keys_rows(int count, const float *weights, const float *rows, int64_t lanes, int64_t dim,
                      const int32_t *at, float *to) {
    vec sum[6][2];
#pragma GCC unroll 6
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) sum[r][j] = load(to + at[r] + j * VL);
    for (int64_t i = 0; i < lanes; i++) {
        vec x[2] = {load(rows + i * dim), load(rows + i * dim + VL)};
#pragma GCC unroll 6
        for (int r = 0; r < count; r++) {
            vec w = splat(weights[r * LANES + i]);
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) sum[r][j] += w * x[j];
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) store(to + at[r] + j * VL, sum[r][j]);
}

static void keys_tile(const float *weights, const float *rows, int64_t lanes, int64_t dim, const int32_t *at,
                      int64_t n, float *to) {
    for (int64_t d = 0; d < dim; d += LANES)
        for (int64_t i = 0; i < n;) {
            int count = take_rows(n - i);
            const float *w = weights + i * LANES;
            switch (count) {
            case 6: keys_rows(6, w, rows + d, lanes, dim, at + i, to + d); break;
            case 5: keys_rows(5, w, rows + d, lanes, dim, at + i, to + d); break;
            case 4: keys_rows(4, w, rows + d, lanes, dim, at + i, to + d); break;
            case 3: keys_rows(3, w, rows + d, lanes, dim, at + i, to + d); break;
            case 2: keys_rows(2, w, rows + d, lanes, dim, at + i, to + d); break;
            default: keys_rows(1, w, rows + d, lanes, dim, at + i, to + d);
            }
            i += count;
        }
}

/* dS of one tile for one cotangent, [n][LANES]; missing lanes have weights but no part in any sum. */
static void tile_gradient(const struct heart_backward *a, const struct workspace *s, const float *v, const float *panel,
                          const float *inner, int64_t lanes, int64_t from, int64_t n) {
    vec top[2], less[2];
    float padded[LANES] = {0};
    for (int64_t r = 0; r < lanes; r++) padded[r] = inner[r];
    for (int j = 0; j < 2; j++) top[j] = (vec){0}, less[j] = load(padded + j * VL);
    scores_tile(2, panel, v, s->at + from, n, a->dim, s->tile, top);
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < 2; j++) {
            float *at = s->tile + i * LANES + j * VL;
            store(at, (load(at) - less[j]) * load(s->weights + (from + i) * LANES + j * VL));
        }
}

/* Up to LANES queries of one block, from sorted position `start`, against the n keys in the list, of which the last are
 * means. */
static void run_panel(const struct heart_backward *a, int64_t head, int64_t start, int64_t lanes, int64_t n,
                      int64_t means, struct workspace *s) {
    int64_t dim = a->dim, cells = a->n_k * dim;
    const float *k = a->k + head * cells, *v = a->v + head * cells, *q = a->q + (head * a->n_q + start) * dim;
    float ones[LANES];
    for (int r = 0; r < LANES; r++) ones[r] = 1;
    for (int64_t i = 0; i < lanes * dim; i++) s->scaled[i] = (float)(q[i] * a->scale);
    to_panel(s->scaled, lanes, dim, s->queries);
    vec top[2] = {splat(-__builtin_inff()), splat(-__builtin_inff())};
    scores_tile(2, s->queries, k, s->at, n, dim, s->weights, top);
    add_bias(s->weights, s->bias, n, means, top);
    softmax_lanes(s->weights, n, top, 1.4426950408889634f);
    for (int64_t c = 0; c < a->count; c++)
        to_panel(a->g + ((head * a->count + c) * a->n_q + start) * dim, lanes, dim, s->cotangents + c * dim * LANES);
    for (int64_t from = 0; from < n; from += TILE) {
        int64_t size = n - from < TILE ? n - from : TILE;
        for (int64_t c = 0; c < a->count; c++) {
            int64_t at = head * a->count + c;
            const float *g = a->g + (at * a->n_q + start) * dim;
            float *dq = a->dq + (at * a->n_q + start) * dim;
            tile_gradient(a, s, v, s->cotangents + c * dim * LANES, a->inner + at * a->n_q + start, lanes, from, size);
            for (int64_t d = 0; d < dim; d += LANES)
                values_tile(2, 2, s->tile, k + d, s->at + from, size, lanes, dq + d, dim, ones);
            keys_tile(s->tile, s->scaled, lanes, dim, s->at + from, size, a->dk + at * cells);
            keys_tile(s->weights + from * LANES, g, lanes, dim, s->at + from, size, a->dv + at * cells);
        }
    }
}

/* 0, or 1 without memory. dq still lacks the scale. */
int heart_attention_backward(const struct heart_backward *a) {
    int failed = 0;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
    {
        struct workspace s = {0};
        int ready = make_workspace(&s, a);
        if (!ready) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t head = 0; head < a->heads; head++) {
            const int32_t *starts = a->q_starts + head * (a->q_blocks + 1);
            for (int64_t block = 0; ready && block < a->q_blocks; block++) {
                int64_t means = 0, n = starts[block] < starts[block + 1] ? list_keys(a, head, block, &s, &means) : 0;
                for (int64_t start = starts[block]; n && start < starts[block + 1]; start += LANES) {
                    int64_t left = starts[block + 1] - start;
                    run_panel(a, head, start, left < LANES ? left : LANES, n, means, &s);
                }
            }
        }
        free_workspace(&s);
    }
    return failed;
}
