"""Batched Llama decoding on CPUs over a paged KV cache, in which how a token was computed never shows in its bits."""

import os as _os
import sys as _sys


def _is_the_command() -> bool:
    """Whether Python was started as ``pagedkv ...`` or ``python -m pagedkv ...``."""
    name = _os.path.basename(_sys.argv[0]) if getattr(_sys, "argv", None) else ""
    return name in ("pagedkv", "pagedkv.exe") or (name == "-m" and "pagedkv" in _sys.orig_argv)


try:
    from pagedkv.threads import set_num_threads  # isort: skip  (first: it loads the core)
except ValueError as _error:  # an environment variable
    if not _is_the_command():
        raise
    if _sys.stderr is not None:
        print(f"pagedkv: error: {_error}", file=_sys.stderr)
    _sys.exit(2)
from pagedkv._core import (
    ApStatus,
    Blk4Status,
    Flv4Status,
    KvaStatus,
    PkvStatus,
    Stk4Status,
    available_isas,
    get_num_threads,
    isa,
)
from pagedkv.attention import attention, paged_attention
from pagedkv.config import LlamaConfig
from pagedkv.engine import LLM, AsyncLLM, CompletionOutput, Logprob, PoolMap, PoolRecord, RequestOutput, SamplingParams
from pagedkv.errors import (
    BadDimError,
    BadGQAError,
    BoundsError,
    ElementCountOverflow,
    EmptyShape,
    FormatError,
    KvCacheAppendError,
    NullError,
    PagedKVError,
    PoolExhausted,
    Range,
    TokenError,
    UnsupportedDtype,
)
from pagedkv.hub import ModelNotFound
from pagedkv.model import LlamaModel
from pagedkv.ops import PackedWeight, dot, exp, kv_cache_append, matmul, pack, rmsnorm, rope, softmax, swiglu
from pagedkv.pool import BlockPool
from pagedkv.rope import rope_inv_freq
from pagedkv.scoring import Score, score
from pagedkv.sequence import PagedKVIndices, Sequence, SequenceHeader, paged_kv_indices
from pagedkv.tokenizer import Tokenizer

__all__ = [
    "ApStatus", "AsyncLLM", "BadDimError", "BadGQAError", "Blk4Status", "BlockPool", "BoundsError", "CompletionOutput",
    "ElementCountOverflow", "EmptyShape", "Flv4Status", "FormatError", "KvCacheAppendError", "KvaStatus", "LLM",
    "LlamaConfig", "LlamaModel", "Logprob", "ModelNotFound", "NullError", "PackedWeight", "PagedKVError",
    "PagedKVIndices", "PkvStatus", "PoolExhausted", "PoolMap", "PoolRecord", "Range", "RequestOutput", "SamplingParams", "Score", "Sequence",
    "SequenceHeader", "Stk4Status", "TokenError", "Tokenizer", "UnsupportedDtype", "attention", "available_isas", "dot",
    "exp", "get_include", "get_num_threads", "isa", "kv_cache_append", "matmul", "pack", "paged_attention",
    "paged_kv_indices", "rmsnorm", "rope", "rope_inv_freq", "score", "set_num_threads", "softmax", "swiglu",
]  # fmt: skip
__version__ = "0.1.0"


def get_include() -> str:
    """Directory of the C headers: ``#include "pagedkv/pool.h"`` and its neighbours."""
    here = _os.path.dirname(_os.path.abspath(__file__))
    installed = _os.path.join(here, "include")
    return installed if _os.path.isdir(installed) else _os.path.join(_os.path.dirname(here), "include")
