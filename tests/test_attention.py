"""Attention over blocks, its contiguous twin, RoPE.

Tags in comments name users' public reports of other systems: V vLLM, SG SGLang, HF transformers, LC llama.cpp,
LCP llama-cpp-python, ORG ONNX Runtime GenAI, OV OpenVINO; others in full.
"""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pagedkv as pk
import reference
from seed_model import refused, rows_of

BLOCK_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
BOUNDS = pk.PkvStatus.PKV_ERR_BOUNDS
AP_BAD_DIM, AP_BAD_GQA, AP_SEQ = (pk.ApStatus(i) for i in range(1, 4))


def random_rows(seed, n, total_k, n_heads, n_kv_heads, head_dim):
    """q [n, ...], k and v [total_k, ...]; scores spread over a few units."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((rows, heads * head_dim), dtype=np.float32)
               for rows, heads in ((n, n_heads), (total_k, n_kv_heads), (total_k, n_kv_heads)))  # fmt: skip
    return q * np.float32(1.5), k, v


def pool_of_nan(n_blocks, n_layers, kv_dim, block_size, order=None):
    """All blocks hold NaN from an earlier sequence; they are given out in `order` (shuffled by default)."""
    pool = pk.BlockPool(n_blocks, n_layers, kv_dim, block_size)
    n_rows = n_blocks * block_size
    with pk.Sequence(pool, n_rows) as seq:
        seq.ensure_append(n_rows)
        for layer in range(n_layers):
            seq.append_layer(layer, rows_of(np.nan, n_rows, kv_dim), rows_of(np.nan, n_rows, kv_dim))
    blocks = [pool.alloc_block() for _ in range(n_blocks)]
    for block_id in np.random.default_rng(n_blocks).permutation(blocks) if order is None else reversed(order):
        pool.unref_block(int(block_id))
    return pool


def paged(q, k, v, pool, layer=0, n_calls=1, **shape):
    """The last len(q) rows of k and v go in with paged_attention, in n_calls parts; what is before, by append_layer."""
    past = len(k) - len(q)
    seq = pk.Sequence(pool, len(k))
    if past:
        seq.ensure_append(past)
        seq.append_layer(layer, k[:past], v[:past])
        seq.advance(past)
    outs = []
    for rows in np.array_split(np.arange(len(q)), n_calls):
        seq.ensure_append(len(rows))
        outs.append(pk.paged_attention(q[rows], k[past + rows], v[past + rows], seq, layer, **shape))
        assert len(seq) == past + rows[0]  # the caller advances
        seq.advance(len(rows))
    return np.concatenate(outs)


def same(a, b):
    """Every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


edges = sorted({n + d for n in (1, 16, 32, 256, 512, 768, 1024) for d in (-1, 0, 1) if n + d > 0})


@settings(max_examples=80)
@given(data=st.data(), block_size=st.sampled_from(BLOCK_SIZES),
       total_k=st.one_of(st.sampled_from(edges), st.integers(1, 1100)),
       heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (6, 6)]), head_dim=st.sampled_from([4, 8, 16, 20, 64]),
       n_threads=st.integers(1, 4), causal=st.booleans())  # fmt: skip
def test_paged_is_the_contiguous_twin_in_every_bit(data, block_size, total_k, heads, head_dim, n_threads, causal):
    n = data.draw(st.one_of(st.just(1), st.integers(1, min(total_k, 48))))
    q, k, v = random_rows(total_k, n, total_k, *heads, head_dim)
    shape = {"n_heads": heads[0], "n_kv_heads": heads[1], "head_dim": head_dim, "causal": causal}
    pool = pool_of_nan(-(-total_k // block_size) + 2, 2, heads[1] * head_dim, block_size)
    before = pk.get_num_threads()
    try:
        pk.set_num_threads(1)
        twin = pk.attention(q, k, v, **shape)
        pk.set_num_threads(n_threads)
        assert same(paged(q, k, v, pool, layer=1, **shape), twin)
        assert same(pk.attention(q, k, v, **shape), twin)
    finally:
        pk.set_num_threads(before)
    assert np.isfinite(twin).all()


def error_bound(q, k, v, n_heads, n_kv_heads, head_dim, scale=None):
    """Largest error that float32 may make, from the lengths of its sums (u: half a unit in the last place).

    A score is a dot product in 16 lanes of head_dim / 16 steps and a tree of 4; exp turns its error into a
    relative one. A chunk adds up to 256 weighted values in turn, then chunks merge.
    """
    u, total_k = 2.0**-24, len(k)
    q_heads = np.abs(q.reshape(len(q), n_heads, head_dim)).astype(float)
    k_heads = np.abs(k.reshape(total_k, n_kv_heads, head_dim)).astype(float)
    score = max((q_heads[:, h] @ k_heads[:, h * n_kv_heads // n_heads].T).max() for h in range(n_heads))
    score *= 1 / math.sqrt(head_dim) if scale is None else abs(scale)
    weight = (head_dim / 16 + 8) * u * score + 6 * u
    return (2 * weight + (min(total_k, 256) + 4 * (total_k // 256 + 1)) * u) * np.abs(v).max()


@settings(max_examples=40)
@given(n=st.integers(1, 12), past=st.sampled_from([0, 1, 15, 17, 250, 300, 600]), causal=st.booleans(),
       heads=st.sampled_from([(1, 1), (3, 1), (9, 3)]), head_dim=st.sampled_from([1, 3, 8, 16, 33, 64]),
       scale=st.sampled_from([None, 0.0, 0.25, -1.0]))  # fmt: skip
@example(n=1, past=0, causal=True, heads=(1, 1), head_dim=1, scale=None)
def test_attention_is_the_float64_oracle(n, past, causal, heads, head_dim, scale):
    q, k, v = random_rows(n + past, n, n + past, *heads, head_dim)
    got = pk.attention(q, k, v, n_heads=heads[0], n_kv_heads=heads[1], head_dim=head_dim, causal=causal, scale=scale)
    want = reference.attention(q, k, v, *heads, head_dim, causal=causal, scale=scale)
    assert np.abs(got - want).max() <= error_bound(q, k, v, *heads, head_dim, scale)


@pytest.mark.parametrize("head_dim", [8, 40, 80, 100, 128, 256])
def test_every_head_dim_is_right(head_dim):  # LC 4425, OV 569
    q, k, v = random_rows(head_dim, 5, 290, 6, 2, head_dim)
    shape = {"n_heads": 6, "n_kv_heads": 2, "head_dim": head_dim}
    got = pk.attention(q, k, v, **shape)
    assert np.abs(got - reference.attention(q, k, v, 6, 2, head_dim)).max() <= error_bound(q, k, v, 6, 2, head_dim)
    assert same(paged(q, k, v, pool_of_nan(21, 1, 2 * head_dim, 16), **shape), got)


@pytest.mark.parametrize("n_heads, n_kv_heads", [(12, 12), (32, 8), (28, 4)])
def test_each_query_head_reads_its_kv_head(n_heads, n_kv_heads):  # ONNXim 34
    q, k, _ = random_rows(0, 3, 40, n_heads, n_kv_heads, 8)
    v = np.tile(np.repeat(np.arange(n_kv_heads, dtype=np.float32), 8), (40, 1))  # the head's index
    shape = {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": 8}
    want = np.repeat(np.arange(n_heads) // (n_heads // n_kv_heads), 8)
    for out in (pk.attention(q, k, v, **shape), paged(q, k, v, pool_of_nan(3, 1, n_kv_heads * 8, 16), **shape)):
        assert np.allclose(out, want, rtol=1e-5, atol=0)


def test_heads_that_do_not_divide_are_refused():  # ONNXim 34
    q, k, v = random_rows(0, 1, 4, 9, 4, 8)
    seq = pk.Sequence(pk.BlockPool(1, 1, 32), 16)
    seq.ensure_append(4)
    for call in (lambda: pk.attention(q, k, v, n_heads=9, n_kv_heads=4, head_dim=8),
                 lambda: pk.paged_attention(q, k[:1], v[:1], seq, 0, n_heads=9, n_kv_heads=4, head_dim=8)):  # fmt: skip
        with pytest.raises(pk.BadGQAError, match="9 is not a multiple of n_kv_heads 4") as caught:
            call()
        assert caught.value.status is AP_BAD_GQA


@pytest.mark.parametrize("n_calls", [2, 3, 7, 40])
@pytest.mark.parametrize("past", [0, 9, 250])
def test_rows_do_not_depend_on_the_calls_that_bring_them(n_calls, past):
    q, k, v = random_rows(past, 40, 40 + past, 4, 2, 16)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    parts = paged(q, k, v, pool_of_nan(20, 1, 32, 16), n_calls=n_calls, **shape)
    assert same(parts, pk.attention(q, k, v, **shape))


@pytest.mark.parametrize("split", [1, 15, 16, 17])
def test_a_prefill_split_in_two_is_one_shot(split):  # candle 3743, TinyLLM 18
    q, k, v = random_rows(split, 50, 50, 4, 2, 16)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    pool = pool_of_nan(8, 1, 32, 16)
    first = paged(q[:split], k[:split], v[:split], pool, **shape)
    rest = paged(q[split:], k, v, pool, **shape)  # a warm cache of `split` rows
    assert same(np.concatenate([first, rest]), pk.attention(q, k, v, **shape))


def test_decode_across_the_edges_of_blocks_is_the_twin():  # mistral.rs 552
    q, k, v = random_rows(1, 48, 48, 3, 1, 16)
    shape = {"n_heads": 3, "n_kv_heads": 1, "head_dim": 16}
    twin = [pk.attention(q[t : t + 1], k[: t + 1], v[: t + 1], **shape) for t in range(48)]
    assert same(paged(q, k, v, pool_of_nan(3, 1, 16, 16), n_calls=48, **shape), np.concatenate(twin))


@pytest.mark.parametrize("order", [[7, 3, 9], [9, 0, 8], [2, 1, 0]])
def test_placement_does_not_show(order):  # LC 4113
    q, k, v = random_rows(2, 5, 40, 4, 2, 8)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    fresh = paged(q, k, v, pk.BlockPool(10, 1, 16), **shape)
    with pk.Sequence(pool_of_nan(10, 1, 16, 16, order=order), 40) as seq:
        seq.ensure_append(40)
        assert seq.block_table.tolist() == order
    assert same(paged(q, k, v, pool_of_nan(10, 1, 16, 16, order=order), **shape), fresh)


def test_a_fragmented_pool_does_not_show():  # LC 12253
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    q, k, v = random_rows(3, 20, 70, 4, 2, 8)
    fresh = pk.attention(q, k, v, **shape)
    pool = pool_of_nan(24, 1, 16, 16)
    held = [pk.Sequence(pool, 64) for _ in range(6)]
    for n in range(4):  # in turn, so that their blocks interleave
        for seq in held:
            seq.ensure_append(16 * n + 16)
    for seq in held[::3]:
        seq.free()
    assert same(paged(q, k, v, pool, **shape), fresh)
    held[2].truncate(0)
    assert same(paged(q, k, v, pool, **shape), fresh)


def test_layers_of_one_block_do_not_mix():
    pool = pk.BlockPool(4, 3, 16)
    seq = pk.Sequence(pool, 64)
    shape = {"n_heads": 2, "n_kv_heads": 2, "head_dim": 8}
    rows = [random_rows(layer, 33, 33, 2, 2, 8) for layer in range(3)]
    seq.ensure_append(33)
    outs = [pk.paged_attention(*rows[layer], seq, layer, **shape) for layer in (2, 0, 1)]
    for layer, out in zip((2, 0, 1), outs):
        assert same(out, pk.attention(*rows[layer], **shape))


@pytest.mark.parametrize("total_k", [700, 2048, 3001])
def test_a_long_row_split_over_threads_is_one_thread(total_k, threads):  # pytorch 88718
    q, k, v = random_rows(total_k, 1, total_k, 3, 1, 64)
    shape = {"n_heads": 3, "n_kv_heads": 1, "head_dim": 64}
    threads(1)
    one = pk.attention(q, k, v, **shape)
    for n in (2, 3, 4):
        threads(n)
        assert same(pk.attention(q, k, v, **shape), one)
        assert same(paged(q, k, v, pool_of_nan(-(-total_k // 64), 1, 64, 64), **shape), one)


def test_a_query_row_does_not_see_the_others():
    q, k, v = random_rows(5, 30, 300, 4, 2, 16)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    together = pk.attention(q, k, v, **shape)
    for i in (0, 7, 8, 29):
        assert same(together[i : i + 1], pk.attention(q[i : i + 1], k[: 271 + i], v[: 271 + i], **shape))


def test_rows_after_a_causal_row_do_not_reach_it():
    q, k, v = random_rows(6, 20, 40, 2, 1, 16)
    k[30:], v[30:] = np.nan, np.nan
    out = pk.attention(q, k, v, n_heads=2, n_kv_heads=1, head_dim=16)
    assert np.isfinite(out[:10]).all() and np.isnan(out[10:]).all()


@pytest.mark.parametrize("size", [1e-30, 1e15, 1e18])
def test_extreme_scores_stay_finite(size):  # flashinfer 4401
    q, k, v = random_rows(7, 4, 300, 2, 1, 16)
    for sign in (1, -1):
        out = pk.attention(np.abs(q) * np.float32(size), sign * np.abs(k) * np.float32(size), v, n_heads=2, n_kv_heads=1, head_dim=16)
        assert np.isfinite(out).all() and np.abs(out).max() <= np.abs(v).max() * 1.001


def test_equal_scores_give_the_mean():
    v = np.arange(600, dtype=np.float32)[:, None]
    out = pk.attention(np.ones((1, 1), np.float32), np.zeros((600, 1), np.float32), v, n_heads=1, n_kv_heads=1, head_dim=1)
    assert out[0, 0] == pytest.approx(299.5, rel=256 * 2**-24)


# Windows


@settings(max_examples=60)
@given(n=st.integers(1, 20), past=st.sampled_from([0, 1, 15, 17, 250, 300, 600]), window=st.sampled_from([1, 2, 15, 16, 17, 20, 255, 256, 257, 300, 2**62]),
       heads=st.sampled_from([(1, 1), (3, 1), (9, 3)]), head_dim=st.sampled_from([3, 8, 16, 64]))  # fmt: skip
def test_a_window_is_the_float64_oracle(n, past, window, heads, head_dim):
    q, k, v = random_rows(n + past, n, n + past, *heads, head_dim)
    got = pk.attention(q, k, v, n_heads=heads[0], n_kv_heads=heads[1], head_dim=head_dim, window=window)
    want = reference.attention(q, k, v, *heads, head_dim, window=window)
    assert np.abs(got - want).max() <= error_bound(q, k, v, *heads, head_dim)


def test_a_window_of_300_over_600_rows_is_the_float64_oracle():
    q, k, v = random_rows(8, 600, 600, 3, 1, 16)
    got = pk.attention(q, k, v, n_heads=3, n_kv_heads=1, head_dim=16, window=300)
    want = reference.attention(q, k, v, 3, 1, 16, window=300)
    assert np.abs(got - want).max() <= error_bound(q, k, v, 3, 1, 16)
    full = pk.attention(q, k, v, n_heads=3, n_kv_heads=1, head_dim=16)
    assert same(got[:300], full[:300]) and (got[300:] != full[300:]).any(axis=1).all()


@settings(max_examples=60)
@given(data=st.data(), block_size=st.sampled_from(BLOCK_SIZES), total_k=st.one_of(st.sampled_from(edges), st.integers(1, 1100)),
       window=st.one_of(st.sampled_from([1, 16, 255, 256, 257, 512]), st.integers(1, 1100)), heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3)]),
       n_threads=st.integers(1, 4))  # fmt: skip
def test_a_paged_window_is_the_contiguous_twin_and_each_row_alone(data, block_size, total_k, window, heads, n_threads):
    n = data.draw(st.one_of(st.just(1), st.integers(1, min(total_k, 48))))
    q, k, v = random_rows(total_k, n, total_k, *heads, 16)
    shape = {"n_heads": heads[0], "n_kv_heads": heads[1], "head_dim": 16, "window": window}
    pool = pool_of_nan(-(-total_k // block_size) + 2, 2, heads[1] * 16, block_size)
    before = pk.get_num_threads()
    try:
        pk.set_num_threads(1)
        past = total_k - n
        twin = np.concatenate([pk.attention(q[i : i + 1], k[: past + i + 1], v[: past + i + 1], **shape) for i in range(n)])
        pk.set_num_threads(n_threads)
        assert same(paged(q, k, v, pool, layer=1, **shape), twin)
        assert same(paged(q, k, v, pool, layer=1, n_calls=min(n, 3), **shape), twin)
        assert same(pk.attention(q, k, v, **shape), twin)
    finally:
        pk.set_num_threads(before)


@pytest.mark.parametrize("first", [256, 512])
def test_a_window_that_begins_with_a_chunk_is_attention_without_what_is_before(first):
    q, k, v = random_rows(first, 1, 700, 4, 2, 16)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16}
    assert same(pk.attention(q, k, v, window=700 - first, **shape), pk.attention(q, k[first:], v[first:], **shape))


def test_rows_before_a_window_do_not_reach_it():
    q, k, v = random_rows(9, 40, 640, 4, 2, 16)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "window": 330}
    want = pk.attention(q, k, v, **shape)
    k[:275], v[:275] = np.nan, np.nan  # row i sees positions from 271 + i on
    got = pk.attention(q, k, v, **shape)
    assert np.isnan(got[:4]).all() and same(got[4:], want[4:])


@pytest.mark.parametrize("fields, message", [({"window": 0}, "at least the row's own position, not 0"), ({"window": -3}, "not -3"),
                                             ({"window": 3, "causal": False}, "a window of 3 ends at a row's own position")])  # fmt: skip
def test_windows_that_hold_nothing_or_no_row_of_their_own_are_refused(fields, message):
    q, k, v = random_rows(0, 2, 2, 4, 2, 8)
    seq = pk.Sequence(pk.BlockPool(1, 1, 16), 16)
    seq.ensure_append(2)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8} | fields
    for call in (lambda: pk.attention(q, k, v, **shape), lambda: pk.paged_attention(q, k, v, seq, 0, **shape)):
        with pytest.raises(pk.BadDimError, match=message) as caught:
            call()
        assert caught.value.status is AP_BAD_DIM
    for window in (2.5, "2"):
        with pytest.raises(TypeError):
            pk.attention(q, k, v, n_heads=4, n_kv_heads=2, head_dim=8, window=window)


# Statuses


@pytest.mark.parametrize("fields", [{"n_heads": 0}, {"n_heads": -4}, {"n_kv_heads": 0}, {"n_kv_heads": -1}, {"head_dim": 0},
                                    {"head_dim": -8}, {"head_dim": 4}, {"n_heads": 2}, {"n_kv_heads": 4},
                                    {"n_heads": 2**40, "n_kv_heads": 2**40}])  # fmt: skip
def test_dimensions_that_do_not_fit_are_refused(fields):
    q, k, v = random_rows(0, 2, 2, 4, 2, 8)
    seq = pk.Sequence(pk.BlockPool(1, 1, 16), 16)
    seq.ensure_append(2)
    shape = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8} | fields
    for call in (lambda: pk.attention(q, k, v, **shape), lambda: pk.paged_attention(q, k, v, seq, 0, **shape)):
        assert refused(call) is AP_BAD_DIM


def test_products_that_wrap_64_bits_are_refused():  # flashinfer 320
    code = """if True:
        import numpy as np, pagedkv as pk
        none, one = np.empty((1, 0), np.float32), np.ones((1, 4), np.float32)
        seq = pk.Sequence(pk.BlockPool(4, 1, 4), 16)
        seq.ensure_append(1)
        for call in (lambda: pk.attention(none, none, none, n_heads=2**32, n_kv_heads=2**32, head_dim=2**32),
                     lambda: pk.attention(none, none, none, n_heads=2**62, n_kv_heads=2**62, head_dim=4),
                     lambda: pk.paged_attention(one, one, one, seq, 0, n_heads=2**62 + 1, n_kv_heads=2**62 + 1, head_dim=4)):
            try: call()
            except pk.BadDimError: print("refused", flush=True)
            except MemoryError: pass"""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"did not return; before that: {late.stdout}")
    assert done.stdout.split() == ["refused"] * 3, (done.returncode, done.stderr[-200:])


@pytest.mark.parametrize("n, total_k, causal", [(0, 4, True), (5, 4, True), (1, 0, False), (1, 0, True)])
def test_lengths_that_contradict_each_other_are_refused(n, total_k, causal):
    q, k, v = random_rows(0, n, total_k, 1, 1, 8)
    assert refused(lambda: pk.attention(q, k, v, n_heads=1, n_kv_heads=1, head_dim=8, causal=causal)) is AP_BAD_DIM


def test_more_queries_than_keys_are_fine_where_all_are_seen():
    q, k, v = random_rows(0, 5, 2, 1, 1, 8)
    out = pk.attention(q, k, v, n_heads=1, n_kv_heads=1, head_dim=8, causal=False)
    assert np.abs(out - reference.attention(q, k, v, 1, 1, 8, causal=False)).max() <= error_bound(q, k, v, 1, 1, 8)


def sequence_errors():
    """(name, what to do to a sequence with 2 rows reserved, layer, rows, innermost status)."""
    return [("freed", lambda s: s.free(), 0, 1, pk.PkvStatus.PKV_ERR_NULL), ("layer", lambda s: None, 1, 1, BOUNDS),
            ("negative layer", lambda s: None, -1, 1, BOUNDS), ("not reserved", lambda s: None, 0, 17, BOUNDS),
            ("truncated", lambda s: s.truncate(0), 0, 1, BOUNDS)]  # fmt: skip


@pytest.mark.parametrize("what, do, layer, n, inner", sequence_errors(), ids=[e[0] for e in sequence_errors()])
def test_a_sequence_that_cannot_take_the_rows_is_refused(what, do, layer, n, inner):
    pool = pk.BlockPool(4, 1, 8)
    seq = pk.Sequence(pool, 64)
    seq.ensure_append(2)
    do(seq)
    before = pool.k.copy()
    q, k, v = random_rows(0, n, n, 1, 1, 8)
    with pytest.raises(pk.PagedKVError) as caught:
        pk.paged_attention(q, k, v, seq, layer, n_heads=1, n_kv_heads=1, head_dim=8)
    assert caught.value.chain == (AP_SEQ, inner) and np.array_equal(pool.k, before)


def test_a_missing_sequence_is_refused_after_the_dimensions():
    q, k, v = random_rows(0, 1, 1, 1, 1, 8)
    assert refused(lambda: pk.paged_attention(q, k, v, None, 0, n_heads=3, n_kv_heads=2, head_dim=8)) is AP_BAD_GQA
    with pytest.raises(pk.NullError) as caught:
        pk.paged_attention(q, k, v, None, 0, n_heads=1, n_kv_heads=1, head_dim=8)
    assert caught.value.chain[0] is AP_SEQ


def test_a_shared_tail_is_not_written():
    pool = pk.BlockPool(4, 1, 8)
    seq = pk.Sequence(pool, 64)
    seq.ensure_append(3)
    seq.advance(3)
    child = seq.fork()
    q, k, v = random_rows(0, 1, 1, 1, 1, 8)
    for each in (seq, child):
        assert refused(lambda: pk.paged_attention(q, k, v, each, 0, n_heads=1, n_kv_heads=1, head_dim=8)) is BOUNDS
    assert not pool.k.any()


# RoPE


def rotated(x, position, theta, factor):
    """Llama-3 rotation of x [head_dim] in float64, pair by pair, as the release's reference does it."""
    half, out = len(x) // 2, x.astype(float)
    for i in range(half):
        freq = theta ** (-2 * i / len(x))
        wavelength = 2 * math.pi / freq
        if factor != 1 and wavelength > 8192:
            freq /= factor
        elif factor != 1 and wavelength >= 8192 / 4:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            freq = (1 - smooth) * freq / factor + smooth * freq
        a, b, cos, sin = float(x[i]), float(x[i + half]), math.cos(position * freq), math.sin(position * freq)
        out[i], out[i + half] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("factor", [1, 8, 32])
@pytest.mark.parametrize("position", [0, 8192, 80000])
def test_rope_is_right_far_out_and_with_any_factor(position, factor):  # llama-models 241
    x = np.random.default_rng(position).standard_normal((1, 3, 64), dtype=np.float32)
    scaling = {"scaling": "llama3", "factor": factor} if factor != 1 else {}
    out = pk.rope(x, [position], inv_freq=pk.rope_inv_freq(500000.0, 64, original_context_len=8192, **scaling))
    for head in range(3):  # cos, sin, a product and a sum are rounded, each of terms of at most |a| + |b|
        pairs = np.abs(x[0, head]).astype(float).reshape(2, 32).sum(0)
        error = np.abs(out[0, head] - rotated(x[0, head], position, 500000.0, factor))
        assert (error <= 2 * 2.0**-23 * np.tile(pairs, 2)).all()
    assert position or same(out, x)


def test_rope_of_a_row_follows_its_own_position():  # exllama 101
    x = np.random.default_rng(0).standard_normal((6, 2, 16), dtype=np.float32)
    positions = [3, 0, 77, 3, 12, 1]
    alone = np.concatenate([pk.rope(x[i : i + 1], [p]) for i, p in enumerate(positions)])
    assert same(pk.rope(x, positions), alone)
