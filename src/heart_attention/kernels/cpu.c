/* Block-sparse attention on a CPU, for equal and for variable blocks.
 *
 * The lanes of a vector are queries. A task is up to ROWS queries of one block; its queries lie transposed, in panels
 * of two vectors. The kept keys come in tiles of TILE tokens from a list of row numbers, so that small clusters fill a
 * tile together and nothing is copied for them. For each panel: scores of the tile (keys broadcast), running maximum,
 * exponentials and their sum down the lanes, then weights (broadcast) times values. Everything is fp32; keys and values
 * of a head are converted and put into block order once, before its tasks start. */
#include <math.h>
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "micro.h"

#define ROWS 128
#define TILE 128
#define PACK_BYTES ((int64_t)40 << 20) /* heads packed at once by several threads stay below this */
#define NO_MEMORY 1

struct tensor {
    void *data;
    int64_t batch, head, token; /* strides in elements; the last dimension is contiguous */
};

struct heart_attention {
    int64_t batch, heads, dim, n_q, n_k, tail, q_blocks, k_blocks;
    struct tensor q, k, v, out;
    const int64_t *row_ptr;           /* [B, H, q_blocks + 1] */
    const int32_t *cols;              /* [kept] */
    const int32_t *q_starts, *k_starts; /* [blocks + 1], or that for each head */
    const int32_t *q_perm, *k_perm;   /* token at a sorted position, or NULL */
    int64_t own_starts, own_perm;     /* whether each head has its own */
    double scale;
    int64_t bf16, threads;
};

struct task {
    int64_t head;        /* batch item * heads + head */
    int64_t block;       /* query block, or -1 for the unused tail */
    int64_t start, rows; /* sorted positions of its queries */
    int64_t cost;
};

/* A head's keys [n][dim] and values [panel][n][width] in sorted order. */
struct packed {
    float *keys, *values;
};

struct work {
    float *queries;  /* [panel][dim][2 VL] */
    float *out;      /* [ROWS][padded dim] */
    float *scores;   /* [TILE][2 VL] */
    float *max, *sum; /* [ROWS], the maximum already multiplied with the scale */
};

static int64_t padded(int64_t n) { return (n + VL - 1) / VL * VL; }
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static float *floats(int64_t n) { return aligned_alloc(64, (size_t)((n * 4 + 63) / 64 * 64 + 64)); }

static const int32_t *of_head(const int32_t *base, int64_t own, int64_t head, int64_t size) {
    return base ? base + (own ? head * size : 0) : NULL;
}

static int64_t row_offset(const struct heart_attention *a, const struct tensor *x, int64_t head, int64_t token) {
    return head / a->heads * x->batch + head % a->heads * x->head + token * x->token;
}

static int64_t token_at(const int32_t *perm, int64_t n, int64_t position) {
    return perm && position < n ? perm[position] : position;
}

/* One row of dim numbers as fp32. */
static void read_row(const struct heart_attention *a, const struct tensor *x, int64_t head, int64_t token, float *row) {
    int64_t offset = row_offset(a, x, head, token);
    if (a->bf16) {
        const uint16_t *from = (const uint16_t *)x->data + offset;
        for (int64_t d = 0; d < a->dim; d++) row[d] = from_bf16(from[d]);
    } else {
        memcpy(row, (const float *)x->data + offset, (size_t)a->dim * 4);
    }
}

/* Keys and values at sorted positions [from, to) of a head. */
static void pack_keys(const struct heart_attention *a, int64_t head, struct packed to, int64_t first, int64_t last) {
    const int32_t *perm = of_head(a->k_perm, a->own_perm, head, a->n_k);
    int64_t n = a->n_k + a->tail, full = a->dim / (2 * VL) * (2 * VL), wide = padded(a->dim);
    float row[wide + VL];
    memset(row, 0, sizeof row);
    for (int64_t i = first; i < last; i++) {
        int64_t token = token_at(perm, a->n_k, i);
        read_row(a, &a->k, head, token, to.keys + i * a->dim);
        read_row(a, &a->v, head, token, row);
        for (int64_t d = 0; d < full; d += 2 * VL) memcpy(to.values + d * n + i * 2 * VL, row + d, 2 * VL * 4);
        if (full < wide) { /* the last panel is one vector wide, or two that are partly empty */
            int64_t width = wide - full;
            memcpy(to.values + full * n + i * width, row + full, (size_t)width * 4);
        }
    }
}

/* Queries of a task, transposed into panels; missing lanes are zero. */
static void pack_queries(const struct heart_attention *a, const struct task *t, float *to) {
    const int32_t *perm = of_head(a->q_perm, a->own_perm, t->head, a->n_q);
    float row[a->dim];
    float sign = a->scale < 0 ? -1.0f : 1.0f; /* so that the largest score is always the largest logit */
    for (int64_t p = 0; p * 2 * VL < t->rows; p++, to += a->dim * 2 * VL) {
        int64_t lanes = least(t->rows - p * 2 * VL, 2 * VL);
        if (lanes < 2 * VL) memset(to, 0, (size_t)(a->dim * 2 * VL) * 4);
        for (int64_t r = 0; r < lanes; r++) {
            read_row(a, &a->q, t->head, token_at(perm, a->n_q, t->start + p * 2 * VL + r), row);
            for (int64_t d = 0; d < a->dim; d++) to[d * 2 * VL + r] = sign * row[d];
        }
    }
}

/* Softmax of a tile of scores [n][width] in place; factors: what the earlier sums shrink by. */
INLINE void exponentials(int vectors, float *scores, int64_t n, float c, vec *top, float *max, float *sum,
                         float *factors) {
    vec total[2], less[2];
    for (int j = 0; j < vectors; j++) {
        vec before = load(max + j * VL), now = vmax(top[j] * c, before);
        less[j] = choose(now == splat(-INFINITY), splat(0), now); /* no finite score yet: avoid inf - inf */
        store(max + j * VL, now);
        vec factor = vexp2(before - less[j]);
        store(factors + j * VL, factor);
        total[j] = load(sum + j * VL) * factor;
    }
    vec part[2] = {{0}, {0}};
    for (int64_t i = 0; i < n; i++)
        for (int j = 0; j < vectors; j++) {
            float *at = scores + (i * vectors + j) * VL;
            vec weight = vexp2(load(at) * c - less[j]);
            store(at, weight);
            part[j] += weight;
        }
    for (int j = 0; j < vectors; j++) store(sum + j * VL, total[j] + part[j]);
}

/* One panel of queries against one tile of keys. */
INLINE void panel_tile(int vectors, const struct heart_attention *a, struct packed kv, struct work *w, int64_t panel,
                       int64_t lanes, const int32_t *index, int64_t n) {
    float factors[2 * VL];
    int64_t first = panel * 2 * VL, all = a->n_k + a->tail, wide = padded(a->dim);
    float c = (float)(fabs(a->scale) * 1.4426950408889634);
    vec top[2] = {splat(-INFINITY), splat(-INFINITY)};
    scores_tile(vectors, w->queries + panel * a->dim * 2 * VL, kv.keys, index, n, a->dim, w->scores, top);
    exponentials(vectors, w->scores, n, c, top, w->max + first, w->sum + first, factors);
    for (int64_t d = 0; d < wide; d += 2 * VL) {
        const float *values = kv.values + d * all;
        float *out = w->out + first * wide + d;
        if (wide - d >= 2 * VL)
            values_tile(vectors, 2, w->scores, values, index, n, lanes, out, wide, factors);
        else
            values_tile(vectors, 1, w->scores, values, index, n, lanes, out, wide, factors);
    }
}

static void tile(const struct heart_attention *a, struct packed kv, struct work *w, int64_t rows, const int32_t *index,
                 int64_t n) {
    for (int64_t p = 0; p * 2 * VL < rows; p++) {
        int64_t lanes = least(rows - p * 2 * VL, 2 * VL);
        panel_tile(2, a, kv, w, p, lanes, index, n);
    }
}

static void write_rows(const struct heart_attention *a, const struct task *t, const struct work *w) {
    const int32_t *perm = of_head(a->q_perm, a->own_perm, t->head, a->n_q);
    int64_t wide = padded(a->dim);
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t offset = row_offset(a, &a->out, t->head, token_at(perm, a->n_q, t->start + r));
        const float *from = w->out + r * wide;
        float share = 1.0f / w->sum[r];
        if (a->bf16) {
            uint16_t *to = (uint16_t *)a->out.data + offset;
            for (int64_t d = 0; d < a->dim; d++) to[d] = to_bf16(from[d] * share);
        } else {
            float *to = (float *)a->out.data + offset;
            for (int64_t d = 0; d < a->dim; d++) to[d] = from[d] * share;
        }
    }
}

static void run_task(const struct heart_attention *a, const struct task *t, struct packed kv, struct work *w) {
    int32_t index[TILE];
    int64_t n = 0;
    pack_queries(a, t, w->queries);
    memset(w->out, 0, (size_t)(t->rows * padded(a->dim)) * 4);
    for (int64_t r = 0; r < ROWS + 2 * VL; r++) w->max[r] = -INFINITY, w->sum[r] = 0;
    const int64_t *row = a->row_ptr + t->head * (a->q_blocks + 1) + t->block;
    const int32_t *starts = of_head(a->k_starts, a->own_starts, t->head, a->k_blocks + 1);
    for (int64_t i = t->block < 0 ? 0 : row[0]; i < (t->block < 0 ? 1 : row[1]); i++) {
        int64_t from = t->block < 0 ? a->n_k : starts[a->cols[i]];
        int64_t to = t->block < 0 ? a->n_k + a->tail : starts[a->cols[i] + 1];
        for (; from < to; from++) {
            index[n++] = (int32_t)from;
            if (n == TILE) tile(a, kv, w, t->rows, index, n), n = 0;
        }
    }
    if (n) tile(a, kv, w, t->rows, index, n);
    write_rows(a, t, w);
}

static int64_t kept_keys(const struct heart_attention *a, int64_t head, int64_t block) {
    const int64_t *row = a->row_ptr + head * (a->q_blocks + 1) + block;
    const int32_t *starts = of_head(a->k_starts, a->own_starts, head, a->k_blocks + 1);
    int64_t sum = 0;
    for (int64_t i = row[0]; i < row[1]; i++) sum += starts[a->cols[i] + 1] - starts[a->cols[i]];
    return sum;
}

/* Cuts [start, end) into tasks of at most ROWS rows; only counts them if tasks is NULL. */
static int64_t cut(struct task *tasks, int64_t head, int64_t block, int64_t start, int64_t end, int64_t keys) {
    int64_t count = (end - start + ROWS - 1) / ROWS;
    for (int64_t i = 0; tasks && i < count; i++) {
        int64_t from = start + i * ROWS, rows = least(ROWS, end - from);
        tasks[i] = (struct task){head, block, from, rows, keys * rows};
    }
    return count;
}

static int64_t list_tasks(const struct heart_attention *a, int64_t first, int64_t last, struct task *tasks) {
    int64_t n = 0;
    for (int64_t head = first; head < last; head++) {
        const int32_t *starts = of_head(a->q_starts, a->own_starts, head, a->q_blocks + 1);
        for (int64_t b = 0; b < a->q_blocks; b++)
            n += cut(tasks ? tasks + n : NULL, head, b, starts[b], starts[b + 1], tasks ? kept_keys(a, head, b) : 0);
        n += cut(tasks ? tasks + n : NULL, head, -1, a->n_q, a->n_q + a->tail, a->tail);
    }
    return n;
}

static int by_cost(const void *x, const void *y) {
    const struct task *a = x, *b = y;
    if (a->cost != b->cost) return a->cost < b->cost ? 1 : -1;
    if (a->head != b->head) return a->head < b->head ? -1 : 1; /* equal ones: neighbours share keys in the cache */
    return a->start < b->start ? -1 : a->start > b->start;
}

static int make_work(struct work *w, int64_t dim) {
    w->queries = floats((ROWS + 2 * VL) * dim);
    w->out = floats((ROWS + 2 * VL) * padded(dim));
    w->scores = floats(TILE * 2 * VL);
    w->max = floats(ROWS + 2 * VL);
    w->sum = floats(ROWS + 2 * VL);
    return w->queries && w->out && w->scores && w->max && w->sum;
}

static void free_work(struct work *w) {
    free(w->queries), free(w->out), free(w->scores), free(w->max), free(w->sum);
}

/* Heads [first, last): pack them, then run their tasks, longest first. */
static int run_heads(const struct heart_attention *a, int64_t first, int64_t last, float *buffer) {
    int64_t n = a->n_k + a->tail, keys = n * a->dim, size = keys + 16 + n * padded(a->dim);
    int64_t count = list_tasks(a, first, last, NULL), chunks = (n + 255) / 256;
    struct task *tasks = malloc((size_t)(count ? count : 1) * sizeof *tasks);
    if (!tasks) return NO_MEMORY;
    list_tasks(a, first, last, tasks);
    if (a->threads > 1) qsort(tasks, (size_t)count, sizeof *tasks, by_cost);
    int failed = 0;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
    {
        struct work w = {0};
        int ready = make_work(&w, a->dim);
        if (!ready) {
#pragma omp atomic write
            failed = NO_MEMORY;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < (last - first) * chunks; i++) {
            float *base = buffer + i / chunks * size;
            int64_t from = i % chunks * 256;
            pack_keys(a, first + i / chunks, (struct packed){base, base + (keys + 15) / 16 * 16}, from,
                      least(from + 256, n));
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++) {
            float *base = buffer + (tasks[i].head - first) * size;
            if (ready) run_task(a, tasks + i, (struct packed){base, base + (keys + 15) / 16 * 16}, &w);
        }
        free_work(&w);
    }
    free(tasks);
    return failed;
}

int heart_attention(const struct heart_attention *a) {
    int64_t n = a->n_k + a->tail, all = a->batch * a->heads;
    int64_t size = (n * a->dim + 16 + n * padded(a->dim) + 15) / 16 * 16;
    int64_t together = a->threads > 1 ? PACK_BYTES / (size * 4) : 1;
    if (together < 1) together = 1;
    if (together > all) together = all;
    float *buffer = floats(together * size);
    int failed = buffer ? 0 : NO_MEMORY;
    for (int64_t first = 0; first < all && !failed; first += together)
        failed = run_heads(a, first, least(first + together, all), buffer);
    free(buffer);
    return failed;
}

int heart_vector_floats(void) { return VL; }

int heart_has_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
