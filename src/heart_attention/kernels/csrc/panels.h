/* Panels for matrix products: ROWS rows or COLS columns side by side, all of one k next to each other; and the tokens of a
 * head that are packed into them. */
#ifndef HEART_PANELS_H
#define HEART_PANELS_H

#include <stdlib.h>

#include "simd.h"

#define ROWS 6
#define COLS (2 * VL)

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

#endif
