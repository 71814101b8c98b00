"""Several continuations of one prompt, from one prefill."""

import operator

import numpy as np


def blocks_needed(n_prompt, n, max_tokens, block_size=16):
    """Blocks that :func:`generate` takes at most.

    The prompt's full blocks once, then each sample's own. A sample's last token is not fed back, so it
    needs no row.

    Parameters
    ----------
    n_prompt : int
        Tokens of the prompt.
    n, max_tokens : int
        As of :func:`generate`.
    block_size : int
        Of the pool.

    Returns
    -------
    int

    Examples
    --------
    >>> blocks_needed(n_prompt=20, n=4, max_tokens=13)   # one shared; rows 16..31 of each sample
    5
    """
    if max_tokens == 1:
        return -(-n_prompt // block_size)
    n_shared = n_prompt // block_size
    return n_shared + n * (-(-(n_prompt + max_tokens - 1) // block_size) - n_shared)


def generate(model, pool, prompt_ids, n, max_tokens, sampling, stop_ids=()):
    """Continue a prompt `n` times; yield tokens as they come.

    The prompt is prefilled once and its blocks are shared by fork; every step decodes one token for each
    sample that has not ended.

    Parameters
    ----------
    model : LlamaModel
    pool : BlockPool
        With :func:`blocks_needed` blocks free.
    prompt_ids : list of int
        At least one.
    n : int
        Samples.
    max_tokens : int
        Tokens a sample, at most; at least 1.
    sampling : SamplingParams
        Of which :meth:`~pagedkv.SamplingParams.choose` is asked for each token.
    stop_ids : container of int
        Tokens that end a sample.

    Returns
    -------
    generator of list of (int, int, bool)
        For one step: sample, token id, and whether the sample ends with this token. A sample's tokens do
        not depend on `n`.

    Raises
    ------
    ValueError
        `n` or `max_tokens` is not positive, or the prompt is empty; at once.
    PagedKVError
        From :meth:`LlamaModel.step`; while iterating.

    Notes
    -----
    While the consumer holds a step's list, the blocks of all its samples are still taken: that is the moment
    to read ``pool.n_free`` and ``pool.n_saved``. Those of samples that ended are given back when the next
    list is asked for, and all of them when the generator ends, fails or is closed.

    Examples
    --------
    >>> import pagedkv as pk
    >>> from pagedkv.generate import blocks_needed, generate
    >>> model = pk.LlamaModel.load("smollm2-135m")                            # doctest: +SKIP
    >>> ids = model.tokenizer.encode("The capital of France is")              # doctest: +SKIP
    >>> pool = model.new_pool(n_blocks=blocks_needed(len(ids), 2, 3))         # doctest: +SKIP
    >>> texts = [[], []]
    >>> for events in generate(model, pool, ids, n=2, max_tokens=3, sampling=pk.SamplingParams(temperature=0),
    ...                        stop_ids=model.config.eos_token_ids):          # doctest: +SKIP
    ...     for sample, token, ends in events:
    ...         texts[sample].append(token)
    >>> [model.tokenizer.decode(tokens) for tokens in texts]                  # doctest: +SKIP
    [' Paris.\\n', ' Paris.\\n']
    """
    n, max_tokens, prompt_ids = operator.index(n), operator.index(max_tokens), list(prompt_ids)
    if n < 1 or max_tokens < 1:
        raise ValueError(f"n and max_tokens must be at least 1, not {n} and {max_tokens}")
    if not prompt_ids:
        raise ValueError("the prompt has no tokens")
    return _steps(model, pool, prompt_ids, n, max_tokens, sampling, stop_ids)


def _steps(model, pool, prompt_ids, n, max_tokens, sampling, stop_ids):
    seqs = {}  # of the samples that have not ended
    try:
        seqs[0] = model.new_sequence(pool, len(prompt_ids) + max_tokens)
        logits = model.prefill(prompt_ids, seqs[0])
        for i in range(1, n):
            seqs[i] = seqs[0].fork()
        rows = [logits] * n
        buffer = None
        for position in range(len(prompt_ids), len(prompt_ids) + max_tokens):
            is_last = position == len(prompt_ids) + max_tokens - 1
            chosen = [(i, sampling.choose(row, i, position)) for i, row in zip(seqs, rows)]
            events = [(i, token, is_last or token in stop_ids) for i, token in chosen]
            yield list(events)
            for i, _, ends in events:
                if ends:
                    seqs.pop(i).free()
            if not seqs:
                return
            if buffer is None:
                buffer = np.empty((len(seqs), model.config.vocab_size), np.float32)  # a fresh one costs page faults
            going = [token for _, token, ends in events if not ends]
            rows = model.decode_step(going, seqs.values(), buffer[: len(going)])
    finally:
        for seq in seqs.values():
            seq.free()
