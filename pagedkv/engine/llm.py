"""LLM: a list of prompts in, their continuations out, in vLLM's shape."""

import operator
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from pagedkv.engine.core import Engine
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.pool_map import PoolMap, PoolRecord
from pagedkv.engine.speculation import read_speculative
from pagedkv.errors import PagedKVError
from pagedkv.model import LlamaModel
from pagedkv.pool import BlockPool
from pagedkv.progress import progress_bar
from pagedkv.threads import set_num_threads

Message = Mapping[str, Any]
Prompt = str | Iterable[int] | Mapping[str, Any]
Prompts = Prompt | Iterable[Prompt]
Params = SamplingParams | Iterable[SamplingParams] | None


_LLMS = weakref.WeakSet()  # whose locks a forked child makes anew


class Torn:
    """In place of an engine's lock, where a fork caught another thread inside it: what it holds is half done."""

    def refuse(self):
        raise RuntimeError("this process was forked while another thread was inside a step of this LLM, which is half "
                           "done here for good; make another one over the same model: LLM(llm.model)")  # fmt: skip

    def __enter__(self):
        self.refuse()

    def __exit__(self, *_):
        pass


def _after_fork():
    for llm in _LLMS:
        llm._lock = Torn() if llm._engine.n_inside else threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class LLM:
    """A model with an engine over one pool.

    Scheduling never shows in the output: with a pool of 24 blocks or of 4,096, with the prefix cache or without, alone
    or among others, a request gives the same tokens and the same log-probabilities, to the last bit.

    Parameters
    ----------
    model : str, os.PathLike or LlamaModel
        As of :meth:`LlamaModel.load`, or a model that is loaded already.
    n_blocks : int, optional
        Blocks of the pool; by default `max_num_seqs` full contexts, or less where half of the available memory (the
        cgroup's limit counts) holds less. The system gives the memory as it is written.
    kv_dtype : str
        Type of the pool's rows.
    block_size : int
        Tokens in a block.
    max_num_seqs : int
        Sequences that run at the same time. From some 16 rows on a step is bound by arithmetic: more than 64 would make
        all wait longer, and be no faster.
    max_num_batched_tokens : int
        Rows of a step: decodes and chunks of prompts together. 512 is what the core computes in one pass.
    enable_prefix_caching : bool
        Keep the rows of full blocks for later prompts that begin alike.
    speculative : str, LlamaModel or dict, optional
        Guess tokens to come and check several in one step: faster where guesses are right, and the same text, whatever
        they are. ``"ngram"``: what followed the last tokens before, in the prompt or in the text, follows again; for
        texts that repeat themselves. A model: what it says; it needs the same vocabulary, and to be much faster. A dict
        has vLLM's names: ``method`` (``"ngram"``, ``"draft_model"``), ``model``, ``num_speculative_tokens``,
        ``prompt_lookup_max``, ``prompt_lookup_min``.
    num_threads : int, optional
        As of :func:`pagedkv.set_num_threads`, which holds for the process.
    seed : int
        From it requests get seeds whose own is None, by their order of arrival.
    weights, compute : str, optional
        As of :meth:`LlamaModel.load`, by default its defaults. Of a model that is loaded already, `weights` cannot be
        chosen any more, and another `compute` than its own is an error.

    Attributes
    ----------
    model : LlamaModel
    pool : BlockPool
    max_model_len : int
        Tokens that a prompt and its continuation may have: what the model's context, and the pool, hold.

    Notes
    -----
    Several Python threads may call one object: their requests run together. In a child of ``os.fork`` it works on, with
    one thread; where the fork came while another thread was inside a step, its calls raise RuntimeError. Continuous
    batching: Yu et al. 2022; the names are those of vLLM (Kwon et al. 2023).

    Examples
    --------
    >>> import pagedkv as pk
    >>> llm = pk.LLM("smollm2-135m")                                                    # doctest: +SKIP
    >>> params = pk.SamplingParams(temperature=0, max_tokens=3)                         # doctest: +SKIP
    >>> [out.outputs[0].text for out in llm.generate(["The capital of France is"], params)]   # doctest: +SKIP
    [' Paris.\\n']
    """

    def __init__(self, model: str | os.PathLike[str] | LlamaModel, n_blocks: int | None = None, kv_dtype: str = "float32",
                 block_size: int = 16, max_num_seqs: int = 64, max_num_batched_tokens: int = 512,
                 enable_prefix_caching: bool = True, speculative: str | LlamaModel | dict[str, Any] | None = None,
                 num_threads: int | None = None, seed: int = 0, weights: str | None = None, compute: str | None = None) -> None:
        if num_threads is not None:
            set_num_threads(num_threads)
        model = _load(model, weights, compute)
        max_num_seqs = operator.index(max_num_seqs)
        pool = model.new_pool(n_blocks=n_blocks, block_size=block_size, dtype=kv_dtype, n_seqs=max_num_seqs)
        drafter = read_speculative(speculative, model, pool.n_blocks * pool.block_size, pool.block_size)
        self._engine = Engine(model, pool, max_num_seqs, operator.index(max_num_batched_tokens), enable_prefix_caching,
                              seed, drafter)  # fmt: skip
        # Held for a step, and while requests come and go. Reentrant: the collector may close a stream inside a step.
        self._lock = threading.RLock()
        _LLMS.add(self)

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied: its weights and blocks are memory of this "
                        "process; make one there")  # fmt: skip

    @property
    def model(self) -> LlamaModel:
        return self._engine.model

    @property
    def pool(self) -> BlockPool:
        return self._engine.pool

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def stats(self) -> dict[str, Any]:
        """What the engine does now and has done; see :meth:`pagedkv.engine.core.Engine.stats`."""
        with self._lock:
            self._engine.settle()
            return self._engine.stats()

    def pool_map(self) -> PoolMap:
        """Who owns each block now, between two steps: counts and ids, no texts."""
        with self._lock:
            self._engine.settle()
            return self._engine.pool_map()

    @contextmanager
    def record_pool(self) -> Iterator[PoolRecord]:
        """Keep the map of the pool at its fullest, of all steps inside the ``with``: a run that ends frees its blocks.

        Yields
        ------
        PoolRecord
            Its `fullest` is the map; a notebook draws it.

        Examples
        --------
        >>> with llm.record_pool() as record:                                           # doctest: +SKIP
        ...     outputs = llm.generate("Once upon a time", pk.SamplingParams(n=8))
        >>> record.fullest.figure().savefig("pool.png")                                 # doctest: +SKIP
        """
        record = PoolRecord()
        with self._lock:
            self._engine.records.append(record)
        try:
            yield record
        finally:
            self._engine.records.remove(record)

    def generate(self, prompts: Prompts, sampling_params: Params = None, use_tqdm: bool = True) -> list[RequestOutput]:
        """Continue prompts.

        Parameters
        ----------
        prompts : str, list of int, dict, or a list of these
            Texts, token ids, or vLLM's ``{"prompt": text}`` and ``{"prompt_token_ids": ids}``.
        sampling_params : SamplingParams or list of SamplingParams, optional
            One for all, or one a prompt.
        use_tqdm : bool
            Show a progress bar.

        Returns
        -------
        list of RequestOutput
            In the order of the prompts.

        Raises
        ------
        ValueError, TokenError, BoundsError, PoolExhausted
            A prompt can never run; all are checked before the first step, and the message names which. Whatever is
            raised, Ctrl-C too, ends all requests of this call, and gives their blocks back.
        """
        requests = []
        try:
            with self._lock:
                self._add_all(self._read_all(prompts, sampling_params), requests)
            going = list(enumerate(requests))
            with _bar(len(requests), use_tqdm) as bar:
                while going:
                    self._step([request for _, request in going])
                    for i, request in going:
                        if request.error is not None:
                            raise _of_prompt(i, request.error)
                    still = [(i, request) for i, request in going if not request.finished]
                    bar.update(len(going) - len(still))
                    going = still
        except BaseException:
            try:
                self._end(requests)
            finally:
                self._end(requests)  # once more, where Ctrl-C cut that off
            raise
        return [request.output() for request in requests]

    def chat(self, messages: Iterable[Message] | Iterable[Iterable[Message]], sampling_params: Params = None,
             use_tqdm: bool = True, add_generation_prompt: bool = True, **variables: Any) -> list[RequestOutput]:
        """Answer conversations.

        Parameters
        ----------
        messages : list of dict, or a list of such lists
            ``{"role": "user", "content": "Hi"}`` and so on.
        sampling_params, use_tqdm
            As of :meth:`generate`.
        add_generation_prompt : bool
            End with the opening of the assistant's turn.
        **variables
            Further names for the template.

        Returns
        -------
        list of RequestOutput
            Their `prompt` is the conversation as the template wrote it.
        """
        messages = list(messages)
        if messages and isinstance(messages[0], Mapping):
            messages = [messages]
        variables["add_generation_prompt"] = add_generation_prompt
        both = [self._render(each, **variables) for each in messages]
        prompts = [{"prompt": text, "prompt_token_ids": ids} for text, ids in both]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompts: Prompts, sampling_params: Params = None) -> Iterator[RequestOutput]:
        """Continue prompts, and yield what is new after each step.

        Parameters
        ----------
        prompts, sampling_params
            As of :meth:`generate`.

        Yields
        ------
        RequestOutput
            With `text`, `token_ids` and `logprobs` that came since the request's last one. Text that may be the
            beginning of a stop text, or of a character, is held back until it is clear. A prompt that can never run
            yields one output with `error` and ends; the others go on. ``request_id`` counts up in the prompts' order.

        Notes
        -----
        Closing the generator ends the requests.
        """
        requests = []
        try:
            with self._lock:
                self._add_all(self._read_all(prompts, sampling_params, check=False), requests)
            going = list(requests)
            while going:
                for request in going:
                    if request.has_news:
                        yield request.output(delta=True)
                going = [request for request in going if request.has_news or not request.finished]
                if going:
                    self._step(going)
        except BaseException:
            try:
                self._end(requests)
            finally:
                self._end(requests)  # once more, where Ctrl-C cut that off
            raise

    # ---- Requests -----------------------------------------------------------------------------------

    def _read_all(self, prompts, sampling_params, check=True):
        """A list of (prompt, prompt_ids, params, error)."""
        if isinstance(prompts, (str, Mapping)) or _is_ids(prompts):
            prompts = [prompts]
        prompts = list(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        sampling_params = list(sampling_params)
        if len(sampling_params) != len(prompts):
            raise ValueError(f"{len(sampling_params)} sampling_params for {len(prompts)} prompts")
        entries = []
        for i, (prompt, params) in enumerate(zip(prompts, sampling_params)):
            if not isinstance(params, SamplingParams):
                raise TypeError(f"sampling_params of prompt {i} is a {type(params).__name__}, not a SamplingParams")
            text, ids, error = None, [], None
            try:
                text, ids = self._read(prompt)
                self._engine.check(ids, params)
            except (PagedKVError, ValueError) as refusal:
                error = refusal
            if check and error is not None:
                raise _of_prompt(i, error)
            entries.append((text, ids, params, error))
        return entries

    def _read(self, prompt):
        """The text, None where there is none, and the ids of a prompt."""
        if isinstance(prompt, str):
            return prompt, self.model.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _ids(prompt["prompt_token_ids"])
            if isinstance(prompt.get("prompt"), str):
                return self._read(prompt["prompt"])
            raise ValueError('a dict needs "prompt", a text, or "prompt_token_ids"')
        return None, _ids(prompt)

    def _render(self, messages, **variables):
        """A conversation as text and ids; the template writes the beginning-of-text token itself."""
        tokenizer = self.model.tokenizer
        text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        return text, tokenizer.encode(text, add_special_tokens=False)

    def _add_all(self, entries, requests):
        """Start requests, each once it stands in the list of those that the call will end."""
        for text, ids, params, error in entries:
            if error is None:
                requests.append(self._engine.request(text, ids, params))
                self._engine.start(requests[-1])
            else:
                requests.append(self._engine.refused(text, ids, params, error))

    def _step(self, requests):
        """One step, unless another thread's steps have brought all of these to their ends already."""
        with self._lock:
            if not all(request.finished for request in requests):
                self._engine.step()

    def _end(self, requests):
        """End what has not ended. Ctrl-C may cut this off, before its first line too: who calls it calls it again."""
        with self._lock:
            for request in requests:
                if not request.finished:
                    self._engine.abort(request)


def _load(model, weights, compute):
    """The model, loaded if it is not, with these choices where they are made."""
    if not isinstance(model, LlamaModel):
        chosen = {"weights": weights, "compute": compute}
        return LlamaModel.load(model, **{name: value for name, value in chosen.items() if value is not None})
    if weights is not None:
        raise ValueError(f"weights={weights!r} is chosen when a model is loaded, and this one is loaded already")
    if compute not in (None, model.compute):
        raise ValueError(f"compute={compute!r}, but the model is loaded already, with compute={model.compute!r}")
    return model


def _is_ids(prompt):
    """Whether this is one prompt's ids, and not a list of prompts."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and all(_is_id(token) for token in prompt)


def _is_id(token):
    return isinstance(token, (int, np.integer)) and not isinstance(token, bool)


def _ids(prompt):
    if isinstance(prompt, (str, bytes)) or not hasattr(prompt, "__iter__"):
        raise TypeError(f"a prompt is a text, a list of token ids or a dict, not {type(prompt).__name__}")
    return [operator.index(token) for token in prompt]


def _of_prompt(i, error):
    """The error, saying of which prompt."""
    if isinstance(error, PagedKVError):
        return type(error)(f"prompt {i}: {error.message}", error.chain)
    return type(error)(f"prompt {i}: {error}") if type(error) in (ValueError, TypeError) else error


def _bar(n, use_tqdm):
    return progress_bar(total=n, desc="prompts", dynamic_ncols=True, disable=not use_tqdm)
