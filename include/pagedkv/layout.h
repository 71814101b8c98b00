/* Address arithmetic: where a row of the pool, a packed weight or a chunk of attention lies.
 * The one owner of these formulas. All offsets are int64_t: a pool passes 2^31 elements long before it fills the
 * memory of a small server. */
#ifndef PAGEDKV_LAYOUT_H
#define PAGEDKV_LAYOUT_H

#include <stdint.h>

/* Positions in one chunk of attention's softmax, aligned at position 0. The constant is part of the
 * canonical order: changing it changes bits. 256 keeps one chunk of K (or V) of a 64-wide head at 64 KiB,
 * inside L2 beside the scores, and leaves 32 chunks to share out among threads at a context of 8k. */
#define PKV_CHUNK 256

/* Columns in one panel of packed weights: two AVX-512 registers, four AVX2, eight NEON. */
#define PKV_PANEL 32

/* Lanes of every reduction along a row (dot products, sums): see kernels_scalar.h. */
#define PKV_LANES 16

/* An array that begins at a multiple of n bytes. */
#ifdef __cplusplus
#define PKV_ALIGNED(n) alignas(n)
#else
#define PKV_ALIGNED(n) _Alignas(n)
#endif

static inline int64_t pkv_min(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bytes that will be read soon, for which a kernel asks memory while it computes; {NULL, 0}: none. */
typedef struct pkv_ahead {
    const uint8_t *begin;
    int64_t nbytes;
} pkv_ahead;

/* Offset of (block, layer, row 0) in K or V, shaped [n_blocks, n_layers, block_size, width], in what width counts. */
static inline int64_t pkv_block_offset(int64_t block_id, int64_t layer, int64_t n_layers, int64_t block_size,
                                       int64_t width) {
    return (block_id * n_layers + layer) * block_size * width;
}

/* Offset of (block, layer, row) in elements where a row is kv_dim of them and nothing else. */
static inline int64_t pkv_row_offset(int64_t block_id, int64_t layer, int64_t row, int64_t n_layers,
                                     int64_t block_size, int64_t kv_dim) {
    return pkv_block_offset(block_id, layer, n_layers, block_size, kv_dim) + row * kv_dim;
}

/* Where a stored row lies: bytes from the start of K, or of V, to its values and to its scales. */
typedef struct pkv_slot {
    int64_t values, scales;
} pkv_slot;

/* Slot of (block, layer, row), each row in values_nbytes and scales_nbytes: the values of one layer of a block
 * come first, then its scales. */
static inline pkv_slot pkv_slot_at(int64_t block_id, int64_t layer, int64_t row, int64_t n_layers, int64_t block_size,
                                   int64_t values_nbytes, int64_t scales_nbytes) {
    int64_t begin = pkv_block_offset(block_id, layer, n_layers, block_size, values_nbytes + scales_nbytes);
    return (pkv_slot){begin + row * values_nbytes, begin + block_size * values_nbytes + row * scales_nbytes};
}

/* Blocks that hold n_tokens rows. */
static inline int64_t pkv_blocks_for(int64_t n_tokens, int64_t block_size) {
    return n_tokens / block_size + (n_tokens % block_size != 0);
}

/* Panels that hold n output columns. */
static inline int64_t pkv_panels_for(int64_t n) { return n / PKV_PANEL + (n % PKV_PANEL != 0); }

/* Chunks that positions [0, n_tokens) touch. */
static inline int64_t pkv_chunks_for(int64_t n_tokens) {
    return n_tokens / PKV_CHUNK + (n_tokens % PKV_CHUNK != 0);
}

#endif
