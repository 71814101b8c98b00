/* One step of a Llama-family model: rows of any sequences through the layers, cut into tasks that threads
 * share. Every function here is one task; team.h runs them in parallel, a barrier between kinds.
 * A row is one token of one sequence. Each weight is read once for all rows of a step. */
#ifndef PAGEDKV_STEP_H
#define PAGEDKV_STEP_H

#include <stdint.h>
#include <string.h>

#include "attention.h"
#include "dispatch.h"
#include "layout.h"
#include "pool.h"

/* Rows that go through the layers together; a longer step runs in several passes, which no bit shows.
 * 512 rows keep the arithmetic near the FMA limit and the activations of an 8B model under 100 MB. */
#define PKV_STEP_ROWS 512

/* Steps of k that one pass of the matmul takes: the rows' x stays in L1 (11 rows x 512 x 4 B = 22 KiB), and
 * the panel's slice (64 KiB) in L2 while all rows pass over it. */
#define PKV_K_TILE 512

/* Panels whose slices lie in L2 together while the rows pass over them (256 KiB). */
#define PKV_SLICE_PANELS 4

typedef struct pkv_panel {
    const void *data; /* 64-byte aligned; see weights.h */
    int32_t dtype;
} pkv_panel;

/* Rows as a matmul reads them: x [n, k], and in the int8 mode the same as codes [n, k / 32], else NULL. */
typedef struct pkv_rows {
    const float *x;
    const pkv_int8_group *codes;
    int64_t n;
} pkv_rows;

/* A matrix [n, k] in panels of 32 columns, the last one padded with zeros. Each panel has its own type: files
 * mix them, and one matrix here may join several of a file. */
typedef struct pkv_weight {
    const pkv_panel *panels; /* [ceil(n / 32)] */
    int64_t n;
    int64_t k;
} pkv_weight;

typedef struct pkv_layer {
    const float *attn_norm; /* [hidden_dim] */
    const float *ffn_norm;  /* [hidden_dim] */
    const float *qkv_bias;  /* [qkv.n], or NULL */
    const float *q_norm;    /* [head_dim], or NULL: RMSNorm of each head of Q, before the rotation */
    const float *k_norm;    /* [head_dim]; NULL where q_norm is */
    int64_t window;         /* positions that a row sees at most; 0: all */
    pkv_weight qkv;         /* [qkv.n, hidden_dim]: Q, K and V, each padded to whole panels */
    pkv_weight o;           /* [hidden_dim, q_dim] */
    pkv_weight gate_up;     /* [2 * pad(ffn_dim), hidden_dim]: panels of gate and up in turn */
    pkv_weight down;        /* [hidden_dim, ffn_dim] */
} pkv_layer;

typedef struct pkv_model {
    int64_t n_layers, hidden_dim, ffn_dim, vocab_size;
    int64_t rope_half; /* rotating pairs of a head */
    pkv_attn_shape attn; /* its window is the widest of the layers' */
    float norm_eps;
    const double *inv_freq; /* [rope_half] radians a position */
    const pkv_layer *layers;
    const float *out_norm; /* [hidden_dim] */
    pkv_weight embedding;  /* [vocab_size, hidden_dim] */
    pkv_weight head;       /* [vocab_size, hidden_dim]; the embedding where tied */
    int int8;              /* compute="int8": quantised panels meet quantised activations; see int8_scalar.h */
} pkv_model;

/* How a step is left half-way. Between its tasks thread 0 asks now and then, and once the answer was yes all threads
 * pass over the tasks that are left. What was written by then is scratch, logits, and rows past the sequences' ends. */
typedef struct pkv_stop {
    int (*poll)(struct pkv_stop *stop); /* not 0: stop. NULL: never asked */
    double next_s;                      /* poll's own: before that time it has nothing to do */
    int64_t n_rows;                     /* of thread 0's tasks since it last asked */
    int is_set;                         /* written once, by thread 0; read through pkv_stop_is_set */
} pkv_stop;

/* Thread 0 asks before tasks of so many rows together. Asking costs some 30 ns, and a task at least a microsecond for
 * each of its rows. */
#define PKV_POLL_ROWS 32

static inline int pkv_stop_is_set(const pkv_stop *stop) {
#if defined(__GNUC__)
    return __atomic_load_n(&stop->is_set, __ATOMIC_RELAXED);
#else
    return *(const volatile int *)&stop->is_set;
#endif
}

static inline void pkv_stop_set(pkv_stop *stop) {
#if defined(__GNUC__)
    __atomic_store_n(&stop->is_set, 1, __ATOMIC_RELAXED);
#else
    *(volatile int *)&stop->is_set = 1;
#endif
}

/* One pass: up to PKV_STEP_ROWS rows, and the scratch planned for them. */
typedef struct pkv_step {
    const pkv_model *model;
    const pkv_kernels *kernels;
    int64_t n_rows;
    const int32_t *tokens;    /* [n_rows] */
    const int64_t *positions; /* [n_rows] index of the row in its sequence */
    pkv_seq *const *row_seqs; /* [n_rows] */
    pkv_attn_plan plan;
    pkv_stop *stop;         /* of the whole step */
    int64_t n_out;          /* rows whose logits are asked for */
    const int64_t *out_row; /* [n_out] ascending */
    float *logits;          /* [n_out, vocab_size] */
    float *x;               /* [n_rows, hidden_dim] the residual stream */
    float *normed;          /* [n_rows, hidden_dim] */
    float *qkv;             /* [n_rows, qkv.n] */
    float *attn;            /* [n_rows, q_dim] */
    float *proj;            /* [n_rows, hidden_dim] */
    float *ffn;             /* [n_rows, ffn_dim] */
    float *cos, *sin;       /* [n_rows, rope_half] */
    pkv_int8_group *normed_codes, *attn_codes, *ffn_codes; /* the int8 mode's normed, attn and ffn, else NULL */
    float *partials;
    float *thread; /* scratch of thread 0; the others follow */
    int64_t thread_len;
} pkv_step;

static inline int64_t pkv_q_dim(const pkv_model *m) { return m->attn.n_heads * m->attn.head_dim; }
static inline int64_t pkv_kv_dim(const pkv_model *m) { return m->attn.n_kv_heads * m->attn.head_dim; }

/* n rounded up to whole panels. */
static inline int64_t pkv_pad(int64_t n) { return pkv_panels_for(n) * PKV_PANEL; }

/* Columns of the joined Q, K and V. */
static inline int64_t pkv_qkv_len(const pkv_model *m) { return pkv_pad(pkv_q_dim(m)) + 2 * pkv_pad(pkv_kv_dim(m)); }

/* Up to this many rows x fits the cache at any k, and the sums need not leave the registers. */
#define PKV_FEW_ROWS 11

/* Rows that pass over a slice together: their x stays in L2 while they do. */
#define PKV_ROW_BLOCK 110

/* The same for codes, 2.3 KB a row at a k of 1,536. */
#define PKV_INT8_ROW_BLOCK 128

/* Groups that n_panels panels are cut into for n_threads threads: equal to within one panel, a multiple of the
 * threads, each of a slice's panels or fewer. */
static inline int64_t pkv_n_groups(int64_t n_panels, int64_t n_threads) {
    int64_t rounds = (n_panels - 1) / (n_threads * PKV_SLICE_PANELS) + 1;
    return pkv_min(n_panels, n_threads * (rounds < 2 ? 2 : rounds));
}

/* First panel of group i; group n_groups would begin at n_panels. */
static inline int64_t pkv_group_begin(int64_t i, int64_t n_groups, int64_t n_panels) {
    return i * n_panels / n_groups;
}

/* Floats of scratch that pkv_matmul_panels needs. */
#define PKV_MATMUL_SCRATCH (PKV_SLICE_PANELS * PKV_K_TILE * PKV_PANEL)

/* Values [k, k + n_k) of panel p in memory, nothing where there is no such panel. k and n_k are multiples of 256, or
 * go to the panel's end. */
static inline pkv_ahead pkv_panel_part(const pkv_weight *w, int64_t p, int64_t k, int64_t n_k) {
    if (p >= pkv_panels_for(w->n))
        return (pkv_ahead){NULL, 0};
    int dtype = w->panels[p].dtype;
    return (pkv_ahead){(const uint8_t *)w->panels[p].data + pkv_panel_nbytes(dtype, k), pkv_panel_nbytes(dtype, n_k)};
}

/* What a float32 matmul of panel p asks memory for, the panel after it: where the rows pass over p more than once, all
 * but the first time it is in the cache. In a single pass p itself is what memory is busy with. */
static inline pkv_ahead pkv_after_floats(const pkv_kernels *kernels, const pkv_weight *w, int64_t n_rows, int64_t p,
                                         int64_t k, int64_t n_k) {
    return n_rows > kernels->tile_rows ? pkv_panel_part(w, p + 1, k, n_k) : (pkv_ahead){NULL, 0};
}

/* The same for panel p of [begin, end), whose slices [k, k + tile) are multiplied in turn. An expanded slice is in the
 * cache, and memory is asked for what is expanded next in its place: the panel's next slice, or at the end that of a
 * panel as far into the next group, which is the thread's own but for its last one. */
static inline pkv_ahead pkv_after_slice(const pkv_kernels *kernels, const pkv_weight *w, int64_t n_rows, int64_t begin,
                                        int64_t end, int64_t p, int64_t k, int64_t tile) {
    if (w->panels[p].dtype == PKV_F32)
        return pkv_after_floats(kernels, w, n_rows, p, k, pkv_min(tile, w->k - k));
    if (k + tile < w->k)
        return pkv_panel_part(w, p, k + tile, pkv_min(tile, w->k - k - tile));
    return pkv_panel_part(w, end + p - begin, 0, pkv_min(tile, w->k));
}

/* At most PKV_SLICE_PANELS panels [begin, end) of y = x W^T, slice by slice of k, coded panels expanded
 * once for all rows; y starts at the first of these columns. */
static inline void pkv_matmul_slices(const pkv_kernels *kernels, pkv_rows in, const pkv_weight *w, int64_t begin,
                                     int64_t end, float *y, int64_t ldy, float *scratch) {
    int64_t n_rows = in.n;
    int64_t n_blocks = (n_rows + PKV_ROW_BLOCK - 1) / PKV_ROW_BLOCK, n_panels = end - begin;
    int64_t tile = n_rows > PKV_FEW_ROWS ? PKV_K_TILE : w->k;
    for (int64_t p = begin; p < end; p++)
        if (w->panels[p].dtype != PKV_F32)
            tile = pkv_min(tile, n_rows > PKV_FEW_ROWS ? PKV_K_TILE : PKV_CODED_K);
    for (int64_t k = 0; k < w->k; k += tile) {
        int64_t n_k = pkv_min(tile, w->k - k);
        const float *slices[PKV_SLICE_PANELS];
        for (int64_t j = 0; j < n_panels; j++) {
            const pkv_panel *panel = &w->panels[begin + j];
            if (panel->dtype == PKV_F32)
                slices[j] = (const float *)panel->data + k * PKV_PANEL;
            else {
                float *values = scratch + j * PKV_K_TILE * PKV_PANEL;
                kernels->expand(panel->dtype, (const uint8_t *)panel->data, k, n_k, values);
                slices[j] = values;
            }
        }
        for (int64_t i = 0; i < n_blocks; i++) {
            int64_t m = n_rows * i / n_blocks, rows = n_rows * (i + 1) / n_blocks - m;
            for (int64_t j = 0; j < n_panels; j++)
                kernels->matmul_f32(in.x + m * w->k + k, w->k, rows, slices[j], n_k, y + m * ldy + j * PKV_PANEL, ldy,
                                    pkv_min(PKV_PANEL, w->n - (begin + j) * PKV_PANEL), k > 0,
                                    pkv_after_slice(kernels, w, rows, begin, end, begin + j, k, tile));
        }
    }
}

/* Panels [begin, end) of y = x W^T in float32. */
static inline void pkv_matmul_f32_panels(const pkv_kernels *kernels, pkv_rows in, const pkv_weight *w, int64_t begin,
                                         int64_t end, float *y, int64_t ldy, float *scratch) {
    if (in.n > kernels->coded_rows) {
        for (int64_t p = begin; p < end; p += PKV_SLICE_PANELS)
            pkv_matmul_slices(kernels, in, w, p, pkv_min(p + PKV_SLICE_PANELS, end), y + (p - begin) * PKV_PANEL, ldy,
                              scratch);
        return;
    }
    for (int64_t p = begin; p < end; p++) {
        const pkv_panel *panel = &w->panels[p];
        int64_t n_cols = pkv_min(PKV_PANEL, w->n - p * PKV_PANEL);
        float *to = y + (p - begin) * PKV_PANEL;
        if (panel->dtype == PKV_F32)
            kernels->matmul_f32(in.x, w->k, in.n, (const float *)panel->data, w->k, to, ldy, n_cols, 0,
                                pkv_after_floats(kernels, w, in.n, p, 0, w->k));
        else
            kernels->matmul_coded(panel->dtype, in.x, w->k, in.n, (const uint8_t *)panel->data, w->k, to, ldy, n_cols);
    }
}

/* Steps of k of a slice for few rows: expanding waits for memory, products do not, so they take short turns. */
#define PKV_INT8_FEW_K 128

/* Quantised panels [begin, end) of y = x W^T in int8, slice by slice of k, each expanded once for a block of rows. */
static inline void pkv_matmul_int8_panels(const pkv_kernels *kernels, pkv_rows in, const pkv_weight *w, int64_t begin,
                                          int64_t end, float *y, int64_t ldy, float *scratch) {
    int64_t n_blocks = (in.n + PKV_INT8_ROW_BLOCK - 1) / PKV_INT8_ROW_BLOCK, ldx = w->k / PKV_INT8_GROUP;
    int64_t tile = in.n > PKV_FEW_ROWS ? PKV_INT8_K : PKV_INT8_FEW_K;
    uint8_t *slice = (uint8_t *)scratch;
    for (int64_t i = 0; i < n_blocks; i++) {
        int64_t m = in.n * i / n_blocks, n_rows = in.n * (i + 1) / n_blocks - m;
        for (int64_t p = begin; p < end; p++) {
            const pkv_panel *panel = &w->panels[p];
            for (int64_t k = 0; k < w->k; k += tile) {
                int64_t n_k = pkv_min(tile, w->k - k);
                kernels->expand_int8(panel->dtype, (const uint8_t *)panel->data, k, n_k, slice);
                kernels->matmul_int8(panel->dtype, in.codes + m * ldx + k / PKV_INT8_GROUP, ldx, n_rows, slice, n_k,
                                     y + m * ldy + (p - begin) * PKV_PANEL, ldy,
                                     pkv_min(PKV_PANEL, w->n - p * PKV_PANEL), k > 0);
            }
        }
    }
}

/* Whether a panel meets the rows' codes and not their floats. */
static inline int pkv_reads_codes(pkv_rows in, const pkv_panel *panel) {
    return in.codes && pkv_form_of(panel->dtype).has_scale;
}

/* Columns of panels [begin, end) of y = x W^T for all rows; y has row stride ldy and starts at the first of
 * these columns; scratch holds PKV_MATMUL_SCRATCH floats, 64-byte aligned. */
static inline void pkv_matmul_panels(const pkv_kernels *kernels, pkv_rows in, const pkv_weight *w, int64_t begin,
                                     int64_t end, float *y, int64_t ldy, float *scratch) {
    for (int64_t p = begin, stop; p < end; p = stop) {
        int reads_codes = pkv_reads_codes(in, &w->panels[p]);
        float *to = y + (p - begin) * PKV_PANEL;
        for (stop = p + 1; stop < end && pkv_reads_codes(in, &w->panels[stop]) == reads_codes;)
            stop++;
        if (reads_codes)
            pkv_matmul_int8_panels(kernels, in, w, p, stop, to, ldy, scratch);
        else
            pkv_matmul_f32_panels(kernels, in, w, p, stop, to, ldy, scratch);
    }
}

/* One group of the panels of y = x W^T, x [n_rows, k] and y [n_rows, n] whole. *n_cols is the group's number of
 * columns; returns the first of them. */
static inline int64_t pkv_matmul_group_cols(const pkv_kernels *kernels, pkv_rows in, const pkv_weight *w,
                                            int64_t group, int64_t n_groups, float *y, float *scratch,
                                            int64_t *n_cols) {
    int64_t n_panels = pkv_panels_for(w->n);
    int64_t begin = pkv_group_begin(group, n_groups, n_panels), end = pkv_group_begin(group + 1, n_groups, n_panels);
    int64_t col = begin * PKV_PANEL;
    *n_cols = pkv_min(end * PKV_PANEL, w->n) - col;
    pkv_matmul_panels(kernels, in, w, begin, end, y + col, w->n, scratch);
    return col;
}

/* The same, for callers that have nothing to do with the columns afterwards. */
static inline void pkv_matmul_group(const pkv_kernels *kernels, pkv_rows in, const pkv_weight *w, int64_t group,
                                    int64_t n_groups, float *y, float *scratch) {
    int64_t n_cols;
    pkv_matmul_group_cols(kernels, in, w, group, n_groups, y, scratch, &n_cols);
}

/* Scratch of a thread: the matmul's first, then what the task itself needs. */
static inline float *pkv_thread_scratch(const pkv_step *s, int thread) { return s->thread + thread * s->thread_len; }

/* First thing in every task that takes time: whether to pass over it. */
static inline int pkv_step_passes(const pkv_step *s, int thread) {
    pkv_stop *stop = s->stop;
    if (thread == 0 && stop->poll && (stop->n_rows += s->n_rows) >= PKV_POLL_ROWS) {
        stop->n_rows = 0;
        if (stop->poll(stop))
            pkv_stop_set(stop);
    }
    return pkv_stop_is_set(stop);
}

/* Row i: the token's embedding, read out of the packed matrix, and the rotation of its position. */
static inline void pkv_step_embed(const pkv_step *s, int64_t i) {
    const pkv_model *m = s->model;
    int64_t token = s->tokens[i];
    const pkv_panel *panel = &m->embedding.panels[token / PKV_PANEL];
    pkv_expand_column(panel->dtype, (const uint8_t *)panel->data, 0, m->hidden_dim, token % PKV_PANEL,
                      s->x + i * m->hidden_dim, 1);
    pkv_rope_table(s->positions[i], m->inv_freq, m->rope_half, s->cos + i * m->rope_half, s->sin + i * m->rope_half);
}

/* Values [begin, begin + n) of a row of `width` as codes, in the int8 mode; both are multiples of 32 there. */
static inline void pkv_step_quantize(const pkv_step *s, const float *x, pkv_int8_group *codes, int64_t width, int64_t i,
                                     int64_t begin, int64_t n) {
    if (codes)
        s->kernels->quantize_row(x + i * width + begin, n, codes + (i * width + begin) / PKV_INT8_GROUP);
}

/* Row `from` of the residual stream, normed into row i. */
static inline void pkv_step_norm_row(const pkv_step *s, const float *gamma, int64_t from, int64_t i) {
    int64_t n = s->model->hidden_dim;
    s->kernels->rmsnorm(s->x + from * n, gamma, s->model->norm_eps, s->normed + i * n, n);
    pkv_step_quantize(s, s->normed, s->normed_codes, n, i, 0, n);
}

static inline void pkv_step_norm(const pkv_step *s, const float *gamma, int64_t i) {
    pkv_step_norm_row(s, gamma, i, i);
}

static inline pkv_rows pkv_step_normed(const pkv_step *s, int64_t n) {
    return (pkv_rows){s->normed, s->normed_codes, n};
}

/* One group of panels of Q, K and V. */
static inline void pkv_step_qkv(const pkv_step *s, const pkv_layer *layer, int64_t group, int64_t n_groups,
                                int thread) {
    if (pkv_step_passes(s, thread))
        return;
    int64_t n = layer->qkv.n, n_cols;
    int64_t col = pkv_matmul_group_cols(s->kernels, pkv_step_normed(s, s->n_rows), &layer->qkv, group, n_groups,
                                        s->qkv, pkv_thread_scratch(s, thread), &n_cols);
    if (layer->qkv_bias)
        for (int64_t i = 0; i < s->n_rows; i++)
            s->kernels->add(s->qkv + i * n + col, layer->qkv_bias + col, n_cols);
}

/* n_heads heads of row i, from `head` on: normed where the layer has a norm for them, then rotated. */
static inline void pkv_step_rope(const pkv_step *s, float *head, int64_t n_heads, const float *norm, int64_t i) {
    const pkv_model *m = s->model;
    for (int64_t h = 0; h < n_heads; h++, head += m->attn.head_dim) {
        if (norm)
            s->kernels->rmsnorm(head, norm, m->norm_eps, head, m->attn.head_dim);
        s->kernels->rope(head, s->cos + i * m->rope_half, s->sin + i * m->rope_half, m->rope_half);
    }
}

/* Row i: rotate its Q and K by its position, and write K and V into its sequence. The step has reserved the
 * row (pkv_ensure_append_batch), so nothing is checked here. */
static inline void pkv_step_rope_append(const pkv_step *s, int64_t layer, int64_t i) {
    const pkv_model *m = s->model;
    int64_t kv_dim = pkv_kv_dim(m);
    float *q = s->qkv + i * pkv_qkv_len(m), *k = q + pkv_pad(pkv_q_dim(m)), *v = k + pkv_pad(kv_dim);
    pkv_step_rope(s, q, m->attn.n_heads, m->layers[layer].q_norm, i);
    pkv_step_rope(s, k, m->attn.n_kv_heads, m->layers[layer].k_norm, i);
    pkv_seq *seq = s->row_seqs[i];
    pkv_pool *pool = seq->pool;
    pkv_slot slot = pkv_seq_slot(seq, layer, s->positions[i]);
    s->kernels->kv_round(pool->dtype, k, kv_dim, pool->k + slot.values, pool->k + slot.scales);
    s->kernels->kv_round(pool->dtype, v, kv_dim, pool->v + slot.values, pool->v + slot.scales);
}

/* Attention's shape in one layer. */
static inline pkv_attn_shape pkv_step_attn_shape(const pkv_model *m, int64_t layer) {
    pkv_attn_shape shape = m->attn;
    shape.window = m->layers[layer].window;
    return shape;
}

static inline void pkv_step_attend(const pkv_step *s, int64_t layer, int64_t item, int thread) {
    if (pkv_step_passes(s, thread))
        return;
    const pkv_model *m = s->model;
    pkv_attn_shape shape = pkv_step_attn_shape(m, layer);
    pkv_attn_run(s->kernels, &shape, &s->plan, &s->plan.run[item], layer, s->qkv, pkv_qkv_len(m), s->attn,
                 pkv_q_dim(m), s->partials, pkv_thread_scratch(s, thread));
}

static inline void pkv_step_join(const pkv_step *s, int64_t layer, int64_t item) {
    const pkv_model *m = s->model;
    pkv_attn_shape shape = pkv_step_attn_shape(m, layer);
    pkv_attn_join(s->kernels, &shape, &s->plan, &s->plan.join[item], s->attn, pkv_q_dim(m), s->partials);
}

/* Row i of attention's output as codes, for the int8 mode. */
static inline void pkv_step_quantize_attn(const pkv_step *s, int64_t i) {
    int64_t n = pkv_q_dim(s->model);
    pkv_step_quantize(s, s->attn, s->attn_codes, n, i, 0, n);
}

/* One group of panels of a projection back into the residual stream: x += in W^T. */
static inline void pkv_step_project(const pkv_step *s, const pkv_weight *w, pkv_rows in, int64_t group,
                                    int64_t n_groups, int thread) {
    if (pkv_step_passes(s, thread))
        return;
    int64_t n_cols;
    int64_t col = pkv_matmul_group_cols(s->kernels, in, w, group, n_groups, s->proj, pkv_thread_scratch(s, thread),
                                        &n_cols);
    for (int64_t i = 0; i < in.n; i++)
        s->kernels->add(s->x + i * w->n + col, s->proj + i * w->n + col, n_cols);
}

static inline void pkv_step_attn_out(const pkv_step *s, const pkv_layer *layer, int64_t group, int64_t n_groups,
                                     int thread) {
    pkv_step_project(s, &layer->o, (pkv_rows){s->attn, s->attn_codes, s->n_rows}, group, n_groups, thread);
}

static inline void pkv_step_down(const pkv_step *s, const pkv_layer *layer, int64_t group, int64_t n_groups,
                                 int thread) {
    pkv_step_project(s, &layer->down, (pkv_rows){s->ffn, s->ffn_codes, s->n_rows}, group, n_groups, thread);
}

/* One panel of gate and its twin of up, through SwiGLU, while both are in the cache. */
static inline void pkv_step_gate_up(const pkv_step *s, const pkv_layer *layer, int64_t panel, int thread) {
    if (pkv_step_passes(s, thread))
        return;
    const pkv_model *m = s->model;
    float *scratch = pkv_thread_scratch(s, thread), *both = scratch + PKV_MATMUL_SCRATCH; /* [n_rows, 64] */
    int64_t n_cols = pkv_min(PKV_PANEL, m->ffn_dim - panel * PKV_PANEL);
    pkv_matmul_panels(s->kernels, pkv_step_normed(s, s->n_rows), &layer->gate_up, 2 * panel, 2 * panel + 2, both,
                      2 * PKV_PANEL, scratch);
    for (int64_t i = 0; i < s->n_rows; i++) {
        s->kernels->swiglu(both + i * 2 * PKV_PANEL, both + i * 2 * PKV_PANEL + PKV_PANEL,
                           s->ffn + i * m->ffn_dim + panel * PKV_PANEL, n_cols);
        pkv_step_quantize(s, s->ffn, s->ffn_codes, m->ffn_dim, i, panel * PKV_PANEL, n_cols);
    }
}

/* Output row i: the last norm, into the first n_out rows of normed. */
static inline void pkv_step_out_norm(const pkv_step *s, int64_t i) {
    pkv_step_norm_row(s, s->model->out_norm, s->out_row[i], i);
}

static inline void pkv_step_head(const pkv_step *s, int64_t group, int64_t n_groups, int thread) {
    if (pkv_step_passes(s, thread))
        return;
    pkv_matmul_group(s->kernels, pkv_step_normed(s, s->n_out), &s->model->head, group, n_groups, s->logits,
                     pkv_thread_scratch(s, thread));
}

/* Floats of scratch one thread needs. */
static inline int64_t pkv_step_thread_len(const pkv_model *m, int64_t n_rows) {
    int64_t matmul = PKV_MATMUL_SCRATCH + n_rows * 2 * PKV_PANEL, attn = pkv_attn_scratch_len(&m->attn);
    return ((matmul > attn ? matmul : attn) + 15) / 16 * 16;
}

/* Lay the scratch of n_rows rows out in one block of floats. With block NULL only the length is returned. */
static inline int64_t pkv_step_lay_out(pkv_step *s, const pkv_model *m, int64_t n_rows, int64_t n_threads,
                                       float *block) {
    int64_t at = 0;
#define PKV_TAKE(type, field, len)                                                                             \
    do {                                                                                                       \
        if (block)                                                                                             \
            s->field = (type *)(void *)(block + at);                                                           \
        at += ((len) + 15) / 16 * 16;                                                                          \
    } while (0)
/* Codes of rows of `width`, of which whole groups are needed wherever a quantised matrix reads them. */
#define PKV_TAKE_CODES(field, width)                                                                           \
    if (m->int8 && (width) % PKV_INT8_GROUP == 0)                                                              \
    PKV_TAKE(pkv_int8_group, field, n_rows * ((width) / PKV_INT8_GROUP) * (int64_t)(sizeof *s->field / sizeof *block))
    PKV_TAKE(float, x, n_rows * m->hidden_dim);
    PKV_TAKE(float, normed, n_rows * m->hidden_dim);
    PKV_TAKE(float, qkv, n_rows * pkv_qkv_len(m));
    PKV_TAKE(float, attn, n_rows * pkv_q_dim(m));
    PKV_TAKE(float, proj, n_rows * m->hidden_dim);
    PKV_TAKE(float, ffn, n_rows * m->ffn_dim);
    PKV_TAKE(float, cos, n_rows * m->rope_half);
    PKV_TAKE(float, sin, n_rows * m->rope_half);
    PKV_TAKE_CODES(normed_codes, m->hidden_dim);
    PKV_TAKE_CODES(attn_codes, pkv_q_dim(m));
    PKV_TAKE_CODES(ffn_codes, m->ffn_dim);
    s->thread_len = pkv_step_thread_len(m, n_rows);
    PKV_TAKE(float, thread, s->thread_len * n_threads);
#undef PKV_TAKE_CODES
#undef PKV_TAKE
    return at;
}

#endif
