"""A sequence: rows of K and V in blocks of a pool."""

import operator
import os
from collections.abc import Iterable
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from pagedkv._core import PkvStatus, PoolCore, SequenceCore, kv_group
from pagedkv.errors import BadDimError, FormatError, TokenError
from pagedkv.formats.saved import SavedSequence, SequenceHeader, write_saved

_BAD_DIM = (PkvStatus.PKV_ERR_BAD_DIM,)


class _Named(Protocol):  # a LlamaModel, which stands above this layer
    @property
    def fingerprint(self) -> str: ...


def _token_ids(tokens, n):
    """Ids of n rows, as a list of int."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size != n:
        raise BadDimError(f"tokens of shape {list(array.shape)} for a sequence of {n} rows", _BAD_DIM)
    if n and array.dtype.kind not in "iu":
        raise TypeError(f"token ids are integers, not {array.dtype}")
    if n and not 0 <= array.min() <= array.max() < 2**31:
        raise TokenError(f"token ids from {array.min()} to {array.max()} are not all in [0, 2**31)")
    return array.tolist()


def _model_name(model):
    """A model's fingerprint, or the text that was given in its place."""
    if model is None or isinstance(model, str):
        return model
    if not isinstance(getattr(model, "fingerprint", None), str):
        raise TypeError(f"model is a LlamaModel or a name, not a {type(model).__name__}")
    return model.fingerprint


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

    def __init__(self, pool: PoolCore, max_tokens: int) -> None:
        self._open(pool, operator.index(max_tokens))

    @classmethod
    def from_blocks(cls, pool: PoolCore, block_ids: npt.ArrayLike, max_tokens: int) -> Self:
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

    def fork(self) -> Self:
        """A second sequence with the same rows; copies none of them.

        Blocks that were reserved but hold no row yet stay with the source.

        Returns
        -------
        Sequence
        """
        child = type(self).__new__(type(self))
        self._fork_to(child)
        return child

    def save(self, path: str | os.PathLike[str], tokens: npt.ArrayLike | None = None,
             model: _Named | str | None = None) -> None:
        """Write the rows to a file, to go on from them later, in another process or another pool.

        Only rows that were advanced over are written, in the pool's type, to the bit; not the block size or the
        table, so :meth:`load` takes a pool of any block size.

        Parameters
        ----------
        path : str or os.PathLike
            A file there is replaced, once all of the new one is on the disk.
        tokens : array_like of int, optional
            Ids of the rows' tokens, one for each. A sequence knows none; :meth:`read_header` gives them back.
        model : LlamaModel or str, optional
            Whose rows they are: its fingerprint, or a name of your own, is kept, and compared on loading.

        Raises
        ------
        BadDimError, TokenError, TypeError
            `tokens` are not one id in ``[0, 2**31)`` for each row, or `model` is neither of the two.
        NullError
            The sequence was freed.
        OSError
            The file cannot be written, for example as the disk is full. Nothing is left behind, and a file that was
            there before stays.

        Notes
        -----
        Another thread may append meanwhile (to a copy of a last block that is not full): what is saved is the sequence
        as it was when the call began. The format is safetensors; docs/formats.md has the details.

        Examples
        --------
        >>> import tempfile, numpy as np, pagedkv as pk
        >>> pool = pk.BlockPool(n_blocks=4, n_layers=1, kv_dim=4)
        >>> seq = pk.Sequence.import_(np.ones((1, 2, 1, 17, 4), np.float32), pool)
        >>> other = pk.BlockPool(n_blocks=9, n_layers=1, kv_dim=4, block_size=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     seq.save(f"{folder}/prefix.kv", tokens=range(17), model="mine")
        ...     again = pk.Sequence.load(f"{folder}/prefix.kv", other, model="mine")
        ...     print(pk.Sequence.read_header(f"{folder}/prefix.kv").tokens[-1], again)
        16 Sequence(len=17, block_table=[0, 1, 2, 3, 4, 5, 6, 7, 8])
        """
        with self.fork() as rows:  # which nothing can change while the file is written
            ids = None if tokens is None else _token_ids(tokens, len(rows))
            pool = rows.pool
            header = SequenceHeader(pool.n_layers, len(rows), pool.kv_dim, pool.dtype, _model_name(model), ids)
            write_saved(path, header, rows._take_rows)

    @classmethod
    def load(cls, path: str | os.PathLike[str], pool: PoolCore, max_tokens: int | None = None,
             model: _Named | str | None = None) -> Self:
        """A new sequence with the rows of a saved one; going on from it gives the same bits.

        Parameters
        ----------
        path : str or os.PathLike
            What :meth:`save` wrote.
        pool : BlockPool
            Of the same layers, kv_dim and type; its block size may be another.
        max_tokens : int, optional
            As of :class:`Sequence`; by default what the pool holds.
        model : LlamaModel or str, optional
            Whose rows they must be.

        Returns
        -------
        Sequence

        Raises
        ------
        FormatError
            The file is damaged or no saved sequence, or names another model than `model` or none.
        BadDimError
            The pool has another shape or type.
        PoolExhausted, BoundsError
            The pool, or the table for `max_tokens`, lacks blocks.
        OSError
            The file cannot be read.

        Notes
        -----
        After an error nothing in the pool has changed. The pool is free for other threads while the file is read.
        """
        name = _model_name(model)
        with SavedSequence(path) as saved:
            header = saved.header
            if name is not None and name != header.model:
                whose = "no named model" if header.model is None else repr(header.model)
                raise FormatError(f"{path}: the rows are of {whose}, not of {name!r}")
            if (header.n_layers, header.kv_dim, header.dtype) != (pool.n_layers, pool.kv_dim, pool.dtype):
                raise BadDimError(f"{path}: rows of {header.n_layers} layers of {header.kv_dim} values of "
                                  f"{header.dtype}, the pool holds {pool.n_layers} of {pool.kv_dim} of {pool.dtype}",
                                  _BAD_DIM)
            return cls._filled(pool, max_tokens, header.n_tokens, lambda seq: saved.read_rows(seq._put_rows))

    @staticmethod
    def read_header(path: str | os.PathLike[str]) -> SequenceHeader:
        """What a saved sequence says of itself, its tokens too, without reading its rows.

        Returns
        -------
        SequenceHeader
            ``n_layers``, ``n_tokens``, ``kv_dim``, ``dtype``, ``model`` and ``tokens``; None where not given to
            :meth:`save`.

        Raises
        ------
        FormatError
            The file is cut off or no saved sequence, or these parts of it are damaged.
        OSError
            It cannot be read.
        """
        with SavedSequence(path) as saved:
            return saved.header

    @classmethod
    def import_(cls, array: npt.ArrayLike, pool: PoolCore, max_tokens: int | None = None) -> Self:
        """A new sequence with the rows of an array: the way back from :meth:`export`.

        Parameters
        ----------
        array : numpy.ndarray
            float32 or float16 ``[n_layers, 2, n_kv_heads, n_tokens, head_dim]``, K then V of each layer; of any
            strides. Rounded here to the pool's type, as :meth:`append_layer` does.
        pool : BlockPool
            With as many layers, and ``kv_dim == n_kv_heads * head_dim``.
        max_tokens : int, optional
            As of :class:`Sequence`; by default what the pool holds.

        Returns
        -------
        Sequence

        Raises
        ------
        TypeError
            The array is of another type.
        BadDimError
            It has not the pool's shape, or head_dim is not whole groups of q8_0.
        PoolExhausted, BoundsError
            The pool, or the table for `max_tokens`, lacks blocks. After any error nothing in the pool has changed.

        Notes
        -----
        Exact for float32, float16 and bfloat16: ``export`` gives what was imported from it. In q8_0 the values are
        rounded anew, and a scale may come out as its neighbour; :meth:`save` and :meth:`load` keep its bits.
        """
        array = np.asarray(array)
        if array.dtype not in (np.float32, np.float16):
            raise TypeError(f"rows are float32 or float16, not {array.dtype}")
        if array.ndim != 5 or array.shape[:2] != (pool.n_layers, 2) or array.shape[2] * array.shape[4] != pool.kv_dim:
            raise BadDimError(f"rows of shape {list(array.shape)}, needs [{pool.n_layers}, 2, n_kv_heads, n_tokens, "
                              f"head_dim] with n_kv_heads * head_dim = {pool.kv_dim}", _BAD_DIM)
        if pool.dtype == "q8_0" and array.shape[4] % kv_group("q8_0"):
            raise BadDimError(f"q8_0 has a scale for each {kv_group('q8_0')} values, which do not divide head_dim "
                              f"{array.shape[4]}", _BAD_DIM)
        n = array.shape[3]

        def write(seq):
            for layer in range(pool.n_layers if n else 0):
                k, v = array[layer].transpose(0, 2, 1, 3).reshape(2, n, pool.kv_dim).astype(np.float32, copy=False)
                seq.append_layer(layer, k, v)

        return cls._filled(pool, max_tokens, n, write)

    @classmethod
    def _filled(cls, pool, max_tokens, n, write):
        """A sequence of n rows, which `write` puts into their reserved places; or no change to the pool."""
        seq = cls(pool, pool.n_blocks * pool.block_size if max_tokens is None else max_tokens)
        try:
            if n:
                seq.ensure_append(n)
            write(seq)
            if n:
                seq.advance(n)
            return seq
        except BaseException:
            seq.truncate(0)  # gives the blocks back last to first, so that the free stack is as it was
            seq.free()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def __repr__(self) -> str:
        return f"Sequence(len={len(self)}, block_table={self.block_table.tolist()})"


class PagedKVIndices(NamedTuple):
    """What :func:`paged_kv_indices` returns, under FlashInfer's names; a page is a block.

    Attributes
    ----------
    kv_indptr : int32 array [n_seqs + 1]
        Sequence ``i`` has the entries ``[kv_indptr[i], kv_indptr[i + 1])`` of `kv_page_indices`.
    kv_page_indices : int32 array [kv_indptr[-1]]
        Ids of the blocks that hold rows, in order.
    kv_last_page_len : int32 array [n_seqs]
        Rows in the last block of each; 0 for an empty sequence.
    """

    kv_indptr: npt.NDArray[np.int32]
    kv_page_indices: npt.NDArray[np.int32]
    kv_last_page_len: npt.NDArray[np.int32]


def paged_kv_indices(seqs: "Iterable[Sequence]") -> PagedKVIndices:
    """Where the rows of a batch lie, in the form that kernels over paged K and V take.

    Row ``t`` of sequence ``i`` in one layer is
    ``pool.k[kv_page_indices[kv_indptr[i] + t // block_size], layer, t % block_size]``. Of a pool whose type NumPy has,
    ``pool.k[:, layer].reshape(n_blocks, block_size, n_kv_heads, head_dim)`` is a view in FlashInfer's NHD layout.

    Parameters
    ----------
    seqs : iterable of Sequence
        All of one pool. Blocks that are reserved but hold no row do not count.

    Returns
    -------
    PagedKVIndices
        Copies: of use until a sequence is truncated or freed, or appends to a block that it shares.

    Raises
    ------
    BadDimError
        The sequences are of different pools.
    NullError
        One was freed.

    Notes
    -----
    The form is FlashInfer's (Ye et al. 2025, ``BatchDecodeWithPagedKVCacheWrapper.plan``).

    Examples
    --------
    >>> import numpy as np, pagedkv as pk
    >>> pool = pk.BlockPool(n_blocks=8, n_layers=1, kv_dim=4)
    >>> seqs = [pk.Sequence.import_(np.ones((1, 2, 1, n, 4), np.float32), pool) for n in (17, 0, 16)]
    >>> pk.paged_kv_indices(seqs)
    PagedKVIndices(kv_indptr=array([0, 2, 2, 3], dtype=int32), kv_page_indices=array([0, 1, 2], dtype=int32), \
kv_last_page_len=array([ 1,  0, 16], dtype=int32))
    """
    seqs = list(seqs)
    for i, seq in enumerate(seqs):
        if not isinstance(seq, Sequence):
            raise TypeError(f"sequence {i} of the batch is a {type(seq).__name__}, not a Sequence")
        if seq.pool is not seqs[0].pool:
            raise BadDimError(f"sequences 0 and {i} of the batch are of different pools", _BAD_DIM)
    held = [seq._held() for seq in seqs]
    indptr = np.cumsum([0, *(len(blocks) for _, blocks in held)], dtype=np.int32)
    blocks = np.concatenate([np.empty(0, np.int32), *(blocks for _, blocks in held)])
    last = [n - max(0, len(blocks) - 1) * seq.pool.block_size for seq, (n, blocks) in zip(seqs, held)]
    return PagedKVIndices(indptr, blocks, np.array(last, np.int32))
