/* What is computed between the products of linear layers: by a generator, and SiLUs by a trainer too.

       attend         one layer's attention of every sample being decoded, for all groups at once (cache.py, fused.py)
       attend_chunk   one layer's attention of a chunk of a prompt (the same files)
       rms_norm       root-mean-square norms, row by row (invariant.py)
       gate           silu(gate) * up of a gated layer, number by number (invariant.py)
       silu           a trainer's, and its gradient, number by number (training/activations.py)

   A query's result is computed from its own numbers, in an order that its own lengths decide: the score of a prompt's
   token with a key is a chain of fused multiply-adds over the dimensions, that of a sample's is one for each of
   PLACES and a fixed tree of sums; weights are added up by place; a result is a chain over its keys in their order.
   Queries are taken in blocks only so that keys and values are read once for all of them, and threads share (group,
   head) pairs, blocks of a chunk, a norm's rows, vectors of a gate or SiLU. So bits depend neither on who else is there nor on
   the number of threads, by construction. Nor do they depend on how many numbers are computed at once: each has the
   same chains.

   For x86-64 with AVX2 and FMA, and with AVX-512 where the processor has it; compiled by setup (pyproject.toml) where
   there is a compiler, else torch's operations do the same. OpenMP is torch's: its symbols are found in the process.

   What is between the two halves of this file is written once, below, over vectors of WIDTH numbers; this file includes
   itself to have it for each. */

#ifndef WIDTH

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__clang__) || __GNUC__ >= 7
#define HAVE_AVX512 1
#else
#define HAVE_AVX512 0
#endif

/* PLACES: of sums. KEY_TILE keys, or values, of 64 numbers take half of a small first cache; a chunk's block has no
   more than MAX_SCORES, for them to stay in the second. Keys and values so far AHEAD are fetched, by LINEs of
   numbers. Threads share WORTH_THREADS numbers and more, by PIECEs. */
enum { PLACES = 16, KEY_TILE = 64, MAX_QUERIES = 32, MAX_SCORES = 1 << 16, LINE = 16 };
enum { KEYS_AHEAD = 12, VALUES_AHEAD = 24, WORTH_THREADS = 1 << 14, PIECE = 1 << 10 };

/* What fused.py was written for; to be raised with every change of what follows, or of a bit of the results. */
const int64_t onbeat_kernels_version = 4;

/* No more numbers than these are computed at once. Tests lower it, to try both forms. */
int64_t onbeat_widest = 16;

/* As fused.py fills it in: one per group. */
typedef struct {
    const float *prompt; /* [layers, 2, heads, prompt_length, dim] */
    float *const *own;   /* of every layer: [2, heads, rows, capacity, dim] */
    int64_t prompt_length, rows, capacity;
    int64_t length;      /* own tokens that are there already */
    int64_t num_samples; /* that get one more */
    int64_t first;       /* token of the step, of the first of them */
} Group;

/* [heads, tokens, dim], by strides; the last is 1. */
typedef struct {
    const float *at;
    int64_t head, token;
} Rows;

typedef struct {
    int64_t layer, heads, per_head, dim, window; /* per_head: queries that share a head of keys; window: 0 for none */
    float scale;
    Rows q, k, v;
    float *out; /* [tokens, heads * per_head, dim] */
} Call;

/* Kept by each thread for the next call. */
static float *workspace(size_t count) {
    static _Thread_local float *memory = NULL;
    static _Thread_local size_t size = 0;
    if (size < count) {
        free(memory);
        size = 2 * count;
        memory = aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64);
        if (!memory) abort();
    }
    return memory;
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t rounded_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

/* The row `n` of `count`, or what is read after them, from `then` on. It need not exist: it is only fetched. */
static inline const float *row_ahead(const float *rows, int64_t row, int64_t n, int64_t count, const float *then) {
    return n < count ? rows + n * row : then + smaller(n - count, count - 1) * row;
}

/* Into the processor's cache, whose own guesses come late: keys and values are read once per step, in pieces. */
static inline __attribute__((always_inline)) void fetch(const float *at, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += LINE) _mm_prefetch((const char *)(at + i), _MM_HINT_T0);
}

/* PLACES numbers: halves, then in pairs. */
static inline float sum_of(const float *each) {
    float sum[8];
    for (int i = 0; i < 8; i++) sum[i] = each[i] + each[i + 8];
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

#define WIDTH 8
#include "kernels.c"
#undef WIDTH
#if HAVE_AVX512
#define WIDTH 16
#include "kernels.c"
#undef WIDTH
#endif

/* Whether `count` numbers, a multiple of 8, are computed 16 at once. */
static int wide(int64_t count) {
#if HAVE_AVX512
    return onbeat_widest >= 16 && count % 16 == 0 && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    (void)count;
    return 0;
#endif
}

#if HAVE_AVX512
#define FORM_FOR(count, function) (wide(count) ? function##_16 : function##_8)
#else
#define FORM_FOR(count, function) (function##_8)
#endif

/* The new keys and values of a group's samples take their place, one head of them. */
static void append(const Call *call, const Group *group, int64_t head) {
    const size_t size = (size_t)call->dim * sizeof(float);
    const int64_t row_size = group->capacity * call->dim;
    float *keys = group->own[call->layer] + head * group->rows * row_size + group->length * call->dim;
    float *values = keys + call->heads * group->rows * row_size;
    for (int64_t sample = 0; sample < group->num_samples; sample++) {
        const int64_t token = group->first + sample;
        memcpy(keys + sample * row_size, call->k.at + head * call->k.head + token * call->k.token, size);
        memcpy(values + sample * row_size, call->v.at + head * call->v.head + token * call->v.token, size);
    }
}

void onbeat_attend(const Group *groups, int64_t num_groups, const Call *call) {
    const int64_t most = larger(1, MAX_QUERIES / call->per_head);
    void (*block)(const Call *, const Group *, int64_t, int64_t, int64_t) = FORM_FOR(call->dim, attend_block);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t g = 0; g < num_groups; g++)
        for (int64_t head = 0; head < call->heads; head++) {
            const Group *group = groups + g;
            append(call, group, head);
            for (int64_t sample = 0; sample < group->num_samples; sample += most)
                block(call, group, head, sample, smaller(most, group->num_samples - sample));
        }
}

/* Tokens first … first + count - 1 of a prompt, whose keys and values are in `k` and `v` up to the last of them. */
void onbeat_attend_chunk(const Call *call, int64_t first, int64_t count) {
    const int64_t most = smaller(larger(MAX_SCORES / (first + count), MAX_QUERIES / 4), 3 * MAX_QUERIES);
    const int64_t tokens = larger(1, most / call->per_head), blocks = (count + tokens - 1) / tokens;
    void (*block)(const Call *, int64_t, int64_t, int64_t, int64_t) = FORM_FOR(call->dim, chunk_block);
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t b = 0; b < blocks; b++) /* the longest first, for threads to end together */
        for (int64_t head = 0; head < call->heads; head++) {
            const int64_t from = (blocks - 1 - b) * tokens;
            block(call, head, first, from, smaller(tokens, count - from));
        }
}

/* out = weight * x / sqrt(mean of x squared + epsilon), for rows of `dim` numbers, a multiple of 8. */
void onbeat_rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t dim, float epsilon) {
    void (*norm)(const float *, const float *, float *, int64_t, float) = FORM_FOR(dim, norm);
#pragma omp parallel for schedule(static) if (rows * dim >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) norm(x + row * dim, weight, out + row * dim, dim, epsilon);
}

/* out = silu(gate) * up, `count` numbers, a multiple of 8. */
void onbeat_gate(const float *gates, const float *ups, float *out, int64_t count) {
    void (*let_through)(const float *, const float *, float *, int64_t) = FORM_FOR(count, let_through);
#pragma omp parallel for schedule(static) if (count >= WORTH_THREADS)
    for (int64_t n = 0; n < count; n += PIECE) let_through(gates + n, ups + n, out + n, smaller(PIECE, count - n));
}

/* out = silu(x), `count` numbers, any. */
void onbeat_silu(const float *x, float *out, int64_t count) {
    void (*silu)(const float *, float *, int64_t) = FORM_FOR(PIECE, silu);
#pragma omp parallel for schedule(static) if (count >= WORTH_THREADS)
    for (int64_t n = 0; n < count; n += PIECE) silu(x + n, out + n, smaller(PIECE, count - n));
}

/* out = grad * silu'(x). */
void onbeat_silu_backward(const float *x, const float *grad, float *out, int64_t count) {
    void (*silu_backward)(const float *, const float *, float *, int64_t) = FORM_FOR(PIECE, silu_backward);
#pragma omp parallel for schedule(static) if (count >= WORTH_THREADS)
    for (int64_t n = 0; n < count; n += PIECE) silu_backward(x + n, grad + n, out + n, smaller(PIECE, count - n));
}

#else /* for each WIDTH */

#if WIDTH == 16

#define NAME(function) function##_16
#define FORM __attribute__((target("avx2,fma,avx512f,avx512dq,avx512vl")))
#define INLINE static inline FORM __attribute__((always_inline))
#define VECTOR __m512
#define ROWS 6
#define VECTORS 4 /* ROWS by VECTORS sums, and what they are made of, are in registers */
#define DOT_KEYS 8

INLINE __m512 load_16(const float *at) { return _mm512_loadu_ps(at); }
INLINE void store_16(float *at, __m512 a) { _mm512_storeu_ps(at, a); }
INLINE __m512 all_16(float a) { return _mm512_set1_ps(a); }
INLINE __m512 plus_16(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
INLINE __m512 minus_16(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }
INLINE __m512 times_16(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
INLINE __m512 over_16(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }
INLINE __m512 times_plus_16(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE __m512 most_16(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
INLINE __m512 nearest_16(__m512 a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE __m512 two_to_16(__m512 n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
INLINE __m512 zero_where_less_16(__m512 a, __m512 x, __m512 than) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, than, _CMP_NLT_UQ), a);
}
INLINE __m512 by_sign_16(__m512 of, __m512 above, __m512 below) {
    return _mm512_mask_mov_ps(above, _mm512_movepi32_mask(_mm512_castps_si512(of)), below);
}
INLINE __m512 negative_16(__m512 a) { return _mm512_or_ps(a, _mm512_set1_ps(-0.0f)); }
INLINE __m512 low_16(__m512 a, __m512 b) { return _mm512_unpacklo_ps(a, b); }
INLINE __m512 high_16(__m512 a, __m512 b) { return _mm512_unpackhi_ps(a, b); }
INLINE __m512 lows_16(__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0x44); }
INLINE __m512 highs_16(__m512 a, __m512 b) { return _mm512_shuffle_ps(a, b, 0xee); }
/* Of DOT_KEYS vectors: halves, then in pairs within fours, then these. */
INLINE void sums_16(__m512 (*of)[1], float *out) {
    __m512 two[4];
    for (int i = 0; i < 4; i++) {
        __m512 a = of[i][0], b = of[i + 4][0];
        two[i] = plus_16(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    __m512 ab = plus_16(low_16(two[0], two[1]), high_16(two[0], two[1]));
    __m512 ce = plus_16(low_16(two[2], two[3]), high_16(two[2], two[3]));
    __m512 all = plus_16(lows_16(ab, ce), highs_16(ab, ce));
    all = _mm512_shuffle_f32x4(all, all, 0xd8);
    _mm256_storeu_ps(out, _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1)));
}
/* Four numbers of each fourth row. */
INLINE __m512 fours_16(const float *const *rows, int64_t d) {
    __m512 a = _mm512_castps128_ps512(_mm_loadu_ps(rows[0] + d));
    a = _mm512_mask_broadcast_f32x4(a, 0x00f0, _mm_loadu_ps(rows[4] + d));
    a = _mm512_mask_broadcast_f32x4(a, 0x0f00, _mm_loadu_ps(rows[8] + d));
    return _mm512_mask_broadcast_f32x4(a, 0xf000, _mm_loadu_ps(rows[12] + d));
}

#else

#define NAME(function) function##_8
#define FORM
#define INLINE static inline __attribute__((always_inline))
#define VECTOR __m256
#define ROWS 3
#define VECTORS 4
#define DOT_KEYS 4

INLINE __m256 load_8(const float *at) { return _mm256_loadu_ps(at); }
INLINE void store_8(float *at, __m256 a) { _mm256_storeu_ps(at, a); }
INLINE __m256 all_8(float a) { return _mm256_set1_ps(a); }
INLINE __m256 plus_8(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
INLINE __m256 minus_8(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }
INLINE __m256 times_8(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
INLINE __m256 over_8(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }
INLINE __m256 times_plus_8(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
INLINE __m256 most_8(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
INLINE __m256 nearest_8(__m256 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE __m256 two_to_8(__m256 n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
INLINE __m256 zero_where_less_8(__m256 a, __m256 x, __m256 than) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, than, _CMP_LT_OQ), a);
}
INLINE __m256 by_sign_8(__m256 of, __m256 above, __m256 below) { return _mm256_blendv_ps(above, below, of); }
INLINE __m256 negative_8(__m256 a) { return _mm256_or_ps(a, _mm256_set1_ps(-0.0f)); }
INLINE __m256 low_8(__m256 a, __m256 b) { return _mm256_unpacklo_ps(a, b); }
INLINE __m256 high_8(__m256 a, __m256 b) { return _mm256_unpackhi_ps(a, b); }
INLINE __m256 lows_8(__m256 a, __m256 b) { return _mm256_shuffle_ps(a, b, 0x44); }
INLINE __m256 highs_8(__m256 a, __m256 b) { return _mm256_shuffle_ps(a, b, 0xee); }
INLINE void sums_8(__m256 (*of)[2], float *out) {
    __m256 two[4];
    for (int i = 0; i < 4; i++) two[i] = plus_8(of[i][0], of[i][1]);
    __m256 ab = plus_8(low_8(two[0], two[1]), high_8(two[0], two[1]));
    __m256 ce = plus_8(low_8(two[2], two[3]), high_8(two[2], two[3]));
    __m256 all = plus_8(lows_8(ab, ce), highs_8(ab, ce));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}
INLINE __m256 fours_8(const float *const *rows, int64_t d) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[0] + d)), _mm_loadu_ps(rows[4] + d), 1);
}

#endif

/* [count, dim] becomes [dim, KEY_TILE]; columns up to a multiple of WIDTH are written, with the last key's numbers. */
static FORM void NAME(transpose)(const float *keys, int64_t count, int64_t dim, float *out) {
    for (int64_t j = 0; j < count; j += WIDTH) {
        const float *row[WIDTH];
        for (int i = 0; i < WIDTH; i++) row[i] = keys + smaller(j + i, count - 1) * dim;
        for (int64_t d = 0; d < dim; d += 4) {
            VECTOR a = NAME(fours)(row, d), b = NAME(fours)(row + 1, d);
            VECTOR c = NAME(fours)(row + 2, d), e = NAME(fours)(row + 3, d);
            VECTOR ab = NAME(low)(a, b), ce = NAME(low)(c, e), after_ab = NAME(high)(a, b), after_ce = NAME(high)(c, e);
            float *to = out + d * KEY_TILE + j;
            NAME(store)(to, NAME(lows)(ab, ce));
            NAME(store)(to + KEY_TILE, NAME(highs)(ab, ce));
            NAME(store)(to + 2 * KEY_TILE, NAME(lows)(after_ab, after_ce));
            NAME(store)(to + 3 * KEY_TILE, NAME(highs)(after_ab, after_ce));
        }
    }
}

/* A matrix of `rows` by `vectors` (known when compiled): each of its numbers is a chain over `count`. Rows of `b` are
   fetched ahead if it is known what comes after them. */
INLINE void NAME(chains)(const int rows, const int vectors, const int onto, const float *a, int64_t a_row,
                         const float *b, int64_t b_row, int64_t count, const float *then, float *out, int64_t out_row) {
    VECTOR sum[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++)
            sum[r][i] = onto ? NAME(load)(out + r * out_row + i * WIDTH) : NAME(all)(0.0f);
    for (int64_t n = 0; n < count; n++) {
        VECTOR right[VECTORS];
        if (then) fetch(row_ahead(b, b_row, n + VALUES_AHEAD, count, then), vectors * WIDTH);
        for (int i = 0; i < vectors; i++) right[i] = NAME(load)(b + n * b_row + i * WIDTH);
        for (int r = 0; r < rows; r++) {
            VECTOR left = NAME(all)(a[r * a_row + n]);
            for (int i = 0; i < vectors; i++) sum[r][i] = NAME(times_plus)(left, right[i], sum[r][i]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < vectors; i++) NAME(store)(out + r * out_row + i * WIDTH, sum[r][i]);
}

/* out = a b, or out += a b: [rows, count] by [count, columns], each number a chain over `count` in its order. Columns
   up to a multiple of WIDTH are computed. */
INLINE void NAME(product)(const int onto, int64_t rows, const float *a, int64_t a_row, const float *b, int64_t b_row,
                          int64_t count, const float *then, int64_t columns, float *out, int64_t out_row) {
#define SOME(of, vectors) \
    for (; r + of <= rows; r += of) \
        NAME(chains)(of, vectors, onto, a + r * a_row, a_row, b + c, b_row, count, then ? then + c : NULL, \
                     out + r * out_row + c, out_row)
#define ALL_ROWS(vectors) \
    do { \
        int64_t r = 0; \
        SOME(ROWS, vectors); \
        SOME(3, vectors); \
        SOME(2, vectors); \
        SOME(1, vectors); \
    } while (0)
    int64_t c = 0;
    for (; c + (VECTORS - 1) * WIDTH < columns; c += VECTORS * WIDTH) ALL_ROWS(VECTORS);
    for (; c < columns; c += WIDTH) ALL_ROWS(1);
#undef ALL_ROWS
#undef SOME
}

/* Scores of many queries with up to KEY_TILE keys; up to PLACES - 1 more are written. */
static FORM __attribute__((noinline)) void NAME(score_all)(int64_t rows, const float *q, const float *keys,
                                                           int64_t count, int64_t dim, float *transposed, float *out,
                                                           int64_t out_row) {
    NAME(transpose)(keys, count, dim, transposed);
    NAME(product)(0, rows, q, dim, transposed, KEY_TILE, dim, NULL, count, out, out_row);
}

/* Add `count` weighted values to what queries have; `then` is what will be read after them. */
static FORM __attribute__((noinline)) void NAME(gather)(int64_t rows, const float *weights, int64_t weight_row,
                                                        const float *values, int64_t count, const float *then,
                                                        int64_t dim, float *out) {
    NAME(product)(1, rows, weights, weight_row, values, dim, count, then, dim, out, dim);
}

/* Scores of up to 3 queries (known when compiled) with DOT_KEYS keys. */
INLINE void NAME(dots)(const int rows, const float *q, const float *const *key, int64_t dim, float *out,
                       int64_t out_row) {
    VECTOR sums[3][DOT_KEYS][PLACES / WIDTH];
    for (int part = 0; part < PLACES / WIDTH; part++) {
        VECTOR sum[3][DOT_KEYS];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < DOT_KEYS; i++) sum[r][i] = NAME(all)(0.0f);
        for (int64_t d = part * WIDTH; d < dim; d += PLACES) {
            VECTOR query[3];
            for (int r = 0; r < rows; r++) query[r] = NAME(load)(q + r * dim + d);
            for (int i = 0; i < DOT_KEYS; i++) {
                VECTOR k = NAME(load)(key[i] + d);
                for (int r = 0; r < rows; r++) sum[r][i] = NAME(times_plus)(query[r], k, sum[r][i]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < DOT_KEYS; i++) sums[r][i][part] = sum[r][i];
    }
    for (int r = 0; r < rows; r++) NAME(sums)(sums[r], out + r * out_row);
}

/* Scores of few queries with any keys, without turning these around; up to PLACES - 1 more are written. */
static FORM __attribute__((noinline)) void NAME(score)(int64_t rows, const float *q, const float *keys, int64_t count,
                                                       const float *then, int64_t dim, float *out, int64_t out_row) {
    for (int64_t j = 0; j < count; j += DOT_KEYS) {
        const float *key[DOT_KEYS];
        for (int i = 0; i < DOT_KEYS; i++) key[i] = keys + smaller(j + i, count - 1) * dim;
        for (int i = 0; i < DOT_KEYS; i++) fetch(row_ahead(keys, dim, j + KEYS_AHEAD + i, count, then), dim);
        int64_t r = 0;
        for (; r + 3 <= rows; r += 3) NAME(dots)(3, q + r * dim, key, dim, out + r * out_row + j, out_row);
        for (; r + 2 <= rows; r += 2) NAME(dots)(2, q + r * dim, key, dim, out + r * out_row + j, out_row);
        for (; r < rows; r++) NAME(dots)(1, q + r * dim, key, dim, out + r * out_row + j, out_row);
    }
}

/* e^x for x <= 0: 2^n e^r, r by its series. Not a number stays that. */
INLINE VECTOR NAME(exponential)(VECTOR x) {
    const VECTOR least = NAME(all)(-87.0f);
    VECTOR kept = NAME(most)(least, x);
    VECTOR n = NAME(nearest)(NAME(times)(kept, NAME(all)(1.44269504089f)));
    VECTOR r = NAME(times_plus)(n, NAME(all)(-0.693359375f), kept);
    r = NAME(times_plus)(n, NAME(all)(2.12194440e-4f), r);
    VECTOR e = NAME(all)(1.0f / 5040);
    e = NAME(times_plus)(e, r, NAME(all)(1.0f / 720));
    e = NAME(times_plus)(e, r, NAME(all)(1.0f / 120));
    e = NAME(times_plus)(e, r, NAME(all)(1.0f / 24));
    e = NAME(times_plus)(e, r, NAME(all)(1.0f / 6));
    e = NAME(times_plus)(e, r, NAME(all)(0.5f));
    e = NAME(times_plus)(e, r, NAME(all)(1.0f));
    e = NAME(times_plus)(e, r, NAME(all)(1.0f));
    return NAME(zero_where_less)(NAME(times)(e, NAME(two_to)(n)), x, least);
}

/* Scores become weights that are not yet divided by their sum, which is returned. Up to a multiple of PLACES further
   scores are lost. */
static FORM float NAME(weigh)(float *scores, int64_t count) {
    const int64_t padded = rounded_up(count, PLACES);
    for (int64_t j = count; j < padded; j++) scores[j] = -__builtin_inff();
    VECTOR most = NAME(load)(scores);
    for (int64_t j = WIDTH; j < padded; j += WIDTH) most = NAME(most)(most, NAME(load)(scores + j));
    float each[PLACES], largest;
    NAME(store)(each, most);
    largest = each[0];
    for (int i = 1; i < WIDTH; i++) largest = each[i] > largest ? each[i] : largest;
    VECTOR total[PLACES / WIDTH];
    for (int i = 0; i < PLACES / WIDTH; i++) total[i] = NAME(all)(0.0f);
    for (int64_t j = 0; j < padded; j += PLACES)
        for (int i = 0; i < PLACES / WIDTH; i++) {
            float *at = scores + j + i * WIDTH;
            VECTOR weight = NAME(exponential)(NAME(minus)(NAME(load)(at), NAME(all)(largest)));
            NAME(store)(at, weight);
            total[i] = NAME(plus)(total[i], weight);
        }
    for (int i = 0; i < PLACES / WIDTH; i++) NAME(store)(each + i * WIDTH, total[i]);
    return sum_of(each);
}

/* `count` samples of a group from `sample` on, one head of keys. */
static FORM void NAME(attend_block)(const Call *call, const Group *group, int64_t head, int64_t sample, int64_t count) {
    const int64_t dim = call->dim, per_head = call->per_head, at = group->length, window = call->window;
    const int64_t own_first = window ? larger(0, at - window + 1) : 0, own = at + 1 - own_first;
    const int64_t seen = window ? smaller(group->prompt_length, larger(0, window - 1 - at)) : group->prompt_length;
    const int64_t prompt_size = group->prompt_length * dim, row_size = group->capacity * dim;
    const float *prompt_k = group->prompt + (call->layer * 2 * call->heads + head) * prompt_size +
                            (group->prompt_length - seen) * dim;
    const float *prompt_v = prompt_k + call->heads * prompt_size;
    const float *own_k = group->own[call->layer] + (head * group->rows + sample) * row_size + own_first * dim;
    const float *own_v = own_k + call->heads * group->rows * row_size;

    const int64_t num = count * per_head, stride = rounded_up(seen + own, PLACES) + PLACES;
    float *q = workspace((size_t)(num * (2 * dim + stride)));
    float *out = q + num * dim, *scores = out + num * dim;
    for (int64_t n = 0; n < num; n++) {
        const float *from = call->q.at + (head * per_head + n % per_head) * call->q.head +
                            (group->first + sample + n / per_head) * call->q.token;
        for (int64_t d = 0; d < dim; d++) q[n * dim + d] = from[d] * call->scale;
    }
    memset(out, 0, (size_t)(num * dim) * sizeof(float));

    /* What is read after a part: the next of the prompt, then sample by sample. */
    for (int64_t j = 0; j < seen; j += KEY_TILE) {
        const int64_t some = smaller(KEY_TILE, seen - j);
        const float *at_j = prompt_k + j * dim, *then = j + some < seen ? at_j + some * dim : own_k;
        NAME(score)(num, q, at_j, some, then, dim, scores + j, stride);
    }
    for (int64_t n = 0; n < num; n += per_head) {
        const float *mine = own_k + n / per_head * row_size;
        const float *then = n + per_head < num ? mine + row_size : seen ? prompt_v : own_v;
        NAME(score)(per_head, q + n * dim, mine, own, then, dim, scores + n * stride + seen, stride);
    }
    for (int64_t n = 0; n < num; n++) q[n * dim] = NAME(weigh)(scores + n * stride, seen + own); /* q is done with */
    for (int64_t j = 0; j < seen; j += KEY_TILE) {
        const int64_t some = smaller(KEY_TILE, seen - j);
        const float *at_j = prompt_v + j * dim, *then = j + some < seen ? at_j + some * dim : own_v;
        NAME(gather)(num, scores + j, stride, at_j, some, then, dim, out);
    }
    for (int64_t n = 0; n < num; n += per_head) {
        const float *mine = own_v + n / per_head * row_size, *then = n + per_head < num ? mine + row_size : mine;
        NAME(gather)(per_head, scores + n * stride + seen, stride, mine, own, then, dim, out + n * dim);
    }
    for (int64_t n = 0; n < num; n++) {
        float *to = call->out + ((group->first + sample + n / per_head) * call->heads * per_head + head * per_head +
                                 n % per_head) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = out[n * dim + d] / q[n * dim];
    }
}

/* `count` tokens of a prompt's chunk that begins at `first`, from its token `from` on, one head of keys. */
static FORM void NAME(chunk_block)(const Call *call, int64_t head, int64_t first, int64_t from, int64_t count) {
    const int64_t dim = call->dim, per_head = call->per_head, window = call->window ? call->window : INT64_MAX;
    const int64_t at = first + from, begin = larger(0, at + 1 - window), end = at + count;
    const float *keys = call->k.at + head * call->k.head, *values = call->v.at + head * call->v.head;

    const int64_t num = count * per_head, stride = rounded_up(end - begin, PLACES) + PLACES;
    float *transposed = workspace((size_t)(num * (2 * dim + stride) + dim * KEY_TILE));
    float *q = transposed + dim * KEY_TILE, *out = q + num * dim, *scores = out + num * dim;
    for (int64_t n = 0; n < num; n++) {
        const float *query = call->q.at + (head * per_head + n % per_head) * call->q.head +
                             (from + n / per_head) * call->q.token;
        for (int64_t d = 0; d < dim; d++) q[n * dim + d] = query[d] * call->scale;
    }
    memset(out, 0, (size_t)(num * dim) * sizeof(float));

    for (int64_t j = begin; j < end; j += KEY_TILE) {
        const int64_t before = larger(0, j - at) * per_head; /* queries that see none of these */
        NAME(score_all)(num - before, q + before * dim, keys + j * dim, smaller(KEY_TILE, end - j), dim, transposed,
                    scores + before * stride + j - begin, stride);
    }
    for (int64_t n = 0; n < num; n++) {
        const int64_t last = at + n / per_head, sees = larger(0, last + 1 - window);
        q[n * dim] = NAME(weigh)(scores + n * stride + sees - begin, last + 1 - sees); /* q is done with */
    }
    /* What all queries of some rows see they take together; what is before it and after it, each by itself. */
    for (int64_t j = begin; j < end; j += KEY_TILE)
        for (int64_t n = 0; n < num; n += ROWS) {
            const int64_t rows = smaller(ROWS, num - n), tile_end = smaller(j + KEY_TILE, end);
            const int64_t all_from = larger(j, at + (n + rows - 1) / per_head + 1 - window);
            const int64_t all_to = smaller(tile_end, at + n / per_head + 1);
            for (int64_t r = n; r < n + rows; r++) {
                const int64_t sees = larger(j, at + r / per_head + 1 - window);
                const int64_t to = all_from < all_to ? all_from : smaller(tile_end, at + r / per_head + 1);
                if (sees < to)
                    NAME(gather)(1, scores + r * stride + sees - begin, stride, values + sees * dim, to - sees,
                                 values + to * dim, dim, out + r * dim);
            }
            if (all_from >= all_to) continue;
            NAME(gather)(rows, scores + n * stride + all_from - begin, stride, values + all_from * dim,
                         all_to - all_from, values + all_to * dim, dim, out + n * dim);
            for (int64_t r = n; r < n + rows; r++) {
                const int64_t to = smaller(tile_end, at + r / per_head + 1);
                if (all_to < to)
                    NAME(gather)(1, scores + r * stride + all_to - begin, stride, values + all_to * dim, to - all_to,
                                 values + to * dim, dim, out + r * dim);
            }
        }
    for (int64_t n = 0; n < num; n++) {
        float *to = call->out + ((from + n / per_head) * call->heads * per_head + head * per_head + n % per_head) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = out[n * dim + d] / q[n * dim];
    }
}

static FORM void NAME(norm)(const float *x, const float *weight, float *out, int64_t dim, float epsilon) {
    VECTOR sum[PLACES / WIDTH];
    float each[PLACES];
    for (int i = 0; i < PLACES / WIDTH; i++) sum[i] = NAME(all)(0.0f);
    for (int64_t d = 0; d < dim; d += WIDTH) {
        VECTOR some = NAME(load)(x + d), *mine = &sum[d / WIDTH % (PLACES / WIDTH)];
        *mine = NAME(times_plus)(some, some, *mine);
    }
    for (int i = 0; i < PLACES / WIDTH; i++) NAME(store)(each + i * WIDTH, sum[i]);
    const float mean = sum_of(each) / (float)dim;
    const VECTOR scale = NAME(all)(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + epsilon))));
    for (int64_t d = 0; d < dim; d += WIDTH)
        NAME(store)(out + d, NAME(times)(NAME(load)(weight + d), NAME(times)(NAME(load)(x + d), scale)));
}

/* x over 1 + e^-x. The exponential is of what is not above zero, on either side of it. */
INLINE VECTOR NAME(silu_of)(VECTOR x) {
    const VECTOR one = NAME(all)(1.0f);
    VECTOR e = NAME(exponential)(NAME(negative)(x));
    return NAME(over)(NAME(times)(x, NAME(by_sign)(x, one, e)), NAME(plus)(one, e));
}

/* Its derivative: s (1 + x (1 - s)), s being 1 over 1 + e^-x. */
INLINE VECTOR NAME(silu_slope)(VECTOR x) {
    const VECTOR one = NAME(all)(1.0f);
    VECTOR e = NAME(exponential)(NAME(negative)(x)), both = NAME(plus)(one, e);
    VECTOR s = NAME(over)(NAME(by_sign)(x, one, e), both), rest = NAME(over)(NAME(by_sign)(x, e, one), both);
    return NAME(times)(s, NAME(times_plus)(x, rest, one));
}

static FORM void NAME(let_through)(const float *gates, const float *ups, float *out, int64_t count) {
    for (int64_t n = 0; n < count; n += WIDTH)
        NAME(store)(out + n, NAME(times)(NAME(silu_of)(NAME(load)(gates + n)), NAME(load)(ups + n)));
}

/* The last numbers, if they do not fill a vector, are filled up. */
static FORM void NAME(silu)(const float *x, float *out, int64_t count) {
    int64_t n = 0;
    for (; n + WIDTH <= count; n += WIDTH) NAME(store)(out + n, NAME(silu_of)(NAME(load)(x + n)));
    if (n < count) {
        const size_t size = (size_t)(count - n) * sizeof(float);
        float some[WIDTH] = {0};
        memcpy(some, x + n, size);
        NAME(store)(some, NAME(silu_of)(NAME(load)(some)));
        memcpy(out + n, some, size);
    }
}

static FORM void NAME(silu_backward)(const float *x, const float *grad, float *out, int64_t count) {
    int64_t n = 0;
    for (; n + WIDTH <= count; n += WIDTH)
        NAME(store)(out + n, NAME(times)(NAME(load)(grad + n), NAME(silu_slope)(NAME(load)(x + n))));
    if (n < count) {
        const size_t size = (size_t)(count - n) * sizeof(float);
        float some_x[WIDTH] = {0}, some[WIDTH] = {0};
        memcpy(some_x, x + n, size);
        memcpy(some, grad + n, size);
        NAME(store)(some, NAME(times)(NAME(load)(some), NAME(silu_slope)(NAME(load)(some_x))));
        memcpy(out + n, some, size);
    }
}

#undef NAME
#undef FORM
#undef INLINE
#undef VECTOR
#undef ROWS
#undef VECTORS
#undef DOT_KEYS

#endif
