# C declarations of include/pagedkv, for _core.pyx and for Cython users (pagedkv.get_include()).
from libc.stdint cimport int32_t, int64_t, uint64_t


cdef extern from "pagedkv/status.h" nogil:
    ctypedef enum pkv_status:
        PKV_OK, PKV_ERR_NULL, PKV_ERR_BAD_DIM, PKV_ERR_EXHAUST, PKV_ERR_BOUNDS
    ctypedef enum ap_status:
        AP_OK, AP_ERR_BAD_DIM, AP_ERR_BAD_GQA, AP_ERR_SEQ
    ctypedef enum blk4_status:
        BLK4_OK, BLK4_ERR_BAD_DIM, BLK4_ERR_NULL, BLK4_ERR_CACHE
    ctypedef enum stk4_status:
        STK4_OK, STK4_ERR_BAD_DIM, STK4_ERR_NULL, STK4_ERR_LAYER
    ctypedef enum flv4_status:
        FLV4_OK, FLV4_ERR_NULL, FLV4_ERR_BAD_DIM, FLV4_ERR_TOKEN, FLV4_ERR_STACK
    ctypedef enum kva_status:
        KVA_OK, KVA_ERR_EMPTY_SHAPE, KVA_ERR_RANGE, KVA_ERR_ELEMENT_COUNT_OVERFLOW, KVA_ERR_UNSUPPORTED_DTYPE


cdef extern from "pagedkv/layout.h" nogil:
    const int64_t PKV_CHUNK
    const int64_t PKV_PANEL
    int64_t pkv_blocks_for(int64_t n_tokens, int64_t block_size)
    int64_t pkv_panels_for(int64_t n)
    int64_t pkv_row_offset(int64_t block_id, int64_t layer, int64_t row, int64_t n_layers, int64_t block_size,
                           int64_t kv_dim)


cdef extern from "pagedkv/weights.h" nogil:
    ctypedef struct pkv_form:
        int32_t unit, has_scale, block_nbytes
    enum:
        PKV_F32, PKV_F16, PKV_BF16, PKV_Q8_0, PKV_Q4_0, PKV_Q4_1, PKV_Q5_0, PKV_Q5_1, PKV_Q4_K, PKV_Q5_K, PKV_Q6_K
        PKV_N_DTYPES
    pkv_form pkv_form_of(int dtype)
    int64_t pkv_panel_nbytes(int dtype, int64_t k)
    void pkv_pack_panel(int dtype, const unsigned char **rows, int64_t k, unsigned char *panel)


cdef extern from "pagedkv/memory.h" nogil:
    void *pkv_mem_alloc(size_t n_bytes)
    void pkv_mem_free(void *p, size_t n_bytes)
    bint pkv_mul_size(int64_t a, int64_t b, int64_t *out)


cdef extern from "pagedkv/fpenv.h" nogil:
    uint64_t pkv_fpenv_enter()
    void pkv_fpenv_leave(uint64_t saved)


cdef extern from "pagedkv/kernels_scalar.h" nogil:
    bint pkv_fma_rounds_once(float (*fused)(float, float, float) noexcept nogil)


cdef extern from "pagedkv/kv.h" nogil:
    int64_t pkv_kv_group(int dtype)
    int64_t pkv_kv_value_nbytes(int dtype)
    int64_t pkv_kv_scales_nbytes(int dtype, int64_t n)
    int64_t pkv_kv_row_nbytes(int dtype, int64_t n)


cdef extern from "pagedkv/pool.h" nogil:
    ctypedef struct pkv_pool:
        int64_t n_blocks, n_layers, block_size, kv_dim
        int32_t dtype
        unsigned char *k
        unsigned char *v
        int32_t *ref_count
        int64_t n_free, n_planned
    ctypedef struct pkv_seq:
        pkv_pool *pool
        int32_t *block_table
        int64_t max_blocks, n_blocks, seq_len
        pkv_seq *next
    pkv_status pkv_pool_new(int64_t n_blocks, int64_t n_layers, int64_t kv_dim, int64_t block_size, pkv_pool **out)
    pkv_status pkv_pool_new_of(int dtype, int64_t n_blocks, int64_t n_layers, int64_t kv_dim, int64_t block_size,
                               pkv_pool **out)
    void pkv_pool_free(pkv_pool *pool)
    pkv_status pkv_alloc_block(pkv_pool *pool, int32_t *block_id)
    pkv_status pkv_ref_block(pkv_pool *pool, int64_t block_id)
    pkv_status pkv_unref_block(pkv_pool *pool, int64_t block_id)
    pkv_status pkv_seq_new(pkv_pool *pool, int64_t max_tokens, pkv_seq **out)
    pkv_status pkv_seq_adopt(pkv_seq *seq, const int32_t *block_ids, int64_t n)
    pkv_status pkv_seq_fork(const pkv_seq *source, pkv_seq **out)
    void pkv_seq_free(pkv_seq *seq)
    pkv_status pkv_seq_truncate(pkv_seq *seq, int64_t new_len)
    pkv_status pkv_ensure_append(pkv_seq *seq, int64_t n_new, int64_t *needed)
    pkv_status pkv_check_append_batch(pkv_seq **seqs, const int64_t *n_new, int64_t n_seqs, int64_t *failed,
                                      int64_t *needed)
    void pkv_undo_append(pkv_seq *seq, int64_t n_blocks, const int32_t *before)
    pkv_status pkv_ensure_append_batch(pkv_seq **seqs, const int64_t *n_new, int64_t n_seqs, int64_t *failed,
                                       int64_t *needed)
    pkv_status pkv_append_layer(pkv_seq *seq, int64_t layer, const float *k, const float *v, int64_t n)
    pkv_status pkv_advance(pkv_seq *seq, int64_t n)
    pkv_status pkv_gather_head(const pkv_seq *seq, int64_t layer, int64_t kv_head, int64_t head_dim, int64_t total_k,
                               float *k_out, float *v_out)
    ctypedef enum pkv_part:
        PKV_PART_K, PKV_PART_V, PKV_PART_K_SCALE, PKV_PART_V_SCALE
    int64_t pkv_part_nbytes(const pkv_pool *pool, pkv_part part)
    pkv_status pkv_copy_stored(pkv_seq *seq, pkv_part part, int64_t layer, int64_t begin, int64_t n,
                               unsigned char *rows, bint put)


cdef extern from "pagedkv/int8_scalar.h" nogil:
    const int64_t PKV_INT8_GROUP
    ctypedef struct pkv_int8_group:
        pass


cdef extern from "pagedkv/dispatch.h" nogil:
    ctypedef struct pkv_kernels:
        const char *isa
        float (*dot)(const float *a, const float *b, int64_t n) noexcept nogil
        void (*exp_row)(const float *x, float *y, int64_t n) noexcept nogil
        void (*softmax)(const float *x, float *y, int64_t n) noexcept nogil
        void (*rmsnorm)(const float *x, const float *gamma, float eps, float *y, int64_t n) noexcept nogil
        void (*rope)(float *head, const float *cos, const float *sin, int64_t half) noexcept nogil
        void (*swiglu)(const float *gate, const float *up, float *y, int64_t n) noexcept nogil
        void (*expand)(int dtype, const unsigned char *panel, int64_t k_0, int64_t n_k, float *out) noexcept nogil
        void (*quantize_row)(const float *x, int64_t n, pkv_int8_group *groups) noexcept nogil
    const pkv_kernels pkv_kernel_tables[]
    int pkv_n_kernel_tables()
    bint pkv_isa_runs(int i)
    const pkv_kernels *pkv_kernels_for(const char *isa)
    void pkv_rope_table(int64_t position, const double *inv_freq, int64_t half, float *cos, float *sin)


cdef extern from "pagedkv/attention.h" nogil:
    ctypedef struct pkv_attn_shape:
        int64_t n_heads, n_kv_heads, head_dim
        float scale
        int64_t window
    ctypedef struct pkv_kv_view:
        const unsigned char *k
        const unsigned char *v
        const int32_t *block_table
        int64_t block_stride, layer_stride, kv_dim, block_size
        int32_t dtype
    ctypedef struct pkv_attn_segment:
        pkv_kv_view kv
        int64_t row, n_rows, visible, visible_step
    ctypedef struct pkv_attn_item:
        pass
    ctypedef struct pkv_attn_plan:
        pkv_attn_item *run
        pkv_attn_item *join
        int64_t n_run, n_join, partials_len
    bint pkv_attn_make_plan(pkv_attn_plan *plan, const pkv_attn_shape *shape, const pkv_attn_segment *segments,
                            int64_t n_segments, int64_t n_threads)
    void pkv_attn_free_plan(pkv_attn_plan *plan)
    int64_t pkv_attn_scratch_len(const pkv_attn_shape *shape)


cdef extern from "pagedkv/step.h" nogil:
    const int64_t PKV_STEP_ROWS
    const int64_t PKV_MATMUL_SCRATCH
    ctypedef struct pkv_panel:
        const void *data
        int32_t dtype
    ctypedef struct pkv_weight:
        const pkv_panel *panels
        int64_t n, k
    ctypedef struct pkv_layer:
        const float *attn_norm
        const float *ffn_norm
        const float *qkv_bias
        const float *q_norm
        const float *k_norm
        int64_t window
        pkv_weight qkv, o, gate_up, down
    ctypedef struct pkv_model:
        int64_t n_layers, hidden_dim, ffn_dim, vocab_size, rope_half
        pkv_attn_shape attn
        float norm_eps
        const double *inv_freq
        const pkv_layer *layers
        const float *out_norm
        pkv_weight embedding, head
        bint int8
    ctypedef struct pkv_stop:
        int (*poll)(pkv_stop *stop) noexcept nogil
        double next_s
        int64_t n_rows
        int is_set
    int pkv_stop_is_set(const pkv_stop *stop)
    ctypedef struct pkv_step:
        pkv_stop *stop
        const pkv_model *model
        const pkv_kernels *kernels
        int64_t n_rows, n_out
        const int32_t *tokens
        const int64_t *positions
        pkv_seq **row_seqs
        pkv_attn_plan plan
        const int64_t *out_row
        float *logits
        pkv_int8_group *attn_codes
        float *partials
    int64_t pkv_pad(int64_t n)
    int64_t pkv_qkv_len(const pkv_model *m)
    int64_t pkv_step_lay_out(pkv_step *s, const pkv_model *m, int64_t n_rows, int64_t n_threads, float *block)


cdef extern from "pagedkv/team.h" nogil:
    void pkv_team_step(const pkv_step *s, int n_threads)
    void pkv_team_attention(const pkv_kernels *kernels, const pkv_attn_shape *shape, const pkv_attn_plan *plan,
                            int64_t layer, const float *q, float *out, int64_t ld, float *partials, float *scratch,
                            int64_t scratch_len, int n_threads)
    void pkv_team_matmul(const pkv_kernels *kernels, const float *x, pkv_int8_group *codes, int64_t n,
                         const pkv_weight *w, float *y, float *scratch, int n_threads)


cdef extern from "pagedkv/sampling.h" nogil:
    ctypedef struct pkv_draw:
        int64_t row
        double temperature
        int64_t top_k
        double top_p, min_p
        uint64_t seed, sample, position
    ctypedef struct pkv_logprobs:
        double log_sum
        int64_t rank, n_top
        int64_t *top
    ctypedef struct pkv_sample_scratch:
        pass
    int64_t pkv_sample_lay_out(pkv_sample_scratch *s, int64_t n, unsigned char *block)
    double pkv_uniform(uint64_t seed, uint64_t sample, uint64_t position)
    double pkv_log_f64(double x)
    int64_t pkv_take_row(const pkv_kernels *kernels, const float *x, int64_t n, const pkv_draw *draw, int64_t token,
                         pkv_logprobs *wanted, pkv_sample_scratch *s)


cdef class PoolCore:
    cdef object __weakref__
    cdef pkv_pool *ptr
    cdef readonly object _lock       # serialises all calls on this pool
    cdef pkv_seq *orphans            # sequences dropped while the lock was held, a list: freed at the next call
    cdef void leave(self, pkv_seq *seq) noexcept
    cdef void reap(self) noexcept
    cdef void try_reap(self) noexcept
    cdef int enter(self) except -1
    cdef void exit(self) noexcept
    cdef view(self, unsigned char *data, bint scales)


cdef class SequenceCore:
    cdef pkv_seq *ptr                # NULL before _open and after free
    cdef readonly PoolCore pool
    cdef pkv_seq *enter(self) except NULL
    cdef copy_stored(self, str part, int64_t layer, int64_t begin, const unsigned char[:, ::1] rows, bint put)


cdef class Arena:
    cdef unsigned char *block
    cdef size_t n_bytes, n_used


cdef class PackedWeight:
    cdef Arena arena                 # owner of the panels' memory
    cdef pkv_panel *panels           # [n_panels]
    cdef readonly int64_t n, k
    cdef size_t n_bytes
    cdef pkv_weight view(self)


cdef class Scratch:
    cdef float *block
    cdef size_t n_bytes


cdef class ModelCore:
    cdef pkv_model m
    cdef pkv_layer *layers
    cdef list keep                   # owners of every array that m points into
    cdef list scratches              # idle scratch blocks, reused by the next step
    cdef int check_batch(self, list seqs, list tokens) except -1
    cdef run_step(self, list seqs, list tokens, logits_of, out, bint can_stop)
    cdef Scratch take_scratch(self, int64_t n_floats)
    cdef void keep_scratch(self, Scratch scratch) noexcept
