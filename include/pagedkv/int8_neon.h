/* compute="int8" with NEON. A slice holds, for each group, the signed codes of four values of k side by side,
 * [k / 4, 32, 4], the bias taken off. Two products fit an int16 (128 * 127 * 2 = 32512); neighbours are then added
 * into int32. */
#ifndef PAGEDKV_INT8_NEON_H
#define PAGEDKV_INT8_NEON_H

#include "int8_scalar.h"
#include "kernels_neon.h"

static void pkv_quantize_row_neon(const float *x, int64_t n, pkv_int8_group *groups) {
    for (pkv_int8_group *g = groups; g < groups + n / PKV_INT8_GROUP; g++, x += PKV_INT8_GROUP) {
        float32x4_t x_c[8];
        uint32x4_t most_of = vdupq_n_u32(0);
        int16x8_t code[4];
        int32x4_t halves[2];
        _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) {
            x_c[c] = vld1q_f32(x + 4 * c);
            most_of = vmaxq_u32(most_of, vandq_u32(vreinterpretq_u32_f32(x_c[c]), vdupq_n_u32(INT32_MAX)));
        }
        float most = pkv_bits_to_f32((int32_t)vmaxvq_u32(most_of));
        if (!(most >= PKV_INT8_LEAST && most < INFINITY)) {
            pkv_quantize_row_scalar(x, PKV_INT8_GROUP, g);
            continue;
        }
        float inverse = 127.0f / most;
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
            int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(x_c[2 * c], inverse)); /* to nearest, ties to even */
            int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(x_c[2 * c + 1], inverse));
            code[c] = vcombine_s16(vmovn_s32(low), vmovn_s32(high));
            vst1_s8(g->code + 8 * c, vmovn_s16(code[c]));
        }
        halves[0] = vpaddlq_s16(vaddq_s16(code[0], code[1]));
        halves[1] = vpaddlq_s16(vaddq_s16(code[2], code[3]));
        g->first_sum = vaddvq_s32(halves[0]);
        g->sum = g->first_sum + vaddvq_s32(halves[1]);
        g->scale = most / 127.0f;
        g->scaled_sum = g->scale * (float)g->sum;
    }
}

PKV_INLINE_NEON void pkv_expand_int8_of_neon(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k,
                                             uint8_t *slice) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t k = k_0; k < k_0 + n_k; k += f.group) {
        const uint8_t *unit, *group = pkv_group_at(f, panel, k, &unit);
        float32x4_t scale[8], minimum[8];
        pkv_scales_neon(dtype, unit, group, scale, minimum);
        float *to = (float *)(void *)slice;
        _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) {
            vst1q_f32(to + 4 * c, scale[c]);
            if (f.has_min)
                vst1q_f32(to + PKV_PANEL + 4 * c, minimum[c]);
        }
        slice += pkv_int8_scales_nbytes(f);
        const uint8_t *low = group + pkv_scales_nbytes(f), *high = low + f.group * pkv_low_nbytes(f);
        for (int i = 0; i < f.group; i += 4, low += 4 * pkv_low_nbytes(f), high += 4 * pkv_high_nbytes(f)) {
            uint8x16x4_t half[2]; /* four rows of 16 columns, stored column by column */
            _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
                uint8x16_t bytes[2];
                pkv_code_bytes_neon(dtype, low + j * pkv_low_nbytes(f), high + j * pkv_high_nbytes(f), bytes);
                half[0].val[j] = bytes[0];
                half[1].val[j] = bytes[1];
            }
            vst4q_u8(slice, half[0]);
            vst4q_u8(slice + 2 * PKV_PANEL, half[1]);
            slice += 4 * PKV_PANEL;
        }
    }
}

static void pkv_expand_int8_neon(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, uint8_t *slice) {
#define PKV_CASE(D)                                                                                            \
    case D:                                                                                                    \
        pkv_expand_int8_of_neon(D, panel, k_0, n_k, slice);                                                    \
        return;
    switch (dtype) { PKV_EACH_CODED_DTYPE(PKV_CASE) }
#undef PKV_CASE
}

/* sums [32] of one row over a slice; group and has_min are constants where this is inlined. 16 accumulators, each of
 * two columns' even and odd pairs of k. */
PKV_INLINE_NEON void pkv_int8_row_of_neon(const int group, const int has_min, const pkv_int8_group *g,
                                          const uint8_t *slice, int64_t n_k, float *sums) {
    for (int64_t k = 0; k < n_k; k += group) {
        const float *scale = (const float *)(const void *)slice;
        const int8_t *codes = (const int8_t *)slice + 4 * PKV_PANEL * (1 + has_min);
        const int8_t *x_code = g[k / PKV_INT8_GROUP].code + k % PKV_INT8_GROUP, *end = x_code + group;
        int32x4_t acc[16];
        _Pragma("GCC unroll 16") for (int c = 0; c < 16; c++) acc[c] = vdupq_n_s32(0);
        for (; x_code < end; x_code += 8, codes += 8 * PKV_PANEL) {
            int8x8_t x_0 = vreinterpret_s8_u32(vdup_n_u32(pkv_load_u32((const uint8_t *)x_code)));
            int8x8_t x_1 = vreinterpret_s8_u32(vdup_n_u32(pkv_load_u32((const uint8_t *)x_code + 4)));
            _Pragma("GCC unroll 16") for (int c = 0; c < 16; c++) {
                int16x8_t twos = vmull_s8(vld1_s8(codes + 8 * c), x_0);
                acc[c] = vpadalq_s16(acc[c], vmlal_s8(twos, vld1_s8(codes + 4 * PKV_PANEL + 8 * c), x_1));
            }
        }
        float scale_x = g[k / PKV_INT8_GROUP].scale, scaled_sum = g[k / PKV_INT8_GROUP].scaled_sum;
        _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) {
            float32x4_t dots = vcvtq_f32_s32(vpaddq_s32(acc[2 * c], acc[2 * c + 1]));
            float32x4_t y = vfmaq_f32(vld1q_f32(sums + 4 * c), dots, vmulq_n_f32(vld1q_f32(scale + 4 * c), scale_x));
            if (has_min)
                y = vfmaq_n_f32(y, vld1q_f32(scale + PKV_PANEL + 4 * c), scaled_sum);
            vst1q_f32(sums + 4 * c, y);
        }
        slice += 4 * PKV_PANEL * (1 + has_min) + group * PKV_PANEL;
    }
}

static void pkv_matmul_int8_neon(int dtype, const pkv_int8_group *x, int64_t ldx, int64_t n_rows, const uint8_t *slice,
                                 int64_t n_k, float *y, int64_t ldy, int64_t n_cols, int accumulate) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t m = 0; m < n_rows; m++) {
        float sums[PKV_PANEL] = {0};
        if (accumulate)
            pkv_copy_cols(sums, y + m * ldy, n_cols);
        if (f.has_min)
            pkv_int8_row_of_neon(32, 1, x + m * ldx, slice, n_k, sums);
        else if (f.group == 32)
            pkv_int8_row_of_neon(32, 0, x + m * ldx, slice, n_k, sums);
        else
            pkv_int8_row_of_neon(16, 0, x + m * ldx, slice, n_k, sums);
        pkv_copy_cols(y + m * ldy, sums, n_cols);
    }
}

#endif
