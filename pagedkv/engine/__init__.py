"""Requests become steps: LLM and AsyncLLM over one pool, with vLLM's names."""

from pagedkv.engine.async_llm import AsyncLLM
from pagedkv.engine.llm import LLM
from pagedkv.engine.outputs import CompletionOutput, Logprob, RequestOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.pool_map import PoolMap, PoolRecord

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Logprob", "PoolMap", "PoolRecord", "RequestOutput", "SamplingParams"]
