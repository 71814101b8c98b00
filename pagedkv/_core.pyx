# The one entry to compiled code: checks at the door, then nogil over the kernels of
# include/pagedkv. Sections: errors, threads and ISA, pool, sequence, operations, attention, model, sampling.
# No list comprehensions: where the list cannot grow, Cython 3.3's gives an element back twice, and the process crashes.
from cython.parallel cimport parallel, prange, threadid
from libc.stdlib cimport calloc, free, malloc
from libc.math cimport NAN, fmaf, sqrt
from libc.string cimport memcpy
cimport cython
cimport numpy as cnp

import operator
import signal
import sys
import threading
import weakref
from enum import IntEnum

import numpy as np

from pagedkv import errors

cnp.import_array()

cdef extern from *:
    """
    #ifdef _OPENMP
    #include <omp.h>
    #else
    static int omp_get_max_threads(void) { return 1; }
    static int omp_get_num_procs(void) { return 1; }
    #include <time.h>
    static double omp_get_wtime(void) { return (double)clock() / CLOCKS_PER_SEC; }
    #endif
    #include "pagedkv/step.h"

    /* Whether Ctrl-C was pressed; asked by the main thread inside a step. At most ten times a second it takes the
     * interpreter's lock for that, which another thread may hold for 5 ms. The handler is left to the step's end:
     * here the pools are locked. */
    static int pkv_poll_interrupt(pkv_stop *stop) {
        if (omp_get_wtime() < stop->next_s)
            return 0;
        PyGILState_STATE state = PyGILState_Ensure();
        int is_pressed = PyOS_InterruptOccurred();
        PyGILState_Release(state);
        stop->next_s = omp_get_wtime() + 0.1;
        return is_pressed;
    }
    /* By this symbol threadpoolctl tells the library from others of its file name (threads.py). */
    Py_EXPORTED_SYMBOL int pagedkv_core = 1;
    """
    int omp_get_max_threads() nogil
    int omp_get_num_procs() nogil
    double omp_get_wtime() nogil
    int pkv_poll_interrupt(pkv_stop *stop) noexcept nogil


# ---------------------------------------------------------------------------------------------------
# Errors: a status becomes an exception here and nowhere else.

class Status(IntEnum):
    """Base of the status enums; values are those of include/pagedkv/status.h."""

    def __str__(self):
        return self.name


PkvStatus = Status("PkvStatus", {
    "PKV_OK": PKV_OK, "PKV_ERR_NULL": PKV_ERR_NULL, "PKV_ERR_BAD_DIM": PKV_ERR_BAD_DIM,
    "PKV_ERR_EXHAUST": PKV_ERR_EXHAUST, "PKV_ERR_BOUNDS": PKV_ERR_BOUNDS}, module=__name__)
ApStatus = Status("ApStatus", {
    "AP_OK": AP_OK, "AP_ERR_BAD_DIM": AP_ERR_BAD_DIM, "AP_ERR_BAD_GQA": AP_ERR_BAD_GQA,
    "AP_ERR_SEQ": AP_ERR_SEQ}, module=__name__)
Blk4Status = Status("Blk4Status", {
    "BLK4_OK": BLK4_OK, "BLK4_ERR_BAD_DIM": BLK4_ERR_BAD_DIM, "BLK4_ERR_NULL": BLK4_ERR_NULL,
    "BLK4_ERR_CACHE": BLK4_ERR_CACHE}, module=__name__)
Stk4Status = Status("Stk4Status", {
    "STK4_OK": STK4_OK, "STK4_ERR_BAD_DIM": STK4_ERR_BAD_DIM, "STK4_ERR_NULL": STK4_ERR_NULL,
    "STK4_ERR_LAYER": STK4_ERR_LAYER}, module=__name__)
Flv4Status = Status("Flv4Status", {
    "FLV4_OK": FLV4_OK, "FLV4_ERR_NULL": FLV4_ERR_NULL, "FLV4_ERR_BAD_DIM": FLV4_ERR_BAD_DIM,
    "FLV4_ERR_TOKEN": FLV4_ERR_TOKEN, "FLV4_ERR_STACK": FLV4_ERR_STACK}, module=__name__)
KvaStatus = Status("KvaStatus", {
    "KVA_OK": KVA_OK, "KVA_ERR_EMPTY_SHAPE": KVA_ERR_EMPTY_SHAPE, "KVA_ERR_RANGE": KVA_ERR_RANGE,
    "KVA_ERR_ELEMENT_COUNT_OVERFLOW": KVA_ERR_ELEMENT_COUNT_OVERFLOW,
    "KVA_ERR_UNSUPPORTED_DTYPE": KVA_ERR_UNSUPPORTED_DTYPE}, module=__name__)

cdef dict EXCEPTION_OF = {
    PkvStatus.PKV_ERR_NULL.name: errors.NullError,
    PkvStatus.PKV_ERR_BAD_DIM.name: errors.BadDimError,
    PkvStatus.PKV_ERR_EXHAUST.name: errors.PoolExhausted,
    PkvStatus.PKV_ERR_BOUNDS.name: errors.BoundsError,
    ApStatus.AP_ERR_BAD_DIM.name: errors.BadDimError,
    ApStatus.AP_ERR_BAD_GQA.name: errors.BadGQAError,
    Stk4Status.STK4_ERR_BAD_DIM.name: errors.BadDimError,
    Flv4Status.FLV4_ERR_NULL.name: errors.NullError,
    Flv4Status.FLV4_ERR_BAD_DIM.name: errors.BadDimError,
    Flv4Status.FLV4_ERR_TOKEN.name: errors.TokenError,
    KvaStatus.KVA_ERR_EMPTY_SHAPE.name: errors.EmptyShape,
    KvaStatus.KVA_ERR_RANGE.name: errors.Range,
    KvaStatus.KVA_ERR_ELEMENT_COUNT_OVERFLOW.name: errors.ElementCountOverflow,
    KvaStatus.KVA_ERR_UNSUPPORTED_DTYPE.name: errors.UnsupportedDtype,
}


cdef error(str message, tuple chain):
    """The exception of the innermost status, carrying the whole chain."""
    return EXCEPTION_OF[chain[len(chain) - 1].name](message, chain)


# In front of a pool's status: the layers between the model and the pool.
cdef tuple STACK_CHAIN = (Flv4Status.FLV4_ERR_STACK, Stk4Status.STK4_ERR_LAYER)


# ---------------------------------------------------------------------------------------------------
# Threads and instruction set

cdef bint fma_rounds_once():
    cdef uint64_t saved = pkv_fpenv_enter()
    cdef bint once = pkv_fma_rounds_once(fmaf)
    pkv_fpenv_leave(saved)
    return once


if not fma_rounds_once():
    raise ImportError("the C library's fmaf rounds twice, as that of mingw-w64 does: the results would have other bits than "
                      "on other machines, so pagedkv does not run with it; use a build for another C library")

cdef const pkv_kernels *KERNELS = pkv_kernels_for(NULL)
cdef int N_THREADS = 1
cdef int OMP_DEFAULT = omp_get_max_threads()
cdef int QUOTA = 0                # processors that the cgroup grants; 0: no limit
cdef bint CAPPED = True           # teams are no larger than the processors there are
cdef bint TEAM_STARTED = False
cdef bint FORKED = False
MAIN_THREAD = threading.main_thread().ident    # the one that handles signals


def _set_num_threads(int n):
    global N_THREADS, FORKED
    N_THREADS = n
    if not TEAM_STARTED:
        FORKED = False    # asked for in a child whose parent had no team here: the runtime can start one


def _asked_num_threads():
    """What was set, whatever limits it now."""
    return N_THREADS


def _set_quota(int n):
    global QUOTA
    QUOTA = n


def _set_capped(bint capped):
    """False, for tests: start as many threads as asked for, even on fewer processors."""
    global CAPPED
    CAPPED = capped


def get_num_threads():
    """Threads that the next call uses at most. Fewer run where this process has fewer processors."""
    return n_threads_now()


cdef int n_threads_now():
    # A limit set on the OpenMP runtime since import (omp_set_num_threads of any library) holds here too. After a fork
    # the child has none of the parent's team (ours or another library's), and the runtime would wait for it forever.
    cdef int n = N_THREADS, limit = omp_get_max_threads()
    if FORKED:
        return 1
    if limit != OMP_DEFAULT and limit < n:
        n = limit
    return n


cdef int team():
    """Threads for a call that is about to start them: n_threads_now, but no more than can run at once.

    At a barrier all wait for the slowest, and one that is not running is slow: 16 threads on 2 processors made a step
    of one row take twice as long. Nor does the runtime survive a count whose stacks do not fit the address space.
    The affinity is asked for each time, as it may change."""
    global TEAM_STARTED
    cdef int n = n_threads_now()
    if CAPPED and n > 1:
        n = max(1, min(n, omp_get_num_procs()))
        if 0 < QUOTA < n:
            n = QUOTA
    if n > 1:
        TEAM_STARTED = True
    return n


def _after_fork():
    """In a forked child: no thread but this one is left, of the OpenMP team or of those that held a lock."""
    global FORKED, MAIN_THREAD
    FORKED, MAIN_THREAD = True, threading.get_ident()
    for pool in POOLS:
        pool._lock._at_fork_reinit()


def isa():
    """Name of the instruction set in use: ``"avx512"``, ``"avx2"``, ``"neon"`` or ``"scalar"``."""
    return KERNELS.isa.decode()


def available_isas():
    """Names of the instruction sets that this machine runs, best first."""
    names = []
    for i in range(pkv_n_kernel_tables()):
        if pkv_isa_runs(i):
            names.append(pkv_kernel_tables[i].isa.decode())
    return names


def _set_isa(str name):
    global KERNELS
    cdef const pkv_kernels *found = pkv_kernels_for(name.encode())
    if found is NULL:
        raise ValueError(f"instruction set {name!r} does not run here; available: {', '.join(available_isas())}")
    KERNELS = found


# ---------------------------------------------------------------------------------------------------
# Pool

POOLS = weakref.WeakSet()    # whose locks a forked child makes anew

# Types of K and V rows, and what NumPy sees of them (it has no bfloat16: those are the bits).
KV_DTYPES = {"float32": PKV_F32, "float16": PKV_F16, "bfloat16": PKV_BF16, "q8_0": PKV_Q8_0}
cdef dict KV_VIEWS = {PKV_F32: np.float32, PKV_F16: np.float16, PKV_BF16: np.uint16, PKV_Q8_0: np.int8}


# What a row is stored as; the scales are q8_0's alone.
KV_PARTS = {"k": PKV_PART_K, "v": PKV_PART_V, "k_scale": PKV_PART_K_SCALE, "v_scale": PKV_PART_V_SCALE}


def kv_group(str dtype):
    """Values that share a scale; 1 without scales."""
    return pkv_kv_group(KV_DTYPES[dtype])


def kv_row_nbytes(str dtype, int64_t kv_dim):
    """Bytes of one row of K (or V)."""
    return pkv_kv_row_nbytes(KV_DTYPES[dtype], kv_dim)


def kv_scales_nbytes(str dtype, int64_t kv_dim):
    """Bytes of the scales among them."""
    return pkv_kv_scales_nbytes(KV_DTYPES[dtype], kv_dim)


@cython.no_gc_clear      # the sequences of a collected cycle still need the lock and the pool
cdef class PoolCore:
    """Blocks, their counts and the free stack. Subclassed by :class:`pagedkv.BlockPool`."""

    def __cinit__(self, int64_t n_blocks, int64_t n_layers, int64_t kv_dim, int64_t block_size=16, dtype="float32"):
        if dtype not in KV_DTYPES:
            raise error(f"a pool holds {', '.join(KV_DTYPES)}, not {dtype!r}", (PkvStatus.PKV_ERR_BAD_DIM,))
        cdef int kv_dtype = KV_DTYPES[dtype]
        if kv_dim > 0 and kv_dim % pkv_kv_group(kv_dtype):
            raise error(f"{dtype} has a scale for each {pkv_kv_group(kv_dtype)} values, which do not divide kv_dim "
                        f"{kv_dim}", (PkvStatus.PKV_ERR_BAD_DIM,))
        cdef pkv_status status = pkv_pool_new_of(kv_dtype, n_blocks, n_layers, kv_dim, block_size, &self.ptr)
        if status == PKV_ERR_NULL:
            raise MemoryError(f"no memory for {n_blocks} blocks of {n_layers} x {block_size} x {kv_dim} values of "
                              f"{dtype}, twice")
        if status != PKV_OK:
            raise error(f"n_blocks {n_blocks}, n_layers {n_layers}, kv_dim {kv_dim} must be positive and small "
                        f"enough for one address space, and block_size {block_size} must divide {PKV_CHUNK}",
                        (PkvStatus(status),))
        self._lock = threading.Lock()
        POOLS.add(self)

    def __dealloc__(self):
        self.reap()
        pkv_pool_free(self.ptr)

    def __reduce__(self):
        raise TypeError("a BlockPool cannot be pickled or copied: its blocks are memory of this process")

    # Allocates nothing, as all here: a sequence is given back when memory is short, too.
    cdef void leave(self, pkv_seq *seq) noexcept:
        seq.next = self.orphans
        self.orphans = seq

    # First and last thing of every call. No `with`: leaving one with an error takes memory, and without it the lock
    # would be held for good.
    cdef int enter(self) except -1:
        self._lock.acquire()
        self.reap()
        return 0

    cdef void exit(self) noexcept:
        self.reap()
        self._lock.release()

    cdef void reap(self) noexcept:
        cdef pkv_seq *seq
        while self.orphans is not NULL:
            seq = self.orphans
            self.orphans = seq.next
            pkv_seq_free(seq)

    @property
    def n_blocks(self):
        """Blocks in the pool."""
        return self.ptr.n_blocks

    @property
    def n_layers(self):
        """Layers that a block holds rows for."""
        return self.ptr.n_layers

    @property
    def kv_dim(self):
        """Values of K (or V) in one row: ``n_kv_heads * head_dim``."""
        return self.ptr.kv_dim

    @property
    def block_size(self):
        """Tokens in a block."""
        return self.ptr.block_size

    cdef void try_reap(self) noexcept:
        # Never waits: reading needs no lock but the interpreter's, and the collector may have come here from inside
        # a call that holds this one.
        try:
            if self.orphans is not NULL and self._lock.acquire(False):
                self.exit()
        except (MemoryError, AttributeError):
            # The next call reaps. At the interpreter's end the lock may have lost its methods, and there is no next call.
            pass

    @property
    def n_free(self):
        """Blocks that nobody owns."""
        self.try_reap()
        return self.ptr.n_free

    @property
    def n_saved(self):
        """Blocks that sharing saves now: owners beyond the first, over all blocks."""
        cdef int64_t n = 0, i
        self.try_reap()
        for i in range(self.ptr.n_blocks):
            n += max(0, self.ptr.ref_count[i] - 1)
        return n

    def ref_count(self, int64_t block_id):
        """Owners of a block; 0 where it is free."""
        if block_id < 0 or block_id >= self.ptr.n_blocks:
            raise error(f"block {block_id} is outside [0, {self.ptr.n_blocks})", (PkvStatus.PKV_ERR_BOUNDS,))
        self.try_reap()
        return self.ptr.ref_count[block_id]

    @property
    def ref_counts(self):
        """Owners of every block; an int32 copy ``[n_blocks]``."""
        cdef cnp.ndarray counts = np.empty(self.ptr.n_blocks, np.int32)
        self.try_reap()
        memcpy(cnp.PyArray_DATA(counts), self.ptr.ref_count, self.ptr.n_blocks * sizeof(int32_t))
        return counts

    @property
    def dtype(self):
        """Type of the stored rows: ``"float32"``, ``"float16"``, ``"bfloat16"`` or ``"q8_0"``."""
        return next(name for name, kv_dtype in KV_DTYPES.items() if kv_dtype == self.ptr.dtype)

    @property
    def nbytes(self):
        """Bytes of K and V together; the system gives a block's when it is first written."""
        cdef int64_t n_rows = self.ptr.n_blocks * self.ptr.n_layers * self.ptr.block_size
        return 2 * n_rows * pkv_kv_row_nbytes(self.ptr.dtype, self.ptr.kv_dim)

    cdef view(self, unsigned char *data, bint scales):
        """The values of K or V, or their scales, out of layers of blocks that hold first the one, then the other."""
        cdef int64_t kv_dim = self.ptr.kv_dim, width = pkv_kv_value_nbytes(self.ptr.dtype)
        cdef int64_t row = kv_dim * width, scales_row = pkv_kv_scales_nbytes(self.ptr.dtype, kv_dim)
        cdef int64_t layer = self.ptr.block_size * (row + scales_row), begin = 0
        cdef cnp.npy_intp n_bytes = self.ptr.n_blocks * self.ptr.n_layers * layer
        dtype = np.dtype(KV_VIEWS[self.ptr.dtype])
        if scales:
            begin, row, kv_dim, dtype = self.ptr.block_size * row, scales_row, scales_row // 2, np.dtype(np.float16)
        array = cnp.PyArray_SimpleNewFromData(1, &n_bytes, cnp.NPY_UINT8, data)
        cnp.set_array_base(array, self)
        array.flags.writeable = False
        return np.ndarray((self.ptr.n_blocks, self.ptr.n_layers, self.ptr.block_size, kv_dim), dtype, array, begin,
                          (self.ptr.n_layers * layer, layer, row, dtype.itemsize))

    @property
    def k(self):
        """Read-only view of all keys, ``[n_blocks, n_layers, block_size, kv_dim]``, no copy.

        float32, float16, the bits of bfloat16 as uint16, or the codes of q8_0 as int8."""
        return self.view(self.ptr.k, False)

    @property
    def v(self):
        """Read-only view of all values, as :attr:`k`."""
        return self.view(self.ptr.v, False)

    @property
    def k_scale(self):
        """Read-only view of the scales of a q8_0 pool's keys, ``[n_blocks, n_layers, block_size, kv_dim // 32]``
        float16; None for the other types. A value is its code times its scale."""
        return self.view(self.ptr.k, True) if self.ptr.dtype == PKV_Q8_0 else None

    @property
    def v_scale(self):
        """The scales of the values, as :attr:`k_scale`."""
        return self.view(self.ptr.v, True) if self.ptr.dtype == PKV_Q8_0 else None

    def alloc_block(self):
        """Take a free block and own it once; returns its id."""
        cdef int32_t block_id
        self.enter()
        try:
            status = pkv_alloc_block(self.ptr, &block_id)
            if status == PKV_OK:
                try:
                    return <object>block_id
                except MemoryError:     # no place for the number
                    pkv_unref_block(self.ptr, block_id)
                    raise
        finally:
            self.exit()
        raise error(f"needs 1 block, 0 of {self.ptr.n_blocks} are free", (PkvStatus(status),))

    def ref_block(self, int64_t block_id):
        """Add an owner to a block in use."""
        self.enter()
        status = pkv_ref_block(self.ptr, block_id)
        self.exit()
        if status != PKV_OK:
            raise error(f"block {block_id} of {self.ptr.n_blocks} is not in use", (PkvStatus(status),))

    def unref_block(self, int64_t block_id):
        """Take an owner from a block in use; without owners it is free again."""
        self.enter()
        status = pkv_unref_block(self.ptr, block_id)
        self.exit()
        if status != PKV_OK:
            raise error(f"block {block_id} of {self.ptr.n_blocks} is not in use", (PkvStatus(status),))


# ---------------------------------------------------------------------------------------------------
# Sequence

cdef int check_head_dim(const pkv_pool *pool, int64_t head_dim, tuple chain) except -1:
    """Scales belong to one head: its values are whole groups of them."""
    if head_dim % pkv_kv_group(pool.dtype):
        raise error(f"q8_0 has a scale for each {pkv_kv_group(pool.dtype)} values, which do not divide head_dim "
                    f"{head_dim}", chain)
    return 0


cdef const float *rows_f32(cnp.ndarray a, str name, int64_t n, int64_t width, tuple chain) except? NULL:
    """Pointer to a C-contiguous float32 [n, width] array, or the error that names what differs.

    ``n < 0`` leaves the number of rows open."""
    if a.dtype != np.float32:
        raise TypeError(f"{name} must be float32, not {a.dtype}")
    if a.ndim != 2 or a.shape[1] != width or (n >= 0 and a.shape[0] != n):
        want = f"[{n if n >= 0 else 'n'}, {width}]"
        raise error(f"{name} has shape {list((<object>a).shape)}, needs {want}", chain)
    return <const float *>cnp.PyArray_DATA(a)


cdef append_error(pkv_status status, const pkv_seq *seq, int64_t n, int64_t needed, str who, tuple outer):
    """Why rows could not be reserved. who: "" or the sequence's place in a batch; outer: the chain in front."""
    if status == PKV_ERR_EXHAUST:
        message = f"needs {needed} blocks, {seq.pool.n_free} of {seq.pool.n_blocks} are free"
    elif status == PKV_ERR_BOUNDS:
        message = (f"{who}{seq.seq_len} + {n} tokens do not fit a table of {seq.max_blocks} blocks of "
                   f"{seq.pool.block_size}")
    else:
        message = f"{who}the number of tokens must be positive, not {n}"
    return error(message, outer + (PkvStatus(status),))


cdef write_error(pkv_status status, const pkv_seq *seq, int64_t n):
    """Why rows could not be written or counted."""
    if status == PKV_ERR_BAD_DIM:
        return error(f"the number of rows must be positive, not {n}", (PkvStatus(status),))
    return error(f"rows [{seq.seq_len}, {seq.seq_len + n}) are not all reserved in blocks of this sequence alone "
                 f"({seq.n_blocks} blocks of {seq.pool.block_size}): call ensure_append first", (PkvStatus(status),))


cdef pkv_status append_rows(pkv_seq *seq, int64_t layer, const float *k, const float *v, int64_t n) noexcept nogil:
    """pkv_append_layer, rounding as the floating-point environment of the kernels does."""
    cdef uint64_t saved = pkv_fpenv_enter()
    cdef pkv_status status = pkv_append_layer(seq, layer, k, v, n)
    pkv_fpenv_leave(saved)
    return status


@cython.no_gc_clear
cdef class SequenceCore:
    """A block table over a pool. Subclassed by :class:`pagedkv.Sequence`."""

    def __dealloc__(self):
        if self.ptr is NULL:
            return
        self.pool.leave(self.ptr)
        self.pool.try_reap()

    def __reduce__(self):
        raise TypeError("a Sequence cannot be pickled or copied: its rows are memory of this process; fork() shares "
                        "them here, save() and load() carry them to another process")

    def _open(self, PoolCore pool not None, int64_t max_tokens):
        if self.pool is not None:
            raise RuntimeError("a sequence is opened once")
        status = pkv_seq_new(pool.ptr, max_tokens, &self.ptr)
        if status == PKV_ERR_NULL:
            raise MemoryError(f"no memory for the table of {max_tokens} tokens")
        if status != PKV_OK:
            raise error(f"max_tokens must not be negative, not {max_tokens}", (PkvStatus(status),))
        self.pool = pool

    def _adopt(self, const int32_t[::1] block_ids):
        """Start with full blocks that others own already; each gets one owner more."""
        cdef int64_t n = block_ids.shape[0]
        cdef pkv_seq *seq
        seq = self.enter()
        try:
            status = pkv_seq_adopt(seq, &block_ids[0] if n else NULL, n)
            if status == PKV_ERR_BAD_DIM:
                raise error("the sequence has blocks already, or a block is named twice", (PkvStatus(status),))
            if status != PKV_OK:
                raise error(f"{n} blocks do not fit a table of {seq.max_blocks}, or one of them is not in use",
                            (PkvStatus(status),))
        finally:
            self.pool.exit()

    def _fork_to(self, SequenceCore child not None):
        if child.pool is not None:
            raise RuntimeError("a sequence is opened once")
        cdef pkv_status status
        cdef pkv_seq *seq = self.enter()
        try:
            status = pkv_seq_fork(seq, &child.ptr)
            if status == PKV_ERR_NULL:
                raise MemoryError("no memory for the table of a fork")
            if status != PKV_OK:
                raise error("a block has 2**31 - 1 owners already", (PkvStatus(status),))
            child.pool = self.pool
        finally:
            self.pool.exit()

    cdef pkv_seq *enter(self) except NULL:
        """Take the pool's lock, which whatever reads self.ptr holds; self.pool.exit() gives it back. The caller works
        on what this returns: self.ptr may go at any time, but what it pointed to lives until then."""
        if self.pool is None:
            raise error("the sequence was never opened", (PkvStatus.PKV_ERR_NULL,))
        self.pool.enter()
        if self.ptr is NULL:
            self.pool.exit()
            raise error("the sequence was freed", (PkvStatus.PKV_ERR_NULL,))
        return self.ptr

    def free(self):
        """Give all blocks back. A second call does nothing."""
        if self.ptr is NULL:
            return
        # A finaliser may call this while the collector runs inside a call that holds the lock, in this thread or
        # another: hand the blocks over, and let that call's end give them back rather than wait for it.
        self.pool.leave(self.ptr)
        self.ptr = NULL
        self.pool.try_reap()

    def __len__(self):
        return 0 if self.ptr is NULL else self.ptr.seq_len

    @property
    def block_table(self):
        """Ids of the owned blocks in order, reserved ones too; an int32 copy."""
        cdef int64_t n = 0 if self.ptr is NULL else self.ptr.n_blocks
        cdef cnp.ndarray table = np.empty(n, np.int32)
        if n and self.ptr is not NULL:     # making the array may have run the garbage collector
            memcpy(cnp.PyArray_DATA(table), self.ptr.block_table, min(n, self.ptr.n_blocks) * sizeof(int32_t))
        return table

    def ensure_append(self, int64_t n):
        """Make the next `n` rows writable: own copies of shared blocks, new blocks for the rest."""
        cdef int64_t needed = 0
        cdef pkv_seq *seq
        seq = self.enter()
        try:
            status = pkv_ensure_append(seq, n, &needed)
            if status != PKV_OK:
                raise append_error(status, seq, n, needed, "", ())
        finally:
            self.pool.exit()

    def append_layer(self, int64_t layer, k, v):
        """Write rows ``[len, len + n)`` of one layer. `k`, `v`: float32 ``[n, kv_dim]``, rounded here to the pool's
        type, to nearest with ties to even. Does not advance."""
        cdef cnp.ndarray k_rows = np.ascontiguousarray(k), v_rows = np.ascontiguousarray(v)
        cdef tuple chain = (PkvStatus.PKV_ERR_BAD_DIM,)
        cdef const float *k_ptr
        cdef const float *v_ptr
        cdef pkv_seq *seq
        seq = self.enter()
        try:
            k_ptr = rows_f32(k_rows, "k", -1, seq.pool.kv_dim, chain)
            v_ptr = rows_f32(v_rows, "v", k_rows.shape[0], seq.pool.kv_dim, chain)
            if layer < 0 or layer >= seq.pool.n_layers:
                raise error(f"layer {layer} is outside [0, {seq.pool.n_layers})", (PkvStatus.PKV_ERR_BOUNDS,))
            status = append_rows(seq, layer, k_ptr, v_ptr, k_rows.shape[0])
            if status != PKV_OK:
                raise write_error(status, seq, k_rows.shape[0])
        finally:
            self.pool.exit()

    def advance(self, int64_t n):
        """Count `n` appended rows as part of the sequence."""
        cdef pkv_seq *seq
        seq = self.enter()
        try:
            status = pkv_advance(seq, n)
            if status != PKV_OK:
                raise write_error(status, seq, n)
        finally:
            self.pool.exit()

    def truncate(self, int64_t n):
        """Keep the first `n` rows; give back the blocks that held only later ones."""
        cdef pkv_seq *seq
        seq = self.enter()
        try:
            status = pkv_seq_truncate(seq, n)
            if status != PKV_OK:
                raise error(f"length {n} is outside [0, {seq.seq_len}]", (PkvStatus(status),))
        finally:
            self.pool.exit()

    def gather_head(self, int64_t layer, int64_t kv_head, int64_t head_dim, total_k=None):
        """Copies of one KV head's rows: ``(K, V)``, each float32 ``[total_k, head_dim]``: what attention reads."""
        cdef cnp.ndarray k, v
        cdef int64_t n, n_rows
        cdef float *k_ptr
        cdef float *v_ptr
        cdef pkv_seq *seq
        cdef pkv_status status
        seq = self.enter()
        try:
            n = seq.seq_len if total_k is None else total_k
            n_rows = seq.n_blocks * seq.pool.block_size
            if head_dim <= 0 or n < 0:
                raise error(f"head_dim {head_dim} must be positive and total_k {n} not negative",
                            (PkvStatus.PKV_ERR_BAD_DIM,))
            check_head_dim(seq.pool, head_dim, (PkvStatus.PKV_ERR_BAD_DIM,))
            if n > n_rows or head_dim > seq.pool.kv_dim:
                raise error(f"total_k {n} is over the {n_rows} reserved rows, or head_dim {head_dim} over kv_dim "
                            f"{seq.pool.kv_dim}", (PkvStatus.PKV_ERR_BOUNDS,))
            k, v = np.empty((n, head_dim), np.float32), np.empty((n, head_dim), np.float32)
            k_ptr, v_ptr = <float *>cnp.PyArray_DATA(k), <float *>cnp.PyArray_DATA(v)
            with nogil:
                status = pkv_gather_head(seq, layer, kv_head, head_dim, n, k_ptr, v_ptr)
            if status != PKV_OK:
                raise error(f"layer {layer} or head {kv_head} of {head_dim} is outside {seq.pool.n_layers} "
                            f"layers of {seq.pool.kv_dim}", (PkvStatus(status),))
        finally:
            self.pool.exit()
        return k, v

    def export(self, int64_t head_dim):
        """All rows as one array, whatever the pool's type and blocks; a copy.

        Returns
        -------
        numpy.ndarray
            float32 ``[n_layers, 2, n_kv_heads, len, head_dim]``, C-contiguous: K, then V, of each layer. ``n_kv_heads``
            is ``kv_dim // head_dim``. :meth:`import_` is the way back.

        Raises
        ------
        BadDimError
            `head_dim` does not divide the pool's kv_dim, or the groups of q8_0 do not divide it.
        """
        cdef cnp.ndarray out
        cdef float *k
        cdef int64_t n_heads, layer, head, head_floats
        cdef pkv_seq *seq
        seq = self.enter()
        try:
            if head_dim <= 0 or seq.pool.kv_dim % head_dim:
                raise error(f"head_dim {head_dim} does not divide the pool's kv_dim {seq.pool.kv_dim}",
                            (PkvStatus.PKV_ERR_BAD_DIM,))
            check_head_dim(seq.pool, head_dim, (PkvStatus.PKV_ERR_BAD_DIM,))
            n_heads, head_floats = seq.pool.kv_dim // head_dim, seq.seq_len * head_dim
            out = np.empty((seq.pool.n_layers, 2, n_heads, seq.seq_len, head_dim), np.float32)
            k = <float *>cnp.PyArray_DATA(out)
            with nogil:
                for layer in range(seq.pool.n_layers):
                    for head in range(n_heads):
                        pkv_gather_head(seq, layer, head, head_dim, seq.seq_len, k, k + n_heads * head_floats)
                        k += head_floats
                    k += n_heads * head_floats
        finally:
            self.pool.exit()
        return out

    cdef copy_stored(self, str part, int64_t layer, int64_t begin, const unsigned char[:, ::1] rows, bint put):
        cdef pkv_part kind = KV_PARTS[part]
        cdef int64_t n = rows.shape[0]
        cdef pkv_seq *seq
        cdef pkv_status status
        seq = self.enter()
        try:
            if rows.shape[1] != pkv_part_nbytes(seq.pool, kind):
                raise error(f"a row of {part} is {pkv_part_nbytes(seq.pool, kind)} bytes, not {rows.shape[1]}",
                            (PkvStatus.PKV_ERR_BAD_DIM,))
            if n == 0 or rows.shape[1] == 0:
                return
            with nogil:
                status = pkv_copy_stored(seq, kind, layer, begin, n, <unsigned char *>&rows[0, 0], put)
            if status != PKV_OK:
                raise error(f"rows [{begin}, {begin + n}) of layer {layer} are not there: {seq.seq_len} rows in "
                            f"{seq.n_blocks} blocks of {seq.pool.block_size}, {seq.pool.n_layers} layers",
                            (PkvStatus(status),))
        finally:
            self.pool.exit()

    def _take_rows(self, str part, int64_t layer, int64_t begin, unsigned char[:, ::1] rows):
        """Copy rows from `begin` on of "k", "v", "k_scale" or "v_scale" into `rows`, the bytes as they are stored."""
        self.copy_stored(part, layer, begin, rows, False)

    def _put_rows(self, str part, int64_t layer, int64_t begin, const unsigned char[:, ::1] rows):
        """The way back, into rows that are reserved and not yet counted."""
        self.copy_stored(part, layer, begin, rows, True)

    def _held(self):
        """Length, and the ids of the blocks that hold rows (int32), both of one moment."""
        cdef cnp.ndarray blocks
        cdef int64_t n
        cdef pkv_seq *seq
        seq = self.enter()
        try:
            n = pkv_blocks_for(seq.seq_len, seq.pool.block_size)
            blocks = np.empty(n, np.int32)
            if n:
                memcpy(cnp.PyArray_DATA(blocks), seq.block_table, n * sizeof(int32_t))
            return seq.seq_len, blocks
        finally:
            self.pool.exit()


def blocks_needed(list seqs, list n_new):
    """Blocks of their one pool that so many more rows of each sequence take together; changes nothing.

    Counts the private twins of shared tails as the step would make them."""
    cdef int64_t n = len(seqs), failed = 0, needed = 0, i
    cdef SequenceCore seq
    if n == 0:
        return 0
    cdef cnp.ndarray ptrs = np.empty(n, np.uintp)
    cdef int64_t[::1] counts = np.array(n_new, np.int64)
    seq = seqs[0]
    cdef PoolCore pool = seq.pool
    if pool is None:
        raise error("the sequence was never opened", (PkvStatus.PKV_ERR_NULL,))
    pool.enter()
    try:
        for i in range(n):
            seq = seqs[i]
            if seq.pool is not pool or seq.ptr is NULL or counts[i] <= 0:
                raise error(f"sequence {i} was freed or is of another pool, or brings no row",
                            (PkvStatus.PKV_ERR_NULL,))
            (<pkv_seq **>cnp.PyArray_DATA(ptrs))[i] = seq.ptr
        status = pkv_check_append_batch(<pkv_seq **>cnp.PyArray_DATA(ptrs), &counts[0], n, &failed, &needed)
        if status != PKV_OK and status != PKV_ERR_EXHAUST:
            seq = seqs[failed]
            raise append_error(status, seq.ptr, counts[failed], needed, f"sequence {failed} of the batch: ", ())
        return pool.ptr.n_planned
    finally:
        pool.exit()


# ---------------------------------------------------------------------------------------------------
# Operations on arrays. pagedkv/ops.py hands over C-contiguous float32.

CHUNK, PANEL, STEP_ROWS = PKV_CHUNK, PKV_PANEL, PKV_STEP_ROWS

# Types of weights by the names that pagedkv.formats gives them.
DTYPES = {"f32": PKV_F32, "f16": PKV_F16, "bf16": PKV_BF16, "q8_0": PKV_Q8_0, "q4_0": PKV_Q4_0, "q4_1": PKV_Q4_1,
          "q5_0": PKV_Q5_0, "q5_1": PKV_Q5_1, "q4_k": PKV_Q4_K, "q5_k": PKV_Q5_K, "q6_k": PKV_Q6_K}


def packed_nbytes(int dtype, int64_t n, int64_t k):
    """Bytes of the panels of a matrix [n, k]."""
    cdef int64_t size = pkv_panels_for(n)
    if n <= 0 or k <= 0 or dtype < 0 or dtype >= PKV_N_DTYPES or k % pkv_form_of(dtype).unit:
        raise error(f"a weight [{n}, {k}] needs positive dimensions, and k a multiple of its type's block",
                    (PkvStatus.PKV_ERR_BAD_DIM,))
    if k > 1 << 40 or not pkv_mul_size(size, pkv_panel_nbytes(dtype, k), &size):
        raise MemoryError(f"a weight of [{n}, {k}] does not fit one address space")
    return size


cdef class Arena:
    """One block of memory for many packed weights, one after the other in their order of use.

    Apart, most would be too small for huge pages, and the fetching ahead would end with each."""

    def __cinit__(self, size_t n_bytes):
        self.n_bytes = n_bytes
        self.block = <unsigned char *>pkv_mem_alloc(n_bytes)
        if self.block is NULL:
            raise MemoryError(f"no memory for {n_bytes} bytes of weights")

    def __dealloc__(self):
        pkv_mem_free(self.block, self.n_bytes)


cdef class PackedWeight:
    """A matrix ``[n, k]`` in the kernels' panels, made by :func:`pagedkv.pack`."""

    def __cinit__(self, int64_t n, int64_t k, list dtypes, Arena arena=None):
        """dtypes: type of each panel of 32 rows."""
        cdef int64_t i
        if n <= 0 or len(dtypes) != pkv_panels_for(n):
            raise error(f"{len(dtypes)} panel types for {n} rows", (PkvStatus.PKV_ERR_BAD_DIM,))
        for dtype in dtypes:
            self.n_bytes += packed_nbytes(dtype, PKV_PANEL, k)
        self.arena = Arena(self.n_bytes) if arena is None else arena
        if self.n_bytes > self.arena.n_bytes - self.arena.n_used:
            raise error(f"the arena has no place for a weight of [{n}, {k}]", (PkvStatus.PKV_ERR_BAD_DIM,))
        self.panels = <pkv_panel *>new_array(len(dtypes), sizeof(pkv_panel))
        for i in range(len(dtypes)):
            self.panels[i].dtype = dtypes[i]
            self.panels[i].data = self.arena.block + self.arena.n_used
            self.arena.n_used += pkv_panel_nbytes(dtypes[i], k)
        self.n, self.k = n, k

    def __dealloc__(self):
        free(self.panels)

    def __reduce__(self):
        raise TypeError("a PackedWeight cannot be pickled or copied: pickle the array and pack it anew")

    @property
    def shape(self):
        """``(n, k)``."""
        return self.n, self.k

    @property
    def nbytes(self):
        """Bytes in memory."""
        return self.n_bytes

    cdef pkv_weight view(self):
        cdef pkv_weight w
        w.panels, w.n, w.k = self.panels, self.n, self.k
        return w

    def _fill(self, const unsigned char[::1] raw, int64_t n, const int64_t[::1] row_order=None, int64_t first=0,
              int64_t step=1):
        """Pack n stored rows, all of one type, into every `step`-th panel from the `first`.

        raw: the rows as a file has them, one after the other; row i is stored row row_order[i]."""
        cdef int64_t n_mine = pkv_panels_for(self.n), n_panels, i, n_stored, row_nbytes
        cdef int n_threads = team()
        cdef pkv_form form
        cdef const int64_t *order = NULL
        # Each bounded by itself first, so that the product stays in 64 bits.
        if (n <= 0 or n > n_mine * PKV_PANEL or first < 0 or first >= n_mine or step <= 0 or step > n_mine
                or first + step * (pkv_panels_for(n) - 1) >= n_mine):
            raise error(f"{n} rows from panel {first} in steps of {step} do not fit a packed [{self.n}, {self.k}]",
                        (PkvStatus.PKV_ERR_BAD_DIM,))
        n_panels = pkv_panels_for(n)
        for i in range(n_panels):
            if self.panels[first + step * i].dtype != self.panels[first].dtype:
                raise error(f"panels {first} and {first + step * i} are of different types",
                            (PkvStatus.PKV_ERR_BAD_DIM,))
        form = pkv_form_of(self.panels[first].dtype)
        row_nbytes = self.k // form.unit * form.block_nbytes
        n_stored = raw.shape[0] // row_nbytes
        if row_order is not None:
            order = &row_order[0]
            if row_order.shape[0] != n or np.min(row_order) < 0 or np.max(row_order) >= n_stored:
                raise error("the order of rows leaves the stored ones", (PkvStatus.PKV_ERR_BAD_DIM,))
        if raw.shape[0] != n_stored * row_nbytes or n_stored < n:
            raise error(f"{raw.shape[0]} bytes are not {n} rows of {row_nbytes}", (PkvStatus.PKV_ERR_BAD_DIM,))
        for i in prange(n_panels, nogil=True, num_threads=n_threads, schedule="dynamic"):
            fill_panel(&self.panels[first + step * i], &raw[0], row_nbytes, order, 32 * i, n, self.k)

    def _expand(self):
        """The float32 values that the panels stand for, [n, k]; a copy."""
        cdef int64_t n_panels = pkv_panels_for(self.n), i
        cdef float[:, :, ::1] out = np.empty((n_panels, self.k, PKV_PANEL), np.float32)
        for i in range(n_panels):
            KERNELS.expand(self.panels[i].dtype, <const unsigned char *>self.panels[i].data, 0, self.k, &out[i, 0, 0])
        return np.asarray(out).transpose(0, 2, 1).reshape(-1, self.k)[:self.n]


cdef void fill_panel(const pkv_panel *panel, const unsigned char *raw, int64_t row_nbytes, const int64_t *order,
                     int64_t row, int64_t n, int64_t k) noexcept nogil:
    """One panel from stored rows [row, row + 32), fewer at the end."""
    cdef const unsigned char *rows[32]
    cdef int64_t i
    for i in range(PKV_PANEL):
        rows[i] = NULL
        if row + i < n:
            rows[i] = raw + (order[row + i] if order is not NULL else row + i) * row_nbytes
    pkv_pack_panel(panel.dtype, rows, k, <unsigned char *>panel.data)


def matmul(const float[:, ::1] x, PackedWeight w not None, float[:, ::1] out, bint int8=False):
    """out [m, n] = x [m, k] times the transpose of w; with int8 its quantised panels meet x in codes."""
    cdef pkv_weight weight = w.view()
    cdef int64_t m = x.shape[0]
    cdef int n_threads = team()
    if x.shape[1] != w.k or out.shape[0] != m or out.shape[1] != w.n:
        raise error(f"x [{m}, {x.shape[1]}] does not go with w [{w.n}, {w.k}]", (PkvStatus.PKV_ERR_BAD_DIM,))
    if m == 0:
        return
    cdef int64_t row_groups = w.k // PKV_INT8_GROUP if int8 and w.k % PKV_INT8_GROUP == 0 else 0
    cdef int64_t n_code_floats = m * row_groups * <int64_t>(sizeof(pkv_int8_group) // sizeof(float))
    cdef Scratch scratch = Scratch(PKV_MATMUL_SCRATCH * n_threads + n_code_floats)
    cdef pkv_int8_group *codes = <pkv_int8_group *>(scratch.block + PKV_MATMUL_SCRATCH * n_threads)
    with nogil:
        pkv_team_matmul(KERNELS, &x[0, 0], codes if row_groups else NULL, m, &weight, &out[0, 0], scratch.block, n_threads)


ctypedef enum row_op:
    ROW_EXP, ROW_SOFTMAX, ROW_RMSNORM, ROW_SWIGLU


cdef void run_row(row_op op, const float *x, const float *other, float eps, float *y, int64_t n) noexcept nogil:
    if op == ROW_EXP:
        KERNELS.exp_row(x, y, n)
    elif op == ROW_SOFTMAX:
        KERNELS.softmax(x, y, n)
    elif op == ROW_RMSNORM:
        KERNELS.rmsnorm(x, other, eps, y, n)
    else:
        KERNELS.swiglu(x, other, y, n)


cdef void run_rows(row_op op, const float *x, const float *other, int64_t other_stride, float eps, float *y,
                   int64_t m, int64_t n, int n_threads) noexcept nogil:
    cdef int64_t i
    cdef uint64_t saved
    with parallel(num_threads=n_threads):
        saved = pkv_fpenv_enter()
        for i in prange(m, schedule="static"):
            run_row(op, x + i * n, other + i * other_stride, eps, y + i * n, n)
        pkv_fpenv_leave(saved)


cdef array_op(row_op op, const float[:, ::1] x, const float[:, ::1] other, int64_t other_stride, float eps,
              float[:, ::1] out):
    cdef int64_t m = x.shape[0], n = x.shape[1]
    cdef int n_threads = team() if m > 1 else 1
    if m and n:
        with nogil:
            run_rows(op, &x[0, 0], &other[0, 0], other_stride, eps, &out[0, 0], m, n, n_threads)


def exp(const float[:, ::1] x, float[:, ::1] out):
    array_op(ROW_EXP, x, x, 0, 0.0, out)


def softmax(const float[:, ::1] x, float[:, ::1] out):
    array_op(ROW_SOFTMAX, x, x, 0, 0.0, out)


def rmsnorm(const float[:, ::1] x, const float[:, ::1] gamma, float eps, float[:, ::1] out):
    array_op(ROW_RMSNORM, x, gamma, 0, eps, out)


def swiglu(const float[:, ::1] gate, const float[:, ::1] up, float[:, ::1] out):
    array_op(ROW_SWIGLU, gate, up, gate.shape[1], 0.0, out)


def dot(const float[::1] a, const float[::1] b):
    if a.shape[0] != b.shape[0]:
        raise error(f"{a.shape[0]} and {b.shape[0]} elements", (PkvStatus.PKV_ERR_BAD_DIM,))
    if a.shape[0] == 0:
        return 0.0
    cdef uint64_t saved = pkv_fpenv_enter()
    cdef float y = KERNELS.dot(&a[0], &b[0], a.shape[0])
    pkv_fpenv_leave(saved)
    return y


def rope(float[:, :, ::1] x, const int64_t[::1] positions, const double[::1] inv_freq):
    """Rotate x [n, n_heads, head_dim] in place; head h of row i by positions[i]."""
    cdef int64_t half = inv_freq.shape[0], i, h
    cdef float[::1] cos = np.empty(half, np.float32), sin = np.empty(half, np.float32)
    cdef uint64_t saved = pkv_fpenv_enter()
    for i in range(x.shape[0]):
        pkv_rope_table(positions[i], &inv_freq[0], half, &cos[0], &sin[0])
        for h in range(x.shape[1]):
            KERNELS.rope(&x[i, h, 0], &cos[0], &sin[0], half)
    pkv_fpenv_leave(saved)


def kv_cache_append(const unsigned char[:, :, ::1] prior, const unsigned char[:, :, ::1] chunk,
                    unsigned char[:, :, ::1] out, int64_t token_nbytes, int64_t offset):
    """Copy of prior with chunk at token `offset`; all as bytes, [rows, tokens, token_nbytes]."""
    cdef int64_t n_rows = prior.shape[0], n_bytes = prior.shape[1] * token_nbytes
    cdef int64_t chunk_nbytes = chunk.shape[1] * token_nbytes, begin = offset * token_nbytes, i
    cdef int64_t end = begin + chunk_nbytes
    cdef int n_threads = team()
    cdef const unsigned char *from_prior
    for i in prange(n_rows, nogil=True, num_threads=n_threads, schedule="static"):
        from_prior = &prior[0, 0, 0] + i * n_bytes
        memcpy(&out[0, 0, 0] + i * n_bytes, from_prior, begin)
        memcpy(&out[0, 0, 0] + i * n_bytes + begin, &chunk[0, 0, 0] + i * chunk_nbytes, chunk_nbytes)
        memcpy(&out[0, 0, 0] + i * n_bytes + end, from_prior + end, n_bytes - end)


# ---------------------------------------------------------------------------------------------------
# Attention

cdef void *new_array(int64_t n, size_t width) except NULL:
    """Zeroed memory for n elements; freed with free()."""
    cdef void *p = calloc(n if n > 0 else 1, width)
    if p is NULL:
        raise MemoryError(f"no memory for {n} elements of {width} bytes")
    return p


# Far beyond any model, and no product of two of these and an array's length leaves 64 bits.
cdef int64_t MOST_HEADS = 1 << 20


cdef tuple attention_shape(pkv_attn_shape *shape, int64_t n_tokens, int64_t n_heads, int64_t n_kv_heads,
                           int64_t head_dim, scale, window):
    """Fill shape; the seed's checks in its order, None or (message, status). window: an int, or None for none."""
    if n_tokens <= 0 or n_heads <= 0 or n_kv_heads <= 0 or head_dim <= 0:
        return (f"n_tokens {n_tokens}, n_heads {n_heads}, n_kv_heads {n_kv_heads} and head_dim {head_dim} "
                "must be positive", ApStatus.AP_ERR_BAD_DIM)
    if n_heads % n_kv_heads:
        return (f"n_heads {n_heads} is not a multiple of n_kv_heads {n_kv_heads}", ApStatus.AP_ERR_BAD_GQA)
    if n_heads > MOST_HEADS or head_dim > MOST_HEADS:
        return (f"n_heads {n_heads} and head_dim {head_dim} must be at most {MOST_HEADS}", ApStatus.AP_ERR_BAD_DIM)
    shape.n_heads, shape.n_kv_heads, shape.head_dim = n_heads, n_kv_heads, head_dim
    shape.scale = 1.0 / sqrt(<double>head_dim) if scale is None else scale
    shape.window = 0 if window is None else operator.index(window)
    if window is not None and shape.window <= 0:
        return (f"a window holds at least the row's own position, not {window}", ApStatus.AP_ERR_BAD_DIM)
    return None


cdef int need_causal(bint causal, window) except -1:
    if window is not None and not causal:
        raise error(f"a window of {window} ends at a row's own position, so causal must be true",
                    (ApStatus.AP_ERR_BAD_DIM,))
    return 0


cdef int make_plan(pkv_attn_plan *plan, const pkv_attn_shape *shape, const pkv_attn_segment *segments,
                   int64_t n_segments, int n_threads) except -1:
    if not pkv_attn_make_plan(plan, shape, segments, n_segments, n_threads):
        raise MemoryError(f"no memory for the plan of {n_segments} sequences' attention")
    return 0


cdef class Attend:
    """One segment's attention: planned and allocated first, so that run cannot fail."""
    cdef pkv_attn_shape shape
    cdef pkv_attn_segment segment
    cdef pkv_attn_plan cut
    cdef float *partials
    cdef float *scratch
    cdef int64_t scratch_len
    cdef int n_threads

    def __dealloc__(self):
        pkv_attn_free_plan(&self.cut)
        free(self.partials)
        free(self.scratch)

    cdef int plan(self) except -1:
        self.n_threads = team()
        self.scratch_len = pkv_attn_scratch_len(&self.shape)
        make_plan(&self.cut, &self.shape, &self.segment, 1, self.n_threads)
        self.partials = <float *>new_array(self.cut.partials_len, sizeof(float))
        self.scratch = <float *>new_array(self.scratch_len * self.n_threads, sizeof(float))
        return 0

    cdef void run(self, int64_t layer, const float *q, float *out):
        cdef pkv_attn_shape *shape = &self.shape
        cdef pkv_attn_plan *cut = &self.cut
        cdef float *partials = self.partials
        cdef float *scratch = self.scratch
        cdef int64_t ld = shape.n_heads * shape.head_dim, scratch_len = self.scratch_len
        cdef int n_threads = self.n_threads
        with nogil:
            pkv_team_attention(KERNELS, shape, cut, layer, q, out, ld, partials, scratch, scratch_len, n_threads)


cdef pkv_attn_segment paged_segment(const pkv_seq *seq, int64_t row, int64_t n_rows, int64_t visible,
                                    bint causal) noexcept nogil:
    """Rows of a paged sequence; the first of them sees `visible` positions."""
    cdef pkv_attn_segment segment
    cdef const pkv_pool *pool = seq.pool
    segment.kv.k, segment.kv.v, segment.kv.block_table = pool.k, pool.v, seq.block_table
    segment.kv.layer_stride = pool.block_size * pkv_kv_row_nbytes(pool.dtype, pool.kv_dim)
    segment.kv.block_stride = pool.n_layers * segment.kv.layer_stride
    segment.kv.kv_dim, segment.kv.block_size, segment.kv.dtype = pool.kv_dim, pool.block_size, pool.dtype
    segment.row, segment.n_rows, segment.visible, segment.visible_step = row, n_rows, visible, causal
    return segment


def attn_with_paged(q, k_new, v_new, SequenceCore seq, int64_t layer, int64_t n_heads, int64_t n_kv_heads,
                    int64_t head_dim, bint causal, scale, window):
    """Append k_new and v_new to one layer, then attend; the caller has reserved the rows."""
    cdef cnp.ndarray q_rows = np.ascontiguousarray(q), k_rows = np.ascontiguousarray(k_new)
    cdef cnp.ndarray v_rows = np.ascontiguousarray(v_new)
    cdef int64_t n = q_rows.shape[0] if q_rows.ndim else 0
    cdef Attend work = Attend()
    cdef pkv_seq *ptr
    bad = attention_shape(&work.shape, n, n_heads, n_kv_heads, head_dim, scale, window)
    if bad is not None:
        raise error(bad[0], (bad[1],))
    need_causal(causal, window)
    cdef int64_t kv_dim = n_kv_heads * head_dim
    cdef tuple chain = (ApStatus.AP_ERR_BAD_DIM,)
    cdef const float *q_ptr = rows_f32(q_rows, "q", n, n_heads * head_dim, chain)
    cdef const float *k_ptr = rows_f32(k_rows, "k_new", n, kv_dim, chain)
    cdef const float *v_ptr = rows_f32(v_rows, "v_new", n, kv_dim, chain)
    cdef cnp.ndarray out = np.empty((n, n_heads * head_dim), np.float32)
    if seq is None or seq.pool is None:
        raise error("the sequence is missing", (ApStatus.AP_ERR_SEQ, PkvStatus.PKV_ERR_NULL))
    seq.pool.enter()
    try:
        try:
            if seq.ptr is NULL:
                raise error("the sequence was freed", (PkvStatus.PKV_ERR_NULL,))
            ptr = seq.ptr
            if kv_dim != ptr.pool.kv_dim:
                raise error(f"n_kv_heads {n_kv_heads} * head_dim {head_dim} is not the pool's kv_dim "
                            f"{ptr.pool.kv_dim}", (PkvStatus.PKV_ERR_BAD_DIM,))
            check_head_dim(ptr.pool, head_dim, (PkvStatus.PKV_ERR_BAD_DIM,))
            if layer < 0 or layer >= ptr.pool.n_layers:
                raise error(f"layer {layer} is outside [0, {ptr.pool.n_layers})", (PkvStatus.PKV_ERR_BOUNDS,))
            work.segment = paged_segment(ptr, 0, n, ptr.seq_len + (1 if causal else n), causal)
            work.plan()
            status = append_rows(ptr, layer, k_ptr, v_ptr, n)
            if status != PKV_OK:
                raise write_error(status, ptr, n)
        except errors.PagedKVError as cause:
            raise error(cause.message, (ApStatus.AP_ERR_SEQ,) + cause.chain) from None
        work.run(layer, q_ptr, <float *>cnp.PyArray_DATA(out))
    finally:
        seq.pool.exit()
    return out


def attention(q, k, v, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, bint causal, scale, window):
    """The contiguous twin of attn_with_paged: k, v are [total_k, kv_dim]."""
    cdef cnp.ndarray q_rows = np.ascontiguousarray(q), k_rows = np.ascontiguousarray(k)
    cdef cnp.ndarray v_rows = np.ascontiguousarray(v)
    cdef int64_t n = q_rows.shape[0] if q_rows.ndim else 0, total_k = k_rows.shape[0] if k_rows.ndim else 0
    cdef Attend work = Attend()
    bad = attention_shape(&work.shape, n, n_heads, n_kv_heads, head_dim, scale, window)
    if bad is not None:
        raise error(bad[0], (bad[1],))
    need_causal(causal, window)
    cdef int64_t kv_dim = n_kv_heads * head_dim
    cdef tuple chain = (ApStatus.AP_ERR_BAD_DIM,)
    cdef const float *q_ptr = rows_f32(q_rows, "q", n, n_heads * head_dim, chain)
    if total_k <= 0 or (causal and total_k < n):
        raise error(f"{n} query rows need at least {n if causal else 1} keys, not {total_k}", chain)
    cdef pkv_attn_segment *segment = &work.segment
    segment.kv.k = <const unsigned char *>rows_f32(k_rows, "k", total_k, kv_dim, chain)
    segment.kv.v = <const unsigned char *>rows_f32(v_rows, "v", total_k, kv_dim, chain)
    segment.kv.block_table = NULL
    segment.kv.block_size, segment.kv.kv_dim, segment.kv.dtype = PKV_CHUNK, kv_dim, PKV_F32
    segment.kv.block_stride, segment.kv.layer_stride = PKV_CHUNK * kv_dim * sizeof(float), 0
    segment.row, segment.n_rows, segment.visible_step = 0, n, causal
    segment.visible = total_k - n + 1 if causal else total_k
    cdef cnp.ndarray out = np.empty((n, n_heads * head_dim), np.float32)
    work.plan()
    work.run(0, q_ptr, <float *>cnp.PyArray_DATA(out))
    return out


# ---------------------------------------------------------------------------------------------------
# Model: the weights, and one step of any rows of any sequences

cdef class Scratch:
    """A block of floats that a step lays its buffers out in."""

    def __cinit__(self, int64_t n_floats):
        self.n_bytes = n_floats * sizeof(float)
        self.block = <float *>pkv_mem_alloc(self.n_bytes)
        if self.block is NULL:
            raise MemoryError(f"no memory for {self.n_bytes} bytes of a step's scratch")

    def __dealloc__(self):
        pkv_mem_free(self.block, self.n_bytes)


cdef class Batch:
    """The rows of one step, flattened, and the plan of its passes. Built before anything is written."""
    cdef int64_t n_seqs, n_rows, n_out, n_passes
    cdef pkv_seq **seqs                # [n_seqs]
    cdef int64_t *n_new                # [n_seqs] rows of each
    cdef int32_t *tokens               # [n_rows]
    cdef int64_t *positions            # [n_rows]
    cdef pkv_seq **row_seqs            # [n_rows]
    cdef int64_t *out_row              # [n_out] row inside its pass
    cdef pkv_attn_segment *segments    # at most n_seqs + n_passes, pass by pass
    cdef pkv_step *steps               # [n_passes]
    cdef int64_t *n_blocks             # [n_seqs] of the tables before the step
    cdef int32_t *tails                # their entries from the block of the first new row on, one after the other
    cdef int64_t partials_len          # the most of any pass

    def __dealloc__(self):
        if self.steps is not NULL:
            for i in range(self.n_passes):
                pkv_attn_free_plan(&self.steps[i].plan)
        free(self.seqs)
        free(self.n_new)
        free(self.tokens)
        free(self.positions)
        free(self.row_seqs)
        free(self.out_row)
        free(self.segments)
        free(self.steps)
        free(self.n_blocks)
        free(self.tails)

    cdef int fill(self, list seqs, list tokens) except -1:
        """Take over checked sequences and token arrays (int64)."""
        cdef int64_t i, j, row = 0
        cdef const int64_t[::1] ids
        self.n_seqs = len(seqs)
        for ids in tokens:
            self.n_rows += ids.shape[0]
        self.seqs = <pkv_seq **>new_array(self.n_seqs, sizeof(pkv_seq *))
        self.n_new = <int64_t *>new_array(self.n_seqs, sizeof(int64_t))
        self.tokens = <int32_t *>new_array(self.n_rows, sizeof(int32_t))
        self.positions = <int64_t *>new_array(self.n_rows, sizeof(int64_t))
        self.row_seqs = <pkv_seq **>new_array(self.n_rows, sizeof(pkv_seq *))
        for i in range(self.n_seqs):
            ids = tokens[i]
            self.seqs[i] = (<SequenceCore>seqs[i]).ptr
            if self.seqs[i] is NULL:       # by a finaliser, since the batch was checked
                raise error(f"sequence {i} of the batch was freed", STACK_CHAIN + (PkvStatus.PKV_ERR_NULL,))
            self.n_new[i] = ids.shape[0]
            for j in range(ids.shape[0]):
                self.tokens[row] = <int32_t>ids[j]
                self.positions[row] = self.seqs[i].seq_len + j
                self.row_seqs[row] = self.seqs[i]
                row += 1
        return 0

    cdef int plan(self, const pkv_model *m, const int64_t[::1] n_logits, int n_threads) except -1:
        """Cut the rows into passes, and each pass's attention into items. n_logits: of the last rows of each
        sequence."""
        cdef int64_t i, begin, end, first, n, row, seq = 0, done = 0, n_segments = 0, first_segment
        cdef pkv_step *s
        self.n_passes = (self.n_rows + PKV_STEP_ROWS - 1) // PKV_STEP_ROWS
        self.steps = <pkv_step *>new_array(self.n_passes, sizeof(pkv_step))
        self.segments = <pkv_attn_segment *>new_array(self.n_seqs + self.n_passes, sizeof(pkv_attn_segment))
        self.out_row = <int64_t *>new_array(self.n_rows, sizeof(int64_t))
        for i in range(self.n_passes):
            s = &self.steps[i]
            begin = i * PKV_STEP_ROWS
            end = min(begin + PKV_STEP_ROWS, self.n_rows)
            s.model, s.kernels, s.n_rows = m, KERNELS, end - begin
            s.tokens, s.positions = self.tokens + begin, self.positions + begin
            s.row_seqs, s.out_row = self.row_seqs + begin, self.out_row + self.n_out
            first = begin
            first_segment = n_segments
            while first < end:               # `done` rows of sequence `seq` went before this one
                n = min(self.n_new[seq] - done, end - first)
                self.segments[n_segments] = paged_segment(self.seqs[seq], first - begin, n,
                                                          self.positions[first] + 1, True)
                n_segments += 1
                for row in range(max(done, self.n_new[seq] - n_logits[seq]), done + n):
                    self.out_row[self.n_out] = first - begin + row - done
                    self.n_out += 1
                    s.n_out += 1
                first += n
                done += n
                if done == self.n_new[seq]:
                    seq += 1
                    done = 0
            make_plan(&s.plan, &m.attn, self.segments + first_segment, n_segments - first_segment, n_threads)
            self.partials_len = max(self.partials_len, s.plan.partials_len)
        return 0

    cdef int note_tables(self) except -1:
        """Keep what undo needs."""
        cdef int64_t i, j, first, n = 0
        for i in range(self.n_seqs):
            n += self.seqs[i].n_blocks - self.seqs[i].seq_len // self.seqs[i].pool.block_size
        self.n_blocks = <int64_t *>new_array(self.n_seqs, sizeof(int64_t))
        self.tails = <int32_t *>new_array(n, sizeof(int32_t))
        n = 0
        for i in range(self.n_seqs):
            self.n_blocks[i] = self.seqs[i].n_blocks
            first = self.seqs[i].seq_len // self.seqs[i].pool.block_size
            for j in range(first, self.n_blocks[i]):
                self.tails[n] = self.seqs[i].block_table[j]
                n += 1
        return 0

    cdef void undo(self) noexcept:
        """Give back what was reserved for the step."""
        cdef int64_t i, n = 0
        for i in range(self.n_seqs):
            n += self.n_blocks[i] - self.seqs[i].seq_len // self.seqs[i].pool.block_size
        for i in range(self.n_seqs - 1, -1, -1):
            n -= self.n_blocks[i] - self.seqs[i].seq_len // self.seqs[i].pool.block_size
            pkv_undo_append(self.seqs[i], self.n_blocks[i], self.tails + n)

    cdef append_error(self, pkv_status status, int64_t failed, int64_t needed):
        return append_error(status, self.seqs[failed], self.n_new[failed], needed,
                            f"sequence {failed} of the batch: ", STACK_CHAIN)


cdef class ModelCore:
    """Dimensions, and pointers into the weights that it keeps alive. Filled by :mod:`pagedkv.model`."""

    def __init__(self, config, const double[::1] inv_freq, list layers, const float[::1] out_norm,
                 PackedWeight embedding not None, PackedWeight head not None, bint int8=False):
        """`layers`: dicts of attn_norm, ffn_norm, qkv_bias, q_norm, k_norm (float32 arrays; None for those that the
        model has not), window (int or None) and qkv, o, gate_up, down (PackedWeight). int8: quantised matrices meet
        quantised activations."""
        if self.layers is not NULL:
            raise RuntimeError("a model is initialised once")
        cdef pkv_model *m = &self.m
        cdef pkv_layer *layer
        cdef const float[::1] array
        m.n_layers, m.hidden_dim, m.ffn_dim = config.n_layers, config.hidden_dim, config.ffn_dim
        m.vocab_size, m.norm_eps, m.rope_half = config.vocab_size, config.norm_eps, inv_freq.shape[0]
        windows = list(map(operator.itemgetter("window"), layers))
        widest = None if None in windows or not windows else max(windows)
        bad = attention_shape(&m.attn, 1, config.n_heads, config.n_kv_heads, config.head_dim, None, widest)
        if bad is not None:
            raise error(bad[0], (bad[1],))
        if 2 * m.rope_half > m.attn.head_dim or m.rope_half == 0:
            raise error(f"{m.rope_half} rotating pairs do not fit head_dim {m.attn.head_dim}",
                        (Flv4Status.FLV4_ERR_BAD_DIM,))
        q_dim = config.n_heads * config.head_dim
        if len(layers) != m.n_layers or m.n_layers <= 0:
            raise error(f"{len(layers)} layers, the configuration says {m.n_layers}", (Flv4Status.FLV4_ERR_BAD_DIM,))
        self.keep = [inv_freq, out_norm, embedding, head, layers]
        self.scratches = []
        self.layers = <pkv_layer *>new_array(m.n_layers, sizeof(pkv_layer))
        m.layers, m.inv_freq, m.int8 = self.layers, &inv_freq[0], int8
        need(out_norm.shape[0] == m.hidden_dim, "output norm")
        need(embedding.shape == (m.vocab_size, m.hidden_dim), "embedding")
        need(head.shape == (m.vocab_size, m.hidden_dim), "head")
        m.out_norm, m.embedding, m.head = &out_norm[0], embedding.view(), head.view()
        for i, given in enumerate(layers):
            layer = &self.layers[i]
            array = given["attn_norm"]
            need(array.shape[0] == m.hidden_dim, f"attention norm of layer {i}")
            layer.attn_norm = &array[0]
            array = given["ffn_norm"]
            need(array.shape[0] == m.hidden_dim, f"feed-forward norm of layer {i}")
            layer.ffn_norm = &array[0]
            if given["qkv_bias"] is not None:
                array = given["qkv_bias"]
                need(array.shape[0] == pkv_qkv_len(m), f"QKV bias of layer {i}")
                layer.qkv_bias = &array[0]
            if given["q_norm"] is not None:
                array = given["q_norm"]
                need(array.shape[0] == m.attn.head_dim, f"norm of Q in layer {i}")
                layer.q_norm = &array[0]
                array = given["k_norm"]
                need(array.shape[0] == m.attn.head_dim, f"norm of K in layer {i}")
                layer.k_norm = &array[0]
            layer.window = 0 if given["window"] is None else given["window"]
            for name, shape in (("qkv", (pkv_qkv_len(m), m.hidden_dim)), ("o", (m.hidden_dim, q_dim)),
                                ("gate_up", (2 * pkv_pad(m.ffn_dim), m.hidden_dim)),
                                ("down", (m.hidden_dim, m.ffn_dim))):
                need(given[name].shape == shape, f"{name} of layer {i}")
            layer.qkv, layer.o = (<PackedWeight?>given["qkv"]).view(), (<PackedWeight?>given["o"]).view()
            layer.gate_up = (<PackedWeight?>given["gate_up"]).view()
            layer.down = (<PackedWeight?>given["down"]).view()

    def __dealloc__(self):
        free(self.layers)

    @property
    def compute(self):
        """``"int8"`` or ``"float32"``."""
        return "int8" if self.m.int8 else "float32"

    @property
    def weight_nbytes(self):
        """Bytes of all packed weights."""
        layers, embedding, head = self.keep[4], self.keep[2], self.keep[3]
        total = 0
        for layer in layers:
            for name in ("qkv", "o", "gate_up", "down"):
                total += layer[name].nbytes
        return total + embedding.nbytes + (0 if head is embedding else head.nbytes)

    cdef int check_batch(self, list seqs, list tokens) except -1:
        """Everything about a batch that does not depend on the pools' free blocks. FLV4 first, as the seed."""
        cdef const int64_t[::1] ids
        cdef int64_t i, j
        cdef pkv_pool *pool
        if not seqs:
            raise error("a step needs at least one sequence", (Flv4Status.FLV4_ERR_BAD_DIM,))
        for i, seq in enumerate(seqs):
            if seq is None:
                raise error(f"sequence {i} of the batch is missing", (Flv4Status.FLV4_ERR_NULL,))
            if not isinstance(seq, SequenceCore):
                raise TypeError(f"sequence {i} of the batch is a {type(seq).__name__}, not a Sequence")
        for i in range(len(tokens)):
            ids = tokens[i]
            if ids.shape[0] == 0:
                raise error(f"sequence {i} of the batch brings no token", (Flv4Status.FLV4_ERR_BAD_DIM,))
            for j in range(ids.shape[0]):
                if ids[j] < 0 or ids[j] >= self.m.vocab_size:
                    raise error(f"token {ids[j]} at place {j} of sequence {i} is outside [0, {self.m.vocab_size})",
                                (Flv4Status.FLV4_ERR_TOKEN,))
        seen = {}
        for i, seq in enumerate(seqs):
            if seen.setdefault(id(seq), i) != i:
                raise error(f"sequences {seen[id(seq)]} and {i} of the batch are the same",
                            (Flv4Status.FLV4_ERR_BAD_DIM,))
            if (<SequenceCore>seq).ptr is NULL:
                raise error(f"sequence {i} of the batch was freed", STACK_CHAIN + (PkvStatus.PKV_ERR_NULL,))
            pool = (<SequenceCore>seq).ptr.pool
            if pool.n_layers != self.m.n_layers or pool.kv_dim != self.m.attn.n_kv_heads * self.m.attn.head_dim:
                raise error(f"the pool of sequence {i} holds {pool.n_layers} layers of {pool.kv_dim}, the model "
                            f"has {self.m.n_layers} of {self.m.attn.n_kv_heads * self.m.attn.head_dim}",
                            (Flv4Status.FLV4_ERR_STACK, Stk4Status.STK4_ERR_BAD_DIM))
            check_head_dim(pool, self.m.attn.head_dim, (Flv4Status.FLV4_ERR_STACK, Stk4Status.STK4_ERR_BAD_DIM))
        return 0

    def check(self, SequenceCore seq, tokens):
        """Raise what step would raise for tokens (int64 array) on one sequence, and change nothing."""
        cdef Batch batch = Batch()
        cdef int64_t failed = 0, needed = 0
        if seq is None or seq.pool is None:
            self.check_batch([seq], [tokens])
        cdef PoolCore pool = seq.pool
        pool.enter()
        try:
            self.check_batch([seq], [tokens])
            batch.fill([seq], [tokens])
            status = pkv_check_append_batch(batch.seqs, batch.n_new, batch.n_seqs, &failed, &needed)
            if status != PKV_OK:
                raise batch.append_error(status, failed, needed)
        finally:
            pool.exit()

    def step(self, list seqs, list tokens, logits_of, out):
        """Append tokens[i] (int64 array) to seqs[i]; logits of the "last" row of each, of "all", of "none", or of so
        many last rows of each (a list).

        All or nothing. In the main thread Ctrl-C ends it half-way."""
        result = self.run_step(seqs, tokens, logits_of, out, threading.get_ident() == MAIN_THREAD)
        if result is None:
            # Python's own reaction, now that nothing is locked and all is as before the call. It raises as a rule; if
            # the program goes on, so does the call.
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                handler(signal.SIGINT, sys._getframe())
            result = self.run_step(seqs, tokens, logits_of, out, False)
        return result

    cdef run_step(self, list seqs, list tokens, logits_of, out, bint can_stop):
        """Checked, planned and reserved for the whole batch before the first write; None if Ctrl-C ended it."""
        cdef int n_threads = team()
        cdef int64_t i, failed = 0, needed = 0, n_floats, n_pass, n_done = 0, n_locked = 0
        cdef pkv_step laid
        cdef pkv_stop stop
        cdef Batch batch = Batch()
        cdef Scratch scratch
        cdef float *logits
        cdef pkv_status status
        pools = {}
        for seq in seqs:
            if isinstance(seq, SequenceCore) and (<SequenceCore>seq).pool is not None:
                pools[id((<SequenceCore>seq).pool)] = (<SequenceCore>seq).pool
        cdef list order = sorted(pools.values(), key=id)     # one order: no deadlock
        cdef PoolCore pool
        try:
            for pool in order:
                pool.enter()
                n_locked += 1
            self.check_batch(seqs, tokens)
            batch.fill(seqs, tokens)
            batch.plan(&self.m, logit_counts(logits_of, tokens), n_threads)
            result = np.empty((batch.n_out, self.m.vocab_size), np.float32) if out is None else out
            logits = out_pointer(result, batch.n_out, self.m.vocab_size)
            n_pass = min(batch.n_rows, PKV_STEP_ROWS)
            n_floats = pkv_step_lay_out(&laid, &self.m, n_pass, n_threads, NULL) + batch.partials_len
            scratch = self.take_scratch(n_floats)
            batch.note_tables()
            status = pkv_ensure_append_batch(batch.seqs, batch.n_new, batch.n_seqs, &failed, &needed)
            if status != PKV_OK:
                self.keep_scratch(scratch)
                raise batch.append_error(status, failed, needed)
            stop.poll, stop.next_s, stop.n_rows, stop.is_set = NULL, omp_get_wtime() + 0.1, 0, 0
            if can_stop:
                stop.poll = pkv_poll_interrupt
            for i in range(batch.n_passes):      # from here on nothing can fail
                if pkv_stop_is_set(&stop):
                    break
                batch.steps[i].stop = &stop
                pkv_step_lay_out(&batch.steps[i], &self.m, n_pass, n_threads, scratch.block)
                batch.steps[i].partials = scratch.block + (n_floats - batch.partials_len)
                batch.steps[i].logits = logits + n_done * self.m.vocab_size
                n_done += batch.steps[i].n_out
                with nogil:
                    pkv_team_step(&batch.steps[i], n_threads)
            self.keep_scratch(scratch)
            if pkv_stop_is_set(&stop):
                batch.undo()
                return None
            for i in range(batch.n_seqs):
                batch.seqs[i].seq_len += batch.n_new[i]
            return result
        finally:
            while n_locked > 0:        # allocates nothing
                n_locked -= 1
                pool = order[n_locked]
                pool.exit()

    cdef void keep_scratch(self, Scratch scratch) noexcept:
        try:
            self.scratches.append(scratch)
        except MemoryError:            # no place to keep it: the next step takes a new one
            pass

    cdef Scratch take_scratch(self, int64_t n_floats):
        cdef Scratch scratch
        while self.scratches:
            scratch = self.scratches.pop()
            if scratch.n_bytes >= n_floats * sizeof(float):
                return scratch
        return Scratch(n_floats)


cdef const int64_t[::1] logit_counts(logits_of, list tokens):
    """How many last rows of each sequence give logits."""
    if isinstance(logits_of, str):
        counts = np.fromiter(map(len, tokens), np.int64, len(tokens))
        if logits_of != "all":
            counts[:] = 1 if logits_of == "last" else 0
        return counts
    counts = np.asarray(logits_of, np.int64)
    if counts.shape != (len(tokens),):
        raise error(f"{counts.size} counts of logits for {len(tokens)} sequences", (Flv4Status.FLV4_ERR_BAD_DIM,))
    for i in range(len(tokens)):
        if not 0 <= counts[i] <= len(tokens[i]):
            raise error(f"logits of {counts[i]} rows are asked for where sequence {i} brings {len(tokens[i])}",
                        (Flv4Status.FLV4_ERR_BAD_DIM,))
    return np.ascontiguousarray(counts)


cdef int need(bint holds, str what) except -1:
    if not holds:
        raise error(f"the {what} has not the shape that the configuration says", (Flv4Status.FLV4_ERR_BAD_DIM,))
    return 0


cdef float *out_pointer(array, int64_t n, int64_t width) except NULL:
    """Where logits go: a writable C-contiguous float32 [n, width] array."""
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != (n, width) \
            or not array.flags.carray:
        raise error(f"out must be a writable C-contiguous float32 array of shape [{n}, {width}], aligned",
                    (Flv4Status.FLV4_ERR_BAD_DIM,))
    return <float *>cnp.PyArray_DATA(array)


# ---------------------------------------------------------------------------------------------------
# Sampling: draws and log-probabilities of rows of logits

# A draw as pagedkv/sampling.h has it.
DRAW = np.dtype([("row", np.int64), ("temperature", np.float64), ("top_k", np.int64), ("top_p", np.float64),
                 ("min_p", np.float64), ("seed", np.uint64), ("sample", np.uint64), ("position", np.uint64)])
assert DRAW.itemsize == sizeof(pkv_draw)

# And what is known of a row's log-probabilities; top: where the ids go.
LOGPROBS = np.dtype([("log_sum", np.float64), ("rank", np.int64), ("n_top", np.int64), ("top", np.intp)])
assert LOGPROBS.itemsize == sizeof(pkv_logprobs)

cdef list SAMPLE_SCRATCHES = []    # idle ones, reused by the next call


cdef Scratch take_sample_scratch(int64_t n_bytes):
    cdef Scratch scratch
    while SAMPLE_SCRATCHES:
        scratch = SAMPLE_SCRATCHES.pop()
        if scratch.n_bytes >= <size_t>n_bytes:
            return scratch
    return Scratch((n_bytes + 3) // 4)


cdef int64_t check_rows(const float[:, ::1] logits, const int64_t[::1] rows) except -1:
    """The number of logits in a row, each of `rows` being one."""
    cdef int64_t i
    if logits.shape[1] == 0 or logits.shape[1] > 0x7FFFFFFF:
        raise error(f"logits have shape [{logits.shape[0]}, {logits.shape[1]}]", (PkvStatus.PKV_ERR_BAD_DIM,))
    for i in range(rows.shape[0]):
        if rows[i] < 0 or rows[i] >= logits.shape[0]:
            raise error(f"row {rows[i]} is outside [0, {logits.shape[0]})", (PkvStatus.PKV_ERR_BOUNDS,))
    return logits.shape[1]


def uniform(uint64_t seed, uint64_t sample, uint64_t position):
    """The number in [0, 1) that chooses the token of (seed, sample, position)."""
    return pkv_uniform(seed, sample, position)


def log(double x):
    """Natural logarithm of a positive normal number, the same bits on every machine."""
    return pkv_log_f64(x)


def sample(const float[:, ::1] logits, cnp.ndarray draws):
    """The tokens of an array of DRAW; -1 where a row holds NaN or its largest logit is not finite."""
    return take_rows(logits, draws["row"], draws, None, None)[0]


def sample_logprobs(const float[:, ::1] logits, cnp.ndarray draws, const int64_t[::1] n_tops):
    """:func:`sample`, and of the same reading of a row what :func:`logprobs` says of the token.

    Of the i-th draw the first ``n_tops[i]`` ids; -1: nothing at all. Returns (tokens, log_sums, ranks, first ids int64
    [m, max(n_tops)])."""
    return take_rows(logits, draws["row"], draws, None, n_tops)


def logprobs(const float[:, ::1] logits, const int64_t[::1] rows, const int64_t[::1] chosen, int64_t n_top):
    """Of each row: (log_sum float64 [m], rank of the chosen id int64 [m], first ids in order int64 [m, n_top]).

    The log-probability of id i is ``logits[row, i] - log_sum``. NaN for log_sum where the row holds NaN or its largest
    logit is not finite. Ranks begin at 1."""
    cdef int64_t i
    if chosen.shape[0] != rows.shape[0] or not 0 <= n_top <= logits.shape[1]:
        raise error(f"{chosen.shape[0]} chosen ids and the first {n_top} of {logits.shape[1]} for {rows.shape[0]} rows",
                    (PkvStatus.PKV_ERR_BAD_DIM,))
    for i in range(chosen.shape[0]):
        if chosen[i] < 0 or chosen[i] >= logits.shape[1]:
            raise error(f"id {chosen[i]} is outside [0, {logits.shape[1]})", (Flv4Status.FLV4_ERR_TOKEN,))
    return take_rows(logits, rows, None, chosen, np.full(rows.shape[0], n_top, np.int64))[1:]


cdef tuple take_rows(const float[:, ::1] logits, row_ids, cnp.ndarray draws, const int64_t[::1] chosen,
                     const int64_t[::1] n_tops):
    """Tokens of rows, drawn or else chosen before; and log-probabilities, where n_tops is not None."""
    cdef const int64_t[::1] rows = np.ascontiguousarray(row_ids)
    cdef int64_t m = rows.shape[0], n = check_rows(logits, rows), n_bytes = pkv_sample_lay_out(NULL, n, NULL), i
    cdef int64_t width = 0 if n_tops is None else np.max(n_tops, initial=0)
    cdef int n_threads = team() if m > 1 else 1
    if n_tops is not None and (n_tops.shape[0] != m or width > n):
        raise error(f"the first {width} of {n} ids, {n_tops.shape[0]} counts for {m} rows", (PkvStatus.PKV_ERR_BAD_DIM,))
    cdef cnp.ndarray tokens = np.zeros(m, np.int64), top = np.zeros((m, width), np.int64)
    cdef cnp.ndarray results = np.zeros(m, LOGPROBS)
    cdef int64_t *tokens_ptr = <int64_t *>cnp.PyArray_DATA(tokens)
    cdef int64_t *top_ptr = <int64_t *>cnp.PyArray_DATA(top)
    cdef pkv_logprobs *wanted = <pkv_logprobs *>cnp.PyArray_DATA(results)
    cdef const pkv_draw *each = NULL
    if draws is None:
        tokens[:] = chosen
    elif draws.dtype != DRAW or draws.ndim != 1 or not draws.flags.carray:
        raise error("draws must be a contiguous array of DRAW", (PkvStatus.PKV_ERR_BAD_DIM,))
    else:
        each = <const pkv_draw *>cnp.PyArray_DATA(draws)
    for i in range(m):
        wanted[i].log_sum, wanted[i].n_top = NAN, -1 if n_tops is None else n_tops[i]
        wanted[i].top = top_ptr + i * width
    cdef Scratch scratch = take_sample_scratch(n_bytes * n_threads)
    if m:
        with nogil:
            run_takes(&logits[0, 0], n, &rows[0], each, m, tokens_ptr, wanted, scratch.block, n_bytes, n_threads)
    SAMPLE_SCRATCHES.append(scratch)
    return tokens, results["log_sum"], results["rank"], top


cdef void run_takes(const float *logits, int64_t n, const int64_t *rows, const pkv_draw *draws, int64_t m,
                    int64_t *tokens, pkv_logprobs *wanted, void *block, int64_t n_bytes, int n_threads) noexcept nogil:
    cdef int64_t i
    cdef uint64_t saved
    with parallel(num_threads=n_threads):
        saved = pkv_fpenv_enter()
        for i in prange(m, schedule="dynamic"):
            tokens[i] = run_take(logits + rows[i] * n, n, draws + i if draws else NULL, tokens[i],
                                 wanted + i if wanted[i].n_top >= 0 else NULL,
                                 <unsigned char *>block + threadid() * n_bytes)
        pkv_fpenv_leave(saved)


cdef int64_t run_take(const float *x, int64_t n, const pkv_draw *draw, int64_t token, pkv_logprobs *wanted,
                     unsigned char *block) noexcept nogil:
    cdef pkv_sample_scratch s
    pkv_sample_lay_out(&s, n, block)
    return pkv_take_row(KERNELS, x, n, draw, token, wanted, &s)
