"""Exceptions. Every module may import this one; it imports nothing of the package.

A status code of the C layer becomes an exception that carries it. After any of
them the pool, every sequence and the model are as they were before the call.
"""

from collections.abc import Iterable
from enum import IntEnum
from typing import Any


class PagedKVError(Exception):
    """Base of all errors raised on purpose by pagedkv.

    Parameters
    ----------
    message : str
        One sentence with the numbers ("needs 7 blocks, 3 of 64 are free").
    chain : sequence of IntEnum, optional
        Status codes, outermost first, for example
        ``(FLV4_ERR_STACK, STK4_ERR_LAYER, PKV_ERR_EXHAUST)``.

    Attributes
    ----------
    chain : tuple of IntEnum
        The statuses as given; empty where no C function reported one.
    status : IntEnum or None
        The innermost status, ``chain[-1]``.
    """

    def __init__(self, message: str, chain: Iterable[IntEnum] = ()) -> None:
        self.chain = tuple(chain)
        self.message = message
        names = " < ".join(status.name for status in reversed(self.chain))
        super().__init__(f"{message} [{names}]" if names else message)

    @property
    def status(self) -> IntEnum | None:
        return self.chain[-1] if self.chain else None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.chain)


class PoolExhausted(PagedKVError):
    """The pool has fewer free blocks than the call needs."""


class BoundsError(PagedKVError, IndexError):
    """A block, layer, row, length or sequence is outside its range."""


class BadDimError(PagedKVError, ValueError):
    """A dimension is not positive, or two that must agree differ."""


class BadGQAError(PagedKVError, ValueError):
    """``n_heads`` is not a multiple of ``n_kv_heads``."""


class NullError(PagedKVError, ValueError):
    """A required object is missing or was freed."""


class TokenError(PagedKVError, ValueError):
    """A token id is outside ``[0, vocab_size)``."""


class FormatError(PagedKVError, ValueError):
    """A model file is damaged, contradicts itself, or is of a kind not read here."""


class KvCacheAppendError(PagedKVError, ValueError):
    """Base of the four errors of :func:`pagedkv.kv_cache_append`."""


class EmptyShape(KvCacheAppendError):
    """A dimension of the cache or the chunk is zero."""


class Range(KvCacheAppendError, IndexError):
    """The chunk does not fit into the cache at this offset."""


class ElementCountOverflow(KvCacheAppendError, OverflowError):
    """The flattened element count does not fit 32 bits."""


class UnsupportedDtype(KvCacheAppendError, TypeError):
    """The elements are not float32, float16 or bfloat16."""
