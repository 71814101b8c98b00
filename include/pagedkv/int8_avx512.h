/* compute="int8" with AVX-512: VNNI's dpbusd where the CPU has it, and the AVX2 file elsewhere. dpbusd adds four
 * products of unsigned weight codes and signed activations to an int32, exactly; the accumulators start at minus the
 * bias times the sum of the activations. A slice is the AVX2 file's, with Q8_0 as one unsigned byte, 128 added. */
#ifndef PAGEDKV_INT8_AVX512_H
#define PAGEDKV_INT8_AVX512_H

#include "int8_avx2.h"
#include "kernels_avx512.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512vnni,fma,avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vnni,fma,avx2")
#endif

/* Rows of a tile: integer and float sums of seven rows fill 28 of the 32 registers over a whole slice. */
#define PKV_INT8_ROWS_AVX512 7

/* R rows over a slice; group, has_min and R are constants where this is inlined. bias_bits: the logarithm of the bias,
 * where there is no minimum. live: which of the 32 columns are there. */
PKV_INLINE_AVX512 void pkv_int8_rows_of_avx512(const int group, const int has_min, int bias_bits, const int R,
                                               const pkv_int8_group *x, int64_t ldx, const uint8_t *slice, int64_t n_k,
                                               float *y, int64_t ldy, const __mmask16 *live, int accumulate) {
    const int64_t next_row = ldx * (int64_t)sizeof *x;
    const __m128i shift = _mm_cvtsi32_si128(bias_bits);
    __m512 sum[PKV_INT8_ROWS_AVX512][2];
    _Pragma("GCC unroll 8") for (int m = 0; m < R; m++)
        _Pragma("GCC unroll 2") for (int c = 0; c < 2; c++)
            sum[m][c] = accumulate ? _mm512_maskz_loadu_ps(live[c], y + m * ldy + 16 * c) : _mm512_setzero_ps();
    for (int64_t k = 0; k < n_k; k += group) {
        const float *scale = (const float *)(const void *)slice;
        const uint8_t *codes = slice + 4 * PKV_PANEL * (1 + has_min);
        const pkv_int8_group *g = x + k / PKV_INT8_GROUP;
        const uint8_t *x_code = (const uint8_t *)g->code + k % PKV_INT8_GROUP;
        __m512i acc[PKV_INT8_ROWS_AVX512][2];
        _Pragma("GCC unroll 8") for (int m = 0; m < R; m++) {
            const pkv_int8_group *g_m = g + m * ldx;
            acc[m][0] = _mm512_setzero_si512();
            if (!has_min) {
                int32_t x_sum = group == PKV_INT8_GROUP   ? g_m->sum
                                : k % PKV_INT8_GROUP == 0 ? g_m->first_sum
                                                          : g_m->sum - g_m->first_sum;
                acc[m][0] = _mm512_sub_epi32(acc[m][0], _mm512_sll_epi32(_mm512_set1_epi32(x_sum), shift));
            }
            acc[m][1] = acc[m][0];
        }
        _Pragma("GCC unroll 8") for (int i = 0; i < group; i += 4) {
            __m512i w_0 = _mm512_load_si512(codes + i * PKV_PANEL);
            __m512i w_1 = _mm512_load_si512(codes + (i + 2) * PKV_PANEL);
            _Pragma("GCC unroll 8") for (int m = 0; m < R; m++) {
                __m512i x_4 = _mm512_set1_epi32((int32_t)pkv_load_u32(x_code + i + m * next_row));
                acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], w_0, x_4);
                acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], w_1, x_4);
            }
        }
        _Pragma("GCC unroll 8") for (int m = 0; m < R; m++) {
            const pkv_int8_group *g_m = g + m * ldx;
            __m512 scale_x = _mm512_set1_ps(g_m->scale), scaled_sum = _mm512_set1_ps(g_m->scaled_sum);
            _Pragma("GCC unroll 2") for (int c = 0; c < 2; c++) {
                __m512 factor = _mm512_mul_ps(_mm512_load_ps(scale + 16 * c), scale_x);
                sum[m][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][c]), factor, sum[m][c]);
                if (has_min)
                    sum[m][c] = _mm512_fmadd_ps(_mm512_load_ps(scale + PKV_PANEL + 16 * c), scaled_sum, sum[m][c]);
            }
        }
        slice += 4 * PKV_PANEL * (1 + has_min) + group * PKV_PANEL;
    }
    _Pragma("GCC unroll 8") for (int m = 0; m < R; m++)
        _Pragma("GCC unroll 2") for (int c = 0; c < 2; c++)
            _mm512_mask_storeu_ps(y + m * ldy + 16 * c, live[c], sum[m][c]);
}

#define PKV_INT8_ROWS(R)                                                                                       \
    static void pkv_int8_##R##rows_avx512(pkv_form f, const pkv_int8_group *x, int64_t ldx,                    \
                                          const uint8_t *slice, int64_t n_k, float *y, int64_t ldy,            \
                                          const __mmask16 *live, int accumulate) {                             \
        int bias_bits = f.bias ? 31 - __builtin_clz((unsigned)f.bias) : 7;                                     \
        if (f.has_min)                                                                                         \
            pkv_int8_rows_of_avx512(32, 1, 0, R, x, ldx, slice, n_k, y, ldy, live, accumulate);                \
        else if (f.group == 32)                                                                                \
            pkv_int8_rows_of_avx512(32, 0, bias_bits, R, x, ldx, slice, n_k, y, ldy, live, accumulate);        \
        else                                                                                                   \
            pkv_int8_rows_of_avx512(16, 0, bias_bits, R, x, ldx, slice, n_k, y, ldy, live, accumulate);        \
    }
PKV_INT8_ROWS(1)
PKV_INT8_ROWS(2)
PKV_INT8_ROWS(3)
PKV_INT8_ROWS(4)
PKV_INT8_ROWS(5)
PKV_INT8_ROWS(6)
PKV_INT8_ROWS(7)
#undef PKV_INT8_ROWS

static void pkv_matmul_int8_vnni(int dtype, const pkv_int8_group *x, int64_t ldx, int64_t n_rows, const uint8_t *slice,
                                 int64_t n_k, float *y, int64_t ldy, int64_t n_cols, int accumulate) {
    typedef void (*rows_fn)(pkv_form, const pkv_int8_group *, int64_t, const uint8_t *, int64_t, float *, int64_t,
                            const __mmask16 *, int);
    static const rows_fn by_rows[PKV_INT8_ROWS_AVX512] = {
        pkv_int8_1rows_avx512, pkv_int8_2rows_avx512, pkv_int8_3rows_avx512, pkv_int8_4rows_avx512,
        pkv_int8_5rows_avx512, pkv_int8_6rows_avx512, pkv_int8_7rows_avx512};
    int64_t n_tiles = (n_rows + PKV_INT8_ROWS_AVX512 - 1) / PKV_INT8_ROWS_AVX512; /* equal ones */
    __mmask16 live[2] = {pkv_live_avx512(n_cols), pkv_live_avx512(n_cols - 16)};
    for (int64_t tile = 0; tile < n_tiles; tile++) {
        int64_t m = n_rows * tile / n_tiles, rows = n_rows * (tile + 1) / n_tiles - m;
        by_rows[rows - 1](pkv_form_of(dtype), x + m * ldx, ldx, slice, n_k, y + m * ldy, ldy, live, accumulate);
    }
}

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

/* dpbusd; asked of the CPU's description that pkv_isa_runs has filled in. */
static inline int pkv_cpu_has_vnni(void) { return __builtin_cpu_supports("avx512vnni"); }

static void pkv_quantize_row_avx512(const float *x, int64_t n, pkv_int8_group *groups) {
    pkv_quantize_row_avx2(x, n, groups);
}

static void pkv_expand_int8_avx512(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, uint8_t *slice) {
    if (pkv_cpu_has_vnni())
        pkv_expand_uint8_avx2(dtype, panel, k_0, n_k, slice);
    else
        pkv_expand_int8_avx2(dtype, panel, k_0, n_k, slice);
}

static void pkv_matmul_int8_avx512(int dtype, const pkv_int8_group *x, int64_t ldx, int64_t n_rows,
                                   const uint8_t *slice, int64_t n_k, float *y, int64_t ldy, int64_t n_cols,
                                   int accumulate) {
    if (pkv_cpu_has_vnni())
        pkv_matmul_int8_vnni(dtype, x, ldx, n_rows, slice, n_k, y, ldy, n_cols, accumulate);
    else
        pkv_matmul_int8_avx2(dtype, x, ldx, n_rows, slice, n_k, y, ldy, n_cols, accumulate);
}

#endif
