"""Dequantisation against the ``gguf`` package, bit for bit."""

import tracemalloc

import gguf
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import FormatError
from pagedkv.formats import quants

TYPES = sorted(quants.BLOCKS)


def reference(raw, dtype):
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(raw, kind), np.float32)


def assert_same_bits(ours, theirs):
    """Equal to the last bit, the sign of zero too; one NaN is as good as another."""
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    numbers = ~np.isnan(theirs)
    assert not np.isnan(ours[numbers]).any() and np.isnan(ours[~numbers]).all()
    np.testing.assert_array_equal(ours[numbers].view(np.uint32), theirs[numbers].view(np.uint32))


def random_bytes(dtype, n, k, seed):
    return np.random.default_rng(seed).integers(0, 256, (n, quants.row_nbytes(dtype, k)), dtype=np.uint8)


@pytest.mark.parametrize("dtype", TYPES)
def test_block_sizes(dtype):
    assert quants.BLOCKS[dtype] == tuple(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype.upper()]])


@pytest.mark.parametrize("dtype", TYPES)
def test_any_bytes(dtype):
    # Random scales are infinite, NaN, subnormal and negative now and then; all codes occur.
    raw = random_bytes(dtype, 512, 768, seed=1)
    assert_same_bits(quants.dequantize(raw.reshape(-1), dtype, (512, 768)), reference(raw, dtype))


@pytest.mark.parametrize("dtype", sorted(set(TYPES) - {"f32", "f16", "bf16"}))
def test_weights(dtype):
    raw = tiny.random_quantised(dtype, 96, 512, np.random.default_rng(2))
    ours = quants.dequantize(raw, dtype, (96, 512))
    assert_same_bits(ours, reference(raw, dtype))
    assert 0.01 < ours.std() < 0.5 and np.isfinite(ours).all()


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(TYPES), st.integers(1, 40), st.integers(1, 4), st.sampled_from([1, 300, 1024, 1 << 16]), st.integers(0, 2**32))
def test_shapes_and_chunks(dtype, n, n_blocks, chunk_len, seed):
    k = n_blocks * quants.BLOCKS[dtype][0]
    raw = random_bytes(dtype, n, k, seed)
    order = np.random.default_rng(seed).integers(0, n, 2 * n)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quants, "CHUNK_LEN", chunk_len)
        whole = quants.dequantize(raw, dtype, (n, k))
        some = quants.dequantize(raw, dtype, (n, k), order)
    assert_same_bits(whole, reference(raw, dtype))
    assert_same_bits(some, reference(raw, dtype)[order])


@pytest.mark.parametrize("dtype", ["q4_1", "q5_1", "q4_k", "q5_k"])
def test_fusing_product_and_sum_changes_nothing(dtype):
    # float64 holds product and sum exactly (float16 scales span 2**-24 to 2**15), so rounding it
    # once is what a fused multiply-add does.
    raw = random_bytes(dtype, 256, 1024, seed=4)
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(quants, "_halfs", lambda blocks, at: blocks[:, at : at + 2].copy().view("<f2").astype(np.float64))
        fused = np.empty((raw.size // quants.BLOCKS[dtype][1], quants.BLOCKS[dtype][0]))
        quants._EXPAND[dtype](raw.reshape(len(fused), -1), fused)
        fused = fused.astype(np.float32).reshape(256, 1024)
    assert_same_bits(quants.dequantize(raw, dtype, (256, 1024)), fused)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
def test_temporary_memory(dtype, order):
    raw = random_bytes(dtype, 4096, 1024, seed=3)
    row_order = np.arange(4096)[::-1] if order else None
    tracemalloc.start()
    out = quants.dequantize(raw, dtype, (4096, 1024), row_order)
    peak = tracemalloc.get_traced_memory()[1] - out.nbytes
    tracemalloc.stop()
    chunk_nbytes = 4 * quants.CHUNK_LEN
    assert peak <= 2 * chunk_nbytes, f"{peak / chunk_nbytes:.2f} chunks"


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: quants.row_nbytes("q2_k", 256), "'q2_k' is not read here"),
        (lambda: quants.row_nbytes("q4_0", 48), "48 values is no whole number of q4_0 blocks of 32"),
        (lambda: quants.dequantize(np.zeros(35, np.uint8), "q8_0", (1, 32)), "34 bytes, not 35"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(FormatError, match=message):
        call()
