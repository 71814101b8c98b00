/* compute="int8", the specification: each row's activations become int8 codes in groups of 32 along k, by a rule
 * that sees this row only, and meet the weights' own codes in integer dot products. Those are exact, so any tile,
 * thread and instruction set gives them; the floats around them have one order:
 *   for each group of k that shares a weight scale, ascending:
 *     y = fma(float(sum of code * code), weight scale * activation scale, y)
 *     y = fma(weight minimum, activation scale * float(sum of activation codes), y), where the type has a minimum
 * What a slice of codes looks like in memory is each instruction set's own affair. */
#ifndef PAGEDKV_INT8_SCALAR_H
#define PAGEDKV_INT8_SCALAR_H

#include "kernels_scalar.h"

/* Values of a row that share an activation scale; a group of weights is as long, or half of it (Q6_K). */
#define PKV_INT8_GROUP 32

/* Values of k that one slice of codes holds at most: a unit of the K types, 18 KiB at most, inside L1. */
#define PKV_INT8_K 256

/* Bytes of the largest slice: codes of two bytes (AVX2 keeps Q8_0 so), scales and minima of groups of 16. */
#define PKV_INT8_SLICE_NBYTES (PKV_INT8_K * PKV_PANEL * 2 + PKV_INT8_K / 16 * PKV_PANEL * 8)

/* Groups whose largest magnitude is below this count as zeros: 127 over it must stay finite. */
#define PKV_INT8_LEAST 0x1p-100f

/* 32 activations: value = scale * code. */
typedef struct pkv_int8_group {
    int8_t code[PKV_INT8_GROUP]; /* in [-127, 127] */
    float scale;                 /* NaN, and all codes 0, where a value is infinite or NaN: so are the products */
    float scaled_sum;            /* scale * float(sum) */
    int32_t sum;                 /* of the codes */
    int32_t first_sum;           /* of the first 16 */
} pkv_int8_group;

/* A row of n values, a multiple of 32, as codes: the largest magnitude of a group becomes 127, the others are
 * rounded to the nearest, ties to even. groups [n / 32] */
static void pkv_quantize_row_scalar(const float *x, int64_t n, pkv_int8_group *groups) {
    for (pkv_int8_group *g = groups; g < groups + n / PKV_INT8_GROUP; g++, x += PKV_INT8_GROUP) {
        int32_t largest = 0; /* as bits, which order magnitudes as the numbers do and NaN above them all */
        for (int i = 0; i < PKV_INT8_GROUP; i++) {
            int32_t magnitude = pkv_f32_to_bits(x[i]) & INT32_MAX;
            largest = magnitude > largest ? magnitude : largest;
        }
        float most = pkv_bits_to_f32(largest), inverse = 127.0f / most;
        memset(g, 0, sizeof *g);
        if (most < PKV_INT8_LEAST)
            continue;
        if (!(most < INFINITY)) {
            g->scale = g->scaled_sum = NAN;
            continue;
        }
        for (int i = 0; i < PKV_INT8_GROUP; i++) {
            int32_t code = pkv_f32_to_bits(x[i] * inverse + PKV_ROUND_TO_INT) - PKV_ROUND_TO_INT_BITS;
            g->code[i] = (int8_t)code;
            g->sum += code;
            g->first_sum += i < PKV_INT8_GROUP / 2 ? code : 0;
        }
        g->scale = most / 127.0f;
        g->scaled_sum = g->scale * (float)g->sum;
    }
}

/* Where the parts of a weight group begin in a slice: scale [32] f32, minimum [32] f32 where there is one, codes. */
static inline int64_t pkv_int8_scales_nbytes(pkv_form f) { return 4 * PKV_PANEL * (1 + f.has_min); }

/* A slice of a quantised panel as its matmul_int8 reads it: values [k_0, k_0 + n_k), multiples of 32, n_k at most
 * PKV_INT8_K. slice [PKV_INT8_SLICE_NBYTES], 64-byte aligned. Here: codes less the bias, [group, 32] int8. */
static void pkv_expand_int8_scalar(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, uint8_t *slice) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t k = k_0; k < k_0 + n_k; k += f.group) {
        const uint8_t *unit, *group = pkv_group_at(f, panel, k, &unit);
        float *scale = (float *)(void *)slice, minimum;
        int8_t *codes = (int8_t *)slice + pkv_int8_scales_nbytes(f);
        for (int64_t col = 0; col < PKV_PANEL; col++) {
            pkv_column_scale(dtype, unit, group, col, scale + col, &minimum);
            if (f.has_min)
                scale[PKV_PANEL + col] = minimum;
            for (int64_t i = 0; i < f.group; i++)
                codes[i * PKV_PANEL + col] = (int8_t)pkv_column_code(dtype, group, i, col);
        }
        slice += pkv_int8_scales_nbytes(f) + f.group * PKV_PANEL;
    }
}

/* n_cols floats of a panel's 32: a whole panel, the usual case, without a call. */
static inline void pkv_copy_cols(float *to, const float *from, int64_t n_cols) {
    if (n_cols == PKV_PANEL)
        memcpy(to, from, PKV_PANEL * sizeof *to);
    else
        memcpy(to, from, (size_t)n_cols * sizeof *to);
}

/* y[m, j] over one slice of a panel; with accumulate the sums start from y instead of 0.
 *   x  [n_rows, n_k / 32] groups, row stride ldx groups
 *   y  [n_rows, n_cols]   row stride ldy, n_cols <= 32; nothing beyond n_cols is written */
static void pkv_matmul_int8_scalar(int dtype, const pkv_int8_group *x, int64_t ldx, int64_t n_rows,
                                   const uint8_t *slice, int64_t n_k, float *y, int64_t ldy, int64_t n_cols,
                                   int accumulate) {
    pkv_form f = pkv_form_of(dtype);
    for (int64_t k = 0; k < n_k; k += f.group) {
        const float *scale = (const float *)(const void *)slice;
        const int8_t *codes = (const int8_t *)slice + pkv_int8_scales_nbytes(f);
        for (int64_t m = 0; m < n_rows; m++) {
            const pkv_int8_group *g = x + m * ldx + k / PKV_INT8_GROUP;
            for (int64_t j = 0; j < n_cols; j++) {
                float *to = y + m * ldy + j, sum = accumulate || k ? *to : 0.0f;
                int32_t dot = 0;
                for (int64_t i = 0; i < f.group; i++)
                    dot += codes[i * PKV_PANEL + j] * g->code[k % PKV_INT8_GROUP + i];
                sum = fmaf((float)dot, scale[j] * g->scale, sum);
                *to = f.has_min ? fmaf(scale[PKV_PANEL + j], g->scaled_sum, sum) : sum;
            }
        }
        slice += pkv_int8_scales_nbytes(f) + f.group * PKV_PANEL;
    }
}

#endif
