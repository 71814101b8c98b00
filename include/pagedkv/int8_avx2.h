/* compute="int8" with AVX2. A slice holds, for each group, the codes of four values of k side by side, [k / 4, 32, 4]:
 * maddubs multiplies unsigned weight codes by signed activations and adds neighbours in int16, which saturates.
 * Codes of 4, 5 and 6 bits leave room for 8, 4 and 2 such sums (15 * 127 * 2 * 8 = 30480); the bias, times the sum
 * of the activations, is taken off in int32. Codes of 8 bits lie as magnitude and as themselves: the activation
 * takes the weight's sign, and 128 * 127 * 2 = 32512 fits. */
#ifndef PAGEDKV_INT8_AVX2_H
#define PAGEDKV_INT8_AVX2_H

#include "int8_scalar.h"
#include "kernels_avx2.h"

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

static void pkv_quantize_row_avx2(const float *x, int64_t n, pkv_int8_group *groups) {
    const __m256i magnitude = _mm256_set1_epi32(INT32_MAX), ones_i8 = _mm256_set1_epi8(1);
    const __m256i ones_i16 = _mm256_set1_epi16(1), in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (pkv_int8_group *g = groups; g < groups + n / PKV_INT8_GROUP; g++, x += PKV_INT8_GROUP) {
        __m256 x_c[4];
        __m256i code[4], most_of[4];
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
            x_c[c] = _mm256_loadu_ps(x + 8 * c);
            most_of[c] = _mm256_and_si256(_mm256_castps_si256(x_c[c]), magnitude);
        }
        __m256i of_8 = _mm256_max_epi32(_mm256_max_epi32(most_of[0], most_of[1]),
                                        _mm256_max_epi32(most_of[2], most_of[3]));
        __m128i of_4 = _mm_max_epi32(_mm256_castsi256_si128(of_8), _mm256_extracti128_si256(of_8, 1));
        of_4 = _mm_max_epi32(of_4, _mm_shuffle_epi32(of_4, _MM_SHUFFLE(1, 0, 3, 2)));
        of_4 = _mm_max_epi32(of_4, _mm_shuffle_epi32(of_4, _MM_SHUFFLE(2, 3, 0, 1)));
        float most = pkv_bits_to_f32(_mm_cvtsi128_si32(of_4));
        if (!(most >= PKV_INT8_LEAST && most < INFINITY)) {
            pkv_quantize_row_scalar(x, PKV_INT8_GROUP, g);
            continue;
        }
        __m256 inverse = _mm256_set1_ps(127.0f / most);
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
            code[c] = _mm256_cvtps_epi32(_mm256_mul_ps(x_c[c], inverse)); /* to nearest, ties to even: fpenv.h */
        __m256i codes = _mm256_packs_epi16(_mm256_packs_epi32(code[0], code[1]), _mm256_packs_epi32(code[2], code[3]));
        codes = _mm256_permutevar8x32_epi32(codes, in_order);
        _mm256_storeu_si256((__m256i *)(void *)g->code, codes);
        __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(ones_i8, codes), ones_i16);
        fours = _mm256_hadd_epi32(fours, fours);
        fours = _mm256_hadd_epi32(fours, fours);
        g->first_sum = _mm_cvtsi128_si32(_mm256_castsi256_si128(fours));
        g->sum = g->first_sum + _mm_cvtsi128_si32(_mm256_extracti128_si256(fours, 1));
        g->scale = most / 127.0f;
        g->scaled_sum = g->scale * (float)g->sum;
    }
}

/* One row of 32 codes, with the bias still in them (Q8_0: signed), in the order of the columns. */
PKV_INLINE_AVX2 __m256i pkv_code_row_avx2(int dtype, const uint8_t *low, const uint8_t *high) {
    pkv_form f = pkv_form_of(dtype);
    if (f.low_bits == 8)
        return _mm256_loadu_si256((const __m256i *)low);
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low));
    __m256i code = _mm256_and_si256(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    if (f.high_bits == 1) { /* a column's byte of the bits, its bit of that byte */
        const __m256i place = _mm256_set1_epi64x((int64_t)0x8040201008040201);
        const __m256i from = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)pkv_load_u32(high)), from);
        __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, place), place);
        return _mm256_or_si256(code, _mm256_and_si256(is_set, _mm256_set1_epi8(16)));
    }
    if (f.high_bits == 2) { /* each 8 columns take the same 8 bytes, shifted their own way to bit 4 */
        __m256i upper = _mm256_set1_epi64x((int64_t)pkv_load_u64(high));
        upper = _mm256_srlv_epi64(_mm256_sllv_epi64(upper, _mm256_setr_epi64x(4, 2, 0, 0)),
                                  _mm256_setr_epi64x(0, 0, 0, 2));
        return _mm256_or_si256(code, _mm256_and_si256(upper, _mm256_set1_epi8(0x30)));
    }
    return code;
}

/* Bytes of one code in a slice: magnitude and sign apart where it has eight bits. */
#define PKV_INT8_WIDTH_AVX2(f) ((f).low_bits == 8 ? 2 : 1)

/* Scales of a group and its codes by fours of k, for constant dtype; returns the end. With is_unsigned codes of 8
 * bits lie as one byte, 128 added. */
PKV_INLINE_AVX2 uint8_t *pkv_expand_int8_group_avx2(int dtype, int is_unsigned, const uint8_t *unit,
                                                    const uint8_t *group, uint8_t *slice) {
    pkv_form f = pkv_form_of(dtype);
    __m256 scale[4], minimum[4];
    pkv_scales_avx2(dtype, unit, group, scale, minimum);
    _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
        float *to = (float *)(void *)slice + 8 * c;
        _mm256_store_ps(to, _mm256_mul_ps(scale[c], _mm256_set1_ps(0x1p24f)));
        if (f.has_min)
            _mm256_store_ps(to + PKV_PANEL, minimum[c]);
    }
    slice += pkv_int8_scales_nbytes(f);
    const uint8_t *low = group + pkv_scales_nbytes(f), *high = low + f.group * pkv_low_nbytes(f);
    for (int i = 0; i < f.group; i += 4, low += 4 * pkv_low_nbytes(f), high += 4 * pkv_high_nbytes(f)) {
        __m256i row[4], pair[4], four[4], quad[4];
        _mm_prefetch((const char *)(low + PKV_CODED_AHEAD_AVX2), _MM_HINT_T1);
        if (f.low_bits == 8)
            _mm_prefetch((const char *)(low + PKV_CODED_AHEAD_AVX2 + 64), _MM_HINT_T1);
        _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++)
            row[j] = pkv_code_row_avx2(dtype, low + j * pkv_low_nbytes(f), high + j * pkv_high_nbytes(f));
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
            pair[j] = _mm256_unpacklo_epi8(row[2 * j], row[2 * j + 1]);
            pair[j + 2] = _mm256_unpackhi_epi8(row[2 * j], row[2 * j + 1]);
        }
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) { /* columns 8 j + 0 to 3, and 16 beyond them */
            four[2 * j] = _mm256_unpacklo_epi16(pair[2 * j], pair[2 * j + 1]);
            four[2 * j + 1] = _mm256_unpackhi_epi16(pair[2 * j], pair[2 * j + 1]);
        }
        _Pragma("GCC unroll 2") for (int j = 0; j < 2; j++) {
            quad[j] = _mm256_permute2x128_si256(four[2 * j], four[2 * j + 1], 0x20);
            quad[j + 2] = _mm256_permute2x128_si256(four[2 * j], four[2 * j + 1], 0x31);
        }
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
            __m256i *to = (__m256i *)(void *)slice;
            if (f.low_bits == 8 && is_unsigned) {
                _mm256_store_si256(to + c, _mm256_xor_si256(quad[c], _mm256_set1_epi8(INT8_MIN)));
            } else if (f.low_bits == 8) {
                _mm256_store_si256(to + 2 * c, _mm256_abs_epi8(quad[c]));
                _mm256_store_si256(to + 2 * c + 1, quad[c]);
            } else {
                _mm256_store_si256(to + c, quad[c]);
            }
        }
        slice += 4 * PKV_PANEL * (is_unsigned ? 1 : PKV_INT8_WIDTH_AVX2(f));
    }
    return slice;
}

PKV_INLINE_AVX2 void pkv_expand_int8_of_avx2(int dtype, int is_unsigned, const uint8_t *panel, int64_t k_0, int64_t n_k,
                                             uint8_t *slice) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t k = k_0; k < k_0 + n_k; k += f.group) {
        const uint8_t *unit, *group = pkv_group_at(f, panel, k, &unit);
        slice = pkv_expand_int8_group_avx2(dtype, is_unsigned, unit, group, slice);
    }
}

#define PKV_EXPAND_INT8(NAME, IS_UNSIGNED)                                                                     \
    static void pkv_expand_##NAME##_avx2(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k,            \
                                         uint8_t *slice) {                                                     \
        switch (dtype) { PKV_EACH_CODED_DTYPE(PKV_CASE_##IS_UNSIGNED) }                                        \
    }
#define PKV_CASE_OF(D, IS_UNSIGNED)                                                                            \
    case D:                                                                                                    \
        pkv_expand_int8_of_avx2(D, IS_UNSIGNED, panel, k_0, n_k, slice);                                       \
        return;
#define PKV_CASE_0(D) PKV_CASE_OF(D, 0)
#define PKV_CASE_1(D) PKV_CASE_OF(D, 1)
PKV_EXPAND_INT8(int8, 0)
PKV_EXPAND_INT8(uint8, 1) /* for VNNI */
#undef PKV_CASE_0
#undef PKV_CASE_1
#undef PKV_CASE_OF
#undef PKV_EXPAND_INT8

/* Rows of a tile: 8 accumulators, the activations of two rows, and what a product needs. */
#define PKV_INT8_ROWS_AVX2 2

/* sums [R, 32] of R rows over a slice, for constant dtype and R. */
PKV_INLINE_AVX2 void pkv_int8_rows_of_avx2(int dtype, const int R, const pkv_int8_group *x, int64_t ldx,
                                           const uint8_t *slice, int64_t n_k, float *sums) {
    pkv_form f = pkv_form_of(dtype);
    const int width = PKV_INT8_WIDTH_AVX2(f), run_len = f.high_bits == 0 ? 8 : f.high_bits == 1 ? 4 : 2;
    const int n_runs = f.group / 4 / run_len, bias_bits = f.bias == 8 ? 3 : f.bias == 16 ? 4 : 5;
    const int64_t next_row = ldx * (int64_t)sizeof *x;
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t k = 0; k < n_k; k += f.group) {
        const float *scale = (const float *)(const void *)slice;
        const __m256i *codes = (const __m256i *)(const void *)(slice + pkv_int8_scales_nbytes(f));
        const pkv_int8_group *g = x + k / PKV_INT8_GROUP;
        const uint8_t *x_code = (const uint8_t *)g->code + k % PKV_INT8_GROUP;
        __m256i acc[2][4], run_acc[2][4];
        _Pragma("GCC unroll 4") for (int run = 0; run < n_runs; run++) {
            _Pragma("GCC unroll 2") for (int m = 0; m < R; m++)
                _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) run_acc[m][c] = _mm256_setzero_si256();
            /* Kept a loop: unrolled, the compiler has more in flight than there are registers. */
            const uint8_t *end = x_code + 4 * run_len;
            _Pragma("GCC unroll 1") for (; x_code < end; x_code += 4, codes += 4 * width) {
                __m256i x_4[2];
                _Pragma("GCC unroll 2") for (int m = 0; m < R; m++)
                    x_4[m] = _mm256_set1_epi32((int32_t)pkv_load_u32(x_code + m * next_row));
                _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
                    __m256i w = _mm256_load_si256(codes + c * width);
                    _Pragma("GCC unroll 2") for (int m = 0; m < R; m++) {
                        if (f.low_bits == 8) {
                            __m256i signed_x = _mm256_sign_epi8(x_4[m], _mm256_load_si256(codes + c * width + 1));
                            __m256i fours = _mm256_madd_epi16(_mm256_maddubs_epi16(w, signed_x), ones);
                            run_acc[m][c] = _mm256_add_epi32(run_acc[m][c], fours);
                        } else {
                            run_acc[m][c] = _mm256_add_epi16(run_acc[m][c], _mm256_maddubs_epi16(w, x_4[m]));
                        }
                        __asm__("" : "+x"(run_acc[m][c]));
                    }
                }
            }
            _Pragma("GCC unroll 2") for (int m = 0; m < R; m++)
                _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
                    if (f.low_bits != 8)
                        run_acc[m][c] = _mm256_madd_epi16(run_acc[m][c], ones);
                    acc[m][c] = run == 0 ? run_acc[m][c] : _mm256_add_epi32(acc[m][c], run_acc[m][c]);
                }
        }
        _Pragma("GCC unroll 2") for (int m = 0; m < R; m++, g += ldx) {
            __m256 scale_x = _mm256_broadcast_ss(&g->scale), scaled_sum = _mm256_broadcast_ss(&g->scaled_sum);
            int32_t sum = f.group == PKV_INT8_GROUP   ? g->sum
                          : k % PKV_INT8_GROUP == 0 ? g->first_sum
                                                    : g->sum - g->first_sum;
            __m256i bias = _mm256_slli_epi32(_mm256_set1_epi32(sum), bias_bits);
            _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
                float *to = sums + m * PKV_PANEL + 8 * c;
                if (f.bias)
                    acc[m][c] = _mm256_sub_epi32(acc[m][c], bias);
                __m256 factor = _mm256_mul_ps(_mm256_load_ps(scale + 8 * c), scale_x);
                __m256 y = _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[m][c]), factor, _mm256_load_ps(to));
                if (f.has_min)
                    y = _mm256_fmadd_ps(_mm256_load_ps(scale + PKV_PANEL + 8 * c), scaled_sum, y);
                _mm256_store_ps(to, y);
            }
        }
        slice += pkv_int8_scales_nbytes(f) + f.group * PKV_PANEL * width;
    }
}

#define PKV_INT8_ROWS(R)                                                                                       \
    static void pkv_int8_##R##rows_avx2(int dtype, const pkv_int8_group *x, int64_t ldx, const uint8_t *slice, \
                                        int64_t n_k, float *sums) {                                            \
        switch (dtype) { PKV_EACH_CODED_DTYPE(PKV_CASE_##R) }                                                  \
    }
#define PKV_CASE_R(D, R)                                                                                       \
    case D:                                                                                                    \
        pkv_int8_rows_of_avx2(D, R, x, ldx, slice, n_k, sums);                                                 \
        return;
#define PKV_CASE_1(D) PKV_CASE_R(D, 1)
#define PKV_CASE_2(D) PKV_CASE_R(D, 2)
PKV_INT8_ROWS(1)
PKV_INT8_ROWS(2)
#undef PKV_CASE_1
#undef PKV_CASE_2
#undef PKV_CASE_R
#undef PKV_INT8_ROWS

static void pkv_matmul_int8_avx2(int dtype, const pkv_int8_group *x, int64_t ldx, int64_t n_rows, const uint8_t *slice,
                                 int64_t n_k, float *y, int64_t ldy, int64_t n_cols, int accumulate) {
    for (int64_t m = 0; m < n_rows; m += PKV_INT8_ROWS_AVX2) {
        float sums[PKV_INT8_ROWS_AVX2][PKV_PANEL] __attribute__((aligned(32)));
        int64_t rows = pkv_min(PKV_INT8_ROWS_AVX2, n_rows - m);
        memset(sums, 0, sizeof sums);
        for (int64_t r = 0; accumulate && r < rows; r++)
            pkv_copy_cols(sums[r], y + (m + r) * ldy, n_cols);
        if (rows == 1)
            pkv_int8_1rows_avx2(dtype, x + m * ldx, ldx, slice, n_k, sums[0]);
        else
            pkv_int8_2rows_avx2(dtype, x + m * ldx, ldx, slice, n_k, sums[0]);
        for (int64_t r = 0; r < rows; r++)
            pkv_copy_cols(y + (m + r) * ldy, sums[r], n_cols);
    }
}

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
