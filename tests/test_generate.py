"""Generation on a tiny model: each sample against a plain loop that decodes it alone."""

import doctest

import numpy as np
import pytest
from promise_rows import real_model
from tiny import tiny_config, tiny_tensors, write_hf

import pagedkv as pk
from pagedkv.generate import blocks_needed, generate

BLOCK_SIZE = 16
SAMPLING = pk.SamplingParams(temperature=5.0, top_p=0.97, seed=3)
PROMPT = [int(i) for i in np.random.default_rng(0).integers(3, 128, 21)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny_config(context_len=1024)
    return pk.LlamaModel.load(write_hf(tmp_path_factory.mktemp("model") / "tiny", config, tiny_tensors(config)))


def texts(model, n, max_tokens=12, stop_ids=(), prompt=PROMPT, n_blocks=None, sampling=SAMPLING):
    """Tokens of each sample, after checks that hold for every run."""
    pool = model.new_pool(n_blocks=n_blocks or blocks_needed(len(prompt), n, max_tokens))
    out, ended = [[] for _ in range(n)], set()
    for events in generate(model, pool, prompt, n, max_tokens, sampling, stop_ids):
        assert [i for i, _, _ in events] == [i for i in range(n) if i not in ended]
        for i, token, ends in events:
            out[i].append(token)
            assert ends == (token in stop_ids or len(out[i]) == max_tokens)
            if ends:
                ended.add(i)
    assert ended == set(range(n)) and pool.n_free == pool.n_blocks
    return out


def text_alone(model, sample, max_tokens, stop_ids, prompt=PROMPT, sampling=SAMPLING):
    """One sample by single steps in a pool of its own."""
    seq = model.new_sequence(model.new_pool(n_tokens=len(prompt) + max_tokens))
    logits, out = model.prefill(prompt, seq, chunk=1), []
    while True:
        out.append(sampling.choose(logits, sample, len(seq)))
        if out[-1] in stop_ids or len(out) == max_tokens:
            return out
        logits = model.decode_step(out[-1:], [seq])[0]


@pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 21])
def test_samples_equal_single_runs(model, n_prompt):
    got = texts(model, 5, prompt=PROMPT[:n_prompt])
    assert got == [text_alone(model, i, 12, (), PROMPT[:n_prompt]) for i in range(5)]
    assert len(set(map(tuple, got))) == 5


def test_samples_do_not_depend_on_their_number(model):
    eight = texts(model, 8)
    assert texts(model, 2) == eight[:2] and texts(model, 1) == eight[:1]


def test_stop_ids_end_a_sample_and_leave_the_others(model):
    free = texts(model, 6, 20)
    stops = {free[0][3], free[2][7]}
    got = texts(model, 6, 20, stops)
    assert got == [text_alone(model, i, 20, stops) for i in range(6)]
    assert len(got[0]) <= 4 and len({len(text) for text in got}) > 1
    assert all(text[-1] in stops or len(text) == 20 for text in got)
    assert texts(model, 6, 20, range(128)) == [text[:1] for text in free]  # each ends with its first token


def test_greedy_samples_are_argmax(model):
    got = texts(model, 3, sampling=pk.SamplingParams(temperature=0))
    seq = model.new_sequence(model.new_pool(n_tokens=64))
    logits, alone = model.prefill(PROMPT, seq), []
    for _ in range(12):
        alone.append(int(logits.argmax()))
        logits = model.decode_step(alone[-1:], [seq])[0]
    assert got == [alone] * 3


def test_one_token(model):
    assert texts(model, 3, 1) == [text_alone(model, i, 1, ()) for i in range(3)]


def test_a_prompt_longer_than_a_chunk(model):
    prompt = [int(i) for i in np.random.default_rng(1).integers(3, 128, 600)]
    assert texts(model, 2, 4, prompt=prompt) == [text_alone(model, i, 4, (), prompt) for i in range(2)]


def test_shared_blocks_are_counted(model):
    pool = model.new_pool(n_blocks=blocks_needed(21, 4, 30))
    seen = [(pool.n_blocks - pool.n_free, pool.n_saved) for _ in generate(model, pool, PROMPT, 4, 30, SAMPLING)]
    # Rows 0..15 shared to the end; the tail of 5 rows by all four, until each goes on in a copy of it.
    assert seen[0] == (2, 6)
    assert seen[1] == (1 + 4, 3)
    assert seen[-1] == (1 + 4 * 3, 3) == (pool.n_blocks, 3)  # 50 rows: three blocks each
    assert pool.n_free == pool.n_blocks


def test_ended_samples_give_their_blocks_back(model):
    free = texts(model, 2, 40)
    at, stop = next((at, token) for at, token in enumerate(free[0]) if at and token not in free[0][:at] + free[1])
    pool = model.new_pool(n_blocks=blocks_needed(21, 2, 40))
    taken = [pool.n_blocks - pool.n_free for _ in generate(model, pool, PROMPT, 2, 40, SAMPLING, {stop})]
    assert taken[at] == 1 + 2 * ((21 + at - 1) // BLOCK_SIZE)  # both alive while the event is held
    assert taken[at + 1] == (21 + at) // BLOCK_SIZE + 1


@pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 32])
@pytest.mark.parametrize("max_tokens", [1, 2, 16, 17])
def test_blocks_needed_is_exact(model, n_prompt, max_tokens):
    prompt, n = (PROMPT + PROMPT)[:n_prompt], 3
    needed = blocks_needed(n_prompt, n, max_tokens)
    got = texts(model, n, max_tokens, prompt=prompt, n_blocks=needed)
    assert got == texts(model, n, max_tokens, prompt=prompt, n_blocks=needed + 5)
    if needed > 1:
        pool = model.new_pool(n_blocks=needed - 1)
        with pytest.raises(pk.PoolExhausted):
            list(generate(model, pool, prompt, n, max_tokens, SAMPLING))
        assert pool.n_free == pool.n_blocks


def test_closing_gives_all_blocks_back(model):
    pool = model.new_pool(n_tokens=512)
    for n_steps in (0, 1, 5):
        steps = generate(model, pool, PROMPT, 3, 20, SAMPLING)
        for _ in range(n_steps):
            next(steps)
        assert (pool.n_free < pool.n_blocks) == (n_steps > 0)
        steps.close()
        assert pool.n_free == pool.n_blocks


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["prefill", "choose", "decode"])
def test_an_exception_in_the_middle_gives_all_blocks_back(model, monkeypatch, call, error):
    def fail(*_, **__):
        raise error("on purpose")

    pool = model.new_pool(n_tokens=512)
    steps = generate(model, pool, PROMPT, 3, 20, SAMPLING)
    if call == "prefill":
        monkeypatch.setattr(model, "prefill", fail)
    else:
        next(steps), next(steps)
        monkeypatch.setattr(*((pk.SamplingParams, "choose") if call == "choose" else (model, "decode_step")), fail)
    with pytest.raises(error, match="on purpose") as caught:
        list(steps)
    assert pool.n_free == pool.n_blocks
    assert caught.tb  # held until here, and with it every local variable: the blocks came back by free()


def test_a_consumer_may_change_the_list(model):
    pool = model.new_pool(n_tokens=512)
    n_tokens = 0
    for events in generate(model, pool, PROMPT, 2, 5, SAMPLING):
        n_tokens += len(events)
        events.clear()
    assert n_tokens == 10 and pool.n_free == pool.n_blocks


@pytest.mark.parametrize("prompt, n, max_tokens", [([], 1, 1), ([5], 0, 1), ([5], -1, 1), ([5], 1, 0)])
def test_impossible_requests_are_refused_at_once(model, prompt, n, max_tokens):
    with pytest.raises(ValueError, match="must be at least 1|no tokens"):
        generate(model, None, prompt, n, max_tokens, SAMPLING)


def test_a_bad_token_changes_nothing(model):
    pool = model.new_pool(n_tokens=64)
    with pytest.raises(pk.TokenError):
        list(generate(model, pool, [5, 128], 1, 1, SAMPLING))
    assert pool.n_free == pool.n_blocks


def test_the_example_of_the_docstring(monkeypatch):
    """It needs the real model, so the doctests of the package leave it out."""
    model = real_model()
    monkeypatch.setattr(pk.LlamaModel, "load", lambda name: {"smollm2-135m": model}[name])  # loaded already
    source = generate.__doc__.replace("# doctest: +SKIP", "")
    test = doctest.DocTestParser().get_doctest(source, {}, "generate", None, 0)
    assert doctest.DocTestRunner().run(test) == (0, 8)  # failed, of all
