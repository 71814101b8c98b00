"""Speculation: whatever is guessed, outputs equal those without."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promise_rows import real_model
from test_engine import Failing, alone, assert_idle, ids, letters_only, model, one_thread, requests, run  # noqa: F401
from tiny import tiny_config, tiny_tensors, write_hf

import pagedkv as pk
from pagedkv import LLM, SamplingParams
from pagedkv.engine.speculation import Drafter, ModelDrafter, NgramDrafter

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


class Oracle(Drafter):
    """Knows the texts to come, and says them, or something else.

    Parameters
    ----------
    texts : dict of (int, int) to list of int
        By the id of the request's params and the index of the sample.
    kind : {"right", "wrong", "mixed", "long"}
    """

    def __init__(self, texts, kind, n=7):
        super().__init__(n)
        self.texts, self.kind, self.rng = texts, kind, random.Random(0)

    def n_wanted(self, sample):
        return self.num_speculative_tokens

    def propose(self, wanted):
        return [self.guess(sample, n) for sample, n in wanted]

    def guess(self, sample, n):
        text = self.texts.get((id(sample.request.params), sample.index), [])
        rest = text[sample.n_generated :][: n + 1]
        if self.kind == "long":
            return (rest + [7] * 40)[:40]  # more than it was asked for
        out = (rest + [7] * n)[:n]
        for i in range(n):
            if self.kind == "wrong" or (self.kind == "mixed" and self.rng.random() < 0.3):
                out[i] = (out[i] + 1) % 250
        return out


def texts_of(params, outputs):
    return {(id(q), out.index): out.token_ids for q, (outs, _) in zip(params, outputs) for out in outs}


def run_with(model, drafter, prompts, params, **options):
    """As run, with a drafter of one's own."""
    llm = LLM(model, **{"n_blocks": 64, **options})
    llm._engine.scheduler.drafter = drafter
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)
    return [(out.outputs, out.prompt_logprobs) for out in outs], llm


@pytest.fixture(scope="module")
def mixed(model):
    """Requests of all kinds, and their outputs without speculation."""
    prompts, params = requests(3, 14)
    prompts += [ids(5, 6) * 4, ids(6, 3) * 9, [9] * 30]  # these repeat themselves
    repeat = {"max_tokens": 40, "logprobs": 2, "ignore_eos": True}
    params += [SamplingParams(temperature=0, **repeat), SamplingParams(seed=1, temperature=0.7, n=3, **repeat),
               SamplingParams(seed=3, logit_bias={65: 100.0, 66: 99.5}, **repeat)]  # fmt: skip
    for i, fields in enumerate(({"stop": ["abc", "cd", "j"]}, {"stop": "aa", "include_stop_str_in_output": True},
                                {"stop_token_ids": [64, 65], "min_tokens": 4}, {"min_tokens": 9, "max_tokens": 9},
                                {"stop": "b", "min_tokens": 6}, {"frequency_penalty": 0.4, "repetition_penalty": 1.2},
                                {"top_p": 0.8, "top_k": 5, "min_p": 0.05, "presence_penalty": 1.0})):  # fmt: skip
        prompts.append(ids(20 + i, 5) * 3)
        params.append(SamplingParams(**{"max_tokens": 30, "seed": i, "logprobs": 1, "logit_bias": letters_only(),
                                        "n": 1 + i % 2, **fields}))  # fmt: skip
    want, _ = run(model, prompts, params)
    return prompts, params, want


@pytest.mark.parametrize("kind", ["right", "wrong", "mixed", "long"])
@pytest.mark.parametrize("options", [{}, {"n_blocks": 9}, {"n_blocks": 9, "enable_prefix_caching": False},
                                     {"max_num_batched_tokens": 5}, {"max_num_seqs": 2}, {"max_num_seqs": 1},
                                     {"block_size": 4, "n_blocks": 36}], ids=str)  # fmt: skip
def test_outputs_equal_those_without(model, mixed, kind, options):
    prompts, params, want = mixed
    got, llm = run_with(model, Oracle(texts_of(params, want), kind), prompts, params, **options)
    assert got == want
    stats = llm.stats()
    assert stats["drafted"] > 0 and stats["tokens"] == sum(len(out.token_ids) for outs, _ in want for out in outs)
    if kind == "right":
        assert 0.9 * stats["drafted"] < stats["accepted"] <= stats["drafted"]  # an end may come before the last
    if kind == "wrong":
        assert stats["accepted"] == 0
    if options.get("n_blocks") == 9:
        assert stats["preemptions"] > 0


@pytest.mark.parametrize("options", [{}, {"n_blocks": 9}, {"max_num_batched_tokens": 5}, {"max_num_seqs": 3}], ids=str)
def test_ngram_equals_plain(model, mixed, options):
    prompts, params, want = mixed
    for speculative in ("ngram", NGRAM):
        got, llm = run(model, prompts, params, speculative=speculative, **options)
        assert got == want
        assert llm.stats()["accepted"] > 0 and llm.stats()["steps"] > 0


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 10**6), st.integers(1, 8), st.sampled_from([7, 11, 24, 100]), st.sampled_from([1, 2, 5, 64]),
       st.sampled_from([1, 3, 16, 31, 512]), st.booleans(),
       st.sampled_from(["right", "mixed", "long", "ngram"]))  # fmt: skip
def test_any_mix_equals_each_alone(model, seed, n, n_blocks, max_num_seqs, max_num_batched_tokens, caching, kind):
    prompts, params = requests(seed, n, max_tokens=14)
    options = {"n_blocks": n_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
               "enable_prefix_caching": caching}  # fmt: skip
    texts = {(id(q), i): alone(model, p, q, i).tokens for p, q in zip(prompts, params) for i in range(q.n)}
    drafter = NgramDrafter(4, 2, 1) if kind == "ngram" else Oracle(texts, kind, 1 + seed % 9)
    got, _ = run_with(model, drafter, prompts, params, **options)
    for (outputs, _), q in zip(got, params):
        for out in outputs:
            assert out.token_ids == texts[id(q), out.index]


# ---- Lengths and blocks -------------------------------------------------------------------------


def watch(llm):
    """What every step was asked to compute: a list of steps, each a list of (rows before, tokens)."""
    steps, step = [], llm.model.step

    def watched(rows, **options):
        steps.append([(len(seq), list(tokens)) for seq, tokens in rows])
        return step(rows, **options)

    llm._engine.model = type("Watched", (), {"step": staticmethod(watched), "config": llm.model.config})()
    return steps


def test_an_end_in_the_middle_of_the_drafts_is_the_end(model):
    """Nothing after it is given, and the sequence, seen where its rows enter the cache, ends there."""
    fields = {"temperature": 2.0, "seed": 1, "max_tokens": 40, "ignore_eos": True}
    params, prompt = SamplingParams(**fields), ids(8, 10)
    free = run(model, [prompt], [params])[0][0][0][0].token_ids
    at = next(i for i in range(20, 40) if free[i] not in free[:i])
    ends = SamplingParams(stop_token_ids=[free[at]], **fields)
    for n in (3, 8, 30):
        llm = LLM(model, n_blocks=64)
        lengths, extend = [], llm._engine.cache.extend
        llm._engine.cache.extend = lambda path, tokens, seq: lengths.append((len(seq), len(tokens))) or extend(
            path, tokens, seq)  # fmt: skip
        # All of the text as it goes on, past its end.
        llm._engine.scheduler.drafter = Oracle({(id(ends), 0): free}, "right", n)
        out, = llm.generate([prompt], ends, use_tqdm=False)
        assert (out.outputs[0].token_ids, out.outputs[0].finish_reason) == (free[: at + 1], "stop")
        assert lengths[-1] == (len(prompt) + at, len(prompt) + at + 1) and llm.stats()["accepted"] > 0
        assert_idle(llm)


def test_only_own_rows_enter_the_cache(model):
    """After a run with wrong drafts, what the cache holds is the text, block for block."""
    prompt, params = ids(4, 10), SamplingParams(temperature=0, seed=0, max_tokens=38, ignore_eos=True)
    want, plain = run(model, [prompt], [params])
    tokens = prompt + want[0][0][0].token_ids
    _, llm = run_with(model, Oracle(texts_of([params], want), "wrong"), [prompt], [params])
    nodes, spelled = [llm._engine.cache._root], []
    for node in nodes:
        nodes += node.children.values()
        spelled.append(list(node.tokens))
    assert spelled == [[], tokens[:16], tokens[16:32]]
    assert llm.stats()["blocks_cached"] == plain.stats()["blocks_cached"]
    again = SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True)
    out, = llm.generate([tokens[:40]], again, use_tqdm=False)
    assert out.num_cached_tokens == 32 and out.outputs == run(model, [tokens[:40]], [again])[0][0][0]


def test_drafts_take_what_nobody_needs(model):
    """Never more rows than a step may have, no preemption that plain decoding does not have, no exhausted pool."""
    prompts = [ids(i, 14) for i in range(4)]
    params = [SamplingParams(temperature=0, seed=i, max_tokens=34, ignore_eos=True) for i in range(4)]
    want, _ = run(model, prompts, params)
    for n_blocks, kind in ((12, "wrong"), (13, "long"), (16, "wrong"), (16, "long")):  # each needs three in the end
        plain = run(model, prompts, params, n_blocks=n_blocks)[1].stats()["preemptions"]
        llm = LLM(model, n_blocks=n_blocks, max_num_batched_tokens=11)
        llm._engine.scheduler.drafter = Oracle(texts_of(params, want), kind, 30)
        steps = watch(llm)
        outs = llm.generate(prompts, params, use_tqdm=False)
        assert [out.outputs for out in outs] == [outputs for outputs, _ in want]
        assert llm.stats()["preemptions"] == plain == 0
        assert max(sum(len(tokens) for _, tokens in rows) for rows in steps) <= 11
        assert all(before + len(tokens) <= 14 + 34 - 1 for rows in steps for before, tokens in rows)


def test_samples_that_fork_from_a_cached_prompt(model):
    """Their first tokens come of one row, which carries no drafts of any of them."""
    prompt, params = ids(4, 17), SamplingParams(temperature=0, seed=0, n=3, max_tokens=12, ignore_eos=True)
    want, _ = run(model, [prompt], [params])
    llm = LLM(model, n_blocks=64)
    llm._engine.scheduler.drafter = Oracle(texts_of([params], want), "right", 4)
    steps = watch(llm)
    for _ in range(2):
        steps.clear()
        assert llm.generate([prompt], params, use_tqdm=False)[0].outputs == want[0][0]
        assert_idle(llm)
    assert [len(tokens) for _, tokens in steps[0]] == [1]


def test_right_drafts_save_steps(model):
    prompt, params = ids(4, 10), SamplingParams(temperature=0, seed=0, max_tokens=41, ignore_eos=True)
    want, plain = run(model, [prompt], [params])
    _, llm = run_with(model, Oracle(texts_of([params], want), "right", 4), [prompt], [params])
    assert (plain.stats()["steps"], llm.stats()["steps"]) == (41, 1 + 40 // 5)
    assert (llm.stats()["drafted"], llm.stats()["accepted"], llm.stats()["tokens"]) == (32, 32, 41)


def test_streams_give_several_tokens_at_once(model, mixed):
    prompts, params, want = mixed
    llm = LLM(model, n_blocks=64)
    llm._engine.scheduler.drafter = Oracle(texts_of(params, want), "right")
    got = [[("", [])] * q.n for q in params]
    for part in llm.stream(prompts, params):
        for out in part.outputs:
            text, tokens = got[int(part.request_id)][out.index]
            got[int(part.request_id)][out.index] = text + out.text, tokens + out.token_ids
    assert got == [[(out.text, out.token_ids) for out in outs] for outs, _ in want]
    assert_idle(llm)


# ---- The drafters -------------------------------------------------------------------------------


class Said:
    """As much of a Sample as a drafter sees."""

    def __init__(self, tokens):
        self.tokens, self.n_drafts, self.ngrams, self.n_looked = tokens, None, None, 0


def test_lookup():
    """Against a search through all places: the longest match, of those the last; it goes round where the text ends."""
    rng = random.Random(1)
    for _ in range(200):
        low = rng.randrange(1, 4)
        drafter, sample = NgramDrafter(9, rng.randrange(low, 6), low), Said([])
        for _ in range(60):
            sample.tokens.append(rng.randrange(3))
            tokens, want = sample.tokens, []
            for size in range(drafter.prompt_lookup_max, low - 1, -1):
                places = [at for at in range(size, len(tokens)) if tokens[at - size : at] == tokens[-size:]]
                if places:
                    while len(want) < 6:
                        want += tokens[places[-1] :]
                    break
            assert drafter.propose([(sample, 6)]) == [want[:6]]


def test_the_number_of_drafts_follows_what_was_accepted():
    drafter, sample = NgramDrafter(16), Said([])
    seen = [drafter.n_wanted(sample)]
    for n_accepted in (2, 4, 8, 16, 5, 0, 0, 1):
        drafter.judge(sample, seen[-1], n_accepted)
        seen.append(drafter.n_wanted(sample))
    assert seen == [2, 4, 8, 16, 16, 5, 1, 1, 2]


@pytest.mark.parametrize("speculative, message", [
    ("magic", "'ngram' or 'draft_model', not 'magic'"), ({}, "not None"), (3, "not 3"),
    ({"method": "eagle"}, "not 'eagle'"),
    ({"method": "ngram", "depth": 2}, "speculative has 'depth'"), ({"method": "draft_model"}, "needs a model"),
    ({"method": "ngram", "model": "x"}, "speculative has 'model'"),
    ({"method": "ngram", "num_speculative_tokens": 0}, "at least 1, not 0"),
    ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "at most prompt_lookup_max, 2, not 3"),
])  # fmt: skip
def test_options_are_checked(model, speculative, message):
    with pytest.raises(ValueError, match=message):
        LLM(model, n_blocks=8, speculative=speculative)


# ---- Draft models -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Another model of the same size of vocabulary, without a tokenizer, and with less context."""
    config = tiny_config(vocab_size=272, context_len=64, n_layers=1, tied_embeddings=False)
    return pk.LlamaModel.load(write_hf(tmp_path_factory.mktemp("model") / "s", config, tiny_tensors(config, seed=5)))


@pytest.mark.parametrize("options", [{}, {"n_blocks": 9}, {"n_blocks": 9, "enable_prefix_caching": False},
                                     {"max_num_batched_tokens": 5}, {"max_num_seqs": 2}], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["itself", "stranger"])
def test_draft_models(model, stranger, mixed, name, options):
    prompts, params, want = mixed
    draft = model if name == "itself" else stranger
    got, llm = run(model, prompts, params, speculative={"model": draft, "num_speculative_tokens": 6}, **options)
    assert got == want
    stats, pool = llm.stats(), llm._engine.scheduler.drafter.pool
    assert pool.n_free == pool.n_blocks
    assert stats["drafted"] > 10
    if name == "stranger":
        assert stats["accepted"] < 0.2 * stats["drafted"]
    if options.get("n_blocks") == 9:
        assert stats["preemptions"] > 0


def test_a_draft_model_like_the_model_is_always_right(model):
    """Sampled tokens too: both draw with the same random number."""
    prompts = [ids(i, 5 + 9 * i) for i in range(4)]
    params = [SamplingParams(temperature=i, seed=i, n=1 + i % 2, max_tokens=32, ignore_eos=True) for i in range(4)]
    want, plain = run(model, prompts, params)
    got, llm = run(model, prompts, params, speculative=model)
    assert got == want
    assert llm.stats()["accepted"] == llm.stats()["drafted"] and llm.stats()["steps"] < plain.stats()["steps"] / 2


def test_a_draft_pool_that_is_too_small(model, mixed):
    prompts, params, want = mixed
    for n_tokens in (16, 48, 64):
        drafter = ModelDrafter(model, model.new_pool(n_tokens=n_tokens))
        got, llm = run_with(model, drafter, prompts, params)
        assert got == want and drafter.pool.n_free == drafter.pool.n_blocks and not drafter._held
        assert (llm.stats()["drafted"] > 0) == (n_tokens > 16)


def test_a_draft_model_with_less_context(model, stranger):
    """It drafts while its 64 tokens last, and the text goes on."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for n_prompt, drafts in ((50, True), (90, False)):
        want, _ = run(model, [ids(1, n_prompt)], [params])
        got, llm = run(model, [ids(1, n_prompt)], [params], speculative=stranger)
        assert got == want and (llm.stats()["drafted"] > 0) == drafts


@pytest.mark.parametrize("n", [1, 4, 9])
def test_a_draft_model_that_fails(model, stranger, mixed, monkeypatch, n):
    prompts, params, want = mixed
    llm = LLM(model, n_blocks=24, speculative=stranger)
    pool = llm._engine.scheduler.drafter.pool
    with monkeypatch.context() as patch:
        patch.setattr(stranger, "step", Failing(stranger.step, n, KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)
    assert pool.n_free == pool.n_blocks
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert [(out.outputs, out.prompt_logprobs) for out in outs] == want
    assert pool.n_free == pool.n_blocks


def test_draft_models_of_another_vocabulary(model, tmp_path):
    config = tiny_config(vocab_size=128)
    small = pk.LlamaModel.load(write_hf(tmp_path / "small", config, tiny_tensors(config)))
    with pytest.raises(ValueError, match="the draft model has 128 tokens in its vocabulary, the model 272"):
        LLM(model, n_blocks=8, speculative=small)
    config = tiny_config(vocab_size=272)
    other = pk.LlamaModel.load(write_hf(tmp_path / "other", config, tiny_tensors(config)))
    other._tokenizer = SimpleNamespace(id_to_token=lambda i: "x" if i == 7 else model.tokenizer.id_to_token(i))
    with pytest.raises(ValueError, match="token 7 is 'x' in the draft model's vocabulary, '"):
        LLM(model, n_blocks=8, speculative={"model": other, "method": "draft_model"})


# ---- Exceptions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 9])
@pytest.mark.parametrize("where", ["step", "draw", "append", "extend", "propose", "judge", "truncate"])
def test_an_exception_leaves_the_engine_usable(model, mixed, monkeypatch, where, n):
    prompts, params, want = mixed
    llm = LLM(model, n_blocks=24)
    engine, drafter = llm._engine, Oracle(texts_of(params, want), "mixed")
    engine.scheduler.drafter = drafter
    owner = {"step": model, "draw": engine.sampler, "extend": engine.cache, "append": pk.engine.request.Sample,
             "truncate": pk.Sequence}.get(where, drafter)  # fmt: skip
    call = Failing(getattr(owner, where), n, RuntimeError)
    replacement = call if where not in ("append", "truncate") else lambda *a, **k: call(*a, **k)
    with monkeypatch.context() as patch:
        patch.setattr(owner, where, replacement)
        with pytest.raises(RuntimeError, match="on purpose"):
            llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert [(out.outputs, out.prompt_logprobs) for out in outs] == want
    assert_idle(llm)


def test_others_go_on_after_an_exception(model, mixed, monkeypatch):
    """A stream of its own, in the middle of drafts when another call's step fails, goes on as if nothing had been."""
    prompts, params, want = mixed
    llm = LLM(model, n_blocks=24)
    llm._engine.scheduler.drafter = drafter = Oracle(texts_of(params, want), "mixed")
    stream = llm.stream([prompts[14]], params[14])
    tokens = list(next(stream).outputs[0].token_ids)
    with monkeypatch.context() as patch:
        patch.setattr(drafter, "judge", Failing(drafter.judge, 3, RuntimeError))
        with pytest.raises(RuntimeError):
            llm.generate(prompts, params, use_tqdm=False)
    tokens += [token for part in stream for token in part.outputs[0].token_ids]
    assert tokens == want[14][0][0].token_ids
    assert_idle(llm)


# ---- The real model -----------------------------------------------------------------------------


def test_the_real_model(threads):
    model = real_model()
    threads(2)
    code = "def area(width, height):\n    return width * height\n\n\n"
    prompts = [code * 3, "One, two, three, four, five, six. One, two, three, four, five, six. One, two,", "Once upon"]
    params = [SamplingParams(temperature=0, max_tokens=40, logprobs=2),
              SamplingParams(seed=1, temperature=0.5, max_tokens=24, n=2),
              SamplingParams(seed=2, top_p=0.9, max_tokens=10)]  # fmt: skip
    plain = LLM(model, n_blocks=256)
    want = [out.outputs for out in plain.generate(prompts, params, use_tqdm=False)]
    for options in ({}, {"n_blocks": 12}, {"max_num_batched_tokens": 7}):
        llm = LLM(model, **{"n_blocks": 256, "speculative": "ngram", **options})
        assert [out.outputs for out in llm.generate(prompts, params, use_tqdm=False)] == want
        assert_idle(llm)
        assert llm.stats()["accepted"] > 10
        if not options:
            assert llm.stats()["steps"] < plain.stats()["steps"]
