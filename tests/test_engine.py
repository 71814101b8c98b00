"""The engine against a plain loop that runs each sample alone: scheduling never shows, and every end is right."""

import io
import math
import random
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promise_rows import real_model
from tiny import tiny_config, tiny_tensors, write_gguf, write_hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import pagedkv as pk
from pagedkv import LLM, SamplingParams
from pagedkv.engine import prefix_cache

END, SECOND_END, VOCAB = 256, 257, 272


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model whose tokens are bytes, with two end tokens."""
    config = tiny_config(vocab_size=VOCAB, eos_token_ids=(END, SECOND_END), context_len=256)
    path = write_hf(tmp_path_factory.mktemp("model") / "tiny", config, tiny_tensors(config))
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|second|>"])
    backend.save(str(path / "tokenizer.json"))
    model = pk.LlamaModel.load(path)
    assert model.tokenizer.encode("<|end|>") == [END] and model.tokenizer.encode("<|second|>") == [SECOND_END]
    return model


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Hundreds of small steps: on a busy machine they would mostly wait for each other's threads."""
    threads(1)


def ids(seed, n):
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, n)]


def edited(logits, params, prompt, generated, end_ids):
    """A row of logits as the sampling sees it: stated anew, token by token."""
    out = logits.copy()
    if len(generated) < params.min_tokens:
        for token in {*end_ids, *params.stop_token_ids}:
            out[token] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        out[token] += np.float32(bias)
    if params.repetition_penalty != 1:
        for token in {*prompt, *generated}:
            penalty = np.float32(params.repetition_penalty)
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(generated):
        times = np.float32(generated.count(token))
        out[token] -= np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty)
    return out


def alone(model, prompt, params, index):
    """Tokens of one sample, by single steps in a pool of its own, and the logits that each came from."""
    end_ids = () if params.ignore_eos else model.config.eos_token_ids
    seq, out, rows = model.new_sequence(model.new_pool(n_tokens=256)), [], []
    logits = model.prefill(prompt, seq, chunk=7)
    while True:
        rows.append(logits)
        out.append(params.choose(edited(logits, params, prompt, out, end_ids), index, len(seq)))
        if out[-1] in {*end_ids, *params.stop_token_ids} or len(out) == params.max_tokens:
            return SimpleNamespace(tokens=out, logits=np.array(rows))
        logits = model.decode_step(out[-1:], [seq])[0]


def requests(seed, n, max_tokens=20):
    """Prompts, some of which begin alike, and their params."""
    rng = random.Random(seed)
    prompts, params = [], []
    for i in range(n):
        shared = ids(1000 + rng.randrange(3), rng.choice([0, 15, 16, 17, 32, 48]))
        prompts.append((shared + ids(seed * 1000 + i, rng.choice([0, 1, 7, 16, 33])))[:90] or [5])
        params.append(SamplingParams(
            n=rng.choice([1, 1, 1, 2, 4]), temperature=rng.choice([0, 0.7, 1.0, 3.0]), top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 0, 20]), min_p=rng.choice([0.0, 0.0, 0.05]), seed=rng.randrange(5),
            max_tokens=rng.randrange(1, max_tokens), logprobs=rng.choice([None, 0, 3]),
            prompt_logprobs=rng.choice([None, None, None, 2]), ignore_eos=rng.random() < 0.8,
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]), presence_penalty=rng.choice([0.0, 0.0, 1.5]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.5]), min_tokens=0))  # fmt: skip
    return prompts, params


def run(model, prompts, params, **options):
    """Outputs without the count of cached tokens, which may differ; nothing is left held."""
    llm = LLM(model, **{"n_blocks": 64, **options})
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert_idle(llm)
    assert [out.prompt_token_ids for out in outs] == [list(p) for p in prompts] and all(out.finished for out in outs)
    return [(out.outputs, out.prompt_logprobs) for out in outs], llm


def assert_idle(llm):
    """No sequence holds a block; the cache gives all of its back."""
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["blocks_used"]) == (0, 0, 0)
    assert stats["blocks_free"] + stats["blocks_cached"] == llm.pool.n_blocks
    assert all(llm.pool.ref_count(b) <= 1 for b in range(llm.pool.n_blocks))
    assert not llm._engine.cache._root.n_users


CONFIGS = [
    {"n_blocks": 24}, {"n_blocks": 4096}, {"n_blocks": 24, "enable_prefix_caching": False},
    {"enable_prefix_caching": False}, {"max_num_batched_tokens": 1}, {"max_num_batched_tokens": 16},
    {"max_num_batched_tokens": 17, "n_blocks": 24}, {"max_num_seqs": 1}, {"max_num_seqs": 3, "n_blocks": 24},
    {"n_blocks": 7}, {"n_blocks": 7, "max_num_batched_tokens": 5, "enable_prefix_caching": False},
    {"block_size": 4, "n_blocks": 40}, {"block_size": 32, "n_blocks": 9},
]  # fmt: skip


@pytest.fixture(scope="module")
def mixed(model):
    """Twelve requests, and every sample of them alone."""
    prompts, params = requests(1, 12)
    return prompts, params, [[alone(model, p, q, i) for i in range(q.n)] for p, q in zip(prompts, params)]


def test_every_sample_equals_the_one_alone(model, mixed):
    prompts, params, want = mixed
    got, llm = run(model, prompts, params)
    for (outputs, _), samples, q in zip(got, want, params):
        assert [out.index for out in outputs] == list(range(q.n))
        for out, sample in zip(outputs, samples):
            assert out.token_ids == sample.tokens
            assert (out.logprobs is None, out.cumulative_logprob is None) == (q.logprobs is None,) * 2
            if q.logprobs is not None:
                assert_logprobs(out.logprobs, sample.tokens, sample.logits, q.logprobs)
                total = 0.0  # one after the other; `sum` compensates from Python 3.12 on
                for each, token in zip(out.logprobs, out.token_ids):
                    total += each[token].logprob
                assert out.cumulative_logprob == total
    assert llm.stats()["tokens"] == sum(len(sample.tokens) for samples in want for sample in samples)


def assert_logprobs(dicts, tokens, logits, n_top):
    """Against float64: the token first, then the likeliest; ranks by logit, then id."""
    assert len(dicts) == len(tokens) == len(logits)
    for each, token, row in zip(dicts, tokens, logits):
        x = row.astype(np.float64)
        log_p = x - x.max() - math.log(math.fsum(np.exp(x - x.max())))
        order = np.argsort(-x, kind="stable").tolist()
        assert list(each) == [token] + [i for i in order[:n_top] if i != token]
        for i, entry in each.items():
            assert abs(entry.logprob - log_p[i]) < 2e-6 and order[entry.rank - 1] == i


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_scheduling_does_not_show(model, mixed, options):
    prompts, params, _ = mixed
    want, _ = run(model, prompts, params)
    assert run(model, prompts, params, **options)[0] == want


def test_pressure_preempts_and_caching_hits(model, mixed):
    prompts, params, _ = mixed
    _, small = run(model, prompts, params, n_blocks=7)
    assert small.stats()["preemptions"] > 0
    assert run(model, prompts, params, max_num_seqs=2)[1].stats()["prefix_hits"] > 0
    assert run(model, prompts, params, max_num_seqs=2, enable_prefix_caching=False)[1].stats()["prefix_hits"] == 0


def test_alone_and_among_strangers(model):
    prompts, params = requests(7, 32)
    together, _ = run(model, prompts, params, n_blocks=200)
    for i in (0, 5, 13, 31):
        assert run(model, prompts[i : i + 1], params[i : i + 1])[0] == together[i : i + 1]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(2, 10**6), st.integers(1, 8), st.sampled_from([7, 11, 24, 100]), st.sampled_from([1, 2, 5, 64]),
       st.sampled_from([1, 3, 16, 31, 512]), st.booleans())  # fmt: skip
def test_any_mix_equals_each_alone(model, seed, n, n_blocks, max_num_seqs, max_num_batched_tokens, caching):
    prompts, params = requests(seed, n, max_tokens=12)
    got, _ = run(model, prompts, params, n_blocks=n_blocks, max_num_seqs=max_num_seqs,
                 max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=caching)  # fmt: skip
    for (outputs, _), prompt, q in zip(got, prompts, params):
        for i, out in enumerate(outputs):
            assert out.token_ids == alone(model, prompt, q, i).tokens


def test_threads_do_not_show(model, mixed, threads):
    prompts, params, _ = mixed
    want, _ = run(model, prompts, params)
    for n in (2, 3):
        threads(n)
        assert run(model, prompts, params, n_blocks=24)[0] == want


def test_prompt_logprobs(model):
    prompt = ids(3, 150)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=3)
    llm = LLM(model, n_blocks=64)
    first, = llm.generate([prompt], params, use_tqdm=False)
    again, = llm.generate([prompt], params, use_tqdm=False)  # nothing of it may come from the cache
    logits = model.prefill(prompt, model.new_sequence(model.new_pool(n_tokens=256)), all_logits=True)
    assert first.prompt_logprobs[0] is None and first.prompt_logprobs == again.prompt_logprobs
    assert_logprobs(first.prompt_logprobs[1:], prompt[1:], logits[:-1], 3)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 0)
    assert llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens == 144
    assert llm.generate([[9]], params, use_tqdm=False)[0].prompt_logprobs == [None]


def test_prompt_logprobs_of_many_take_turns(model):
    """A step gives 64 rows of logits for them, whoever asks."""
    prompts, most = [ids(i, 60) for i in range(5)], []
    llm = LLM(model, n_blocks=64)
    rows, llm._engine.sampler.rows = llm._engine.sampler.rows, lambda n: most.append(n) or rows(n)
    params = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=0)
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert max(most) <= 64 + 5
    for prompt, out in zip(prompts, outs):
        alone, = LLM(model, n_blocks=64).generate([prompt], params, use_tqdm=False)
        assert (out.prompt_logprobs, out.outputs) == (alone.prompt_logprobs, alone.outputs)


def test_all_logprobs(model):
    out, = LLM(model, n_blocks=8).generate([[1, 2]], SamplingParams(max_tokens=2, logprobs=-1), use_tqdm=False)
    assert [len(each) for each in out.outputs[0].logprobs] == [VOCAB, VOCAB]
    assert abs(sum(math.exp(entry.logprob) for entry in out.outputs[0].logprobs[1].values()) - 1) < 1e-5


# ---- Randomness ---------------------------------------------------------------------------------


def tokens_of(outs):
    return [[out.token_ids for out in request.outputs] for request in outs]


def test_n_samples_differ_and_do_not_depend_on_n(model):
    def samples(n, seed=4, **options):
        params = SamplingParams(n=n, temperature=2.0, seed=seed, max_tokens=12, ignore_eos=True)
        return tokens_of(LLM(model, n_blocks=64, **options).generate([ids(1, 20)], params, use_tqdm=False))[0]

    eight = samples(8)
    assert len(set(map(tuple, eight))) == 8
    assert samples(1) == eight[:1] and samples(3) == eight[:3] and samples(8, max_num_seqs=2) == eight
    assert samples(8, seed=5) != eight


def test_requests_without_a_seed(model):
    """They differ from each other; the same calls on the same engine seed give the same."""
    params = SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True)

    def texts(**options):
        llm = LLM(model, **{"n_blocks": 64, **options})
        return [tokens_of(llm.generate([ids(1, 9)] * 3, params, use_tqdm=False)) for _ in range(2)]

    first = texts()
    assert len({tuple(each[0]) for call in first for each in call}) == 6
    assert texts(n_blocks=24, max_num_seqs=1) == first != texts(seed=1)


# ---- Ends ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def free_text(model):
    """A prompt whose sample of seed 0 goes on for 60 tokens, and that sample without any stops."""
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=60, ignore_eos=True, logit_bias=letters_only())
    prompt = ids(8, 10)
    out, = LLM(model, n_blocks=64).generate([prompt], params, use_tqdm=False)
    assert out.outputs[0].finish_reason == "length" and len(out.outputs[0].text) == 60
    return prompt, out.outputs[0]


def letters_only():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {i: 100.0 for i, token in enumerate(alphabet) if token in "abcdefghij"}


def one(model, prompt, **fields):
    llm = LLM(model, n_blocks=64)
    fields = {"temperature": 1.0, "seed": 0, "max_tokens": 60, "logit_bias": letters_only(), **fields}
    out, = llm.generate([prompt], SamplingParams(**fields), use_tqdm=False)
    assert_idle(llm)
    whole = out.outputs[0]
    parts = [part.outputs[0] for part in llm.stream([prompt], SamplingParams(**fields))]
    assert "".join(part.text for part in parts) == whole.text
    assert [token for part in parts for token in part.token_ids] == whole.token_ids
    assert [part.finish_reason for part in parts][:-1] == [None] * (len(parts) - 1)
    assert (parts[-1].finish_reason, parts[-1].stop_reason) == (whole.finish_reason, whole.stop_reason)
    return whole


def test_stop_text_across_tokens(model, free_text):
    prompt, free = free_text
    for begin, length in ((10, 4), (0, 1), (0, 3), (57, 3)):
        stop = free.text[begin : begin + length]
        at = free.text.find(stop)
        out = one(model, prompt, stop=["zzz", stop], ignore_eos=True)
        assert (out.text, out.finish_reason, out.stop_reason) == (free.text[:at], "stop", stop)
        assert out.token_ids == free.token_ids[: at + length]  # the tokens stay; the text is cut
        out = one(model, prompt, stop=stop, ignore_eos=True, include_stop_str_in_output=True)
        assert (out.text, out.stop_reason) == (free.text[: at + length], stop)


def test_the_earliest_stop_text_counts(model, free_text):
    prompt, free = free_text
    late, early = free.text[30:40], free.text[5:9]
    assert one(model, prompt, stop=[late, early], ignore_eos=True).stop_reason == early


def test_stop_token(model, free_text):
    prompt, free = free_text
    token = free.token_ids[20]
    at = free.token_ids.index(token)
    out = one(model, prompt, stop_token_ids=[token, 3], ignore_eos=True)
    assert (out.finish_reason, out.stop_reason) == ("stop", token)
    assert (out.token_ids, out.text) == (free.token_ids[: at + 1], free.text[:at])  # its own text does not show
    assert one(model, prompt, stop_token_ids=[token], include_stop_str_in_output=True).text == free.text[: at + 1]


@pytest.mark.parametrize("end", [END, SECOND_END])
def test_every_end_token_of_the_model_ends(model, end):
    out = one(model, ids(8, 10), logit_bias={end: 100.0})
    assert (out.token_ids, out.text, out.finish_reason, out.stop_reason) == ([end], "", "stop", None)
    out = one(model, ids(8, 10), logit_bias={end: 100.0}, ignore_eos=True, max_tokens=3)
    assert (out.token_ids, out.finish_reason, out.text) == ([end] * 3, "length", "")
    shown = one(model, ids(8, 10), logit_bias={end: 100.0}, ignore_eos=True, max_tokens=2, skip_special_tokens=False)
    assert shown.text == 2 * ("<|end|>" if end == END else "<|second|>")


def test_min_tokens_holds_ends_back(model, free_text):
    prompt, free = free_text
    out = one(model, prompt, logit_bias={END: 100.0}, min_tokens=5)
    assert len(out.token_ids) == 6 and END not in out.token_ids[:5] and out.token_ids[5] == END
    stop = free.text[2:4]
    out = one(model, prompt, stop=stop, min_tokens=30, ignore_eos=True)
    assert len(out.token_ids) > 30 and out.text[:30] == free.text[:30]
    out = one(model, prompt, stop_token_ids=[free.token_ids[0]], min_tokens=7, max_tokens=7)
    assert len(out.token_ids) == 7 and free.token_ids[0] not in out.token_ids and out.finish_reason == "length"


def test_bytes_of_a_character_are_held_back(model):
    """Streamed text never shows half a character, and adds up to what decode gives."""
    tokens = model.tokenizer.encode("é€😀aé")
    for n in range(1, len(tokens) + 1):
        llm = LLM(model, n_blocks=8)
        llm._engine.sampler.draw = script(tokens)
        parts = [part.outputs[0].text for part in llm.stream([[1, 2]], SamplingParams(max_tokens=n))]
        assert "".join(parts) == model.tokenizer.decode(tokens[:n])
        assert "\ufffd" not in "".join(parts[:-1])


def script(tokens):
    """A sampler that says these tokens to every sample, one after the other."""
    return lambda logits, wanted: [(tokens[sample.n_generated], None) for _, sample in wanted]


def test_without_detokenisation(model):
    out = one(model, [1, 2, 3], detokenize=False)
    assert out.text == "" and len(out.token_ids) == 60


def test_max_tokens_is_bounded_by_the_context(model):
    prompt = ids(2, 250)
    for max_tokens in (None, 100):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        out, = LLM(model, n_blocks=64).generate([prompt], params, use_tqdm=False)
        assert len(out.outputs[0].token_ids) == 6 and out.outputs[0].finish_reason == "length"
    llm = LLM(model, n_blocks=2)  # 32 rows: the last token takes none
    assert llm.max_model_len == 33
    out, = llm.generate([ids(2, 30)], SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    assert len(out.outputs[0].token_ids) == 3


# ---- Prompts and refusals -----------------------------------------------------------------------


def test_forms_of_prompts(model):
    llm, params = LLM(model, n_blocks=64), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    encoded = model.tokenizer.encode("Hello")
    forms = ["Hello", encoded, {"prompt": "Hello"}, {"prompt_token_ids": encoded}, tuple(encoded), np.array(encoded),
             {"prompt": "shown", "prompt_token_ids": encoded}]  # fmt: skip
    outs = llm.generate(forms, params, use_tqdm=False)
    assert {tuple(out.outputs[0].token_ids) for out in outs} == {tuple(outs[0].outputs[0].token_ids)}
    assert [out.prompt for out in outs] == ["Hello", None, "Hello", None, None, None, "shown"]
    assert all(out.prompt_token_ids == encoded for out in outs)
    for single in forms:
        out, = llm.generate(single, params, use_tqdm=False)
        assert out.outputs[0].token_ids == outs[0].outputs[0].token_ids
    assert llm.generate([], params, use_tqdm=False) == []
    assert len(llm.generate("Hi", use_tqdm=False)[0].outputs[0].token_ids) <= 16  # vLLM's default


def test_one_sampling_params_a_prompt(model):
    llm = LLM(model, n_blocks=64)
    outs = llm.generate(["ab", "cd"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 5)], use_tqdm=False)
    assert [len(out.outputs[0].token_ids) for out in outs] == [2, 5]
    assert [out.request_id for out in outs] == ["0", "1"]
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)
    with pytest.raises(TypeError, match="sampling_params of prompt 0 is a dict"):
        llm.generate(["a"], [{}], use_tqdm=False)


REFUSALS = [
    ([], {}, ValueError, "prompt 1: it has no tokens"),
    ([5, VOCAB], {}, pk.TokenError, rf"prompt 1: token {VOCAB} at place 1 is outside \[0, {VOCAB}\)"),
    ([-1], {}, pk.TokenError, "prompt 1: token -1 at place 0"),
    ([2**40], {}, pk.TokenError, "prompt 1: token 1099511627776"),
    ([5] * 256, {}, pk.BoundsError, "prompt 1: it has 256 tokens, the model's context holds 256"),
    ([5] * 100, {"max_tokens": 30}, pk.PoolExhausted,
     "prompt 1: 100 tokens and 30 to come need 9 blocks of 16, the pool has 8"),
    ([5] * 130, {"max_tokens": 1}, pk.PoolExhausted, "130 tokens and 1 to come need 9 blocks"),
    ([5] * 130, {"max_tokens": None}, pk.PoolExhausted, "need 9 blocks"),
    ([5], {"stop_token_ids": [VOCAB]}, pk.TokenError, f"token {VOCAB} of stop_token_ids"),
    ([5], {"logit_bias": {VOCAB: 1}}, pk.TokenError, f"token {VOCAB} of logit_bias"),
    ({"text": "a"}, {}, ValueError, 'a dict needs "prompt"'),
]  # fmt: skip


@pytest.mark.parametrize("prompt, fields, error, message", REFUSALS)
def test_refusals(model, prompt, fields, error, message):
    llm, steps = LLM(model, n_blocks=8), []
    params = [SamplingParams(max_tokens=4), SamplingParams(**fields)]
    llm._engine.step, step = lambda: steps.append(1) or step(), llm._engine.step
    with pytest.raises(error, match=message):
        llm.generate([[1, 2], prompt], params, use_tqdm=False)
    assert steps == [] and not llm._engine.has_work  # every prompt was checked before the first step
    # In a stream it ends that request alone.
    parts = list(llm.stream([[1, 2], prompt], params))
    refused = [part for part in parts if part.error is not None]
    assert len(refused) == 1 and refused[0].request_id == "1" and refused[0].finished
    assert isinstance(refused[0].error, error) and [out.finish_reason for out in refused[0].outputs] == ["error"]
    assert sum(len(part.outputs[0].token_ids) for part in parts if part.request_id == "0") > 0
    assert_idle(llm)


def test_the_largest_request_that_fits(model):
    prompt, params = ids(5, 100), SamplingParams(max_tokens=29, ignore_eos=True, seed=1)
    want, _ = run(model, [prompt], params)
    llm = LLM(model, n_blocks=8)
    for _ in range(2):  # the second time from the cache, whose blocks it needs itself
        assert llm.generate([prompt], params, use_tqdm=False)[0].outputs == want[0][0]
    four = SamplingParams(n=4, max_tokens=29, ignore_eos=True, seed=1)
    assert llm.generate([prompt], four, use_tqdm=False)[0].outputs == run(model, [prompt], four)[0][0][0]


def test_options_are_checked(model):
    for options in ({"max_num_seqs": 0}, {"max_num_batched_tokens": 0}, {"speculative": "magic"}, {"n_blocks": 0}):
        with pytest.raises(ValueError):
            LLM(model, **{"n_blocks": 8, **options})
    with pytest.raises(TypeError):
        LLM(model, n_blocks=8, max_num_seqs=1.5)
    with pytest.raises(pk.BadDimError):
        LLM(model, n_blocks=8, kv_dtype="float3")


def test_num_threads_and_the_default_pool(model):
    llm = LLM(model, num_threads=2, max_num_seqs=3)
    assert pk.get_num_threads() == 2 and llm.pool.n_blocks == 3 * 256 // 16


def test_blocks_held_outside(model):
    """The engine does with what is free; where that can never do, the request ends with the numbers."""
    llm = LLM(model, n_blocks=8)
    held = [llm.pool.alloc_block() for _ in range(5)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    llm.generate([ids(1, 20)] * 3, params, use_tqdm=False)
    with pytest.raises(pk.PoolExhausted, match="prompt 1: needs 4 blocks, 3 of 8 are free"):
        llm.generate([ids(1, 20), ids(2, 60), ids(3, 20)], params, use_tqdm=False)
    parts = list(llm.stream([ids(1, 20), ids(2, 60), ids(3, 20)], params))
    assert [part.request_id for part in parts if part.error] == [str(int(parts[0].request_id) + 1)]
    for block_id in held:
        llm.pool.unref_block(block_id)
    llm.generate([ids(2, 60)], params, use_tqdm=False)
    assert_idle(llm)


# ---- Prefix cache -------------------------------------------------------------------------------


def cached_tokens(llm, prompt, **fields):
    fields = {"max_tokens": 1, "temperature": 0, **fields}
    return llm.generate([prompt], SamplingParams(**fields), use_tqdm=False)[0].num_cached_tokens


@pytest.mark.parametrize("n_prompt, hits", [(1, 0), (15, 0), (16, 15), (17, 16), (32, 31), (40, 32)])
def test_hits(model, n_prompt, hits):
    """Full blocks are found; the last token of a prompt that is wholly there is computed again."""
    llm, prompt = LLM(model, n_blocks=16), ids(4, n_prompt)
    want = llm.generate([prompt], SamplingParams(max_tokens=5, logprobs=2, seed=1), use_tqdm=False)[0]
    assert want.num_cached_tokens == 0
    again = llm.generate([prompt], SamplingParams(max_tokens=5, logprobs=2, seed=1), use_tqdm=False)[0]
    assert (again.outputs, again.num_cached_tokens) == (want.outputs, hits)
    assert llm.stats()["prefix_hits"] == hits and llm.stats()["prefix_queries"] == 2 * n_prompt
    other = prompt[:-1] + [(prompt[-1] + 1) % 256]
    assert cached_tokens(llm, other) == (n_prompt - 1) // 16 * 16
    assert cached_tokens(llm, [(prompt[0] + 1) % 256] + prompt[1:]) == 0


def test_generated_tokens_are_found_too(model):
    llm, prompt = LLM(model, n_blocks=16), ids(4, 10)
    out = llm.generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True), use_tqdm=False)[0]
    assert cached_tokens(llm, prompt + out.outputs[0].token_ids) == 32  # 39 rows were computed


def test_prompts_that_come_together_share_their_beginning(model):
    """The first computes it; the others wait for it, in turn where they have more in common; who shares nothing does not."""
    begin, more = ids(5, 40), ids(6, 30)
    prompts = [begin + ids(7, 9), begin + more, begin + more + ids(8, 3), ids(9, 20), begin[:15], begin + more]
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=3, logprobs=1)
    want = [run(model, [prompt], params)[0][0][0] for prompt in prompts]
    llm, starts = LLM(model, n_blocks=40, max_num_batched_tokens=60), {}  # what is new takes more than a step's rows
    step, n_steps = llm.model.step, 0

    def noted(batch, **options):
        nonlocal n_steps
        for seq, _ in batch:
            starts.setdefault(seq, (n_steps, len(seq)))
        n_steps += 1
        return step(batch, **options)

    llm._engine.model = SimpleNamespace(step=noted, config=model.config)
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert [out.outputs for out in outs] == want
    assert [out.num_cached_tokens for out in outs] == [0, 32, 64, 0, 0, 64]
    assert sorted(starts.values()) == [(0, 0), (0, 0), (1, 0), (1, 32), (2, 64), (2, 64)]
    assert_idle(llm)
    unshared = LLM(model, n_blocks=40, enable_prefix_caching=False)
    assert [out.outputs for out in unshared.generate(prompts, params, use_tqdm=False)] == want
    assert unshared.stats()["prefix_hits"] == 0


def test_the_longest_left_is_evicted_first(model):
    llm = LLM(model, n_blocks=8)
    prompts = [ids(i, 33) for i in range(4)]
    for prompt in prompts[:3]:  # two full blocks each are kept
        cached_tokens(llm, prompt)
    assert llm.stats()["blocks_cached"] == 6 and llm.stats()["blocks_free"] == 2
    assert cached_tokens(llm, prompts[0]) == 32  # used again: now prompt 1 was left first
    cached_tokens(llm, prompts[3])  # three blocks: one more than are free, the end of prompt 1
    assert cached_tokens(llm, prompts[1][:17]) == 16
    assert cached_tokens(llm, prompts[0][:17]) == 16 and cached_tokens(llm, prompts[3]) == 32
    assert_idle(llm)


def test_blocks_in_use_are_not_evicted(model):
    """Two streams hold their prompts while a third evicts all that is idle."""
    llm, params = LLM(model, n_blocks=10), SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
    prompts = [ids(i, 33) for i in range(3)]
    want = [run(model, [prompt], params)[0][0][0] for prompt in prompts]
    streams = [llm.stream([prompt], params) for prompt in prompts[:2]]
    got = [list(next(stream).outputs[0].token_ids) for stream in streams]
    assert llm.stats()["blocks_used"] >= 6
    assert llm.generate([prompts[2]], params, use_tqdm=False)[0].outputs == want[2]
    for tokens, stream in zip(got, streams):
        tokens += [token for part in stream for token in part.outputs[0].token_ids]
    assert got == [outputs[0].token_ids for outputs in want[:2]]
    assert_idle(llm)


class _SameHash(tuple):
    """Tokens that all hash alike."""

    def __hash__(self):
        return 7


def test_equal_hashes_do_not_lie(model, mixed, monkeypatch):
    prompts, params, _ = mixed
    want, honest = run(model, prompts, params, max_num_seqs=2)
    monkeypatch.setattr(prefix_cache, "_key", lambda tokens, begin, end: _SameHash(tokens[begin:end]))
    got, llm = run(model, prompts, params, max_num_seqs=2)
    assert got == want and llm.stats()["prefix_hits"] == honest.stats()["prefix_hits"] > 0


def test_two_thousand_requests_leave_the_pool_full(model):
    llm = LLM(model, n_blocks=40, max_num_seqs=32)
    prompts = [ids(i % 300, 1 + i % 40) for i in range(2000)]
    outs = llm.generate(prompts, SamplingParams(max_tokens=2, ignore_eos=True, temperature=0), use_tqdm=False)
    assert all(len(out.outputs[0].token_ids) == 2 for out in outs)
    assert [out.outputs for out in outs[:80]] == [out.outputs for out in outs[600:680]]
    assert_idle(llm)
    n_cached = llm.stats()["blocks_cached"]
    assert llm._engine.cache.evict(10**6) == n_cached > 0 and llm.pool.n_free == 40


# ---- Exceptions ---------------------------------------------------------------------------------


class Failing:
    """Raises at the n-th call."""

    def __init__(self, call, n, error):
        self.call, self.left, self.error = call, n, error

    def __call__(self, *arguments, **fields):
        self.left -= 1
        if self.left == 0:
            raise self.error("on purpose")
        return self.call(*arguments, **fields)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("n", [1, 2, 5, 9])
@pytest.mark.parametrize("where", ["step", "draw", "append", "extend", "schedule", "fork"])
def test_an_exception_ends_the_call_and_leaves_the_engine_usable(model, mixed, monkeypatch, where, n, error):
    prompts, params, want = mixed
    llm = LLM(model, n_blocks=24)
    engine = llm._engine
    stream = llm.stream([prompts[0]], params[0])  # a request of another call, in the middle
    tokens = [list(out.token_ids) for out in next(stream).outputs]
    owner, name = {"step": (model, "step"), "draw": (engine.sampler, "draw"), "extend": (engine.cache, "extend"),
                   "append": (pk.engine.request.Sample, "append"), "schedule": (engine.scheduler, "schedule"),
                   "fork": (pk.Sequence, "fork")}[where]  # fmt: skip
    call = Failing(getattr(owner, name), n, error)
    replacement = call if where not in ("append", "fork") else lambda *a, **k: call(*a, **k)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, replacement)
        try:
            llm.generate(prompts, params, use_tqdm=False)
            assert where == "fork" and call.left > 0
        except error as raised:
            assert str(raised) == "on purpose"
    for part in stream:
        for mine, out in zip(tokens, part.outputs):
            mine += out.token_ids
        if part.error is not None:
            assert where == "append"  # its token was half taken
            break
    else:
        assert tokens == [sample.tokens for sample in want[0]]
    assert_idle(llm)
    got = llm.generate(prompts, params, use_tqdm=False)
    assert tokens_of(got) == [[sample.tokens for sample in samples] for samples in want]
    assert_idle(llm)


def test_logits_that_are_not_numbers_end_one_request(model):
    llm = LLM(model, n_blocks=64)
    draw = llm._engine.sampler.draw

    def bad(logits, wanted):
        out = draw(logits, wanted)
        return [(-1, None) if each.request.request_id == "1" and each.n_generated == 2 else pair
                for (_, each), pair in zip(wanted, out)]  # fmt: skip

    llm._engine.sampler.draw = bad
    params = SamplingParams(max_tokens=5, ignore_eos=True, n=2)
    parts = list(llm.stream([[1, 2], [3, 4], [5]], params))
    assert {part.request_id for part in parts if part.error} == {"1"}
    assert "logits hold NaN" in str(next(part.error for part in parts if part.error))
    assert sum(len(out.token_ids) for part in parts if part.request_id == "2" for out in part.outputs) == 10
    assert_idle(llm)


def test_closing_a_stream_frees_its_blocks(model):
    llm = LLM(model, n_blocks=16, enable_prefix_caching=False)
    for n_steps in (0, 1, 4):
        stream = llm.stream([ids(1, 40), ids(2, 50)], SamplingParams(n=2, max_tokens=20, ignore_eos=True))
        for _ in range(n_steps):
            next(stream)
        assert (llm.pool.n_free < 16) == (n_steps > 0)
        stream.close()
        assert_idle(llm)
    assert llm.pool.n_free == 16


def test_calls_of_several_threads_run_together(model, mixed):
    import threading

    prompts, params, want = mixed
    llm, got = LLM(model, n_blocks=24), {}

    def call(i):
        got[i] = tokens_of(llm.generate(prompts[i::3], params[i::3], use_tqdm=False))

    workers = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i in range(3):
        assert got[i] == [[sample.tokens for sample in samples] for samples in want[i::3]]
    assert_idle(llm)


def test_chat(model, monkeypatch):
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tone }}"
    monkeypatch.setattr(model.tokenizer, "_chat_templates", {"default": template})
    monkeypatch.delattr(model.tokenizer, "_compiled_template", raising=False)
    llm, params = LLM(model, n_blocks=64), SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    want, = llm.generate(["[Hi][Yes]"], params, use_tqdm=False)
    one, = llm.chat(talk, params, use_tqdm=False)
    two = llm.chat([talk, talk[:1]], params, use_tqdm=False, tone="!")
    assert (one.prompt, one.outputs) == ("[Hi][Yes]", want.outputs)
    assert [out.prompt for out in two] == ["[Hi][Yes]!", "[Hi]!"]


def test_a_model_without_a_tokenizer(tmp_path):
    config = tiny_config()
    llm = LLM(write_hf(tmp_path / "bare", config, tiny_tensors(config)), n_blocks=8)
    out, = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, logprobs=1, ignore_eos=True), use_tqdm=False)
    assert out.outputs[0].text == "" and len(out.outputs[0].token_ids) == 3
    assert out.outputs[0].logprobs[0][out.outputs[0].token_ids[0]].decoded_token is None
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate([[1, 2, 3]], SamplingParams(stop="a"), use_tqdm=False)
    with pytest.raises(pk.FormatError):
        llm.generate(["text"], use_tqdm=False)


def test_stats(model):
    llm = LLM(model, n_blocks=10, max_num_seqs=2)
    stream = llm.stream([ids(i, 17) for i in range(4)], SamplingParams(max_tokens=3, ignore_eos=True))
    next(stream)
    stats = llm.stats()
    assert (stats["running"], stats["waiting"], stats["blocks_used"]) == (2, 2, 4)
    assert stats["blocks_free"] + stats["blocks_used"] + stats["blocks_cached"] == 10
    list(stream)
    stats = llm.stats()
    assert (stats["tokens"], stats["preemptions"], stats["prefix_queries"]) == (12, 0, 68) and stats["tokens_per_s"] > 0
    assert_idle(llm)


def test_blocks_in_use_are_compared_with_those_without_sharing(model):
    """A prompt of a block and 5 rows, four samples, by hand."""
    llm = LLM(model, n_blocks=40, enable_prefix_caching=False)
    stream = llm.stream(ids(1, 21), SamplingParams(n=4, max_tokens=30, ignore_eos=True))
    seen = [(stats["blocks_used_most"], stats["blocks_unshared_most"]) for stats in (llm.stats() for _ in stream)]
    # One prompt serves four; each goes on in a copy of its tail; 50 rows in the end, three blocks of each its own.
    assert seen[0] == (2, 4 * 2) and seen[1] == (1 + 4, 4 * 2) and seen[-1] == (1 + 4 * 3, 4 * 4)


def test_run_takes_requests_as_there_is_place(model):
    """Keys and texts as of LLM.generate; no more in memory than twice what runs; closing ends what is under way."""
    prompts, params = requests(7, 25)
    want = [out.outputs for out in LLM(model, n_blocks=64).generate(prompts, params, use_tqdm=False)]
    engine, got, n_taken = LLM(model, n_blocks=64, max_num_seqs=3)._engine, {}, 0

    def coming():
        nonlocal n_taken
        for i, each in enumerate(zip(prompts, params)):
            n_taken += 1
            assert sum(params[j].n for j in range(i) if j not in got) <= 6 + 4
            yield i, *each

    for ended in engine.run(coming()):
        got |= {i: request.output().outputs for i, request in ended}
    assert [got[i] for i in range(25)] == want and n_taken == 25 and not engine.has_work
    steps = engine.run((i, [5], SamplingParams(max_tokens=50, ignore_eos=True)) for i in range(9))
    next(steps)
    assert engine.stats()["running"] == 3
    steps.close()
    assert not engine.has_work and engine.stats()["blocks_used"] == 0
    assert list(engine.run([])) == []


def test_weights_and_compute_reach_the_model(tmp_path):
    path = tmp_path / "quantised.gguf"
    config = tiny_config()
    write_gguf(path, config, tiny_tensors(config), types="q8_0")
    model = LLM(path, n_blocks=4, compute="int8").model
    assert model.compute == "int8" == LLM(model, n_blocks=4, compute="int8").model.compute
    assert LLM(path, n_blocks=4).model.compute == "float32"
    with pytest.raises(ValueError, match="compute='float32', but the model is loaded already, with compute='int8'"):
        LLM(model, n_blocks=4, compute="float32")
    with pytest.raises(ValueError, match="weights='float32' is chosen when a model is loaded"):
        LLM(model, n_blocks=4, weights="float32")
    with pytest.raises(ValueError, match="compute='int8' multiplies the codes"):
        LLM(path, n_blocks=4, weights="float32", compute="int8")
    quantised, expanded = (LLM(path, n_blocks=4, weights=weights).model for weights in ("auto", "float32"))
    assert expanded.weight_nbytes > 2 * quantised.weight_nbytes


def test_the_progress_bar(model, capsys):
    LLM(model, n_blocks=10).generate([[1], [2]], SamplingParams(max_tokens=2))
    assert "2/2" in capsys.readouterr().err


def test_step_gives_the_logits_asked_for(model):
    pool = model.new_pool(n_tokens=256)
    seqs = [model.new_sequence(pool) for _ in range(3)]
    tokens = [ids(i, 5 + i) for i in range(3)]
    want = model.step(list(zip(seqs, tokens)), all_logits=True)
    seqs = [model.new_sequence(model.new_pool(n_tokens=64)) for _ in range(3)]
    got = model.step(list(zip(seqs, tokens)), n_logits=[2, 0, 7])
    assert got.tobytes() == np.concatenate([want[3:5], want[11:18]]).tobytes()
    for counts in ([1, 1], [1, 1, 8], [1, -1, 1]):
        with pytest.raises(pk.BadDimError):
            model.step(list(zip(seqs, tokens)), n_logits=counts)
    assert [len(seq) for seq in seqs] == [5, 6, 7]


# ---- The real model -----------------------------------------------------------------------------


def test_the_real_model(threads):
    """Greedy and sampled, in a small and in a large pool, with the cache and without."""
    model = real_model()
    threads(2)
    prompts = ["The capital of France is", "Once upon a time", "def f(x):", "The capital of France was"]
    params = [SamplingParams(temperature=0, max_tokens=12, logprobs=3), SamplingParams(n=3, seed=1, max_tokens=10),
              SamplingParams(seed=2, top_p=0.9, max_tokens=12),
              SamplingParams(seed=2, top_k=9, max_tokens=12, n=2)]  # fmt: skip
    runs = [LLM(model, **options).generate(prompts, params, use_tqdm=False)
            for options in ({"n_blocks": 4096}, {"n_blocks": 6}, {"n_blocks": 24, "enable_prefix_caching": False},
                            {"n_blocks": 24, "max_num_batched_tokens": 3})]  # fmt: skip
    for outs in runs[1:]:
        assert [out.outputs for out in outs] == [out.outputs for out in runs[0]]
    assert runs[0][0].outputs[0].text.startswith(" Paris")


def test_the_examples_of_the_docstrings():
    import doctest

    model = real_model()
    source = LLM.__doc__.replace("# doctest: +SKIP", "").replace('pk.LLM("smollm2-135m")', "pk.LLM(model)")
    source = source.replace("is\"], params)", "is\"], params, use_tqdm=False)")
    test = doctest.DocTestParser().get_doctest(source, {"model": model}, "LLM", None, 0)
    assert doctest.DocTestRunner().run(test) == (0, 4)


def test_a_bar_that_failed_keeps_no_other_waiting(model):
    """A stream that refuses the bar's text, in one thread; then a call with a bar in another."""
    from pagedkv.progress import progress_bar

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def flush(self):
            pass

    with pytest.raises(OSError):
        progress_bar(total=2, file=Full())
    done = threading.Thread(target=lambda: progress_bar(total=2, file=io.StringIO()).close(), daemon=True)
    done.start()
    done.join(30)
    assert not done.is_alive()
