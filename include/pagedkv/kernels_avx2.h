/* AVX2, FMA and F16C: the scalar file's order in 8 lanes. Two registers, low and high, are one set of 16
 * canonical lanes. */
#ifndef PAGEDKV_KERNELS_AVX2_H
#define PAGEDKV_KERNELS_AVX2_H

#include <immintrin.h>

#include "kernels_scalar.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define PKV_INLINE_AVX2 static inline __attribute__((always_inline))

/* Lane i is live where i < n; any n is allowed, so the upper half of 16 lanes asks with n - 8. */
static inline __m256i pkv_tail_mask_avx2(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* The fixed tree: 8 apart, 4, 2, 1. */
static inline float pkv_tree_sum_avx2(__m256 low_f32x8, __m256 high_f32x8) {
    __m256 sum_f32x8 = _mm256_add_ps(low_f32x8, high_f32x8);
    __m128 sum_f32x4 = _mm_add_ps(_mm256_castps256_ps128(sum_f32x8), _mm256_extractf128_ps(sum_f32x8, 1));
    sum_f32x4 = _mm_add_ps(sum_f32x4, _mm_movehl_ps(sum_f32x4, sum_f32x4));
    sum_f32x4 = _mm_add_ss(sum_f32x4, _mm_movehdup_ps(sum_f32x4));
    return _mm_cvtss_f32(sum_f32x4);
}

/* lanes + a * b where the mask is set; the other lanes stay as they are, -0 included. Reads only live elements. */
static inline __m256 pkv_mask_fmadd_avx2(const float *a, const float *b, __m256 lanes_f32x8, __m256i live) {
    __m256 sum = _mm256_fmadd_ps(_mm256_maskload_ps(a, live), _mm256_maskload_ps(b, live), lanes_f32x8);
    return _mm256_blendv_ps(lanes_f32x8, sum, _mm256_castsi256_ps(live));
}

static inline float pkv_dot_f32_avx2(const float *a, const float *b, int64_t n) {
    __m256 low_f32x8 = _mm256_setzero_ps(), high_f32x8 = low_f32x8;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        low_f32x8 = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), low_f32x8);
        high_f32x8 = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8), high_f32x8);
    }
    if (i < n)
        low_f32x8 = pkv_mask_fmadd_avx2(a + i, b + i, low_f32x8, pkv_tail_mask_avx2(n - i));
    if (i + 8 < n)
        high_f32x8 = pkv_mask_fmadd_avx2(a + i + 8, b + i + 8, high_f32x8, pkv_tail_mask_avx2(n - i - 8));
    return pkv_tree_sum_avx2(low_f32x8, high_f32x8);
}

static inline __m256 pkv_exp_avx2(__m256 x_f32x8) {
    __m256 x = _mm256_max_ps(_mm256_set1_ps(PKV_EXP_LO), x_f32x8); /* second operand: a NaN stays */
    x = _mm256_min_ps(_mm256_set1_ps(PKV_EXP_HI), x);
    __m256 round = _mm256_set1_ps(PKV_EXP_ROUND);
    __m256 shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(PKV_EXP_LOG2E), round);
    __m256 n = _mm256_sub_ps(shifted, round);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-PKV_EXP_LN2_HI), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-PKV_EXP_LN2_LO), r);
    __m256 p = _mm256_fmadd_ps(_mm256_set1_ps(PKV_EXP_P5), r, _mm256_set1_ps(PKV_EXP_P4));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(PKV_EXP_P3));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(PKV_EXP_P2));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(PKV_EXP_P1));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(PKV_EXP_P0));
    __m256 y = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    /* The scales of a NaN are arbitrary, but y is then a NaN too and stays one. */
    __m256i n_int = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(PKV_EXP_ROUND_BITS));
    __m256i n_half = _mm256_srai_epi32(n_int, 1), bias = _mm256_set1_epi32(127);
    __m256i scale_1 = _mm256_slli_epi32(_mm256_add_epi32(n_half, bias), 23);
    __m256i scale_2 = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(n_int, n_half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(y, _mm256_castsi256_ps(scale_1)), _mm256_castsi256_ps(scale_2));
}

static void pkv_exp_row_f32_avx2(const float *x, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, pkv_exp_avx2(_mm256_loadu_ps(x + i)));
    if (i < n) {
        __m256i tail = pkv_tail_mask_avx2(n - i);
        _mm256_maskstore_ps(y + i, tail, pkv_exp_avx2(_mm256_maskload_ps(x + i, tail)));
    }
}

/* Live elements of s become exp(s - top) and are added to their lanes; the rest of both stays. */
static inline __m256 pkv_exp_sum_tail_avx2(float *s, __m256 top, __m256 lanes_f32x8, __m256i live) {
    __m256 e = pkv_exp_avx2(_mm256_sub_ps(_mm256_maskload_ps(s, live), top));
    _mm256_maskstore_ps(s, live, e);
    return _mm256_blendv_ps(lanes_f32x8, _mm256_add_ps(lanes_f32x8, e), _mm256_castsi256_ps(live));
}

static void pkv_softmax_chunk_f32_avx2(float *s, int64_t n, float *max, float *sum) {
    const __m256 lowest = _mm256_set1_ps(-INFINITY);
    __m256 max_f32x8 = lowest;
    int64_t i = 0, whole = n & ~(int64_t)15;
    for (i = 0; i + 8 <= n; i += 8)
        max_f32x8 = _mm256_max_ps(_mm256_loadu_ps(s + i), max_f32x8);
    if (i < n) {
        __m256i tail = pkv_tail_mask_avx2(n - i);
        __m256 last = _mm256_blendv_ps(lowest, _mm256_maskload_ps(s + i, tail), _mm256_castsi256_ps(tail));
        max_f32x8 = _mm256_max_ps(last, max_f32x8);
    }
    /* A maximum has no rounding: any tree gives it. Lanes never hold a NaN (second operand wins). */
    __m128 max_f32x4 = _mm_max_ps(_mm256_castps256_ps128(max_f32x8), _mm256_extractf128_ps(max_f32x8, 1));
    max_f32x4 = _mm_max_ps(max_f32x4, _mm_movehl_ps(max_f32x4, max_f32x4));
    max_f32x4 = _mm_max_ss(max_f32x4, _mm_movehdup_ps(max_f32x4));
    *max = _mm_cvtss_f32(max_f32x4);
    __m256 top = _mm256_set1_ps(*max), low_f32x8 = _mm256_setzero_ps(), high_f32x8 = low_f32x8;
    for (i = 0; i < whole; i += 16) {
        __m256 e_low = pkv_exp_avx2(_mm256_sub_ps(_mm256_loadu_ps(s + i), top));
        __m256 e_high = pkv_exp_avx2(_mm256_sub_ps(_mm256_loadu_ps(s + i + 8), top));
        _mm256_storeu_ps(s + i, e_low);
        _mm256_storeu_ps(s + i + 8, e_high);
        low_f32x8 = _mm256_add_ps(low_f32x8, e_low);
        high_f32x8 = _mm256_add_ps(high_f32x8, e_high);
    }
    if (i < n)
        low_f32x8 = pkv_exp_sum_tail_avx2(s + i, top, low_f32x8, pkv_tail_mask_avx2(n - i));
    if (i + 8 < n)
        high_f32x8 = pkv_exp_sum_tail_avx2(s + i + 8, top, high_f32x8, pkv_tail_mask_avx2(n - i - 8));
    *sum = pkv_tree_sum_avx2(low_f32x8, high_f32x8);
}

static void pkv_attn_finish_f32_avx2(const float *acc, float sum, float *out, int64_t head_dim) {
    __m256 sum_f32x8 = _mm256_set1_ps(sum);
    int64_t d = 0;
    for (; d + 8 <= head_dim; d += 8)
        _mm256_storeu_ps(out + d, _mm256_div_ps(_mm256_loadu_ps(acc + d), sum_f32x8));
    if (d < head_dim) {
        __m256i tail = pkv_tail_mask_avx2(head_dim - d);
        _mm256_maskstore_ps(out + d, tail, _mm256_div_ps(_mm256_maskload_ps(acc + d, tail), sum_f32x8));
    }
}

static void pkv_softmax_f32_avx2(const float *x, float *y, int64_t n) {
    float max, sum;
    if (y != x)
        memcpy(y, x, (size_t)n * sizeof *y);
    pkv_softmax_chunk_f32_avx2(y, n, &max, &sum);
    pkv_attn_finish_f32_avx2(y, sum, y, n);
}

static void pkv_rmsnorm_f32_avx2(const float *x, const float *gamma, float eps, float *y, int64_t n) {
    float inverse = 1.0f / sqrtf(pkv_dot_f32_avx2(x, x, n) / (float)n + eps);
    __m256 inverse_f32x8 = _mm256_set1_ps(inverse);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(
            y + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse_f32x8), _mm256_loadu_ps(gamma + i)));
    if (i < n) {
        __m256i tail = pkv_tail_mask_avx2(n - i);
        __m256 scaled = _mm256_mul_ps(_mm256_maskload_ps(x + i, tail), inverse_f32x8);
        _mm256_maskstore_ps(y + i, tail, _mm256_mul_ps(scaled, _mm256_maskload_ps(gamma + i, tail)));
    }
}

static void pkv_rope_f32_avx2(float *head, const float *cos, const float *sin, int64_t half) {
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
        __m256 a = _mm256_loadu_ps(head + i), b = _mm256_loadu_ps(head + i + half);
        __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
        _mm256_storeu_ps(head + i, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
        _mm256_storeu_ps(head + i + half, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
    }
    if (i < half) {
        __m256i tail = pkv_tail_mask_avx2(half - i);
        __m256 a = _mm256_maskload_ps(head + i, tail), b = _mm256_maskload_ps(head + i + half, tail);
        __m256 c = _mm256_maskload_ps(cos + i, tail), s = _mm256_maskload_ps(sin + i, tail);
        _mm256_maskstore_ps(head + i, tail, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
        _mm256_maskstore_ps(head + i + half, tail, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
    }
}

static inline __m256 pkv_swiglu_avx2(__m256 gate, __m256 up) {
    __m256 minus = _mm256_xor_ps(gate, _mm256_set1_ps(-0.0f));
    __m256 below = _mm256_add_ps(_mm256_set1_ps(1.0f), pkv_exp_avx2(minus));
    return _mm256_mul_ps(_mm256_div_ps(gate, below), up);
}

static void pkv_swiglu_f32_avx2(const float *gate, const float *up, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, pkv_swiglu_avx2(_mm256_loadu_ps(gate + i), _mm256_loadu_ps(up + i)));
    if (i < n) {
        __m256i tail = pkv_tail_mask_avx2(n - i);
        _mm256_maskstore_ps(
            y + i, tail, pkv_swiglu_avx2(_mm256_maskload_ps(gate + i, tail), _mm256_maskload_ps(up + i, tail)));
    }
}

static void pkv_add_f32_avx2(float *y, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_add_ps(_mm256_loadu_ps(y + i), _mm256_loadu_ps(x + i)));
    if (i < n) {
        __m256i tail = pkv_tail_mask_avx2(n - i);
        _mm256_maskstore_ps(y + i, tail,
                            _mm256_add_ps(_mm256_maskload_ps(y + i, tail), _mm256_maskload_ps(x + i, tail)));
    }
}

/* R rows of one panel: R * 4 accumulators stay in registers over all of k. 3 rows fill 12 of the 16 registers
 * and leave three for the broadcasts and one for the panel. The loops must unroll at every optimisation level:
 * an accumulator with a variable index lives in memory. Where `ahead` is not NULL two lines are asked for at
 * each k, `ahead` moving by `step` bytes. */
#define PKV_MAX_ROWS_AVX2 3
#define PKV_MATMUL_ROWS(R)                                                                                     \
    PKV_INLINE_AVX2 void pkv_matmul_##R##rows_of_avx2(                                                         \
        const float *x, int64_t ldx, const float *panel, int64_t n_k, const uint8_t *ahead, int64_t step,       \
        float *y, int64_t ldy, int accumulate) {                                                               \
        __m256 acc[R][4], x_k[R];                                                                              \
        _Pragma("GCC unroll 4") for (int m = 0; m < R; m++)                                                    \
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)                                                \
                acc[m][c] = accumulate ? _mm256_loadu_ps(y + m * ldy + 8 * c) : _mm256_setzero_ps();           \
        for (int64_t k = 0; k < n_k; k++) {                                                                    \
            if (ahead) {                                                                                       \
                _mm_prefetch((const char *)(ahead + k * step), _MM_HINT_T1);                                   \
                _mm_prefetch((const char *)(ahead + k * step + 64), _MM_HINT_T1);                              \
            }                                                                                                  \
            _Pragma("GCC unroll 4") for (int m = 0; m < R; m++) x_k[m] = _mm256_broadcast_ss(x + m * ldx + k); \
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {                                              \
                __m256 w_c = _mm256_load_ps(panel + k * PKV_PANEL + 8 * c);                                    \
                _Pragma("GCC unroll 4") for (int m = 0; m < R; m++)                                            \
                    acc[m][c] = _mm256_fmadd_ps(x_k[m], w_c, acc[m][c]);                                       \
            }                                                                                                  \
        }                                                                                                      \
        _Pragma("GCC unroll 4") for (int m = 0; m < R; m++)                                                    \
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)                                                \
                _mm256_storeu_ps(y + m * ldy + 8 * c, acc[m][c]);                                              \
    }                                                                                                          \
    static void pkv_matmul_##R##rows_avx2(const float *x, int64_t ldx, const float *panel, int64_t n_k,        \
                                          const uint8_t *ahead, int64_t step, float *y, int64_t ldy,           \
                                          int accumulate) {                                                    \
        if (ahead)                                                                                             \
            pkv_matmul_##R##rows_of_avx2(x, ldx, panel, n_k, ahead, step, y, ldy, accumulate);                 \
        else                                                                                                   \
            pkv_matmul_##R##rows_of_avx2(x, ldx, panel, n_k, NULL, 0, y, ldy, accumulate);                     \
    }
PKV_MATMUL_ROWS(1)
PKV_MATMUL_ROWS(2)
PKV_MATMUL_ROWS(3)
#undef PKV_MATMUL_ROWS

static void pkv_matmul_f32_avx2(const float *x, int64_t ldx, int64_t n_rows, const float *panel, int64_t n_k,
                                float *y, int64_t ldy, int64_t n_cols, int accumulate, pkv_ahead ahead) {
    typedef void (*rows_fn)(const float *, int64_t, const float *, int64_t, const uint8_t *, int64_t, float *, int64_t,
                            int);
    static const rows_fn by_rows[PKV_MAX_ROWS_AVX2] = {pkv_matmul_1rows_avx2, pkv_matmul_2rows_avx2,
                                                       pkv_matmul_3rows_avx2};
    /* Equal tiles: 4 rows run as 2 and 2, since a tile of one row would wait for its four chains. */
    int64_t n_tiles = (n_rows + PKV_MAX_ROWS_AVX2 - 1) / PKV_MAX_ROWS_AVX2;
    int64_t share = n_k * n_tiles, step = share ? (ahead.nbytes + share - 1) / share : 0;
    for (int64_t tile = 0; tile < n_tiles; tile++) {
        int64_t m = n_rows * tile / n_tiles, rows = n_rows * (tile + 1) / n_tiles - m;
        const float *x_m = x + m * ldx;
        float *y_m = y + m * ldy;
        const uint8_t *at = ahead.begin ? ahead.begin + ahead.nbytes * tile / n_tiles : NULL; /* the tile's part */
        if (n_cols == PKV_PANEL) {
            by_rows[rows - 1](x_m, ldx, panel, n_k, at, step, y_m, ldy, accumulate);
            continue;
        }
        /* A narrow last panel goes through a copy: masked stores cost tens of cycles on some CPUs. */
        float wide[PKV_MAX_ROWS_AVX2][PKV_PANEL] = {{0}};
        for (int64_t r = 0; accumulate && r < rows; r++)
            memcpy(wide[r], y_m + r * ldy, (size_t)n_cols * sizeof *y);
        by_rows[rows - 1](x_m, ldx, panel, n_k, at, step, wide[0], PKV_PANEL, accumulate);
        for (int64_t r = 0; r < rows; r++)
            memcpy(y_m + r * ldy, wide[r], (size_t)n_cols * sizeof *y);
    }
}

/* ---- Coded weights: four registers of a row of 32 become the float32 values they stand for ---- */

/* Scales and minima of a group, four registers each, zeros for the float types; dtype is a constant where this is
 * inlined. The scales come times 2^-24, the codes below times 2^24: both exactly, so a product's rounding stays. */
PKV_INLINE_AVX2 void pkv_scales_avx2(int dtype, const uint8_t *unit, const uint8_t *group, __m256 *scale,
                                     __m256 *minimum) {
    pkv_form f = pkv_form_of(dtype);
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
        const uint8_t *of_unit = (f.is_k ? unit : group) + 16 * c;
        scale[c] = f.has_scale ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)of_unit)) : _mm256_setzero_ps();
        minimum[c] = f.has_min ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(of_unit + 64)))
                               : _mm256_setzero_ps();
        if (f.is_k) {
            __m128i factor = _mm_loadl_epi64((const __m128i *)(group + 8 * c));
            __m256i factor_i32x8 = dtype == PKV_Q6_K ? _mm256_cvtepi8_epi32(factor) : _mm256_cvtepu8_epi32(factor);
            scale[c] = _mm256_mul_ps(scale[c], _mm256_cvtepi32_ps(factor_i32x8));
            if (f.has_min) {
                __m256i of_min = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(group + PKV_PANEL + 8 * c)));
                minimum[c] = _mm256_xor_ps(_mm256_mul_ps(minimum[c], _mm256_cvtepi32_ps(of_min)),
                                           _mm256_set1_ps(-0.0f));
            }
        }
        scale[c] = _mm256_mul_ps(scale[c], _mm256_set1_ps(0x1p-24f));
    }
}

/* Codes of one row, less the bias, as floats times 2^24: a byte in the top of an int32 keeps its sign. */
PKV_INLINE_AVX2 void pkv_codes_avx2(int dtype, const uint8_t *low, const uint8_t *high, __m256 *code) {
    pkv_form f = pkv_form_of(dtype);
    __m256i bytes[2]; /* columns [0, 16) and [16, 32), each in both halves of the register */
    bytes[0] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low));
    if (f.low_bits == 8) {
        bytes[1] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(low + 16)));
    } else {
        bytes[1] = _mm256_and_si256(_mm256_srli_epi16(bytes[0], 4), _mm256_set1_epi8(15));
        bytes[0] = _mm256_and_si256(bytes[0], _mm256_set1_epi8(15));
    }
    if (f.high_bits == 1) { /* a column's byte of the bits, its bit of that byte */
        const __m256i bits = _mm256_set1_epi32((int32_t)pkv_load_u32(high));
        const __m256i place = _mm256_set1_epi64x((int64_t)0x8040201008040201);
        const __m256i from = _mm256_setr_epi64x(0, 0x0101010101010101, 0, 0x0101010101010101);
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
            __m256i spread = _mm256_shuffle_epi8(bits, _mm256_add_epi8(from, _mm256_set1_epi8((char)(2 * i))));
            __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, place), place);
            bytes[i] = _mm256_or_si256(bytes[i], _mm256_and_si256(is_set, _mm256_set1_epi8(16)));
        }
    } else if (f.high_bits == 2) { /* each 8 columns take the same 8 bytes, shifted their own way to bit 4 */
        const __m256i bits = _mm256_set1_epi64x((int64_t)pkv_load_u64(high)), fifth_sixth = _mm256_set1_epi8(0x30);
        __m256i upper_0 = _mm256_sllv_epi64(bits, _mm256_setr_epi64x(4, 2, 4, 2));
        __m256i upper_1 = _mm256_srlv_epi64(bits, _mm256_setr_epi64x(0, 2, 0, 2));
        bytes[0] = _mm256_or_si256(bytes[0], _mm256_and_si256(upper_0, fifth_sixth));
        bytes[1] = _mm256_or_si256(bytes[1], _mm256_and_si256(upper_1, fifth_sixth));
    }
    const __m256i to_top = _mm256_setr_epi8(-1, -1, -1, 0, -1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3, /* columns */
                                            -1, -1, -1, 4, -1, -1, -1, 5, -1, -1, -1, 6, -1, -1, -1, 7);
    const __m256i next_to_top = _mm256_or_si256(to_top, _mm256_set1_epi8(8));
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
        if (f.bias)
            bytes[i] = _mm256_sub_epi8(bytes[i], _mm256_set1_epi8((char)f.bias));
        code[2 * i] = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(bytes[i], to_top));
        code[2 * i + 1] = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(bytes[i], next_to_top));
    }
}

/* Values of row i of a group. */
PKV_INLINE_AVX2 void pkv_values_row_avx2(int dtype, const uint8_t *group, int64_t i, const __m256 *scale,
                                         const __m256 *minimum, __m256 *w) {
    pkv_form f = pkv_form_of(dtype);
    const uint8_t *low = group + pkv_scales_nbytes(f) + i * pkv_low_nbytes(f);
    const uint8_t *high = group + pkv_scales_nbytes(f) + f.group * pkv_low_nbytes(f) + i * pkv_high_nbytes(f);
    if (f.has_scale)
        pkv_codes_avx2(dtype, low, high, w);
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
        if (f.has_scale)
            w[c] = f.has_min ? _mm256_fmadd_ps(scale[c], w[c], minimum[c]) : _mm256_mul_ps(scale[c], w[c]);
        else if (dtype == PKV_F32)
            w[c] = _mm256_loadu_ps((const float *)(const void *)low + 8 * c);
        else if (dtype == PKV_F16)
            w[c] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(low + 16 * c)));
        else
            w[c] = _mm256_castsi256_ps(_mm256_slli_epi32(
                _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(low + 16 * c))), 16));
    }
}

/* Expand, for a constant dtype. */
PKV_INLINE_AVX2 void pkv_expand_of_avx2(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, float *out) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t k = k_0; k < k_0 + n_k; k += f.group) {
        const uint8_t *unit, *group = pkv_group_at(f, panel, k, &unit);
        __m256 scale[4], minimum[4], w[4];
        pkv_scales_avx2(dtype, unit, group, scale, minimum);
        for (int64_t i = 0; i < f.group; i++, out += PKV_PANEL) {
            pkv_values_row_avx2(dtype, group, i, scale, minimum, w);
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) _mm256_storeu_ps(out + 8 * c, w[c]);
        }
    }
}

static void pkv_expand_avx2(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, float *out) {
#define PKV_CASE(D)                                                                                            \
    case D:                                                                                                    \
        pkv_expand_of_avx2(D, panel, k_0, n_k, out);                                                           \
        return;
    switch (dtype) { PKV_EACH_DTYPE(PKV_CASE) }
#undef PKV_CASE
}

/* Bytes that a tile of codes asks for ahead. */
#define PKV_CODED_AHEAD_AVX2 2048

/* Matmul of R rows straight from codes into y [R, 32], for constant dtype and R: each value is made once, in
 * registers. */
PKV_INLINE_AVX2 void pkv_coded_of_avx2(int dtype, const int R, const float *x, int64_t ldx, const uint8_t *panel,
                                       int64_t n_k, float *y, int64_t ldy) {
    pkv_form f = pkv_form_of(dtype);
    __m256 acc[2][4];
    _Pragma("GCC unroll 4") for (int m = 0; m < R; m++)
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) acc[m][c] = _mm256_setzero_ps();
    for (int64_t k = 0; k < n_k; k += f.group) {
        const uint8_t *unit, *group = pkv_group_at(f, panel, k, &unit);
        __m256 scale[4], minimum[4], w[4];
        pkv_scales_avx2(dtype, unit, group, scale, minimum);
        for (int64_t i = 0; i < f.group; i++) {
            _mm_prefetch((const char *)(group + i * pkv_low_nbytes(f) + PKV_CODED_AHEAD_AVX2), _MM_HINT_T1);
            if (R > 1) /* scales stay in memory: in registers they push accumulators out (Q4_1: 119 ns, so 70) */
                __asm__("" : "+m"(scale), "+m"(minimum));
            pkv_values_row_avx2(dtype, group, i, scale, minimum, w);
            _Pragma("GCC unroll 4") for (int m = 0; m < R; m++) {
                __m256 x_k = _mm256_broadcast_ss(x + m * ldx + k + i);
                _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) acc[m][c] = _mm256_fmadd_ps(x_k, w[c], acc[m][c]);
            }
        }
    }
    _Pragma("GCC unroll 4") for (int m = 0; m < R; m++)
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) _mm256_storeu_ps(y + m * ldy + 8 * c, acc[m][c]);
}

#define PKV_CODED_ROWS_AVX2(R)                                                                                 \
    static void pkv_coded_##R##rows_avx2(int dtype, const float *x, int64_t ldx, const uint8_t *panel,         \
                                         int64_t n_k, float *y, int64_t ldy) {                                 \
        switch (dtype) { PKV_EACH_DTYPE(PKV_CASE_##R) }                                                        \
    }
#define PKV_CASE_R(D, R)                                                                                       \
    case D:                                                                                                    \
        pkv_coded_of_avx2(D, R, x, ldx, panel, n_k, y, ldy);                                                   \
        return;
#define PKV_CASE_1(D) PKV_CASE_R(D, 1)
#define PKV_CASE_2(D) PKV_CASE_R(D, 2)
PKV_CODED_ROWS_AVX2(1)
PKV_CODED_ROWS_AVX2(2)
#undef PKV_CASE_1
#undef PKV_CASE_2
#undef PKV_CASE_R
#undef PKV_CODED_ROWS_AVX2

/* Values of k that three or four rows expand at once: 8 KiB, well inside L1. */
#define PKV_CODED_K_AVX2 64

static void pkv_matmul_coded_avx2(int dtype, const float *x, int64_t ldx, int64_t n_rows, const uint8_t *panel,
                                  int64_t n_k, float *y, int64_t ldy, int64_t n_cols) {
    float wide[4][PKV_PANEL], *to = n_cols == PKV_PANEL ? y : wide[0];
    int64_t ld = n_cols == PKV_PANEL ? ldy : PKV_PANEL;
    if (n_rows == 1)
        pkv_coded_1rows_avx2(dtype, x, ldx, panel, n_k, to, ld);
    else if (n_rows == 2)
        pkv_coded_2rows_avx2(dtype, x, ldx, panel, n_k, to, ld);
    else { /* 12 accumulators and the values leave registers too few: 120 ns for 1k values, this way 91, measured */
        float values[PKV_CODED_K_AVX2 * PKV_PANEL] __attribute__((aligned(64)));
        for (int64_t k = 0; k < n_k; k += PKV_CODED_K_AVX2) {
            int64_t n = pkv_min(PKV_CODED_K_AVX2, n_k - k);
            pkv_expand_avx2(dtype, panel, k, n, values);
            pkv_matmul_f32_avx2(x + k, ldx, n_rows, values, n, to, ld, PKV_PANEL, k > 0,
                                (pkv_ahead){NULL, 0});
        }
    }
    for (int64_t m = 0; to != y && m < n_rows; m++)
        memcpy(y + m * ldy, wide[m], (size_t)n_cols * sizeof *y);
}

/* float32 to bfloat16 bits, in the low halves of the lanes. */
static inline __m256i pkv_f32_to_bf16_avx2(__m256 x) {
    __m256i bits = _mm256_castps_si256(x), upper = _mm256_srli_epi32(bits, 16);
    __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), _mm256_and_si256(upper, _mm256_set1_epi32(1)));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
    return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

/* Round one group of 32 to q8_0. */
static inline void pkv_kv_round_q8_avx2(const float *x, uint8_t *values, uint8_t *scale) {
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256 part[4];
    __m256i most = _mm256_setzero_si256();
    for (int c = 0; c < 4; c++) {
        part[c] = _mm256_loadu_ps(x + 8 * c);
        most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_castps_si256(part[c]), magnitude));
    }
    __m128i most_4 = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    most_4 = _mm_max_epi32(most_4, _mm_shuffle_epi32(most_4, _MM_SHUFFLE(1, 0, 3, 2)));
    most_4 = _mm_max_epi32(most_4, _mm_shuffle_epi32(most_4, _MM_SHUFFLE(2, 3, 0, 1)));
    float factor;
    uint16_t bits = pkv_kv_scale(_mm_cvtss_f32(_mm_castsi128_ps(most_4)), &factor);
    memcpy(scale, &bits, sizeof bits);
    __m256i code[4];
    for (int c = 0; c < 4; c++) {
        __m256 shifted = _mm256_fmadd_ps(part[c], _mm256_set1_ps(factor), _mm256_set1_ps(PKV_ROUND_TO_INT));
        code[c] = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(PKV_ROUND_TO_INT_BITS));
    }
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
    bytes = _mm256_max_epi8(bytes, _mm256_set1_epi8(-127));
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); /* quarters in order */
    _mm256_storeu_si256((__m256i *)values, factor == 0.0f ? _mm256_setzero_si256() : bytes);
}

static void pkv_kv_round_avx2(int dtype, const float *x, int64_t n, uint8_t *values, uint8_t *scales) {
    int64_t i = 0;
    if (dtype == PKV_Q8_0) {
        for (; i < n; i += PKV_KV_GROUP)
            pkv_kv_round_q8_avx2(x + i, values + i, scales + i / PKV_KV_GROUP * 2);
        return;
    }
    for (; dtype == PKV_F16 && i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(values + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
    for (; dtype == PKV_BF16 && i + 8 <= n; i += 8) {
        __m256i bits = pkv_f32_to_bf16_avx2(_mm256_loadu_ps(x + i));
        _mm_storeu_si128((__m128i *)(values + 2 * i),
                         _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
    }
    pkv_kv_round_scalar(dtype, x + i, n - i, values + i * pkv_kv_value_nbytes(dtype), scales);
}

/* Values [i, i + 8) of a stored row as float32, for a constant dtype; scale: of their group. */
PKV_INLINE_AVX2 __m256 pkv_kv_load_avx2(int dtype, const uint8_t *values, int64_t i,
                                                                     __m256 scale) {
    if (dtype == PKV_F16)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(values + 2 * i)));
    if (dtype == PKV_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(values + 2 * i))), 16));
    return _mm256_mul_ps(
        scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(values + i)))));
}

PKV_INLINE_AVX2 void pkv_kv_expand_of_avx2(int dtype, const pkv_kv_rows *rows,
                                                                        int64_t n_rows, int64_t n, float *out,
                                                                        const uint8_t *next, int64_t next_stride) {
    int64_t value_nbytes = pkv_kv_value_nbytes(dtype);
    for (int64_t t = 0; t < n_rows; t++, out += n) {
        const uint8_t *values = rows->values + t * rows->values_stride;
        int64_t i = 0;
        for (int64_t at = 0; at < n * value_nbytes; at += 64)
            _mm_prefetch((const char *)next + t * next_stride + at, _MM_HINT_T1);
        __m256 scale = _mm256_setzero_ps();
        for (; i + 32 <= n; i += 32) {
            if (dtype == PKV_Q8_0) {
                const uint8_t *of_group = rows->scales + t * rows->scales_stride + i / PKV_KV_GROUP * 2;
                scale = _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(pkv_load_u16(of_group))));
            }
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
                _mm256_storeu_ps(out + i + 8 * c, pkv_kv_load_avx2(dtype, values, i + 8 * c, scale));
        }
        pkv_kv_rows rest = {values + i * value_nbytes, NULL, 0, 0};
        if (i < n) /* of floats: groups are whole */
            pkv_kv_expand_scalar(dtype, &rest, 1, n - i, out + i, next, next_stride);
    }
}

static void pkv_kv_expand_avx2(int dtype, const pkv_kv_rows *rows, int64_t n_rows, int64_t n, float *out,
                               const uint8_t *next, int64_t next_stride) {
    if (dtype == PKV_F16)
        pkv_kv_expand_of_avx2(PKV_F16, rows, n_rows, n, out, next, next_stride);
    else if (dtype == PKV_BF16)
        pkv_kv_expand_of_avx2(PKV_BF16, rows, n_rows, n, out, next, next_stride);
    else if (dtype == PKV_Q8_0)
        pkv_kv_expand_of_avx2(PKV_Q8_0, rows, n_rows, n, out, next, next_stride);
    else
        pkv_kv_expand_scalar(dtype, rows, n_rows, n, out, next, next_stride);
}

/* Eight sets of lanes, already summed 8 apart, to their eight tree sums in order: 4, 2 and 1 apart for all at
 * once, halving the registers each time (a transpose and add; each blend keeps what the shuffle brings across). */
static inline __m256 pkv_tree_sum_8_avx2(const __m256 *lanes) {
    __m256 by_4[4], by_2[2];
    for (int t = 0; t < 4; t++) /* 4 apart: key t in the low half, t + 4 in the high */
        by_4[t] = _mm256_add_ps(_mm256_blend_ps(lanes[t], lanes[t + 4], 0xF0),
                                _mm256_permute2f128_ps(lanes[t], lanes[t + 4], 0x21));
    for (int t = 0; t < 2; t++) /* 2 apart: then t, t + 2 | t + 4, t + 6, two lanes each */
        by_2[t] = _mm256_add_ps(_mm256_blend_ps(by_4[t], by_4[t + 2], 0xCC),
                                _mm256_shuffle_ps(by_4[t], by_4[t + 2], _MM_SHUFFLE(1, 0, 3, 2)));
    return _mm256_add_ps(_mm256_blend_ps(by_2[0], by_2[1], 0xAA), /* 1 apart: 0 1 2 3 | 4 5 6 7 */
                         _mm256_permute_ps(_mm256_shuffle_ps(by_2[0], by_2[1], _MM_SHUFFLE(2, 0, 3, 1)),
                                           _MM_SHUFFLE(3, 1, 2, 0)));
}

/* Dot products of H heads with 8 keys, lanes already summed 8 apart: sums [H][8]. N keys at once are H * N * 2
 * chains; the queries' and keys' elements are loaded once for all of them. Meanwhile memory is asked for `next`. */
#define PKV_SCORES_HEADS(H, N)                                                                                 \
    static inline void pkv_scores_##H##heads_avx2(const float *q, const float *const *k, int64_t head_dim,     \
                                                  const float *next, int64_t ldnext, __m256 (*sums)[8]) {      \
        for (int t = 0; t < 8; t += N) {                                                                       \
            __m256 low[H][N], high[H][N];                                                                      \
            _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                                \
                _Pragma("GCC unroll 4") for (int j = 0; j < N; j++)                                            \
                    low[h][j] = high[h][j] = _mm256_setzero_ps();                                              \
            int64_t d = 0;                                                                                     \
            for (; d + 16 <= head_dim; d += 16) {                                                              \
                _Pragma("GCC unroll 4") for (int j = 0; j < N; j++)                                            \
                    _mm_prefetch((const char *)(next + (t + j) * ldnext + d), _MM_HINT_T1);                    \
                __m256 part[N];                                                                                \
                _Pragma("GCC unroll 4") for (int j = 0; j < N; j++) part[j] = _mm256_loadu_ps(k[t + j] + d);   \
                _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) {                                          \
                    __m256 q_d = _mm256_loadu_ps(q + h * head_dim + d);                                        \
                    __asm__("" : "+x"(q_d));                                                                   \
                    _Pragma("GCC unroll 4") for (int j = 0; j < N; j++)                                        \
                        low[h][j] = _mm256_fmadd_ps(q_d, part[j], low[h][j]);                                  \
                }                                                                                              \
                _Pragma("GCC unroll 4") for (int j = 0; j < N; j++)                                            \
                    part[j] = _mm256_loadu_ps(k[t + j] + d + 8);                                               \
                _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) {                                          \
                    __m256 q_d = _mm256_loadu_ps(q + h * head_dim + d + 8);                                    \
                    __asm__("" : "+x"(q_d));                                                                   \
                    _Pragma("GCC unroll 4") for (int j = 0; j < N; j++)                                        \
                        high[h][j] = _mm256_fmadd_ps(q_d, part[j], high[h][j]);                                \
                }                                                                                              \
            }                                                                                                  \
            if (d < head_dim) {                                                                                \
                __m256i tail = pkv_tail_mask_avx2(head_dim - d), beyond = pkv_tail_mask_avx2(head_dim - d - 8);\
                _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                            \
                    _Pragma("GCC unroll 4") for (int j = 0; j < N; j++) {                                      \
                        const float *q_d = q + h * head_dim + d, *k_d = k[t + j] + d;                          \
                        low[h][j] = pkv_mask_fmadd_avx2(q_d, k_d, low[h][j], tail);                            \
                        high[h][j] = pkv_mask_fmadd_avx2(q_d + 8, k_d + 8, high[h][j], beyond);                \
                    }                                                                                          \
            }                                                                                                  \
            _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                                \
                _Pragma("GCC unroll 4") for (int j = 0; j < N; j++)                                            \
                    sums[h][t + j] = _mm256_add_ps(low[h][j], high[h][j]);                                     \
        }                                                                                                      \
    }
PKV_SCORES_HEADS(1, 4)
PKV_SCORES_HEADS(2, 2)
PKV_SCORES_HEADS(3, 2)
#undef PKV_SCORES_HEADS

static void pkv_attn_scores_f32_avx2(const float *q, int64_t n_q, const float *k, int64_t ldk, int64_t n_k,
                                     int64_t head_dim, float scale, float *s, int64_t lds, const float *next,
                                     int64_t ldnext) {
    for (int64_t t0 = 0; t0 < n_k; t0 += 8) {
        const float *keys[8]; /* past the last key it stands in, and its dots are dropped */
        for (int64_t t = 0; t < 8; t++)
            keys[t] = k + pkv_min(t0 + t, n_k - 1) * ldk;
        for (int64_t h = 0, heads; h < n_q; h += heads) {
            __m256 sums[3][8];
            heads = pkv_min(n_q - h, 3);
            if (heads == 3)
                pkv_scores_3heads_avx2(q + h * head_dim, keys, head_dim, next + t0 * ldnext, ldnext, sums);
            else if (heads == 2)
                pkv_scores_2heads_avx2(q + h * head_dim, keys, head_dim, next + t0 * ldnext, ldnext, sums);
            else
                pkv_scores_1heads_avx2(q + h * head_dim, keys, head_dim, next + t0 * ldnext, ldnext, sums);
            for (int64_t i = 0; i < heads; i++) {
                __m256 scores = _mm256_mul_ps(pkv_tree_sum_8_avx2(sums[i]), _mm256_set1_ps(scale));
                if (n_k - t0 >= 8)
                    _mm256_storeu_ps(s + (h + i) * lds + t0, scores);
                else
                    _mm256_maskstore_ps(s + (h + i) * lds + t0, pkv_tail_mask_avx2(n_k - t0), scores);
            }
        }
    }
}

/* H heads at once over 32 elements of the head: H * 4 chains, the values loaded once for all of them. */
#define PKV_VALUES_HEADS(H)                                                                                    \
    static inline void pkv_values_##H##heads_avx2(const float *p, int64_t ldp, const float *v, int64_t ldv,    \
                                                  int64_t n_k, int64_t head_dim, float *acc,                   \
                                                  const float *next, int64_t ldnext) {                         \
        __m256 a[H][4], p_t[H];                                                                                \
        _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                                    \
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)                                                \
                a[h][c] = _mm256_loadu_ps(acc + h * head_dim + 8 * c);                                         \
        for (int64_t t = 0; t < n_k; t++) {                                                                    \
            _mm_prefetch((const char *)(next + t * ldnext + 16 * 0), _MM_HINT_T1);                             \
            _mm_prefetch((const char *)(next + t * ldnext + 16 * 1), _MM_HINT_T1);                             \
            _Pragma("GCC unroll 4") for (int h = 0; h < H; h++) p_t[h] = _mm256_broadcast_ss(p + h * ldp + t); \
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {                                              \
                __m256 v_c = _mm256_loadu_ps(v + t * ldv + 8 * c);                                             \
                _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                            \
                    a[h][c] = _mm256_fmadd_ps(p_t[h], v_c, a[h][c]);                                           \
            }                                                                                                  \
        }                                                                                                      \
        _Pragma("GCC unroll 4") for (int h = 0; h < H; h++)                                                    \
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)                                                \
                _mm256_storeu_ps(acc + h * head_dim + 8 * c, a[h][c]);                                         \
    }
PKV_VALUES_HEADS(1)
PKV_VALUES_HEADS(2)
PKV_VALUES_HEADS(3)
#undef PKV_VALUES_HEADS

static void pkv_attn_values_f32_avx2(const float *p, int64_t ldp, int64_t n_q, const float *v, int64_t ldv,
                                     int64_t n_k, int64_t head_dim, float *acc, const float *next,
                                     int64_t ldnext) {
    int64_t d = 0;
    for (; d + 32 <= head_dim; d += 32) {
        int64_t h = 0;
        for (; n_q - h >= 3; h += 3)
            pkv_values_3heads_avx2(p + h * ldp, ldp, v + d, ldv, n_k, head_dim, acc + h * head_dim + d, next + d,
                                   ldnext);
        if (n_q - h == 2)
            pkv_values_2heads_avx2(p + h * ldp, ldp, v + d, ldv, n_k, head_dim, acc + h * head_dim + d, next + d,
                                   ldnext);
        else if (n_q - h == 1)
            pkv_values_1heads_avx2(p + h * ldp, ldp, v + d, ldv, n_k, head_dim, acc + h * head_dim + d, next + d,
                                   ldnext);
    }
    for (; d < head_dim; d += 8) {
        __m256i live = pkv_tail_mask_avx2(head_dim - d < 8 ? head_dim - d : 8);
        for (int64_t h = 0; h < n_q; h++) {
            __m256 a = _mm256_maskload_ps(acc + h * head_dim + d, live);
            for (int64_t t = 0; t < n_k; t++)
                a = _mm256_fmadd_ps(_mm256_broadcast_ss(p + h * ldp + t), _mm256_maskload_ps(v + t * ldv + d, live), a);
            _mm256_maskstore_ps(acc + h * head_dim + d, live, a);
        }
    }
}

static void pkv_attn_merge_f32_avx2(float *max, float *sum, float *acc, float max_c, float sum_c,
                                    const float *acc_c, int64_t head_dim) {
    float top = max_c > *max ? max_c : *max;
    __m256 weights = pkv_exp_avx2(_mm256_blend_ps(_mm256_set1_ps(max_c - top), _mm256_set1_ps(*max - top), 1));
    __m256 keep = _mm256_broadcastss_ps(_mm256_castps256_ps128(weights)); /* lane 0 */
    __m256 take = _mm256_broadcastss_ps(_mm256_extractf128_ps(weights, 1));
    *max = top;
    *sum = fmaf(*sum, _mm256_cvtss_f32(keep), sum_c * _mm256_cvtss_f32(take));
    int64_t d = 0;
    for (; d + 8 <= head_dim; d += 8) {
        __m256 later = _mm256_mul_ps(_mm256_loadu_ps(acc_c + d), take);
        _mm256_storeu_ps(acc + d, _mm256_fmadd_ps(_mm256_loadu_ps(acc + d), keep, later));
    }
    if (d < head_dim) {
        __m256i tail = pkv_tail_mask_avx2(head_dim - d);
        __m256 later = _mm256_mul_ps(_mm256_maskload_ps(acc_c + d, tail), take);
        _mm256_maskstore_ps(acc + d, tail, _mm256_fmadd_ps(_mm256_maskload_ps(acc + d, tail), keep, later));
    }
}

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
