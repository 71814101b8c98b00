"""Sampling against a slow float64 reference: sort everything, then walk down the probabilities."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import SamplingParams, _core

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Thousands of calls on small arrays: on a busy machine they would mostly wait for each other's threads."""
    threads(1)


@pytest.mark.parametrize("top_k", [40, 2**31, 2**63 - 1, 2**63, 10**30])
def test_more_likeliest_tokens_than_there_are(top_k):
    logits = np.linspace(-1, 1, 40, dtype=np.float32)
    for seed in range(20):
        expected = SamplingParams(seed=seed).choose(logits, sample=0, position=1)
        assert SamplingParams(seed=seed, top_k=top_k).choose(logits, sample=0, position=1) == expected


def reference(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probability of each token id that may be chosen, a dict from the likeliest on, by the contract's words."""
    logits = [float(x) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    weights = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    order = [i for i in order if weights[i] >= min_p][: top_k or None]
    total, kept = math.fsum(weights[i] for i in order), {}
    for i in order:
        kept[i] = weights[i]
        if math.fsum(kept.values()) >= top_p * total:
            break
    total = math.fsum(kept.values())
    return {i: weight / total for i, weight in kept.items() if weight}


def draws(rule, logits, n, sample=0, seed=0):
    """Tokens of positions 0 .. n - 1, and the uniform numbers that chose them."""
    rule = SamplingParams(seed=seed, **rule)
    each = np.array([rule._draw(0, seed, sample, position) for position in range(n)], _core.DRAW)
    tokens = _core.sample(np.asarray(logits, np.float32)[None], each)
    return tokens, np.array([_core.uniform(seed, sample, position) for position in range(n)])


def random_logits(seed, n, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


def assert_choices(logits, rule, n=2000, slack=2e-6):
    """Every draw is the id whose share of [0, 1), laid out in the order of ids, holds the uniform number."""
    want = reference(logits, **rule)
    ids = np.array(sorted(want))
    edges = np.cumsum([want[i] for i in ids])
    tokens, uniforms = draws(rule, logits, n)
    at = np.searchsorted(ids, tokens)
    assert (ids[np.minimum(at, len(ids) - 1)] == tokens).all()
    assert (uniforms <= edges[at] + slack).all() and (uniforms >= edges[at] - [want[i] for i in tokens] - slack).all()
    return set(tokens.tolist())


RULES = [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 7}, {"top_p": 0.8}, {"top_p": 0.95, "temperature": 0.8},
    {"top_k": 12, "top_p": 0.7}, {"top_k": 12, "top_p": 0.9, "temperature": 1.7}, {"min_p": 0.05},
    {"min_p": 0.1, "top_k": 9}, {"min_p": 0.02, "top_p": 0.8}, {"min_p": 1.0}, {"top_k": 2}, {"top_k": 39},
    {"temperature": 50.0, "top_p": 0.3}, {"temperature": 9.0, "top_k": 30, "top_p": 0.9, "min_p": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("n_vocab, scale", [(40, 2.0), (700, 2.0), (5000, 4.0)])
def test_shares_are_those_of_the_reference(rule, n_vocab, scale):
    logits = random_logits(n_vocab, n_vocab, scale)
    logits[::3] = np.round(logits[::3])  # ties
    assert_choices(logits, rule)


@pytest.mark.parametrize("logits, rule, support", [
    ([1, 3, 3, 3, 0], {"top_k": 2}, {1, 2}),  # three equal for two places: the lowest ids
    ([3, 1, 3, 1, 1], {"top_k": 3}, {0, 1, 2}),
    ([0, 0, 0, 0], {"top_p": 0.5}, {0, 1}),  # exactly half after two
    ([0, 0, 0, 0], {"top_p": 0.500001}, {0, 1, 2}),
    ([0, 0, 0, 0], {"top_p": 1e-4}, {0}),
    ([0, -0.0, 0, -0.0], {"top_k": 2}, {0, 1}),  # zero has no sign here
    ([-0.0, 0.0, -1, -1], {"top_k": 3}, {0, 1, 2}),
    ([2, 2, 2, 2, 2, 2], {"top_k": 4, "top_p": 0.5}, {0, 1}),  # half of the four, not of the six
    ([0, 0, -np.inf, 0], {}, {0, 1, 3}),
    ([0, -np.inf, -np.inf, 0], {"top_k": 3}, {0, 3}),
    ([-np.inf, 5], {"top_p": 0.9}, {1}),
    ([7], {"top_p": 0.9}, {0}),
    ([7], {}, {0}),
    ([1, 2], {"temperature": 1e39}, {0, 1}),  # flat, and no warning
    ([1, -np.inf, 2], {"temperature": 1e308}, {0, 2}),
    ([3e38, -3e38], {}, {0}),  # their distance is past float32
    ([3e38, -3e38], {"top_p": 0.9, "temperature": 1e30}, {0}),
    ([0, 0, -1, -5], {"min_p": 1.0}, {0, 1}),
    ([0, 0, -1, -5], {"min_p": 0.3}, {0, 1, 2}),
    ([0, 0, 0, -1], {"min_p": 0.3, "top_k": 2}, {0, 1}),
])  # fmt: skip
def test_support_sets(logits, rule, support):
    assert set(draws(rule, logits, 300)[0].tolist()) == support


def test_a_token_without_weight_is_never_chosen():
    many = np.full(1000, -np.inf, np.float32)
    many[[300, 999]] = 5
    for rule in ({}, {"top_p": 0.999}, {"top_k": 3}, {"min_p": 0.5}):
        assert set(draws(rule, many, 300)[0].tolist()) == {300, 999}


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 3.0, -2.0, 40.0, -40.0, -np.inf]), min_size=1, max_size=600),
    st.sampled_from([0.1, 0.8, 1.0, 5.0, 1e5]),
    st.integers(0, 20),
    st.sampled_from([0.05, 0.37, 0.77, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.7]),
)
def test_every_choice_is_in_the_support(logits, temperature, top_k, top_p, min_p):
    logits = np.array([*logits, 0.25], np.float32)  # never all -inf
    got = draws({"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}, logits, 20, sample=3)[0]
    # top_p a hair larger: where a sum meets it to the last bits, float32 weights may keep one more.
    assert set(got.tolist()) <= set(reference(logits, temperature, top_k, min(1.0, top_p * (1 + 1e-5)), min_p))


@pytest.mark.parametrize("rule", [
    {"top_p": 0.95, "temperature": 0.8}, {"top_p": 0.5}, {"top_p": 0.9999}, {"top_p": 0.9, "temperature": 7.0},
    {"top_k": 40, "top_p": 0.95}, {"top_k": 3000, "top_p": 1.0}, {"top_k": 49_151}, {"top_p": 1 - 2.0**-53}, {},
    {"min_p": 0.01, "top_p": 0.9},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 30.0])
def test_a_large_vocabulary_equals_a_full_sort(rule, scale):
    """The short cut through the most likely tokens never shows."""
    logits = random_logits(5, 49_152, scale)
    logits[::7] = np.round(logits[::7], 1)
    temperature = np.float32(rule.get("temperature", 1.0))
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(((logits - logits.max()) / temperature).astype(np.float64))
    weights[weights < rule.get("min_p", 0.0)] = 0.0
    kept = order[: rule.get("top_k") or None]
    reached = np.cumsum(weights[kept])
    if rule.get("top_p", 1.0) < 1:
        kept = kept[: np.searchsorted(reached, rule["top_p"] * reached[-1]) + 1]
    ids = np.sort(kept)
    edges = np.cumsum(weights[ids]) / weights[ids].sum()
    tokens, uniforms = draws(rule, logits, 200)
    at = np.searchsorted(ids, tokens)
    near = 1e-4 if scale == 0.01 else 1e-5  # the border of top_p may move by one token of 49,152
    assert (np.abs(ids[np.minimum(at, len(ids) - 1)] - tokens) <= (7 if near == 1e-4 else 0)).all() or near == 1e-4
    assert (uniforms <= edges[np.minimum(at, len(ids) - 1)] + near).all()
    assert (uniforms >= edges[at - 1] * (at > 0) - near).all()


@pytest.mark.parametrize("rule", [
    {"temperature": 0}, {"temperature": 1e-40}, {"temperature": 1e-300}, {"temperature": 1e-4}, {"top_p": 1e-4},
    {"top_k": 1}, {"temperature": 0, "top_k": 5, "top_p": 0.5}, {"temperature": 1e-40, "top_p": 0.9}, {"min_p": 1.0},
], ids=str)  # fmt: skip
def test_small_temperatures_and_small_sums_are_argmax(rule):
    for seed in range(20):
        logits = random_logits(seed, 300, 5.0)
        if seed % 2:
            logits[np.random.default_rng(seed).integers(0, 300, 100)] = -np.inf
        assert SamplingParams(**rule).choose(logits, seed, 9) == int(np.argmax(logits))


@pytest.mark.parametrize("rule", [{"temperature": 0}, {"temperature": 1e-4, "top_k": 1}, {"top_p": 1e-9}])
@pytest.mark.parametrize("n", [5, 16, 17, 300, 1000])
def test_of_equal_maxima_the_lowest_id(rule, n):
    logits = np.zeros(n, np.float32)
    logits[[n - 1, n // 2, 2]] = 5
    assert set(draws(rule, logits, 30)[0].tolist()) == {min(2, n // 2)}


@pytest.mark.parametrize("rule", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.01}])
def test_excluded_tokens_are_never_chosen(rule):
    rng = np.random.default_rng(4)
    for trial in range(20):
        logits = random_logits(trial, 300)
        allowed = rng.choice(300, rng.integers(1, 60), replace=False)
        masked = np.full(300, -np.inf, np.float32)
        masked[allowed] = logits[allowed]
        assert set(draws(rule, masked, 40)[0].tolist()) <= set(allowed.tolist())


def test_samples_differ_and_each_is_reproducible():
    logits, rule = random_logits(0, 1000), {"temperature": 0.8, "top_p": 0.95}
    texts = [tuple(draws(rule, logits, 20, sample, seed=5)[0].tolist()) for sample in range(8)]
    assert len(set(texts)) == 8
    alone = SamplingParams(seed=5, **rule)
    assert [tuple(alone.choose(logits, sample, i) for i in range(20)) for sample in range(8)] == texts


def test_a_draw_does_not_depend_on_the_others_or_on_threads(threads):
    logits = np.stack([random_logits(i, 3001, 3.0) for i in range(9)])
    rules = [SamplingParams(**rule) for rule in RULES]
    each = np.array([rules[i % len(rules)]._draw(i % 9, 7, i, 100 - i) for i in range(64)], _core.DRAW)
    alone = [int(_core.sample(logits[row : row + 1].copy(), np.array([(0, *rest)], _core.DRAW))[0])
             for row, *rest in each.tolist()]  # fmt: skip
    for n in (1, 2, 5):
        threads(n)
        assert _core.sample(logits, each).tolist() == alone
        assert _core.sample(logits, each[::-1].copy()).tolist() == alone[::-1]


def test_every_instruction_set_gives_the_same_bits():
    logits = np.stack([random_logits(i, 5003, 4.0) for i in range(8)])
    each = np.array([SamplingParams(**rule)._draw(i % 8, 7, i, i) for i, rule in enumerate(RULES * 8)], _core.DRAW)
    rows, before, got = np.arange(8), _core.isa(), []
    try:
        for name in _core.available_isas():
            _core._set_isa(name)
            got.append((_core.sample(logits, each).tolist(), *(a.tobytes() for a in _core.logprobs(logits, rows, rows, 9))))
    finally:
        _core._set_isa(before)
    assert got == [got[0]] * len(got)


def test_seed_sample_and_position_enter_the_key():
    keys = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (1, 3, 2), (2**64 - 1, 2, 3), (1, 2**64 - 1, 3),
            (1, 2, 2**64 - 1)]  # fmt: skip
    numbers = [_core.uniform(*key) for key in keys]
    assert len(set(numbers)) == len(numbers) and all(0 <= u < 1 for u in numbers)


def test_the_random_numbers_are_those_of_philox():
    """Fixed for ever: a seed's text must not change with a release. Key (seed, sample), counter (position, 0, 0, 0)."""
    for seed, sample, position in ((0, 0, 0), (7, 1, 9), (2**64 - 1, 3, 2**40), (5, 2**63, 1), (1, 2, 2**64 - 1)):
        key, counter = np.array([seed, sample], np.uint64), np.array([position, 0, 0, 0], np.uint64)
        word = int(np.random.Philox(key=key, counter=counter).random_raw())
        assert _core.uniform(seed, sample, position) == (word >> 11) / 2**53


def test_the_logarithm_is_within_an_ulp():
    rng = np.random.default_rng(0)
    edge = math.sqrt(0.5)
    for x in [1.0, 2.0, 0.5, edge, math.nextafter(edge, 0), 1e-300, 1.7e308, *np.exp(rng.uniform(-9, 12, 5000))]:
        assert abs(_core.log(x) - math.log(x)) <= 2.3e-16 * max(abs(math.log(x)), 1e-2), x


@pytest.mark.parametrize("n_vocab", [1, 2, 17, 300, 49_152])
@pytest.mark.parametrize("scale", [0.0, 1.0, 12.0])
def test_logprobs_ranks_and_first_ids(n_vocab, scale):
    logits = np.stack([random_logits(i, n_vocab, scale) for i in range(3)])
    logits[:, ::5] = np.round(logits[:, ::5], 1)
    rows, n_top = np.array([2, 0, 1, 1]), min(25, n_vocab)
    chosen = np.random.default_rng(1).integers(0, n_vocab, 4)
    log_sums, ranks, top = _core.logprobs(logits, rows, chosen, n_top)
    for row, token, log_sum, rank, ids in zip(rows, chosen, log_sums, ranks, top):
        x = logits[row].astype(np.float64)
        order = np.argsort(-x, kind="stable")
        assert abs(log_sum - (x.max() + math.log(math.fsum(np.exp(x - x.max()))))) < 1e-6
        assert ids.tolist() == order[:n_top].tolist() and order[rank - 1] == token


def test_a_draw_with_log_probabilities_is_both(threads):
    """One reading of a row gives what two give, whatever the draw did to its sums before."""
    logits = np.stack([random_logits(i, 3001, 3.0) for i in range(8)])
    logits[1, ::5] = np.round(logits[1, ::5])
    logits[2, ::2] = -np.inf
    logits[5, 700], logits[6], logits[7, 9] = np.nan, -np.inf, np.inf
    rules = [{"temperature": 0}, *RULES]
    each = np.array([SamplingParams(**rules[i % len(rules)])._draw(i % 8, 7, i, i) for i in range(8 * len(rules))],
                    _core.DRAW)  # fmt: skip
    n_tops = np.arange(len(each)) % 7 - 1
    for n in (1, 2):
        threads(n)
        tokens, log_sums, ranks, top = _core.sample_logprobs(logits, each, n_tops)
        assert tokens.tolist() == _core.sample(logits, each).tolist() and top.shape == (len(each), 5)
        assert (tokens < 0).tolist() == (each["row"] >= 5).tolist()
        for row, token, n_top, *got in zip(each["row"], tokens, n_tops, log_sums, ranks, top):
            if n_top < 0 or token < 0:
                assert math.isnan(got[0]) and got[1] == 0 and not got[2].any()
                continue
            log_sum, rank, ids = _core.logprobs(logits, np.array([row]), np.array([token]), n_top)
            assert (got[0], got[1], got[2][:n_top].tolist()) == (log_sum[0], rank[0], ids[0].tolist())


def test_ranks_of_every_token_in_ties_and_excluded_ones():
    logits = np.round(random_logits(3, 700, 2.0))[None]
    logits[0, 100:500:3] = -np.inf
    order = np.argsort(-logits[0], kind="stable")
    ranks = _core.logprobs(logits, np.zeros(700, np.int64), order, 0)[1]
    assert ranks.tolist() == list(range(1, 701))


def test_logprobs_of_the_whole_vocabulary_are_sorted():
    logits = random_logits(3, 1000)[None]
    ids = _core.logprobs(logits, np.array([0]), np.array([5]), 1000)[2][0]
    assert ids.tolist() == np.argsort(-logits[0], kind="stable").tolist()


@pytest.mark.parametrize("field, value", [
    ("temperature", -1.0), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -2), ("top_p", 0.0),
    ("top_p", -0.5), ("top_p", 1.0000001), ("top_p", math.nan), ("seed", -2), ("seed", 2**64), ("min_p", -0.1),
    ("min_p", 1.1), ("min_p", math.nan), ("n", 0), ("n", -1), ("presence_penalty", 2.1), ("presence_penalty", math.nan),
    ("frequency_penalty", -2.1), ("repetition_penalty", 0.0), ("repetition_penalty", -1.0),
    ("repetition_penalty", math.inf), ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 17), ("logprobs", -2),
    ("prompt_logprobs", -2), ("stop", [""]), ("stop", ["a", 5]), ("stop_token_ids", [-1]),
    ("logit_bias", {1: math.nan}),
])  # fmt: skip
def test_impossible_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"])
def test_counts_are_integers(field):
    with pytest.raises(TypeError):
        SamplingParams(**{field: 1.5})


def test_defaults_and_spellings_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.seed, params.stop, params.stop_token_ids, params.ignore_eos) == (None, [], [], False)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.prompt_logprobs) == (16, 0, None, None)
    assert (params.skip_special_tokens, params.include_stop_str_in_output, params.logit_bias) == (True, False, None)
    assert SamplingParams(stop="a").stop == ["a"] and SamplingParams(stop=("a", "b")).stop == ["a", "b"]
    assert SamplingParams(top_k=-1).top_k == 0 and SamplingParams(seed=-1).seed is None
    assert SamplingParams(logit_bias={"5": 200, 6: -3}).logit_bias == {5: 100.0, 6: -3.0}
    with pytest.raises(ValueError, match="detokenize must be True"):
        SamplingParams(stop="a", detokenize=False)


@pytest.mark.parametrize("logits, sample, position, message", [
    ([], 0, 0, "shape"), ([[1.0]], 0, 0, "shape"), ([1.0, math.nan], 0, 0, "largest logit is nan"),
    ([math.nan] + [1.0] * 20, 0, 0, "largest logit is nan"),
    ([1.0] * 20 + [math.nan] * 300, 0, 0, "largest logit is nan"),
    ([1.0, math.inf], 0, 0, "largest logit is inf"), ([-math.inf] * 3, 0, 0, "largest logit is -inf"),
    ([1.0], -1, 0, "sample must be"), ([1.0], 2**64, 0, "sample must be"), ([1.0], 0, -1, "position must be"),
    ([1.0], 0, 2**64, "position must be"),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_impossible_arguments_are_refused(logits, sample, position, message, temperature):
    with pytest.raises(ValueError, match=message):
        SamplingParams(temperature=temperature).choose(np.array(logits, np.float32), sample, position)


def test_the_core_checks_its_arguments():
    logits, draw = np.zeros((2, 5), np.float32), np.zeros(1, _core.DRAW)
    draw["row"] = 2
    with pytest.raises(IndexError, match=r"row 2 is outside \[0, 2\)"):
        _core.sample(logits, draw)
    with pytest.raises(IndexError):
        _core.logprobs(logits, np.array([-1]), np.array([0]), 0)
    with pytest.raises(ValueError, match=r"id 5 is outside \[0, 5\)"):
        _core.logprobs(logits, np.array([0]), np.array([5]), 0)
    with pytest.raises(ValueError, match="the first 6 of 5"):
        _core.logprobs(logits, np.array([0]), np.array([0]), 6)
    with pytest.raises(ValueError, match="the first 0 of 5 for 2 rows"):
        _core.logprobs(logits, np.array([0, 1]), np.array([0]), 0)
    draw["row"] = 0
    with pytest.raises(ValueError, match="the first 6 of 5 ids"):
        _core.sample_logprobs(logits, draw, np.array([6]))
    with pytest.raises(ValueError, match="2 counts for 1 rows"):
        _core.sample_logprobs(logits, draw, np.array([0, 0]))


def test_nothing_warns_and_nothing_is_written():
    logits = random_logits(1, 300, 50.0)
    logits.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for temperature in (0, 1e-45, 1e-38, 1.0, 3e38, 1e39, 1e308):
            for rule in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
                SamplingParams(temperature=temperature, **rule).choose(logits, 0, 0)
