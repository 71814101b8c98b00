/* Two sequences that share a prefix in one paged pool, and attention over both, in C alone.
 *
 *   include=$(python -c "import pagedkv; print(pagedkv.get_include())")
 *   cc -std=c11 -O2 -ffp-contract=off -isystem "$include" shared_prefix.c -lm -o shared_prefix && ./shared_prefix
 */
#include <stdio.h>

#include "pagedkv/attention.h"
#include "pagedkv/fpenv.h"
#include "pagedkv/pool.h"

enum { HEAD_DIM = 8, BLOCK_SIZE = 16, N_PREFIX = 20 };

/* Append n rows of `value` to the only layer. */
static pkv_status append(pkv_seq *seq, int64_t n, float value) {
    int64_t needed;
    pkv_status status = pkv_ensure_append(seq, n, &needed);
    float row[HEAD_DIM];
    for (int i = 0; i < HEAD_DIM; i++)
        row[i] = value;
    for (int64_t t = 0; t < n && status == PKV_OK; t++) {
        status = pkv_append_layer(seq, 0, row, row, 1);
        if (status == PKV_OK)
            status = pkv_advance(seq, 1);
    }
    return status;
}

/* Attention of one row, one head, over all positions of seq; out [HEAD_DIM]. */
static int attend(const pkv_seq *seq, const float *q, float *out) {
    const pkv_pool *pool = seq->pool;
    int64_t layer_stride = pool->block_size * pkv_kv_row_nbytes(pool->dtype, pool->kv_dim);
    pkv_attn_shape shape = {1, 1, HEAD_DIM, 1.0f, 0};
    pkv_attn_segment segment = {{pool->k, pool->v, seq->block_table, pool->n_layers * layer_stride, layer_stride,
                                 pool->kv_dim, pool->block_size, pool->dtype}, 0, 1, seq->seq_len, 1};
    pkv_attn_plan plan = {0};
    const pkv_kernels *kernels = pkv_kernels_for(NULL); /* the best that this machine runs */
    float *scratch = pkv_mem_alloc((size_t)pkv_attn_scratch_len(&shape) * sizeof(float)), *partials = NULL;
    int ok = scratch && pkv_attn_make_plan(&plan, &shape, &segment, 1, 1);
    if (ok) {
        partials = pkv_mem_alloc((size_t)plan.partials_len * sizeof(float));
        ok = partials != NULL;
    }
    if (ok) {
        uint64_t saved = pkv_fpenv_enter();
        for (int64_t i = 0; i < plan.n_run; i++)
            pkv_attn_run(kernels, &shape, &plan, &plan.run[i], 0, q, HEAD_DIM, out, HEAD_DIM, partials, scratch);
        for (int64_t i = 0; i < plan.n_join; i++)
            pkv_attn_join(kernels, &shape, &plan, &plan.join[i], out, HEAD_DIM, partials);
        pkv_fpenv_leave(saved);
    }
    pkv_mem_free(partials, (size_t)plan.partials_len * sizeof(float));
    pkv_attn_free_plan(&plan);
    pkv_mem_free(scratch, (size_t)pkv_attn_scratch_len(&shape) * sizeof(float));
    return ok;
}

int main(void) {
    pkv_pool *pool = NULL;
    pkv_seq *first = NULL, *second = NULL;
    float q[HEAD_DIM] = {0}, out_first[HEAD_DIM], out_second[HEAD_DIM]; /* q = 0: the mean of the values */
    pkv_status status = pkv_pool_new(8, 1, HEAD_DIM, BLOCK_SIZE, &pool);
    if (status == PKV_OK)
        status = pkv_seq_new(pool, 64, &first);
    if (status == PKV_OK)
        status = append(first, N_PREFIX, 1.0f);
    if (status == PKV_OK)
        status = pkv_seq_fork(first, &second); /* copies nothing */
    if (status == PKV_OK)
        status = append(second, N_PREFIX, 3.0f); /* its own last block from here on */
    int ok = status == PKV_OK && attend(first, q, out_first) && attend(second, q, out_second);
    if (ok)
        printf("means %g %g, blocks in use %lld\n", out_first[0], out_second[0],
               (long long)(pool->n_blocks - pool->n_free));
    else
        fprintf(stderr, "status %d\n", (int)status);
    pkv_seq_free(second);
    pkv_seq_free(first);
    pkv_pool_free(pool);
    return !ok;
}
