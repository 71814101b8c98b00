/* The paged KV cache: a pool of fixed-size blocks, and sequences that own blocks through a block table.
 * Ported from the seed's nx_pkv_* functions, with its faults mended. Rows below seq_len are immutable, so
 * full blocks are shared for free and only a partly filled tail is ever copied. (Kwon et al. 2023.)
 * No function here locks: a caller serialises the calls on one pool. A failed call changes nothing. */
#ifndef PAGEDKV_POOL_H
#define PAGEDKV_POOL_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kv.h"
#include "layout.h"
#include "memory.h"
#include "status.h"

typedef struct pkv_pool {
    int64_t n_blocks;
    int64_t n_layers;
    int64_t block_size; /* tokens; divides PKV_CHUNK */
    int64_t kv_dim;
    int32_t dtype;       /* PKV_F32, PKV_F16, PKV_BF16 or PKV_Q8_0 */
    uint8_t *k;          /* [n_blocks, n_layers] times one layer of a block (kv.h), 64-byte aligned */
    uint8_t *v;          /* as k */
    int32_t *ref_count;  /* [n_blocks]; tables that name the block; 0 = free */
    int32_t *free_stack; /* [n_blocks]; the first n_free are the free ids, the last of them goes next */
    int64_t n_free;
    int64_t n_planned; /* blocks the current ensure_append needs of this pool */
} pkv_pool;

typedef struct pkv_seq {
    pkv_pool *pool;
    int32_t *block_table; /* [table_cap]; the first n_blocks are owned */
    int64_t max_blocks;   /* the seed's bound on n_blocks */
    int64_t table_cap;    /* min(max_blocks, pool blocks): a table names a block at most once */
    int64_t n_blocks;
    int64_t seq_len; /* tokens */
    struct pkv_seq *next; /* for a list of sequences that their owner keeps; not used here */
} pkv_seq;

/* Bytes of K (or V); 0 where the product does not fit. */
static inline size_t pkv_pool_nbytes(const pkv_pool *pool) {
    int64_t n = pool->n_blocks;
    if (pool->kv_dim > INT64_MAX / 8 || !pkv_mul_size(n, pool->n_layers, &n) ||
        !pkv_mul_size(n, pool->block_size, &n) ||
        !pkv_mul_size(n, pkv_kv_row_nbytes(pool->dtype, pool->kv_dim), &n))
        return 0;
    return (size_t)n;
}

static inline void pkv_pool_free(pkv_pool *pool) {
    if (!pool)
        return;
    pkv_mem_free(pool->k, pkv_pool_nbytes(pool));
    pkv_mem_free(pool->v, pkv_pool_nbytes(pool));
    free(pool->ref_count);
    free(pool->free_stack);
    free(pool);
}

/* A pool with every block free. BAD_DIM: a count not positive, a block size that does not divide the
 * attention chunk, more than 2^31 - 1 blocks, a size that no address can have, a type that rows are not stored
 * as, or a kv_dim that its groups do not divide. NULL: no memory. */
static inline pkv_status pkv_pool_new_of(int dtype, int64_t n_blocks, int64_t n_layers, int64_t kv_dim,
                                         int64_t block_size, pkv_pool **out) {
    *out = NULL;
    if (n_blocks <= 0 || n_layers <= 0 || kv_dim <= 0 || block_size <= 0 || n_blocks > INT32_MAX ||
        PKV_CHUNK % block_size != 0 || !pkv_kv_known(dtype) || kv_dim % pkv_kv_group(dtype) != 0)
        return PKV_ERR_BAD_DIM;
    pkv_pool shape = {0};
    shape.dtype = dtype;
    shape.n_blocks = n_blocks;
    shape.n_layers = n_layers;
    shape.kv_dim = kv_dim;
    shape.block_size = block_size;
    if (pkv_pool_nbytes(&shape) == 0)
        return PKV_ERR_BAD_DIM;
    pkv_pool *pool = (pkv_pool *)malloc(sizeof *pool);
    if (!pool)
        return PKV_ERR_NULL;
    *pool = shape;
    pool->k = (uint8_t *)pkv_mem_alloc(pkv_pool_nbytes(pool));
    pool->v = (uint8_t *)pkv_mem_alloc(pkv_pool_nbytes(pool));
    pool->ref_count = (int32_t *)calloc((size_t)n_blocks, sizeof(int32_t));
    pool->free_stack = (int32_t *)malloc((size_t)n_blocks * sizeof(int32_t));
    if (!pool->k || !pool->v || !pool->ref_count || !pool->free_stack) {
        pkv_pool_free(pool);
        return PKV_ERR_NULL;
    }
    for (int64_t i = 0; i < n_blocks; i++)
        pool->free_stack[i] = (int32_t)(n_blocks - 1 - i); /* so that a new pool gives 0, 1, 2, ... */
    pool->n_free = n_blocks;
    *out = pool;
    return PKV_OK;
}

/* The seed's pool: of float32 rows. */
static inline pkv_status pkv_pool_new(int64_t n_blocks, int64_t n_layers, int64_t kv_dim, int64_t block_size,
                                      pkv_pool **out) {
    return pkv_pool_new_of(PKV_F32, n_blocks, n_layers, kv_dim, block_size, out);
}

/* Row `row` of one layer of a block. */
static inline pkv_slot pkv_pool_slot(const pkv_pool *pool, int64_t block_id, int64_t layer, int64_t row) {
    return pkv_slot_at(block_id, layer, row, pool->n_layers, pool->block_size,
                       pool->kv_dim * pkv_kv_value_nbytes(pool->dtype),
                       pkv_kv_scales_nbytes(pool->dtype, pool->kv_dim));
}

/* Take a free block: its count becomes 1. */
static inline pkv_status pkv_alloc_block(pkv_pool *pool, int32_t *block_id) {
    if (!pool)
        return PKV_ERR_NULL;
    if (pool->n_free <= 0)
        return PKV_ERR_EXHAUST;
    *block_id = pool->free_stack[--pool->n_free];
    pool->ref_count[*block_id] = 1;
    return PKV_OK;
}

/* BOUNDS unless block_id is a block in use: a free block has no owner to add or to take away. */
static inline pkv_status pkv_check_held(const pkv_pool *pool, int64_t block_id) {
    if (!pool)
        return PKV_ERR_NULL;
    if (block_id < 0 || block_id >= pool->n_blocks || pool->ref_count[block_id] <= 0)
        return PKV_ERR_BOUNDS;
    return PKV_OK;
}

static inline pkv_status pkv_ref_block(pkv_pool *pool, int64_t block_id) {
    pkv_status status = pkv_check_held(pool, block_id);
    if (status != PKV_OK)
        return status;
    if (pool->ref_count[block_id] == INT32_MAX)
        return PKV_ERR_BOUNDS;
    pool->ref_count[block_id]++;
    return PKV_OK;
}

/* Take one owner away; the last one returns the block to the stack. */
static inline pkv_status pkv_unref_block(pkv_pool *pool, int64_t block_id) {
    pkv_status status = pkv_check_held(pool, block_id);
    if (status != PKV_OK)
        return status;
    if (--pool->ref_count[block_id] == 0)
        pool->free_stack[pool->n_free++] = (int32_t)block_id;
    return PKV_OK;
}

/* An empty sequence for about max_tokens tokens: as in the seed its table may grow one block past them. */
static inline pkv_status pkv_seq_new(pkv_pool *pool, int64_t max_tokens, pkv_seq **out) {
    *out = NULL;
    if (!pool)
        return PKV_ERR_NULL;
    if (max_tokens < 0)
        return PKV_ERR_BAD_DIM;
    pkv_seq *seq = (pkv_seq *)calloc(1, sizeof *seq);
    if (!seq)
        return PKV_ERR_NULL;
    seq->pool = pool;
    seq->max_blocks = pkv_blocks_for(pkv_min(max_tokens, INT64_MAX - 1), pool->block_size) + 1;
    seq->table_cap = pkv_min(seq->max_blocks, pool->n_blocks);
    seq->block_table = (int32_t *)malloc((size_t)seq->table_cap * sizeof(int32_t));
    if (!seq->block_table) {
        free(seq);
        return PKV_ERR_NULL;
    }
    *out = seq;
    return PKV_OK;
}

/* Give all blocks back and forget all rows; the struct stays. */
static inline void pkv_seq_clear(pkv_seq *seq) {
    for (int64_t i = 0; i < seq->n_blocks; i++) /* first to last, as the seed: it decides which id goes next */
        pkv_unref_block(seq->pool, seq->block_table[i]);
    seq->n_blocks = 0;
    seq->seq_len = 0;
}

static inline void pkv_seq_free(pkv_seq *seq) {
    if (!seq)
        return;
    pkv_seq_clear(seq);
    free(seq->block_table);
    free(seq);
}

/* A second sequence with the same rows, sharing the blocks that hold them. Reserved empty blocks stay with
 * the source alone: both sides would write into them. BOUNDS: a block has 2^31 - 1 owners already. */
static inline pkv_status pkv_seq_fork(const pkv_seq *source, pkv_seq **out) {
    *out = NULL;
    if (!source)
        return PKV_ERR_NULL;
    pkv_pool *pool = source->pool;
    int64_t n_shared = pkv_blocks_for(source->seq_len, pool->block_size);
    for (int64_t i = 0; i < n_shared; i++)
        if (pool->ref_count[source->block_table[i]] == INT32_MAX)
            return PKV_ERR_BOUNDS;
    pkv_seq *seq = (pkv_seq *)calloc(1, sizeof *seq);
    if (!seq)
        return PKV_ERR_NULL;
    seq->block_table = (int32_t *)malloc((size_t)source->table_cap * sizeof(int32_t));
    if (!seq->block_table) {
        free(seq);
        return PKV_ERR_NULL;
    }
    seq->pool = pool;
    seq->max_blocks = source->max_blocks;
    seq->table_cap = source->table_cap;
    seq->seq_len = source->seq_len;
    seq->n_blocks = n_shared;
    memcpy(seq->block_table, source->block_table, (size_t)n_shared * sizeof(int32_t));
    for (int64_t i = 0; i < n_shared; i++)
        pool->ref_count[seq->block_table[i]]++;
    *out = seq;
    return PKV_OK;
}

/* Start an empty sequence with n full blocks that others own already: each gets one owner more. BOUNDS: the table is
 * too short, or a block is not in use; BAD_DIM: the sequence has blocks or rows, or a block is named twice. */
static inline pkv_status pkv_seq_adopt(pkv_seq *seq, const int32_t *block_ids, int64_t n) {
    if (!seq)
        return PKV_ERR_NULL;
    pkv_pool *pool = seq->pool;
    if (seq->n_blocks > 0 || n < 0)
        return PKV_ERR_BAD_DIM;
    if (n > seq->table_cap)
        return PKV_ERR_BOUNDS;
    pkv_status status = PKV_OK;
    int64_t n_marked = 0;
    for (; n_marked < n && status == PKV_OK; n_marked++) { /* a block seen before is marked by its complemented count */
        int32_t id = block_ids[n_marked];
        if (id >= 0 && id < pool->n_blocks && pool->ref_count[id] < 0)
            status = PKV_ERR_BAD_DIM;
        else if (pkv_check_held(pool, id) != PKV_OK || pool->ref_count[id] == INT32_MAX)
            status = PKV_ERR_BOUNDS;
        else
            pool->ref_count[id] = ~pool->ref_count[id];
    }
    if (status != PKV_OK)
        n_marked--; /* the last one looked at was left as it is */
    for (int64_t i = 0; i < n_marked; i++)
        pool->ref_count[block_ids[i]] = ~pool->ref_count[block_ids[i]] + (status == PKV_OK);
    if (status != PKV_OK)
        return status;
    if (n > 0) /* block_ids may be NULL where there are none, and memcpy takes no NULL */
        memcpy(seq->block_table, block_ids, (size_t)n * sizeof(int32_t));
    seq->n_blocks = n;
    seq->seq_len = n * pool->block_size;
    return PKV_OK;
}

/* Forget the rows from new_len on and give back the blocks that held only them, reserved ones too.
 * A shared tail keeps its data: rows past seq_len are dead here and alive in its other owners. */
static inline pkv_status pkv_seq_truncate(pkv_seq *seq, int64_t new_len) {
    if (!seq)
        return PKV_ERR_NULL;
    if (new_len < 0 || new_len > seq->seq_len)
        return PKV_ERR_BOUNDS;
    int64_t keep = pkv_blocks_for(new_len, seq->pool->block_size);
    while (seq->n_blocks > keep)
        pkv_unref_block(seq->pool, seq->block_table[--seq->n_blocks]);
    seq->seq_len = new_len;
    return PKV_OK;
}

/* Count what n_new more rows of seq need, on top of pool->n_planned. A block about to be written that
 * someone else owns too needs a private twin; the table entry is marked (complemented) and the count taken
 * down as the real move would, so that a later sequence of the batch sees what it would find. */
static inline pkv_status pkv_plan_append(pkv_seq *seq, int64_t n_new) {
    if (!seq)
        return PKV_ERR_NULL;
    if (n_new <= 0)
        return PKV_ERR_BAD_DIM;
    pkv_pool *pool = seq->pool;
    /* Past this no table reaches, and the sums below stay far from overflow. */
    int64_t fits = n_new <= INT64_MAX / 2 - seq->seq_len;
    int64_t need = fits ? pkv_blocks_for(seq->seq_len + n_new, pool->block_size) : INT64_MAX / 2;
    int64_t written = need < seq->n_blocks ? need : seq->n_blocks;
    for (int64_t i = seq->seq_len / pool->block_size; i < written; i++) {
        int32_t block_id = seq->block_table[i];
        if (pool->ref_count[block_id] > 1) {
            pool->ref_count[block_id]--;
            seq->block_table[i] = ~block_id;
            pool->n_planned++;
        }
    }
    if (need > seq->max_blocks)
        return pool->n_planned > pool->n_free ? PKV_ERR_EXHAUST : PKV_ERR_BOUNDS;
    if (need > seq->n_blocks)
        pool->n_planned += need - seq->n_blocks;
    /* The second test holds even if someone took owners away behind the sequence's back (pkv_unref_block), so
     * that the pool seems to have blocks that its table has no place for. */
    return pool->n_planned > pool->n_free || need > seq->table_cap ? PKV_ERR_EXHAUST : PKV_OK;
}

/* Undo pkv_plan_append's marks. */
static inline void pkv_unplan_append(pkv_seq *seq) {
    for (int64_t i = seq->seq_len / seq->pool->block_size; i < seq->n_blocks; i++)
        if (seq->block_table[i] < 0) {
            seq->block_table[i] = ~seq->block_table[i];
            seq->pool->ref_count[seq->block_table[i]]++;
        }
}

/* The first n_rows rows of all layers from one block to another; nothing where n_rows <= 0. */
static inline void pkv_copy_block(pkv_pool *pool, int32_t source, int32_t target, int64_t n_rows) {
    for (int64_t layer = 0; layer < pool->n_layers && n_rows > 0; layer++) {
        pkv_slot from = pkv_pool_slot(pool, source, layer, 0), to = pkv_pool_slot(pool, target, layer, 0);
        size_t n_bytes = (size_t)(n_rows * pool->kv_dim * pkv_kv_value_nbytes(pool->dtype));
        memcpy(pool->k + to.values, pool->k + from.values, n_bytes);
        memcpy(pool->v + to.values, pool->v + from.values, n_bytes);
        n_bytes = (size_t)(n_rows * pkv_kv_scales_nbytes(pool->dtype, pool->kv_dim));
        memcpy(pool->k + to.scales, pool->k + from.scales, n_bytes);
        memcpy(pool->v + to.scales, pool->v + from.scales, n_bytes);
    }
}

/* Do what was planned; cannot fail after a plan that succeeded. Copies only rows below seq_len. */
static inline void pkv_commit_append(pkv_seq *seq, int64_t n_new) {
    pkv_pool *pool = seq->pool;
    int64_t need = pkv_blocks_for(seq->seq_len + n_new, pool->block_size);
    int64_t written = need < seq->n_blocks ? need : seq->n_blocks;
    for (int64_t i = seq->seq_len / pool->block_size; i < written; i++) {
        int32_t shared = seq->block_table[i], own = shared;
        if (pool->ref_count[shared] <= 1)
            continue;
        pkv_alloc_block(pool, &own);
        pkv_copy_block(pool, shared, own, seq->seq_len - i * pool->block_size); /* none in a reserved empty block */
        pkv_unref_block(pool, shared);
        seq->block_table[i] = own;
    }
    while (seq->n_blocks < need)
        pkv_alloc_block(pool, &seq->block_table[seq->n_blocks++]);
}

/* Take back what pkv_commit_append did, before any row was advanced over; of a batch the last sequence first. Then the
 * pool, its free stack too, is as it was.
 *   n_blocks  of the table before
 *   before    [n_blocks - seq_len / block_size] its entries from the block of row seq_len on */
static inline void pkv_undo_append(pkv_seq *seq, int64_t n_blocks, const int32_t *before) {
    pkv_pool *pool = seq->pool;
    int64_t first = seq->seq_len / pool->block_size;
    while (seq->n_blocks > n_blocks)
        pkv_unref_block(pool, seq->block_table[--seq->n_blocks]);
    for (int64_t i = n_blocks - 1; i >= first; i--) {
        int32_t own = seq->block_table[i], shared = before[i - first];
        if (own == shared)
            continue;
        /* Its other owner may have been shorter, and have written over rows that were this sequence's too. */
        pkv_copy_block(pool, own, shared, seq->seq_len - i * pool->block_size);
        pool->ref_count[shared]++;
        seq->block_table[i] = shared;
        pkv_unref_block(pool, own);
    }
}

/* Whether pkv_ensure_append_batch would succeed; changes nothing.
 *   failed  row of the batch that the status speaks of
 *   needed  blocks the whole batch needs of that row's pool, for the message
 * The seed's order of checks for each sequence in turn: NULL, BAD_DIM, EXHAUST for the tail's twin, BOUNDS
 * of the table, EXHAUST for the rest. No sequence may appear twice (the caller has checked). */
static inline pkv_status pkv_check_append_batch(pkv_seq *const *seqs, const int64_t *n_new, int64_t n_seqs,
                                                 int64_t *failed, int64_t *needed) {
    pkv_status status = PKV_OK;
    for (int64_t i = 0; i < n_seqs; i++)
        if (seqs[i])
            seqs[i]->pool->n_planned = 0;
    *failed = n_seqs;
    int64_t planned = 0;
    for (; planned < n_seqs; planned++) {
        pkv_status s = pkv_plan_append(seqs[planned], n_new[planned]);
        if (s != PKV_OK && status == PKV_OK) {
            status = s;
            *failed = planned;
        }
        if (status != PKV_OK && status != PKV_ERR_EXHAUST) {
            planned++;
            break; /* nothing to count: the message needs no total */
        }
    }
    *needed = status != PKV_OK && seqs[*failed] ? seqs[*failed]->pool->n_planned : 0;
    for (int64_t i = 0; i < planned; i++)
        if (seqs[i])
            pkv_unplan_append(seqs[i]);
    return status;
}

/* Make rows [seq_len, seq_len + n_new[i]) of every sequence writable and private: all of them or none. */
static inline pkv_status pkv_ensure_append_batch(pkv_seq *const *seqs, const int64_t *n_new, int64_t n_seqs,
                                                 int64_t *failed, int64_t *needed) {
    pkv_status status = pkv_check_append_batch(seqs, n_new, n_seqs, failed, needed);
    if (status == PKV_OK)
        for (int64_t i = 0; i < n_seqs; i++)
            pkv_commit_append(seqs[i], n_new[i]);
    return status;
}

static inline pkv_status pkv_ensure_append(pkv_seq *seq, int64_t n_new, int64_t *needed) {
    int64_t failed;
    return pkv_ensure_append_batch(&seq, &n_new, 1, &failed, needed);
}

/* BOUNDS unless rows [seq_len, seq_len + n) are reserved in blocks that seq alone owns. */
static inline pkv_status pkv_check_writable(const pkv_seq *seq, int64_t n) {
    if (!seq)
        return PKV_ERR_NULL;
    if (n <= 0)
        return PKV_ERR_BAD_DIM;
    int64_t block_size = seq->pool->block_size;
    if (n > seq->n_blocks * block_size - seq->seq_len)
        return PKV_ERR_BOUNDS;
    for (int64_t i = seq->seq_len / block_size; i < pkv_blocks_for(seq->seq_len + n, block_size); i++)
        if (seq->pool->ref_count[seq->block_table[i]] != 1)
            return PKV_ERR_BOUNDS;
    return PKV_OK;
}

/* Row t of one layer of a sequence. */
static inline pkv_slot pkv_seq_slot(const pkv_seq *seq, int64_t layer, int64_t t) {
    int64_t block_size = seq->pool->block_size;
    return pkv_pool_slot(seq->pool, seq->block_table[t / block_size], layer, t % block_size);
}

/* Write rows [seq_len, seq_len + n) of one layer; k, v [n, kv_dim]. Does not advance. */
static inline pkv_status pkv_append_layer(pkv_seq *seq, int64_t layer, const float *k, const float *v, int64_t n) {
    pkv_status status = pkv_check_writable(seq, n);
    if (status != PKV_OK)
        return status;
    pkv_pool *pool = seq->pool;
    if (layer < 0 || layer >= pool->n_layers)
        return PKV_ERR_BOUNDS;
    for (int64_t i = 0; i < n; i++) {
        pkv_slot slot = pkv_seq_slot(seq, layer, seq->seq_len + i);
        pkv_kv_round_scalar(pool->dtype, k + i * pool->kv_dim, pool->kv_dim, pool->k + slot.values,
                            pool->k + slot.scales);
        pkv_kv_round_scalar(pool->dtype, v + i * pool->kv_dim, pool->kv_dim, pool->v + slot.values,
                            pool->v + slot.scales);
    }
    return PKV_OK;
}

/* Count n appended rows as part of the sequence. */
static inline pkv_status pkv_advance(pkv_seq *seq, int64_t n) {
    pkv_status status = pkv_check_writable(seq, n);
    if (status == PKV_OK)
        seq->seq_len += n;
    return status;
}

/* Copy rows [0, total_k) of one KV head, as float32, to k_out, v_out [total_k, head_dim]. Rows past seq_len may be
 * asked for while they are reserved: attention reads the rows of a step before it advances. */
static inline pkv_status pkv_gather_head(const pkv_seq *seq, int64_t layer, int64_t kv_head, int64_t head_dim,
                                         int64_t total_k, float *k_out, float *v_out) {
    if (!seq)
        return PKV_ERR_NULL;
    const pkv_pool *pool = seq->pool;
    if (head_dim <= 0 || total_k < 0 || head_dim % pkv_kv_group(pool->dtype) != 0)
        return PKV_ERR_BAD_DIM;
    if (layer < 0 || layer >= pool->n_layers || kv_head < 0 || head_dim > pool->kv_dim ||
        kv_head > pool->kv_dim / head_dim - 1 || total_k > seq->n_blocks * pool->block_size)
        return PKV_ERR_BOUNDS;
    for (int64_t t = 0; t < total_k; t++) {
        pkv_slot slot = pkv_seq_slot(seq, layer, t);
        slot.values += kv_head * head_dim * pkv_kv_value_nbytes(pool->dtype);
        slot.scales += pkv_kv_scales_nbytes(pool->dtype, kv_head * head_dim);
        pkv_kv_rows k = {pool->k + slot.values, pool->k + slot.scales, 0, 0};
        pkv_kv_rows v = {pool->v + slot.values, pool->v + slot.scales, 0, 0};
        pkv_kv_expand_scalar(pool->dtype, &k, 1, head_dim, k_out + t * head_dim, NULL, 0);
        pkv_kv_expand_scalar(pool->dtype, &v, 1, head_dim, v_out + t * head_dim, NULL, 0);
    }
    return PKV_OK;
}

/* What a row is stored as: its K, its V and, for q8_0, the scales of each. */
typedef enum pkv_part { PKV_PART_K, PKV_PART_V, PKV_PART_K_SCALE, PKV_PART_V_SCALE } pkv_part;

/* Bytes of one row of a part. */
static inline int64_t pkv_part_nbytes(const pkv_pool *pool, pkv_part part) {
    return part == PKV_PART_K || part == PKV_PART_V ? pool->kv_dim * pkv_kv_value_nbytes(pool->dtype)
                                                    : pkv_kv_scales_nbytes(pool->dtype, pool->kv_dim);
}

/* Copy rows [begin, begin + n) of one layer's part as they are stored: out of the blocks into rows
 * [n, pkv_part_nbytes], or (put) from there into the blocks. The rows of a block lie together. BOUNDS: a layer or rows
 * that are not there; rows to be put must be reserved past seq_len, in blocks that seq alone owns. */
static inline pkv_status pkv_copy_stored(pkv_seq *seq, pkv_part part, int64_t layer, int64_t begin, int64_t n,
                                         uint8_t *rows, int put) {
    if (!seq)
        return PKV_ERR_NULL;
    const pkv_pool *pool = seq->pool;
    if (layer < 0 || layer >= pool->n_layers || n <= 0 || begin < (put ? seq->seq_len : 0) ||
        begin > INT64_MAX - n || (!put && begin + n > seq->seq_len))
        return PKV_ERR_BOUNDS;
    if (put && pkv_check_writable(seq, begin + n - seq->seq_len) != PKV_OK)
        return PKV_ERR_BOUNDS;
    int64_t row_nbytes = pkv_part_nbytes(pool, part), run;
    int scales = part == PKV_PART_K_SCALE || part == PKV_PART_V_SCALE;
    uint8_t *base = part == PKV_PART_K || part == PKV_PART_K_SCALE ? pool->k : pool->v;
    for (int64_t t = begin; t < begin + n; t += run, rows += run * row_nbytes) {
        run = pkv_min(pool->block_size - t % pool->block_size, begin + n - t);
        pkv_slot slot = pkv_seq_slot(seq, layer, t);
        uint8_t *stored = base + (scales ? slot.scales : slot.values);
        memcpy(put ? stored : rows, put ? rows : stored, (size_t)(run * row_nbytes));
    }
    return PKV_OK;
}

#endif
