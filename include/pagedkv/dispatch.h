/* Which instruction set runs: a table of kernels for each, all giving the same bits.
 * Which tables exist is fixed by the compiler's target; which of them this CPU can run is asked at run time. */
#ifndef PAGEDKV_DISPATCH_H
#define PAGEDKV_DISPATCH_H

#include <stddef.h>
#include <stdint.h>

#include "int8_scalar.h"
#include "kernels_scalar.h"

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#define PKV_HAVE_X86 1
#include <cpuid.h>

#include "int8_avx2.h"
#include "int8_avx512.h"
#include "kernels_avx2.h"
#include "kernels_avx512.h"
#endif
#if defined(__aarch64__)
#define PKV_HAVE_NEON 1
#include "int8_neon.h"
#include "kernels_neon.h"
#endif

/* Arguments and results: kernels_scalar.h, int8_scalar.h. */
typedef struct pkv_kernels {
    const char *isa;
    float (*dot)(const float *a, const float *b, int64_t n);
    void (*exp_row)(const float *x, float *y, int64_t n);
    void (*softmax)(const float *x, float *y, int64_t n);
    void (*softmax_chunk)(float *s, int64_t n, float *max, float *sum);
    void (*rmsnorm)(const float *x, const float *gamma, float eps, float *y, int64_t n);
    void (*rope)(float *head, const float *cos, const float *sin, int64_t half);
    void (*swiglu)(const float *gate, const float *up, float *y, int64_t n);
    void (*add)(float *y, const float *x, int64_t n);
    void (*matmul_f32)(const float *x, int64_t ldx, int64_t n_rows, const float *panel, int64_t n_k, float *y,
                       int64_t ldy, int64_t n_cols, int accumulate, pkv_ahead ahead);
    int64_t tile_rows; /* more rows than these pass over a panel more than once */
    void (*matmul_coded)(int dtype, const float *x, int64_t ldx, int64_t n_rows, const uint8_t *panel, int64_t n_k,
                         float *y, int64_t ldy, int64_t n_cols);
    int64_t coded_rows; /* matmul_coded takes 1 to this many rows */
    void (*expand)(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, float *out);
    void (*kv_round)(int dtype, const float *x, int64_t n, uint8_t *values, uint8_t *scales);
    void (*kv_expand)(int dtype, const pkv_kv_rows *rows, int64_t n_rows, int64_t n, float *out, const uint8_t *next,
                      int64_t next_stride);
    void (*attn_scores)(const float *q, int64_t n_q, const float *k, int64_t ldk, int64_t n_k, int64_t head_dim,
                        float scale, float *s, int64_t lds, const float *next, int64_t ldnext);
    void (*attn_values)(const float *p, int64_t ldp, int64_t n_q, const float *v, int64_t ldv, int64_t n_k,
                        int64_t head_dim, float *acc, const float *next, int64_t ldnext);
    void (*attn_merge)(float *max, float *sum, float *acc, float max_c, float sum_c, const float *acc_c,
                       int64_t head_dim);
    void (*attn_finish)(const float *acc, float sum, float *out, int64_t head_dim);
    void (*quantize_row)(const float *x, int64_t n, pkv_int8_group *groups);
    void (*expand_int8)(int dtype, const uint8_t *panel, int64_t k_0, int64_t n_k, uint8_t *slice);
    void (*matmul_int8)(int dtype, const pkv_int8_group *x, int64_t ldx, int64_t n_rows, const uint8_t *slice,
                        int64_t n_k, float *y, int64_t ldy, int64_t n_cols, int accumulate);
} pkv_kernels;

/* Where a type is expanded slice by slice all the same, few rows are enough. */
#define PKV_CODED_ROWS_scalar 4
#define PKV_CODED_ROWS_avx2 4
#define PKV_CODED_ROWS_neon 4

#define PKV_TILE_ROWS_scalar 1
#define PKV_TILE_ROWS_avx2 PKV_MAX_ROWS_AVX2
#define PKV_TILE_ROWS_avx512 PKV_MAX_ROWS_AVX512
#define PKV_TILE_ROWS_neon PKV_MAX_ROWS_NEON

#define PKV_KERNELS(ISA)                                                                                       \
    {#ISA,                                                                                                     \
     pkv_dot_f32_##ISA,                                                                                        \
     pkv_exp_row_f32_##ISA,                                                                                    \
     pkv_softmax_f32_##ISA,                                                                                    \
     pkv_softmax_chunk_f32_##ISA,                                                                              \
     pkv_rmsnorm_f32_##ISA,                                                                                    \
     pkv_rope_f32_##ISA,                                                                                       \
     pkv_swiglu_f32_##ISA,                                                                                     \
     pkv_add_f32_##ISA,                                                                                        \
     pkv_matmul_f32_##ISA,                                                                                     \
     PKV_TILE_ROWS_##ISA,                                                                                      \
     pkv_matmul_coded_##ISA,                                                                                   \
     PKV_CODED_ROWS_##ISA,                                                                                     \
     pkv_expand_##ISA,                                                                                         \
     pkv_kv_round_##ISA,                                                                                       \
     pkv_kv_expand_##ISA,                                                                                      \
     pkv_attn_scores_f32_##ISA,                                                                                \
     pkv_attn_values_f32_##ISA,                                                                                \
     pkv_attn_merge_f32_##ISA,                                                                                 \
     pkv_attn_finish_f32_##ISA,                                                                                \
     pkv_quantize_row_##ISA,                                                                                   \
     pkv_expand_int8_##ISA,                                                                                    \
     pkv_matmul_int8_##ISA}

/* Best first; scalar is the last and runs everywhere. */
static const pkv_kernels pkv_kernel_tables[] = {
#ifdef PKV_HAVE_X86
    PKV_KERNELS(avx512),
    PKV_KERNELS(avx2),
#endif
#ifdef PKV_HAVE_NEON
    PKV_KERNELS(neon),
#endif
    PKV_KERNELS(scalar),
};

static inline int pkv_n_kernel_tables(void) { return (int)(sizeof pkv_kernel_tables / sizeof *pkv_kernel_tables); }

#ifdef PKV_HAVE_X86
/* F16C, which __builtin_cpu_supports knows by name only since GCC 11 and clang 18. */
static inline int pkv_cpu_has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* Whether this CPU and operating system run the i-th table's instructions. */
static inline int pkv_isa_runs(int i) {
    const char *isa = pkv_kernel_tables[i].isa;
#ifdef PKV_HAVE_X86
    __builtin_cpu_init();
    if (strcmp(isa, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma");
    if (strcmp(isa, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && pkv_cpu_has_f16c();
#endif
    (void)isa;
    return 1; /* scalar; NEON is part of every AArch64 */
}

/* The table called isa, or the best one that runs where isa is NULL; NULL where there is none. */
static inline const pkv_kernels *pkv_kernels_for(const char *isa) {
    for (int i = 0; i < pkv_n_kernel_tables(); i++)
        if ((!isa || strcmp(isa, pkv_kernel_tables[i].isa) == 0) && pkv_isa_runs(i))
            return &pkv_kernel_tables[i];
    return NULL;
}

#endif
