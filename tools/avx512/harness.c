/* Runs two builds of the C kernels on the same random inputs and compares what they compute: `fast_` with the vectors
 * under test (AVX-512), `plain_` without AVX, which is the text that the tests of the package hold against PyTorch.
 * run.sh builds it and boots it in an emulator, because few machines have AVX-512.
 *
 * As process 1 of a Linux guest it prints to the serial port and switches the machine off; elsewhere it is a common
 * program. All arrays end where an unmapped page begins: reading or writing one number too far is a fault, and loads
 * are unaligned as they may be in use. Arrays that are written are compared whole, with the gaps between their rows. */
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <unistd.h>

#include "structs.h" /* struct tensor, heart_attention and so on: run.sh cuts them out of the kernels */

#ifndef FLOATS
#define FLOATS 16 /* what heart_vector_floats() of the fast build must say */
#endif
#define TOLERANCE 2e-6 /* absolute up to 1, relative above */
#define PAGE 4096
#define DIMS 10

static const int64_t dims[DIMS] = {1, 8, 13, 16, 24, 32, 64, 72, 128, 160};

/* ---- the two builds ------------------------------------------------------------------------------------ */

struct build {
    int (*floats)(void);
    int64_t (*attention_bytes)(const struct heart_attention *);
    int (*attention)(const struct heart_attention *, float *);
    int (*backward)(const struct heart_backward *);
    int (*scores)(const struct heart_scores *);
    int (*kmeans)(const struct heart_kmeans *);
    int (*means)(const struct heart_means *);
};

#define DECLARE(p)                                                                                                     \
    int p##heart_vector_floats(void);                                                                                  \
    int64_t p##heart_attention_bytes(const struct heart_attention *);                                                  \
    int p##heart_attention(const struct heart_attention *, float *);                                                   \
    int p##heart_attention_backward(const struct heart_backward *);                                                    \
    int p##heart_block_scores(const struct heart_scores *);                                                            \
    int p##heart_kmeans(const struct heart_kmeans *);                                                                  \
    int p##heart_token_means(const struct heart_means *);
#define BUILD(p)                                                                                                       \
    {p##heart_vector_floats, p##heart_attention_bytes, p##heart_attention, p##heart_attention_backward,                \
     p##heart_block_scores, p##heart_kmeans, p##heart_token_means}

DECLARE(fast_)
DECLARE(plain_)
static const struct build builds[2] = {BUILD(fast_), BUILD(plain_)};

/* ---- random numbers and guarded memory ----------------------------------------------------------------- */

static uint64_t state = 1;

static uint64_t draw(void) { /* splitmix64 */
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u, z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}
static int64_t below(int64_t n) { return (int64_t)(draw() % (uint64_t)n); }
static float uniform(void) { return (float)((double)(draw() >> 40) / (1 << 23) - 1); } /* [-1, 1) */

static struct { void *at; size_t size; } regions[256];
static int region_count;

/* Zeroed bytes whose end is the end of the last mapped page. */
static void *guarded(int64_t bytes) {
    size_t size = ((size_t)bytes + PAGE - 1) / PAGE * PAGE + PAGE;
    char *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED || region_count == 256 || mprotect(at + size - PAGE, PAGE, PROT_NONE)) {
        puts("FAIL: no memory");
        exit(1);
    }
    regions[region_count].at = at, regions[region_count++].size = size;
    return at + size - PAGE - bytes;
}
static void free_all(void) {
    while (region_count) region_count--, munmap(regions[region_count].at, regions[region_count].size);
}
static void *copy_of(const void *from, int64_t bytes) { return memcpy(guarded(bytes), from, (size_t)bytes); }

/* n numbers, fp32 or bf16; whole numbers (exact sums, many ties) if `coarse`. */
static void *numbers(int64_t n, int bf16, int coarse) {
    char *to = guarded(n * (bf16 ? 2 : 4));
    for (int64_t i = 0; i < n; i++) {
        float x = coarse ? (float)(below(5) - 2) : uniform();
        if (bf16) memcpy(to + 2 * i, (char *)&x + 2, 2); /* cut, not rounded: any number will do */
        else memcpy(to + 4 * i, &x, 4);
    }
    return to;
}

/* ---- comparison ---------------------------------------------------------------------------------------- */

static struct { const char *name; int64_t cases, values, unequal, wrong; double largest, difference; } tally;
static int failures;
static char where[160]; /* the case that runs, for messages */

static void begin_case(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(where, sizeof where, format, list);
    va_end(list);
    tally.cases++;
}

static void compare(const char *what, int64_t at, double a, double b, double tolerance) {
    tally.values++;
    if (isfinite(b) && fabs(b) > tally.largest) tally.largest = fabs(b);
    if (a == b || (isnan(a) && isnan(b))) return;
    tally.unequal++;
    double difference = fabs(a - b);
    if (difference > tally.difference || isnan(difference)) tally.difference = difference;
    if (!(difference <= tolerance * (fabs(b) > 1 ? fabs(b) : 1)) && tally.wrong++ < 3)
        printf("  %s, %s: %s[%lld] is %.9g, not %.9g\n", tally.name, where, what, (long long)at, a, b);
}

static void compare_floats(const char *what, const float *a, const float *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) compare(what, i, a[i], b[i], TOLERANCE);
}

/* Outputs in bf16 may differ in the last bit where the sums lie on both sides of a border. */
static void compare_bf16(const char *what, const uint16_t *a, const uint16_t *b, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits[2] = {(uint32_t)a[i] << 16, (uint32_t)b[i] << 16};
        float x[2];
        memcpy(x, bits, 8);
        compare(what, i, x[0], x[1], TOLERANCE + fabs(x[1]) / 128);
    }
}

static void returned(int code) { compare("code returned", 0, code, 0, 0); }

static void begin_function(const char *name) { memset(&tally, 0, sizeof tally), tally.name = name; }

static void end_function(void) {
    int good = tally.values > 0 && tally.largest > 0 && !tally.wrong;
    failures += !good;
    printf("%-25s %4lld cases %8lld values up to %-9.4g %7lld unequal, by at most %-9.3g %s\n", tally.name,
           (long long)tally.cases, (long long)tally.values, tally.largest, (long long)tally.unequal, tally.difference,
           good ? "PASS" : "FAIL");
}

/* ---- masks --------------------------------------------------------------------------------------------- */

/* Boundaries of `blocks` stretches of [0, n): equal ones, or of any length and some of them empty. */
static void cut_blocks(int32_t *starts, int64_t n, int64_t blocks, int even) {
    for (int64_t i = 0; i <= blocks; i++) {
        int64_t at = even ? i * ((n + blocks - 1) / blocks) : i == blocks ? n : i ? below(n + 1) : 0;
        starts[i] = (int32_t)(at < n ? at : n);
    }
    for (int64_t i = 1; i <= blocks; i++) /* sorted */
        for (int64_t j = i; j > 1 && starts[j] < starts[j - 1]; j--) {
            int32_t t = starts[j];
            starts[j] = starts[j - 1], starts[j - 1] = t;
        }
}

static void shuffle(int32_t *perm, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        int64_t j = below(i + 1);
        perm[i] = perm[j], perm[j] = (int32_t)i;
    }
}

struct mask {
    int64_t *row_ptr;
    int32_t *cols, *q_starts, *k_starts;
};

/* Kept blocks of each head; a query row keeps at least one key unless `empty` says that some keep none. */
static struct mask random_mask(int64_t heads, int64_t n_q, int64_t n_k, int64_t q_blocks, int64_t k_blocks, int own,
                               int even, int empty) {
    int64_t sets = own ? heads : 1, kept = 0;
    struct mask m = {guarded(heads * (q_blocks + 1) * 8), NULL, guarded(sets * (q_blocks + 1) * 4),
                     guarded(sets * (k_blocks + 1) * 4)};
    int32_t *cols = malloc((size_t)(heads * q_blocks * k_blocks + 1) * sizeof *cols);
    for (int64_t i = 0; i < sets; i++) {
        cut_blocks(m.q_starts + i * (q_blocks + 1), n_q, q_blocks, even);
        cut_blocks(m.k_starts + i * (k_blocks + 1), n_k, k_blocks, even);
    }
    for (int64_t row = 0; row < heads * q_blocks; row++) {
        int64_t head = row / q_blocks, *ptr = m.row_ptr + head * (q_blocks + 1) + row % q_blocks;
        const int32_t *starts = m.k_starts + (own ? head * (k_blocks + 1) : 0);
        int64_t must = below(n_k), none = empty && below(3) == 0, often = below(4);
        ptr[0] = kept;
        for (int64_t j = 0; j < k_blocks; j++) {
            int needed = starts[j] <= must && must < starts[j + 1];
            if (starts[j] < starts[j + 1] && !none && (needed || below(4) <= often)) cols[kept++] = (int32_t)j;
        }
        ptr[1] = kept;
    }
    m.cols = copy_of(cols, kept * 4);
    free(cols);
    return m;
}

/* ---- attention ----------------------------------------------------------------------------------------- */

enum { BLOCKS, ORDER_AND_TAIL, CLUSTERS, PART, REST, FAR_APART, EXACT, NOT_FINITE, KINDS };
static const char *const kinds[] = {"equal blocks", "order and tail", "clusters", "part of a softmax", "the rest as means",
                                    "rows far apart, negative scale", "whole numbers, large scale", "inf and nan"};

/* [B, H, n, dim] as its own array, or as a view of [B, n, H, dim], with `gap` unused numbers after each row. */
static struct tensor view(void *data, int64_t heads, int64_t n, int64_t dim, int by_token, int64_t gap) {
    int64_t row = dim + gap;
    if (by_token) return (struct tensor){data, n * heads * row, row, heads * row};
    return (struct tensor){data, heads * n * row, n * row, row};
}

/* Every group that is not kept, but for the empty ones, is approximated. */
static void left_out(struct heart_attention *a, const struct mask *m, int64_t all) {
    int64_t *ptr = guarded(all * (a->q_blocks + 1) * 8), n = 0;
    int32_t *cols = guarded(all * a->q_blocks * a->k_blocks * 4);
    for (int64_t head = 0; head < all; head++) {
        const int32_t *starts = m->k_starts + head * (a->k_blocks + 1);
        for (int64_t row = 0; row < a->q_blocks; row++) {
            const int64_t *kept = m->row_ptr + head * (a->q_blocks + 1) + row;
            ptr[head * (a->q_blocks + 1) + row] = n;
            for (int32_t c = 0; c < a->k_blocks; c++) {
                int seen = starts[c] == starts[c + 1];
                for (int64_t i = kept[0]; i < kept[1]; i++) seen |= m->cols[i] == c;
                if (!seen) cols[n++] = c;
            }
        }
        ptr[head * (a->q_blocks + 1) + a->q_blocks] = n;
    }
    a->rest_ptr = ptr, a->rest_cols = cols;
}

static void attention_case(int64_t dim, int bf16, int kind, int64_t n_q, int64_t n_k, int threads) {
    if (kind == FAR_APART) n_q = 1 + n_q % 20, n_k = 1 + n_k % 20; /* such arrays are large */
    const int64_t batch = 2, heads = 2, all = batch * heads, gap = kind == FAR_APART ? 520 : below(2) * 3;
    int by_token = (int)below(2), own = kind == CLUSTERS || kind == PART || kind == REST, coarse = kind == EXACT;
    int64_t tail = kind == ORDER_AND_TAIL ? 1 + below(40) : 0, q_blocks = 1 + below(n_q < 9 ? n_q : 9),
            k_blocks = 1 + below(n_k < 9 ? n_k : 9);
    if (kind == ORDER_AND_TAIL) n_k = n_q;
    begin_case("%s, dim %lld, %s, %lld x %lld tokens + %lld, threads %d", kinds[kind], (long long)dim,
               bf16 ? "bf16" : "fp32", (long long)n_q, (long long)n_k, (long long)tail, threads);
    struct heart_attention a = {.batch = batch, .heads = heads, .dim = dim, .n_q = n_q, .n_k = n_k, .tail = tail,
                                .q_blocks = q_blocks, .k_blocks = k_blocks, .bf16 = bf16, .threads = threads,
                                .own_starts = own, .own_perm = own, .scale = 1 / sqrt((double)dim)};
    if (kind == FAR_APART) a.scale = -a.scale;
    if (kind == EXACT) a.scale = 30;
    struct mask m = random_mask(all, n_q, n_k, q_blocks, k_blocks, own, !own, kind == PART || kind == REST);
    a.row_ptr = m.row_ptr, a.cols = m.cols, a.q_starts = m.q_starts, a.k_starts = m.k_starts;
    if (kind == REST) left_out(&a, &m, all);
    if (own || kind == ORDER_AND_TAIL) {
        int64_t sets = own ? all : 1;
        int32_t *q_perm = guarded(sets * n_q * 4), *k_perm = guarded(sets * n_k * 4);
        for (int64_t i = 0; i < sets; i++) shuffle(q_perm + i * n_q, n_q), shuffle(k_perm + i * n_k, n_k);
        a.q_perm = q_perm, a.k_perm = own ? k_perm : q_perm;
    }
    /* The gap after the very last row is left out: views of real tensors end there. */
    int64_t q_size = all * (n_q + tail) * (dim + gap) - gap, k_size = all * (n_k + tail) * (dim + gap) - gap;
    void *q = numbers(q_size, bf16, coarse), *k = numbers(k_size, bf16, coarse), *v = numbers(k_size, bf16, coarse);
    if (kind == NOT_FINITE) /* one of each in a random place; in bf16 these are the high halves */
        for (int i = 0; i < 3; i++) {
            uint32_t bits[] = {0x7fc00000, 0x7f800000, 0xff800000};
            int64_t at = below(k_size);
            if (bf16) memcpy((char *)(i ? k : v) + 2 * at, (char *)&bits[i] + 2, 2);
            else memcpy((char *)(i ? k : v) + 4 * at, &bits[i], 4);
        }
    a.q = view(q, heads, n_q + tail, dim, by_token, gap);
    a.k = view(k, heads, n_k + tail, dim, by_token, gap), a.v = a.k, a.v.data = v;
    void *outs[2];
    float *lse[2] = {NULL, NULL}, *mass[2] = {NULL, NULL};
    for (int b = 0; b < 2; b++) {
        void *out = outs[b] = guarded(q_size * (bf16 ? 2 : 4));
        a.out = a.q, a.out.data = out;
        if (kind == PART || kind == REST) a.lse = lse[b] = guarded(all * n_q * 4);
        if (kind == REST) a.mass = mass[b] = guarded(all * n_q * 4);
        int64_t bytes = builds[b].attention_bytes(&a);
        returned(builds[b].attention(&a, guarded((bytes + 63) / 64 * 64)));
    }
    if (bf16) compare_bf16("out", outs[0], outs[1], q_size);
    else compare_floats("out", outs[0], outs[1], q_size);
    if (kind == PART || kind == REST) compare_floats("lse", lse[0], lse[1], all * n_q);
    if (kind == REST) compare_floats("mass", mass[0], mass[1], all * n_q);
    free_all();
}

static void test_attention(int bf16) {
    for (int kind = 0; kind < KINDS; kind++)
        for (int i = 0; i < DIMS; i++) {
            attention_case(dims[i], bf16, kind, 1 + below(60), 1 + below(200), 1);
            /* Now and then more rows than a task takes, and several tiles of keys. */
            attention_case(dims[i], bf16, kind, i == 4 ? 230 : 1 + below(40), i == 5 ? 300 : 1 + below(40), 1 + i % 2);
        }
    for (int64_t n = 1; n <= 34; n++) attention_case(20, bf16, BLOCKS, n, 35 - n, 1); /* every tail of both */
}
static void test_attention_fp32(void) { test_attention(0); }
static void test_attention_bf16(void) { test_attention(1); }

/* ---- backward ------------------------------------------------------------------------------------------ */

/* Rows of `dim` numbers, filled up with zeros to `wide`. */
static float *widened(const float *from, int64_t rows, int64_t dim, int64_t wide) {
    float *to = guarded(rows * wide * 4);
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * wide, from + i * dim, (size_t)dim * 4);
    return to;
}

/* Compares rows of two widths; what was filled up must still be zero. */
static void compare_rows(const char *what, float *const *made, const int64_t *wide, int64_t rows, int64_t dim) {
    for (int64_t i = 0; i < rows; i++) {
        compare_floats(what, made[0] + i * wide[0], made[1] + i * wide[1], dim);
        for (int b = 0; b < 2; b++)
            for (int64_t d = dim; d < wide[b]; d++) compare("padding", d, made[b][i * wide[b] + d], 0, 0);
    }
}

static void backward_case(int64_t dim, int64_t n_q, int64_t n_k, int64_t count, int threads) {
    const int64_t heads = 2;
    int64_t q_blocks = 1 + below(5), k_blocks = 1 + below(5), wide[2];
    begin_case("dim %lld, %lld x %lld tokens, %lld cotangents, threads %d", (long long)dim, (long long)n_q,
               (long long)n_k, (long long)count, threads);
    struct mask m = random_mask(heads, n_q, n_k, q_blocks, k_blocks, 1, 0, 0);
    float *q = numbers(heads * n_q * dim, 0, 0), *k = numbers(heads * n_k * dim, 0, 0);
    float *v = numbers(heads * n_k * dim, 0, 0), *g = numbers(heads * count * n_q * dim, 0, 0);
    float *inner = numbers(heads * count * n_q, 0, 0), *dq[2], *dk[2], *dv[2];
    for (int64_t i = 0; i < heads * count * n_q * dim; i++) g[i] /= sqrtf((float)dim);
    for (int b = 0; b < 2; b++) {
        int64_t lanes = 2 * builds[b].floats(), w = wide[b] = (dim + lanes - 1) / lanes * lanes;
        dq[b] = guarded(heads * count * n_q * w * 4);
        dk[b] = guarded(heads * count * n_k * w * 4), dv[b] = guarded(heads * count * n_k * w * 4);
        struct heart_backward a = {
            .heads = heads, .count = count, .dim = w, .n_q = n_q, .n_k = n_k, .q_blocks = q_blocks,
            .k_blocks = k_blocks, .q = widened(q, heads * n_q, dim, w), .k = widened(k, heads * n_k, dim, w),
            .v = widened(v, heads * n_k, dim, w), .g = widened(g, heads * count * n_q, dim, w), .inner = inner,
            .dq = dq[b], .dk = dk[b], .dv = dv[b], .row_ptr = m.row_ptr, .cols = m.cols, .q_starts = m.q_starts,
            .k_starts = m.k_starts, .scale = 1 / sqrt((double)dim), .threads = threads};
        returned(builds[b].backward(&a));
    }
    compare_rows("dq", dq, wide, heads * count * n_q, dim);
    compare_rows("dk", dk, wide, heads * count * n_k, dim);
    compare_rows("dv", dv, wide, heads * count * n_k, dim);
    free_all();
}

static void test_backward(void) {
    for (int i = 0; i < DIMS; i++) {
        backward_case(dims[i], 1 + below(70), 1 + below(170), 1 + below(3), 1);
        backward_case(dims[i], 1 + below(20), 1 + below(20), 1, 1 + i % 2);
    }
}

/* ---- prediction ---------------------------------------------------------------------------------------- */

static void scores_case(int64_t width, int bf16, int64_t s, int64_t per_block, int64_t n_q, int64_t n_k, int ordered,
                        int threads) {
    int64_t groups = (n_k + s - 1) / s, blocks = (groups + per_block - 1) / per_block, gap = below(2) * 5;
    int64_t visible = below(2) ? groups : blocks * per_block, rows = ((n_q + s - 1) / s + per_block - 1) / per_block;
    if (ordered) n_q = n_k, rows = blocks;
    begin_case("width %lld, %s, groups of %lld, %lld to a block, %lld x %lld tokens, threads %d", (long long)width,
               bf16 ? "bf16" : "fp32", (long long)s, (long long)per_block, (long long)n_q, (long long)n_k, threads);
    const void *q[2], *k[2];
    float *out[2][2];
    int64_t *order = ordered ? guarded(n_k * 8) : NULL, stride = width + gap;
    for (int64_t i = 0; ordered && i < n_k; i++) {
        int64_t j = below(i + 1);
        order[i] = order[j], order[j] = i;
    }
    for (int h = 0; h < 2; h++) {
        q[h] = numbers(n_q * stride - gap, bf16, 0), k[h] = numbers(n_k * stride - gap, bf16, 0);
        for (int b = 0; b < 2; b++) out[b][h] = guarded(rows * blocks * 4);
    }
    for (int b = 0; b < 2; b++)
        returned(builds[b].scores(&(struct heart_scores){
            .heads = 2, .q = q, .k = k, .out = out[b], .n_q = n_q, .n_k = n_k, .width = width, .q_stride = stride,
            .k_stride = stride, .order = order, .s = s, .per_block = per_block, .blocks = blocks, .visible = visible,
            .bf16 = bf16, .threads = threads}));
    for (int h = 0; h < 2; h++) compare_floats("score", out[0][h], out[1][h], rows * blocks);
    free_all();
}

static void test_scores(void) {
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int i = 0; i < DIMS; i++) {
            scores_case(dims[i], bf16, 1 + below(9), 1 + below(8), 1 + below(150), 1 + below(300), i % 3 == 0, 1);
            int64_t n_q = i == 3 ? 220 : 1 + below(40), n_k = i == 4 ? 560 : 1 + below(60); /* several chunks of both */
            scores_case(dims[i], bf16, 1 + i % 2, 1 + below(4), n_q, n_k, 0, 1 + i % 2);
        }
}

/* One iteration. Nearly equal distances may be told apart otherwise by sums that are rounded otherwise; exactly equal ones
 * may not, and then everything else is equal too. */
static void kmeans_case(int64_t width, int64_t n, int64_t count, int coarse, int threads) {
    int64_t stride = width + below(2) * 3, wrong = 0, *labels[2], *sizes[2];
    begin_case("width %lld, %lld tokens, %lld centroids, %s, threads %d", (long long)width, (long long)n,
               (long long)count, coarse ? "whole numbers" : "fp32", threads);
    float *x = numbers((n - 1) * stride + width, 0, coarse), *begin = numbers(count * width, 0, coarse), *ends[2];
    for (int b = 0; b < 2; b++) {
        labels[b] = guarded(n * 8), sizes[b] = guarded(count * 8), ends[b] = guarded(count * width * 4);
        memcpy(ends[b], begin, (size_t)(count * width) * 4);
        struct heart_clustering one = {.x = x, .n = n, .stride = stride, .count = count, .iters = 1,
                                       .centroids = ends[b], .labels = labels[b], .sizes = sizes[b]};
        returned(builds[b].kmeans(&(struct heart_kmeans){.items = &one, .count = 1, .width = width,
                                                         .threads = threads}));
        compare("iterations", b, (double)one.iterations, 1, 0);
    }
    for (int64_t i = 0; i < n; i++) {
        double distance[2] = {0, 0};
        if (labels[0][i] < 0 || labels[0][i] >= count) {
            wrong++;
            continue;
        }
        for (int b = 0; b < 2; b++)
            for (int64_t d = 0; d < width; d++) {
                double c = begin[labels[b][i] * width + d];
                distance[b] += c * c - 2.0 * x[i * stride + d] * c;
            }
        compare("distance", i, distance[0], distance[1], 4 * TOLERANCE);
        if (coarse) compare("label", i, (double)labels[0][i], (double)labels[1][i], 0);
    }
    compare("labels out of range", 0, (double)wrong, 0, 0);
    for (int64_t i = 0; coarse && i < count * width; i++) compare("centroid", i, ends[0][i], ends[1][i], 0);
    for (int64_t i = 0; coarse && i < count; i++) compare("size", i, (double)sizes[0][i], (double)sizes[1][i], 0);
    free_all();
}

static void test_kmeans(void) {
    for (int i = 0; i < DIMS; i++)
        for (int coarse = 0; coarse < 2; coarse++) {
            kmeans_case(dims[i], 1 + below(120), 1 + below(90), coarse, 1);
            kmeans_case(dims[i] + 3, 1 + below(400), 1 + below(20), coarse, 1 + i % 2);
        }
}

static void means_case(int64_t width, int bf16, int64_t n, int threads) {
    int64_t stride = width + below(2) * 3;
    float *out[2];
    begin_case("width %lld, %s, %lld tokens, threads %d", (long long)width, bf16 ? "bf16" : "fp32", (long long)n,
               threads);
    const void *x[3];
    for (int h = 0; h < 3; h++) x[h] = numbers((n - 1) * stride + width, bf16, 0);
    for (int b = 0; b < 2; b++) {
        out[b] = guarded(3 * width * 4);
        returned(builds[b].means(&(struct heart_means){.heads = 3, .x = x, .n = n, .width = width, .stride = stride,
                                                       .out = out[b], .bf16 = bf16, .threads = threads}));
    }
    for (int64_t i = 0; i < 3 * width; i++) compare("mean", i, out[0][i], out[1][i], 0);
    free_all();
}

static void test_means(void) {
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int i = 0; i < DIMS; i++) means_case(dims[i], bf16, i == 2 ? 600 : 1 + below(80), 1 + i % 2);
}

/* ---- all ----------------------------------------------------------------------------------------------- */

static void finish(void) { /* also after exit(1) */
    fflush(stdout);
    if (getpid() != 1) return;
    sync();
    sleep(1); /* the serial port has a queue */
    reboot(RB_POWER_OFF);
    for (;;) pause();
}

static void caught(int signal) {
    printf("FAIL: signal %d in %s, %s\nEND\n", signal, tally.name ? tally.name : "the start", where);
    exit(1);
}

static void run(const char *name, void (*test)(void)) {
    begin_function(name);
    test();
    end_function();
}

int main(void) {
    if (getpid() == 1) {
        mkdir("/dev", 0755);
        mount("devtmpfs", "/dev", "devtmpfs", 0, "");
        if (!freopen("/dev/ttyS0", "w", stdout)) return 1;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    atexit(finish);
    int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
    for (int i = 0; i < 5; i++) signal(signals[i], caught);
    printf("BEGIN\nfloats in a vector: %d (wanted %d), and %d\n", builds[0].floats(), FLOATS, builds[1].floats());
    failures += builds[0].floats() != FLOATS;
    run("heart_attention fp32", test_attention_fp32);
    run("heart_attention bf16", test_attention_bf16);
    run("heart_attention_backward", test_backward);
    run("heart_block_scores", test_scores);
    run("heart_kmeans", test_kmeans);
    run("heart_token_means", test_means);
    printf("%s\nEND\n", failures ? "FAIL" : "PASS");
    return failures != 0;
}
