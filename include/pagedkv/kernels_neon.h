/* NEON: the scalar file's order in 4 lanes. Four registers are one set of 16 canonical lanes.
 * Every AArch64 has the FMA, so fmaf is one instruction and what is left over after whole registers takes the
 * scalar file's own expressions: nothing beyond an array is read, and no lane needs a mask. */
#ifndef PAGEDKV_KERNELS_NEON_H
#define PAGEDKV_KERNELS_NEON_H

#include <arm_neon.h>

#include "kernels_scalar.h"

/* The fixed tree: 8 apart and 4 apart here, 2 and 1 inside the register that is left. */
static inline float32x4_t pkv_sum_to_4_neon(const float32x4_t *lanes_f32x4) {
    return vaddq_f32(vaddq_f32(lanes_f32x4[0], lanes_f32x4[2]), vaddq_f32(lanes_f32x4[1], lanes_f32x4[3]));
}

static inline float pkv_tree_sum_neon(const float32x4_t *lanes_f32x4) {
    float32x4_t sum_f32x4 = pkv_sum_to_4_neon(lanes_f32x4);
    float32x2_t sum_f32x2 = vadd_f32(vget_low_f32(sum_f32x4), vget_high_f32(sum_f32x4));
    return vget_lane_f32(sum_f32x2, 0) + vget_lane_f32(sum_f32x2, 1);
}

/* The last n < 16 products of a dot product, added to lanes 0 to n - 1. */
static inline void pkv_dot_tail_neon(const float *a, const float *b, int64_t n, float32x4_t *lanes_f32x4) {
    if (n >= 4)
        lanes_f32x4[0] = vfmaq_f32(lanes_f32x4[0], vld1q_f32(a), vld1q_f32(b));
    if (n >= 8)
        lanes_f32x4[1] = vfmaq_f32(lanes_f32x4[1], vld1q_f32(a + 4), vld1q_f32(b + 4));
    if (n >= 12)
        lanes_f32x4[2] = vfmaq_f32(lanes_f32x4[2], vld1q_f32(a + 8), vld1q_f32(b + 8));
    int64_t whole = n & ~(int64_t)3;
    if (whole < n) {
        float lanes[PKV_LANES];
        for (int c = 0; c < 4; c++)
            vst1q_f32(lanes + 4 * c, lanes_f32x4[c]);
        for (int64_t i = whole; i < n; i++)
            lanes[i] = fmaf(a[i], b[i], lanes[i]);
        for (int c = 0; c < 4; c++)
            lanes_f32x4[c] = vld1q_f32(lanes + 4 * c);
    }
}

static inline float pkv_dot_f32_neon(const float *a, const float *b, int64_t n) {
    float32x4_t lanes_f32x4[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
            lanes_f32x4[c] = vfmaq_f32(lanes_f32x4[c], vld1q_f32(a + i + 4 * c), vld1q_f32(b + i + 4 * c));
    pkv_dot_tail_neon(a + i, b + i, n - i, lanes_f32x4);
    return pkv_tree_sum_neon(lanes_f32x4);
}

static inline float32x4_t pkv_exp_neon(float32x4_t x_f32x4) {
    const float32x4_t low = vdupq_n_f32(PKV_EXP_LO), high = vdupq_n_f32(PKV_EXP_HI);
    const float32x4_t round = vdupq_n_f32(PKV_EXP_ROUND);
    /* Compare and select, not vmaxq: the scalar file's clamp lets a NaN through and so does this. */
    float32x4_t x = vbslq_f32(vcltq_f32(x_f32x4, low), low, x_f32x4);
    x = vbslq_f32(vcgtq_f32(x, high), high, x);
    float32x4_t shifted = vfmaq_f32(round, x, vdupq_n_f32(PKV_EXP_LOG2E));
    float32x4_t n = vsubq_f32(shifted, round);
    float32x4_t r = vfmaq_f32(x, n, vdupq_n_f32(-PKV_EXP_LN2_HI));
    r = vfmaq_f32(r, n, vdupq_n_f32(-PKV_EXP_LN2_LO));
    float32x4_t p = vfmaq_f32(vdupq_n_f32(PKV_EXP_P4), vdupq_n_f32(PKV_EXP_P5), r);
    p = vfmaq_f32(vdupq_n_f32(PKV_EXP_P3), p, r);
    p = vfmaq_f32(vdupq_n_f32(PKV_EXP_P2), p, r);
    p = vfmaq_f32(vdupq_n_f32(PKV_EXP_P1), p, r);
    p = vfmaq_f32(vdupq_n_f32(PKV_EXP_P0), p, r);
    float32x4_t y = vaddq_f32(vfmaq_f32(r, p, vmulq_f32(r, r)), vdupq_n_f32(1.0f));
    /* The scales of a NaN are arbitrary, but y is then a NaN too and stays one. */
    int32x4_t n_int = vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(PKV_EXP_ROUND_BITS));
    int32x4_t n_half = vshrq_n_s32(n_int, 1), bias = vdupq_n_s32(127);
    int32x4_t scale_1 = vshlq_n_s32(vaddq_s32(n_half, bias), 23);
    int32x4_t scale_2 = vshlq_n_s32(vaddq_s32(vsubq_s32(n_int, n_half), bias), 23);
    return vmulq_f32(vmulq_f32(y, vreinterpretq_f32_s32(scale_1)), vreinterpretq_f32_s32(scale_2));
}

static void pkv_exp_row_f32_neon(const float *x, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, pkv_exp_neon(vld1q_f32(x + i)));
    for (; i < n; i++)
        y[i] = pkv_exp_f32_scalar(x[i]);
}

static void pkv_softmax_chunk_f32_neon(float *s, int64_t n, float *max, float *sum) {
    float32x4_t max_f32x4 = vdupq_n_f32(-INFINITY);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t x = vld1q_f32(s + i);
        max_f32x4 = vbslq_f32(vcgtq_f32(x, max_f32x4), x, max_f32x4);
    }
    /* A maximum has no rounding: any tree gives it. Lanes never hold a NaN (a comparison with one is false). */
    float lane_max[4], top = pkv_max_f32_scalar(s + i, n - i);
    vst1q_f32(lane_max, max_f32x4);
    for (int c = 0; c < 4; c++)
        top = lane_max[c] > top ? lane_max[c] : top;
    *max = top;
    const float32x4_t top_f32x4 = vdupq_n_f32(top);
    float32x4_t lanes_f32x4[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    for (i = 0; i + 16 <= n; i += 16)
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
            float32x4_t e = pkv_exp_neon(vsubq_f32(vld1q_f32(s + i + 4 * c), top_f32x4));
            vst1q_f32(s + i + 4 * c, e);
            lanes_f32x4[c] = vaddq_f32(lanes_f32x4[c], e);
        }
    float lanes[PKV_LANES];
    for (int c = 0; c < 4; c++)
        vst1q_f32(lanes + 4 * c, lanes_f32x4[c]);
    for (int64_t first = i; i < n; i++) {
        s[i] = pkv_exp_f32_scalar(s[i] - top);
        lanes[i - first] = lanes[i - first] + s[i];
    }
    *sum = pkv_tree_sum_scalar(lanes);
}

static void pkv_attn_finish_f32_neon(const float *acc, float sum, float *out, int64_t head_dim) {
    const float32x4_t sum_f32x4 = vdupq_n_f32(sum);
    int64_t d = 0;
    for (; d + 4 <= head_dim; d += 4)
        vst1q_f32(out + d, vdivq_f32(vld1q_f32(acc + d), sum_f32x4));
    for (; d < head_dim; d++)
        out[d] = acc[d] / sum;
}

static void pkv_softmax_f32_neon(const float *x, float *y, int64_t n) {
    float max, sum;
    if (y != x)
        memcpy(y, x, (size_t)n * sizeof *y);
    pkv_softmax_chunk_f32_neon(y, n, &max, &sum);
    pkv_attn_finish_f32_neon(y, sum, y, n);
}

static void pkv_rmsnorm_f32_neon(const float *x, const float *gamma, float eps, float *y, int64_t n) {
    float inverse = 1.0f / sqrtf(pkv_dot_f32_neon(x, x, n) / (float)n + eps);
    const float32x4_t inverse_f32x4 = vdupq_n_f32(inverse);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, vmulq_f32(vmulq_f32(vld1q_f32(x + i), inverse_f32x4), vld1q_f32(gamma + i)));
    for (; i < n; i++)
        y[i] = x[i] * inverse * gamma[i];
}

static void pkv_rope_f32_neon(float *head, const float *cos, const float *sin, int64_t half) {
    int64_t i = 0;
    for (; i + 4 <= half; i += 4) {
        float32x4_t a = vld1q_f32(head + i), b = vld1q_f32(head + i + half);
        float32x4_t c = vld1q_f32(cos + i), s = vld1q_f32(sin + i);
        vst1q_f32(head + i, vfmaq_f32(vnegq_f32(vmulq_f32(b, s)), a, c));
        vst1q_f32(head + i + half, vfmaq_f32(vmulq_f32(a, s), b, c));
    }
    for (; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = fmaf(a, cos[i], -(b * sin[i]));
        head[i + half] = fmaf(b, cos[i], a * sin[i]);
    }
}

static void pkv_swiglu_f32_neon(const float *gate, const float *up, float *y, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        float32x4_t g = vld1q_f32(gate + i);
        float32x4_t below = vaddq_f32(vdupq_n_f32(1.0f), pkv_exp_neon(vnegq_f32(g)));
        vst1q_f32(y + i, vmulq_f32(vdivq_f32(g, below), vld1q_f32(up + i)));
    }
    for (; i < n; i++)
        y[i] = gate[i] / (1.0f + pkv_exp_f32_scalar(-gate[i])) * up[i];
}

static void pkv_add_f32_neon(float *y, const float *x, int64_t n) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4)
        vst1q_f32(y + i, vaddq_f32(vld1q_f32(y + i), vld1q_f32(x + i)));
    for (; i < n; i++)
        y[i] = y[i] + x[i];
}

/* R rows of one panel: R * 8 accumulators stay in registers over all of k. 3 rows fill 24 of the 32 registers
 * and leave three for the broadcasts and five for the panel. The loops must unroll at every optimisation level:
 * an accumulator with a variable index lives in memory. */
#define PKV_MAX_ROWS_NEON 3
#define PKV_MATMUL_ROWS(R)                                                                                     \
    static void pkv_matmul_##R##rows_neon(const float *x, int64_t ldx, const float *panel, int64_t n_k,        \
                                          float *y, int64_t ldy, int accumulate) {                             \
        float32x4_t acc[R][8], x_k[R];                                                                         \
        _Pragma("GCC unroll 8") for (int m = 0; m < R; m++)                                                    \
            _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++)                                                \
                acc[m][c] = accumulate ? vld1q_f32(y + m * ldy + 4 * c) : vdupq_n_f32(0.0f);                   \
        for (int64_t k = 0; k < n_k; k++) {                                                                    \
            _Pragma("GCC unroll 8") for (int m = 0; m < R; m++) x_k[m] = vld1q_dup_f32(x + m * ldx + k);       \
            _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) {                                              \
                float32x4_t w_c = vld1q_f32(panel + k * PKV_PANEL + 4 * c);                                    \
                _Pragma("GCC unroll 8") for (int m = 0; m < R; m++)                                            \
                    acc[m][c] = vfmaq_f32(acc[m][c], x_k[m], w_c);                                             \
            }                                                                                                  \
        }                                                                                                      \
        _Pragma("GCC unroll 8") for (int m = 0; m < R; m++)                                                    \
            _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++)                                                \
                vst1q_f32(y + m * ldy + 4 * c, acc[m][c]);                                                     \
    }
PKV_MATMUL_ROWS(1)
PKV_MATMUL_ROWS(2)
PKV_MATMUL_ROWS(3)
#undef PKV_MATMUL_ROWS

static void pkv_matmul_f32_neon(const float *x, int64_t ldx, int64_t n_rows, const float *panel, int64_t n_k,
                                float *y, int64_t ldy, int64_t n_cols, int accumulate, pkv_ahead ahead) {
    (void)ahead;
    typedef void (*rows_fn)(const float *, int64_t, const float *, int64_t, float *, int64_t, int);
    static const rows_fn by_rows[PKV_MAX_ROWS_NEON] = {pkv_matmul_1rows_neon, pkv_matmul_2rows_neon,
                                                       pkv_matmul_3rows_neon};
    /* Equal tiles: 4 rows run as 2 and 2, since a tile of one row has too few chains for four FMA pipes. */
    int64_t n_tiles = (n_rows + PKV_MAX_ROWS_NEON - 1) / PKV_MAX_ROWS_NEON;
    for (int64_t tile = 0; tile < n_tiles; tile++) {
        int64_t m = n_rows * tile / n_tiles, rows = n_rows * (tile + 1) / n_tiles - m;
        const float *x_m = x + m * ldx;
        float *y_m = y + m * ldy;
        if (n_cols == PKV_PANEL) {
            by_rows[rows - 1](x_m, ldx, panel, n_k, y_m, ldy, accumulate);
            continue;
        }
        /* A narrow last panel goes through a copy of full width. */
        float wide[PKV_MAX_ROWS_NEON][PKV_PANEL] = {{0}};
        for (int64_t r = 0; accumulate && r < rows; r++)
            memcpy(wide[r], y_m + r * ldy, (size_t)n_cols * sizeof *y);
        by_rows[rows - 1](x_m, ldx, panel, n_k, wide[0], PKV_PANEL, accumulate);
        for (int64_t r = 0; r < rows; r++)
            memcpy(y_m + r * ldy, wide[r], (size_t)n_cols * sizeof *y);
    }
}

/* ---- Coded weights: eight registers of a row of 32 become the float32 values they stand for ---- */

#define PKV_INLINE_NEON static inline __attribute__((always_inline))

static inline float32x4_t pkv_load_f16_neon(const uint8_t *p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}

/* 16 bytes to 16 floats. */
PKV_INLINE_NEON void pkv_i8_to_f32_neon(int8x16_t bytes, float32x4_t *to) {
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    to[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    to[1] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(low)));
    to[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    to[3] = vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)));
}

/* Scales and minima of a group, eight registers each, zeros for the float types; dtype is a constant where this is
 * inlined. */
PKV_INLINE_NEON void pkv_scales_neon(int dtype, const uint8_t *unit, const uint8_t *group, float32x4_t *scale,
                                     float32x4_t *minimum) {
    pkv_form f = pkv_form_of(dtype);
    const uint8_t *halves = f.is_k ? unit : group;
    _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) {
        scale[c] = f.has_scale ? pkv_load_f16_neon(halves + 8 * c) : vdupq_n_f32(0.0f);
        minimum[c] = f.has_min ? pkv_load_f16_neon(halves + 2 * PKV_PANEL + 8 * c) : vdupq_n_f32(0.0f);
    }
    if (!f.is_k)
        return;
    float32x4_t factor[8]; /* those of Q4_K and Q5_K have six bits: the sign is no matter */
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
        pkv_i8_to_f32_neon(vreinterpretq_s8_u8(vld1q_u8(group + 16 * i)), factor + 4 * i);
    _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) scale[c] = vmulq_f32(scale[c], factor[c]);
    if (!f.has_min)
        return;
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
        pkv_i8_to_f32_neon(vreinterpretq_s8_u8(vld1q_u8(group + PKV_PANEL + 16 * i)), factor + 4 * i);
    _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) minimum[c] = vnegq_f32(vmulq_f32(minimum[c], factor[c]));
}

/* Codes of one row, less the bias, as int8: columns [0, 16) and [16, 32). */
PKV_INLINE_NEON void pkv_code_bytes_neon(int dtype, const uint8_t *low, const uint8_t *high, uint8x16_t *bytes) {
    pkv_form f = pkv_form_of(dtype);
    bytes[0] = vld1q_u8(low);
    if (f.low_bits == 8) {
        bytes[1] = vld1q_u8(low + 16);
    } else {
        bytes[1] = vshrq_n_u8(bytes[0], 4);
        bytes[0] = vandq_u8(bytes[0], vdupq_n_u8(15));
    }
    if (f.high_bits == 1) { /* a column's byte of the bits, its bit of that byte */
        const uint8x8_t place = vcreate_u8(0x8040201008040201u);
        _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {
            uint8x16_t spread = vcombine_u8(vld1_dup_u8(high + 2 * i), vld1_dup_u8(high + 2 * i + 1));
            uint8x16_t is_set = vtstq_u8(spread, vcombine_u8(place, place));
            bytes[i] = vorrq_u8(bytes[i], vandq_u8(is_set, vdupq_n_u8(16)));
        }
    } else if (f.high_bits == 2) { /* each 8 columns take the same 8 bytes, shifted their own way to bit 4 */
        const uint8x8_t bits = vld1_u8(high);
        const uint8x16_t fifth_sixth = vdupq_n_u8(0x30);
        uint8x16_t upper_0 = vcombine_u8(vshl_n_u8(bits, 4), vshl_n_u8(bits, 2));
        uint8x16_t upper_1 = vcombine_u8(bits, vshr_n_u8(bits, 2));
        bytes[0] = vorrq_u8(bytes[0], vandq_u8(upper_0, fifth_sixth));
        bytes[1] = vorrq_u8(bytes[1], vandq_u8(upper_1, fifth_sixth));
    }
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) bytes[i] = vsubq_u8(bytes[i], vdupq_n_u8((uint8_t)f.bias));
}

/* The same as floats. */
PKV_INLINE_NEON void pkv_codes_neon(int dtype, const uint8_t *low, const uint8_t *high, float32x4_t *code) {
    uint8x16_t bytes[2];
    pkv_code_bytes_neon(dtype, low, high, bytes);
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++)
        pkv_i8_to_f32_neon(vreinterpretq_s8_u8(bytes[i]), code + 4 * i);
}

/* Values of row i of a group. */
PKV_INLINE_NEON void pkv_values_row_neon(int dtype, const uint8_t *group, int64_t i, const float32x4_t *scale,
                                         const float32x4_t *minimum, float32x4_t *w) {
    pkv_form f = pkv_form_of(dtype);
    const uint8_t *low = group + pkv_scales_nbytes(f) + i * pkv_low_nbytes(f);
    const uint8_t *high = group + pkv_scales_nbytes(f) + f.group * pkv_low_nbytes(f) + i * pkv_high_nbytes(f);
    if (f.has_scale)
        pkv_codes_neon(dtype, low, high, w);
    _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) {
        if (f.has_scale)
            w[c] = f.has_min ? vfmaq_f32(minimum[c], scale[c], w[c]) : vmulq_f32(scale[c], w[c]);
        else if (dtype == PKV_F32)
            w[c] = vreinterpretq_f32_u8(vld1q_u8(low + 16 * c));
        else if (dtype == PKV_F16)
            w[c] = pkv_load_f16_neon(low + 8 * c);
        else
            w[c] = vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(low + 8 * c)), 16));
    }
}

/* Expand, for a constant dtype. */
PKV_INLINE_NEON void pkv_expand_of_neon(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, float *out) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t k = k_0; k < k_0 + n_k; k += f.group) {
        const uint8_t *unit, *group = pkv_group_at(f, panel, k, &unit);
        float32x4_t scale[8], minimum[8], w[8];
        pkv_scales_neon(dtype, unit, group, scale, minimum);
        for (int64_t i = 0; i < f.group; i++, out += PKV_PANEL) {
            pkv_values_row_neon(dtype, group, i, scale, minimum, w);
            _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) vst1q_f32(out + 4 * c, w[c]);
        }
    }
}

static void pkv_expand_neon(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, float *out) {
#define PKV_CASE(D)                                                                                            \
    case D:                                                                                                    \
        pkv_expand_of_neon(D, panel, k_0, n_k, out);                                                           \
        return;
    switch (dtype) { PKV_EACH_DTYPE(PKV_CASE) }
#undef PKV_CASE
}

/* Values of k that a coded matmul expands at once: 8 KiB, well inside L1. */
#define PKV_CODED_K_NEON 64

static void pkv_matmul_coded_neon(int dtype, const float *x, int64_t ldx, int64_t n_rows, const uint8_t *panel,
                                  int64_t n_k, float *y, int64_t ldy, int64_t n_cols) {
    float values[PKV_CODED_K_NEON * PKV_PANEL] __attribute__((aligned(64)));
    for (int64_t k = 0; k < n_k; k += PKV_CODED_K_NEON) {
        int64_t n = pkv_min(PKV_CODED_K_NEON, n_k - k);
        pkv_expand_neon(dtype, panel, k, n, values);
        pkv_matmul_f32_neon(x + k, ldx, n_rows, values, n, y, ldy, n_cols, k > 0, (pkv_ahead){NULL, 0});
    }
}

/* Round one group of 32 to q8_0. */
static inline void pkv_kv_round_q8_neon(const float *x, uint8_t *values, uint8_t *scale) {
    float32x4_t part[8];
    int32x4_t most = vdupq_n_s32(0);
    for (int c = 0; c < 8; c++) {
        part[c] = vld1q_f32(x + 4 * c);
        most = vmaxq_s32(most, vandq_s32(vreinterpretq_s32_f32(part[c]), vdupq_n_s32(0x7FFFFFFF)));
    }
    float factor;
    uint16_t bits = pkv_kv_scale(pkv_bits_to_f32(vmaxvq_s32(most)), &factor);
    memcpy(scale, &bits, sizeof bits);
    for (int c = 0; c < 8; c += 4) {
        int16x4_t code[4];
        for (int i = 0; i < 4; i++) {
            float32x4_t shifted = vfmaq_n_f32(vdupq_n_f32(PKV_ROUND_TO_INT), part[c + i], factor);
            code[i] = vqmovn_s32(vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(PKV_ROUND_TO_INT_BITS)));
        }
        int8x16_t bytes = vcombine_s8(vqmovn_s16(vcombine_s16(code[0], code[1])),
                                      vqmovn_s16(vcombine_s16(code[2], code[3])));
        bytes = factor == 0.0f ? vdupq_n_s8(0) : vmaxq_s8(bytes, vdupq_n_s8(-127));
        vst1q_u8(values + 4 * c, vreinterpretq_u8_s8(bytes));
    }
}

static void pkv_kv_round_neon(int dtype, const float *x, int64_t n, uint8_t *values, uint8_t *scales) {
    int64_t i = 0;
    if (dtype == PKV_Q8_0) {
        for (; i < n; i += PKV_KV_GROUP)
            pkv_kv_round_q8_neon(x + i, values + i, scales + i / PKV_KV_GROUP * 2);
        return;
    }
    for (; dtype == PKV_F16 && i + 4 <= n; i += 4)
        vst1_u8(values + 2 * i, vreinterpret_u8_f16(vcvt_f16_f32(vld1q_f32(x + i))));
    for (; dtype == PKV_BF16 && i + 4 <= n; i += 4) {
        float32x4_t part = vld1q_f32(x + i);
        uint32x4_t bits = vreinterpretq_u32_f32(part), upper = vshrq_n_u32(bits, 16);
        uint32x4_t half = vaddq_u32(vdupq_n_u32(0x7FFF), vandq_u32(upper, vdupq_n_u32(1)));
        uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, half), 16);
        upper = vbslq_u32(vceqq_f32(part, part), rounded, vorrq_u32(upper, vdupq_n_u32(0x40)));
        vst1_u8(values + 2 * i, vreinterpret_u8_u16(vmovn_u32(upper)));
    }
    pkv_kv_round_scalar(dtype, x + i, n - i, values + i * pkv_kv_value_nbytes(dtype), scales);
}

/* Values [i, i + 4) of a stored row as float32; scale: of their group. */
static inline float32x4_t pkv_kv_load_neon(int dtype, const uint8_t *values, int64_t i, float scale) {
    if (dtype == PKV_F16)
        return pkv_load_f16_neon(values + 2 * i);
    if (dtype == PKV_BF16)
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(values + 2 * i)), 16));
    int32_t four;
    memcpy(&four, values + i, sizeof four);
    int16x4_t wide = vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four))));
    return vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(wide)), scale);
}

static void pkv_kv_expand_neon(int dtype, const pkv_kv_rows *rows, int64_t n_rows, int64_t n, float *out,
                               const uint8_t *next, int64_t next_stride) {
    int64_t value_nbytes = pkv_kv_value_nbytes(dtype);
    for (int64_t t = 0; t < n_rows; t++, out += n) {
        const uint8_t *values = rows->values + t * rows->values_stride;
        int64_t i = 0;
        for (int64_t at = 0; at < n * value_nbytes; at += 64)
            __builtin_prefetch(next + t * next_stride + at, 0, 2);
        for (; dtype != PKV_F32 && i + 4 <= n; i += 4) {
            float scale = 0.0f;
            if (dtype == PKV_Q8_0)
                scale = pkv_f16_to_f32(
                    pkv_load_u16(rows->scales + t * rows->scales_stride + i / PKV_KV_GROUP * 2));
            vst1q_f32(out + i, pkv_kv_load_neon(dtype, values, i, scale));
        }
        pkv_kv_rows rest = {values + i * value_nbytes, NULL, 0, 0};
        if (i < n) /* of floats: groups are whole */
            pkv_kv_expand_scalar(dtype, &rest, 1, n - i, out + i, next, next_stride);
    }
}

/* Four keys against one query, whose elements are loaded once for all four; the four sets of lanes meet in one
 * transpose and add: 2 apart for two keys a register, then 1 apart for all four. */
static inline float32x4_t pkv_dot_4keys_neon(const float *q, const float *k, int64_t ldk, int64_t head_dim) {
    float32x4_t lanes[4][4];
    _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++)
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++)
            lanes[t][c] = vdupq_n_f32(0.0f);
    int64_t d = 0;
    for (; d + 16 <= head_dim; d += 16)
        _Pragma("GCC unroll 4") for (int c = 0; c < 4; c++) {
            float32x4_t q_c = vld1q_f32(q + d + 4 * c);
            _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++)
                lanes[t][c] = vfmaq_f32(lanes[t][c], q_c, vld1q_f32(k + t * ldk + d + 4 * c));
        }
    if (d < head_dim)
        _Pragma("GCC unroll 4") for (int t = 0; t < 4; t++)
            pkv_dot_tail_neon(q + d, k + t * ldk + d, head_dim - d, lanes[t]);
    float32x4_t k_0 = pkv_sum_to_4_neon(lanes[0]), k_1 = pkv_sum_to_4_neon(lanes[1]);
    float32x4_t k_2 = pkv_sum_to_4_neon(lanes[2]), k_3 = pkv_sum_to_4_neon(lanes[3]);
    float32x4_t k_01 = vaddq_f32(vcombine_f32(vget_low_f32(k_0), vget_low_f32(k_1)),
                                 vcombine_f32(vget_high_f32(k_0), vget_high_f32(k_1)));
    float32x4_t k_23 = vaddq_f32(vcombine_f32(vget_low_f32(k_2), vget_low_f32(k_3)),
                                 vcombine_f32(vget_high_f32(k_2), vget_high_f32(k_3)));
    return vpaddq_f32(k_01, k_23);
}

static void pkv_attn_scores_f32_neon(const float *q, int64_t n_q, const float *k, int64_t ldk, int64_t n_k,
                                     int64_t head_dim, float scale, float *s, int64_t lds, const float *next,
                                     int64_t ldnext) {
    int64_t t = 0;
    for (; t + 4 <= n_k; t += 4)
        for (int64_t h = 0; h < n_q; h++) {
            for (int64_t d = 16 * h; d < head_dim; d += 16 * n_q) /* the heads share out the asking */
                for (int row = 0; row < 4; row++)
                    __builtin_prefetch(next + (t + row) * ldnext + d, 0, 2);
            vst1q_f32(s + h * lds + t,
                      vmulq_n_f32(pkv_dot_4keys_neon(q + h * head_dim, k + t * ldk, ldk, head_dim), scale));
        }
    for (; t < n_k; t++)
        for (int64_t h = 0; h < n_q; h++)
            s[h * lds + t] = pkv_dot_f32_neon(q + h * head_dim, k + t * ldk, head_dim) * scale;
}

/* H heads at once over 32 elements of the head: H * 8 chains, the values loaded once for all of them. */
#define PKV_VALUES_HEADS(H)                                                                                    \
    static inline void pkv_values_##H##heads_neon(const float *p, int64_t ldp, const float *v, int64_t ldv,    \
                                                  int64_t n_k, int64_t head_dim, float *acc,                   \
                                                  const float *next, int64_t ldnext) {                         \
        float32x4_t a[H][8], p_t[H];                                                                           \
        _Pragma("GCC unroll 8") for (int h = 0; h < H; h++)                                                    \
            _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++)                                                \
                a[h][c] = vld1q_f32(acc + h * head_dim + 4 * c);                                               \
        for (int64_t t = 0; t < n_k; t++) {                                                                    \
            __builtin_prefetch(next + t * ldnext + 16 * 0, 0, 2);                                              \
            __builtin_prefetch(next + t * ldnext + 16 * 1, 0, 2);                                              \
            _Pragma("GCC unroll 8") for (int h = 0; h < H; h++) p_t[h] = vld1q_dup_f32(p + h * ldp + t);       \
            _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++) {                                              \
                float32x4_t v_c = vld1q_f32(v + t * ldv + 4 * c);                                              \
                _Pragma("GCC unroll 8") for (int h = 0; h < H; h++) a[h][c] = vfmaq_f32(a[h][c], p_t[h], v_c); \
            }                                                                                                  \
        }                                                                                                      \
        _Pragma("GCC unroll 8") for (int h = 0; h < H; h++)                                                    \
            _Pragma("GCC unroll 8") for (int c = 0; c < 8; c++)                                                \
                vst1q_f32(acc + h * head_dim + 4 * c, a[h][c]);                                                \
    }
PKV_VALUES_HEADS(1)
PKV_VALUES_HEADS(2)
PKV_VALUES_HEADS(3)
#undef PKV_VALUES_HEADS

static void pkv_attn_values_f32_neon(const float *p, int64_t ldp, int64_t n_q, const float *v, int64_t ldv,
                                     int64_t n_k, int64_t head_dim, float *acc, const float *next,
                                     int64_t ldnext) {
    int64_t d = 0;
    for (; d + 32 <= head_dim; d += 32) {
        int64_t h = 0;
        for (; n_q - h >= 3; h += 3)
            pkv_values_3heads_neon(p + h * ldp, ldp, v + d, ldv, n_k, head_dim, acc + h * head_dim + d, next + d,
                                   ldnext);
        if (n_q - h == 2)
            pkv_values_2heads_neon(p + h * ldp, ldp, v + d, ldv, n_k, head_dim, acc + h * head_dim + d, next + d,
                                   ldnext);
        else if (n_q - h == 1)
            pkv_values_1heads_neon(p + h * ldp, ldp, v + d, ldv, n_k, head_dim, acc + h * head_dim + d, next + d,
                                   ldnext);
    }
    for (; d + 4 <= head_dim; d += 4)
        for (int64_t h = 0; h < n_q; h++) {
            float32x4_t a = vld1q_f32(acc + h * head_dim + d);
            for (int64_t t = 0; t < n_k; t++)
                a = vfmaq_f32(a, vld1q_dup_f32(p + h * ldp + t), vld1q_f32(v + t * ldv + d));
            vst1q_f32(acc + h * head_dim + d, a);
        }
    for (; d < head_dim; d++)
        for (int64_t h = 0; h < n_q; h++) {
            float a = acc[h * head_dim + d];
            for (int64_t t = 0; t < n_k; t++)
                a = fmaf(p[h * ldp + t], v[t * ldv + d], a);
            acc[h * head_dim + d] = a;
        }
}

static void pkv_attn_merge_f32_neon(float *max, float *sum, float *acc, float max_c, float sum_c,
                                    const float *acc_c, int64_t head_dim) {
    float top = max_c > *max ? max_c : *max;
    float keep = pkv_exp_f32_scalar(*max - top), take = pkv_exp_f32_scalar(max_c - top);
    *max = top;
    *sum = fmaf(*sum, keep, sum_c * take);
    const float32x4_t keep_f32x4 = vdupq_n_f32(keep), take_f32x4 = vdupq_n_f32(take);
    int64_t d = 0;
    for (; d + 4 <= head_dim; d += 4) {
        float32x4_t later = vmulq_f32(vld1q_f32(acc_c + d), take_f32x4);
        vst1q_f32(acc + d, vfmaq_f32(later, vld1q_f32(acc + d), keep_f32x4));
    }
    for (; d < head_dim; d++)
        acc[d] = fmaf(acc[d], keep, acc_c[d] * take);
}

#endif
