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

/* Rows of a tile: 16 accumulators hide the latency, and the rest of the 32 registers stays free. */
#define PKV_INT8_ROWS_AVX512 8

/* sums [R, 32] of R rows over a slice; group, has_min and R are constants where this is inlined. bias_bits: the
 * logarithm of the bias, where there is no minimum. */
PKV_INLINE_AVX512 void pkv_int8_rows_of_avx512(const int group, const int has_min, int bias_bits, const int R,
                                               const pkv_int8_group *x, int64_t ldx, const uint8_t *slice, int64_t n_k,
                                               float *sums) {
    const int64_t next_row = ldx * (int64_t)sizeof *x;
    const __m128i shift = _mm_cvtsi32_si128(bias_bits);
    for (int64_t k = 0; k < n_k; k += group) {
        const float *scale = (const float *)(const void *)slice;
        const uint8_t *codes = slice + 4 * PKV_PANEL * (1 + has_min);
        const pkv_int8_group *g = x + k / PKV_INT8_GROUP;
        const uint8_t *x_code = (const uint8_t *)g->code + k % PKV_INT8_GROUP, *end = x_code + group;
        __m512i acc[PKV_INT8_ROWS_AVX512][2];
        _Pragma("GCC unroll 8") for (int m = 0; m < R; m++) {
            const pkv_int8_group *g_m = g + m * ldx;
            acc[m][0] = _mm512_setzero_si512();
            if (!has_min) {
                int32_t sum = group == PKV_INT8_GROUP       ? g_m->sum
                              : k % PKV_INT8_GROUP == 0 ? g_m->first_sum
                                                        : g_m->sum - g_m->first_sum;
                acc[m][0] = _mm512_sub_epi32(acc[m][0], _mm512_sll_epi32(_mm512_set1_epi32(sum), shift));
            }
            acc[m][1] = acc[m][0];
        }
        _Pragma("GCC unroll 1") for (; x_code < end; x_code += 4, codes += 4 * PKV_PANEL) {
            __m512i w_0 = _mm512_load_si512(codes), w_1 = _mm512_load_si512(codes + 2 * PKV_PANEL);
            _Pragma("GCC unroll 8") for (int m = 0; m < R; m++) {
                __m512i x_4 = _mm512_set1_epi32((int32_t)pkv_load_u32(x_code + m * next_row));
                acc[m][0] = _mm512_dpbusd_epi32(acc[m][0], w_0, x_4);
                acc[m][1] = _mm512_dpbusd_epi32(acc[m][1], w_1, x_4);
            }
        }
        _Pragma("GCC unroll 8") for (int m = 0; m < R; m++) {
            const pkv_int8_group *g_m = g + m * ldx;
            __m512 scale_x = _mm512_set1_ps(g_m->scale), scaled_sum = _mm512_set1_ps(g_m->scaled_sum);
            _Pragma("GCC unroll 2") for (int c = 0; c < 2; c++) {
                float *to = sums + m * PKV_PANEL + 16 * c;
                __m512 factor = _mm512_mul_ps(_mm512_load_ps(scale + 16 * c), scale_x);
                __m512 y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[m][c]), factor, _mm512_load_ps(to));
                if (has_min)
                    y = _mm512_fmadd_ps(_mm512_load_ps(scale + PKV_PANEL + 16 * c), scaled_sum, y);
                _mm512_store_ps(to, y);
            }
        }
        slice += 4 * PKV_PANEL * (1 + has_min) + group * PKV_PANEL;
    }
}

#define PKV_INT8_ROWS(R)                                                                                       \
    static void pkv_int8_##R##rows_avx512(pkv_form f, const pkv_int8_group *x, int64_t ldx,                    \
                                          const uint8_t *slice, int64_t n_k, float *sums) {                    \
        int bias_bits = f.bias ? 31 - __builtin_clz((unsigned)f.bias) : 7;                                     \
        if (f.has_min)                                                                                         \
            pkv_int8_rows_of_avx512(32, 1, 0, R, x, ldx, slice, n_k, sums);                                    \
        else if (f.group == 32)                                                                                \
            pkv_int8_rows_of_avx512(32, 0, bias_bits, R, x, ldx, slice, n_k, sums);                            \
        else                                                                                                   \
            pkv_int8_rows_of_avx512(16, 0, bias_bits, R, x, ldx, slice, n_k, sums);                            \
    }
PKV_INT8_ROWS(1)
PKV_INT8_ROWS(2)
PKV_INT8_ROWS(3)
PKV_INT8_ROWS(4)
PKV_INT8_ROWS(5)
PKV_INT8_ROWS(6)
PKV_INT8_ROWS(7)
PKV_INT8_ROWS(8)
#undef PKV_INT8_ROWS

static void pkv_matmul_int8_vnni(int dtype, const pkv_int8_group *x, int64_t ldx, int64_t n_rows, const uint8_t *slice,
                                 int64_t n_k, float *y, int64_t ldy, int64_t n_cols, int accumulate) {
    typedef void (*rows_fn)(pkv_form, const pkv_int8_group *, int64_t, const uint8_t *, int64_t, float *);
    static const rows_fn by_rows[PKV_INT8_ROWS_AVX512] = {
        pkv_int8_1rows_avx512, pkv_int8_2rows_avx512, pkv_int8_3rows_avx512, pkv_int8_4rows_avx512,
        pkv_int8_5rows_avx512, pkv_int8_6rows_avx512, pkv_int8_7rows_avx512, pkv_int8_8rows_avx512};
    float sums[PKV_INT8_ROWS_AVX512][PKV_PANEL] __attribute__((aligned(64)));
    int64_t n_tiles = (n_rows + PKV_INT8_ROWS_AVX512 - 1) / PKV_INT8_ROWS_AVX512; /* equal ones */
    for (int64_t tile = 0; tile < n_tiles; tile++) {
        int64_t m = n_rows * tile / n_tiles, rows = n_rows * (tile + 1) / n_tiles - m;
        memset(sums, 0, (size_t)rows * sizeof *sums);
        for (int64_t r = 0; accumulate && r < rows; r++)
            pkv_copy_cols(sums[r], y + (m + r) * ldy, n_cols);
        by_rows[rows - 1](pkv_form_of(dtype), x + m * ldx, ldx, slice, n_k, sums[0]);
        for (int64_t r = 0; r < rows; r++)
            pkv_copy_cols(y + (m + r) * ldy, sums[r], n_cols);
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
