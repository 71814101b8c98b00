# cython: language_level=3
"""What a pool of blocks shares, counted without Python objects."""
from libc.stdint cimport int64_t
from pagedkv._core cimport PoolCore


def shared_blocks(PoolCore pool not None):
    """Blocks of `pool`, a pagedkv.BlockPool, that more than one sequence owns."""
    cdef int64_t n = 0, i
    with pool._lock, nogil:
        for i in range(pool.ptr.n_blocks):
            n += pool.ptr.ref_count[i] > 1
    return n
