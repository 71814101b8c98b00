"""Sequences that share blocks read them once in a step, and each gets the bits that it gets alone."""

import numpy as np
import pytest

import pagedkv as pk
import tiny
from promise_rows import assert_same_bits


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny.tiny_config()
    path = tiny.write_hf(tmp_path_factory.mktemp("sharing"), config, tiny.tiny_tensors(config, 5))
    return pk.LlamaModel.load(path)


def alone(model, tokens):
    """Logits of every token, one sequence in a pool of its own, on one thread."""
    threads = pk.get_num_threads()
    pk.set_num_threads(1)
    try:
        return model.prefill(tokens, model.new_sequence(model.new_pool(n_tokens=len(tokens)), len(tokens)),
                             all_logits=True)
    finally:
        pk.set_num_threads(threads)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("n_prompt", [1, 15, 254, 255, 256, 257, 511, 512, 513, 700])
def test_forks_of_one_prompt_around_the_edges_of_chunks(model, threads, n_threads, n_prompt):
    threads(n_threads)
    rng = np.random.default_rng(n_prompt)
    prompt, n = rng.integers(0, model.config.vocab_size, n_prompt), 9
    steps = rng.integers(0, model.config.vocab_size, (4, n))
    first = model.new_sequence(model.new_pool(n_tokens=n_prompt + 40 * n), n_prompt + 8)
    model.prefill(prompt, first)
    seqs = [first] + [first.fork() for _ in range(n - 1)]
    logits = [model.decode_step(tokens, seqs) for tokens in steps]
    for i in (0, 1, n - 1):
        expected = alone(model, np.concatenate([prompt, steps[:, i]]))[n_prompt:]
        assert_same_bits(np.stack([row[i] for row in logits]), expected)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_a_tree_of_forks_with_strangers_between(model, block_size):
    """Groups that split chunk by chunk, rows of many tokens and other pools in one step."""
    rng = np.random.default_rng(block_size)
    vocab = model.config.vocab_size
    pool, other_pool = (model.new_pool(n_tokens=12000, block_size=block_size) for _ in range(2))
    texts, seqs = [], []

    def grow(seq, text, n):
        more = rng.integers(0, vocab, n)
        model.prefill(more, seq)
        texts.append(np.concatenate([text, more]))
        seqs.append(seq)

    grow(model.new_sequence(pool, 3000), np.empty(0, np.int64), 300)
    for parent, n in ((0, 250), (0, 250), (1, 300), (1, 1), (3, 513), (3, 20), (2, 270)):
        grow(seqs[parent].fork(), texts[parent], n)
    grow(model.new_sequence(pool, 3000), np.empty(0, np.int64), 600)
    grow(model.new_sequence(other_pool, 3000), np.empty(0, np.int64), 700)
    seqs[5].truncate(len(seqs[5]) - 7)
    texts[5] = texts[5][:-7]
    new = [rng.integers(0, vocab, n) for n in (1, 1, 1, 1, 1, 1, 3, 1, 1, 1)]
    logits = model.step(list(zip(seqs, new)))
    for text, tokens, row in zip(texts, new, logits):
        assert_same_bits(row, alone(model, np.concatenate([text, tokens]))[-1])


def test_two_forks_whose_last_block_parts_in_this_very_step(model):
    """The shared tail ends a chunk: it looks shared when the step is planned and is not when it runs."""
    rng = np.random.default_rng(3)
    prompt, tokens = rng.integers(0, model.config.vocab_size, 255), [1, 2]
    first = model.new_sequence(model.new_pool(n_tokens=600), 300)
    model.prefill(prompt, first)
    logits = model.decode_step(tokens, [first, first.fork()])
    for token, row in zip(tokens, logits):
        assert_same_bits(row, alone(model, [*prompt, token])[-1])
