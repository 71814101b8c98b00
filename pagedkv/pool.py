"""The pool of blocks."""

from pagedkv._core import PoolCore


class BlockPool(PoolCore):
    """Fixed-size blocks of K and V rows, given to sequences on demand and shared by count.

    ``k`` and ``v`` are ``[n_blocks, n_layers, block_size, kv_dim]``, 64-byte aligned; the operating
    system gives the memory when a block is first written. Block ids come off a stack: a new
    pool gives 0, 1, 2, ... All calls on one pool are serialised.

    Parameters
    ----------
    n_blocks, n_layers, kv_dim : int
        All positive. ``kv_dim = n_kv_heads * head_dim``.
    block_size : int
        Tokens in a block; divides 256, the chunk of attention's softmax.
    dtype : str
        How rows are stored: ``"float32"``, ``"float16"``, ``"bfloat16"``, or ``"q8_0"``, which is an 8-bit
        code for each value and a float16 scale for each 32 of them. Rows come as float32 and are rounded
        once, when they are written, to nearest with ties to even; attention reads the float32 values that
        the stored ones stand for. So the promise holds for each type, and float16 halves, q8_0 nearly
        quarters, the memory and what attention reads.

    Raises
    ------
    BadDimError
        A dimension is not positive, `block_size` does not divide 256, the type is unknown, or ``"q8_0"``
        where `kv_dim` is not a multiple of 32. (A head_dim that is not raises where it becomes known: in
        :meth:`LlamaModel.new_pool`, in a step, in :func:`paged_attention`.)
    MemoryError
        The system does not give that much address space.

    Notes
    -----
    Ported from the paged KV cache of the NX engine (``nx_pkv_*``); the idea is PagedAttention
    (Kwon et al. 2023). ``"q8_0"`` is GGUF's block of the same name (ggml-common.h, ``block_q8_0``), but for
    the scale, which is rounded before the codes are made.

    Examples
    --------
    >>> import pagedkv as pk
    >>> pool = pk.BlockPool(n_blocks=8, n_layers=2, kv_dim=64)
    >>> pool.alloc_block(), pool.n_free, pool.ref_count(0)
    (0, 7, 1)
    >>> pool.unref_block(0)
    >>> pool.n_free
    8
    """

    # The core took the same arguments when the object was made.
    def __init__(self, n_blocks: int, n_layers: int, kv_dim: int, block_size: int = 16, dtype: str = "float32") -> None:
        pass

    def __repr__(self) -> str:
        return (f"BlockPool(n_blocks={self.n_blocks}, n_layers={self.n_layers}, kv_dim={self.kv_dim}, "
                f"block_size={self.block_size}, dtype={self.dtype!r}, n_free={self.n_free})")
