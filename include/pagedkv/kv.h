/* How a row of K or V is stored: as float32, float16, bfloat16, or q8_0, which is 8-bit codes with a float16
 * scale for each 32 values (GGUF's Q8_0). A row is rounded once, when it is written; whatever reads it gets the
 * float32 values that the stored ones stand for, exactly, so the attention's arithmetic is the same for all.
 * One layer of one block is [block_size, kv_dim] values, then, for q8_0, [block_size, kv_dim / 32] scales. */
#ifndef PAGEDKV_KV_H
#define PAGEDKV_KV_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "layout.h"
#include "weights.h"

/* Values that share a scale. A head is whole groups of them, so that no scale is of two heads. */
#define PKV_KV_GROUP 32

/* Whether rows can be stored as a type. */
static inline int pkv_kv_known(int dtype) {
    return dtype == PKV_F32 || dtype == PKV_F16 || dtype == PKV_BF16 || dtype == PKV_Q8_0;
}

/* Values that a head's must be a multiple of. */
static inline int64_t pkv_kv_group(int dtype) { return dtype == PKV_Q8_0 ? PKV_KV_GROUP : 1; }

/* Bytes of one stored value, its scale aside. */
static inline int64_t pkv_kv_value_nbytes(int dtype) { return dtype == PKV_F32 ? 4 : dtype == PKV_Q8_0 ? 1 : 2; }

/* Bytes of the scales of n values. */
static inline int64_t pkv_kv_scales_nbytes(int dtype, int64_t n) { return dtype == PKV_Q8_0 ? n / PKV_KV_GROUP * 2 : 0; }

/* Bytes of a row of n values with its scales. */
static inline int64_t pkv_kv_row_nbytes(int dtype, int64_t n) {
    return n * pkv_kv_value_nbytes(dtype) + pkv_kv_scales_nbytes(dtype, n);
}

/* Consecutive stored rows, of one head or of all. */
typedef struct pkv_kv_rows {
    const uint8_t *values;
    const uint8_t *scales;  /* float16; q8_0 only */
    int64_t values_stride;  /* bytes from row to row */
    int64_t scales_stride;
} pkv_kv_rows;

/* float32 to float16 bits, to nearest, ties to even; a NaN keeps its sign and upper bits and becomes quiet. */
static inline uint16_t pkv_f32_to_f16(float x) {
    uint32_t bits, sign, magnitude;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    if (magnitude > 0x7F800000)
        return (uint16_t)(sign | 0x7E00 | (magnitude >> 13 & 0x3FF));
    if (magnitude >= 0x47800000) /* 2^16: past all that rounds to a finite number, and infinity */
        return (uint16_t)(sign | 0x7C00);
    if (magnitude < 0x38800000) { /* below 2^-14: adding 0.5 leaves multiples of 2^-24 in the low bits, rounded */
        float small;
        memcpy(&small, &magnitude, sizeof small);
        small += 0.5f;
        memcpy(&magnitude, &small, sizeof magnitude);
        return (uint16_t)(sign | (magnitude - 0x3F000000));
    }
    /* A carry out of the fraction goes into the exponent, up to infinity. */
    return (uint16_t)(sign | (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13);
}

/* float32 to bfloat16 bits, as above. */
static inline uint16_t pkv_f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* Adding it to a number of at most 2^22 leaves the nearest integer in the low bits, ties to even. */
#define PKV_ROUND_TO_INT 12582912.0f /* 1.5 * 2^23 */
#define PKV_ROUND_TO_INT_BITS 0x4B400000

/* The scale of a group whose largest magnitude is `most`, and the factor that makes codes of its values. The
 * scale is rounded first and the codes fit the rounded one. Zeros, and groups too small or too large for a
 * float16 scale, get codes 0: they read as 0, NaN where a value was infinite or NaN or above 8.3 million. */
static inline uint16_t pkv_kv_scale(float most, float *factor) {
    uint16_t scale = pkv_f32_to_f16(most / 127.0f);
    *factor = (scale & 0x7C00) == 0x7C00 || scale == 0 ? 0.0f : 1.0f / pkv_f16_to_f32(scale);
    return scale;
}

/* Round one row of n values, n a multiple of the type's group, to values and scales. */
static void pkv_kv_round_scalar(int dtype, const float *x, int64_t n, uint8_t *values, uint8_t *scales) {
    if (dtype == PKV_F32) {
        memcpy(values, x, (size_t)n * sizeof *x);
    } else if (dtype != PKV_Q8_0) {
        for (int64_t i = 0; i < n; i++) {
            uint16_t bits = dtype == PKV_F16 ? pkv_f32_to_f16(x[i]) : pkv_f32_to_bf16(x[i]);
            memcpy(values + 2 * i, &bits, sizeof bits);
        }
    } else {
        for (int64_t g = 0; g < n; g += PKV_KV_GROUP) {
            int32_t most_bits = 0; /* of magnitudes: their bits are ordered as they are, NaN last */
            float most, factor;
            for (int64_t i = g; i < g + PKV_KV_GROUP; i++) {
                int32_t bits;
                memcpy(&bits, x + i, sizeof bits);
                bits &= 0x7FFFFFFF;
                most_bits = bits > most_bits ? bits : most_bits;
            }
            memcpy(&most, &most_bits, sizeof most);
            uint16_t scale = pkv_kv_scale(most, &factor);
            memcpy(scales + g / PKV_KV_GROUP * 2, &scale, sizeof scale);
            for (int64_t i = g; i < g + PKV_KV_GROUP; i++) {
                float shifted = factor == 0.0f ? PKV_ROUND_TO_INT : fmaf(x[i], factor, PKV_ROUND_TO_INT);
                int32_t code;
                memcpy(&code, &shifted, sizeof code);
                code -= PKV_ROUND_TO_INT_BITS;
                values[i] = (uint8_t)(code > 127 ? 127 : code < -127 ? -127 : code);
            }
        }
    }
}

/* The values that rows stand for: out [n_rows, n], n a multiple of the type's group.
 * next is the first of n_rows rows of values, next_stride bytes from one to the next, that will be read after
 * these; SIMD files ask memory for them. */
static void pkv_kv_expand_scalar(int dtype, const pkv_kv_rows *rows, int64_t n_rows, int64_t n, float *out,
                                 const uint8_t *next, int64_t next_stride) {
    (void)next, (void)next_stride;
    for (int64_t t = 0; t < n_rows; t++, out += n) {
        const uint8_t *values = rows->values + t * rows->values_stride;
        if (dtype == PKV_F32)
            memcpy(out, values, (size_t)n * sizeof *out);
        for (int64_t i = 0; i < n && dtype == PKV_F16; i++)
            out[i] = pkv_f16_to_f32(pkv_load_u16(values + 2 * i));
        for (int64_t i = 0; i < n && dtype == PKV_BF16; i++) {
            uint32_t bits = (uint32_t)pkv_load_u16(values + 2 * i) << 16;
            memcpy(out + i, &bits, sizeof bits);
        }
        for (int64_t i = 0; i < n && dtype == PKV_Q8_0; i++)
            out[i] = pkv_f16_to_f32(pkv_load_u16(rows->scales + t * rows->scales_stride + i / PKV_KV_GROUP * 2)) *
                     (float)(int8_t)values[i];
    }
}

#endif
