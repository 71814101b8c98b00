"""The kernels as functions on arrays. Same bits for every thread count and instruction set."""

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import _core
from pagedkv._core import PackedWeight
from pagedkv.errors import BadDimError, ElementCountOverflow, EmptyShape, Range, UnsupportedDtype
from pagedkv.rope import rope_inv_freq

__all__ = ["PackedWeight", "dot", "exp", "kv_cache_append", "matmul", "pack", "rmsnorm", "rope", "softmax", "swiglu"]


def _float32(array, name):
    """C-contiguous float32; other real numbers are rounded to it, anything else is refused."""
    array = np.asarray(array)
    if array.dtype.kind not in "fiu" and array.size:
        raise TypeError(f"{name} must hold real numbers, not {array.dtype}")
    return np.require(array, np.float32, "C")  # unlike ascontiguousarray it leaves a scalar one


def _rows(array):
    """As a matrix of rows: the last axis, and all others flattened."""
    if array.ndim == 0:
        raise BadDimError("a scalar has no rows")
    return array.reshape((-1, array.shape[-1]) if array.size else (0, array.shape[-1]))


def pack(w: npt.ArrayLike) -> PackedWeight:
    """Lay a matrix out in the kernels' panels ``[ceil(n / 32), k, 32]``.

    Parameters
    ----------
    w : array_like
        float32 ``[n, k]``.

    Returns
    -------
    PackedWeight
        Independent of `w`.

    Raises
    ------
    BadDimError
        Not a matrix, or an empty one.

    Examples
    --------
    >>> import numpy as np, pagedkv as pk
    >>> w = pk.pack(np.eye(3, 4))
    >>> pk.matmul([[1, 2, 3, 4]], w).tolist()
    [[1.0, 2.0, 3.0]]
    """
    w = _float32(w, "w")
    if w.ndim != 2 or w.size == 0:
        raise BadDimError(f"a weight is a matrix [n, k] that is not empty, not an array of shape {list(w.shape)}")
    packed = PackedWeight(*w.shape, [_core.DTYPES["f32"]] * -(-w.shape[0] // _core.PANEL))
    packed._fill(w.reshape(-1).view(np.uint8), w.shape[0])
    return packed


def matmul(x: npt.ArrayLike, w: PackedWeight) -> npt.NDArray[np.float32]:
    """``y[m, n] = sum_k x[m, k] w[n, k]``: one accumulator a cell, k ascending, one FMA a step.

    Parameters
    ----------
    x : array_like
        float32 ``[m, k]`` or ``[k]``.
    w : PackedWeight
        ``[n, k]``, from :func:`pack`.

    Returns
    -------
    numpy.ndarray
        float32 ``[m, n]`` or ``[n]``. A row's bits do not depend on the other rows.

    Raises
    ------
    BadDimError
        The widths differ.
    """
    if not isinstance(w, PackedWeight):
        raise TypeError(f"w must come from pack(), not {type(w).__name__}")
    x = _float32(x, "x")
    if x.ndim not in (1, 2):
        raise BadDimError(f"x is [m, k] or [k], not an array of {x.ndim} dimensions")
    out = np.empty((1 if x.ndim == 1 else x.shape[0], w.n), np.float32)
    _core.matmul(x if x.ndim == 2 else x[None], w, out)
    return out[0] if x.ndim == 1 else out


def exp(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """``e ** x`` within 2 ulp, the same bits on every instruction set. float32, shape of `x`.

    Examples
    --------
    >>> exp([0.0, float("-inf")]).tolist()
    [1.0, 0.0]
    """
    x = _float32(x, "x")
    out = np.empty_like(x)
    _core.exp(x.reshape(1, -1), out.reshape(1, -1))
    return out


def softmax(x: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Softmax over the last axis; sums run in 16 lanes, then one fixed tree. float32, shape of `x`.

    Examples
    --------
    >>> softmax([[0.0, 0.0], [1.0, 1.0]]).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    x = _float32(x, "x")
    out = np.empty_like(x)
    _core.softmax(_rows(x), _rows(out))
    return out


def rmsnorm(x: npt.ArrayLike, gamma: npt.ArrayLike, eps: float) -> npt.NDArray[np.float32]:
    """``x / sqrt(mean(x ** 2) + eps) * gamma`` over the last axis (Zhang and Sennrich 2019).

    Parameters
    ----------
    x : array_like
        float32 ``[..., n]``.
    gamma : array_like
        float32 ``[n]``.
    eps : float

    Returns
    -------
    numpy.ndarray
        float32, shape of `x`.

    Raises
    ------
    BadDimError
        `gamma` has another length than the last axis.
    """
    x, gamma = _float32(x, "x"), _float32(gamma, "gamma")
    rows = _rows(x)
    if gamma.shape != rows.shape[1:]:
        raise BadDimError(f"gamma has shape {list(gamma.shape)}, rows are {rows.shape[1]} wide")
    out = np.empty_like(x)
    _core.rmsnorm(rows, gamma.reshape(1, -1), eps, _rows(out))
    return out


def swiglu(gate: npt.ArrayLike, up: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """``silu(gate) * up`` (Shazeer 2020), element by element. float32, their common shape."""
    gate, up = _float32(gate, "gate"), _float32(up, "up")
    if gate.shape != up.shape:
        raise BadDimError(f"gate has shape {list(gate.shape)}, up {list(up.shape)}")
    out = np.empty_like(gate)
    _core.swiglu(gate.reshape(1, -1), up.reshape(1, -1), out.reshape(1, -1))
    return out


def dot(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """``sum_i a[i] b[i]`` of two vectors in the canonical order: 16 lanes, then one fixed tree.

    Examples
    --------
    >>> dot([1, 2, 3], [4, 5, 6])
    32.0
    """
    return _core.dot(_float32(a, "a").ravel(), _float32(b, "b").ravel())


def rope(x: npt.ArrayLike, positions: npt.ArrayLike, theta: float = 10000.0, rope_dim: int | None = None,
         inv_freq: npt.ArrayLike | None = None) -> npt.NDArray[np.float32]:
    """Rotate heads by their positions, NeoX order: dimension ``i`` turns with ``i + rope_dim // 2``.

    Parameters
    ----------
    x : array_like
        float32 ``[n, n_heads, head_dim]`` or ``[n, head_dim]``.
    positions : array_like of int
        ``[n]``, position of each row; one int for a single row.
    theta : float
        Base of the frequencies.
    rope_dim : int, optional
        Rotating dimensions; all of `head_dim` by default.
    inv_freq : array_like, optional
        float64 ``[rope_dim // 2]`` radians a position, in place of `theta` (see
        :func:`pagedkv.rope_inv_freq` for scaled ones).

    Returns
    -------
    numpy.ndarray
        float32, shape of `x`. cos and sin come from float64 and are rounded once (Su et al. 2021).

    Raises
    ------
    BadDimError
        Shapes that do not fit each other, an odd `rope_dim`, or a negative position.
    """
    x = np.array(_float32(x, "x"))
    positions = np.atleast_1d(np.asarray(positions))
    if positions.dtype.kind not in "iu":
        raise TypeError(f"positions must be integers, not {positions.dtype}")
    if x.ndim not in (2, 3) or x.size == 0 or positions.shape != x.shape[:1]:
        raise BadDimError(f"x {list(x.shape)} needs shape [n, n_heads, head_dim] or [n, head_dim] and positions "
                          f"{list(positions.shape)} shape [n]")
    if inv_freq is None:
        inv_freq = rope_inv_freq(theta, x.shape[-1] if rope_dim is None else rope_dim)
    inv_freq = np.ascontiguousarray(inv_freq, np.float64)
    if inv_freq.ndim != 1 or not 1 <= inv_freq.size <= x.shape[-1] // 2:
        raise BadDimError(f"{inv_freq.size} rotating pairs do not fit head_dim {x.shape[-1]}")
    if positions.min() < 0 or not float(positions.max()) * np.abs(inv_freq).max() < 2**30:
        raise BadDimError("positions must not be negative, and no angle may reach 2**30 radians")
    _core.rope(x if x.ndim == 3 else x[:, None, :], positions.astype(np.int64), inv_freq)
    return x


_U32 = 2**32 - 1


def kv_cache_append(prior: npt.NDArray[Any], chunk: npt.NDArray[Any], offset: int,
                    dtype: str | None = None) -> npt.NDArray[Any]:
    """The next generation of an immutable cache: a copy of `prior` with `chunk` put in at `offset`.

    Parameters
    ----------
    prior : numpy.ndarray
        ``[batch, heads, capacity, head_dim]``; never written.
    chunk : numpy.ndarray
        ``[batch, heads, chunk_len, head_dim]``, dtype of `prior`.
    offset : int
        First token replaced; ``offset + chunk_len <= capacity``.
    dtype : {"float32", "float16", "bfloat16"}, optional
        Meaning of the elements where NumPy cannot say it: ``"bfloat16"`` for uint16 arrays. Arrays of the
        ``ml_dtypes`` type of that name need none.

    Returns
    -------
    numpy.ndarray
        Shape and dtype of `prior`, C-contiguous.

    Raises
    ------
    EmptyShape, UnsupportedDtype, Range, ElementCountOverflow
        In this order of checks, as in the source (vyre ``kv_cache_append_typed``).
    BadDimError
        The arrays are not 4-dimensional, or their batch, heads or head_dim differ.

    Examples
    --------
    >>> import numpy as np, pagedkv as pk
    >>> prior = np.zeros((1, 1, 3, 2), np.float32)
    >>> pk.kv_cache_append(prior, np.ones((1, 1, 1, 2), np.float32), offset=1)[0, 0].tolist()
    [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    """
    prior, chunk = np.asarray(prior), np.asarray(chunk)
    if prior.ndim != 4 or chunk.ndim != 4:
        raise BadDimError("cache and chunk are [batch, heads, tokens, head_dim], not arrays of "
                          f"{prior.ndim} and {chunk.ndim} dimensions")
    if 0 in prior.shape or 0 in chunk.shape:
        raise EmptyShape(f"cache {list(prior.shape)} and chunk {list(chunk.shape)} need nonzero batch, heads, "
                         "tokens and head_dim", (_core.KvaStatus.KVA_ERR_EMPTY_SHAPE,))
    kind = str(dtype if dtype is not None else prior.dtype)
    stored = {"float32": "float32", "float16": "float16", "bfloat16": "uint16"}.get(kind)
    if stored is None or str(prior.dtype) not in (stored, kind) or chunk.dtype != prior.dtype:
        raise UnsupportedDtype("the cache holds float32, float16 or bfloat16 and the chunk the same; got "
                               f"{prior.dtype} and {chunk.dtype}" + (f" as {kind}" if dtype is not None else ""),
                               (_core.KvaStatus.KVA_ERR_UNSUPPORTED_DTYPE,))
    if (prior.shape[0], prior.shape[1], prior.shape[3]) != (chunk.shape[0], chunk.shape[1], chunk.shape[3]):
        raise BadDimError(f"cache {list(prior.shape)} and chunk {list(chunk.shape)} differ in more than tokens")
    batch, heads, capacity, head_dim = prior.shape
    chunk_len, offset = chunk.shape[2], operator.index(offset)
    if offset < 0 or offset + chunk_len > capacity:
        raise Range(f"offset {offset} and chunk_len {chunk_len} exceed capacity {capacity}",
                    (_core.KvaStatus.KVA_ERR_RANGE,))
    if batch * heads * capacity * head_dim > _U32:
        raise ElementCountOverflow(f"{batch} x {heads} x {capacity} x {head_dim} elements exceed 2**32 - 1; shard "
                                   "the cache", (_core.KvaStatus.KVA_ERR_ELEMENT_COUNT_OVERFLOW,))
    out = np.empty(prior.shape, prior.dtype)
    token_nbytes = head_dim * prior.itemsize

    def as_bytes(array):
        return np.ascontiguousarray(array).view(np.uint8).reshape(batch * heads, -1, token_nbytes)

    _core.kv_cache_append(as_bytes(prior), as_bytes(chunk), as_bytes(out), token_nbytes, offset)
    return out
