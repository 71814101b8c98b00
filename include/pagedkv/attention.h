/* Attention over K and V in blocks, read in place: the order of chunks, and how the work is cut.
 * Softmax runs over chunks of PKV_CHUNK positions aligned at 0; each chunk of one head gives (max, sum,
 * weighted V), and chunks merge in ascending order. Which thread takes which rows, heads or chunks is
 * chosen here and cannot show: the numbers of a (row, head, chunk) depend on nothing else. */
#ifndef PAGEDKV_ATTENTION_H
#define PAGEDKV_ATTENTION_H

#include <stdint.h>

#include "dispatch.h"
#include "layout.h"

/* Query rows that one item takes through a chunk together, so that K and V of the chunk are read from the
 * cache and not from memory for all but the first. 8 rows of a group of 3 keep the scores at 24 KiB. */
#define PKV_ATTN_TILE_ROWS 8

/* Above this many rows, items are plentiful or large enough without splitting chunks over threads. */
#define PKV_ATTN_SPLIT_ROWS 32

typedef struct pkv_attn_shape {
    int64_t n_heads;
    int64_t n_kv_heads;
    int64_t head_dim;
    float scale;
} pkv_attn_shape;

/* Where K and V of one sequence lie. A contiguous buffer is the case without a block table. */
typedef struct pkv_kv_view {
    const float *k; /* row 0 of block 0 of layer 0 */
    const float *v;
    const int32_t *block_table; /* NULL: block i is the i-th */
    int64_t block_stride;       /* elements from one block id to the next */
    int64_t layer_stride;       /* elements from one layer to the next inside a block */
    int64_t row_stride;         /* kv_dim */
    int64_t block_size;         /* tokens; divides PKV_CHUNK */
} pkv_kv_view;

/* Consecutive rows of one sequence. Row i attends positions [0, visible + i * visible_step). */
typedef struct pkv_attn_segment {
    pkv_kv_view kv;
    int64_t row; /* first row, in the step */
    int64_t n_rows;
    int64_t visible;
    int64_t visible_step; /* 1 causal, 0 all */
} pkv_attn_segment;

/* Work for one thread: rows x KV heads x chunks. A merge item has its parts computed before. */
typedef struct pkv_attn_item {
    const pkv_attn_segment *segment;
    int64_t row; /* first row, in the segment */
    int64_t n_rows;
    int64_t kv_head, n_kv_heads;
    int64_t chunk, n_chunks;
    int64_t partial; /* first float in the partials; -1: the item ends in the output itself */
} pkv_attn_item;

static inline int64_t pkv_attn_row_visible(const pkv_attn_segment *segment, int64_t row) {
    return segment->visible + row * segment->visible_step;
}

/* Offset of block i of one KV head of a layer. */
static inline int64_t pkv_view_offset(const pkv_kv_view *kv, int64_t block, int64_t layer, int64_t kv_head,
                                      int64_t head_dim) {
    int64_t block_id = kv->block_table ? kv->block_table[block] : block;
    return block_id * kv->block_stride + layer * kv->layer_stride + kv_head * head_dim;
}

/* Floats for the state of n_q query heads: max [n_q], sum [n_q], acc [n_q, head_dim]. */
static inline int64_t pkv_attn_state_len(int64_t n_q, int64_t head_dim) { return n_q * (head_dim + 2); }

/* One chunk for the rows and heads of an item. Query head q of row r is number r * n_q + q below.
 *   q       rows of the segment, row stride ldq
 *   scores  [n_rows * n_q, PKV_CHUNK] scratch
 *   state   pkv_attn_state_len(n_rows * n_q) floats; a row that does not see the chunk is left alone */
static inline void pkv_attn_chunk(const pkv_kernels *kernels, const pkv_attn_shape *shape, const pkv_attn_item *item,
                                  int64_t layer, int64_t chunk, const float *q, int64_t ldq, float *scores,
                                  float *state) {
    const pkv_attn_segment *segment = item->segment;
    const pkv_kv_view *kv = &segment->kv;
    int64_t head_dim = shape->head_dim, group = shape->n_heads / shape->n_kv_heads;
    int64_t n_q = item->n_kv_heads * group, n_states = item->n_rows * n_q;
    float *max = state, *sum = state + n_states, *acc = state + 2 * n_states;
    int64_t first = chunk * PKV_CHUNK;
    int64_t last_visible = pkv_attn_row_visible(segment, item->row + item->n_rows - 1);
    int64_t end = pkv_min(first + PKV_CHUNK, last_visible);
    if (first >= end)
        return;

    for (int64_t t = first; t < end; t += kv->block_size) {
        for (int64_t h = 0; h < item->n_kv_heads; h++) {
            int64_t kv_head = item->kv_head + h;
            const float *k = kv->k + pkv_view_offset(kv, t / kv->block_size, layer, kv_head, head_dim);
            /* After this block comes the next one, and after the last one the first of V. */
            const float *next = t + kv->block_size < end
                                    ? kv->k + pkv_view_offset(kv, t / kv->block_size + 1, layer, kv_head, head_dim)
                                    : kv->v + pkv_view_offset(kv, first / kv->block_size, layer, kv_head, head_dim);
            for (int64_t r = 0; r < item->n_rows; r++) {
                int64_t n = pkv_min(kv->block_size,
                                    pkv_min(end, pkv_attn_row_visible(segment, item->row + r)) - t);
                if (n > 0)
                    kernels->attn_scores(q + r * ldq + kv_head * group * head_dim, group, k, kv->row_stride, n,
                                         head_dim, shape->scale,
                                         scores + (r * n_q + h * group) * PKV_CHUNK + (t - first), PKV_CHUNK, next);
            }
        }
    }
    for (int64_t r = 0; r < item->n_rows; r++) {
        int64_t n = pkv_min(PKV_CHUNK, pkv_attn_row_visible(segment, item->row + r) - first);
        if (n <= 0)
            continue;
        for (int64_t i = r * n_q; i < (r + 1) * n_q; i++)
            kernels->softmax_chunk(scores + i * PKV_CHUNK, n, max + i, sum + i);
        memset(acc + r * n_q * head_dim, 0, (size_t)(n_q * head_dim) * sizeof(float));
    }
    for (int64_t t = first; t < end; t += kv->block_size) {
        for (int64_t h = 0; h < item->n_kv_heads; h++) {
            int64_t kv_head = item->kv_head + h;
            const float *v = kv->v + pkv_view_offset(kv, t / kv->block_size, layer, kv_head, head_dim);
            const float *next = t + kv->block_size < end
                                    ? kv->v + pkv_view_offset(kv, t / kv->block_size + 1, layer, kv_head, head_dim)
                                    : v;
            for (int64_t r = 0; r < item->n_rows; r++) {
                int64_t n = pkv_min(kv->block_size,
                                    pkv_min(end, pkv_attn_row_visible(segment, item->row + r)) - t);
                if (n > 0)
                    kernels->attn_values(scores + (r * n_q + h * group) * PKV_CHUNK + (t - first), PKV_CHUNK,
                                         group, v, kv->row_stride, n, head_dim,
                                         acc + (r * n_q + h * group) * head_dim, next);
            }
        }
    }
}

/* Fold the chunk's states into the item's, row by row, skipping rows that do not see the chunk. */
static inline void pkv_attn_merge_chunk(const pkv_kernels *kernels, const pkv_attn_shape *shape,
                                        const pkv_attn_item *item, int64_t chunk, float *state, const float *later) {
    int64_t head_dim = shape->head_dim;
    int64_t n_q = item->n_kv_heads * (shape->n_heads / shape->n_kv_heads), n_states = item->n_rows * n_q;
    for (int64_t r = 0; r < item->n_rows; r++) {
        if (pkv_attn_row_visible(item->segment, item->row + r) <= chunk * PKV_CHUNK)
            continue;
        for (int64_t i = r * n_q; i < (r + 1) * n_q; i++)
            kernels->attn_merge(state + i, state + n_states + i, state + 2 * n_states + i * head_dim, later[i],
                                later[n_states + i], later + 2 * n_states + i * head_dim, head_dim);
    }
}

/* Divide by the sums and write the item's heads to out (first row of the segment, row stride ldout). */
static inline void pkv_attn_write(const pkv_kernels *kernels, const pkv_attn_shape *shape, const pkv_attn_item *item,
                                  const float *state, float *out, int64_t ldout) {
    int64_t head_dim = shape->head_dim, group = shape->n_heads / shape->n_kv_heads;
    int64_t n_q = item->n_kv_heads * group, n_states = item->n_rows * n_q;
    for (int64_t r = 0; r < item->n_rows; r++)
        for (int64_t h = 0; h < n_q; h++)
            kernels->attn_finish(state + 2 * n_states + (r * n_q + h) * head_dim, state[n_states + r * n_q + h],
                                 out + (item->row + r) * ldout + (item->kv_head * group + h) * head_dim, head_dim);
}

/* Floats of scratch that one thread needs for any item: scores and two states. */
static inline int64_t pkv_attn_scratch_len(const pkv_attn_shape *shape) {
    int64_t tile = PKV_ATTN_TILE_ROWS * (shape->n_heads / shape->n_kv_heads);
    int64_t n_q = tile > shape->n_heads ? tile : shape->n_heads;
    return n_q * PKV_CHUNK + 2 * pkv_attn_state_len(n_q, shape->head_dim);
}

/* Run one item. q and out point at row 0 of the step; strides ldq, ldout. */
static inline void pkv_attn_run(const pkv_kernels *kernels, const pkv_attn_shape *shape, const pkv_attn_item *item,
                                int64_t layer, const float *q, int64_t ldq, float *out, int64_t ldout,
                                float *partials, float *scratch) {
    int64_t n_states = item->n_rows * item->n_kv_heads * (shape->n_heads / shape->n_kv_heads);
    int64_t state_len = pkv_attn_state_len(n_states, shape->head_dim);
    float *scores = scratch, *state = scratch + n_states * PKV_CHUNK, *later = state + state_len;
    const float *q_item = q + (item->segment->row + item->row) * ldq;
    if (item->partial >= 0) {
        pkv_attn_chunk(kernels, shape, item, layer, item->chunk, q_item, ldq, scores, partials + item->partial);
        return;
    }
    pkv_attn_chunk(kernels, shape, item, layer, 0, q_item, ldq, scores, state);
    for (int64_t chunk = 1; chunk < item->n_chunks; chunk++) {
        pkv_attn_chunk(kernels, shape, item, layer, chunk, q_item, ldq, scores, later);
        pkv_attn_merge_chunk(kernels, shape, item, chunk, state, later);
    }
    pkv_attn_write(kernels, shape, item, state, out + item->segment->row * ldout, ldout);
}

/* Join the partial states of one tile, chunk by chunk in ascending order, and write the result. */
static inline void pkv_attn_join(const pkv_kernels *kernels, const pkv_attn_shape *shape, const pkv_attn_item *item,
                                 float *out, int64_t ldout, float *partials) {
    int64_t n_states = item->n_rows * item->n_kv_heads * (shape->n_heads / shape->n_kv_heads);
    int64_t state_len = pkv_attn_state_len(n_states, shape->head_dim);
    float *state = partials + item->partial;
    for (int64_t chunk = 1; chunk < item->n_chunks; chunk++)
        pkv_attn_merge_chunk(kernels, shape, item, chunk, state, state + chunk * state_len);
    pkv_attn_write(kernels, shape, item, state, out + item->segment->row * ldout, ldout);
}

/* The cut of a step's attention. run holds n_run items, join n_join; partials_len floats lie between them. */
typedef struct pkv_attn_plan {
    pkv_attn_item *run;
    pkv_attn_item *join;
    int64_t n_run, n_join, partials_len;
} pkv_attn_plan;

/* Cut segments into items. One row of a sequence reads K and V of all heads together, block by block, which
 * memory likes best; several rows go by tiles and heads, which the cache likes best. Where that leaves the
 * threads short of work, heads are cut too, and then chunks.
 * With plan->run NULL only the counts are set; the caller then brings arrays of that size. */
static inline void pkv_attn_make_plan(pkv_attn_plan *plan, const pkv_attn_shape *shape,
                                      const pkv_attn_segment *segments, int64_t n_segments, int64_t n_threads) {
    int64_t group = shape->n_heads / shape->n_kv_heads, n_rows = 0, n_whole = 0, n_by_head = 0;
    for (int64_t i = 0; i < n_segments; i++) {
        int64_t n_tiles = (segments[i].n_rows + PKV_ATTN_TILE_ROWS - 1) / PKV_ATTN_TILE_ROWS;
        n_rows += segments[i].n_rows;
        n_by_head += n_tiles * shape->n_kv_heads;
        n_whole += segments[i].n_rows == 1 ? 1 : n_tiles * shape->n_kv_heads;
    }
    int64_t enough = 4 * n_threads;
    int cut_heads = n_threads > 1 && n_whole < enough;
    int cut_chunks = n_threads > 1 && n_by_head < enough && n_rows <= PKV_ATTN_SPLIT_ROWS;
    plan->n_run = plan->n_join = plan->partials_len = 0;
    for (int64_t i = 0; i < n_segments; i++) {
        const pkv_attn_segment *segment = &segments[i];
        int64_t heads = segment->n_rows == 1 && !cut_heads ? shape->n_kv_heads : 1;
        for (int64_t row = 0; row < segment->n_rows; row += PKV_ATTN_TILE_ROWS) {
            int64_t rows = pkv_min(PKV_ATTN_TILE_ROWS, segment->n_rows - row);
            int64_t n_chunks = pkv_chunks_for(pkv_attn_row_visible(segment, row + rows - 1));
            int64_t state_len = pkv_attn_state_len(rows * heads * group, shape->head_dim);
            for (int64_t kv_head = 0; kv_head < shape->n_kv_heads; kv_head += heads) {
                pkv_attn_item item = {segment, row, rows, kv_head, heads, 0, n_chunks, -1};
                if (!cut_chunks || n_chunks == 1) {
                    if (plan->run)
                        plan->run[plan->n_run] = item;
                    plan->n_run++;
                    continue;
                }
                item.partial = plan->partials_len;
                if (plan->run)
                    plan->join[plan->n_join] = item;
                plan->n_join++;
                for (int64_t chunk = 0; chunk < n_chunks; chunk++) {
                    item.chunk = chunk;
                    item.partial = plan->partials_len;
                    if (plan->run)
                        plan->run[plan->n_run] = item;
                    plan->n_run++;
                    plan->partials_len += state_len;
                }
            }
        }
    }
}

#endif
