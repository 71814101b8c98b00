/* Attention over K and V in blocks, read in place: the order of chunks, and how the work is cut.
 * Softmax runs over chunks of PKV_CHUNK positions aligned at 0; each chunk of one head gives (max, sum,
 * weighted V), and chunks merge in ascending order. Which thread takes which rows, heads or chunks is
 * chosen here and cannot show: the numbers of a (row, head, chunk) depend on nothing else. */
#ifndef PAGEDKV_ATTENTION_H
#define PAGEDKV_ATTENTION_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "kv.h"
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
    int64_t window; /* positions that a row sees at most, its own the last of them; 0: no limit */
} pkv_attn_shape;

/* Where K and V of one sequence lie. A contiguous buffer is the case without a block table. */
typedef struct pkv_kv_view {
    const uint8_t *k; /* row 0 of block 0 of layer 0 */
    const uint8_t *v;
    const int32_t *block_table; /* NULL: block i is the i-th */
    int64_t block_stride;       /* bytes from one block id to the next */
    int64_t layer_stride;       /* bytes from one layer to the next inside a block */
    int64_t kv_dim;             /* values of a row */
    int64_t block_size;         /* tokens; divides PKV_CHUNK */
    int32_t dtype;
} pkv_kv_view;

/* Consecutive rows of one sequence. Row i attends positions [0, visible + i * visible_step), the last `window` of
 * them where the shape has a window. */
typedef struct pkv_attn_segment {
    pkv_kv_view kv;
    int64_t row; /* first row, in the step */
    int64_t n_rows;
    int64_t visible;
    int64_t visible_step; /* 1 causal, 0 all */
} pkv_attn_segment;

/* Work for one thread: rows x KV heads x chunks. The rows are consecutive rows of one segment, or, where
 * `members` is set, the single rows of several segments whose blocks of this chunk are the same: K and V are
 * then read once for all of them. */
typedef struct pkv_attn_item {
    int64_t segment; /* whose K and V are read */
    int64_t row;     /* first row, in the segment */
    int64_t n_rows;
    int64_t kv_head, n_kv_heads;
    int64_t chunk, n_chunks;
    int64_t members; /* first of n_rows entries of the plan's members; -1: rows of the segment itself */
    int64_t partial; /* floats between the slots of two KV heads, for states that go to the partials and are
                      * joined later; -1: the item ends in the output itself */
} pkv_attn_item;

/* The cut of a step's attention: run items in any order, then join items, which merge the states of one tile.
 * Made by pkv_attn_make_plan, freed by pkv_attn_free_plan. It serves every shape that differs from the one it was
 * made with in nothing but a narrower window: layers with and without a window go by one plan. */
typedef struct pkv_attn_plan {
    const pkv_attn_segment *segments;
    int64_t window; /* of the shape it was made with */
    pkv_attn_item *run, *join;
    int32_t *members;  /* segment ids */
    int64_t *partials; /* [n_segments] first float of the segment's states in the partials; -1: none */
    int64_t n_run, n_join, n_members, partials_len;
    int64_t run_cap, join_cap, members_cap;
} pkv_attn_plan;

static inline int64_t pkv_attn_row_visible(const pkv_attn_segment *segment, int64_t row) {
    return segment->visible + row * segment->visible_step;
}

/* First position that a row sees, of `visible` in all. Its softmax begins there, in the middle of a chunk too: the
 * chunk's maximum, sum and values run over the positions from this one on, the first of them in lane 0. */
static inline int64_t pkv_attn_first(int64_t visible, int64_t window) {
    return window > 0 && visible > window ? visible - window : 0;
}

/* First chunk that a row of a segment sees. */
static inline int64_t pkv_attn_first_chunk(const pkv_attn_segment *segment, int64_t row, int64_t window) {
    return pkv_attn_first(pkv_attn_row_visible(segment, row), window) / PKV_CHUNK;
}

/* One KV head's rows from a position to the end of its block, in K or V (`of` is kv->k or kv->v). */
static inline pkv_kv_rows pkv_view_rows(const pkv_kv_view *kv, const uint8_t *of, int64_t position, int64_t layer,
                                        int64_t kv_head, int64_t head_dim) {
    int64_t block = position / kv->block_size, row = position % kv->block_size;
    const uint8_t *begin = of + (kv->block_table ? kv->block_table[block] : block) * kv->block_stride;
    int64_t values_nbytes = kv->kv_dim * pkv_kv_value_nbytes(kv->dtype);
    int64_t scales_nbytes = pkv_kv_scales_nbytes(kv->dtype, kv->kv_dim);
    pkv_slot slot = pkv_slot_at(0, 0, row, 1, kv->block_size, values_nbytes, scales_nbytes);
    begin += layer * kv->layer_stride;
    return (pkv_kv_rows){begin + slot.values + kv_head * head_dim * pkv_kv_value_nbytes(kv->dtype),
                         begin + slot.scales + pkv_kv_scales_nbytes(kv->dtype, kv_head * head_dim), values_nbytes,
                         scales_nbytes};
}

/* Where acc begins in the state of one row and KV head, max [group], sum [group], acc [group, head_dim]: at a
 * cache line, since acc is loaded and stored for every block. */
static inline int64_t pkv_attn_acc_at(const pkv_attn_shape *shape) {
    return (2 * (shape->n_heads / shape->n_kv_heads) + 15) / 16 * 16;
}

/* Floats of such a state, whole cache lines. */
static inline int64_t pkv_attn_state_len(const pkv_attn_shape *shape) {
    return pkv_attn_acc_at(shape) + (shape->n_heads / shape->n_kv_heads * shape->head_dim + 15) / 16 * 16;
}

/* The rows that go through a chunk together. */
typedef struct pkv_attn_tile {
    int64_t n_rows;
    const float *q[PKV_ATTN_TILE_ROWS];   /* all heads of the row */
    int64_t first[PKV_ATTN_TILE_ROWS];    /* it sees positions [first, visible) */
    int64_t visible[PKV_ATTN_TILE_ROWS];
    float *state[PKV_ATTN_TILE_ROWS];     /* of the item's first KV head; the others follow at head_stride */
    int64_t head_stride;
} pkv_attn_tile;

/* Rows of a block that the kernels take at once: of a larger block, the part that fits L1 as float32. */
#define PKV_ATTN_ROWS 16

/* One KV head's rows as float32, and what memory is asked for while they are read. */
typedef struct pkv_attn_rows {
    const float *x; /* [n, head_dim] */
    int64_t ld;
    const float *next; /* [n, head_dim] */
    int64_t ldnext;
} pkv_attn_rows;

/* Rows in place where they are stored as float32, else expanded into `wide`. The rows read after them are asked
 * for meanwhile: then_rows of all heads, the whole block, where n_kv_heads of them are read in turn and this is
 * the h-th, so in order of memory and not of heads (19 GB/s against 16, measured); or of this head alone. */
static inline pkv_attn_rows pkv_attn_read(const pkv_kernels *kernels, const pkv_kv_view *kv, const pkv_kv_rows *rows,
                                          const pkv_kv_rows *then_rows, int64_t n, int64_t h, int64_t n_kv_heads,
                                          int64_t head_dim, float *wide) {
    const uint8_t *next = then_rows->values;
    int64_t head_nbytes = head_dim * pkv_kv_value_nbytes(kv->dtype), next_stride = rows->values_stride;
    if (n_kv_heads * head_dim == kv->kv_dim) {
        next += h * (n - 1) * head_nbytes; /* from the h-th head of the first row to the h-th part of the block */
        next_stride = head_nbytes;
    }
    if (kv->dtype == PKV_F32)
        return (pkv_attn_rows){(const float *)(const void *)rows->values, rows->values_stride / 4,
                               (const float *)(const void *)next, next_stride / 4};
    kernels->kv_expand(kv->dtype, rows, n, head_dim, wide, next, next_stride);
    return (pkv_attn_rows){wide, head_dim, wide, head_dim};
}

/* Whether what row r of a tile sees goes on into a chunk from the one before. */
static inline int pkv_attn_goes_on(const pkv_attn_tile *tile, int64_t r, int64_t chunk) {
    return tile->first[r] < chunk * PKV_CHUNK && tile->visible[r] > chunk * PKV_CHUNK;
}

/* One chunk for the rows of a tile and KV heads [kv_head, kv_head + n_kv_heads).
 *   scores  [n_rows * n_kv_heads * group, PKV_CHUNK] scratch
 *   wide    [PKV_ATTN_ROWS, head_dim] scratch
 * A row that does not see the chunk keeps its state. */
static inline void pkv_attn_chunk(const pkv_kernels *kernels, const pkv_attn_shape *shape, const pkv_kv_view *kv,
                                  int64_t layer, int64_t chunk, int64_t kv_head, int64_t n_kv_heads,
                                  const pkv_attn_tile *tile, float *scores, float *wide) {
    int64_t head_dim = shape->head_dim, group = shape->n_heads / shape->n_kv_heads;
    int64_t first = chunk * PKV_CHUNK, begin = first + PKV_CHUNK, end = first;
    int64_t step = pkv_min(kv->block_size, PKV_ATTN_ROWS), from[PKV_ATTN_TILE_ROWS], to[PKV_ATTN_TILE_ROWS];
    for (int64_t r = 0; r < tile->n_rows; r++) { /* positions [from, to) of the chunk are the row's */
        from[r] = tile->first[r] > first ? tile->first[r] : first;
        to[r] = pkv_min(first + PKV_CHUNK, tile->visible[r]);
        if (from[r] < to[r]) {
            begin = pkv_min(begin, from[r]);
            end = to[r] > end ? to[r] : end;
        }
    }
    begin -= (begin - first) % step;

    for (int64_t t = begin; t < end; t += step)
        for (int64_t h = 0; h < n_kv_heads; h++) {
            /* After these rows come the next ones, and after the last the first of V. */
            int more = t + step < end;
            pkv_kv_rows rows = pkv_view_rows(kv, kv->k, t, layer, kv_head + h, head_dim);
            pkv_kv_rows then_rows = pkv_view_rows(kv, more ? kv->k : kv->v, more ? t + step : begin, layer,
                                                  kv_head + h, head_dim);
            pkv_attn_rows k = pkv_attn_read(kernels, kv, &rows, &then_rows, pkv_min(step, end - t), h, n_kv_heads,
                                            head_dim, wide);
            for (int64_t r = 0; r < tile->n_rows; r++) {
                int64_t at = from[r] > t ? from[r] : t, n = pkv_min(t + step, to[r]) - at;
                if (n > 0)
                    kernels->attn_scores(tile->q[r] + (kv_head + h) * group * head_dim, group, k.x + (at - t) * k.ld,
                                         k.ld, n, head_dim, shape->scale,
                                         scores + (r * n_kv_heads + h) * group * PKV_CHUNK + (at - first), PKV_CHUNK,
                                         k.next, k.ldnext);
            }
        }
    for (int64_t r = 0; r < tile->n_rows; r++)
        for (int64_t h = 0; h < n_kv_heads && from[r] < to[r]; h++) {
            float *max = tile->state[r] + h * tile->head_stride, *sum = max + group;
            float *acc = max + pkv_attn_acc_at(shape);
            for (int64_t i = 0; i < group; i++)
                kernels->softmax_chunk(scores + ((r * n_kv_heads + h) * group + i) * PKV_CHUNK + (from[r] - first),
                                       to[r] - from[r], max + i, sum + i);
            memset(acc, 0, (size_t)(group * head_dim) * sizeof(float));
        }
    for (int64_t t = begin; t < end; t += step)
        for (int64_t h = 0; h < n_kv_heads; h++) {
            pkv_kv_rows rows = pkv_view_rows(kv, kv->v, t, layer, kv_head + h, head_dim);
            pkv_kv_rows then_rows = pkv_view_rows(kv, kv->v, t + step < end ? t + step : t, layer, kv_head + h,
                                                  head_dim);
            pkv_attn_rows v = pkv_attn_read(kernels, kv, &rows, &then_rows, pkv_min(step, end - t), h, n_kv_heads,
                                            head_dim, wide);
            for (int64_t r = 0; r < tile->n_rows; r++) {
                int64_t at = from[r] > t ? from[r] : t, n = pkv_min(t + step, to[r]) - at;
                if (n > 0)
                    kernels->attn_values(scores + (r * n_kv_heads + h) * group * PKV_CHUNK + (at - first), PKV_CHUNK,
                                         group, v.x + (at - t) * v.ld, v.ld, n, head_dim,
                                         tile->state[r] + h * tile->head_stride + pkv_attn_acc_at(shape), v.next, v.ldnext);
            }
        }
}

/* Fold a later chunk's state of one row and KV head into the state of all chunks before it. */
static inline void pkv_attn_fold(const pkv_kernels *kernels, const pkv_attn_shape *shape, float *state,
                                 const float *later) {
    int64_t group = shape->n_heads / shape->n_kv_heads, head_dim = shape->head_dim;
    for (int64_t i = 0; i < group; i++)
        kernels->attn_merge(state + i, state + group + i, state + pkv_attn_acc_at(shape) + i * head_dim, later[i],
                            later[group + i], later + pkv_attn_acc_at(shape) + i * head_dim, head_dim);
}

/* Divide by the sums and write one row's group of heads to out (the row's first head of all). */
static inline void pkv_attn_write(const pkv_kernels *kernels, const pkv_attn_shape *shape, const float *state,
                                  int64_t kv_head, float *out) {
    int64_t group = shape->n_heads / shape->n_kv_heads, head_dim = shape->head_dim;
    for (int64_t i = 0; i < group; i++)
        kernels->attn_finish(state + pkv_attn_acc_at(shape) + i * head_dim, state[group + i],
                             out + (kv_head * group + i) * head_dim, head_dim);
}

/* Pairs of a row and a KV head that an item takes through a chunk together, at most. */
static inline int64_t pkv_attn_most_pairs(const pkv_attn_shape *shape) {
    return PKV_ATTN_TILE_ROWS > shape->n_kv_heads ? PKV_ATTN_TILE_ROWS : shape->n_kv_heads;
}

/* Floats of the rows of a block, expanded. */
static inline int64_t pkv_attn_wide_len(const pkv_attn_shape *shape) {
    return (PKV_ATTN_ROWS * shape->head_dim + 15) / 16 * 16;
}

/* Floats of scratch that one thread needs for any item: expanded rows, scores, and the states of two chunks. */
static inline int64_t pkv_attn_scratch_len(const pkv_attn_shape *shape) {
    return pkv_attn_wide_len(shape) + pkv_attn_most_pairs(shape) * (shape->n_heads / shape->n_kv_heads * PKV_CHUNK +
                                                                    2 * pkv_attn_state_len(shape));
}

/* Chunks that have states in a segment's partials: those from the first one that its first row sees. */
static inline int64_t pkv_attn_n_slots(const pkv_attn_plan *plan, const pkv_attn_segment *segment) {
    return pkv_chunks_for(pkv_attn_row_visible(segment, segment->n_rows - 1)) -
           pkv_attn_first_chunk(segment, 0, plan->window);
}

/* Where the state of (row, KV head, chunk) of a segment lies in the partials. */
static inline int64_t pkv_attn_slot(const pkv_attn_plan *plan, const pkv_attn_shape *shape, int64_t segment,
                                    int64_t row, int64_t kv_head, int64_t chunk) {
    const pkv_attn_segment *s = &plan->segments[segment];
    int64_t slot = chunk - pkv_attn_first_chunk(s, 0, plan->window);
    return plan->partials[segment] +
           ((row * shape->n_kv_heads + kv_head) * pkv_attn_n_slots(plan, s) + slot) * pkv_attn_state_len(shape);
}

/* Run one item. q and out point at row 0 of the step; strides ldq, ldout. */
static inline void pkv_attn_run(const pkv_kernels *kernels, const pkv_attn_shape *shape, const pkv_attn_plan *plan,
                                const pkv_attn_item *item, int64_t layer, const float *q, int64_t ldq, float *out,
                                int64_t ldout, float *partials, float *scratch) {
    int64_t state_len = pkv_attn_state_len(shape);
    const pkv_kv_view *kv = &plan->segments[item->segment].kv;
    float *wide = scratch, *scores = wide + pkv_attn_wide_len(shape);
    float *states = scores + pkv_attn_most_pairs(shape) * (shape->n_heads / shape->n_kv_heads) * PKV_CHUNK;
    for (int64_t done = 0; done < item->n_rows; done += PKV_ATTN_TILE_ROWS) {
        pkv_attn_tile tile, later;
        tile.n_rows = pkv_min(PKV_ATTN_TILE_ROWS, item->n_rows - done);
        for (int64_t r = 0; r < tile.n_rows; r++) {
            int64_t id = item->members < 0 ? item->segment : plan->members[item->members + done + r];
            int64_t row = item->members < 0 ? item->row + done + r : 0;
            tile.q[r] = q + (plan->segments[id].row + row) * ldq;
            tile.visible[r] = pkv_attn_row_visible(&plan->segments[id], row);
            tile.first[r] = pkv_attn_first(tile.visible[r], shape->window);
            tile.state[r] = states + r * item->n_kv_heads * state_len;
            if (item->partial >= 0)
                tile.state[r] = partials + pkv_attn_slot(plan, shape, id, row, item->kv_head, item->chunk);
        }
        if (item->partial >= 0) { /* one chunk after the other, each to its own slot */
            tile.head_stride = item->partial;
            for (int64_t chunk = item->chunk; chunk < item->chunk + item->n_chunks; chunk++) {
                pkv_attn_chunk(kernels, shape, kv, layer, chunk, item->kv_head, item->n_kv_heads, &tile, scores, wide);
                for (int64_t r = 0; r < tile.n_rows; r++)
                    tile.state[r] += state_len;
            }
            continue;
        }
        tile.head_stride = state_len;
        later = tile;
        for (int64_t r = 0; r < tile.n_rows; r++)
            later.state[r] += tile.n_rows * item->n_kv_heads * state_len;
        for (int64_t chunk = item->chunk; chunk < item->chunk + item->n_chunks; chunk++) {
            pkv_attn_tile now = later;
            for (int64_t r = 0; r < tile.n_rows; r++)
                if (tile.first[r] / PKV_CHUNK == chunk) /* the row's first: nothing is there to fold it into */
                    now.state[r] = tile.state[r];
            pkv_attn_chunk(kernels, shape, kv, layer, chunk, item->kv_head, item->n_kv_heads, &now, scores, wide);
            for (int64_t r = 0; r < tile.n_rows; r++)
                for (int64_t h = 0; h < item->n_kv_heads && pkv_attn_goes_on(&tile, r, chunk); h++)
                    pkv_attn_fold(kernels, shape, tile.state[r] + h * state_len, later.state[r] + h * state_len);
        }
        for (int64_t r = 0; r < tile.n_rows; r++)
            for (int64_t h = 0; h < item->n_kv_heads; h++)
                pkv_attn_write(kernels, shape, tile.state[r] + h * state_len, item->kv_head + h,
                               out + (plan->segments[item->segment].row + item->row + done + r) * ldout);
    }
}

/* Join the states of one segment's rows, chunk by chunk in ascending order, and write the result. */
static inline void pkv_attn_join(const pkv_kernels *kernels, const pkv_attn_shape *shape, const pkv_attn_plan *plan,
                                 const pkv_attn_item *item, float *out, int64_t ldout, float *partials) {
    const pkv_attn_segment *segment = &plan->segments[item->segment];
    int64_t state_len = pkv_attn_state_len(shape);
    for (int64_t row = item->row; row < item->row + item->n_rows; row++)
        for (int64_t h = item->kv_head; h < item->kv_head + item->n_kv_heads; h++) {
            int64_t first = pkv_attn_first_chunk(segment, row, shape->window);
            int64_t n_chunks = pkv_chunks_for(pkv_attn_row_visible(segment, row)) - first;
            float *state = partials + pkv_attn_slot(plan, shape, item->segment, row, h, first);
            for (int64_t i = 1; i < n_chunks; i++)
                pkv_attn_fold(kernels, shape, state, state + i * state_len);
            pkv_attn_write(kernels, shape, state, h, out + (segment->row + row) * ldout);
        }
}

static inline void pkv_attn_free_plan(pkv_attn_plan *plan) {
    free(plan->run);
    free(plan->join);
    free(plan->members);
    free(plan->partials);
    memset(plan, 0, sizeof *plan);
}

/* Room for one more element; 0 where memory is out. */
static inline int pkv_grow(void **array, int64_t n, int64_t *cap, size_t width) {
    if (n < *cap)
        return 1;
    int64_t larger = *cap ? 2 * *cap : 64;
    void *moved = realloc(*array, (size_t)larger * width);
    if (!moved)
        return 0;
    *array = moved;
    *cap = larger;
    return 1;
}

static inline int pkv_attn_add(pkv_attn_item **items, int64_t *n, int64_t *cap, pkv_attn_item item) {
    void *array = *items;
    int ok = pkv_grow(&array, *n, cap, sizeof item);
    *items = (pkv_attn_item *)array;
    if (ok)
        (*items)[(*n)++] = item;
    return ok;
}

/* Whether a chunk lies wholly before a single row's own position. The step may yet give the row's own block a
 * private twin, after the plan is made; the blocks before it stay. */
static inline int pkv_attn_settled(const pkv_attn_segment *segment, int64_t chunk) {
    return segment->n_rows == 1 && segment->kv.block_table && (chunk + 1) * PKV_CHUNK < segment->visible;
}

/* Whether two single rows read the same blocks in a chunk. */
static inline int pkv_attn_same_chunk(const pkv_attn_segment *a, const pkv_attn_segment *b, int64_t chunk) {
    int64_t n = PKV_CHUNK / a->kv.block_size, first = chunk * n;
    return pkv_attn_settled(a, chunk) && pkv_attn_settled(b, chunk) && a->kv.k == b->kv.k &&
           a->kv.block_table[first] == b->kv.block_table[first] &&
           memcmp(a->kv.block_table + first, b->kv.block_table + first, (size_t)n * sizeof(int32_t)) == 0;
}

/* Items for leading chunks that several single rows share: one item for each chunk and KV head, whatever the
 * number of rows. Sequences that share a chunk share those before it (forks do), so a group splits, and gains only
 * rows whose window begins here.
 *   next  [n_segments] set to the first chunk of each that such items do not cover */
static inline int pkv_attn_share(pkv_attn_plan *plan, const pkv_attn_shape *shape, int64_t n_segments, int64_t *next) {
    int64_t chunk = INT64_MAX;
    for (int64_t i = 0; i < n_segments; i++) {
        next[i] = pkv_attn_first_chunk(&plan->segments[i], 0, plan->window);
        chunk = pkv_min(chunk, next[i]);
    }
    for (int found = 1; found; chunk++) {
        found = 0;
        for (int64_t i = 0; i < n_segments; i++) {
            const pkv_attn_segment *leader = &plan->segments[i];
            if (next[i] > chunk) /* in a group already, or its window begins later */
                found = 1;
            if (next[i] != chunk || !pkv_attn_settled(leader, chunk))
                continue;
            int64_t begin = plan->n_members;
            for (int64_t j = i; j < n_segments; j++)
                if (next[j] == chunk && (j == i || pkv_attn_same_chunk(leader, &plan->segments[j], chunk))) {
                    void *array = plan->members;
                    if (!pkv_grow(&array, plan->n_members, &plan->members_cap, sizeof *plan->members))
                        return 0;
                    plan->members = (int32_t *)array;
                    plan->members[plan->n_members++] = (int32_t)j;
                }
            int64_t n = plan->n_members - begin;
            if (n == 1) { /* alone: it will read the chunk for itself */
                plan->n_members = begin;
                continue;
            }
            found = 1;
            for (int64_t j = begin; j < plan->n_members; j++)
                next[plan->members[j]] = chunk + 1;
            for (int64_t h = 0; h < shape->n_kv_heads; h++)
                if (!pkv_attn_add(&plan->run, &plan->n_run, &plan->run_cap,
                                  (pkv_attn_item){i, 0, n, h, 1, chunk, 1, begin, 0}))
                    return 0;
        }
    }
    return 1;
}

/* Cut segments into items. Chunks that several sequences hold go first, once for all. The rest of a single row
 * reads K and V of all heads together, block by block, which memory likes best; several rows go by tiles and
 * heads, which the cache likes best. Where that leaves the threads short of work, heads are cut too, and then
 * chunks. Returns 0 where memory is out; plan is to be freed in either case.
 *   plan      zeros */
static inline int pkv_attn_make_plan(pkv_attn_plan *plan, const pkv_attn_shape *shape, const pkv_attn_segment *segments,
                                     int64_t n_segments, int64_t n_threads) {
    int64_t n_rows = 0, n_whole = 0, n_by_head = 0, state_len = pkv_attn_state_len(shape);
    plan->segments = segments;
    plan->window = shape->window;
    plan->partials = (int64_t *)malloc((size_t)n_segments * sizeof(int64_t));
    int64_t *next = (int64_t *)malloc((size_t)n_segments * sizeof(int64_t)); /* first chunk that is not shared */
    int ok = plan->partials && next && pkv_attn_share(plan, shape, n_segments, next);
    for (int64_t i = 0; i < n_segments; i++) {
        int64_t n_tiles = (segments[i].n_rows + PKV_ATTN_TILE_ROWS - 1) / PKV_ATTN_TILE_ROWS;
        n_rows += segments[i].n_rows;
        n_by_head += n_tiles * shape->n_kv_heads;
        n_whole += segments[i].n_rows == 1 ? 1 : n_tiles * shape->n_kv_heads;
    }
    int64_t enough = 4 * n_threads;
    int cut_heads = n_threads > 1 && n_whole < enough;
    int cut_chunks = n_threads > 1 && n_by_head < enough && n_rows <= PKV_ATTN_SPLIT_ROWS;
    for (int64_t i = 0; ok && i < n_segments; i++) {
        const pkv_attn_segment *segment = &segments[i];
        int64_t heads = segment->n_rows == 1 && !cut_heads ? shape->n_kv_heads : 1;
        int64_t n_slots = pkv_attn_n_slots(plan, segment);
        int is_shared = next[i] > pkv_attn_first_chunk(segment, 0, plan->window);
        int by_slots = is_shared || (cut_chunks && n_slots > 1);
        plan->partials[i] = by_slots ? plan->partials_len : -1;
        if (by_slots)
            plan->partials_len += segment->n_rows * shape->n_kv_heads * n_slots * state_len;
        for (int64_t row = 0; row < segment->n_rows; row += PKV_ATTN_TILE_ROWS) {
            int64_t rows = pkv_min(PKV_ATTN_TILE_ROWS, segment->n_rows - row);
            int64_t first = is_shared ? next[i] : pkv_attn_first_chunk(segment, row, plan->window);
            int64_t end = pkv_chunks_for(pkv_attn_row_visible(segment, row + rows - 1));
            for (int64_t kv_head = 0; kv_head < shape->n_kv_heads; kv_head += heads) {
                pkv_attn_item item = {i,  row, rows, kv_head, heads, first, end - first,
                                      -1, by_slots ? n_slots * state_len : -1};
                int64_t each = by_slots && cut_chunks ? 1 : item.n_chunks;
                if (by_slots)
                    ok = ok && pkv_attn_add(&plan->join, &plan->n_join, &plan->join_cap, item);
                for (; ok && item.chunk < end; item.chunk += each) {
                    item.n_chunks = each;
                    ok = pkv_attn_add(&plan->run, &plan->n_run, &plan->run_cap, item);
                }
            }
        }
    }
    free(next);
    return ok;
}

#endif
