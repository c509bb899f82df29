/* Ranking clusters anew at every call: sums and sums of squares of the tokens of each cluster, and which clusters to keep.
 * The definitions are in kernels/ops/rank.py. */
#include <math.h>
#include <stdlib.h>

#include "simd.h"

struct heart_moments {
    int64_t heads;
    const void *const *x;            /* of each head: n tokens of `width` numbers, `stride` apart */
    const int16_t *const *labels;    /* of each head: [n]; what is not below `count` belongs to no cluster */
    int64_t n, width, stride, count;
    float *sums, *squares; /* [heads][count][width] */
    int64_t *sizes;        /* [heads][count] */
    int64_t bf16, threads;
};

/* One token into the sums of its cluster. */
INLINE void add_token(const void *x, int bf16, int64_t at, int64_t width, float *sums, float *squares) {
    int64_t d = 0;
    for (; d + VL <= width; d += VL) {
        vec one = bf16 ? load_bf16((const uint16_t *)x + at + d) : load((const float *)x + at + d);
        store(sums + d, load(sums + d) + one);
        store(squares + d, load(squares + d) + one * one);
    }
    for (; d < width; d++) {
        float one = bf16 ? from_bf16(((const uint16_t *)x)[at + d]) : ((const float *)x)[at + d];
        sums[d] += one, squares[d] += one * one;
    }
}

/* Sums, sums of squares and sizes of one head's tokens of each label. */
static void moments(const void *x, int bf16, int64_t n, int64_t width, int64_t stride, const int16_t *labels,
                    int64_t count, float *sums, float *squares, int64_t *sizes) {
    memset(sums, 0, (size_t)(count * width) * 4);
    memset(squares, 0, (size_t)(count * width) * 4);
    memset(sizes, 0, (size_t)count * 8);
    for (int64_t t = 0; t < n; t++) {
        int64_t label = labels[t];
        if (label < 0 || label >= count) continue;
        sizes[label]++;
        if (bf16) add_token(x, 1, t * stride, width, sums + label * width, squares + label * width);
        else add_token(x, 0, t * stride, width, sums + label * width, squares + label * width);
    }
}

/* Sums, sums of squares and sizes of the tokens of each label. Returns 0. */
int heart_cluster_moments(const struct heart_moments *a) {
    int64_t table = a->count * a->width;
#pragma omp parallel for num_threads((int)a->threads) schedule(dynamic) if (a->threads > 1)
    for (int64_t h = 0; h < a->heads; h++)
        moments(a->x[h], (int)a->bf16, a->n, a->width, a->stride, a->labels[h], a->count, a->sums + h * table,
                a->squares + h * table, a->sizes + h * a->count);
    return 0;
}

struct heart_ranked {
    int64_t heads, rows, columns;
    const float *scores;  /* [heads][rows][columns] */
    const int64_t *sizes; /* [heads][columns] */
    const double *shares; /* [heads]: of all keys, that a row keeps */
    int64_t at_least;     /* columns that it keeps in any case */
    uint8_t *kept;        /* [heads][rows][columns] */
    int64_t threads;
};

/* A number that ascends where scores descend and, among equal ones, with the column. */
INLINE uint64_t rank_of(float score, int64_t column) {
    float x = score + 0.0f; /* -0 is 0 */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u; /* ascends with the score */
    return (uint64_t)~bits << 32 | (uint64_t)column;
}

INLINE void swap(uint64_t *a, uint64_t *b) {
    uint64_t c = *a;
    *a = *b, *b = c;
}

/* Moves the middle one of three ranks to the end of [lo, hi). */
static void choose_pivot(uint64_t *ranks, int64_t lo, int64_t hi) {
    uint64_t *a = ranks + lo, *b = ranks + (lo + hi) / 2, *c = ranks + hi - 1;
    if (*b < *a) swap(a, b);
    if (*c < *b) swap(b, c);
    if (*b < *a) swap(a, b);
    swap(b, c);
}

/* One row: the first columns by rank, as long as those before hold less than `need` keys. Not sorted: only the side of
 * each pivot is looked into that the boundary lies in. */
static void keep_row(const float *scores, const int64_t *sizes, int64_t columns, double need, int64_t at_least,
                     uint64_t *ranks, uint8_t *kept) {
    int broken = 0;
    for (int64_t j = 0; j < columns; j++) broken |= scores[j] != scores[j], ranks[j] = rank_of(scores[j], j);
    for (int64_t j = 0; j < columns; j++) kept[j] = (uint8_t)broken; /* nothing can be said about a row with NaN */
    double before = 0;
    for (int64_t lo = 0, hi = broken ? 0 : columns; lo < hi;) {
        choose_pivot(ranks, lo, hi);
        uint64_t pivot = ranks[hi - 1];
        int64_t mid = lo, keys = 0;
        for (int64_t i = lo; i < hi - 1; i++) { /* no branch: nobody could foresee it */
            uint64_t one = ranks[i];
            int64_t smaller = one < pivot;
            ranks[i] = ranks[mid], ranks[mid] = one;
            keys += smaller * sizes[(uint32_t)one];
            mid += smaller;
        }
        swap(ranks + mid, ranks + hi - 1);
        if (before + (double)keys < need || mid < at_least) {
            for (int64_t i = lo; i <= mid; i++) kept[(uint32_t)ranks[i]] = 1;
            before += (double)(keys + sizes[(uint32_t)pivot]);
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
}

/* Which columns each row keeps. Returns 0, or 1 without memory. */
int heart_rank_keep(const struct heart_ranked *a) {
    int failed = 0;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
    {
        uint64_t *ranks = malloc((size_t)(a->columns + 1) * sizeof *ranks);
        if (!ranks) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->heads * a->rows; row++) {
            const int64_t *sizes = a->sizes + row / a->rows * a->columns;
            double all = 0;
            for (int64_t j = 0; j < a->columns; j++) all += (double)sizes[j];
            if (ranks)
                keep_row(a->scores + row * a->columns, sizes, a->columns, a->shares[row / a->rows] * all, a->at_least,
                         ranks, a->kept + row * a->columns);
        }
        free(ranks);
    }
    return failed;
}

struct heart_by_error {
    int64_t heads;
    const void *const *x[3];         /* queries, keys, values: of each head, tokens of `width` numbers, `stride` apart */
    const int16_t *const *labels[2]; /* of each head's queries and keys */
    int64_t n[2], width, value_width, stride[3], count[2];
    const double *shares; /* [heads]: of all keys, that a row keeps */
    int64_t at_least;
    float *space;  /* heads * heart_by_error_floats() */
    uint8_t *kept; /* [heads][count[0]][count[1]] */
    int64_t bf16, threads;
};

INLINE int64_t in_vectors(int64_t n) { return (n + 2 * VL - 1) / (2 * VL) * (2 * VL); } /* whole pairs of vectors */

/* What one head needs: moments of queries, keys and values, and of keys the means and variances turned, [width][columns],
 * with the logarithm of the size and the spread of the values for each key. */
struct ranked_head {
    float *sums[3], *squares[3], *means, *variances, *log_size, *per_key;
    int64_t *sizes[3];
};

static struct ranked_head head_space(const struct heart_by_error *a, int64_t head, int64_t *floats) {
    struct ranked_head s;
    float *at = a->space ? a->space + head * *floats : 0, *start = at;
    int64_t columns = in_vectors(a->count[1]);
#define TAKE(name, size) s.name = at, at += in_vectors(size)
    for (int i = 0; i < 3; i++) {
        int64_t count = a->count[i > 0], width = i == 2 ? a->value_width : a->width;
        TAKE(sums[i], count * width);
        TAKE(squares[i], count * width);
        s.sizes[i] = (int64_t *)at, at += in_vectors(2 * count);
    }
    TAKE(means, a->width * columns);
    TAKE(variances, a->width * columns);
    TAKE(log_size, columns);
    TAKE(per_key, columns);
#undef TAKE
    *floats = at - start;
    return s;
}

int heart_by_error_floats(const struct heart_by_error *a) {
    struct heart_by_error sized = *a;
    int64_t floats = 0;
    sized.space = 0;
    head_space(&sized, 0, &floats);
    return (int)floats;
}

/* Means of queries in place; of keys turned, with variances; spreads of values a key. */
static void derive(const struct heart_by_error *a, struct ranked_head *s) {
    int64_t columns = in_vectors(a->count[1]);
    for (int64_t i = 0; i < a->count[0]; i++) {
        float number = s->sizes[0][i] > 0 ? (float)s->sizes[0][i] : 1.0f;
        for (int64_t d = i * a->width; d < (i + 1) * a->width; d++) s->sums[0][d] /= number, s->squares[0][d] /= number;
    }
    memset(s->means, 0, (size_t)(2 * a->width * columns) * 4); /* the variances lie behind them */
    for (int64_t j = 0; j < columns; j++) {
        int64_t size = j < a->count[1] ? s->sizes[1][j] : 0;
        float number = size > 0 ? (float)size : 1.0f, spread = 0;
        s->log_size[j] = size > 0 ? log2f((float)size) : -INFINITY;
        for (int64_t d = 0; size > 0 && d < a->width; d++) {
            float mean = s->sums[1][j * a->width + d] / number;
            float variance = s->squares[1][j * a->width + d] / number - mean * mean;
            s->means[d * columns + j] = mean;
            s->variances[d * columns + j] = variance < 0 ? 0 : variance;
        }
        for (int64_t d = 0; size > 0 && d < a->value_width; d++) {
            float mean = s->sums[2][j * a->value_width + d] / number;
            float variance = s->squares[2][j * a->value_width + d] / number - mean * mean;
            spread += variance < 0 ? 0 : variance;
        }
        s->per_key[j] = sqrtf(spread) / number;
    }
}

/* Estimated error of approximating each key cluster of one row, for each key computed instead. */
static void score_row(const struct heart_by_error *a, const struct ranked_head *s, int64_t row, float *scores) {
    int64_t columns = in_vectors(a->count[1]);
    const float *mean = s->sums[0] + row * a->width, *square = s->squares[0] + row * a->width;
    float scale = 1 / sqrtf((float)a->width), highest[VL], *spread = scores + columns;
    vec top = splat(-INFINITY), sum = (vec){0};
    for (int64_t j = 0; j < columns; j += 2 * VL) { /* two vectors at once: sums wait for one another */
        vec logit[2] = {{0}, {0}}, wide[2] = {{0}, {0}};
        for (int64_t d = 0; d < a->width; d++)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                logit[i] += splat(mean[d]) * load(s->means + d * columns + j + i * VL);
                wide[i] += splat(square[d]) * load(s->variances + d * columns + j + i * VL);
            }
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            vec x = logit[i] * (scale * 1.44269504f) + load(s->log_size + j + i * VL);
            store(scores + j + i * VL, x);
            store(spread + j + i * VL, vsqrt(wide[i]) * load(s->per_key + j + i * VL));
            top = vmax(x, top);
        }
    }
    store(highest, top);
    for (int i = 1; i < VL; i++) highest[0] = highest[i] > highest[0] ? highest[i] : highest[0];
    for (int64_t j = 0; j < columns; j += VL) {
        vec e = vexp2(load(scores + j) - splat(highest[0]));
        store(scores + j, e);
        sum += e;
    }
    vec share = splat(scale / add_up(sum));
    for (int64_t j = 0; j < columns; j += VL) store(scores + j, load(scores + j) * share * load(spread + j));
}

/* Which clusters each row keeps, ranked by the error of approximating them: moments, scores and choice in one go.
 * Returns 0, or 1 without memory. */
int heart_keep_by_error(const struct heart_by_error *a) {
    int failed = 0;
    int64_t floats = heart_by_error_floats(a), columns = in_vectors(a->count[1]);
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
    {
        int64_t mine = floats;
        uint64_t *ranks = malloc((size_t)(a->count[1] + 1) * sizeof *ranks);
        float *scores = malloc((size_t)(2 * columns) * sizeof *scores);
        if (!ranks || !scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (int64_t job = 0; job < 3 * a->heads; job++) {
            int64_t h = job / 3, i = job % 3, side = i > 0;
            struct ranked_head s = head_space(a, h, &mine);
            moments(a->x[i][h], (int)a->bf16, a->n[side], i == 2 ? a->value_width : a->width, a->stride[i],
                    a->labels[side][h], a->count[side], s.sums[i], s.squares[i], s.sizes[i]);
        }
#pragma omp for schedule(dynamic)
        for (int64_t h = 0; h < a->heads; h++) {
            struct ranked_head s = head_space(a, h, &mine);
            derive(a, &s);
        }
#pragma omp for schedule(static)
        for (int64_t job = 0; job < a->heads * a->count[0]; job++) {
            int64_t h = job / a->count[0];
            struct ranked_head s = head_space(a, h, &mine);
            double all = 0;
            for (int64_t j = 0; j < a->count[1]; j++) all += (double)s.sizes[1][j];
            if (ranks && scores) {
                score_row(a, &s, job % a->count[0], scores);
                keep_row(scores, s.sizes[1], a->count[1], a->shares[h] * all, a->at_least, ranks,
                         a->kept + job * a->count[1]);
            }
        }
        free(ranks);
        free(scores);
    }
    return failed;
}

struct heart_lists {
    int64_t rows, columns;
    const uint8_t *flags; /* [rows][columns], 0 or 1 */
    const int64_t *ends;  /* [rows]: where each row's list ends; 0 to count alone */
    int32_t *counts, *listed; /* [rows]; [all true flags] */
    int64_t threads;
};

/* How many flags of each row are true, and, once it is known where their lists end, which. Returns 0. */
int heart_lists(const struct heart_lists *a) {
#pragma omp parallel for num_threads((int)a->threads) schedule(static) if (a->threads > 1 && a->rows * a->columns > 65536)
    for (int64_t row = 0; row < a->rows; row++) {
        const uint8_t *flags = a->flags + row * a->columns;
        if (!a->ends) {
            int32_t count = 0;
            for (int64_t j = 0; j < a->columns; j++) count += flags[j];
            a->counts[row] = count;
            continue;
        }
        int32_t *to = a->listed + a->ends[row] - a->counts[row], *last = a->listed + a->ends[row];
        for (int64_t j = 0; to < last; j++) *to = (int32_t)j, to += flags[j]; /* no branch: nobody could foresee it */
    }
    return 0;
}
