"""A sequence: rows of K and V in blocks of a pool."""

import operator

from pagedkv._core import SequenceCore


class Sequence(SequenceCore):
    """A growing list of rows, found through a block table.

    Row ``t`` lies in block ``block_table[t // block_size]`` at offset ``t % block_size``. Rows that were
    advanced over never change, so :meth:`fork` shares them, and only a partly filled last block is
    copied, once, when one of its owners appends.

    Parameters
    ----------
    pool : BlockPool
    max_tokens : int
        Bound of the table: ``ceil(max_tokens / block_size) + 1`` blocks, as in the seed.

    Raises
    ------
    PagedKVError
        From every method: a :class:`BoundsError`, :class:`BadDimError`, :class:`PoolExhausted` or, after
        :meth:`free`, :class:`NullError`. Nothing has changed then.

    Notes
    -----
    A context manager; dropping the last reference gives the blocks back too.

    Examples
    --------
    >>> import numpy as np, pagedkv as pk
    >>> pool = pk.BlockPool(n_blocks=8, n_layers=1, kv_dim=4)
    >>> with pk.Sequence(pool, max_tokens=32) as seq:
    ...     rows = np.ones((17, 4), np.float32)
    ...     seq.ensure_append(17)
    ...     seq.append_layer(0, rows, rows)
    ...     seq.advance(17)
    ...     child = seq.fork()
    ...     print(len(child), child.block_table.tolist(), pool.n_free)
    17 [0, 1] 6
    >>> child.free()
    >>> pool.n_free
    8
    """

    def __init__(self, pool, max_tokens):
        self._open(pool, operator.index(max_tokens))

    def fork(self):
        """A second sequence with the same rows; copies none of them.

        Blocks that were reserved but hold no row yet stay with the source.

        Returns
        -------
        Sequence
        """
        child = type(self).__new__(type(self))
        self._fork_to(child)
        return child

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.free()

    def __repr__(self):
        return f"Sequence(len={len(self)}, block_table={self.block_table.tolist()})"
