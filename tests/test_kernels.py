"""The kernels through the public functions: against float64, against themselves row by row, ISA against ISA.

Tolerances are derived, not tuned. U = 2**-24 is the largest relative error of one float32 rounding, and n of
them in a row stay below gamma(n) (Higham 2002, lemma 3.1). A sum over n elements runs in 16 lanes and then a
tree, so an element passes ceil(n / 16) + 4 roundings, one for each FMA or addition. exp is within 2 ulp, which
is at most 4 U.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pagedkv as pk
import reference
from tiny import golden_cases

U = 2.0**-24
TINY = 2.0**-126  # below it float32 has fewer bits, and a rounding errs by up to 2**-150 whatever the size
EXP = 4 * U  # 2 ulp
LANE_SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 576)
HEAD_DIMS = (8, 16, 40, 56, 64, 80, 100, 128, 256)

sizes = st.one_of(st.sampled_from(LANE_SIZES), st.integers(1, 300))
seeds = st.integers(0, 2**32 - 1)
shapes = settings(max_examples=40, deadline=None)


def gamma(n):
    return n * U / (1 - n * U)


def lane_sum(n):
    """Relative error of a canonical sum of n terms, against the sum of their magnitudes."""
    return gamma(-(-n // 16) + 4)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def assert_within(got, want, tolerance):
    assert got.dtype == np.float32
    assert got.shape == want.shape
    error = np.abs(np.asarray(got, np.float64) - want)
    worst = np.unravel_index(np.argmax(error - tolerance), error.shape) if error.size else ()
    assert (error <= tolerance).all(), f"at {worst}: {got[worst]!r}, exactly {want[worst]!r}"


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


# -- the oracle itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", list(golden_cases()), ids=lambda case: case[0])
def test_oracle_agrees_with_transformers(case):
    """Logits that transformers computed in float32: within 1e-5 of their size, measured 2e-6."""
    _, config, tensors, tokens, rows, logits = case
    assert np.abs(reference.forward(config, tensors, tokens)[rows] - logits).max() <= 1e-5 * np.abs(logits).max()


# -- against float64 ---------------------------------------------------------------------------------


def test_exp_within_2_ulp():
    x = np.concatenate([np.linspace(-104, 88.72, 1_000_001), np.linspace(-1, 1, 100_001)]).astype(np.float32)
    want = reference.exp(x)
    _, exponent = np.frexp(want)
    ulp = np.ldexp(1.0, np.maximum(exponent - 24, -149))
    assert_within(pk.exp(x), want, 2 * ulp)


def test_exp_at_the_edges():
    x = np.array([-np.inf, -1e30, -104, -0.0, 0.0, 1e-45, 88.72283, 88.72284, 89, 1e30, np.inf, np.nan], np.float32)
    got = pk.exp(x)
    assert got[:3].tolist() == [0, 0, 0]
    assert got[3:6].tolist() == [1, 1, 1]
    assert np.isfinite(got[6])
    assert np.isposinf(got[7:11]).all()
    assert np.isnan(got[11])


@shapes
@given(m=st.integers(1, 40), n=sizes, k=sizes, seed=seeds)
@example(m=1, n=1, k=1, seed=0)
@example(m=13, n=33, k=576, seed=0)
def test_matmul(m, n, k, seed):
    """One FMA a step, k steps: gamma(k) of the sum of magnitudes."""
    x, w = normal(seed, m, k), normal(seed + 1, n, k)
    assert_within(pk.matmul(x, pk.pack(w)), reference.matmul(x, w), gamma(k) * reference.matmul(abs(x), abs(w)))


@shapes
@given(n=sizes, seed=seeds)
def test_dot(n, seed):
    a, b = normal(seed, n), normal(seed + 1, n)
    assert abs(pk.dot(a, b) - reference.matmul(a, b)) <= lane_sum(n) * reference.matmul(abs(a), abs(b))


def softmax_error(spread, n):
    """Relative error of softmax over n scores that differ by up to spread.

    Each exp: spread * U from the rounding of its argument, and EXP. The sum: that of its terms, and its own
    order. The quotient: the exp's, the sum's, and one rounding.
    """
    return 2 * (spread * U + EXP) + lane_sum(n) + U


@shapes
@given(m=st.integers(1, 5), n=sizes, scale=st.sampled_from([0.1, 1.0, 10.0, 40.0]), seed=seeds)
def test_softmax(m, n, scale, seed):
    x = normal(seed, m, n) * np.float32(scale)
    want = reference.softmax(x)
    spread = np.ptp(x.astype(np.float64), axis=-1, keepdims=True)
    assert_within(pk.softmax(x), want, softmax_error(spread, n) * want * 1.001 + TINY)


def test_softmax_of_special_rows():
    inf, nan = np.inf, np.nan
    assert pk.softmax([[-inf, 0, -inf, 0]]).tolist() == [[0, 0.5, 0, 0.5]]
    assert pk.softmax([[3e38, -3e38]]).tolist() == [[1, 0]]
    assert np.isnan(pk.softmax([[1, nan, 2]])).all()
    assert np.isnan(pk.softmax([[-inf, -inf]])).all()


@shapes
@given(m=st.integers(1, 5), n=sizes, seed=seeds)
def test_rmsnorm(m, n, seed):
    """Half the errors of the mean (sum, division, epsilon's rounding, addition), the root halving them; then
    root, inverse and two products."""
    x, g, eps = normal(seed, m, n), normal(seed + 1, n), 1e-5
    want = reference.rmsnorm(x, g, eps)
    assert_within(pk.rmsnorm(x, g, eps), want, (0.5 * (lane_sum(n) + 3 * U) + 4 * U) * abs(want) * 1.001 + TINY)


@shapes
@given(n=sizes, scale=st.sampled_from([0.1, 1.0, 30.0]), seed=seeds)
def test_swiglu(n, scale, seed):
    """exp, addition, quotient, product. Below -88.7 exp(-gate) is inf and the result -0 for a silu of 3e-37."""
    gate, up = normal(seed, n) * np.float32(scale), normal(seed + 1, n)
    want = reference.swiglu(gate, up)
    assert_within(pk.swiglu(gate, up), want, (EXP + 3 * U) * abs(want) * 1.001 + 2.0**-120 * abs(up) + TINY)


def assert_rope(x, positions, frequencies):
    """cos and sin rounded, b sin rounded, the FMA rounded: each below U times |a| + |b|."""
    half = len(frequencies)
    reach = np.zeros(x.shape)
    reach[..., : 2 * half] = np.tile(abs(x[..., :half]) + abs(x[..., half : 2 * half]), 2)
    want = reference.rope(x, positions, frequencies)
    assert_within(pk.rope(x, positions, inv_freq=frequencies), want, 4 * U * reach + TINY)


@shapes
@given(n=st.integers(1, 4), n_heads=st.integers(1, 3), half=st.integers(1, 70), rest=st.integers(0, 9), seed=seeds)
def test_rope(n, n_heads, half, rest, seed):
    positions = np.random.default_rng(seed).integers(0, 100_000, n)
    assert_rope(normal(seed, n, n_heads, 2 * half + rest), positions, reference.inv_freq(10000.0, 2 * half))


@pytest.mark.parametrize("scaling", ["none", "linear", "llama3"])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_scaling(scaling, factor):
    """Positions 0, 8,192 and 80,000, factors 8 and 32: the factor is read, and long angles stay exact."""
    frequencies = reference.inv_freq(500000.0, 128, scaling, factor)
    ours = pk.rope_inv_freq(500000.0, 128, scaling, factor)
    assert np.allclose(ours, frequencies, rtol=1e-15 * 8, atol=0)
    x, positions = normal(3, 3, 2, 128), np.array([0, 8192, 80000])
    assert_rope(x, positions, frequencies)
    assert same_bits(pk.rope(x, positions, inv_freq=ours)[0], x[0])  # position 0 turns nothing


def attention_error(q, k, v, n_heads, n_kv_heads, head_dim):
    """Bound of attention's error, against the weighted magnitudes of V.

    A score errs by delta: its dot product, the scale's own rounding and the product with it. Weights then err
    by 2 delta relatively, and by softmax's own error within a chunk of 256. Up to 256 FMAs add the values of
    a chunk. A merge scales either side by an exp of a difference and adds: spread * U + EXP + 2 roundings, for
    the sum and for the values.
    """
    scale, group = head_dim**-0.5, n_heads // n_kv_heads
    q3, k3 = abs(q).reshape(len(q), n_heads, head_dim), abs(k).reshape(len(k), n_kv_heads, head_dim)
    reach = max((q3[:, h] @ k3[:, h // group].T).max() for h in range(n_heads)) * scale
    delta, spread = (lane_sum(head_dim) + 2 * U) * reach, 2 * reach
    n_chunks = -(-len(k) // 256)
    relative = 2 * delta + softmax_error(spread, 256) + gamma(256) + n_chunks * 2 * (spread * U + EXP + 2 * U)
    return relative * abs(v).max() * 1.01 + TINY


@shapes
@given(
    n=st.integers(1, 20), past=st.sampled_from([0, 1, 15, 16, 17, 100, 255, 256, 257, 700]), causal=st.booleans(),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (5, 5)]), head_dim=st.sampled_from(HEAD_DIMS), seed=seeds,
)  # fmt: skip
def test_attention(n, past, causal, heads, head_dim, seed):
    n_heads, n_kv_heads = heads
    q = normal(seed, n, n_heads * head_dim)
    k, v = (normal(seed + i, past + n, n_kv_heads * head_dim) for i in (1, 2))
    shape = dict(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
    want = reference.attention(q, k, v, causal=causal, **shape)
    assert_within(pk.attention(q, k, v, causal=causal, **shape), want, attention_error(q, k, v, **shape))


@pytest.mark.parametrize("n_heads, n_kv_heads", [(12, 12), (32, 8), (28, 4)])
def test_query_heads_share_the_right_kv_head(n_heads, n_kv_heads):
    """V holds the number of its head, so that every output names the KV head it came from."""
    head_dim, total_k = 16, 40
    q, k = normal(1, 3, n_heads * head_dim), normal(2, total_k, n_kv_heads * head_dim)
    v = np.tile(np.repeat(np.arange(n_kv_heads, dtype=np.float32), head_dim), (total_k, 1))
    out = pk.attention(q, k, v, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim)
    want = np.repeat(np.arange(n_heads) // (n_heads // n_kv_heads), head_dim)
    assert np.allclose(out, want, rtol=1e-5, atol=0)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(pk.BadGQAError):
        pk.attention(normal(1, 1, 9 * 8), normal(2, 1, 4 * 8), normal(3, 1, 4 * 8), n_heads=9, n_kv_heads=4, head_dim=8)


# -- a row's bits depend on that row alone -------------------------------------------------------------


@pytest.mark.parametrize("n, k", [(33, 17), (64, 576), (100, 129)])
def test_matmul_row_alone(n, k):
    x, w = normal(1, 40, k), pk.pack(normal(2, n, k))
    alone = [pk.matmul(row, w) for row in x]
    for m in range(1, 41):
        assert same_bits(pk.matmul(x[:m], w), np.stack(alone[:m]))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("total_k", [40, 300])
def test_attention_in_pieces(head_dim, total_k):
    """Causal attention over a prompt cut at 1, 15, 16, 17, or row by row: as in one piece."""
    shape = dict(n_heads=6, n_kv_heads=2, head_dim=head_dim)
    q = normal(1, total_k, 6 * head_dim)
    k, v = (normal(i, total_k, 2 * head_dim) for i in (2, 3))
    whole = pk.attention(q, k, v, **shape)
    for piece in (1, 15, 16, 17):
        pieces = [
            pk.attention(q[at : at + piece], k[: at + piece], v[: at + piece], **shape)
            for at in range(0, total_k, piece)
        ]
        assert same_bits(np.concatenate(pieces), whole)


ROW_OPS = {
    "exp": pk.exp,
    "softmax": pk.softmax,
    "rmsnorm": lambda x: pk.rmsnorm(x, np.linspace(-1, 2, x.shape[-1]), 1e-5),
    "swiglu": lambda x: pk.swiglu(x, x + 1),
}


@pytest.mark.parametrize("name", ROW_OPS)
def test_row_op_alone(name):
    op, x = ROW_OPS[name], normal(5, 9, 100)
    assert same_bits(np.stack([op(row) for row in x]), op(x))


# -- every instruction set gives scalar's bits ---------------------------------------------------------

# Runs in a process of its own: the instruction set is chosen once, at import. Saves the bytes of every result.
_EVERY_OP = """
import sys
import numpy as np, pagedkv as pk

assert pk.isa() == sys.argv[2], pk.isa()
rng = np.random.default_rng(2024)
def normal(*shape):
    return rng.standard_normal(shape, dtype=np.float32)
results = []
for n in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 576):
    x, y = 10 * normal(3, n), normal(3, n)
    results += [pk.exp(x), pk.softmax(x), pk.rmsnorm(x, y[0], 1e-5), pk.swiglu(x, y), np.float32([pk.dot(x[0], y[0])])]
    for m in (1, 2, 3, 4, 13, 40):
        results.append(pk.matmul(normal(m, n), pk.pack(normal(2 * n + 1, n))))
for head_dim in (8, 16, 40, 56, 64, 80, 100, 128, 256):
    x = normal(3, 2, head_dim)
    results += [pk.rope(x, [0, 8192, 80000]), pk.rope(x, [1, 2, 3], rope_dim=max(2, head_dim // 4 * 2))]
    for n, total_k in ((1, 1), (3, 17), (1, 300), (20, 520)):
        q, k, v = normal(n, 6 * head_dim), normal(total_k, 2 * head_dim), normal(total_k, 2 * head_dim)
        results.append(pk.attention(q, k, v, n_heads=6, n_kv_heads=2, head_dim=head_dim))
np.savez(sys.argv[1], *results)
"""


def run_isa(isa, program, *arguments):
    """Run Python code with PAGEDKV_ISA set; imports resolve as in this process."""
    path = os.pathsep.join([str(Path(pk.__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PAGEDKV_ISA": isa, "PYTHONPATH": path}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def every_op(tmp_path_factory):
    """ISA name -> results of every operation, computed by a process of that ISA."""
    directory, cache = tmp_path_factory.mktemp("isa"), {}

    def results(isa):
        if isa not in cache:
            done = run_isa(isa, _EVERY_OP, directory / f"{isa}.npz", isa)
            assert done.returncode == 0, done.stderr
            with np.load(directory / f"{isa}.npz") as saved:
                cache[isa] = [saved[f"arr_{i}"] for i in range(len(saved.files))]
        return cache[isa]

    return results


@pytest.mark.parametrize("isa", ["avx2", "avx512", "neon"])
def test_isa_equals_scalar(every_op, isa):
    if isa not in pk.available_isas():
        pytest.skip(f"{isa} does not run on this machine")
    got, want = every_op(isa), every_op("scalar")
    assert len(got) == len(want) > 200
    for i, (a, b) in enumerate(zip(got, want)):
        assert same_bits(a, b), f"result {i}, shape {a.shape}"


def test_isa_that_does_not_run_is_refused():
    absent = next(name for name in ("avx2", "avx512", "neon", "no-such") if name not in pk.available_isas())
    done = run_isa(absent, "import pagedkv")
    assert done.returncode != 0
    assert absent in done.stderr
    assert "scalar" in done.stderr


def test_isa_is_the_best_one_unless_asked():
    available = pk.available_isas()
    assert available[-1] == "scalar"
    assert pk.isa() == (os.environ.get("PAGEDKV_ISA") or available[0])


def test_scalars_and_empty_batches_keep_their_shape():
    assert pk.exp(0.0).shape == () and pk.swiglu(1.0, 2.0).shape == ()
    assert pk.matmul(np.empty((0, 3), np.float32), pk.pack(np.ones((5, 3)))).shape == (0, 5)


@pytest.mark.parametrize("theta", [1e-300, 1e-10])
def test_angles_past_the_range_of_sincos_are_refused(theta):
    with pytest.raises(pk.BadDimError, match="radians"):
        pk.rope([[1.0, 2.0, 3.0, 4.0]], [1000], theta=theta)
