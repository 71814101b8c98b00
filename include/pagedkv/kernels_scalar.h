/* The specification. Every number this library computes is defined by the loops of this file; the SIMD files
 * repeat their order and give the same bits. Three orders are used:
 *   matmul            one accumulator a cell, k ascending, one FMA a step
 *   dot, sums         16 interleaved lanes (element i goes to lane i % 16), then one fixed tree
 *   everything else   element by element
 * Build with -ffp-contract=off: an FMA happens where fmaf is written and nowhere else. */
#ifndef PAGEDKV_KERNELS_SCALAR_H
#define PAGEDKV_KERNELS_SCALAR_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kv.h"
#include "layout.h"
#include "weights.h"

static inline float pkv_bits_to_f32(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline int32_t pkv_f32_to_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* 1 where fused, the C library's fmaf, rounds once, as all below needs it to. x * y is midway between two floats and
 * z, too small for a double or a long double to keep beside it, decides; volatile, so that no compiler decides.
 * To be called in round to nearest (fpenv.h). */
static inline int pkv_fma_rounds_once(float (*fused)(float, float, float)) {
    volatile float x = 0x1.001p0f, z = 0x1p-80f;
    return fused(x, x, z) == 0x1.002002p0f;
}

/* The fixed tree over 16 lanes: neighbours 8 apart, then 4, 2, 1. Destroys lanes. */
static inline float pkv_tree_sum_scalar(float *lanes) {
    for (int width = PKV_LANES / 2; width >= 1; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = lanes[i] + lanes[i + width];
    return lanes[0];
}

/* sum_i a[i] * b[i] over n elements. */
static inline float pkv_dot_f32_scalar(const float *a, const float *b, int64_t n) {
    float lanes[PKV_LANES] = {0};
    for (int64_t i = 0; i < n; i++)
        lanes[i % PKV_LANES] = fmaf(a[i], b[i], lanes[i % PKV_LANES]);
    return pkv_tree_sum_scalar(lanes);
}

/* sum_i x[i] over n elements. */
static inline float pkv_sum_f32_scalar(const float *x, int64_t n) {
    float lanes[PKV_LANES] = {0};
    for (int64_t i = 0; i < n; i++)
        lanes[i % PKV_LANES] = lanes[i % PKV_LANES] + x[i];
    return pkv_tree_sum_scalar(lanes);
}

/* The largest of n elements, -inf where n is 0. A NaN is passed over here and comes back through exp. */
static inline float pkv_max_f32_scalar(const float *x, int64_t n) {
    float max = -INFINITY;
    for (int64_t i = 0; i < n; i++)
        max = x[i] > max ? x[i] : max;
    return max;
}

/* Constants of exp. x = n ln 2 + r with |r| <= ln(2)/2; exp(r) = 1 + r + r^2 P(r), P of degree 5 fitted to
 * the smallest largest relative error (5e-11, far below half an ulp of float32).
 * PKV_EXP_ROUND = 1.5 * 2^23: adding it rounds to an integer, which then lies in the low bits.
 * Below PKV_EXP_LO the result is 0, above PKV_EXP_HI it is inf; both are reached by the same arithmetic. */
#define PKV_EXP_LO (-104.0f)
#define PKV_EXP_HI 89.0f
#define PKV_EXP_LOG2E 1.44269504088896341f
#define PKV_EXP_ROUND PKV_ROUND_TO_INT
#define PKV_EXP_ROUND_BITS PKV_ROUND_TO_INT_BITS
#define PKV_EXP_LN2_HI 0.693147182464599609375f /* ln 2 rounded to float32 */
#define PKV_EXP_LN2_LO (-1.90465429995776822e-9f)
#define PKV_EXP_P5 0x1.9f0896p-13f
#define PKV_EXP_P4 0x1.6d8d06p-10f
#define PKV_EXP_P3 0x1.111270p-7f
#define PKV_EXP_P2 0x1.55548ep-5f
#define PKV_EXP_P1 0x1.555554p-3f
#define PKV_EXP_P0 0.5f

/* exp(x), within 2 ulp for all x; 0 below -104, inf above 88.73, NaN for NaN. */
static inline float pkv_exp_f32_scalar(float x) {
    x = x < PKV_EXP_LO ? PKV_EXP_LO : x;
    x = x > PKV_EXP_HI ? PKV_EXP_HI : x;
    float shifted = fmaf(x, PKV_EXP_LOG2E, PKV_EXP_ROUND);
    float n = shifted - PKV_EXP_ROUND;
    float r = fmaf(n, -PKV_EXP_LN2_HI, x);
    r = fmaf(n, -PKV_EXP_LN2_LO, r);
    float p = fmaf(PKV_EXP_P5, r, PKV_EXP_P4);
    p = fmaf(p, r, PKV_EXP_P3);
    p = fmaf(p, r, PKV_EXP_P2);
    p = fmaf(p, r, PKV_EXP_P1);
    p = fmaf(p, r, PKV_EXP_P0);
    float y = fmaf(p, r * r, r) + 1.0f;
    /* 2^n in two normal factors: the first product is exact, so the second rounds once, subnormals too. */
    int32_t n_int = pkv_f32_to_bits(shifted) - PKV_EXP_ROUND_BITS;
    int32_t n_half = n_int >> 1;
    float scale_1 = pkv_bits_to_f32((int32_t)((uint32_t)(n_half + 127) << 23));
    float scale_2 = pkv_bits_to_f32((int32_t)((uint32_t)(n_int - n_half + 127) << 23));
    return x != x ? x : y * scale_1 * scale_2;
}

/* y[i] = exp(x[i]). */
static void pkv_exp_row_f32_scalar(const float *x, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        y[i] = pkv_exp_f32_scalar(x[i]);
}

/* One chunk of softmax, in place: s[i] becomes exp(s[i] - max); *max and *sum describe the chunk. */
static void pkv_softmax_chunk_f32_scalar(float *s, int64_t n, float *max, float *sum) {
    *max = pkv_max_f32_scalar(s, n);
    for (int64_t i = 0; i < n; i++)
        s[i] = pkv_exp_f32_scalar(s[i] - *max);
    *sum = pkv_sum_f32_scalar(s, n);
}

/* y = softmax(x) over one row of n elements; y may be x. */
static void pkv_softmax_f32_scalar(const float *x, float *y, int64_t n) {
    float max, sum;
    if (y != x)
        memcpy(y, x, (size_t)n * sizeof *y);
    pkv_softmax_chunk_f32_scalar(y, n, &max, &sum);
    for (int64_t i = 0; i < n; i++)
        y[i] = y[i] / sum;
}

/* y[i] = x[i] / sqrt(mean(x^2) + eps) * gamma[i]; y may be x. (Zhang and Sennrich 2019.) */
static void pkv_rmsnorm_f32_scalar(const float *x, const float *gamma, float eps, float *y, int64_t n) {
    float inverse = 1.0f / sqrtf(pkv_dot_f32_scalar(x, x, n) / (float)n + eps);
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] * inverse * gamma[i];
}

/* Rotate one head in place, NeoX order: element i turns with element i + half.
 * head [>= 2 * half]; cos, sin [half]. (Su et al. 2021.) */
static void pkv_rope_f32_scalar(float *head, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = head[i], b = head[i + half];
        head[i] = fmaf(a, cos[i], -(b * sin[i]));
        head[i + half] = fmaf(b, cos[i], a * sin[i]);
    }
}

/* y[i] = silu(gate[i]) * up[i], silu(g) = g / (1 + exp(-g)). (Shazeer 2020.) */
static void pkv_swiglu_f32_scalar(const float *gate, const float *up, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        y[i] = gate[i] / (1.0f + pkv_exp_f32_scalar(-gate[i])) * up[i];
}

/* y[i] += x[i]. */
static void pkv_add_f32_scalar(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        y[i] = y[i] + x[i];
}

/* y[m, j] = sum_k x[m, k] w[k, j] over one panel of packed weights.
 *   x      [n_rows, n_k]     row stride ldx
 *   panel  [n_k, 32]         64-byte aligned
 *   y      [n_rows, n_cols]  row stride ldy, n_cols <= 32; nothing beyond n_cols is written
 * With accumulate the sums start from y instead of 0: k can be split, and the bits stay.
 * SIMD files ask memory for `ahead` meanwhile; nothing here depends on it. */
static void pkv_matmul_f32_scalar(const float *x, int64_t ldx, int64_t n_rows, const float *panel, int64_t n_k,
                                  float *y, int64_t ldy, int64_t n_cols, int accumulate, pkv_ahead ahead) {
    (void)ahead;
    for (int64_t m = 0; m < n_rows; m++) {
        float acc[PKV_PANEL] = {0};
        if (accumulate)
            memcpy(acc, y + m * ldy, (size_t)n_cols * sizeof *acc);
        for (int64_t k = 0; k < n_k; k++)
            for (int64_t j = 0; j < n_cols; j++)
                acc[j] = fmaf(x[m * ldx + k], panel[k * PKV_PANEL + j], acc[j]);
        memcpy(y + m * ldy, acc, (size_t)n_cols * sizeof *acc);
    }
}

/* Values [k_0, k_0 + n_k) of a panel of any type as float32: out [n_k, 32]. */
static void pkv_expand_scalar(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, float *out) {
    for (int64_t col = 0; col < PKV_PANEL; col++)
        pkv_expand_column(dtype, panel, k_0, n_k, col, out + col, PKV_PANEL);
}

/* Few rows straight from codes: y[m, j] = sum_k x[m, k] w[k, j] over one panel, whole k, from 0. */
static void pkv_matmul_coded_scalar(int dtype, const float *x, int64_t ldx, int64_t n_rows, const uint8_t *panel,
                                    int64_t n_k, float *y, int64_t ldy, int64_t n_cols) {
    PKV_ALIGNED(64) float values[PKV_CODED_K * PKV_PANEL];
    for (int64_t k = 0; k < n_k; k += PKV_CODED_K) {
        int64_t n = pkv_min(PKV_CODED_K, n_k - k);
        pkv_expand_scalar(dtype, panel, k, n, values);
        pkv_matmul_f32_scalar(x + k, ldx, n_rows, values, n, y, ldy, n_cols, k > 0, (pkv_ahead){NULL, 0});
    }
}

/* s[h, t] = scale * dot(q[h], k[t]): the scores of n_q heads of one row over n_k consecutive rows of a block.
 *   q [n_q, head_dim] row stride head_dim;  k [n_k, head_dim] row stride ldk;  s [n_q, n_k] row stride lds
 *   next [n_k, head_dim] row stride ldnext: what will be read after k. SIMD files ask memory for it a few lines
 *   at a time, between the arithmetic (27 GB/s; in one burst before it 15, measured); nothing here depends on it. */
static void pkv_attn_scores_f32_scalar(const float *q, int64_t n_q, const float *k, int64_t ldk, int64_t n_k,
                                       int64_t head_dim, float scale, float *s, int64_t lds, const float *next,
                                       int64_t ldnext) {
    (void)next, (void)ldnext;
    for (int64_t h = 0; h < n_q; h++)
        for (int64_t t = 0; t < n_k; t++)
            s[h * lds + t] = pkv_dot_f32_scalar(q + h * head_dim, k + t * ldk, head_dim) * scale;
}

/* acc[h, d] += sum_t p[h, t] v[t, d], t ascending, one FMA a step: the values of a block, weighted.
 *   p [n_q, n_k] row stride ldp;  v [n_k, head_dim] row stride ldv;  acc [n_q, head_dim]
 *   next, ldnext: as in pkv_attn_scores */
static void pkv_attn_values_f32_scalar(const float *p, int64_t ldp, int64_t n_q, const float *v, int64_t ldv,
                                       int64_t n_k, int64_t head_dim, float *acc, const float *next,
                                       int64_t ldnext) {
    (void)next, (void)ldnext;
    for (int64_t h = 0; h < n_q; h++)
        for (int64_t t = 0; t < n_k; t++)
            for (int64_t d = 0; d < head_dim; d++)
                acc[h * head_dim + d] = fmaf(p[h * ldp + t], v[t * ldv + d], acc[h * head_dim + d]);
}

/* Fold a later chunk (max_c, sum_c, acc_c) into the state (max, sum, acc) of all chunks before it. */
static void pkv_attn_merge_f32_scalar(float *max, float *sum, float *acc, float max_c, float sum_c,
                                      const float *acc_c, int64_t head_dim) {
    float top = max_c > *max ? max_c : *max;
    float keep = pkv_exp_f32_scalar(*max - top), take = pkv_exp_f32_scalar(max_c - top);
    *max = top;
    *sum = fmaf(*sum, keep, sum_c * take);
    for (int64_t d = 0; d < head_dim; d++)
        acc[d] = fmaf(acc[d], keep, acc_c[d] * take);
}

/* out[d] = acc[d] / sum: the end of one head's attention. */
static void pkv_attn_finish_f32_scalar(const float *acc, float sum, float *out, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d++)
        out[d] = acc[d] / sum;
}

/* cos and sin of an angle in radians, |angle| < 2^30, to about 1e-16: the same bits with every C library.
 * The angle less k * pi/2 (pi/2 in three parts, one FMA each), then the Taylor series up to r^17 and r^18,
 * whose remainder at pi/4 is below 1e-19. */
static inline void pkv_sincos_f64(double angle, double *sin_out, double *cos_out) {
    const double round = 6755399441055744.0; /* 1.5 * 2^52, as PKV_EXP_ROUND */
    double k = fma(angle, 0x1.45f306dc9c883p-1, round) - round;
    double r = fma(-k, 0x1.921fb54442d18p+0, angle);
    r = fma(-k, 0x1.1a62633145c07p-54, r);
    r = fma(-k, -0x1.f1976b7ed8fbcp-110, r);
    double z = r * r;
    double s = 1.0 / 355687428096000.0;
    s = fma(s, z, -1.0 / 1307674368000.0);
    s = fma(s, z, 1.0 / 6227020800.0);
    s = fma(s, z, -1.0 / 39916800.0);
    s = fma(s, z, 1.0 / 362880.0);
    s = fma(s, z, -1.0 / 5040.0);
    s = fma(s, z, 1.0 / 120.0);
    s = fma(s, z, -1.0 / 6.0);
    s = fma(s * z, r, r);
    double c = -1.0 / 6402373705728000.0;
    c = fma(c, z, 1.0 / 20922789888000.0);
    c = fma(c, z, -1.0 / 87178291200.0);
    c = fma(c, z, 1.0 / 479001600.0);
    c = fma(c, z, -1.0 / 3628800.0);
    c = fma(c, z, 1.0 / 40320.0);
    c = fma(c, z, -1.0 / 720.0);
    c = fma(c, z, 1.0 / 24.0);
    c = fma(c, z, -0.5);
    c = fma(c, z, 1.0);
    int64_t quadrant = (int64_t)k & 3;
    *sin_out = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
    *cos_out = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
}

/* cos and sin of position * inv_freq[i]: float64 throughout, rounded once.
 * No ISA has its own version, so there is nothing to keep equal. */
static inline void pkv_rope_table(int64_t position, const double *inv_freq, int64_t half, float *cos, float *sin) {
    for (int64_t i = 0; i < half; i++) {
        double c, s;
        pkv_sincos_f64((double)position * inv_freq[i], &s, &c);
        cos[i] = (float)c;
        sin[i] = (float)s;
    }
}

#endif
