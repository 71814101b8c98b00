"""K and V stored as float32, float16, bfloat16 and q8_0: what is stored, and that the promise holds for each.

The rules of rounding are written here again, with NumPy's float16 and float64.
"""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedkv as pk
import promise_rows
import tiny
from promise_rows import assert_same_bits, assert_same_kv, rows_alone, rows_in_chunks, run_child, separate_forward, token_stream

DTYPES = ("float32", "float16", "bfloat16", "q8_0")
ROUNDED = DTYPES[1:]
ISAS = ("scalar", "avx2", "avx512", "neon")
N_TOKENS = 270  # over one chunk of 256


def q8_0(rows):
    """Codes int8 and scales float16 of rows, in groups of 32 along the last axis."""
    groups = rows.reshape(*rows.shape[:-1], -1, 32)
    with np.errstate(all="ignore"):
        scale = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
        usable = np.isfinite(scale) & (scale != 0)
        factor = np.where(usable, np.float32(1) / scale.astype(np.float32), np.float32(0))
        codes = np.rint(groups.astype(np.float64) * factor.astype(np.float64)[..., None])  # the product is exact
    codes = np.where(usable[..., None], np.clip(codes, -127, 127), 0)
    return codes.astype(np.int8).reshape(rows.shape), scale


def stored(rows, dtype):
    """The float32 values that are left of float32 rows."""
    with np.errstate(all="ignore"):
        if dtype == "float16":
            return rows.astype(np.float16).astype(np.float32)
        if dtype == "bfloat16":
            return rows.astype(ml_dtypes.bfloat16).astype(np.float32)
        if dtype == "q8_0":
            codes, scale = q8_0(rows)
            return (codes.reshape(*scale.shape, 32) * scale.astype(np.float32)[..., None]).reshape(rows.shape)
    return rows


def awkward_rows(seed, n, kv_dim):
    """Rows of all magnitudes, among them zeros, subnormals, ties, infinities and NaN."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, kv_dim)) * 10.0 ** rng.integers(-9, 6, (n, 1))
    x[0] = 0
    x[1] = rng.integers(-127, 128, kv_dim) + 0.5  # ties where the scale is 1
    x[1, ::32] = 127
    x[2] = rng.standard_normal(kv_dim) * 1e-41
    x[3] = 1 + rng.integers(0, 64, kv_dim) * 2.0**-12  # ties of float16 and bfloat16
    x[4, 3], x[5, 5], x[6, 7], x[7, 9] = np.nan, np.inf, -np.inf, 1e9
    return x.astype(np.float32)


def appended(rows, dtype, block_size=16):
    """A sequence of one layer whose K are the rows and whose V are those in reverse."""
    n, kv_dim = rows.shape
    pool = pk.BlockPool(-(-n // block_size) + 3, 1, kv_dim, block_size, dtype)
    seq = pk.Sequence(pool, n + 64)
    seq.ensure_append(n)
    seq.append_layer(0, rows, rows[::-1])
    seq.advance(n)
    return seq


@pytest.fixture(scope="module", params=[(2, 1, 32), (4, 2, 64)], ids=["head_dim 32", "head_dim 64"])
def source(request, tmp_path_factory):
    """A tiny model and its tensors."""
    n_heads, n_kv_heads, head_dim = request.param
    config = tiny.tiny_config(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
    tensors = tiny.tiny_tensors(config, 11)
    return pk.LlamaModel.load(tiny.write_hf(tmp_path_factory.mktemp("kv"), config, tensors)), tensors


@pytest.fixture(scope="module")
def model(source):
    return source[0]


# ---- What is stored ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_once_to_nearest_even(dtype):
    rows = awkward_rows(0, 40, 96)
    seq = appended(rows, dtype)
    for head in range(3):
        k, v = seq.gather_head(0, head, 32)
        part = rows[:, 32 * head:32 * head + 32]
        np.testing.assert_array_equal(k, stored(part, dtype))
        np.testing.assert_array_equal(v, stored(part[::-1], dtype))
    kept, again = seq.gather_head(0, 0, 96)[0], appended(stored(rows, dtype), dtype)
    finite = np.isfinite(kept)
    if dtype != "q8_0":  # a scale made of rounded values may be a neighbour of the first
        np.testing.assert_array_equal(again.gather_head(0, 0, 96)[0][finite], kept[finite])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_views_show_what_is_stored(dtype):
    rows = awkward_rows(1, 33, 64)[8:]
    seq = appended(rows, dtype, block_size=8)
    pool, table = seq.pool, seq.block_table
    for view, x in ((pool.k, rows), (pool.v, rows[::-1])):
        assert view.shape == (pool.n_blocks, 1, 8, 64) and not view.flags.writeable
        got = view[table, 0].reshape(-1, 64)[:len(rows)]
        if dtype == "q8_0":
            np.testing.assert_array_equal(got, q8_0(x)[0])
        elif dtype == "bfloat16":
            np.testing.assert_array_equal(got.view(ml_dtypes.bfloat16).astype(np.float32), stored(x, dtype))
        else:
            np.testing.assert_array_equal(got, stored(x, dtype))
            assert got.dtype == dtype
    if dtype == "q8_0":
        for view, x in ((pool.k_scale, rows), (pool.v_scale, rows[::-1])):
            assert view.shape == (pool.n_blocks, 1, 8, 2) and view.dtype == np.float16 and not view.flags.writeable
            np.testing.assert_array_equal(view[table, 0].reshape(-1, 2)[:len(rows)], q8_0(x)[1])
    else:
        assert pool.k_scale is pool.v_scale is None
    assert pool.dtype == dtype


@pytest.mark.parametrize("dtype, nbytes", [("float32", 256), ("float16", 128), ("bfloat16", 128), ("q8_0", 68)])
def test_bytes_of_a_row(dtype, nbytes):
    pool = pk.BlockPool(3, 5, 64, 8, dtype)
    assert pool.nbytes == 2 * 3 * 5 * 8 * nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fork_copies_values_and_scales_of_the_tail(dtype):
    rows = awkward_rows(2, 50, 32)[8:]
    seq = appended(rows[:21], dtype)
    child = seq.fork()
    for owner, more in ((child, rows[21:30]), (seq, rows[30:])):
        owner.ensure_append(len(more))
        owner.append_layer(0, more, more)
        owner.advance(len(more))
    for owner, want in ((child, rows[:30]), (seq, np.concatenate([rows[:21], rows[30:]]))):
        np.testing.assert_array_equal(owner.gather_head(0, 0, 32)[0], stored(want, dtype))
    assert seq.block_table[0] == child.block_table[0] and seq.block_table[1] != child.block_table[1]


# ---- Attention over it ----


@settings(max_examples=60)
@given(dtype=st.sampled_from(ROUNDED), block_size=st.sampled_from([1, 2, 8, 16, 32, 256]),
       total_k=st.one_of(st.sampled_from([1, 15, 16, 17, 255, 256, 257, 512, 513]), st.integers(1, 700)),
       n=st.integers(1, 20), heads=st.sampled_from([(1, 1), (3, 1), (9, 3), (4, 4)]), head_dim=st.sampled_from([32, 64, 96]),
       n_threads=st.integers(1, 3), causal=st.booleans())  # fmt: skip
def test_attention_is_that_over_the_stored_values(dtype, block_size, total_k, n, heads, head_dim, n_threads, causal):
    n = min(n, total_k)
    rng = np.random.default_rng(total_k)
    q, k, v = (rng.standard_normal((rows, h * head_dim), dtype=np.float32)
               for rows, h in ((n, heads[0]), (total_k, heads[1]), (total_k, heads[1])))  # fmt: skip
    shape = {"n_heads": heads[0], "n_kv_heads": heads[1], "head_dim": head_dim, "causal": causal}
    want = pk.attention(q, stored(k, dtype), stored(v, dtype), **shape)
    pool = pk.BlockPool(-(-total_k // block_size), 2, heads[1] * head_dim, block_size, dtype)
    before = pk.get_num_threads()
    try:
        pk.set_num_threads(n_threads)
        with pk.Sequence(pool, total_k) as seq:
            seq.ensure_append(total_k)
            if total_k > n:
                seq.append_layer(1, k[:-n], v[:-n])
                seq.advance(total_k - n)
            got = pk.paged_attention(q, k[-n:], v[-n:], seq, 1, **shape)
    finally:
        pk.set_num_threads(before)
    assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [1, 8, 20, 40, 80, 100])
def test_float_types_take_any_head_dim(dtype, head_dim):
    rng = np.random.default_rng(head_dim)
    q, k, v = (rng.standard_normal((40, heads * head_dim), dtype=np.float32) for heads in (6, 2, 2))
    shape = {"n_heads": 6, "n_kv_heads": 2, "head_dim": head_dim}
    seq = pk.Sequence(pk.BlockPool(3, 1, 2 * head_dim, dtype=dtype), 40)
    seq.ensure_append(40)
    assert_same_bits(pk.paged_attention(q, k, v, seq, 0, **shape),
                     pk.attention(q, stored(k, dtype), stored(v, dtype), **shape))


# ---- The promise ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_is_single_operations_over_stored_rows(source, dtype):
    model, tensors = source
    tokens = token_stream(5, 40, model.config.vocab_size)
    want = separate_forward(model.config, tensors.__getitem__, tokens, lambda rows: stored(rows, dtype))
    for got, expected in zip(rows_in_chunks(model, tokens, None, dtype), want):
        assert_same_bits(got, expected)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("chunk", [15, 16, 17, 255, None])
def test_chunks_do_not_show(model, dtype, chunk):
    tokens = token_stream(6, N_TOKENS, model.config.vocab_size)
    for got, want in zip(rows_in_chunks(model, tokens, chunk, dtype), rows_alone(model, tokens, kv_dtype=dtype)):
        assert_same_bits(got, want)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_batch_forks_and_redo_do_not_show(model, threads, dtype, n_threads):
    """Forks of a long prompt, a stranger, and a sequence in a pool of another type, in the same steps."""
    threads(n_threads)
    vocab = model.config.vocab_size
    prompt, stranger = token_stream(7, 265, vocab), token_stream(8, 30, vocab)
    pool = model.new_pool(n_tokens=2000, dtype=dtype)
    first, alone = model.new_sequence(pool, 400), model.new_sequence(model.new_pool(n_tokens=64), 64)
    model.prefill(prompt, first, chunk=100)
    second = first.fork()
    second.truncate(240)
    model.prefill(prompt[240:], second)
    third = model.new_sequence(pool, 64)
    model.step([(third, stranger[:20]), (alone, stranger[:20])])
    seqs, texts = [first, second, third, alone], [prompt, prompt, stranger[:20], stranger[:20]]
    for step in range(4):
        tokens = [(7 * step + i) % vocab for i in range(4)]
        logits = model.decode_step(tokens, seqs)
        texts = [np.append(text, token) for text, token in zip(texts, tokens)]
    for i, kv_dtype in enumerate((dtype, dtype, dtype, "float32")):
        want = rows_alone(model, texts[i], 64, kv_dtype)
        assert_same_bits(logits[i], want.logits[-1])
        assert_same_kv(model, seqs[i], want)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = tiny.tiny_config(n_heads=4, n_kv_heads=2, head_dim=32)
    return tiny.write_hf(tmp_path_factory.mktemp("kv_isa"), config, tiny.tiny_tensors(config, 12))


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_do_not_show(directory, dtype, isa):
    if isa not in pk.available_isas():
        pytest.skip(f"{isa} does not run on this CPU")
    result = run_child(directory, "--tokens", 300, "--kv-dtype", dtype, PAGEDKV_ISA=isa)
    assert result["isa"] == isa
    assert result["sha256"] == promise_rows.workload_sha256(pk.LlamaModel.load(directory), 300, dtype)


@pytest.mark.parametrize("fpenv", ["ftz", "up"])
def test_the_floating_point_environment_does_not_show(directory, fpenv):
    if not promise_rows.can_set_fpenv():
        pytest.skip("needs x86-64 and glibc")
    result = run_child(directory, "--tokens", 40, "--kv-dtype", "q8_0", "--fpenv", fpenv)
    assert result["sha256"] == promise_rows.workload_sha256(pk.LlamaModel.load(directory), 40, "q8_0")
    assert result["fpenv_kept"]


@pytest.mark.parametrize("dtype, most", [("float16", 0.02), ("bfloat16", 0.2), ("q8_0", 0.3)])
def test_real_model(dtype, most):
    """Rows in a batch are the rows alone; and beside float32 rows the logits move by little (they span about 40)."""
    model = promise_rows.real_model()
    streams = [token_stream(20 + i, 24, model.config.vocab_size) for i in range(3)]
    wanted = [rows_alone(model, tokens, kv_dtype=dtype) for tokens in streams]
    pool = model.new_pool(n_tokens=200, dtype=dtype)
    seqs = [model.new_sequence(pool, 32) for _ in streams]
    model.step([(seq, tokens[:n]) for seq, tokens, n in zip(seqs, streams, (5, 16, 20))])
    logits = model.step([(seq, tokens[n:]) for seq, tokens, n in zip(seqs, streams, (5, 16, 20))])
    for row, seq, tokens, want in zip(logits, seqs, streams, wanted):
        assert_same_bits(row, want.logits[-1])
        assert_same_kv(model, seq, want)
        exact = rows_in_chunks(model, tokens, None).logits
        assert 0 < np.abs(want.logits - exact).max() < most * np.ptp(exact)


# ---- What is refused ----


def test_unknown_types_and_groups_that_do_not_divide():
    bad_dim = pk.PkvStatus.PKV_ERR_BAD_DIM
    for dtype in ("float64", "fp16", "", None, np.float32):
        with pytest.raises(pk.BadDimError, match="a pool holds float32, float16, bfloat16, q8_0, not") as caught:
            pk.BlockPool(2, 1, 32, dtype=dtype)
        assert caught.value.status is bad_dim
    with pytest.raises(pk.BadDimError, match="32 values, which do not divide kv_dim 48") as caught:
        pk.BlockPool(2, 1, 48, dtype="q8_0")
    assert caught.value.status is bad_dim


def test_a_head_of_half_a_group_is_refused_where_it_shows(tmp_path):
    config = tiny.tiny_config(n_heads=4, n_kv_heads=2, head_dim=16)  # kv_dim 32: the pool alone cannot know
    model = pk.LlamaModel.load(tiny.write_hf(tmp_path, config, tiny.tiny_tensors(config, 1)))
    with pytest.raises(pk.BadDimError, match="do not divide head_dim 16"):
        model.new_pool(n_blocks=4, dtype="q8_0")
    with pytest.raises(pk.BadDimError, match="float32, float16, bfloat16, q8_0"):
        model.new_pool(n_blocks=4, dtype="q4_0")
    pool = pk.BlockPool(4, config.n_layers, config.kv_dim, dtype="q8_0")
    seq = model.new_sequence(pool, 32)
    with pytest.raises(pk.BadDimError, match="do not divide head_dim 16") as caught:
        model.prefill([1, 2], seq)
    assert [str(status) for status in caught.value.chain] == ["FLV4_ERR_STACK", "STK4_ERR_BAD_DIM"]
    seq.ensure_append(1)
    rows = np.ones((1, 32), np.float32)
    with pytest.raises(pk.BadDimError, match="do not divide head_dim 16") as caught:
        pk.paged_attention(np.ones((1, 64), np.float32), rows, rows, seq, 0, n_heads=4, n_kv_heads=2, head_dim=16)
    assert [str(status) for status in caught.value.chain] == ["AP_ERR_SEQ", "PKV_ERR_BAD_DIM"]
    with pytest.raises(pk.BadDimError, match="do not divide head_dim 16"):
        seq.gather_head(0, 0, 16)
    assert len(seq) == 0 and pool.n_free == 3


def test_the_default_pool_counts_the_bytes_of_its_type(model, monkeypatch):
    """Half of the available memory holds more tokens where they are smaller."""
    monkeypatch.setattr("pagedkv.model._available_nbytes", lambda: 2 * 100 * pk.model.kv_token_nbytes(model.config, "float32"))
    assert model.new_pool().n_blocks * 16 == 112
    assert model.new_pool(dtype="float16").n_blocks * 16 == 208
