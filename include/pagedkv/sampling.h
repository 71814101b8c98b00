/* From logits to a token. Everything here sees one row only and adds in a fixed order, so a draw has the same bits on
 * every machine and with any neighbours. Order of tokens, wherever one is needed: larger logit first, of equal ones
 * the lower id. Nothing sorts a vocabulary: a few hundred tokens near the maximum are gathered and cut by radix. */
#ifndef PAGEDKV_SAMPLING_H
#define PAGEDKV_SAMPLING_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"

/* Ids of a chunk: each keeps its maximum and its sum, so that searches skip most of a row. */
#define PKV_SAMPLE_CHUNK 256

/* One draw. All fields of 8 bytes: Python fills an array of these. */
typedef struct pkv_draw {
    int64_t row; /* of the logits */
    double temperature; /* > 0; 0: greedy */
    int64_t top_k;      /* 0: all */
    double top_p;       /* 1: all */
    double min_p;       /* 0: all */
    uint64_t seed, sample, position;
} pkv_draw;

/* What a thread needs for a row of n logits. */
typedef struct pkv_sample_scratch {
    float *weights;  /* [n] */
    float *kept;     /* [n] weights of the candidates */
    uint32_t *keys;  /* [n] their logits, as integers in the same order */
    int32_t *ids;    /* [n] theirs, ascending */
    float *maxima;   /* [n / 256 + 1] of each chunk */
    double *sums;    /* [n / 256 + 1] of each chunk of weights */
} pkv_sample_scratch;

static inline int64_t pkv_sample_chunks(int64_t n) { return (n + PKV_SAMPLE_CHUNK - 1) / PKV_SAMPLE_CHUNK; }

/* Bytes of scratch for rows of n. Every part is a multiple of 64 bytes. */
static inline int64_t pkv_sample_lay_out(pkv_sample_scratch *s, int64_t n, unsigned char *block) {
    int64_t floats = (n + 15) / 16 * 64, chunks = (pkv_sample_chunks(n) + 15) / 16 * 64;
    if (block) {
        s->weights = (float *)block;
        s->kept = (float *)(block + floats);
        s->keys = (uint32_t *)(block + 2 * floats);
        s->ids = (int32_t *)(block + 3 * floats);
        s->maxima = (float *)(block + 4 * floats);
        s->sums = (double *)(block + 4 * floats + chunks);
    }
    return 4 * floats + 3 * chunks;
}

static inline uint64_t pkv_mul_high_u64(uint64_t a, uint64_t b) {
    uint64_t a_low = a & 0xFFFFFFFFu, a_high = a >> 32, b_low = b & 0xFFFFFFFFu, b_high = b >> 32;
    uint64_t low = a_low * b_low, cross = a_high * b_low + (low >> 32);
    uint64_t other = a_low * b_high + (cross & 0xFFFFFFFFu);
    return a_high * b_high + (cross >> 32) + (other >> 32);
}

/* A number in [0, 1) for (seed, sample, position): the first word of Philox4x64-10 (Salmon et al. 2011), key
 * (seed, sample), counter (position + 1, 0, 0, 0), as NumPy's Philox counts before it draws. Fixed for ever. */
static inline double pkv_uniform(uint64_t seed, uint64_t sample, uint64_t position) {
    uint64_t c0 = position + 1, c1 = c0 == 0, c2 = 0, c3 = 0, k0 = seed, k1 = sample;
    for (int i = 0; i < 10; i++) {
        uint64_t high0 = pkv_mul_high_u64(c0, 0xD2E7470EE14C6C93u), low0 = c0 * 0xD2E7470EE14C6C93u;
        uint64_t high1 = pkv_mul_high_u64(c2, 0xCA5A826395121157u), low1 = c2 * 0xCA5A826395121157u;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    return (double)(c0 >> 11) * 0x1p-53;
}

/* Natural logarithm of a positive normal number to about 1e-16: the same bits with every C library.
 * x = 2^e m, 0.7 < m < 1.42, and log m = 2 atanh(s) with s = (m - 1) / (m + 1), |s| < 0.172. */
static inline double pkv_log_f64(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t e = (int64_t)((bits - 0x3FE6A09E667F3BCDu) >> 52); /* bits of sqrt(1/2): where m starts */
    e = e >= 2048 ? e - 4096 : e;
    bits -= (uint64_t)e << 52;
    memcpy(&x, &bits, sizeof x);
    double s = (x - 1.0) / (x + 1.0), z = s * s, series = 1.0 / 21.0;
    for (int k = 19; k >= 3; k -= 2)
        series = fma(series, z, 1.0 / k);
    series = fma(series * z, s, s);
    return fma((double)e, 0x1.62e42fefa39efp-1, fma((double)e, 0x1.abc9e3b39803fp-56, 2.0 * series));
}

/* The largest of n numbers, NaNs passed over; *nan is set where there is one. Whole chunks have their own loops, whose
 * lengths the compiler knows: it makes vectors of them, twice as fast as one loop for both. */
static inline float pkv_chunk_max(const float *x, int64_t n, int32_t *nan) {
    float lanes[16], max = -INFINITY;
    int32_t bad = 0;
    if (n < PKV_SAMPLE_CHUNK) {
        for (int64_t i = 0; i < n; i++) {
            max = x[i] > max ? x[i] : max;
            bad |= x[i] != x[i];
        }
        *nan |= bad;
        return max;
    }
    for (int j = 0; j < 16; j++)
        lanes[j] = x[j];
    for (int i = 16; i < PKV_SAMPLE_CHUNK; i += 16)
        for (int j = 0; j < 16; j++)
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (int i = 0; i < PKV_SAMPLE_CHUNK; i++)
        bad |= x[i] != x[i];
    for (int j = 0; j < 16; j++)
        max = lanes[j] > max ? lanes[j] : max;
    *nan |= bad;
    return max;
}

/* Id of the largest of n logits, the lowest of equal ones, and the chunks' maxima; -1 where one is NaN or the
 * largest is not finite. */
static inline int64_t pkv_row_max(const float *x, int64_t n, float *maxima, float *max) {
    int32_t nan = 0;
    *max = -INFINITY;
    for (int64_t c = 0; c < pkv_sample_chunks(n); c++) {
        int64_t begin = c * PKV_SAMPLE_CHUNK;
        maxima[c] = pkv_chunk_max(x + begin, pkv_min(PKV_SAMPLE_CHUNK, n - begin), &nan);
        *max = maxima[c] > *max ? maxima[c] : *max;
    }
    if (nan || !(*max >= -FLT_MAX && *max <= FLT_MAX))
        return -1;
    int64_t c = 0;
    while (maxima[c] != *max)
        c++;
    int64_t i = c * PKV_SAMPLE_CHUNK;
    while (x[i] != *max)
        i++;
    return i;
}

/* weights[i] = exp((x[i] - max) / temperature): no temperature, however small, makes a NaN of a distance. */
static inline void pkv_row_weights(const pkv_kernels *kernels, const float *x, int64_t n, float max,
                                   float temperature, float *weights) {
    if (temperature == 1.0f)
        for (int64_t i = 0; i < n; i++)
            weights[i] = x[i] - max;
    else
        for (int64_t i = 0; i < n; i++)
            weights[i] = (x[i] - max) / temperature;
    kernels->exp_row(weights, weights, n);
}

/* Sums of the chunks of n weights, each in 8 interleaved lanes and one tree; returns their sum, ascending. */
static inline double pkv_weight_sums(const float *weights, int64_t n, double *sums) {
    double total = 0.0;
    for (int64_t c = 0; c < pkv_sample_chunks(n); c++) {
        int64_t begin = c * PKV_SAMPLE_CHUNK, end = pkv_min(begin + PKV_SAMPLE_CHUNK, n), i = begin;
        double lanes[8] = {0};
        for (; i + 8 <= end; i += 8)
            for (int j = 0; j < 8; j++)
                lanes[j] += (double)weights[i + j];
        for (int j = 0; i < end; i++, j++)
            lanes[j] += (double)weights[i];
        for (int width = 4; width >= 1; width /= 2)
            for (int j = 0; j < width; j++)
                lanes[j] += lanes[j + width];
        sums[c] = lanes[0];
        total += sums[c];
    }
    return total;
}

/* First place at which the running sum of n weights passes threshold, a part of their sum; always one that weighs
 * something, even where rounding lifted the threshold to all of it. */
static inline int64_t pkv_first_above(const float *weights, int64_t n, const double *sums, double threshold) {
    int64_t chunk = 0, found = 0;
    double reached = 0.0, before = 0.0;
    for (int64_t c = 0; c < pkv_sample_chunks(n); c++) {
        if (sums[c] > 0.0) {
            chunk = c;
            before = reached;
        }
        reached += sums[c];
        if (reached > threshold && sums[c] > 0.0)
            break;
    }
    for (int64_t i = chunk * PKV_SAMPLE_CHUNK; i < pkv_min((chunk + 1) * PKV_SAMPLE_CHUNK, n); i++) {
        if (!(weights[i] > 0.0f))
            continue;
        found = i;
        before += (double)weights[i];
        if (before > threshold)
            break;
    }
    return found;
}

/* Gather the ids of logits >= bound, ascending, with their keys and weights; returns how many. */
static inline int64_t pkv_gather_near(const float *x, const float *weights, int64_t n, float bound,
                                      pkv_sample_scratch *s) {
    int64_t m = 0;
    for (int64_t c = 0; c < pkv_sample_chunks(n); c++) {
        if (s->maxima[c] < bound)
            continue;
        int64_t end = pkv_min((c + 1) * PKV_SAMPLE_CHUNK, n);
        for (int64_t i = c * PKV_SAMPLE_CHUNK; i < end; i++) { /* no branch: which of them pass is anybody's guess */
            s->ids[m] = (int32_t)i;
            m += x[i] >= bound;
        }
    }
    for (int64_t i = 0; i < m; i++) {
        uint32_t bits = (uint32_t)pkv_f32_to_bits(x[s->ids[i]] + 0.0f); /* -0 is 0 */
        s->keys[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
        s->kept[i] = weights[s->ids[i]];
    }
    return m;
}

/* Keep the first of m candidates in order: top_k of them where that is positive, else as few as weigh `needed`
 * (all, where rounding leaves them a bit below it). Radix search for the last key kept, then one sweep; ids stay
 * ascending. Returns how many are left. */
static inline int64_t pkv_cut(pkv_sample_scratch *s, int64_t m, int64_t top_k, double needed) {
    uint32_t prefix = 0, mask = 0;
    int64_t n_above = 0, left = 0;
    double above = 0.0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256] = {0};
        double sums[256] = {0};
        for (int64_t i = 0; i < m; i++)
            if ((s->keys[i] & mask) == prefix) {
                counts[s->keys[i] >> shift & 255]++;
                sums[s->keys[i] >> shift & 255] += (double)s->kept[i];
            }
        int lowest = 0;
        while (counts[lowest] == 0)
            lowest++;
        int digit = 255;
        while (digit > lowest && !(counts[digit] > 0 && (top_k > 0 ? n_above + counts[digit] >= top_k
                                                                   : above + sums[digit] >= needed))) {
            n_above += counts[digit];
            above += sums[digit];
            digit--;
        }
        prefix |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    for (int64_t i = 0; i < m; i++) {
        if (s->keys[i] < prefix)
            continue;
        if (s->keys[i] == prefix) {
            if (top_k > 0 ? n_above >= top_k : above >= needed)
                continue;
            n_above++;
            above += (double)s->kept[i];
        }
        s->keys[left] = s->keys[i];
        s->kept[left] = s->kept[i];
        s->ids[left++] = s->ids[i];
    }
    return left;
}

/* Gather the candidates nearest the maximum until there are top_k, or, with top_k 0, until they weigh `needed`. By
 * distance in units of the temperature: a few hundred of 49,152 as a rule. */
static inline int64_t pkv_candidates(const float *x, const float *weights, int64_t n, float max, double temperature,
                                     int64_t top_k, double needed, pkv_sample_scratch *s) {
    static const double reaches[] = {4.0, 7.0, 11.0, 17.0, INFINITY};
    int64_t m = 0;
    for (int r = 0; r < 5; r++) {
        double bound = (double)max - reaches[r] * temperature;
        int all = bound < -FLT_MAX;
        m = pkv_gather_near(x, weights, n, all ? -INFINITY : (float)bound, s);
        if (all || (top_k > 0 ? m >= top_k : pkv_weight_sums(s->kept, m, s->sums) >= needed))
            break;
    }
    return m;
}

/* One token of a row of n logits; -1 where one is NaN or the largest is not finite. Minus infinity excludes a token.
 * Order of the rules, as in vLLM: temperature, min_p, top_k, top_p. */
static inline int64_t pkv_sample_row(const pkv_kernels *kernels, const float *x, int64_t n, const pkv_draw *draw,
                                     pkv_sample_scratch *s) {
    float max, temperature = draw->temperature > FLT_MAX ? FLT_MAX : (float)draw->temperature;
    int64_t best = pkv_row_max(x, n, s->maxima, &max);
    if (best < 0 || temperature == 0.0f || draw->top_k == 1)
        return best;
    double uniform = pkv_uniform(draw->seed, draw->sample, draw->position);
    int64_t top_k = draw->top_k < n ? draw->top_k : 0;
    pkv_row_weights(kernels, x, n, max, temperature, s->weights);
    if (draw->min_p > 0.0)
        for (int64_t i = 0; i < n; i++)
            s->weights[i] = (double)s->weights[i] >= draw->min_p ? s->weights[i] : 0.0f;
    double total = top_k > 0 ? 0.0 : pkv_weight_sums(s->weights, n, s->sums);
    if (top_k == 0 && draw->top_p >= 1.0)
        return pkv_first_above(s->weights, n, s->sums, uniform * total);
    int64_t m = pkv_candidates(x, s->weights, n, max, temperature, top_k, draw->top_p * total, s);
    if (top_k > 0) {
        m = pkv_cut(s, m, top_k, 0.0);
        total = pkv_weight_sums(s->kept, m, s->sums);
    }
    if (draw->top_p < 1.0)
        m = pkv_cut(s, m, 0, draw->top_p * total);
    total = pkv_weight_sums(s->kept, m, s->sums);
    return s->ids[pkv_first_above(s->kept, m, s->sums, uniform * total)];
}

static int pkv_descending_u64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

/* Log-probabilities of a row: log_sum such that that of token i is x[i] - log_sum, the rank of `chosen` from 1 on,
 * and the first n_top ids in order, n_top <= n. With chosen < 0 no rank. Returns as pkv_row_max. */
static inline int64_t pkv_logprobs_row(const pkv_kernels *kernels, const float *x, int64_t n, int64_t chosen,
                                       int64_t n_top, double *log_sum, int64_t *rank, int64_t *top,
                                       pkv_sample_scratch *s) {
    float max;
    int64_t best = pkv_row_max(x, n, s->maxima, &max);
    if (best < 0)
        return best;
    pkv_row_weights(kernels, x, n, max, 1.0f, s->weights);
    *log_sum = (double)max + pkv_log_f64(pkv_weight_sums(s->weights, n, s->sums));
    *rank = 0;
    if (chosen >= 0) {
        int64_t n_before = 0;
        for (int64_t i = 0; i < chosen; i++)
            n_before += x[i] >= x[chosen];
        for (int64_t i = chosen + 1; i < n; i++)
            n_before += x[i] > x[chosen];
        *rank = 1 + n_before;
    }
    if (n_top > 0) {
        int64_t m = pkv_cut(s, pkv_candidates(x, x, n, max, 1.0, n_top, 0.0, s), n_top, 0.0);
        uint64_t *both = (uint64_t *)s->weights; /* 8 bytes each: weights and kept, which are not needed any more */
        for (int64_t i = 0; i < m; i++)
            both[i] = (uint64_t)s->keys[i] << 32 | (uint32_t)~s->ids[i];
        qsort(both, (size_t)m, sizeof *both, pkv_descending_u64);
        for (int64_t i = 0; i < m; i++)
            top[i] = (int64_t)(int32_t)~(uint32_t)both[i];
    }
    return best;
}

#endif
