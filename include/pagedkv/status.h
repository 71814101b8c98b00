/* Status codes: one enum for each layer of the seeds, values as there.
 * A function returns its own layer's code; the caller adds its own in front, so that Python can show the
 * whole chain, for example FLV4_ERR_STACK, STK4_ERR_LAYER, PKV_ERR_EXHAUST. */
#ifndef PAGEDKV_STATUS_H
#define PAGEDKV_STATUS_H

/* Pool and sequence. */
typedef enum pkv_status {
    PKV_OK = 0,
    PKV_ERR_NULL = 1,
    PKV_ERR_BAD_DIM = 2,
    PKV_ERR_EXHAUST = 3,
    PKV_ERR_BOUNDS = 4
} pkv_status;

/* Attention over a paged sequence. */
typedef enum ap_status { AP_OK = 0, AP_ERR_BAD_DIM = 1, AP_ERR_BAD_GQA = 2, AP_ERR_SEQ = 3 } ap_status;

/* One transformer block. */
typedef enum blk4_status { BLK4_OK = 0, BLK4_ERR_BAD_DIM = 1, BLK4_ERR_NULL = 2, BLK4_ERR_CACHE = 3 } blk4_status;

/* The stack of blocks. */
typedef enum stk4_status { STK4_OK = 0, STK4_ERR_BAD_DIM = 1, STK4_ERR_NULL = 2, STK4_ERR_LAYER = 3 } stk4_status;

/* The whole model: token ids in, logits out. */
typedef enum flv4_status {
    FLV4_OK = 0,
    FLV4_ERR_NULL = 1,
    FLV4_ERR_BAD_DIM = 2,
    FLV4_ERR_TOKEN = 3,
    FLV4_ERR_STACK = 4
} flv4_status;

/* kv_cache_append. */
typedef enum kva_status {
    KVA_OK = 0,
    KVA_ERR_EMPTY_SHAPE = 1,
    KVA_ERR_RANGE = 2,
    KVA_ERR_ELEMENT_COUNT_OVERFLOW = 3,
    KVA_ERR_UNSUPPORTED_DTYPE = 4
} kva_status;

#endif
