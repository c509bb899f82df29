/* Block-sparse attention on a CPU, for equal and for variable blocks.
 *
 * The lanes of a vector are queries. A task is up to ROWS queries of one block; its queries lie transposed, in panels
 * of two vectors. The kept keys come in tiles of TILE tokens from a list of row numbers, so that small clusters fill a
 * tile together and nothing is copied for them. For each panel: scores of the tile (keys broadcast), running maximum,
 * exponentials and their sum down the lanes, then weights (broadcast) times values. Everything is fp32; keys and values
 * of a head are converted and put into block order once, before its tasks start. Groups that are approximated come first,
 * each as one more key: the mean of its keys and of its values, stored after them, and log2 of its size on its score.
 *
 * Whoever asks learns by how much each block raised the running maximum of its queries; then a tile holds keys of one
 * block only, and a block may be left out when that is too little (SpargeAttn's pvthreshd). */
#include <math.h>
#include <stdlib.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "micro.h"

#define ROWS 192
#define TILE 128
#define NEAR 512 /* floats from one key to the next */
#define PACK_BYTES ((int64_t)40 << 20) /* heads packed at once by several threads stay below this */
#define IN_STEP 4 /* exponentials computed side by side */
#define NO_MEMORY 1

struct tensor {
    void *data;
    int64_t batch, head, token; /* strides in elements; the last dimension is contiguous */
};

struct heart_attention {
    int64_t batch, heads, dim, n_q, n_k, tail, q_blocks, k_blocks;
    struct tensor q, k, v, out;
    float *lse;                       /* [B, H, n_q + tail]: log of the sum of each query's weights, or NULL */
    const int64_t *row_ptr;           /* [B, H, q_blocks + 1] */
    const int32_t *cols;              /* [kept] */
    const int64_t *rest_ptr;          /* [B, H, q_blocks + 1], or NULL if nothing is approximated */
    const int32_t *rest_cols;         /* [approximated] */
    float *mass;                      /* [B, H, n_q + tail]: share of the approximated groups in the softmax, or NULL */
    const int32_t *q_starts, *k_starts; /* [blocks + 1], or that for each head */
    const int32_t *q_perm, *k_perm;   /* token at a sorted position, or NULL */
    int64_t own_starts, own_perm;     /* whether each head has its own */
    double scale;
    int64_t bf16, threads;
    float *gains;              /* [B, H, q_blocks, k_blocks]: raised to what each kept block gains in log2, or NULL */
    const uint8_t *descending; /* [B, H]: whether a head visits its blocks from the last; NULL: none does */
    const float *skip;         /* [B, H]: a block that gains no more than minus this is left out, or NULL */
    int64_t untested, whole;   /* blocks at the end of a row that stay; rows from this one on leave nothing out */
};

/* A head's keys [n][dim] and values [n / TILE][panel][TILE][2 VL] in sorted order, then the means of its groups. */
struct packed {
    float *keys, *values;
    float *bias; /* [k_blocks]: log2 of each group's size */
    int64_t key_stride;
};

struct task {
    int64_t head;        /* batch item * heads + head */
    int64_t block;       /* query block, or -1 for the unused tail */
    int64_t start, rows; /* sorted positions of its queries */
    int64_t cost;
    struct packed kv; /* of its head */
};

/* Keys that are dealt with together: where they and their values begin in the packed arrays of their head. */
struct tile {
    struct packed kv;
    int64_t n;
    int32_t key[TILE + AHEAD], value[TILE + AHEAD];
    int means; /* whether they are means, whose scores gain a bias */
    float bias[TILE];
};

struct work {
    float *queries;  /* [panel][dim][2 VL] */
    float *out;      /* [ROWS][padded dim] */
    float *scores;   /* [TILE][2 VL]; that for each panel where blocks may be left out */
    float *max, *sum; /* [ROWS], the maximum already multiplied with the scale */
    float *before;    /* [ROWS]: the maximum before the present block */
    float gain;       /* of the present tile */
    float *rest_max, *rest_sum; /* the same after the approximated groups alone */
    const struct task *ends, *soon; /* the task whose last tile this is, or NULL; what is likely to come after it */
};

static int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
/* A row of values fills whole panels. */
static int64_t padded(int64_t dim) { return round_up(dim, 2 * VL); }
static int32_t value_at(int32_t i, int32_t wide) { return i / TILE * TILE * wide + i % TILE * 2 * VL; }
/* Keys in fp32 and in order are read where they are, unless their rows lie so far apart that pages run out. */
static int keys_in_place(const struct heart_attention *a) {
    return !a->bf16 && !a->k_perm && a->k.token <= NEAR && !a->rest_ptr;
}
/* Where the mean of a group is: after all tokens. */
static int64_t mean_at(const struct heart_attention *a, int64_t group) { return a->n_k + a->tail + group; }
static int64_t packed_rows(const struct heart_attention *a) { return mean_at(a, a->rest_ptr ? a->k_blocks : 0); }
static int64_t keys_size(const struct heart_attention *a) {
    return keys_in_place(a) ? 0 : round_up(packed_rows(a) * a->dim, 16);
}
static int64_t bias_size(const struct heart_attention *a) { return a->rest_ptr ? round_up(a->k_blocks, 16) : 0; }
static int64_t packed_size(const struct heart_attention *a) {
    return keys_size(a) + bias_size(a) + round_up(packed_rows(a), TILE) * padded(a->dim);
}
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static float *floats(int64_t n) { return aligned_alloc(64, (size_t)((n * 4 + 63) / 64 * 64 + 64)); }

static const int32_t *of_head(const int32_t *base, int64_t own, int64_t head, int64_t size) {
    return base ? base + (own ? head * size : 0) : NULL;
}

/* Offset of a head's first token. */
static int64_t head_at(const struct heart_attention *a, const struct tensor *x, int64_t head) {
    return head / a->heads * x->batch + head % a->heads * x->head;
}

/* The i-th packed head, which is `head`. */
static struct packed packed_at(const struct heart_attention *a, float *buffer, int64_t i, int64_t head) {
    float *keys = buffer + i * packed_size(a), *bias = keys + keys_size(a), *values = bias + bias_size(a);
    if (keys_in_place(a)) return (struct packed){(float *)a->k.data + head_at(a, &a->k, head), values, bias, a->k.token};
    return (struct packed){keys, values, bias, a->dim};
}

static int64_t token_at(const int32_t *perm, int64_t n, int64_t position) {
    return perm && position < n ? perm[position] : position;
}

/* VL numbers at an element offset, as fp32. */
INLINE vec read_vec(const struct tensor *x, int bf16, int64_t offset) {
    return bf16 ? load_bf16((const uint16_t *)x->data + offset) : load((const float *)x->data + offset);
}

/* Prefetches a row that will be read soon: rows lie far apart, so the machine does not guess it. Into the second cache:
 * places of the first are few for rows that lie powers of two apart. */
INLINE void prefetch_row(const struct tensor *x, int bf16, int64_t offset, int64_t dim) {
    int64_t size = bf16 ? 2 : 4;
    for (int64_t i = 0; i < dim * size; i += 64) __builtin_prefetch((const char *)x->data + offset * size + i, 0, 2);
}

INLINE float read_one(const struct tensor *x, int bf16, int64_t offset) {
    return bf16 ? from_bf16(((const uint16_t *)x->data)[offset]) : ((const float *)x->data)[offset];
}

/* Keys and values at sorted positions [first, last) of a head. */
INLINE void pack_keys(const struct heart_attention *a, int bf16, int64_t head, struct packed to, int64_t first,
                      int64_t last) {
    const int32_t *perm = of_head(a->k_perm, a->own_perm, head, a->n_k);
    int64_t k_head = head_at(a, &a->k, head), v_head = head_at(a, &a->v, head);
    int64_t wide = padded(a->dim), whole = a->dim / VL * VL;
    int in_place = keys_in_place(a);
    for (int64_t i = first; i < last; i++) {
        int64_t token = token_at(perm, a->n_k, i), soon = token_at(perm, a->n_k, least(i + 12, last - 1));
        int64_t k = k_head + token * a->k.token, v = v_head + token * a->v.token;
        if (!in_place) prefetch_row(&a->k, bf16, k_head + soon * a->k.token, a->dim);
        prefetch_row(&a->v, bf16, v_head + soon * a->v.token, a->dim);
        float *key = to.keys + i * a->dim, *value = to.values + value_at(i, wide);
        for (int64_t d = 0; d < whole; d += VL) {
            if (!in_place) store(key + d, read_vec(&a->k, bf16, k + d));
            store(value + d / (2 * VL) * TILE * 2 * VL + d % (2 * VL), read_vec(&a->v, bf16, v + d));
        }
        for (int64_t d = whole; d < wide; d++) { /* the rest, and zeros up to the end of its panel */
            if (d < a->dim && !in_place) key[d] = read_one(&a->k, bf16, k + d);
            value[d / (2 * VL) * TILE * 2 * VL + d % (2 * VL)] = d < a->dim ? read_one(&a->v, bf16, v + d) : 0;
        }
    }
}

#define MEAN_ROWS 32 /* rows added up before they join the total: the rounding error of one long sum grows with it */

/* The mean of n rows, one vector wide; rows of keys lie `dim` apart. */
INLINE vec mean_key(const float *keys, int64_t n, int64_t dim) {
    vec total = {0};
    for (int64_t first = 0; first < n; first += MEAN_ROWS) {
        vec part = {0};
        for (int64_t i = first; i < least(first + MEAN_ROWS, n); i++) part += load(keys + i * dim);
        total += part;
    }
    return total / (float)n;
}

/* The same for the values at sorted positions from `start` on. */
INLINE vec mean_value(const float *values, int64_t start, int64_t n, int64_t wide) {
    vec total = {0};
    for (int64_t first = start; first < start + n; first += MEAN_ROWS) {
        vec part = {0};
        for (int64_t i = first; i < least(first + MEAN_ROWS, start + n); i++)
            part += load(values + value_at((int32_t)i, (int32_t)wide));
        total += part;
    }
    return total / (float)n;
}

/* Means of the keys and values of one group, which are packed already. */
static void pack_means(const struct heart_attention *a, int64_t head, struct packed to, int64_t group) {
    const int32_t *starts = of_head(a->k_starts, a->own_starts, head, a->k_blocks + 1);
    int64_t start = starts[group], n = starts[group + 1] - start, wide = padded(a->dim), mean = mean_at(a, group);
    if (!n) return;
    to.bias[group] = log2f((float)n);
    const float *keys = to.keys + start * a->dim;
    float *key = to.keys + mean * a->dim, *value = to.values + value_at((int32_t)mean, (int32_t)wide);
    int64_t d = 0;
    for (; d + VL <= a->dim; d += VL) store(key + d, mean_key(keys + d, n, a->dim));
    for (; d < a->dim; d++) {
        double sum = 0;
        for (int64_t i = 0; i < n; i++) sum += keys[i * a->dim + d];
        key[d] = (float)(sum / (double)n);
    }
    for (d = 0; d < wide; d += VL) {
        int64_t column = d / (2 * VL) * TILE * 2 * VL + d % (2 * VL);
        store(value + column, mean_value(to.values + column, start, n, wide));
    }
}

/* Queries of a task, transposed into panels; missing lanes are zero. */
INLINE void pack_queries(const struct heart_attention *a, int bf16, const struct task *t, float *to) {
    const int32_t *perm = of_head(a->q_perm, a->own_perm, t->head, a->n_q);
    int64_t from[ROWS], whole = a->dim / VL * VL, head = head_at(a, &a->q, t->head);
    for (int64_t r = 0; r < t->rows; r++) {
        from[r] = head + token_at(perm, a->n_q, t->start + r) * a->q.token;
        prefetch_row(&a->q, bf16, from[r], a->dim);
    }
    float sign = a->scale < 0 ? -1.0f : 1.0f; /* so that the largest score is always the largest logit */
    for (int64_t first = 0; first < round_up(t->rows, 2 * VL); first += VL) {
        float *panel = to + first / (2 * VL) * 2 * VL * a->dim + first % (2 * VL);
        int64_t lanes = least(t->rows - first, VL);
        int64_t d = 0;
        for (; lanes == VL && d < whole; d += VL) {
            vec rows[VL];
            for (int r = 0; r < VL; r++) rows[r] = read_vec(&a->q, bf16, from[first + r] + d) * sign;
            transpose(rows);
            for (int r = 0; r < VL; r++) store(panel + (d + r) * 2 * VL, rows[r]);
        }
        for (; d < a->dim; d++)
            for (int64_t r = 0; r < VL; r++)
                panel[d * 2 * VL + r] = r < lanes ? sign * read_one(&a->q, bf16, from[first + r] + d) : 0;
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
    int64_t i = 0;
    for (; i + IN_STEP <= n * vectors; i += IN_STEP) {
        vec x[IN_STEP];
        for (int j = 0; j < IN_STEP; j++) x[j] = load(scores + (i + j) * VL) * c - less[j % vectors];
        vexp2_each(IN_STEP, x);
        for (int j = 0; j < IN_STEP; j++) store(scores + (i + j) * VL, x[j]), part[j % vectors] += x[j];
    }
    for (; i < n * vectors; i++) {
        vec weight = vexp2(load(scores + i * VL) * c - less[i % vectors]);
        store(scores + i * VL, weight);
        part[i % vectors] += weight;
    }
    for (int j = 0; j < vectors; j++) store(sum + j * VL, total[j] + part[j]);
}

/* Scores of means [n][vectors VL] multiplied with the scale, the bias added, in place; and their maximum. */
INLINE void add_bias(int vectors, float *scores, const struct tile *t, float c, vec *top) {
    for (int j = 0; j < vectors; j++) top[j] = splat(-INFINITY);
    for (int64_t i = 0; i < t->n; i++)
        for (int j = 0; j < vectors; j++) {
            float *at = scores + (i * vectors + j) * VL;
            vec x = load(at) * c + t->bias[i];
            store(at, x);
            top[j] = vmax(x, top[j]);
        }
}

/* Prefetches a share of the rows that the present task will write and of the queries that the next one reads: little by
 * little, because many requests at once hold up the loads between them. Inlined by force: a compiler may take a function
 * that only prefetches for one that does nothing, and leave out its calls. */
INLINE void prefetch_ends(const struct heart_attention *a, const struct work *w, int64_t panel, int64_t d) {
    const struct task *ends = w->ends, *soon = w->soon;
    if (!ends) return;
    int64_t columns = padded(a->dim) / (2 * VL), part = panel * columns + d / (2 * VL);
    int64_t parts = round_up(ends->rows, 2 * VL) / (2 * VL) * columns;
    const int32_t *perm = of_head(a->q_perm, a->own_perm, ends->head, a->n_q);
    int64_t out = head_at(a, &a->out, ends->head), size = a->bf16 ? 2 : 4;
    for (int64_t r = part * ends->rows / parts; r < (part + 1) * ends->rows / parts; r++) {
        const char *row = (char *)a->out.data + (out + token_at(perm, a->n_q, ends->start + r) * a->out.token) * size;
        for (int64_t i = 0; i < a->dim * size; i += 64) __builtin_prefetch(row + i, 1, 2);
    }
    if (!soon) return;
    perm = of_head(a->q_perm, a->own_perm, soon->head, a->n_q);
    int64_t q = head_at(a, &a->q, soon->head);
    for (int64_t r = part * soon->rows / parts; r < (part + 1) * soon->rows / parts; r++)
        prefetch_row(&a->q, a->bf16, q + token_at(perm, a->n_q, soon->start + r) * a->q.token, a->dim);
}

/* From scores to units of log2. */
INLINE float log2_scale(const struct heart_attention *a) { return (float)(fabs(a->scale) * 1.4426950408889634); }

/* Raises the tile's gain to what it is for a panel's first `lanes` queries. */
INLINE void note_gain(int vectors, const struct heart_attention *a, struct work *w, int64_t first, int64_t lanes,
                      const vec *top) {
    float above[2 * VL], c = log2_scale(a);
    for (int j = 0; j < vectors; j++) store(above + j * VL, top[j] * c - load(w->before + first + j * VL));
    for (int64_t i = 0; i < lanes; i++) /* no finite score yet, or a broken one: counts as much */
        if (!(above[i] <= w->gain)) w->gain = above[i] == above[i] ? above[i] : INFINITY;
}

/* Scores of one panel of queries, one or two vectors of them in use, against one tile of keys, and their maximum. */
INLINE void panel_scores(int vectors, const struct heart_attention *a, struct work *w, int64_t panel, int64_t lanes,
                         const struct tile *t, float *scores, vec *top) {
    int64_t first = panel * 2 * VL;
    top[0] = top[1] = splat(-INFINITY);
    scores_tile(vectors, w->queries + first * a->dim, t->kv.keys, t->key, t->n, a->dim, scores, top);
    if (a->gains || a->skip) note_gain(vectors, a, w, first, lanes, top);
}

/* What a panel's scores make of its sums, for its first tile or a later one. */
INLINE void panel_values(int vectors, const struct heart_attention *a, struct work *w, int64_t panel, int64_t lanes,
                         const struct tile *t, float *scores, vec *top, int first_tile) {
    float shrink[2 * VL], *factors = first_tile ? NULL : shrink;
    int64_t first = panel * 2 * VL, wide = padded(a->dim);
    float c = log2_scale(a);
    if (t->means) add_bias(vectors, scores, t, c, top), c = 1;
    exponentials(vectors, scores, t->n, c, top, w->max + first, w->sum + first, shrink);
    for (int64_t d = 0; d < a->dim; d += 2 * VL) {
        const float *values = t->kv.values + d * TILE;
        float *out = w->out + first * wide + d;
        prefetch_ends(a, w, panel, d);
        if (a->dim - d > VL)
            values_tile(vectors, 2, scores, values, t->value, t->n, lanes, out, wide, factors);
        else
            values_tile(vectors, 1, scores, values, t->value, t->n, lanes, out, wide, factors);
    }
}

INLINE void panel_tile(int vectors, const struct heart_attention *a, struct work *w, int64_t panel, int64_t lanes,
                       const struct tile *t, int first_tile) {
    vec top[2];
    panel_scores(vectors, a, w, panel, lanes, t, w->scores, top);
    panel_values(vectors, a, w, panel, lanes, t, w->scores, top, first_tile);
}

/* The scores of all panels first, and nothing more if the tile gains no more than `least_gain`. */
static void test_tile(const struct heart_attention *a, struct work *w, int64_t rows, const struct tile *t,
                      float least_gain) {
    vec top[ROWS / VL + 2];
    int64_t panels = round_up(rows, 2 * VL) / (2 * VL);
    for (int64_t i = 0; i < panels; i++)
        panel_scores(2, a, w, i, least(rows - i * 2 * VL, 2 * VL), t, w->scores + i * TILE * 2 * VL, top + 2 * i);
    if (w->gain <= least_gain) return;
    for (int64_t i = 0; i < panels; i++)
        panel_values(2, a, w, i, least(rows - i * 2 * VL, 2 * VL), t, w->scores + i * TILE * 2 * VL, top + 2 * i, 0);
}

/* Runs a tile, a task's first or a later one. */
static void run_tile(const struct heart_attention *a, struct work *w, int64_t rows, struct tile *t, int first_tile) {
    for (int64_t panel = 0; rows > 0; panel++, rows -= 2 * VL) {
        if (rows > VL) panel_tile(2, a, w, panel, least(rows, 2 * VL), t, first_tile);
        else panel_tile(1, a, w, panel, rows, t, first_tile);
    }
}

/* Walks through the keys that a task keeps. */
struct walk {
    int64_t rest, rest_end; /* entries of rest_cols that are left: they come first */
    int64_t kept, kept_end; /* entries of cols that are left */
    int64_t from, to;       /* sorted positions that are left of the present block */
    int64_t block;          /* the present block, or -1 */
    int opens, back;        /* whether the tile is its block's first; whether blocks come from the last */
    struct tile tile;
};

static void begin(const struct heart_attention *a, const struct task *task, struct walk *k) {
    k->rest = k->rest_end = k->kept = k->kept_end = k->from = k->to = 0;
    k->block = -1, k->opens = 0, k->back = a->descending && a->descending[task->head];
    k->tile.kv = task->kv;
    if (task->block < 0) {
        k->from = a->n_k, k->to = a->n_k + a->tail;
    } else {
        const int64_t *row = a->row_ptr + task->head * (a->q_blocks + 1) + task->block;
        k->kept = row[0], k->kept_end = row[1];
        if (a->rest_ptr) {
            row = a->rest_ptr + task->head * (a->q_blocks + 1) + task->block;
            k->rest = row[0], k->rest_end = row[1];
        }
    }
}

/* Fills the tile with the means that come next. */
static void fill_means(const struct heart_attention *a, struct walk *k) {
    struct tile *to = &k->tile;
    int32_t wide = (int32_t)padded(a->dim), stride = (int32_t)to->kv.key_stride, first = (int32_t)mean_at(a, 0);
    to->n = least(k->rest_end - k->rest, TILE);
    for (int64_t i = 0; i < to->n; i++) {
        int32_t group = a->rest_cols[k->rest + i];
        to->key[i] = (first + group) * stride;
        to->value[i] = value_at(first + group, wide);
        to->bias[i] = to->kv.bias[group];
    }
    k->rest += to->n;
}

/* Fills the tile with the keys that come next; whether any are left after it. */
static int fill(const struct heart_attention *a, const struct task *task, struct walk *k) {
    struct tile *to = &k->tile;
    to->means = k->rest < k->rest_end;
    if (to->means) {
        fill_means(a, k);
        return k->rest < k->rest_end || k->kept < k->kept_end;
    }
    const int32_t *starts = of_head(a->k_starts, a->own_starts, task->head, a->k_blocks + 1);
    int32_t wide = (int32_t)padded(a->dim), stride = (int32_t)to->kv.key_stride; /* narrow ones go by vectors */
    k->opens = 0;
    for (to->n = 0; to->n < TILE;) {
        if (k->from == k->to) {
            if (to->n && (a->gains || a->skip)) break; /* a tile of one block */
            if (k->kept == k->kept_end) return 0;
            int32_t block = a->cols[k->back ? --k->kept_end : k->kept++];
            k->from = starts[block], k->to = starts[block + 1];
            k->block = block, k->opens = 1;
        }
        int64_t count = least(k->to - k->from, TILE - to->n);
        for (int32_t i = 0, from = (int32_t)k->from; i < (int32_t)count; i++) {
            to->key[to->n + i] = (from + i) * stride;
            to->value[to->n + i] = value_at(from + i, wide);
        }
        to->n += count, k->from += count;
    }
    return k->from < k->to || k->kept < k->kept_end;
}

INLINE void write_rows(const struct heart_attention *a, int bf16, const struct task *t, const struct work *w) {
    const int32_t *perm = of_head(a->q_perm, a->own_perm, t->head, a->n_q);
    int64_t wide = padded(a->dim), head = head_at(a, &a->out, t->head);
    for (int64_t r = 0; r < t->rows; r++) {
        int64_t offset = head + token_at(perm, a->n_q, t->start + r) * a->out.token;
        const float *from = w->out + r * wide;
        float share = 1.0f / w->sum[r];
        int64_t at = t->head * (a->n_q + a->tail) + token_at(perm, a->n_q, t->start + r);
        if (a->mass) a->mass[at] = w->rest_sum[r] == 0 ? 0 : w->rest_sum[r] * exp2f(w->rest_max[r] - w->max[r]) * share;
        if (a->lse) { /* a part of a softmax: a query may have no key in it */
            a->lse[at] = (w->max[r] + log2f(w->sum[r])) * 0.6931471805599453f;
            if (w->sum[r] == 0) share = 0;
        }
        if (bf16) {
            uint16_t *to = (uint16_t *)a->out.data + offset;
            for (int64_t d = 0; d < a->dim; d++) to[d] = to_bf16(from[d] * share);
        } else {
            float *to = (float *)a->out.data + offset;
            for (int64_t d = 0; d < a->dim; d++) to[d] = from[d] * share;
        }
    }
}

static void raise_to(float *at, float x) {
    float seen;
    __atomic_load(at, &seen, __ATOMIC_RELAXED); /* several tasks may share a block of queries */
    while (x > seen && !__atomic_compare_exchange(at, &seen, &x, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

/* Whether the present tile may be left out: the last blocks of a row stay, as do all of a short last row. */
static int is_tested(const struct heart_attention *a, const struct task *t, const struct walk *k) {
    return a->skip && k->block >= 0 && t->block < a->whole && k->kept_end - k->kept >= a->untested;
}

/* Runs the present tile and notes what it gains. */
static void visit(const struct heart_attention *a, const struct task *t, struct walk *k, struct work *w, int first) {
    struct tile *tile = &k->tile;
    if (!tile->n) return;
    for (int64_t i = 0; i < AHEAD; i++) { /* next: the same keys for other queries, the same values one panel on */
        tile->key[tile->n + i] = tile->key[i % tile->n];
        tile->value[tile->n + i] = tile->value[i % tile->n] + TILE * 2 * VL;
    }
    w->gain = -INFINITY;
    if (k->opens && (a->gains || a->skip)) memcpy(w->before, w->max, (ROWS + 2 * VL) * 4);
    if (!first && is_tested(a, t, k)) test_tile(a, w, t->rows, tile, -a->skip[t->head]);
    else run_tile(a, w, t->rows, tile, first);
    if (a->gains && k->block >= 0)
        raise_to(a->gains + (t->head * a->q_blocks + t->block) * a->k_blocks + k->block, w->gain);
}

/* Runs a task; `soon` is the one that this thread is likely to get next, so that its queries are prefetched. */
static void run_task(const struct heart_attention *a, const struct task *t, const struct task *soon, struct walk *k,
                     struct work *w) {
    if (a->bf16) pack_queries(a, 1, t, w->queries);
    else pack_queries(a, 0, t, w->queries);
    for (int64_t r = 0; r < ROWS + 2 * VL; r++) w->max[r] = -INFINITY, w->sum[r] = w->rest_sum[r] = 0;
    begin(a, t, k);
    w->soon = soon;
    for (int more = 1, first = 1; more; first = 0) {
        more = fill(a, t, k);
        if (first && !k->tile.n) memset(w->out, 0, (size_t)(t->rows * padded(a->dim)) * 4); /* a part without keys */
        w->ends = more ? NULL : t;
        visit(a, t, k, w, first);
        if (k->tile.means && a->mass) {
            memcpy(w->rest_max, w->max, (size_t)t->rows * 4);
            memcpy(w->rest_sum, w->sum, (size_t)t->rows * 4);
        }
    }
    if (a->bf16) write_rows(a, 1, t, w);
    else write_rows(a, 0, t, w);
}

/* Keys that a block of queries meets, a mean counting as one. */
static int64_t count_keys(const struct heart_attention *a, int64_t head, int64_t block) {
    const int64_t *row = a->row_ptr + head * (a->q_blocks + 1) + block;
    const int64_t *rest = a->rest_ptr ? a->rest_ptr + head * (a->q_blocks + 1) + block : NULL;
    const int32_t *starts = of_head(a->k_starts, a->own_starts, head, a->k_blocks + 1);
    int64_t sum = rest ? rest[1] - rest[0] : 0;
    for (int64_t i = row[0]; i < row[1]; i++) sum += starts[a->cols[i] + 1] - starts[a->cols[i]];
    return sum;
}

/* Cuts [start, end) into tasks of at most ROWS rows, about equal; only counts them if tasks is NULL. */
static int64_t cut(struct task *tasks, int64_t head, int64_t block, int64_t start, int64_t end, int64_t keys) {
    int64_t parts = (end - start + ROWS - 1) / ROWS;
    int64_t size = parts ? round_up((end - start + parts - 1) / parts, 2 * VL) : 1;
    int64_t count = (end - start + size - 1) / size;
    for (int64_t i = 0; tasks && i < count; i++) {
        int64_t from = start + i * size, rows = least(size, end - from);
        tasks[i] = (struct task){head, block, from, rows, keys * rows, {0}};
    }
    return count;
}

static int64_t list_tasks(const struct heart_attention *a, int64_t first, int64_t last, struct task *tasks) {
    int64_t n = 0;
    for (int64_t head = first; head < last; head++) {
        const int32_t *starts = of_head(a->q_starts, a->own_starts, head, a->q_blocks + 1);
        for (int64_t b = 0; b < a->q_blocks; b++)
            n += cut(tasks ? tasks + n : NULL, head, b, starts[b], starts[b + 1], tasks ? count_keys(a, head, b) : 0);
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

static int make_work(struct work *w, int64_t dim, int all_scores) {
    w->queries = floats((ROWS + 2 * VL) * dim);
    w->out = floats((ROWS + 2 * VL) * padded(dim));
    w->scores = floats(TILE * (all_scores ? ROWS + 2 * VL : 2 * VL));
    w->before = floats(ROWS + 2 * VL);
    w->max = floats(ROWS + 2 * VL);
    w->sum = floats(ROWS + 2 * VL);
    w->rest_max = floats(ROWS + 2 * VL);
    w->rest_sum = floats(ROWS + 2 * VL);
    return w->queries && w->out && w->scores && w->before && w->max && w->sum && w->rest_max && w->rest_sum;
}

static void free_work(struct work *w) {
    free(w->queries), free(w->out), free(w->scores), free(w->max), free(w->sum);
    free(w->before), free(w->rest_max), free(w->rest_sum);
}

/* Heads [first, last): pack them, then run their tasks, longest first. */
static int run_heads(const struct heart_attention *a, int64_t first, int64_t last, float *buffer) {
    int64_t n = a->n_k + a->tail, chunks = (n + 255) / 256, count = list_tasks(a, first, last, NULL);
    struct task *tasks = malloc((size_t)(count ? count : 1) * sizeof *tasks);
    if (!tasks) return NO_MEMORY;
    list_tasks(a, first, last, tasks);
    for (int64_t i = 0; i < count; i++) tasks[i].kv = packed_at(a, buffer, tasks[i].head - first, tasks[i].head);
    if (a->threads > 1) qsort(tasks, (size_t)count, sizeof *tasks, by_cost);
    int failed = 0;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
    {
        struct work w = {0};
        struct walk k = {0};
        int ready = make_work(&w, a->dim, a->skip != NULL);
        if (!ready) {
#pragma omp atomic write
            failed = NO_MEMORY;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < (last - first) * chunks; i++) {
            int64_t from = i % chunks * 256;
            struct packed to = packed_at(a, buffer, i / chunks, first + i / chunks);
            if (a->bf16) pack_keys(a, 1, first + i / chunks, to, from, least(from + 256, n));
            else pack_keys(a, 0, first + i / chunks, to, from, least(from + 256, n));
        }
        if (a->rest_ptr) {
#pragma omp for schedule(dynamic, 16)
            for (int64_t i = 0; i < (last - first) * a->k_blocks; i++)
                pack_means(a, first + i / a->k_blocks, packed_at(a, buffer, i / a->k_blocks, first + i / a->k_blocks),
                           i % a->k_blocks);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; i++)
            if (ready) run_task(a, tasks + i, i + a->threads < count ? tasks + i + a->threads : NULL, &k, &w);
        free_work(&w);
    }
    free(tasks);
    return failed;
}

/* How many heads are packed together. */
static int64_t heads_together(const struct heart_attention *a) {
    int64_t together = a->threads > 1 ? PACK_BYTES / (packed_size(a) * 4) : 1;
    return least(together < 1 ? 1 : together, a->batch * a->heads);
}

/* Bytes that heart_attention wants as its buffer; the caller keeps it, because fresh pages cost more than packing. */
int64_t heart_attention_bytes(const struct heart_attention *a) { return heads_together(a) * packed_size(a) * 4; }

/* 0, or 1 if there is no memory; the buffer must begin at a multiple of 64. */
int heart_attention(const struct heart_attention *a, float *buffer) {
    int64_t all = a->batch * a->heads, together = heads_together(a);
    int failed = 0;
    for (int64_t first = 0; first < all && !failed; first += together)
        failed = run_heads(a, first, least(first + together, all), buffer);
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
