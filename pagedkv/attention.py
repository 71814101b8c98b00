"""Attention over a paged sequence, and over one contiguous buffer."""

import numpy as np
import numpy.typing as npt

from pagedkv import _core
from pagedkv._core import SequenceCore


def paged_attention(q: npt.ArrayLike, k_new: npt.ArrayLike, v_new: npt.ArrayLike, seq: SequenceCore, layer: int, *,
                    n_heads: int, n_kv_heads: int, head_dim: int, causal: bool = True, scale: float | None = None,
                    window: int | None = None) -> npt.NDArray[np.float32]:
    """Append new rows to one layer of a sequence, then attend over all its rows in place.

    The caller has reserved the rows (``seq.ensure_append(n)``) and advances after the last layer.

    Parameters
    ----------
    q : numpy.ndarray
        float32 ``[n, n_heads * head_dim]``, rotated.
    k_new, v_new : numpy.ndarray
        float32 ``[n, n_kv_heads * head_dim]``, K rotated.
    seq : Sequence
    layer : int
    n_heads, n_kv_heads, head_dim : int
        Query head ``h`` reads KV head ``h // (n_heads // n_kv_heads)``.
    causal : bool
        Row ``i`` sees positions up to its own, ``len(seq) + i``; otherwise all.
    scale : float, optional
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    window : int, optional
        Row ``i`` sees the last `window` positions up to its own, its own included; by default all. Only where `causal`.

    Returns
    -------
    numpy.ndarray
        float32 ``[n, n_heads * head_dim]``.

    Raises
    ------
    BadDimError, BadGQAError
        Dimensions or a window not positive, dimensions not those of the arrays and the pool, or a window without
        `causal`.
    BoundsError
        The rows are not reserved in blocks of this sequence alone, or there is no such layer.
    NullError
        The sequence was freed.

    Notes
    -----
    Ported from ``nx_f32_attn_with_paged``. Same bits as :func:`attention` over gathered rows.

    Examples
    --------
    >>> import numpy as np, pagedkv as pk
    >>> pool = pk.BlockPool(n_blocks=4, n_layers=1, kv_dim=8)
    >>> seq = pk.Sequence(pool, max_tokens=16)
    >>> x = np.ones((2, 8), np.float32)
    >>> seq.ensure_append(2)
    >>> pk.paged_attention(x, x, x, seq, 0, n_heads=1, n_kv_heads=1, head_dim=8).shape
    (2, 8)
    """
    return _core.attn_with_paged(q, k_new, v_new, seq, layer, n_heads, n_kv_heads, head_dim, causal, scale, window)


def attention(q: npt.ArrayLike, k: npt.ArrayLike, v: npt.ArrayLike, *, n_heads: int, n_kv_heads: int, head_dim: int,
              causal: bool = True, scale: float | None = None, window: int | None = None) -> npt.NDArray[np.float32]:
    """Attention over contiguous K and V: the twin that paged results are compared with, bit for bit.

    Parameters
    ----------
    q : numpy.ndarray
        float32 ``[n, n_heads * head_dim]``; the last `n` of `total_k` positions where causal.
    k, v : numpy.ndarray
        float32 ``[total_k, n_kv_heads * head_dim]``.
    n_heads, n_kv_heads, head_dim, causal, scale, window
        As in :func:`paged_attention`.

    Returns
    -------
    numpy.ndarray
        float32 ``[n, n_heads * head_dim]``.

    Raises
    ------
    BadDimError, BadGQAError
    """
    return _core.attention(q, k, v, n_heads, n_kv_heads, head_dim, causal, scale, window)
