/* What a generator computes between the products of linear layers.

       attend     one layer's attention of every sample being decoded, for all groups at once (cache.py, fused.py)
       rms_norm   root-mean-square norms, row by row (invariant.py)
       gate       silu(gate) * up of a gated layer, number by number (invariant.py)

   A query's result is computed from its own numbers, in an order that its own lengths decide: keys are scored by fused
   multiply-adds over the dimensions and a fixed tree of sums, weights are added up by place, values in the order of
   their keys. Queries are taken in pairs only so that keys and values are read once for both, and threads share
   (group, head) pairs, a norm's rows, a gate's vectors. So bits depend neither on who else is there nor on the
   number of threads, by construction.

   For x86-64 with AVX2 and FMA; compiled by setup (pyproject.toml) where there is a compiler, else torch's operations
   do the same. OpenMP is torch's: its symbols are found in the process. */

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { VECTOR = 8, KEY_TILE = 64, MAX_QUERIES = 32, WORTH_THREADS = 1 << 14 };

/* What fused.py was written for; to be raised with every change of what follows, or of a bit of the results. */
const int64_t onbeat_kernels_version = 2;

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

/* Kept by each thread for the next call. */
static float *workspace(size_t count) {
    static _Thread_local float *memory = NULL;
    static _Thread_local size_t size = 0;
    if (size < count) {
        free(memory);
        size = 2 * count;
        memory = malloc(size * sizeof(float));
        if (!memory) abort();
    }
    return memory;
}

static inline __m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

/* Scores of `pair` queries (1 or 2, known when compiled) with `count` keys; up to 3 more floats are written. */
static inline __attribute__((always_inline)) void score(const int pair, const float *q, const float *keys,
                                                        int64_t count, int64_t dim, float *out, int64_t out_stride) {
    for (int64_t j = 0; j < count; j += 4) {
        const float *key[4];
        for (int i = 0; i < 4; i++) key[i] = keys + (j + i < count ? j + i : count - 1) * dim;
        __m256 sum[2][4];
        for (int p = 0; p < pair; p++)
            for (int i = 0; i < 4; i++) sum[p][i] = _mm256_setzero_ps();
        for (int64_t d = 0; d < dim; d += VECTOR)
            for (int i = 0; i < 4; i++) {
                __m256 k = _mm256_loadu_ps(key[i] + d);
                for (int p = 0; p < pair; p++)
                    sum[p][i] = _mm256_fmadd_ps(_mm256_loadu_ps(q + p * dim + d), k, sum[p][i]);
            }
        for (int p = 0; p < pair; p++)
            _mm_storeu_ps(out + p * out_stride + j, sums_of(sum[p][0], sum[p][1], sum[p][2], sum[p][3]));
    }
}

/* Add `count` weighted values to what `pair` queries have, `width` vectors of them. */
static inline __attribute__((always_inline)) void gather(const int pair, const int width, const float *weights,
                                                         int64_t weight_stride, const float *values, int64_t count,
                                                         int64_t dim, float *out) {
    __m256 sum[2][4];
    for (int p = 0; p < pair; p++)
        for (int i = 0; i < width; i++) sum[p][i] = _mm256_loadu_ps(out + p * dim + i * VECTOR);
    for (int64_t j = 0; j < count; j++) {
        __m256 weight[2];
        for (int p = 0; p < pair; p++) weight[p] = _mm256_broadcast_ss(weights + p * weight_stride + j);
        for (int i = 0; i < width; i++) {
            __m256 value = _mm256_loadu_ps(values + j * dim + i * VECTOR);
            for (int p = 0; p < pair; p++) sum[p][i] = _mm256_fmadd_ps(weight[p], value, sum[p][i]);
        }
    }
    for (int p = 0; p < pair; p++)
        for (int i = 0; i < width; i++) _mm256_storeu_ps(out + p * dim + i * VECTOR, sum[p][i]);
}

static inline __attribute__((always_inline)) void gather_all(const int pair, const float *weights,
                                                             int64_t weight_stride, const float *values,
                                                             int64_t count, int64_t dim, float *out) {
    int64_t d = 0;
    for (; d + 4 * VECTOR <= dim; d += 4 * VECTOR)
        gather(pair, 4, weights, weight_stride, values + d, count, dim, out + d);
    for (; d < dim; d += VECTOR) gather(pair, 1, weights, weight_stride, values + d, count, dim, out + d);
}

/* e^x for x <= 0: 2^n e^r, r by its series. Not a number stays that. */
static inline __m256 exponential(__m256 x) {
    const __m256 least = _mm256_set1_ps(-87.0f);
    __m256 kept = _mm256_max_ps(least, x);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(kept, _mm256_set1_ps(1.44269504089f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), kept);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 e = _mm256_set1_ps(1.0f / 5040);
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 720));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 120));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 24));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f / 6));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(0.5f));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f));
    e = _mm256_fmadd_ps(e, r, _mm256_set1_ps(1.0f));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    e = _mm256_mul_ps(e, _mm256_castsi256_ps(power));
    return _mm256_andnot_ps(_mm256_cmp_ps(x, least, _CMP_LT_OQ), e);
}

/* By place, then in pairs. */
static inline float sum_of(__m256 numbers) {
    float each[VECTOR];
    _mm256_storeu_ps(each, numbers);
    return ((each[0] + each[4]) + (each[1] + each[5])) + ((each[2] + each[6]) + (each[3] + each[7]));
}

/* Scores become weights that are not yet divided by their sum, which is returned. */
static float weigh(float *scores, int64_t count) {
    int64_t padded = (count + VECTOR - 1) / VECTOR * VECTOR;
    for (int64_t j = count; j < padded; j++) scores[j] = -__builtin_inff();
    __m256 most = _mm256_loadu_ps(scores);
    for (int64_t j = VECTOR; j < padded; j += VECTOR) most = _mm256_max_ps(most, _mm256_loadu_ps(scores + j));
    float each[VECTOR], largest;
    _mm256_storeu_ps(each, most);
    largest = each[0];
    for (int i = 1; i < VECTOR; i++) largest = each[i] > largest ? each[i] : largest;
    __m256 total = _mm256_setzero_ps();
    for (int64_t j = 0; j < padded; j += VECTOR) {
        __m256 weight = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + j), _mm256_set1_ps(largest)));
        _mm256_storeu_ps(scores + j, weight);
        total = _mm256_add_ps(total, weight);
    }
    return sum_of(total);
}

typedef struct {
    int64_t layer, heads, per_head, dim, window; /* per_head: queries that share a head of keys; window: 0 for none */
    float scale;
    Rows q, k, v;
    float *out; /* [tokens, heads * per_head, dim] */
} Call;

/* `count` samples of a group from `sample` on, one head of keys. */
static void attend_block(const Call *call, const Group *group, int64_t head, int64_t sample, int64_t count) {
    const int64_t dim = call->dim, per_head = call->per_head, at = group->length, window = call->window;
    const int64_t own_first = window && at - window + 1 > 0 ? at - window + 1 : 0, own = at + 1 - own_first;
    int64_t seen = group->prompt_length;
    if (window && window - 1 - at < seen) seen = window - 1 - at > 0 ? window - 1 - at : 0;
    const int64_t prompt_size = group->prompt_length * dim, row_size = group->capacity * dim;
    const float *prompt_k = group->prompt + (call->layer * 2 * call->heads + head) * prompt_size +
                            (group->prompt_length - seen) * dim;
    const float *prompt_v = prompt_k + call->heads * prompt_size;
    const float *own_k = group->own[call->layer] + (head * group->rows + sample) * row_size + own_first * dim;
    const float *own_v = own_k + call->heads * group->rows * row_size;

    const int64_t num = count * per_head, even = (num + 1) / 2 * 2;
    const int64_t stride = (seen + own + 3) / VECTOR * VECTOR + VECTOR; /* up to 3 more are written */
    float *q = workspace((size_t)(even * (2 * dim + stride)));
    float *out = q + even * dim, *scores = out + even * dim;
    for (int64_t n = 0; n < even; n++) {
        const int64_t of = n < num ? n : num - 1; /* an odd one is its own partner */
        const float *from = call->q.at + (head * per_head + of % per_head) * call->q.head +
                            (group->first + sample + of / per_head) * call->q.token;
        for (int64_t d = 0; d < dim; d++) q[n * dim + d] = from[d] * call->scale;
    }
    memset(out, 0, (size_t)(even * dim) * sizeof(float));

    for (int64_t j = 0; j < seen; j += KEY_TILE)
        for (int64_t n = 0; n < even; n += 2)
            score(2, q + n * dim, prompt_k + j * dim, seen - j < KEY_TILE ? seen - j : KEY_TILE, dim,
                  scores + n * stride + j, stride);
    for (int64_t n = 0; n < num; n++) {
        score(1, q + n * dim, own_k + n / per_head * row_size, own, dim, scores + n * stride + seen, stride);
        q[n * dim] = weigh(scores + n * stride, seen + own); /* the query is done with */
    }
    for (int64_t j = 0; j < seen; j += KEY_TILE)
        for (int64_t n = 0; n < even; n += 2)
            gather_all(2, scores + n * stride + j, stride, prompt_v + j * dim,
                       seen - j < KEY_TILE ? seen - j : KEY_TILE, dim, out + n * dim);
    for (int64_t n = 0; n < num; n++) {
        gather_all(1, scores + n * stride + seen, stride, own_v + n / per_head * row_size, own, dim, out + n * dim);
        float *to = call->out + ((group->first + sample + n / per_head) * call->heads * per_head + head * per_head +
                                 n % per_head) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = out[n * dim + d] / q[n * dim];
    }
}

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
    const int64_t most = call->per_head < MAX_QUERIES ? MAX_QUERIES / call->per_head : 1;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t g = 0; g < num_groups; g++)
        for (int64_t head = 0; head < call->heads; head++) {
            const Group *group = groups + g;
            append(call, group, head);
            for (int64_t sample = 0; sample < group->num_samples; sample += most) {
                int64_t left = group->num_samples - sample;
                attend_block(call, group, head, sample, left < most ? left : most);
            }
        }
}

/* out = weight * x / sqrt(mean of x squared + epsilon), for rows of `dim` numbers, a multiple of VECTOR. */
void onbeat_rms_norm(const float *x, const float *weight, float *out, int64_t rows, int64_t dim, float epsilon) {
#pragma omp parallel for schedule(static) if (rows * dim >= WORTH_THREADS)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * dim;
        float *to = out + row * dim;
        __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int64_t d = 0; d < dim; d += VECTOR) {
            __m256 some = _mm256_loadu_ps(from + d), *mine = &sum[d / VECTOR % 2];
            *mine = _mm256_fmadd_ps(some, some, *mine);
        }
        const float mean = sum_of(_mm256_add_ps(sum[0], sum[1])) / (float)dim;
        const __m256 scale = _mm256_set1_ps(1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(mean + epsilon))));
        for (int64_t d = 0; d < dim; d += VECTOR)
            _mm256_storeu_ps(to + d, _mm256_mul_ps(_mm256_loadu_ps(weight + d),
                                                   _mm256_mul_ps(_mm256_loadu_ps(from + d), scale)));
    }
}

/* out = silu(gate) * up, `count` numbers, a multiple of VECTOR. The exponential is of what is not above zero, on either
   side of it. */
void onbeat_gate(const float *gates, const float *ups, float *out, int64_t count) {
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
#pragma omp parallel for schedule(static) if (count >= WORTH_THREADS)
    for (int64_t n = 0; n < count; n += VECTOR) {
        __m256 gate = _mm256_loadu_ps(gates + n), e = exponential(_mm256_or_ps(gate, sign));
        __m256 above = _mm256_blendv_ps(one, e, gate); /* by the sign */
        __m256 silu = _mm256_div_ps(_mm256_mul_ps(gate, above), _mm256_add_ps(one, e));
        _mm256_storeu_ps(out + n, _mm256_mul_ps(silu, _mm256_loadu_ps(ups + n)));
    }
}
