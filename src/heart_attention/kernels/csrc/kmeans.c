/* k-means on a CPU: the nearest centroids, sums over clusters, and whole clusterings of several heads.
 *
 * The definition is kernels/ops/kmeans.py. The distances are a matrix product whose result is used up where it is made,
 * by a running minimum.
 */
#include <math.h>

#include "panels.h"

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

#define TOKEN_ROWS 48   /* tokens that meet one panel of centroids while it is in the first cache */
#define CHUNK_TOKENS 192 /* tokens that a thread takes at a time */
#define TOLERANCE 1e-4f  /* a head stops once no centroid moves further than this */

/* The tokens of one head, where its clusters begin, and where the result goes. */
struct heart_clustering {
    const void *x;         /* [n][width], rows `stride` apart */
    int64_t n, stride;     /* tokens that are clustered, after `order` */
    int64_t count, iters;  /* clusters, and iterations at most */
    float *centroids;      /* [count][width]: where they begin, then where they end */
    int64_t *labels;       /* [n] */
    int64_t *sizes;        /* [count] */
    int64_t name;          /* the caller's */
    int64_t iterations;    /* how many it took */
};

struct heart_kmeans {
    struct heart_clustering *items;
    int64_t count, width;
    const int64_t *order; /* which tokens to take, of every head, or NULL: the first n */
    int64_t bf16, threads;
};

/* What one clustering computes with. */
typedef struct {
    float *panels, *norms; /* the centroids packed, and ‖c‖² of each; padding is never nearest */
    float *sums;           /* [count][width] */
    int64_t moved;         /* the last iteration, from 1, in which a centroid moved further than the tolerance */
} workspace;

/* What one thread computes with: some tokens, their least distances, and where those are. */
typedef struct {
    float *rows, *values, *squares;
    int32_t *places;
} scratch;

static __attribute__((noinline)) void square_all(const float *x, int64_t n, float *out) {
    for (int64_t d = 0; d < n; d++) out[d] = x[d] * x[d];
}

/* The sum of n numbers in the order in which PyTorch adds up rows this short (eight lanes, four in turn): where two
 * centroids are all but equally near, the last bit of a norm decides. */
static float sum_in_order(const float *x, int64_t n) {
    int64_t lanes = n < 8 ? 1 : 8, vectors = n / lanes, whole = vectors / 4 * 4;
    float part[4][8] = {{0}}, total = 0;
    for (int64_t i = 0; i < vectors; i++)
        for (int64_t l = 0; l < lanes; l++) part[i < whole ? i % 4 : 0][l] += x[i * lanes + l];
    for (int k = 1; k < 4; k++)
        for (int64_t l = 0; l < lanes; l++) part[0][l] += part[k][l];
    for (int64_t d = vectors * lanes; d < n; d++) total += x[d];
    for (int64_t l = 0; l < lanes; l++) total += part[0][l];
    return total;
}

/* Centroids from .. to (whole panels), packed, with their norms. */
static void pack_centroids(const struct heart_clustering *one, int64_t width, workspace *at, scratch *own, int64_t from,
                           int64_t to) {
    tokens middles = {one->centroids, one->count, width, width, NULL, 0};
    for (int64_t j = from; j < to; j += COLS) pack_keys(&middles, j, 1, at->panels + j * width);
    for (int64_t j = from; j < to; j++) {
        if (j < one->count) square_all(one->centroids + j * width, width, own->squares);
        at->norms[j] = j < one->count ? sum_in_order(own->squares, width) : INFINITY;
    }
}

/* Labels of CHUNK_TOKENS tokens from `first` on. */
static void label_chunk(const struct heart_clustering *one, const tokens *x, const workspace *at, scratch *own,
                        int64_t first) {
    int64_t end = first + CHUNK_TOKENS < one->n ? first + CHUNK_TOKENS : one->n;
    for (int64_t start = first; start < end; start += TOKEN_ROWS) {
        int64_t part = end - start < TOKEN_ROWS ? end - start : TOKEN_ROWS;
        for (int64_t i = 0; i < part; i += ROWS) pack_queries(x, start + i, 1, own->rows + i * x->width);
        nearest(own->rows, at->panels, at->norms, one->count, x->width, part, own->values, own->places,
                one->labels + start);
    }
}

/* Sums and sizes of the clusters from .. to, their tokens added up in order as PyTorch does. */
static void add_clusters(const struct heart_clustering *one, const tokens *x, float *all, int64_t from, int64_t to) {
    int64_t width = x->width;
    memset(all + from * width, 0, (size_t)((to - from) * width) * 4);
    memset(one->sizes + from, 0, (size_t)(to - from) * 8);
    for (int64_t t = 0; t < one->n; t++) {
        int64_t label = one->labels[t], at, d = 0;
        if (label < from || label >= to) continue;
        float *sums = all + label * width;
        one->sizes[label]++;
        at = token_at(x, t);
        for (; d + VL <= width; d += VL) store(sums + d, load(sums + d) + read_vec(x, x->bf16, at, d));
        for (; d < width; d++) sums[d] += read_one(x, x->bf16, at, d);
    }
}

/* A centroid becomes the mean of its cluster (an empty cluster keeps it); how far it moves. */
static float move_centroid(float *centroid, const float *sums, int64_t size, int64_t width) {
    float way = 0;
    if (!size) return 0;
    for (int64_t d = 0; d < width; d++) {
        float mean = sums[d] / (float)size, step = mean - centroid[d];
        way += step * step;
        centroid[d] = mean;
    }
    return sqrtf(way);
}

/* The centroids from .. to (whole panels) of one iteration, packed for the next. */
static void move_clusters(const struct heart_clustering *one, const tokens *x, workspace *at, scratch *own,
                          int64_t iteration, int64_t from, int64_t to) {
    int64_t last = to < one->count ? to : one->count, width = x->width;
    int moves = 0;
    add_clusters(one, x, at->sums, from, last);
    for (int64_t c = from; c < last; c++) { /* what is not a number has not come to rest */
        float way = move_centroid(one->centroids + c * width, at->sums + c * width, one->sizes[c], width);
        moves |= !(way < TOLERANCE);
    }
    pack_centroids(one, width, at, own, from, to);
    if (moves) {
#pragma omp atomic write
        at->moved = iteration;
    }
}

/* Whether the clustering takes another iteration after `done` ones; also while that one is under way. */
INLINE int goes_on(const struct heart_clustering *one, const workspace *at, int64_t done) {
    int64_t moved;
#pragma omp atomic read
    moved = at->moved;
    return done < one->iters && moved >= done;
}

static tokens tokens_of(const struct heart_kmeans *a, const struct heart_clustering *one) {
    /* With an order, a token's place in it says where it lies; padding after the last one is zero. */
    return (tokens){one->x, one->n, a->width, one->stride, a->order, (int)a->bf16};
}

/* One head from beginning to end by one thread. */
static void cluster_alone(const struct heart_kmeans *a, struct heart_clustering *one, workspace *at, scratch *own) {
    tokens x = tokens_of(a, one);
    int64_t cols = round_up(one->count, COLS);
    at->moved = 0;
    pack_centroids(one, a->width, at, own, 0, cols);
    for (int64_t done = 0; goes_on(one, at, done); done++) {
        for (int64_t first = 0; first < one->n; first += CHUNK_TOKENS) label_chunk(one, &x, at, own, first);
        move_clusters(one, &x, at, own, done + 1, 0, cols);
        one->iterations = done + 1;
    }
}

static int any_goes_on(const struct heart_kmeans *a, const workspace *spaces, int64_t done) {
    for (int64_t i = 0; i < a->count; i++)
        if (goes_on(a->items + i, spaces + i, done)) return 1;
    return 0;
}

static int64_t most_chunks(const struct heart_kmeans *a) {
    int64_t most = 0;
    for (int64_t i = 0; i < a->count; i++) most = a->items[i].n > most ? a->items[i].n : most;
    return round_up(most, CHUNK_TOKENS) / CHUNK_TOKENS;
}

/* All heads in step, every thread a part of each: they meet twice an iteration. */
static void cluster_together(const struct heart_kmeans *a, workspace *spaces, scratch *own) {
    int64_t chunks = most_chunks(a), parts = a->threads;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->count; i++) {
        spaces[i].moved = 0;
        pack_centroids(a->items + i, a->width, spaces + i, own, 0, round_up(a->items[i].count, COLS));
    }
    for (int64_t done = 0; any_goes_on(a, spaces, done); done++) {
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t i = 0; i < a->count; i++)
            for (int64_t chunk = 0; chunk < chunks; chunk++) {
                tokens x = tokens_of(a, a->items + i);
                if (goes_on(a->items + i, spaces + i, done) && chunk * CHUNK_TOKENS < x.count)
                    label_chunk(a->items + i, &x, spaces + i, own, chunk * CHUNK_TOKENS);
            }
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t i = 0; i < a->count; i++)
            for (int64_t part = 0; part < parts; part++) {
                tokens x = tokens_of(a, a->items + i);
                int64_t panels = round_up(a->items[i].count, COLS) / COLS;
                int64_t from = panels * part / parts * COLS, to = panels * (part + 1) / parts * COLS;
                if (from < to && goes_on(a->items + i, spaces + i, done))
                    move_clusters(a->items + i, &x, spaces + i, own, done + 1, from, to);
            }
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->count; i++)
        for (a->items[i].iterations = 0; goes_on(a->items + i, spaces + i, a->items[i].iterations);)
            a->items[i].iterations++;
}

static int new_workspaces(const struct heart_kmeans *a, workspace *spaces, int64_t n) {
    int64_t most = 0, missing = 0;
    for (int64_t i = 0; i < a->count; i++) most = a->items[i].count > most ? a->items[i].count : most;
    most = round_up(most, COLS);
    for (int64_t i = 0; i < n; i++) {
        spaces[i] = (workspace){allocate(most * a->width), allocate(most), allocate(most * a->width), 0};
        missing |= !spaces[i].panels || !spaces[i].norms || !spaces[i].sums;
    }
    return missing != 0;
}

static void free_workspaces(workspace *spaces, int64_t n) {
    for (int64_t i = 0; i < n; i++) free(spaces[i].panels), free(spaces[i].norms), free(spaces[i].sums);
    free(spaces);
}

/* Clusters some heads in one parallel region, whatever the number of iterations. With enough heads each is one thread's
 * own, so that nobody waits for anybody before the end. The result does not depend on the number of threads. Returns 0,
 * or 1 without memory. */
int heart_kmeans(const struct heart_kmeans *a) {
    int64_t width = a->width, alone = a->count >= 2 * a->threads || a->threads == 1, next = 0;
    int64_t n = alone ? a->threads : a->count;
    workspace *spaces = malloc((size_t)n * sizeof *spaces);
    int failed = !spaces || new_workspaces(a, spaces, n);
    if (!failed) {
#pragma omp parallel num_threads((int)a->threads)
        {
            scratch own = {allocate(TOKEN_ROWS * width), allocate(TOKEN_ROWS * VL), allocate(width),
                           (int32_t *)allocate(TOKEN_ROWS * VL)};
            int64_t mine;
#pragma omp atomic capture
            mine = next++;
            if (!own.rows || !own.values || !own.squares || !own.places) {
#pragma omp atomic write
                failed = 1;
            }
#pragma omp barrier
            if (!failed && alone) {
#pragma omp for schedule(dynamic)
                for (int64_t i = 0; i < a->count; i++) cluster_alone(a, a->items + i, spaces + mine, &own);
            } else if (!failed) {
                cluster_together(a, spaces, &own);
            }
            free(own.rows), free(own.values), free(own.squares), free(own.places);
        }
    }
    if (spaces) free_workspaces(spaces, n);
    return failed;
}
