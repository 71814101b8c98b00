"""Scores of continuations: against float64 of rows computed alone, and the same however pairs are put together."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedkv as pk
import promise_rows
import tiny
from promise_rows import rows_alone, token_stream

N_VOCAB = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny.tiny_config(n_heads=4, n_kv_heads=2, head_dim=32)
    return pk.LlamaModel.load(tiny.write_hf(tmp_path_factory.mktemp("score"), config, tiny.tiny_tensors(config, 4)))


def log_softmax(logits):
    """In float64 by another way: NumPy's logaddexp, in its own order."""
    x = logits.astype(np.float64)
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a[:2] == b[:2] and a.token_logprobs.tolist() == b.token_logprobs.tolist()


def one_by_one(model, pairs):
    return [pk.score(model, [pair])[0] for pair in pairs]


def check_against_rows(model, pairs, scores, kv_dtype="float32"):
    for (context, continuation), got in zip(pairs, scores):
        ids = [*context, *continuation]
        logits = rows_alone(model, ids, 64, kv_dtype).logits[len(context) - 1:-1]
        want = log_softmax(logits)[np.arange(len(continuation)), continuation]
        np.testing.assert_allclose(got.token_logprobs, want, rtol=0, atol=1e-12)
        assert got.token_logprobs.dtype == np.float64 and got.logprob == math.fsum(got.token_logprobs)
        assert got.is_greedy is (logits.argmax(1).tolist() == list(continuation))


def greedy(model, context, n):
    seq = model.new_sequence(model.new_pool(n_tokens=200))
    logits, out = model.prefill(context, seq), []
    for _ in range(n):
        out.append(int(logits.argmax()))
        logits = model.decode_step(out[-1:], [seq])[0]
    return out


def multiple_choice(seed, n_questions=3, n_shots=20):
    """Contexts that begin alike, each with four choices, among them one of a single token and two that begin alike."""
    shots = token_stream(seed, n_shots, N_VOCAB).tolist()
    pairs = []
    for i in range(n_questions):
        context = shots + token_stream(100 * seed + i, 7 + 5 * i, N_VOCAB).tolist()
        pairs += [(context, choice) for choice in ([3], [3, 4, 5], [3, 4, 6, 7], token_stream(i, 9, N_VOCAB).tolist())]
    return pairs


def test_scores_are_those_of_rows_alone(model):
    pairs = multiple_choice(1)
    pairs.append((pairs[0][0], greedy(model, pairs[0][0], 6)))
    scores = pk.score(model, pairs)
    check_against_rows(model, pairs, scores)
    assert scores[-1].is_greedy and not scores[1].is_greedy
    assert_same(one_by_one(model, pairs), scores)


@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_the_pool_s_type_counts(model, dtype):
    pairs = multiple_choice(2)
    check_against_rows(model, pairs, pk.score(model, pairs, model.new_pool(n_tokens=600, dtype=dtype)), dtype)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("step_rows", [1, 7, 256])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_pools_steps_and_threads_do_not_show(model, threads, block_size, step_rows, n_threads):
    pairs = multiple_choice(3)
    want = one_by_one(model, pairs)
    threads(n_threads)
    longest = max(len(context) + len(continuation) - 1 for context, continuation in pairs)
    for spare in (0, 1, 3, 50):
        pool = model.new_pool(n_blocks=-(-longest // block_size) + spare, block_size=block_size)
        assert_same(pk.score(model, pairs, pool, step_rows), want)
        assert pool.n_free == pool.n_blocks


ids = st.lists(st.integers(0, 2), max_size=9)


@settings(max_examples=60)
@given(pairs=st.lists(st.tuples(ids.filter(len), ids), max_size=7), block_size=st.sampled_from([1, 2, 4, 16]),
       step_rows=st.integers(1, 20), spare=st.integers(0, 12))  # fmt: skip
def test_any_pairs_in_any_pool(model, pairs, block_size, step_rows, spare):
    """Few tokens, so that pairs share much: contexts that begin others, pairs twice, cuts in the middle of a block."""
    longest = max((len(context) + len(continuation) - 1 for context, continuation in pairs), default=1)
    pool = model.new_pool(n_blocks=max(1, -(-longest // block_size)) + spare, block_size=block_size)
    got = pk.score(model, pairs, pool, step_rows)
    assert pool.n_free == pool.n_blocks
    assert_same(got, one_by_one(model, pairs))


def test_what_is_shared_is_computed_once(model, monkeypatch):
    pairs, n_rows, step = multiple_choice(4), [], pk.LlamaModel.step

    def counted(self, rows, *args, **options):
        n_rows.append(sum(len(tokens) for _, tokens in rows))
        return step(self, rows, *args, **options)

    monkeypatch.setattr(pk.LlamaModel, "step", counted)
    pool = model.new_pool(n_tokens=1000)
    pk.score(model, pairs, pool)
    # 20 shots, 7 + 12 + 17 of the questions, and for each: [3, 4] or [3, 4, 6] shared, and 8 of the last choice.
    assert sum(n_rows) == 20 + 36 + 3 * (3 + 8) and max(n_rows) <= 256
    assert len(n_rows) <= 5  # the shots, the questions, the choices up to where they part, and what is left of them
    n_rows.clear()
    pk.score(model, pairs, pool, step_rows=10)
    assert sum(n_rows) == 20 + 36 + 3 * (3 + 8) and max(n_rows) == 10


def test_empty_ones(model):
    assert pk.score(model, []) == []
    (nothing,) = pk.score(model, [([1, 2], [])], model.new_pool(n_blocks=1))
    assert nothing[:2] == (0.0, True) and nothing.token_logprobs.shape == (0,)
    pairs = [([1], []), ([1], [2]), ([1], [])]
    assert_same(pk.score(model, pairs), one_by_one(model, pairs))


def test_what_is_refused_changes_nothing(model):
    pool = model.new_pool(n_blocks=2)
    held = model.new_sequence(pool)
    held.ensure_append(1)
    fits = ([1] * 16, [2])
    for pairs, error, match in [
        ([fits, ([], [1])], ValueError, "pair 1 has no context"),
        ([fits, ([1], [128])], pk.TokenError, "token 128 of pair 1"),
        ([([-1], [2])], pk.TokenError, "token -1 of pair 0"),
        ([fits, ([1] * 16, [2, 3])], pk.PoolExhausted, "pair 1 needs 2 blocks, 1 of 2"),
        ([([1.5], [2])], TypeError, "integers"), ([("text", [2])], TypeError, "not text"),
        ([(None, [2])], pk.NullError, "missing"),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            pk.score(model, pairs, pool)
        assert pool.n_free == 1
    with pytest.raises(ValueError, match="step_rows"):
        pk.score(model, [fits], pool, 0)
    assert_same(pk.score(model, [fits], pool), pk.score(model, [fits]))
    assert pool.n_free == 1


@pytest.mark.parametrize("at", range(4))
def test_after_an_interrupt_the_blocks_are_back(model, monkeypatch, at):
    pool, step, n_steps = model.new_pool(n_tokens=400), pk.LlamaModel.step, []

    def interrupted(self, *args, **options):
        n_steps.append(1)
        if len(n_steps) > at:
            raise KeyboardInterrupt
        return step(self, *args, **options)

    monkeypatch.setattr(pk.LlamaModel, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pk.score(model, multiple_choice(5), pool, 16)
    assert pool.n_free == pool.n_blocks


def test_the_real_model():
    model = promise_rows.real_model()
    encode = model.tokenizer.encode
    pairs = [(encode(f"The capital of {country} is"), encode(city, add_special_tokens=False))
             for country in ("France", "Italy")
             for city in (" Paris", " Rome", " a small village in Scotland")]  # fmt: skip
    scores = pk.score(model, pairs)
    assert [max(range(3), key=lambda i: scores[j + i].logprob) for j in (0, 3)] == [0, 1]
    assert scores[0].is_greedy
    check_against_rows(model, pairs, scores)
