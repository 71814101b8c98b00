"""Sampling against a slow float64 reference: sort everything, then walk down the probabilities."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedkv import Sampling, exp, sampling

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(autouse=True)
def one_thread(threads):
    """Thousands of calls on small arrays: on a busy machine they would mostly wait for each other's threads."""
    threads(1)


def reference(logits, temperature=1.0, top_k=0, top_p=1.0):
    """Probability of each token id that may be chosen, a dict, in float64 and by the contract's words."""
    logits = [float(x) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    total, kept = math.fsum(weights), {}
    for i, weight in zip(order, weights):
        kept[i] = weight
        if math.fsum(kept.values()) >= top_p * total:
            break
    total = math.fsum(kept.values())
    return {i: weight / total for i, weight in kept.items() if weight}


def draws(choose, logits, n, sample=0):
    return np.array([choose.choose(logits, sample, position) for position in range(n)])


def random_logits(seed, n, scale=2.0):
    return (np.random.default_rng(seed).standard_normal(n) * scale).astype(np.float32)


@pytest.mark.parametrize("rule", [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 7}, {"top_p": 0.8}, {"top_p": 0.95, "temperature": 0.8},
    {"top_k": 12, "top_p": 0.7}, {"top_k": 12, "top_p": 0.9, "temperature": 1.7}, {"top_k": 1000, "top_p": 0.999},
])  # fmt: skip
@pytest.mark.parametrize("n_vocab", [40, 700])
def test_distribution(rule, n_vocab):
    """Chi-square of 4,000 draws, over the tokens expected five times or more and all others as one."""
    logits = random_logits(n_vocab, n_vocab)
    want = reference(logits, **rule)
    counts = np.bincount(draws(Sampling(seed=11, **rule), logits, 4000), minlength=n_vocab)
    assert set(np.flatnonzero(counts)) <= set(want)
    expected = 4000 * np.array([want.get(i, 0.0) for i in range(n_vocab)])
    often = expected >= 5
    seen, due = [*counts[often], counts[~often].sum()], [*expected[often], expected[~often].sum()]
    chi2 = sum((a - b) ** 2 / b for a, b in zip(seen, due) if b > 0)
    freedom = max(1, sum(b > 0 for b in due) - 1)
    # Mean `freedom`, standard deviation sqrt(2 freedom); six of them. The seed is fixed, so it cannot flake.
    assert chi2 < freedom + 6 * math.sqrt(2 * freedom)


def inverse(logits, rule, monkeypatch):
    """Ids chosen as the uniform number runs over a fine grid: the exact support, and each one's share."""
    choose, ids = Sampling(**rule), []
    for u in [0.0, *(np.arange(2000) + 0.5) / 2000, 1 - 2.0**-53]:
        monkeypatch.setattr(Sampling, "_uniform", lambda *_, u=u: float(u))
        ids.append(choose.choose(logits, 0, 0))
    monkeypatch.undo()
    return np.array(ids)


@pytest.mark.parametrize("rule", [
    {}, {"temperature": 0.3}, {"top_k": 1}, {"top_k": 2}, {"top_k": 5}, {"top_k": 99}, {"top_p": 0.5}, {"top_p": 0.9},
    {"top_p": 0.999999}, {"top_k": 6, "top_p": 0.6}, {"top_k": 3, "temperature": 9.0},
    {"top_p": 0.3, "temperature": 50.0},
])  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_support_and_shares_are_exact(rule, seed, monkeypatch):
    logits = random_logits(seed, 30, 1.0)
    logits[::3] = np.round(logits[::3])  # ties
    want = reference(logits, **rule)
    ids = inverse(logits, rule, monkeypatch)
    shares = np.bincount(ids, minlength=30) / len(ids)
    for i in range(30):
        assert abs(shares[i] - want.get(i, 0.0)) < 2e-3
        assert (shares[i] > 0) == (want.get(i, 0.0) > 1e-3) or 0 < want.get(i, 0.0) < 2e-3


@pytest.mark.parametrize("logits, rule, support", [
    ([1, 3, 3, 3, 0], {"top_k": 2}, {1, 2}),  # three equal for two places: the lowest ids
    ([3, 1, 3, 1, 1], {"top_k": 3}, {0, 1, 2}),
    ([0, 0, 0, 0], {"top_p": 0.5}, {0, 1}),  # exactly half after two
    ([0, 0, 0, 0], {"top_p": 0.500001}, {0, 1, 2}),
    ([0, 0, 0, 0], {"top_p": 1e-4}, {0}),
    ([2, 2, 2, 2, 2, 2], {"top_k": 4, "top_p": 0.5}, {0, 1}),  # half of the four, not of the six
    ([0, 0, -np.inf, 0], {}, {0, 1, 3}),
    ([0, -np.inf, -np.inf, 0], {"top_k": 3}, {0, 3}),
    ([-np.inf, 5], {"top_p": 0.9}, {1}),
    ([7], {"top_p": 0.9}, {0}),
    ([7], {}, {0}),
    ([1, 2], {"temperature": 1e39}, {0, 1}),  # flat, and no warning of NumPy's
    ([1, -np.inf, 2], {"temperature": 1e308}, {0, 2}),
    ([3e38, -3e38], {}, {0}),  # their distance is past float32
    ([3e38, -3e38], {"top_p": 0.9, "temperature": 1e30}, {0}),
])  # fmt: skip
def test_support_sets(logits, rule, support, monkeypatch):
    assert set(inverse(np.array(logits, np.float32), rule, monkeypatch)) == support


@pytest.mark.parametrize("rule", [{}, {"top_p": 0.999}, {"top_k": 3}])
@pytest.mark.parametrize("uniform, chosen", [(0.0, 1), (1.0, 2)])
def test_the_ends_of_the_range(rule, uniform, chosen, monkeypatch):
    """A token of no weight is never chosen: not as the first, and not where rounding lifts the number to the sum."""
    monkeypatch.setattr(Sampling, "_uniform", lambda *_: uniform)
    assert Sampling(**rule).choose(np.array([-np.inf, 5, 5, -np.inf], np.float32), 0, 0) == chosen
    many = np.full(1000, -np.inf, np.float32)
    many[[1, 2]] = 5  # in the second and third lane
    assert Sampling(**rule).choose(many, 0, 0) == chosen


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 3.0, -2.0, 40.0, -40.0, -np.inf]), min_size=1, max_size=600),
    st.sampled_from([0.1, 0.8, 1.0, 5.0, 1e5]),
    st.integers(0, 20),
    st.sampled_from([0.05, 0.37, 0.77, 0.95, 1.0]),
    st.integers(0, 10**6),
)
def test_every_choice_is_in_the_support(logits, temperature, top_k, top_p, position):
    logits = np.array([*logits, 0.25], np.float32)  # never all -inf
    id_ = Sampling(temperature, top_k, top_p).choose(logits, 3, position)
    # top_p a hair larger: where a sum meets it to the last bits, float32 weights may keep one more.
    assert id_ in reference(logits, temperature, top_k, min(1.0, top_p * (1 + 1e-5)))


def sorted_rule(logits, rule, uniform):
    """What a full sort of all weights would choose, with the package's own weights."""
    logits = np.asarray(logits)
    order = np.argsort(-logits, kind="stable")[: rule.get("top_k") or None]
    temperature = np.float32(rule.get("temperature", 1.0))
    reached = np.cumsum(exp((logits[order] - logits.max()) / temperature), dtype=np.float64)
    n_kept = np.searchsorted(reached, rule["top_p"] * reached[-1]) + 1
    reached = reached[:n_kept]
    return order[np.searchsorted(reached, uniform * reached[-1], side="right")]


@pytest.mark.parametrize("rule", [
    {"top_p": 0.95, "temperature": 0.8}, {"top_p": 0.5}, {"top_p": 0.9999}, {"top_p": 0.9, "temperature": 7.0},
    {"top_k": 40, "top_p": 0.95}, {"top_k": 3000, "top_p": 1.0}, {"top_p": 1 - 2.0**-53},
])  # fmt: skip
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 30.0])
def test_a_large_vocabulary_equals_a_full_sort(rule, scale, monkeypatch):
    """The short cut through the most likely tokens never shows."""
    logits = random_logits(5, 49_152, scale)
    logits[::7] = np.round(logits[::7], 1)
    for uniform in (0.0, 0.2, 0.77, 0.97, 0.9995):
        monkeypatch.setattr(Sampling, "_uniform", lambda *_, u=uniform: u)
        assert Sampling(**rule).choose(logits, 0, 0) == sorted_rule(logits, rule, uniform)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000, 49_152])
def test_lanes_are_summed_in_one_order(n):
    """What NumPy's sum over an axis gives is the plain running sum that the choice is specified by."""
    weights = np.zeros(-(-n // 256) * 256, np.float32)
    weights[:n] = np.random.default_rng(n).random(n, np.float32) ** 9
    lanes = weights.reshape(-1, sampling._N_LANES)
    want = np.zeros(sampling._N_LANES)
    for row in lanes:
        want = want + row
    assert lanes.sum(axis=0, dtype=np.float64).tobytes() == want.tobytes()


def test_all_of_a_large_vocabulary(monkeypatch):
    """top_p = 1 sorts nothing: each token still has its share of [0, 1), to 1e-6."""
    logits = random_logits(6, 5000, 3.0)
    want = reference(logits)
    lanes = [i for lane in range(256) for i in range(lane, 5000, 256)]  # the order in which shares are laid out
    edges = np.cumsum([want[i] for i in lanes])
    for u in np.linspace(0, 1, 997, endpoint=False):
        monkeypatch.setattr(Sampling, "_uniform", lambda *_, u=u: u)
        at = lanes.index(Sampling().choose(logits, 0, 0))
        assert edges[at - 1] * (at > 0) - 1e-6 <= u <= edges[at] + 1e-6


@pytest.mark.parametrize("rule", [
    {"temperature": 0}, {"temperature": 1e-40}, {"temperature": 1e-300}, {"temperature": 1e-4}, {"top_p": 1e-4},
    {"top_k": 1}, {"temperature": 0, "top_k": 5, "top_p": 0.5}, {"temperature": 1e-40, "top_p": 0.9},
    {"temperature": 1e-40, "top_k": 9},
])  # fmt: skip
def test_greedy_extremes(rule):
    for seed in range(20):
        logits = random_logits(seed, 300, 10.0)
        if seed % 2:
            logits[np.random.default_rng(seed).integers(0, 300, 100)] = -np.inf
        assert Sampling(**rule).choose(logits, seed, 9) == int(np.argmax(logits))


@pytest.mark.parametrize("rule", [{"temperature": 0}, {"temperature": 1e-4, "top_k": 1}, {"top_p": 1e-9}])
def test_of_equal_maxima_the_lowest_id(rule):
    logits = np.array([0, 5, 1, 5, 5], np.float32)
    assert {Sampling(**rule).choose(logits, 0, position) for position in range(30)} == {1}


@pytest.mark.parametrize("rule", [{}, {"top_p": 0.9}, {"top_k": 50}])
def test_excluded_tokens_are_never_chosen(rule):
    rng = np.random.default_rng(4)
    for trial in range(20):
        logits = random_logits(trial, 300)
        allowed = rng.choice(300, rng.integers(1, 60), replace=False)
        masked = np.full(300, -np.inf, np.float32)
        masked[allowed] = logits[allowed]
        assert set(draws(Sampling(**rule), masked, 40)) <= set(allowed)


def test_samples_differ_and_each_is_reproducible():
    logits = random_logits(0, 1000)
    choose = Sampling(temperature=0.8, top_p=0.95, seed=5)
    texts = [tuple(draws(choose, logits, 20, sample)) for sample in range(8)]
    assert len(set(texts)) == 8
    again = Sampling(temperature=0.8, top_p=0.95, seed=5)
    assert [tuple(draws(again, logits, 20, sample)) for sample in reversed(range(8))] == texts[::-1]


def test_seed_sample_and_position_enter_the_key():
    base = Sampling(seed=1)
    numbers = [base._uniform(2, 3), Sampling(seed=2)._uniform(2, 3), base._uniform(3, 3), base._uniform(2, 4),
               Sampling(seed=2)._uniform(1, 3), base._uniform(3, 2), Sampling(seed=2**64 - 1)._uniform(2, 3),
               base._uniform(2**64 - 1, 3), base._uniform(2, 2**64 - 1)]  # fmt: skip
    assert len(set(numbers)) == len(numbers) and all(0 <= u < 1 for u in numbers)


def test_the_random_numbers_are_those_of_philox():
    """Fixed for ever: a seed's text must not change with a release. Key (seed, sample), counter (position, 0, 0, 0)."""

    def philox(key, counter):  # Philox4x64-10, Salmon et al. 2011
        mask = 2**64 - 1
        (k0, k1), (c0, c1, c2, c3) = key, counter
        for _ in range(10):
            high0, low0 = divmod(c0 * 0xD2E7470EE14C6C93, 2**64)
            high1, low1 = divmod(c2 * 0xCA5A826395121157, 2**64)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
        return c0

    for seed, sample, position in ((0, 0, 0), (7, 1, 9), (2**64 - 1, 3, 2**40), (5, 2**63, 1)):
        want = philox((seed, sample), ((position + 1) % 2**64, 0, 0, 0))  # NumPy counts before it draws
        assert Sampling(seed=seed)._uniform(sample, position) == (want >> 11) / 2**53


@pytest.mark.parametrize("field, value", [
    ("temperature", -1.0), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1), ("top_p", 0.0),
    ("top_p", -0.5), ("top_p", 1.0000001), ("top_p", math.nan), ("seed", -1), ("seed", 2**64),
])  # fmt: skip
def test_impossible_values_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        Sampling(**{field: value})


@pytest.mark.parametrize("field", ["top_k", "seed"])
def test_counts_are_integers(field):
    with pytest.raises(TypeError):
        Sampling(**{field: 1.5})


@pytest.mark.parametrize("logits, sample, position, message", [
    ([], 0, 0, "shape"), ([[1.0]], 0, 0, "shape"), ([1.0, math.nan], 0, 0, "largest logit is nan"),
    ([1.0, math.inf], 0, 0, "largest logit is inf"), ([-math.inf] * 3, 0, 0, "largest logit is -inf"),
    ([1.0], -1, 0, "sample must be"), ([1.0], 2**64, 0, "sample must be"), ([1.0], 0, -1, "position must be"),
    ([1.0], 0, 2**64, "position must be"),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_impossible_arguments_are_refused(logits, sample, position, message, temperature):
    with pytest.raises(ValueError, match=message):
        Sampling(temperature).choose(np.array(logits, np.float32), sample, position)


def test_nothing_warns_and_nothing_is_written():
    logits = random_logits(1, 300, 50.0)
    logits.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for temperature in (0, 1e-45, 1e-38, 1.0, 3e38, 1e39, 1e308):
            for rule in ({}, {"top_k": 5}, {"top_p": 0.5}):
                Sampling(temperature, **rule).choose(logits, 0, 0)
