"""The pool of blocks."""

from pagedkv import errors
from pagedkv._core import PoolCore


class BlockPool(PoolCore):
    """Fixed-size blocks of K and V rows, given to sequences on demand and shared by count.

    ``k`` and ``v`` are ``[n_blocks, n_layers, block_size, kv_dim]`` float32, 64-byte aligned; the
    operating system gives the memory when a block is first written. Block ids come off a stack: a new
    pool gives 0, 1, 2, ... All calls on one pool are serialised.

    Parameters
    ----------
    n_blocks, n_layers, kv_dim : int
        All positive. ``kv_dim = n_kv_heads * head_dim``.
    block_size : int
        Tokens in a block; divides 256, the chunk of attention's softmax.
    dtype : str
        ``"float32"``.

    Raises
    ------
    BadDimError
        A dimension is not positive, or `block_size` does not divide 256.
    MemoryError
        The system does not give that much address space.

    Notes
    -----
    Ported from the paged KV cache of the NX engine (``nx_pkv_*``); the idea is PagedAttention
    (Kwon et al. 2023).

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
    def __init__(self, n_blocks, n_layers, kv_dim, block_size=16, dtype="float32"):
        if dtype != "float32":
            raise errors.BadDimError(f"a pool holds float32, not {dtype!r}")

    @property
    def dtype(self):
        """Type of the stored rows."""
        return "float32"

    def __repr__(self):
        return (f"BlockPool(n_blocks={self.n_blocks}, n_layers={self.n_layers}, kv_dim={self.kv_dim}, "
                f"block_size={self.block_size}, n_free={self.n_free})")
