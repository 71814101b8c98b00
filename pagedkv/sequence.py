"""A sequence: rows of K and V in blocks of a pool."""

import operator

import numpy as np

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

    @classmethod
    def from_blocks(cls, pool, block_ids, max_tokens):
        """A sequence whose first rows lie in full blocks that somebody owns already; copies none of them.

        Parameters
        ----------
        pool : BlockPool
        block_ids : sequence of int
            Blocks in use, in order, each full of rows and named once; each gets one owner more.
        max_tokens : int
            As of the class.

        Returns
        -------
        Sequence
            Of ``len(block_ids) * block_size`` rows.

        Raises
        ------
        BoundsError
            A block is not in use, or there are more than the table holds.
        BadDimError
            A block is named twice.

        Examples
        --------
        >>> import pagedkv as pk
        >>> pool = pk.BlockPool(n_blocks=8, n_layers=1, kv_dim=4)
        >>> block_id = pool.alloc_block()
        >>> seq = pk.Sequence.from_blocks(pool, [block_id], max_tokens=32)
        >>> len(seq), pool.ref_count(block_id)
        (16, 2)
        """
        seq = cls(pool, max_tokens)
        try:
            seq._adopt(np.array(block_ids, np.int32, ndmin=1))
        except BaseException:
            seq.free()
            raise
        return seq

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
