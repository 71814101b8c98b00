/* The tasks of a step, of attention and of a matmul, shared out over one team of threads (OpenMP; without it, one
 * thread). A loop of tasks ends in a barrier: the next kind reads what this one wrote. The loops stand here and not in
 * Cython, whose prange has promised no barrier since 3.3. */
#ifndef PAGEDKV_TEAM_H
#define PAGEDKV_TEAM_H

#ifdef _OPENMP
#include <omp.h>
static inline int pkv_thread_id(void) { return omp_get_thread_num(); }
#else
static inline int pkv_thread_id(void) { return 0; }
#endif

#include "fpenv.h"
#include "step.h"

/* call for each i of [0, n), and then a barrier. STATIC: equal shares, the same for the same n. DYNAMIC: whoever is free. */
#define PKV_STATIC "omp for schedule(static)"
#define PKV_DYNAMIC "omp for schedule(dynamic)"
#define PKV_EACH(n, schedule, call) _Pragma(schedule) for (int64_t i = 0; i < (n); i++) call

/* All layers over the rows of one pass, and the logits that are asked for. */
static inline void pkv_team_step(const pkv_step *s, int n_threads) {
    const pkv_model *m = s->model;
    const pkv_layer *first = &m->layers[0]; /* all layers are cut alike */
    int64_t qkv_groups = pkv_n_groups(pkv_panels_for(first->qkv.n), n_threads);
    int64_t o_groups = pkv_n_groups(pkv_panels_for(first->o.n), n_threads);
    int64_t down_groups = pkv_n_groups(pkv_panels_for(first->down.n), n_threads);
    int64_t head_groups = pkv_n_groups(pkv_panels_for(m->vocab_size), n_threads);
#pragma omp parallel num_threads(n_threads)
    {
        int thread = pkv_thread_id();
        uint64_t saved = pkv_fpenv_enter();
        PKV_EACH(s->n_rows, PKV_STATIC, pkv_step_embed(s, i));
        for (int64_t n = 0; n < m->n_layers; n++) {
            /* All threads see the same here, as thread 0 sets it in tasks that take time, and before the first of these
             * come the norms, whose barrier it cannot pass alone. */
            if (pkv_stop_is_set(s->stop))
                break;
            const pkv_layer *layer = &m->layers[n];
            PKV_EACH(s->n_rows, PKV_STATIC, pkv_step_norm(s, layer->attn_norm, i));
            PKV_EACH(qkv_groups, PKV_STATIC, pkv_step_qkv(s, layer, i, qkv_groups, thread));
            PKV_EACH(s->n_rows, PKV_STATIC, pkv_step_rope_append(s, n, i));
            PKV_EACH(s->plan.n_run, PKV_DYNAMIC, pkv_step_attend(s, n, i, thread));
            if (s->plan.n_join)
                PKV_EACH(s->plan.n_join, PKV_STATIC, pkv_step_join(s, n, i));
            if (s->attn_codes)
                PKV_EACH(s->n_rows, PKV_STATIC, pkv_step_quantize_attn(s, i));
            PKV_EACH(o_groups, PKV_STATIC, pkv_step_attn_out(s, layer, i, o_groups, thread));
            PKV_EACH(s->n_rows, PKV_STATIC, pkv_step_norm(s, layer->ffn_norm, i));
            PKV_EACH(pkv_panels_for(m->ffn_dim), PKV_STATIC, pkv_step_gate_up(s, layer, i, thread));
            PKV_EACH(down_groups, PKV_STATIC, pkv_step_down(s, layer, i, down_groups, thread));
        }
        if (s->n_out) {
            PKV_EACH(s->n_out, PKV_STATIC, pkv_step_out_norm(s, i));
            PKV_EACH(head_groups, PKV_STATIC, pkv_step_head(s, i, head_groups, thread));
        }
        pkv_fpenv_leave(saved);
    }
}

/* A planned attention over one layer. q, out [rows, ld]; scratch [n_threads, scratch_len]. */
static inline void pkv_team_attention(const pkv_kernels *kernels, const pkv_attn_shape *shape, const pkv_attn_plan *plan,
                                      int64_t layer, const float *q, float *out, int64_t ld, float *partials,
                                      float *scratch, int64_t scratch_len, int n_threads) {
#pragma omp parallel num_threads(n_threads)
    {
        float *own = scratch + pkv_thread_id() * scratch_len;
        uint64_t saved = pkv_fpenv_enter();
        PKV_EACH(plan->n_run, PKV_DYNAMIC,
                 pkv_attn_run(kernels, shape, plan, &plan->run[i], layer, q, ld, out, ld, partials, own));
        PKV_EACH(plan->n_join, PKV_STATIC,
                 pkv_attn_join(kernels, shape, plan, &plan->join[i], out, ld, partials));
        pkv_fpenv_leave(saved);
    }
}

/* y [n, w.n] = x [n, w.k] times the transpose of w; scratch [n_threads, PKV_MATMUL_SCRATCH]. codes: NULL, or room for
 * those of all rows, [n, w.k / 32], which then meet the quantised panels. */
static inline void pkv_team_matmul(const pkv_kernels *kernels, const float *x, pkv_int8_group *codes, int64_t n,
                                   const pkv_weight *w, float *y, float *scratch, int n_threads) {
    pkv_rows rows = {x, codes, n};
    int64_t n_groups = pkv_n_groups(pkv_panels_for(w->n), n_threads);
#pragma omp parallel num_threads(n_threads)
    {
        float *own = scratch + pkv_thread_id() * PKV_MATMUL_SCRATCH;
        uint64_t saved = pkv_fpenv_enter();
        if (codes)
            PKV_EACH(n, PKV_STATIC, kernels->quantize_row(x + i * w->k, w->k, codes + i * (w->k / PKV_INT8_GROUP)));
        PKV_EACH(n_groups, PKV_STATIC, pkv_matmul_group(kernels, rows, w, i, n_groups, y, own));
        pkv_fpenv_leave(saved);
    }
}

#endif
