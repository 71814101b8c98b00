"""Several continuations of one prompt, from one prefill."""

import numpy as np


def generate(model, pool, prompt_ids, n, max_tokens, sampling, stop_ids=()):
    """Continue a prompt `n` times; yield tokens as they come.

    The prompt is prefilled once and its blocks are shared by fork; every step decodes one token for each
    sample that has not ended.

    Parameters
    ----------
    model : LlamaModel
    pool : BlockPool
        With room for the prompt once and for each sample's own blocks.
    prompt_ids : list of int
    n : int
        Samples.
    max_tokens : int
        Tokens a sample, at most; at least 1.
    sampling : Sampling
    stop_ids : container of int
        Tokens that end a sample.

    Yields
    ------
    list of (int, int, bool)
        For one step: sample, token id, and whether the sample ends with this token.

    Raises
    ------
    PagedKVError
        From :meth:`LlamaModel.step`.

    Notes
    -----
    Closing the generator gives all blocks back.
    """
    seqs = []
    try:
        seqs.append(model.new_sequence(pool, len(prompt_ids) + max_tokens))
        logits = np.broadcast_to(model.prefill(prompt_ids, seqs[0]), (n, model.config.vocab_size))
        seqs += [seqs[0].fork() for _ in range(n - 1)]
        buffer = np.empty((n, model.config.vocab_size), np.float32)  # reused: a fresh one costs page faults
        alive = list(range(n))
        for n_done in range(1, max_tokens + 1):
            position = len(prompt_ids) + n_done - 1
            chosen = [(i, sampling.choose(row, i, position)) for i, row in zip(alive, logits)]
            events = [(i, token, token in stop_ids or n_done == max_tokens) for i, token in chosen]
            yield events
            going = [(i, token) for i, token, ends in events if not ends]
            if not going:
                return
            alive = [i for i, _ in going]
            logits = model.decode_step([token for _, token in going], [seqs[i] for i in alive], buffer[: len(going)])
    finally:
        for seq in seqs:
            seq.free()
