"""compute="int8": the rule, the products, whole models, and the promise inside the mode.

Products are measured against NumPy: bit for bit where it repeats the order of the sums, and in float64 for every type.
"""

import numpy as np
import pytest

import pagedkv as pk
import promise_rows
from pagedkv import _core, hub
from pagedkv.formats import open_model
from promise_rows import assert_same_bits, kv_rows, rows_alone, rows_in_chunks, run_child, separate_forward
from test_weights import BLOCK_SIZES, FLOATS, NAMES, TYPES, depths, model_files, pack, pack_parts, padded, stored, tokens_of, wild
from tiny import tiny_config, tiny_tensors, write_gguf, write_hf

CODED = [dtype for dtype in TYPES if dtype not in FLOATS]
ROWS = (1, 2, 3, 5, 8, 9, 13, 33, 130)  # both sides of every tile and block of rows
CHUNKS = (1, 15, 16, 17)
ISAS = ("scalar", "avx2", "avx512", "neon")


def quantised(x):
    """Codes, int64 [m, k], and scales, float32 [m, k / 32], by the rule; finite x."""
    groups = x.reshape(len(x), -1, 32)
    most = np.abs(groups).max(axis=2)
    alive = most >= np.float32(2.0**-100)
    inverse = np.float32(127) / np.where(alive, most, np.float32(1))
    codes = np.rint(groups * inverse[:, :, None]) * alive[:, :, None]
    scales = np.where(alive, most / np.float32(127), np.float32(0))
    assert codes.dtype == scales.dtype == np.float32 and np.abs(codes).max() <= 127
    return codes.astype(np.int64).reshape(x.shape), scales


def product(x, packed):
    out = np.empty((len(x), packed.shape[0]), np.float32)
    _core.matmul(np.ascontiguousarray(x), packed, out, True)
    return out


def rows(m, k, seed=0):
    """Activations with outliers, as models have them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((m, k), dtype=np.float32)
    x[:, rng.integers(0, k, max(1, k // 64))] *= 50
    return x


# -- products --------------------------------------------------------------------------------------------


def parts_of(tensor):
    """Codes less the bias [n, k], scales and minima [n, k / 32], of the types whose blocks are plain."""
    n, k = tensor.shape
    blocks = tensor.raw.reshape(n, k // 32, -1)
    halves = np.ascontiguousarray(blocks[:, :, : 4 if tensor.dtype == "q4_1" else 2]).view("<f2").astype(np.float32)
    if tensor.dtype == "q8_0":
        codes = blocks[:, :, 2:].view(np.int8).astype(np.int64)
    else:
        nibbles = blocks[:, :, 4 if tensor.dtype == "q4_1" else 2 :]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.int64) - (8 if tensor.dtype == "q4_0" else 0)
    return codes, halves[:, :, 0], halves[:, :, 1] if tensor.dtype == "q4_1" else None


def fma(a, b, c):
    """Rounded once: float32 factors and terms in 64 bits of mantissa, where such a product is exact."""
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_1"])
@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is no wider than float64 here")
def test_products_in_the_order_of_the_rule(dtype):
    for k in depths(dtype):
        tensor, x = stored(dtype, 45, k), rows(5, k)
        codes, scales, minima = parts_of(tensor)
        x_codes, x_scales = quantised(x)
        x_codes = x_codes.reshape(5, -1, 32)
        y = np.zeros((5, 45), np.float32)
        for g in range(k // 32):
            dots = (x_codes[:, g] @ codes[:, g].T).astype(np.float32)
            y = fma(dots, scales[None, :, g] * x_scales[:, g, None], y)
            if minima is not None:
                y = fma(minima[None, :, g], x_scales[:, g, None] * x_codes[:, g].sum(axis=1, dtype=np.float32)[:, None], y)
        assert_same_bits(product(x, pack(tensor)), y, f"{dtype}, k = {k}")


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("n", [1, 32, 45])
def test_products_are_those_of_the_quantised_activations(dtype, n):
    """Against float64, within the rounding of the float32 sums."""
    for k in depths(dtype):
        tensor, x = stored(dtype, n, k, seed=n), rows(7, k, seed=k)
        codes, scales = quantised(x)
        values = codes * np.repeat(scales, 32, axis=1).astype(np.float64)
        weights = tensor.float32().astype(np.float64)
        tolerance = 2.0**-22 * (k // 16 + 4) * np.abs(values).sum(axis=1, keepdims=True) * np.abs(weights).max()
        assert (np.abs(product(x, pack(tensor)) - values @ weights.T) <= tolerance).all(), k


@pytest.mark.parametrize("dtype", CODED)
def test_rows_depend_on_themselves_only(dtype, threads):
    for tensor in (stored(dtype, 300, depths(dtype)[-1]), wild(dtype, 45, 512)):
        packed, x = pack(tensor), rows(max(ROWS), tensor.shape[1])
        threads(1)
        want = np.concatenate([product(x[i : i + 1], packed) for i in range(len(x))])
        for n_threads in (1, 2, 3):
            threads(n_threads)
            for m in ROWS:
                assert_same_bits(product(x[:m], packed), want[:m], f"{m} rows on {n_threads} threads")


def test_sums_do_not_saturate():
    """All codes at one end, all activations at one end: the largest sums that there are."""
    for byte, code in ((0x80, -128), (0x7F, 127), (0x81, -127)):
        tensor = stored("q8_0", 32, 96)
        blocks = tensor.raw.reshape(-1, 34)
        blocks[:, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
        blocks[:, 2:] = byte
        for sign in (1, -1):
            y = product(np.full((3, 96), sign * 127, np.float32), pack(tensor))
            assert (y == 96 * 127 * code * sign).all()
    for dtype, most in (("q4_1", 15), ("q5_1", 31)):
        tensor = stored(dtype, 32, 96)
        blocks = tensor.raw.reshape(-1, 20 if dtype == "q4_1" else 24)
        blocks[:, :4] = np.frombuffer(np.array([1, 0], np.float16).tobytes(), np.uint8)
        blocks[:, 4:] = 0xFF
        for sign in (1, -1):
            y = product(np.full((3, 96), sign * 127, np.float32), pack(tensor))
            assert (y == 96 * 127 * most * sign).all()


@pytest.mark.parametrize("dtype", CODED)
def test_values_without_a_code(dtype):
    """An infinite or NaN value makes its row NaN and no other; tiny groups and zeros count as zeros."""
    k = depths(dtype)[-1]
    packed, x = pack(stored(dtype, 40, k)), rows(6, k)
    want = product(x, packed)
    x[1, 5], x[2, k - 1], x[4, 40 if k > 40 else 0] = np.inf, -np.inf, np.nan
    got = product(x, packed)
    assert np.isnan(got[[1, 2, 4]]).all()
    assert_same_bits(got[[0, 3, 5]], want[[0, 3, 5]])
    assert not product(np.full((2, k), 2.0**-101, np.float32), packed).any()
    assert not product(np.zeros((2, k), np.float32), packed).any()
    assert np.isfinite(product(np.full((1, k), np.finfo(np.float32).max / 2**20, np.float32), packed)).all()


def test_float_panels_stay_in_float32():
    parts = [stored(dtype, n, 512, seed=n) for dtype, n in (("q8_0", 45), ("f16", 33), ("f32", 64), ("q4_k", 20))]
    packed, x = pack_parts(*parts), rows(9, 512)
    got = product(x, packed)
    assert_same_bits(got[:, 64:192], pk.matmul(x, pk.pack(np.concatenate([padded(part.float32()) for part in parts[1:3]]))))
    assert_same_bits(got[:, :45], product(x, pack(parts[0])))
    assert_same_bits(got[:, 192:212], product(x, pack(parts[3])))


# -- whole models ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return model_files(tmp_path_factory.mktemp("int8"))


MODELS = [name for name in NAMES if name not in FLOATS]


def separate_rows(path, model, tokens):
    """Single operations, every product in the mode."""
    with open_model(path) as file:
        def in_codes(x, name):
            return product(x, pack_parts(file.tensor(name)))

        return separate_forward(model.config, lambda name: file.tensor(name).float32(), tokens, product=in_codes)


def assert_same_rows(got, want, what):
    for part in want._fields:
        assert_same_bits(getattr(got, part), getattr(want, part), f"{part}, {what}")


@pytest.mark.parametrize("name", MODELS)
def test_model(files, name, threads):
    """Equals separate operations in the mode, in any chunk on any number of threads, and is near float32."""
    model = pk.LlamaModel.load(files[name], compute="int8")
    assert model.compute == "int8"
    tokens = tokens_of(model)
    want = rows_alone(model, tokens)
    assert_same_rows(separate_rows(files[name], model, tokens), want, "separate operations")
    for n_threads in (1, 2, 3, 4):
        threads(n_threads)
        for chunk in CHUNKS if n_threads == 2 else (7, len(tokens)):
            assert_same_rows(rows_in_chunks(model, tokens, chunk), want, f"chunks of {chunk} on {n_threads} threads")
    exact = rows_in_chunks(pk.LlamaModel.load(files[name]), tokens, None).logits
    error = np.abs(want.logits - exact)
    assert 0 < error.max() and np.sqrt((error**2).mean()) < 0.05 * exact.std()


def test_batches_forks_and_truncation(files):
    model = pk.LlamaModel.load(files["q4_k_m"], compute="int8")
    tokens = tokens_of(model)
    want = rows_alone(model, tokens)
    pool = model.new_pool(n_tokens=40 * 48)
    first = model.new_sequence(pool, 64)
    model.prefill(tokens[:20], first)
    forks = [first.fork() for _ in range(32)]
    for i, seq in enumerate(forks):
        seq.truncate(i % 20)
    for _ in range(2):
        at = [len(seq) for seq in forks]
        assert_same_bits(model.decode_step(tokens[at], forks), want.logits[at], "32 forks")
    logits = model.step([(seq, tokens[len(seq) : len(seq) + 1 + i % 5]) for i, seq in enumerate(forks)])
    assert_same_bits(logits, want.logits[[len(seq) - 1 for seq in forks]], "ragged step")
    for seq in forks:
        k, v = kv_rows(model, seq)
        assert_same_bits(k, want.k[:, : len(seq)])
        assert_same_bits(v, want.v[:, : len(seq)])


@pytest.mark.parametrize("isa", ISAS)
def test_isa_does_not_show(files, isa):
    if isa not in pk.available_isas():
        pytest.skip(f"{isa} does not run on this machine")
    for name in ("q8_0", "q4_k_m", "mixed_untied"):
        model = pk.LlamaModel.load(files[name], compute="int8")
        result = run_child(files[name], "--tokens", 40, "--compute", "int8", PAGEDKV_ISA=isa)
        assert (result["isa"], result["sha256"]) == (isa, promise_rows.workload_sha256(model, 40)), name


@pytest.mark.parametrize("fpenv", promise_rows.FPENV_BITS)
def test_floating_point_mode_of_the_process_does_not_show(files, fpenv):
    if not promise_rows.can_set_fpenv():
        pytest.skip("the floating-point mode is set through glibc on x86-64 only")
    model = pk.LlamaModel.load(files["q5_0"], compute="int8")
    result = run_child(files["q5_0"], "--compute", "int8", "--tokens", 40, "--fpenv", fpenv, PAGEDKV_NUM_THREADS="2")
    assert result["sha256"] == promise_rows.workload_sha256(model, 40)


def test_a_hidden_size_that_is_no_multiple_of_32(tmp_path):
    """Only `down` can be quantised then; all else stays in float32."""
    config = tiny_config(hidden_dim=72, n_heads=3, n_kv_heads=1, head_dim=24, ffn_dim=96, vocab_size=130)
    tensors = tiny_tensors(config)
    types = {name: "q8_0" for name in tensors if name.endswith("down_proj.weight")}
    write_gguf(tmp_path / "m.gguf", config, tensors, types)
    model = pk.LlamaModel.load(tmp_path / "m.gguf", compute="int8")
    tokens = tokens_of(model)
    want = rows_alone(model, tokens)
    assert_same_rows(separate_rows(tmp_path / "m.gguf", model, tokens), want, "separate operations")
    assert_same_rows(rows_in_chunks(model, tokens, 17), want, "chunks of 17")


# -- the real model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return promise_rows.real_model("int8")


@pytest.fixture(scope="module")
def alone(model):
    return rows_alone(model, tokens_of(model))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_real_model_in_chunks(model, alone, chunk):
    assert_same_rows(rows_in_chunks(model, tokens_of(model), chunk), alone, f"chunks of {chunk}")


def test_real_model_in_a_batch_of_32(model, alone):
    tokens = tokens_of(model)
    pool = model.new_pool(n_tokens=33 * 48)
    seqs = [model.new_sequence(pool, 48) for _ in range(32)]
    model.step([(seq, tokens[: 1 + i]) for i, seq in enumerate(seqs)])
    at = [len(seq) for seq in seqs]
    assert_same_bits(model.decode_step(tokens[at], seqs), alone.logits[at], "32 sequences")


@pytest.mark.parametrize("isa", ISAS)
def test_isa_does_not_show_on_the_real_model(model, isa):
    if isa not in pk.available_isas():
        pytest.skip(f"{isa} does not run on this machine")
    result = run_child(promise_rows.REAL_MODEL, "--tokens", 8, "--compute", "int8", PAGEDKV_ISA=isa)
    assert (result["isa"], result["sha256"]) == (isa, promise_rows.workload_sha256(model, 8))


def test_real_model_equals_separate_operations(model, alone):
    assert_same_rows(separate_rows(hub.find_model(promise_rows.REAL_MODEL), model, tokens_of(model)), alone, "separate")


def test_quality_on_the_real_model(model):
    """Near float32 on a text: the measured cost is in docs/performance.md, this only notices a broken mode."""
    exact = promise_rows.real_model()
    text = ("The library stands at the end of the street, beside the river. In winter its windows are lit from four "
            "o'clock, and people who walk home from the station stop to look at the books in the first of them. ")
    tokens = exact.tokenizer.encode(text * 2)
    a, b = (rows_in_chunks(each, tokens, None).logits.astype(np.float64) for each in (exact, model))
    a, b = (x - np.log(np.exp(x - x.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) - x.max(axis=1, keepdims=True) for x in (a, b))
    assert 0 < (np.exp(a) * (a - b)).sum(axis=1).mean() < 0.02
    assert (a.argmax(axis=1) == b.argmax(axis=1)).mean() > 0.9


# -- what is refused -------------------------------------------------------------------------------------


def test_compute_is_checked(files, tmp_path):
    with pytest.raises(ValueError, match="compute must be 'float32' or 'int8', not 'int4'"):
        pk.LlamaModel.load(files["q8_0"], compute="int4")
    with pytest.raises(ValueError, match="weights='float32' expands"):
        pk.LlamaModel.load(files["q8_0"], weights="float32", compute="int8")
    with pytest.raises(ValueError, match="needs quantised weights, and the matrices of f16.gguf are f16"):
        pk.LlamaModel.load(files["f16"], compute="int8")
    config = tiny_config(**BLOCK_SIZES)
    with pytest.raises(ValueError, match="needs quantised weights"):
        pk.LlamaModel.load(write_hf(tmp_path / "hf", config, tiny_tensors(config), "bf16"), compute="int8")
    assert pk.LlamaModel.load(files["f16"]).compute == "float32"
