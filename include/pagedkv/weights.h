/* Weights in memory: the types, how a panel of 32 columns lies, and how rows of a file become panels.
 * Quantised types keep their size. All of them are codes in groups along k; one layout serves them:
 *   a panel is a run of units; a unit is 32 values of k (256 for the K types) for 32 columns:
 *     K types only:  d [32] f16, and dmin [32] f16 where there is a minimum
 *     then for each group of k that shares a scale (32 values, 16 for Q6_K):
 *       scale [32] f16, or u8/i8 for the K types; minimum [32] likewise where there is one
 *       low bits of the codes, one row of 32 for each k: 4 bits (byte j: column j, and j + 16 above it) or 8
 *       high bits, one row of 32 for each k: 1 bit (a u32, bit j: column j) or 2 bits (byte j of 8: columns j,
 *       j + 8, j + 16, j + 24 from the low end)
 * F32, F16 and BF16 panels are [k, 32] of their elements.
 * Formats of the rows: ggml-common.h, block_q4_0 to block_q6_K. */
#ifndef PAGEDKV_WEIGHTS_H
#define PAGEDKV_WEIGHTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "layout.h"

typedef enum pkv_dtype {
    PKV_F32,
    PKV_F16,
    PKV_BF16,
    PKV_Q8_0,
    PKV_Q4_0,
    PKV_Q4_1,
    PKV_Q5_0,
    PKV_Q5_1,
    PKV_Q4_K,
    PKV_Q5_K,
    PKV_Q6_K,
    PKV_N_DTYPES
} pkv_dtype;

/* CASE(type) for each type: a switch in which every branch on the type is decided by the compiler. */
#define PKV_EACH_DTYPE(CASE)                                                                                   \
    CASE(PKV_F32)                                                                                              \
    CASE(PKV_F16)                                                                                              \
    CASE(PKV_BF16)                                                                                             \
    PKV_EACH_CODED_DTYPE(CASE)

/* The same for the quantised types. */
#define PKV_EACH_CODED_DTYPE(CASE)                                                                             \
    CASE(PKV_Q8_0)                                                                                             \
    CASE(PKV_Q4_0)                                                                                             \
    CASE(PKV_Q4_1)                                                                                             \
    CASE(PKV_Q5_0)                                                                                             \
    CASE(PKV_Q5_1)                                                                                             \
    CASE(PKV_Q4_K)                                                                                             \
    CASE(PKV_Q5_K)                                                                                             \
    CASE(PKV_Q6_K)

/* What the layout above needs to know of a type. */
typedef struct pkv_form {
    int32_t unit;        /* k of a unit; 1 for the float types */
    int32_t group;       /* k that share a scale */
    int32_t low_bits;    /* 4 or 8; 16 or 32 for the float types */
    int32_t high_bits;   /* 0, 1 or 2 */
    int32_t bias;        /* taken from the code */
    int32_t has_scale;   /* 0: a float type */
    int32_t has_min;     /* value = scale * code + minimum, or - dmin * minimum for the K types */
    int32_t is_k;        /* scales and minima are small integers times d and dmin */
    int32_t block_nbytes; /* of `unit` values in a row of a file */
} pkv_form;

static inline pkv_form pkv_form_of(int dtype) {
    switch (dtype) {
    case PKV_F16:
    case PKV_BF16:
        return (pkv_form){1, 1, 16, 0, 0, 0, 0, 0, 2};
    case PKV_Q8_0:
        return (pkv_form){32, 32, 8, 0, 0, 1, 0, 0, 34};
    case PKV_Q4_0:
        return (pkv_form){32, 32, 4, 0, 8, 1, 0, 0, 18};
    case PKV_Q4_1:
        return (pkv_form){32, 32, 4, 0, 0, 1, 1, 0, 20};
    case PKV_Q5_0:
        return (pkv_form){32, 32, 4, 1, 16, 1, 0, 0, 22};
    case PKV_Q5_1:
        return (pkv_form){32, 32, 4, 1, 0, 1, 1, 0, 24};
    case PKV_Q4_K:
        return (pkv_form){256, 32, 4, 0, 0, 1, 1, 1, 144};
    case PKV_Q5_K:
        return (pkv_form){256, 32, 4, 1, 0, 1, 1, 1, 176};
    case PKV_Q6_K:
        return (pkv_form){256, 16, 4, 2, 32, 1, 0, 1, 210};
    default:
        return (pkv_form){1, 1, 32, 0, 0, 0, 0, 0, 4};
    }
}

/* Bytes of the scales, and of the minima, of a group. */
static inline int64_t pkv_scales_nbytes(pkv_form f) {
    return !f.has_scale ? 0 : (f.is_k ? PKV_PANEL : 2 * PKV_PANEL) * (1 + f.has_min);
}

/* Bytes of one row of low or high bits. */
static inline int64_t pkv_low_nbytes(pkv_form f) { return PKV_PANEL / 8 * f.low_bits; }
static inline int64_t pkv_high_nbytes(pkv_form f) { return PKV_PANEL / 8 * f.high_bits; }

static inline int64_t pkv_group_nbytes(pkv_form f) {
    return pkv_scales_nbytes(f) + f.group * (pkv_low_nbytes(f) + pkv_high_nbytes(f));
}

/* Bytes before the first group of a unit. */
static inline int64_t pkv_head_nbytes(pkv_form f) { return f.is_k ? 2 * PKV_PANEL * (1 + f.has_min) : 0; }

static inline int64_t pkv_unit_nbytes(pkv_form f) {
    return pkv_head_nbytes(f) + f.unit / f.group * pkv_group_nbytes(f);
}

/* Bytes of a panel of depth k, a multiple of the unit. */
static inline int64_t pkv_panel_nbytes(int dtype, int64_t k) {
    pkv_form f = pkv_form_of(dtype);
    return k / f.unit * pkv_unit_nbytes(f);
}

/* The group of a panel that holds value k, a multiple of the group; *unit is its unit. */
static inline const uint8_t *pkv_group_at(pkv_form f, const uint8_t *panel, int64_t k, const uint8_t **unit) {
    *unit = panel + k / f.unit * pkv_unit_nbytes(f);
    return *unit + pkv_head_nbytes(f) + k % f.unit / f.group * pkv_group_nbytes(f);
}

/* float16 bits to float32, exactly; subnormals, infinities and NaNs too. */
static inline float pkv_f16_to_f32(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023, bits;
    float x;
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24 is exact */
        x = (float)fraction * 0x1p-24f;
        return sign ? -x : x;
    }
    bits = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112) << 23) | fraction << 13;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint16_t pkv_load_u16(const uint8_t *p) {
    uint16_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline uint32_t pkv_load_u32(const uint8_t *p) {
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline uint64_t pkv_load_u64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Scale and minimum of one column of a group: value = scale * (code - bias) + minimum, rounded once. */
static inline void pkv_column_scale(int dtype, const uint8_t *unit, const uint8_t *group, int64_t col, float *scale,
                                    float *minimum) {
    pkv_form f = pkv_form_of(dtype);
    *minimum = 0.0f;
    if (!f.is_k) {
        *scale = pkv_f16_to_f32(pkv_load_u16(group + 2 * col));
        if (f.has_min)
            *minimum = pkv_f16_to_f32(pkv_load_u16(group + 2 * PKV_PANEL + 2 * col));
        return;
    }
    float factor = dtype == PKV_Q6_K ? (float)(int8_t)group[col] : (float)group[col];
    *scale = pkv_f16_to_f32(pkv_load_u16(unit + 2 * col)) * factor;
    if (f.has_min)
        *minimum = -(pkv_f16_to_f32(pkv_load_u16(unit + 2 * PKV_PANEL + 2 * col)) * (float)group[PKV_PANEL + col]);
}

/* Code of one column in row i of a group, less the bias. */
static inline int32_t pkv_column_code(int dtype, const uint8_t *group, int64_t i, int64_t col) {
    pkv_form f = pkv_form_of(dtype);
    const uint8_t *low = group + pkv_scales_nbytes(f) + i * pkv_low_nbytes(f);
    const uint8_t *high = group + pkv_scales_nbytes(f) + f.group * pkv_low_nbytes(f) + i * pkv_high_nbytes(f);
    if (f.low_bits == 8)
        return (int8_t)low[col];
    int32_t code = low[col % 16] >> 4 * (col / 16) & 15;
    if (f.high_bits == 1)
        code |= (high[col / 8] >> col % 8 & 1) << 4;
    if (f.high_bits == 2)
        code |= (high[col % 8] >> 2 * (col / 8) & 3) << 4;
    return code - f.bias;
}

/* Values [k_0, k_0 + n_k) of one column of a panel as float32; k_0 and n_k are multiples of the group.
 * This is what every code stands for: the specification of each expand and coded matmul. */
static inline void pkv_expand_column(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, int64_t col, float *out,
                                     int64_t stride) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t k = k_0; k < k_0 + n_k; k += f.group) {
        const uint8_t *unit, *group = pkv_group_at(f, panel, k, &unit);
        float *to = out + (k - k_0) * stride;
        if (dtype == PKV_F32) {
            memcpy(to, group + 4 * col, sizeof *to);
        } else if (dtype == PKV_F16) {
            *to = pkv_f16_to_f32(pkv_load_u16(group + 2 * col));
        } else if (dtype == PKV_BF16) {
            uint32_t bits = (uint32_t)pkv_load_u16(group + 2 * col) << 16;
            memcpy(to, &bits, sizeof *to);
        } else {
            float scale, minimum;
            pkv_column_scale(dtype, unit, group, col, &scale, &minimum);
            for (int64_t i = 0; i < f.group; i++) {
                float code = (float)pkv_column_code(dtype, group, i, col);
                /* scale * code is exact where there is a minimum, so one FMA is the format's product and sum */
                to[i * stride] = f.has_min ? fmaf(scale, code, minimum) : scale * code;
            }
        }
    }
}

/* Values of k that a kernel expands at once where it does not multiply straight from the codes: a unit of the
 * K types, 32 KiB for a panel. */
#define PKV_CODED_K 256

/* ---- From rows of a file ---- */

/* Codes of one block of a quantised row, bias not taken off: codes [unit], in order of k. */
static inline void pkv_block_codes(int dtype, const uint8_t *block, uint8_t *codes) {
    const uint8_t *low, *high;
    switch (dtype) {
    case PKV_Q8_0:
        memcpy(codes, block + 2, 32);
        return;
    case PKV_Q4_0:
    case PKV_Q4_1:
    case PKV_Q5_0:
    case PKV_Q5_1: {
        int has_min = dtype == PKV_Q4_1 || dtype == PKV_Q5_1, has_high = dtype == PKV_Q5_0 || dtype == PKV_Q5_1;
        high = block + 2 + 2 * has_min;
        low = high + 4 * has_high;
        for (int i = 0; i < 32; i++) {
            codes[i] = low[i % 16] >> 4 * (i / 16) & 15;
            if (has_high)
                codes[i] |= (high[i / 8] >> i % 8 & 1) << 4;
        }
        return;
    }
    case PKV_Q4_K: /* 32 bytes hold sub-blocks 2i (low nibbles) and 2i + 1 (high nibbles) */
    case PKV_Q5_K: /* the same; bit i of the 32 high bytes belongs to sub-block i */
        high = block + 16;
        low = dtype == PKV_Q5_K ? block + 48 : block + 16;
        for (int i = 0; i < 256; i++) {
            codes[i] = low[i / 64 * 32 + i % 32] >> 4 * (i / 32 % 2) & 15;
            if (dtype == PKV_Q5_K)
                codes[i] |= (high[i % 32] >> i / 32 & 1) << 4;
        }
        return;
    default: /* Q6_K: halves of 128, each four quarters of 32 */
        for (int i = 0; i < 256; i++) {
            int half = i / 128, quarter = i / 32 % 4, at = i % 32;
            codes[i] = block[half * 64 + quarter % 2 * 32 + at] >> 4 * (quarter / 2) & 15;
            codes[i] |= (block[128 + half * 32 + at] >> 2 * quarter & 3) << 4;
        }
    }
}

/* Scale and minimum of sub-block i of a Q4_K or Q5_K block, 6 bits each, from its 12 packed bytes. */
static inline void pkv_six_bit_pair(const uint8_t *packed, int i, uint8_t *scale, uint8_t *minimum) {
    if (i < 4) {
        *scale = packed[i] & 63;
        *minimum = packed[4 + i] & 63;
    } else {
        *scale = (packed[4 + i] & 15) | (packed[i - 4] >> 6) << 4;
        *minimum = (packed[4 + i] >> 4) | (packed[i] >> 6) << 4;
    }
}

/* One panel from up to 32 rows of a file; rows[col] NULL leaves a column of zeros (the panel's memory is zero).
 *   rows  [32] stored rows of depth k in the format of dtype
 *   panel pkv_panel_nbytes(dtype, k) bytes of zeros */
static inline void pkv_pack_panel(int dtype, const uint8_t *const *rows, int64_t k, uint8_t *panel) {
    pkv_form f = pkv_form_of(dtype);
    if (!f.has_scale) {
        int64_t width = f.low_bits / 8;
        for (int64_t col = 0; col < PKV_PANEL; col++)
            for (int64_t i = 0; rows[col] && i < k; i++)
                memcpy(panel + (i * PKV_PANEL + col) * width, rows[col] + i * width, (size_t)width);
        return;
    }
    uint8_t codes[PKV_PANEL][256];
    memset(codes, 0, sizeof codes);
    for (int64_t n = 0; n < k / f.unit; n++) {
        uint8_t *unit = panel + n * pkv_unit_nbytes(f);
        for (int64_t col = 0; col < PKV_PANEL; col++) {
            if (!rows[col])
                continue;
            const uint8_t *block = rows[col] + n * f.block_nbytes;
            pkv_block_codes(dtype, block, codes[col]);
            if (f.is_k)
                memcpy(unit + 2 * col, dtype == PKV_Q6_K ? block + 208 : block, 2);
            if (f.is_k && f.has_min)
                memcpy(unit + 2 * PKV_PANEL + 2 * col, block + 2, 2);
            for (int i = 0; i < f.unit / f.group; i++) {
                uint8_t *group = unit + pkv_head_nbytes(f) + i * pkv_group_nbytes(f);
                if (dtype == PKV_Q6_K)
                    group[col] = block[192 + i];
                else if (f.is_k)
                    pkv_six_bit_pair(block + 4, i, group + col, group + PKV_PANEL + col);
                else {
                    memcpy(group + 2 * col, block, 2);
                    if (f.has_min)
                        memcpy(group + 2 * PKV_PANEL + 2 * col, block + 2, 2);
                }
            }
        }
        for (int64_t i = 0; i < f.unit; i++) {
            uint8_t *group = unit + pkv_head_nbytes(f) + i / f.group * pkv_group_nbytes(f);
            uint8_t *low = group + pkv_scales_nbytes(f) + i % f.group * pkv_low_nbytes(f);
            uint8_t *high = group + pkv_scales_nbytes(f) + f.group * pkv_low_nbytes(f);
            high += i % f.group * pkv_high_nbytes(f);
            memset(high, 0, (size_t)pkv_high_nbytes(f));
            if (f.low_bits == 8) {
                for (int64_t col = 0; col < PKV_PANEL; col++)
                    low[col] = codes[col][i];
                continue;
            }
            for (int64_t j = 0; j < 16; j++)
                low[j] = (uint8_t)((codes[j][i] & 15) | (codes[j + 16][i] & 15) << 4);
            if (f.high_bits == 1)
                for (int64_t col = 0; col < PKV_PANEL; col++)
                    high[col / 8] |= (uint8_t)((codes[col][i] >> 4) << col % 8);
            if (f.high_bits == 2)
                for (int64_t col = 0; col < PKV_PANEL; col++)
                    high[col % 8] |= (uint8_t)((codes[col][i] >> 4) << 2 * (col / 8));
        }
    }
}

#endif
