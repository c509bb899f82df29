/* Which groups to keep: the best by score until they hold a share of all keys. One row after the other, no sorting:
 * the place where the share is reached is found by partitioning, as in quickselect. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct heart_share {
    const float *scores; /* [rows][cols] */
    int64_t rows, cols;
    const int64_t *sizes; /* [cols] */
    double need;          /* keys to be kept in every row */
    int64_t at_least;     /* groups to be kept in every row */
    uint8_t *out;         /* [rows][cols] */
};

/* Ascending keys are descending scores, ties by ascending index. */
static uint64_t key_of(float score, int64_t index) {
    uint32_t bits;
    float value = score == 0.0f ? 0.0f : score; /* one zero */
    memcpy(&bits, &value, 4);
    bits = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    return (uint64_t)bits << 32 | (uint32_t)index;
}

static void swap(uint64_t *a, uint64_t *b) {
    uint64_t t = *a;
    *a = *b;
    *b = t;
}

/* Keys below the pivot come first; returns how many. The pivot is the middle one of three. */
static int64_t partition(uint64_t *keys, int64_t n) {
    uint64_t a = keys[0], b = keys[n / 2], c = keys[n - 1];
    uint64_t pivot = a < b ? (b < c ? b : (a < c ? c : a)) : (a < c ? a : (b < c ? c : b));
    int64_t below = 0;
    for (int64_t i = 0; i < n; i++)
        if (keys[i] < pivot) swap(&keys[below++], &keys[i]);
    return below;
}

static void insertion_sort(uint64_t *keys, int64_t n) {
    for (int64_t i = 1; i < n; i++)
        for (int64_t j = i; j > 0 && keys[j] < keys[j - 1]; j--) swap(&keys[j], &keys[j - 1]);
}

/* How many of the keys stay; they are the first ones afterwards. */
static int64_t crossing(uint64_t *keys, int64_t n, const struct heart_share *a) {
    int64_t low = 0, high = n;
    double held = 0; /* keys in groups before `low` */
    while (high - low > 8) {
        int64_t below = partition(keys + low, high - low);
        if (below == 0) { /* the pivot is the smallest: it is decided alone */
            for (int64_t i = low + 1; i < high; i++)
                if (keys[i] < keys[low]) swap(&keys[i], &keys[low]);
            below = 1;
        }
        double sum = 0;
        for (int64_t i = low; i < low + below; i++) sum += (double)a->sizes[(uint32_t)keys[i]];
        if (held + sum >= a->need && low + below >= a->at_least) {
            if (below == 1 && (held < a->need || low < a->at_least)) return low + 1;
            if (below == 1) return low;
            high = low + below;
        } else {
            held += sum;
            low += below;
        }
    }
    insertion_sort(keys + low, high - low);
    while (low < high && (held < a->need || low < a->at_least)) held += (double)a->sizes[(uint32_t)keys[low++]];
    return low;
}

/* Returns 0, or 1 without memory. */
int heart_keep_share(const struct heart_share *a) {
    uint64_t *keys = malloc((size_t)a->cols * 8);
    if (!keys) return 1;
    for (int64_t r = 0; r < a->rows; r++) {
        const float *scores = a->scores + r * a->cols;
        uint8_t *out = a->out + r * a->cols;
        int broken = 0;
        for (int64_t i = 0; i < a->cols; i++) {
            broken |= scores[i] != scores[i];
            keys[i] = key_of(scores[i], i);
        }
        memset(out, broken, (size_t)a->cols);
        if (broken) continue; /* nothing can be said of a row with NaN: it is kept whole */
        int64_t kept = crossing(keys, a->cols, a);
        for (int64_t i = 0; i < kept; i++) out[(uint32_t)keys[i]] = 1;
    }
    free(keys);
    return 0;
}
