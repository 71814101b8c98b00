/* From logits to a token. Everything here sees one row only and adds in a fixed order, so a draw has the same bits on
 * every machine and with any neighbours. Order of tokens, wherever one is needed: larger logit first, of equal ones
 * the lower id. Nothing sorts a vocabulary: a few hundred tokens near the maximum are gathered and cut by radix.
 * A row is read twice: for its maximum, and for the sum of its weights, chunk by chunk. The weights are not kept: what
 * is needed again is computed again, the same bits, for a chunk or for the tokens gathered. */
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

/* Loops over a row are compiled once for each width of registers, see the end; the C is the same, and so are the bits. */
#if defined(__GNUC__) || defined(__clang__)
#define PKV_ROW_LOOP static inline __attribute__((always_inline))
#else
#define PKV_ROW_LOOP static inline
#endif

/* One draw. All fields of 8 bytes: Python fills an array of these. */
typedef struct pkv_draw {
    int64_t row; /* of the logits */
    double temperature; /* > 0; 0: greedy */
    int64_t top_k;      /* 0: all */
    double top_p;       /* 1: all */
    double min_p;       /* 0: all */
    uint64_t seed, sample, position;
} pkv_draw;

/* A row of n logits and what is known of it. */
typedef struct pkv_row {
    const float *x;
    int64_t n;
    int64_t best; /* id of the largest, the lowest of equal ones; -1 where one is NaN or the largest is not finite */
    float max;
    double total; /* of the weights at temperature 1; 0 until somebody needs it */
} pkv_row;

/* Log-probabilities of a row: that of token i is x[i] - log_sum. */
typedef struct pkv_logprobs {
    double log_sum;
    int64_t rank;  /* of the token, from 1 on */
    int64_t n_top; /* at most n */
    int64_t *top;  /* [n_top] the first ids in order */
} pkv_logprobs;

/* What a thread needs for a row of n logits. */
typedef struct pkv_sample_scratch {
    uint64_t *order; /* [n] to be sorted */
    float *kept;     /* [n] weights of the candidates; where order is, which is needed when they are not any more */
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
        s->order = (uint64_t *)block;
        s->kept = (float *)block;
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

/* The largest of n numbers; *nan is set where one is NaN. By their bits, as integers in the same order: the compiler makes
 * vectors of an integer maximum, of a float one it does not. Of NaNs the magnitude is above infinity's. */
PKV_ROW_LOOP float pkv_chunk_max(const float *x, int64_t n, int32_t *nan) {
    int32_t max = INT32_MIN, magnitude = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t bits = pkv_f32_to_bits(x[i]), key = bits ^ (bits >> 31 & INT32_MAX), rest = bits & INT32_MAX;
        max = key > max ? key : max;
        magnitude = rest > magnitude ? rest : magnitude;
    }
    *nan |= magnitude > 0x7F800000;
    return pkv_bits_to_f32(max ^ (max >> 31 & INT32_MAX));
}

/* Look through n logits: the largest, its id, the chunks' maxima. */
PKV_ROW_LOOP pkv_row pkv_row_of(const float *x, int64_t n, float *maxima) {
    pkv_row row = {x, n, -1, -INFINITY, 0.0};
    int32_t nan = 0;
    for (int64_t c = 0; c < pkv_sample_chunks(n); c++) {
        int64_t begin = c * PKV_SAMPLE_CHUNK;
        maxima[c] = pkv_chunk_max(x + begin, pkv_min(PKV_SAMPLE_CHUNK, n - begin), &nan);
        row.max = maxima[c] > row.max ? maxima[c] : row.max;
    }
    if (nan || !(row.max >= -FLT_MAX && row.max <= FLT_MAX))
        return row;
    int64_t c = 0;
    while (maxima[c] != row.max)
        c++;
    row.best = c * PKV_SAMPLE_CHUNK;
    while (x[row.best] != row.max)
        row.best++;
    return row;
}

/* weights[i] = exp((x[i] - max) / temperature), or 0 where that is less than min_p: no temperature, however small, makes
 * a NaN of a distance. weights may be x. */
PKV_ROW_LOOP void pkv_weigh(const pkv_kernels *kernels, const float *x, int64_t n, float max, float temperature,
                            double min_p, float *weights) {
    if (temperature == 1.0f)
        for (int64_t i = 0; i < n; i++)
            weights[i] = x[i] - max;
    else
        for (int64_t i = 0; i < n; i++)
            weights[i] = (x[i] - max) / temperature;
    kernels->exp_row(weights, weights, n);
    if (min_p > 0.0)
        for (int64_t i = 0; i < n; i++)
            weights[i] = (double)weights[i] >= min_p ? weights[i] : 0.0f;
}

/* Sum of a chunk's weights, in 8 interleaved lanes and one tree. */
PKV_ROW_LOOP double pkv_chunk_sum(const float *weights, int64_t n) {
    double lanes[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int j = 0; j < 8; j++)
            lanes[j] += (double)weights[i + j];
    for (int j = 0; i < n; i++, j++)
        lanes[j] += (double)weights[i];
    for (int width = 4; width >= 1; width /= 2)
        for (int j = 0; j < width; j++)
            lanes[j] += lanes[j + width];
    return lanes[0];
}

/* Sums of the chunks of n weights; returns their sum, ascending. */
static inline double pkv_weight_sums(const float *weights, int64_t n, double *sums) {
    double total = 0.0;
    for (int64_t c = 0; c < pkv_sample_chunks(n); c++) {
        int64_t begin = c * PKV_SAMPLE_CHUNK;
        sums[c] = pkv_chunk_sum(weights + begin, pkv_min(PKV_SAMPLE_CHUNK, n - begin));
        total += sums[c];
    }
    return total;
}

/* The same of the weights of a row. */
PKV_ROW_LOOP double pkv_row_sums(const pkv_kernels *kernels, const pkv_row *row, float temperature, double min_p,
                                 double *sums) {
    float weights[PKV_SAMPLE_CHUNK];
    double total = 0.0;
    for (int64_t c = 0; c < pkv_sample_chunks(row->n); c++) {
        int64_t begin = c * PKV_SAMPLE_CHUNK, width = pkv_min(PKV_SAMPLE_CHUNK, row->n - begin);
        pkv_weigh(kernels, row->x + begin, width, row->max, temperature, min_p, weights);
        sums[c] = pkv_chunk_sum(weights, width);
        total += sums[c];
    }
    return total;
}

/* The chunk in which the running sum passes threshold, a part of the sum of all; always one that weighs something, even
 * where rounding lifted the threshold to all of it. *before is the sum ahead of the chunk. */
static inline int64_t pkv_chunk_above(const double *sums, int64_t n_chunks, double threshold, double *before) {
    int64_t chunk = 0;
    double reached = 0.0;
    *before = 0.0;
    for (int64_t c = 0; c < n_chunks; c++) {
        if (sums[c] > 0.0) {
            chunk = c;
            *before = reached;
        }
        reached += sums[c];
        if (reached > threshold && sums[c] > 0.0)
            break;
    }
    return chunk;
}

/* The place in a chunk of n weights at which the running sum, `before` ahead of it, passes threshold; else the last that
 * weighs something. */
static inline int64_t pkv_place_above(const float *weights, int64_t n, double before, double threshold) {
    int64_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(weights[i] > 0.0f))
            continue;
        found = i;
        before += (double)weights[i];
        if (before > threshold)
            break;
    }
    return found;
}

/* How far below the maximum candidates are looked for, in units of the temperature, until there are enough: a few
 * hundred of 49,152 as a rule. */
#define PKV_N_REACHES 5
static const double pkv_reaches[PKV_N_REACHES] = {4.0, 7.0, 11.0, 17.0, INFINITY};

/* Gather the ids of logits no further below the maximum, ascending, with their keys, and the logits as `kept`; returns
 * how many. */
PKV_ROW_LOOP int64_t pkv_gather(const pkv_row *row, double distance, pkv_sample_scratch *s) {
    double lowest = (double)row->max - distance;
    float bound = lowest < -FLT_MAX ? -INFINITY : (float)lowest;
    const float *x = row->x;
    int64_t m = 0;
    for (int64_t c = 0; c < pkv_sample_chunks(row->n); c++) {
        if (s->maxima[c] < bound)
            continue;
        int64_t end = pkv_min((c + 1) * PKV_SAMPLE_CHUNK, row->n);
        for (int64_t i = c * PKV_SAMPLE_CHUNK; i < end; i += 16) {
            int64_t stop = pkv_min(i + 16, end);
            int32_t any = stop < i + 16;
            if (!any)
                for (int j = 0; j < 16; j++)
                    any |= x[i + j] >= bound;
            if (!any)
                continue;
            for (int64_t j = i; j < stop; j++) { /* no branch: which of them pass is anybody's guess */
                s->ids[m] = (int32_t)j;
                m += x[j] >= bound;
            }
        }
    }
    for (int64_t i = 0; i < m; i++) {
        s->kept[i] = x[s->ids[i]];
        uint32_t bits = (uint32_t)pkv_f32_to_bits(s->kept[i] + 0.0f); /* -0 is 0 */
        s->keys[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
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

/* The token that a draw takes. Minus infinity excludes a token. Order of the rules, as in vLLM: temperature, min_p,
 * top_k, top_p. */
PKV_ROW_LOOP int64_t pkv_draw_token(const pkv_kernels *kernels, pkv_row *row, const pkv_draw *draw,
                                    pkv_sample_scratch *s) {
    float temperature = draw->temperature > FLT_MAX ? FLT_MAX : (float)draw->temperature;
    if (temperature == 0.0f || draw->top_k == 1)
        return row->best;
    int64_t top_k = draw->top_k < row->n ? draw->top_k : 0, m = row->n;
    int some = top_k > 0 || draw->top_p < 1.0; /* of the tokens are candidates: gathered; else all, which are not */
    double total = 0.0;
    if (top_k == 0)
        total = pkv_row_sums(kernels, row, temperature, draw->min_p, s->sums);
    if (temperature == 1.0f && draw->min_p == 0.0)
        row->total = total;
    for (int r = 0; some && r < PKV_N_REACHES; r++) {
        m = pkv_gather(row, pkv_reaches[r] * temperature, s);
        pkv_weigh(kernels, s->kept, m, row->max, temperature, draw->min_p, s->kept);
        if (top_k > 0 ? m >= top_k : pkv_weight_sums(s->kept, m, s->sums) >= draw->top_p * total)
            break;
    }
    if (top_k > 0) {
        m = pkv_cut(s, m, top_k, 0.0);
        total = pkv_weight_sums(s->kept, m, s->sums);
    }
    if (draw->top_p < 1.0)
        m = pkv_cut(s, m, 0, draw->top_p * total);
    if (some)
        total = pkv_weight_sums(s->kept, m, s->sums);
    double threshold = pkv_uniform(draw->seed, draw->sample, draw->position) * total, before;
    int64_t begin = pkv_chunk_above(s->sums, pkv_sample_chunks(m), threshold, &before) * PKV_SAMPLE_CHUNK;
    int64_t width = pkv_min(PKV_SAMPLE_CHUNK, m - begin);
    if (!some)
        pkv_weigh(kernels, row->x + begin, width, row->max, temperature, draw->min_p, s->kept + begin);
    int64_t place = begin + pkv_place_above(s->kept + begin, width, before, threshold);
    return some ? s->ids[place] : place;
}

/* Of the n logits of a row, how many come before one of them. */
PKV_ROW_LOOP int64_t pkv_count_before(const pkv_row *row, int64_t token, const float *maxima) {
    const float *x = row->x, value = x[token];
    int64_t n_before = 0;
    for (int64_t c = 0; c < pkv_sample_chunks(row->n); c++) {
        int64_t begin = c * PKV_SAMPLE_CHUNK, end = pkv_min(begin + PKV_SAMPLE_CHUNK, row->n);
        int32_t n = 0;
        if (maxima[c] < value)
            continue;
        for (int64_t i = begin; i < end; i++)
            n += x[i] > value;
        for (int64_t i = begin; i < pkv_min(token, end); i++)
            n += x[i] == value;
        n_before += n;
    }
    return n_before;
}

static int pkv_descending_u64(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

PKV_ROW_LOOP void pkv_row_logprobs(const pkv_kernels *kernels, pkv_row *row, int64_t token, pkv_logprobs *wanted,
                                   pkv_sample_scratch *s) {
    if (row->total == 0.0)
        row->total = pkv_row_sums(kernels, row, 1.0f, 0.0, s->sums);
    wanted->log_sum = (double)row->max + pkv_log_f64(row->total);
    wanted->rank = 1 + pkv_count_before(row, token, s->maxima);
    if (wanted->n_top == 0)
        return;
    int64_t m = 0;
    for (int r = 0; m < wanted->n_top && r < PKV_N_REACHES; r++)
        m = pkv_gather(row, pkv_reaches[r], s);
    m = pkv_cut(s, m, wanted->n_top, 0.0);
    for (int64_t i = 0; i < m; i++)
        s->order[i] = (uint64_t)s->keys[i] << 32 | (uint32_t)~s->ids[i];
    qsort(s->order, (size_t)m, sizeof *s->order, pkv_descending_u64);
    for (int64_t i = 0; i < m; i++)
        wanted->top[i] = (int64_t)(int32_t)~(uint32_t)s->order[i];
}

/* One row of n logits: the token of a draw, or, where draw is NULL, the one that is given; and its log-probabilities
 * where wanted is not NULL. Returns the token, or -1, with nothing written, where a logit is NaN or the largest is not
 * finite. */
PKV_ROW_LOOP int64_t pkv_take_row_of(const pkv_kernels *kernels, const float *x, int64_t n, const pkv_draw *draw,
                                     int64_t token, pkv_logprobs *wanted, pkv_sample_scratch *s) {
    pkv_row row = pkv_row_of(x, n, s->maxima);
    if (row.best < 0)
        return -1;
    if (draw)
        token = pkv_draw_token(kernels, &row, draw, s);
    if (wanted)
        pkv_row_logprobs(kernels, &row, token, wanted, s);
    return token;
}

#ifdef PKV_HAVE_X86
__attribute__((target("avx2"))) static int64_t pkv_take_row_avx2(const pkv_kernels *kernels, const float *x, int64_t n,
                                                                 const pkv_draw *draw, int64_t token,
                                                                 pkv_logprobs *wanted, pkv_sample_scratch *s) {
    return pkv_take_row_of(kernels, x, n, draw, token, wanted, s);
}
#endif

static inline int64_t pkv_take_row(const pkv_kernels *kernels, const float *x, int64_t n, const pkv_draw *draw,
                                   int64_t token, pkv_logprobs *wanted, pkv_sample_scratch *s) {
#ifdef PKV_HAVE_X86
    if (strcmp(kernels->isa, "scalar") != 0) /* the others have AVX2 */
        return pkv_take_row_avx2(kernels, x, n, draw, token, wanted, s);
#endif
    return pkv_take_row_of(kernels, x, n, draw, token, wanted, s);
}

#endif
