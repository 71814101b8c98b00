/* AVX-512F: the scalar file's order in 16 lanes. One register is one set of canonical lanes. */
#ifndef PAGEDKV_KERNELS_AVX512_H
#define PAGEDKV_KERNELS_AVX512_H

#include <immintrin.h>

#include "kernels_avx2.h"
#include "kernels_scalar.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,fma,avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,fma,avx2")
#endif

static inline __mmask16 pkv_tail_mask_avx512(int64_t n) { return (__mmask16)((1u << n) - 1); } /* n in [0, 16) */

/* Which of 16 elements are there, where n are left. */
static inline __mmask16 pkv_live_avx512(int64_t n) {
    return n >= 16 ? (__mmask16)0xFFFF : n <= 0 ? (__mmask16)0 : pkv_tail_mask_avx512(n);
}

/* The fixed tree: 8 apart, 4, 2, 1. */
static inline float pkv_tree_sum_avx512(__m512 lanes_f32x16) {
    __m256 high_f32x8 = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(lanes_f32x16), 1));
    __m256 sum_f32x8 = _mm256_add_ps(_mm512_castps512_ps256(lanes_f32x16), high_f32x8);
    __m128 sum_f32x4 = _mm_add_ps(_mm256_castps256_ps128(sum_f32x8), _mm256_extractf128_ps(sum_f32x8, 1));
    sum_f32x4 = _mm_add_ps(sum_f32x4, _mm_movehl_ps(sum_f32x4, sum_f32x4));
    sum_f32x4 = _mm_add_ss(sum_f32x4, _mm_movehdup_ps(sum_f32x4));
    return _mm_cvtss_f32(sum_f32x4);
}

static inline float pkv_dot_f32_avx512(const float *a, const float *b, int64_t n) {
    __m512 lanes_f32x16 = _mm512_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        lanes_f32x16 = _mm512_fmadd_ps(_mm512_loadu_ps(a + i), _mm512_loadu_ps(b + i), lanes_f32x16);
    if (i < n) {
        __mmask16 tail = pkv_tail_mask_avx512(n - i);
        lanes_f32x16 = _mm512_mask3_fmadd_ps(_mm512_maskz_loadu_ps(tail, a + i), _mm512_maskz_loadu_ps(tail, b + i),
                                             lanes_f32x16, tail);
    }
    return pkv_tree_sum_avx512(lanes_f32x16);
}

static inline __m512 pkv_exp_avx512(__m512 x_f32x16) {
    __m512 x = _mm512_max_ps(_mm512_set1_ps(PKV_EXP_LO), x_f32x16); /* second operand: a NaN stays */
    x = _mm512_min_ps(_mm512_set1_ps(PKV_EXP_HI), x);
    __m512 round = _mm512_set1_ps(PKV_EXP_ROUND);
    __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(PKV_EXP_LOG2E), round), round);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-PKV_EXP_LN2_HI), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-PKV_EXP_LN2_LO), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(PKV_EXP_P5), r, _mm512_set1_ps(PKV_EXP_P4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(PKV_EXP_P3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(PKV_EXP_P2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(PKV_EXP_P1));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(PKV_EXP_P0));
    __m512 y = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n); /* rounds once, as the scalar file's two factors do */
}

static void pkv_exp_row_f32_avx512(const float *x, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, pkv_exp_avx512(_mm512_loadu_ps(x + i)));
    if (i < n) {
        __mmask16 tail = pkv_tail_mask_avx512(n - i);
        _mm512_mask_storeu_ps(y + i, tail, pkv_exp_avx512(_mm512_maskz_loadu_ps(tail, x + i)));
    }
}

static void pkv_softmax_chunk_f32_avx512(float *s, int64_t n, float *max, float *sum) {
    const __m512 low = _mm512_set1_ps(-INFINITY);
    __m512 max_f32x16 = low;
    int64_t i = 0, whole = n & ~(int64_t)15;
    __mmask16 tail = pkv_tail_mask_avx512(n - whole);
    for (i = 0; i < whole; i += 16)
        max_f32x16 = _mm512_max_ps(_mm512_loadu_ps(s + i), max_f32x16);
    if (tail)
        max_f32x16 = _mm512_max_ps(_mm512_mask_loadu_ps(low, tail, s + i), max_f32x16);
    /* A maximum has no rounding: any tree gives it. Lanes never hold a NaN (second operand wins). */
    *max = _mm512_reduce_max_ps(max_f32x16);
    __m512 top = _mm512_set1_ps(*max), lanes_f32x16 = _mm512_setzero_ps();
    for (i = 0; i < whole; i += 16) {
        __m512 e = pkv_exp_avx512(_mm512_sub_ps(_mm512_loadu_ps(s + i), top));
        _mm512_storeu_ps(s + i, e);
        lanes_f32x16 = _mm512_add_ps(lanes_f32x16, e);
    }
    if (tail) {
        __m512 e = pkv_exp_avx512(_mm512_sub_ps(_mm512_maskz_loadu_ps(tail, s + i), top));
        _mm512_mask_storeu_ps(s + i, tail, e);
        lanes_f32x16 = _mm512_mask_add_ps(lanes_f32x16, tail, lanes_f32x16, e);
    }
    *sum = pkv_tree_sum_avx512(lanes_f32x16);
}

static void pkv_attn_finish_f32_avx512(const float *acc, float sum, float *out, int64_t head_dim) {
    __m512 sum_f32x16 = _mm512_set1_ps(sum);
    int64_t d = 0;
    for (; d + 16 <= head_dim; d += 16)
        _mm512_storeu_ps(out + d, _mm512_div_ps(_mm512_loadu_ps(acc + d), sum_f32x16));
    if (d < head_dim) {
        __mmask16 tail = pkv_tail_mask_avx512(head_dim - d);
        _mm512_mask_storeu_ps(out + d, tail, _mm512_div_ps(_mm512_maskz_loadu_ps(tail, acc + d), sum_f32x16));
    }
}

static void pkv_softmax_f32_avx512(const float *x, float *y, int64_t n) {
    float max, sum;
    if (y != x)
        memcpy(y, x, (size_t)n * sizeof *y);
    pkv_softmax_chunk_f32_avx512(y, n, &max, &sum);
    pkv_attn_finish_f32_avx512(y, sum, y, n);
}

static void pkv_rmsnorm_f32_avx512(const float *x, const float *gamma, float eps, float *y, int64_t n) {
    float inverse = 1.0f / sqrtf(pkv_dot_f32_avx512(x, x, n) / (float)n + eps);
    __m512 inverse_f32x16 = _mm512_set1_ps(inverse);
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse_f32x16),
                                              _mm512_loadu_ps(gamma + i)));
    if (i < n) {
        __mmask16 tail = pkv_tail_mask_avx512(n - i);
        __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(tail, x + i), inverse_f32x16);
        _mm512_mask_storeu_ps(y + i, tail, _mm512_mul_ps(scaled, _mm512_maskz_loadu_ps(tail, gamma + i)));
    }
}

static void pkv_rope_f32_avx512(float *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        __mmask16 live = pkv_live_avx512(half - i);
        __m512 a = _mm512_maskz_loadu_ps(live, head + i), b = _mm512_maskz_loadu_ps(live, head + i + half);
        __m512 c = _mm512_maskz_loadu_ps(live, cos + i), s = _mm512_maskz_loadu_ps(live, sin + i);
        _mm512_mask_storeu_ps(head + i, live, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)));
        _mm512_mask_storeu_ps(head + i + half, live, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)));
    }
}

static inline __m512 pkv_swiglu_avx512(__m512 gate, __m512 up) {
    __m512 minus = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(gate), _mm512_set1_epi32(INT32_MIN)));
    __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), pkv_exp_avx512(minus));
    return _mm512_mul_ps(_mm512_div_ps(gate, below), up);
}

static void pkv_swiglu_f32_avx512(const float *gate, const float *up, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, pkv_swiglu_avx512(_mm512_loadu_ps(gate + i), _mm512_loadu_ps(up + i)));
    if (i < n) {
        __mmask16 tail = pkv_tail_mask_avx512(n - i);
        _mm512_mask_storeu_ps(y + i, tail,
                              pkv_swiglu_avx512(_mm512_maskz_loadu_ps(tail, gate + i),
                                                _mm512_maskz_loadu_ps(tail, up + i)));
    }
}

static void pkv_add_f32_avx512(float *y, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_add_ps(_mm512_loadu_ps(y + i), _mm512_loadu_ps(x + i)));
    if (i < n) {
        __mmask16 tail = pkv_tail_mask_avx512(n - i);
        _mm512_mask_storeu_ps(
            y + i, tail, _mm512_add_ps(_mm512_maskz_loadu_ps(tail, y + i), _mm512_maskz_loadu_ps(tail, x + i)));
    }
}

/* R rows of one panel: R * 2 accumulators stay in registers over all of k. 11 rows fill 22 of the 32
 * registers: past the 8 chains that hide the FMA's latency, and with row pointers that still fit the general
 * registers (a 12th row costs 4%, measured). Meanwhile two lines are asked for at each k, `ahead` moving by `step`
 * bytes. */
#define PKV_MAX_ROWS_AVX512 11

/* Bytes that a matmul with nothing else to ask for asks ahead of its own place in the stream: past the page that
 * the hardware prefetcher stops at. */
#define PKV_OWN_AHEAD_AVX512 4096

/* Rows multiplied straight from codes: 16 accumulators, and the registers for scales, minima and tables. */
#define PKV_CODED_ROWS_avx512 8

/* Bytes that a lone tile of codes asks for ahead. */
#define PKV_CODED_AHEAD_AVX512 4096

#define PKV_MATMUL_ROWS(R)                                                                                     \
    static void pkv_matmul_##R##rows_avx512(const float *x, int64_t ldx, const float *panel, int64_t n_k,      \
                                            const uint8_t *ahead, int64_t step, float *y, int64_t ldy,         \
                                            __mmask16 live_0, __mmask16 live_1, int accumulate) {              \
        __m512 acc[R][2];                                                                                      \
        _Pragma("GCC unroll 11") for (int m = 0; m < R; m++) {                                                 \
            acc[m][0] = accumulate ? _mm512_maskz_loadu_ps(live_0, y + m * ldy) : _mm512_setzero_ps();         \
            acc[m][1] = accumulate ? _mm512_maskz_loadu_ps(live_1, y + m * ldy + 16) : _mm512_setzero_ps();    \
        }                                                                                                      \
        for (int64_t k = 0; k < n_k; k++) {                                                                    \
            __m512 w_0 = _mm512_load_ps(panel + k * PKV_PANEL), w_1 = _mm512_load_ps(panel + k * PKV_PANEL + 16);\
            _mm_prefetch((const char *)(ahead + k * step), _MM_HINT_T1);                                       \
            _mm_prefetch((const char *)(ahead + k * step + 64), _MM_HINT_T1);                                  \
            _Pragma("GCC unroll 11") for (int m = 0; m < R; m++) {                                             \
                __m512 x_k = _mm512_set1_ps(x[m * ldx + k]);                                                   \
                acc[m][0] = _mm512_fmadd_ps(x_k, w_0, acc[m][0]);                                              \
                acc[m][1] = _mm512_fmadd_ps(x_k, w_1, acc[m][1]);                                              \
            }                                                                                                  \
        }                                                                                                      \
        _Pragma("GCC unroll 11") for (int m = 0; m < R; m++) {                                                 \
            _mm512_mask_storeu_ps(y + m * ldy, live_0, acc[m][0]);                                             \
            _mm512_mask_storeu_ps(y + m * ldy + 16, live_1, acc[m][1]);                                        \
        }                                                                                                      \
    }
PKV_MATMUL_ROWS(1)
PKV_MATMUL_ROWS(2)
PKV_MATMUL_ROWS(3)
PKV_MATMUL_ROWS(4)
PKV_MATMUL_ROWS(5)
PKV_MATMUL_ROWS(6)
PKV_MATMUL_ROWS(7)
PKV_MATMUL_ROWS(8)
PKV_MATMUL_ROWS(9)
PKV_MATMUL_ROWS(10)
PKV_MATMUL_ROWS(11)
#undef PKV_MATMUL_ROWS

static void pkv_matmul_f32_avx512(const float *x, int64_t ldx, int64_t n_rows, const float *panel, int64_t n_k,
                                  float *y, int64_t ldy, int64_t n_cols, int accumulate, pkv_ahead ahead) {
    typedef void (*rows_fn)(const float *, int64_t, const float *, int64_t, const uint8_t *, int64_t, float *,
                            int64_t, __mmask16, __mmask16, int);
    static const rows_fn by_rows[PKV_MAX_ROWS_AVX512] = {
        pkv_matmul_1rows_avx512, pkv_matmul_2rows_avx512,  pkv_matmul_3rows_avx512,  pkv_matmul_4rows_avx512,
        pkv_matmul_5rows_avx512, pkv_matmul_6rows_avx512,  pkv_matmul_7rows_avx512,  pkv_matmul_8rows_avx512,
        pkv_matmul_9rows_avx512, pkv_matmul_10rows_avx512, pkv_matmul_11rows_avx512};
    /* Equal tiles: 13 rows run as 7 and 6, since a tile of one row would wait for its two chains. */
    int64_t n_tiles = (n_rows + PKV_MAX_ROWS_AVX512 - 1) / PKV_MAX_ROWS_AVX512;
    __mmask16 live_0 = pkv_live_avx512(n_cols), live_1 = pkv_live_avx512(n_cols - 16);
    int64_t share = n_k * n_tiles, step = ahead.begin && share ? (ahead.nbytes + share - 1) / share : 4 * PKV_PANEL;
    for (int64_t tile = 0; tile < n_tiles; tile++) {
        int64_t m = n_rows * tile / n_tiles, rows = n_rows * (tile + 1) / n_tiles - m;
        const uint8_t *at = ahead.begin ? ahead.begin + ahead.nbytes * tile / n_tiles
                                        : (const uint8_t *)panel + PKV_OWN_AHEAD_AVX512;
        by_rows[rows - 1](x + m * ldx, ldx, panel, n_k, at, step, y + m * ldy, ldy, live_0, live_1, accumulate);
    }
}

/* ---- Coded weights: two registers of a row of 32 become the float32 values they stand for ---- */

#define PKV_INLINE_AVX512 static inline __attribute__((always_inline))

/* Scales and minima of a group, two registers each; dtype is a constant where this is inlined. */
PKV_INLINE_AVX512 void pkv_scales_avx512(int dtype, const uint8_t *unit, const uint8_t *group, __m512 *scale,
                                         __m512 *minimum) {
    pkv_form f = pkv_form_of(dtype);
    for (int i = 0; i < 2; i++) {
        const uint8_t *of_unit = (f.is_k ? unit : group) + 32 * i;
        scale[i] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)of_unit));
        minimum[i] = f.has_min ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(of_unit + 64)))
                               : _mm512_setzero_ps();
        if (f.is_k) {
            __m128i factor = _mm_loadu_si128((const __m128i *)(group + 16 * i));
            scale[i] = _mm512_mul_ps(scale[i], _mm512_cvtepi32_ps(dtype == PKV_Q6_K ? _mm512_cvtepi8_epi32(factor)
                                                                                    : _mm512_cvtepu8_epi32(factor)));
            if (f.has_min) {
                __m128i factor_of_min = _mm_loadu_si128((const __m128i *)(group + 32 + 16 * i));
                __m512 below = _mm512_mul_ps(minimum[i], _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(factor_of_min)));
                minimum[i] = _mm512_castsi512_ps(
                    _mm512_xor_si512(_mm512_castps_si512(below), _mm512_set1_epi32(INT32_MIN)));
            }
        }
    }
}

/* Codes of one row, less the bias, as floats. */
PKV_INLINE_AVX512 void pkv_codes_avx512(int dtype, const uint8_t *low, const uint8_t *high, __m512 *code) {
    pkv_form f = pkv_form_of(dtype);
    __m128i low_u8x16 = _mm_loadu_si128((const __m128i *)low);
    if (f.low_bits == 8) {
        code[0] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(low_u8x16));
        code[1] = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(low + 16))));
        return;
    }
    __m512i both = _mm512_cvtepu8_epi32(low_u8x16), nibble[2] = {both, _mm512_srli_epi32(both, 4)};
    /* Tables of code - bias: the permutation looks at 4 (or, over two registers, 5) bits of an index only. */
    const __m512 count = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 table = _mm512_sub_ps(count, _mm512_set1_ps((float)f.bias));
    if (f.high_bits == 0) {
        code[0] = _mm512_permutexvar_ps(nibble[0], table);
        code[1] = _mm512_permutexvar_ps(nibble[1], table);
    } else if (f.high_bits == 1) {
        const __m512 upper = _mm512_add_ps(table, _mm512_set1_ps(16.0f));
        for (int i = 0; i < 2; i++) {
            __mmask16 fifth = (__mmask16)pkv_load_u16(high + 2 * i);
            __m512i index = _mm512_and_si512(nibble[i], _mm512_set1_epi32(15));
            index = _mm512_mask_add_epi32(index, fifth, index, _mm512_set1_epi32(16));
            code[i] = _mm512_permutex2var_ps(table, index, upper);
        }
    } else {
        __m512i bits = _mm512_cvtepu8_epi32(_mm_set1_epi64x(*(const int64_t *)(const void *)high));
        const __m512i shift = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
        for (int i = 0; i < 2; i++) {
            __m512i upper = _mm512_srlv_epi32(bits, _mm512_add_epi32(shift, _mm512_set1_epi32(4 * i)));
            upper = _mm512_slli_epi32(_mm512_and_si512(upper, _mm512_set1_epi32(3)), 4);
            __m512i index = _mm512_or_si512(_mm512_and_si512(nibble[i], _mm512_set1_epi32(15)), upper);
            code[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(index, _mm512_set1_epi32(f.bias)));
        }
    }
}

/* Values of row i of a group. */
PKV_INLINE_AVX512 void pkv_values_row_avx512(int dtype, const uint8_t *group, int64_t i, const __m512 *scale,
                                             const __m512 *minimum, __m512 *w) {
    pkv_form f = pkv_form_of(dtype);
    const uint8_t *low = group + pkv_scales_nbytes(f) + i * pkv_low_nbytes(f);
    if (f.has_scale) {
        const uint8_t *high = group + pkv_scales_nbytes(f) + f.group * pkv_low_nbytes(f) + i * pkv_high_nbytes(f);
        pkv_codes_avx512(dtype, low, high, w);
        for (int r = 0; r < 2; r++)
            w[r] = f.has_min ? _mm512_fmadd_ps(scale[r], w[r], minimum[r]) : _mm512_mul_ps(scale[r], w[r]);
        return;
    }
    for (int r = 0; r < 2; r++) {
        if (dtype == PKV_F32)
            w[r] = _mm512_loadu_ps((const float *)(const void *)low + 16 * r);
        else if (dtype == PKV_F16)
            w[r] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(low + 32 * r)));
        else
            w[r] = _mm512_castsi512_ps(_mm512_slli_epi32(
                _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(low + 32 * r))), 16));
    }
}

/* Expand, for a constant dtype. */
PKV_INLINE_AVX512 void pkv_expand_of_avx512(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, float *out) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t k = k_0; k < k_0 + n_k; k += f.group) {
        const uint8_t *unit, *group = pkv_group_at(f, panel, k, &unit);
        __m512 scale[2], minimum[2], w[2];
        if (f.has_scale)
            pkv_scales_avx512(dtype, unit, group, scale, minimum);
        for (int64_t i = 0; i < f.group; i++, out += PKV_PANEL) {
            pkv_values_row_avx512(dtype, group, i, scale, minimum, w);
            _mm512_storeu_ps(out, w[0]);
            _mm512_storeu_ps(out + 16, w[1]);
        }
    }
}

/* Matmul of R rows straight from codes, for constant dtype and R: each value is made once, in registers. */
PKV_INLINE_AVX512 void pkv_coded_of_avx512(int dtype, const int R, const float *x, int64_t ldx, const uint8_t *panel,
                                           int64_t n_k, float *y, int64_t ldy, int64_t n_cols) {
    pkv_form f = pkv_form_of(dtype);
    __m512 acc[8][2];
    _Pragma("GCC unroll 8") for (int m = 0; m < R; m++)
        acc[m][0] = acc[m][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < n_k; k += f.group) {
        const uint8_t *unit, *group = pkv_group_at(f, panel, k, &unit);
        __m512 scale[2], minimum[2], w[2];
        if (f.has_scale)
            pkv_scales_avx512(dtype, unit, group, scale, minimum);
        _Pragma("GCC unroll 4") for (int64_t i = 0; i < f.group; i++) {
            _mm_prefetch((const char *)(group + i * pkv_low_nbytes(f) + PKV_CODED_AHEAD_AVX512), _MM_HINT_T1);
            pkv_values_row_avx512(dtype, group, i, scale, minimum, w);
            _Pragma("GCC unroll 8") for (int m = 0; m < R; m++) {
                __m512 x_k = _mm512_set1_ps(x[m * ldx + k + i]);
                acc[m][0] = _mm512_fmadd_ps(x_k, w[0], acc[m][0]);
                acc[m][1] = _mm512_fmadd_ps(x_k, w[1], acc[m][1]);
            }
        }
    }
    __mmask16 live_0 = pkv_live_avx512(n_cols), live_1 = pkv_live_avx512(n_cols - 16);
    _Pragma("GCC unroll 8") for (int m = 0; m < R; m++) {
        _mm512_mask_storeu_ps(y + m * ldy, live_0, acc[m][0]);
        _mm512_mask_storeu_ps(y + m * ldy + 16, live_1, acc[m][1]);
    }
}

static void pkv_expand_avx512(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, float *out) {
#define PKV_CASE(D)                                                                                            \
    case D:                                                                                                    \
        pkv_expand_of_avx512(D, panel, k_0, n_k, out);                                                         \
        return;
    switch (dtype) { PKV_EACH_DTYPE(PKV_CASE) }
#undef PKV_CASE
}

#define PKV_CODED_ROWS(R)                                                                                      \
    static void pkv_coded_##R##rows_avx512(int dtype, const float *x, int64_t ldx, const uint8_t *panel,       \
                                           int64_t n_k, float *y, int64_t ldy, int64_t n_cols) {               \
        switch (dtype) { PKV_EACH_DTYPE(PKV_CASE_##R) }                                                        \
    }
#define PKV_CASE_R(D, R)                                                                                       \
    case D:                                                                                                    \
        pkv_coded_of_avx512(D, R, x, ldx, panel, n_k, y, ldy, n_cols);                                         \
        return;
#define PKV_CASE_1(D) PKV_CASE_R(D, 1)
#define PKV_CASE_2(D) PKV_CASE_R(D, 2)
#define PKV_CASE_3(D) PKV_CASE_R(D, 3)
#define PKV_CASE_4(D) PKV_CASE_R(D, 4)
#define PKV_CASE_5(D) PKV_CASE_R(D, 5)
#define PKV_CASE_6(D) PKV_CASE_R(D, 6)
#define PKV_CASE_7(D) PKV_CASE_R(D, 7)
#define PKV_CASE_8(D) PKV_CASE_R(D, 8)
PKV_CODED_ROWS(1)
PKV_CODED_ROWS(2)
PKV_CODED_ROWS(3)
PKV_CODED_ROWS(4)
PKV_CODED_ROWS(5)
PKV_CODED_ROWS(6)
PKV_CODED_ROWS(7)
PKV_CODED_ROWS(8)
#undef PKV_CASE_1
#undef PKV_CASE_2
#undef PKV_CASE_3
#undef PKV_CASE_4
#undef PKV_CASE_5
#undef PKV_CASE_6
#undef PKV_CASE_7
#undef PKV_CASE_8
#undef PKV_CASE_R
#undef PKV_CODED_ROWS

static void pkv_matmul_coded_avx512(int dtype, const float *x, int64_t ldx, int64_t n_rows, const uint8_t *panel,
                                    int64_t n_k, float *y, int64_t ldy, int64_t n_cols) {
    typedef void (*rows_fn)(int, const float *, int64_t, const uint8_t *, int64_t, float *, int64_t, int64_t);
    static const rows_fn by_rows[PKV_CODED_ROWS_avx512] = {
        pkv_coded_1rows_avx512, pkv_coded_2rows_avx512, pkv_coded_3rows_avx512, pkv_coded_4rows_avx512,
        pkv_coded_5rows_avx512, pkv_coded_6rows_avx512, pkv_coded_7rows_avx512, pkv_coded_8rows_avx512};
    by_rows[n_rows - 1](dtype, x, ldx, panel, n_k, y, ldy, n_cols);
}

/* ---- K and V: in 16 lanes, measured on Zen 5, where 512 bits are one operation. Memory is asked for the next block
 * straight into L1 (three heads of 64: 20 GB/s a thread; into L2: 18). ---- */

#define pkv_kv_round_avx512 pkv_kv_round_avx2

/* Keeps a loaded value in its register; GCC would load it again for each product. */
#define PKV_HOLD_AVX512(x) __asm__("" : "+v"(x))

/* Sixteen values of a row as floats; dtype is a constant where this is inlined. */
PKV_INLINE_AVX512 __m512 pkv_kv_load_avx512(int dtype, const uint8_t *values, int64_t i, __m512 scale) {
    if (dtype == PKV_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)(values + 2 * i)));
    if (dtype == PKV_BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(values + 2 * i))), 16));
    __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)(values + i));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)), scale);
}

PKV_INLINE_AVX512 void pkv_kv_expand_of_avx512(int dtype, const pkv_kv_rows *rows, int64_t n_rows, int64_t n,
                                               float *out, const uint8_t *next, int64_t next_stride) {
    int64_t value_nbytes = pkv_kv_value_nbytes(dtype);
    for (int64_t t = 0; t < n_rows; t++, out += n) {
        const uint8_t *values = rows->values + t * rows->values_stride;
        const uint8_t *scales = rows->scales + t * rows->scales_stride;
        for (int64_t at = 0; at < n * value_nbytes; at += 64)
            _mm_prefetch((const char *)next + t * next_stride + at, _MM_HINT_T1);
        __m512 scale = _mm512_setzero_ps();
        int64_t i = 0;
        for (; i + 32 <= n; i += 32) {
            if (dtype == PKV_Q8_0) /* groups are whole */
                scale = _mm512_cvtph_ps(_mm256_set1_epi16((int16_t)pkv_load_u16(scales + i / PKV_KV_GROUP * 2)));
            _mm512_storeu_ps(out + i, pkv_kv_load_avx512(dtype, values, i, scale));
            _mm512_storeu_ps(out + i + 16, pkv_kv_load_avx512(dtype, values, i + 16, scale));
        }
        if (i + 16 <= n) { /* of halves: groups are whole */
            _mm512_storeu_ps(out + i, pkv_kv_load_avx512(dtype, values, i, scale));
            i += 16;
        }
        pkv_kv_rows rest = {values + i * value_nbytes, NULL, 0, 0};
        if (i < n)
            pkv_kv_expand_scalar(dtype, &rest, 1, n - i, out + i, next, next_stride);
    }
}

static void pkv_kv_expand_avx512(int dtype, const pkv_kv_rows *rows, int64_t n_rows, int64_t n, float *out,
                                 const uint8_t *next, int64_t next_stride) {
    if (dtype == PKV_F16)
        pkv_kv_expand_of_avx512(PKV_F16, rows, n_rows, n, out, next, next_stride);
    else if (dtype == PKV_BF16)
        pkv_kv_expand_of_avx512(PKV_BF16, rows, n_rows, n, out, next, next_stride);
    else if (dtype == PKV_Q8_0)
        pkv_kv_expand_of_avx512(PKV_Q8_0, rows, n_rows, n, out, next, next_stride);
    else
        pkv_kv_expand_scalar(dtype, rows, n_rows, n, out, next, next_stride);
}

/* The first two levels of the tree for four sets of lanes, 8 apart and 4 apart: four lanes of each are left, of the
 * first set in the lowest four. */
PKV_INLINE_AVX512 __m512 pkv_tree_halves_avx512(const __m512 *lanes) {
    __m512 by_8[2];
    for (int i = 0; i < 2; i++)
        by_8[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, lanes[2 * i], lanes[2 * i + 1]),
                                _mm512_shuffle_f32x4(lanes[2 * i], lanes[2 * i + 1], _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm512_add_ps(_mm512_shuffle_f32x4(by_8[0], by_8[1], _MM_SHUFFLE(2, 0, 2, 0)),
                         _mm512_shuffle_f32x4(by_8[0], by_8[1], _MM_SHUFFLE(3, 1, 3, 1)));
}

/* The last two, 2 apart and 1 apart, for sixteen sets: lanes[i] has four lanes of each of sets 4 i to 4 i + 3. */
PKV_INLINE_AVX512 __m512 pkv_tree_ends_avx512(const __m512 *lanes) {
    __m512 by_2[2];
    for (int i = 0; i < 2; i++)
        by_2[i] = _mm512_add_ps(_mm512_shuffle_ps(lanes[2 * i], lanes[2 * i + 1], _MM_SHUFFLE(1, 0, 1, 0)),
                                _mm512_shuffle_ps(lanes[2 * i], lanes[2 * i + 1], _MM_SHUFFLE(3, 2, 3, 2)));
    __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(by_2[0], by_2[1], _MM_SHUFFLE(2, 0, 2, 0)),
                                _mm512_shuffle_ps(by_2[0], by_2[1], _MM_SHUFFLE(3, 1, 3, 1)));
    /* Now sets 0, 4, 8, 12, then 1, 5, and so on. */
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
}

/* Dot products of H heads with 16 keys, four of them at a time: H * 4 chains, keys' and queries' elements loaded once
 * for all. Meanwhile memory is asked for `next`. */
#define PKV_SCORES_HEADS(H)                                                                                    \
    static inline void pkv_scores_##H##heads_avx512(const float *q, const float *const *k, int64_t head_dim,   \
                                                    const float *next, int64_t ldnext, __m512 *scores) {       \
        __m512 halves[H][4];                                                                                   \
        _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++) {                                                  \
            __m512 sum[H][4], key[4];                                                                          \
            _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                                \
                _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) sum[h][j] = _mm512_setzero_ps();           \
            int64_t d = 0;                                                                                     \
            for (; d + 16 <= head_dim; d += 16) {                                                              \
                _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {                                          \
                    _mm_prefetch((const char *)(next + (4 * t + j) * ldnext + d), _MM_HINT_T0);                \
                    key[j] = _mm512_loadu_ps(k[4 * t + j] + d);                                                \
                    PKV_HOLD_AVX512(key[j]);                                                                   \
                }                                                                                              \
                _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) {                                          \
                    __m512 q_d = _mm512_loadu_ps(q + h * head_dim + d);                                        \
                    PKV_HOLD_AVX512(q_d);                                                                      \
                    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)                                        \
                        sum[h][j] = _mm512_fmadd_ps(q_d, key[j], sum[h][j]);                                   \
                }                                                                                              \
            }                                                                                                  \
            if (d < head_dim) {                                                                                \
                __mmask16 tail = pkv_tail_mask_avx512(head_dim - d);                                           \
                _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)                                            \
                    key[j] = _mm512_maskz_loadu_ps(tail, k[4 * t + j] + d);                                    \
                _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) {                                          \
                    __m512 q_d = _mm512_maskz_loadu_ps(tail, q + h * head_dim + d);                            \
                    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)                                        \
                        sum[h][j] = _mm512_mask3_fmadd_ps(q_d, key[j], sum[h][j], tail);                       \
                }                                                                                              \
            }                                                                                                  \
            _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) halves[h][t] = pkv_tree_halves_avx512(sum[h]); \
        }                                                                                                      \
        _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) scores[h] = pkv_tree_ends_avx512(halves[h]);       \
    }
PKV_SCORES_HEADS(1)
PKV_SCORES_HEADS(2)
PKV_SCORES_HEADS(3)
PKV_SCORES_HEADS(4)
#undef PKV_SCORES_HEADS

/* Heads that go through K or V together, of n that are left. Five are three and two, as a lone one has few chains. Four
 * heads of 64 are two and two: a block that is asked for twice comes faster from memory (25 GB/s against 21; heads of
 * 128 gain nothing). */
static inline int64_t pkv_heads_avx512(int64_t n, int64_t head_dim) {
    return n == 5 ? 3 : n == 4 && head_dim <= 64 ? 2 : pkv_min(n, 4);
}

static void pkv_attn_scores_f32_avx512(const float *q, int64_t n_q, const float *k, int64_t ldk, int64_t n_k,
                                       int64_t head_dim, float scale, float *s, int64_t lds, const float *next,
                                       int64_t ldnext) {
    typedef void (*heads_fn)(const float *, const float *const *, int64_t, const float *, int64_t, __m512 *);
    static const heads_fn by_heads[4] = {pkv_scores_1heads_avx512, pkv_scores_2heads_avx512, pkv_scores_3heads_avx512,
                                         pkv_scores_4heads_avx512};
    int64_t t = 0;
    for (; n_k - t > 8; t += 16) {
        const float *keys[16]; /* past the last key it stands in, and its dots are dropped */
        int64_t n = pkv_min(n_k - t, 16);
        for (int64_t i = 0; i < n; i++)
            keys[i] = k + (t + i) * ldk;
        for (int64_t i = n; i < 16; i++)
            keys[i] = keys[n - 1];
        __mmask16 live = pkv_live_avx512(n);
        for (int64_t h = 0, heads; h < n_q; h += heads) {
            __m512 scores[4];
            heads = pkv_heads_avx512(n_q - h, head_dim);
            by_heads[heads - 1](q + h * head_dim, keys, head_dim, next + t * ldnext, ldnext, scores);
            for (int64_t i = 0; i < heads; i++)
                _mm512_mask_storeu_ps(s + (h + i) * lds + t, live, _mm512_mul_ps(scores[i], _mm512_set1_ps(scale)));
        }
    }
    if (t < n_k)
        pkv_attn_scores_f32_avx2(q, n_q, k + t * ldk, ldk, n_k - t, head_dim, scale, s + t, lds, next + t * ldnext,
                                 ldnext);
}

/* H heads at once over C parts of 16 elements of the head, `live` of the last one: H * C chains, the values loaded once
 * for all heads. */
#define PKV_VALUES_HEADS(H, C)                                                                                 \
    static void pkv_values_##H##heads_##C##parts_avx512(const float *p, int64_t ldp, const float *v,           \
                                                        int64_t ldv, int64_t n_k, int64_t head_dim,            \
                                                        float *acc, __mmask16 live, const float *next,         \
                                                        int64_t ldnext) {                                      \
        __m512 a[H][C], p_t[H];                                                                                \
        _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                                    \
            _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) a[h][c] = _mm512_maskz_loadu_ps(               \
                c + 1 < C ? (__mmask16)0xFFFF : live, acc + h * head_dim + 16 * c);                            \
        for (int64_t t = 0; t < n_k; t++) {                                                                    \
            _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) p_t[h] = _mm512_set1_ps(p[h * ldp + t]);       \
            _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) {                                              \
                _mm_prefetch((const char *)(next + t * ldnext + 16 * c), _MM_HINT_T0);                         \
                __m512 v_c = _mm512_maskz_loadu_ps(c + 1 < C ? (__mmask16)0xFFFF : live, v + t * ldv + 16 * c);\
                PKV_HOLD_AVX512(v_c);                                                                          \
                _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                            \
                    a[h][c] = _mm512_fmadd_ps(p_t[h], v_c, a[h][c]);                                           \
            }                                                                                                  \
        }                                                                                                      \
        _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                                    \
            _Pragma("GCC unroll 4") for (int c = 0; c < C; c++) _mm512_mask_storeu_ps(                         \
                acc + h * head_dim + 16 * c, c + 1 < C ? (__mmask16)0xFFFF : live, a[h][c]);                   \
    }
#define PKV_VALUES_PARTS(C)                                                                                    \
    PKV_VALUES_HEADS(1, C)                                                                                     \
    PKV_VALUES_HEADS(2, C)                                                                                     \
    PKV_VALUES_HEADS(3, C)                                                                                     \
    PKV_VALUES_HEADS(4, C)
PKV_VALUES_PARTS(1)
PKV_VALUES_PARTS(2)
PKV_VALUES_PARTS(3)
PKV_VALUES_PARTS(4)
#undef PKV_VALUES_PARTS
#undef PKV_VALUES_HEADS

static void pkv_attn_values_f32_avx512(const float *p, int64_t ldp, int64_t n_q, const float *v, int64_t ldv,
                                       int64_t n_k, int64_t head_dim, float *acc, const float *next,
                                       int64_t ldnext) {
    typedef void (*heads_fn)(const float *, int64_t, const float *, int64_t, int64_t, int64_t, float *, __mmask16,
                             const float *, int64_t);
#define PKV_BY_HEADS(C)                                                                                        \
    {pkv_values_1heads_##C##parts_avx512, pkv_values_2heads_##C##parts_avx512,                                 \
     pkv_values_3heads_##C##parts_avx512, pkv_values_4heads_##C##parts_avx512}
    static const heads_fn by_parts[4][4] = {PKV_BY_HEADS(1), PKV_BY_HEADS(2), PKV_BY_HEADS(3), PKV_BY_HEADS(4)};
#undef PKV_BY_HEADS
    for (int64_t d = 0; d < head_dim; d += 64) {
        int64_t n = pkv_min(head_dim - d, 64), parts = (n + 15) / 16;
        __mmask16 live = pkv_live_avx512(n - 16 * (parts - 1)); /* of the last part */
        for (int64_t h = 0, heads; h < n_q; h += heads) {
            heads = pkv_heads_avx512(n_q - h, head_dim);
            by_parts[parts - 1][heads - 1](p + h * ldp, ldp, v + d, ldv, n_k, head_dim, acc + h * head_dim + d, live,
                                           next + d, ldnext);
        }
    }
}

static void pkv_attn_merge_f32_avx512(float *max, float *sum, float *acc, float max_c, float sum_c,
                                      const float *acc_c, int64_t head_dim) {
    float top = max_c > *max ? max_c : *max;
    __m512 weights = pkv_exp_avx512(_mm512_mask_blend_ps(1, _mm512_set1_ps(max_c - top), _mm512_set1_ps(*max - top)));
    __m512 keep = _mm512_permutexvar_ps(_mm512_setzero_si512(), weights); /* lane 0 */
    __m512 take = _mm512_permutexvar_ps(_mm512_set1_epi32(1), weights);
    *max = top;
    *sum = fmaf(*sum, _mm512_cvtss_f32(keep), sum_c * _mm512_cvtss_f32(take));
    for (int64_t d = 0; d < head_dim; d += 16) {
        __mmask16 live = pkv_live_avx512(head_dim - d);
        __m512 later = _mm512_mul_ps(_mm512_maskz_loadu_ps(live, acc_c + d), take);
        _mm512_mask_storeu_ps(acc + d, live, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(live, acc + d), keep, later));
    }
}

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
