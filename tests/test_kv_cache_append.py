"""kv_cache_append: a copy of the prior with one range of tokens replaced."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedkv as pk

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
KVA = pk.KvaStatus


def random_bits(shape, dtype, seed):
    """Every bit pattern may occur, NaN payloads among them."""
    width = np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * width), np.uint8).view(dtype)


def expected(prior, chunk, offset):
    out = prior.copy()
    out[:, :, offset : offset + chunk.shape[2]] = chunk
    return out


@given(data=st.data(), batch=st.integers(1, 3), heads=st.integers(1, 3), capacity=st.integers(1, 9),
       head_dim=st.integers(1, 9), dtype=st.sampled_from(DTYPES), n_threads=st.integers(1, 3))  # fmt: skip
def test_it_is_numpys_assignment_in_every_bit(data, batch, heads, capacity, head_dim, dtype, n_threads):
    chunk_len = data.draw(st.integers(1, capacity))
    offset = data.draw(st.integers(0, capacity - chunk_len))
    prior = random_bits((batch, heads, capacity, head_dim), dtype, 1)
    chunk = random_bits((batch, heads, chunk_len, head_dim), dtype, 2)
    before, threads = prior.tobytes(), pk.get_num_threads()
    pk.set_num_threads(n_threads)
    try:
        out = pk.kv_cache_append(prior, chunk, offset)
    finally:
        pk.set_num_threads(threads)
    assert out.dtype == prior.dtype and out.shape == prior.shape and out.flags.c_contiguous and out.flags.writeable
    assert out.tobytes() == expected(prior, chunk, offset).tobytes()
    assert prior.tobytes() == before and not np.shares_memory(out, prior)


def test_the_payload_of_a_nan_is_kept():
    prior = np.array([0x7FC12345, 0xFFA00001, 0x7F800001], np.uint32).view(np.float32).reshape(1, 1, 3, 1)
    chunk = np.array([0x7F8ABCDE], np.uint32).view(np.float32).reshape(1, 1, 1, 1)
    out = pk.kv_cache_append(prior, chunk, 1).view(np.uint32)
    assert out.ravel().tolist() == [0x7FC12345, 0x7F8ABCDE, 0x7F800001]


def test_bfloat16_may_come_as_uint16():
    prior, chunk = random_bits((2, 1, 4, 3), np.uint16, 1), random_bits((2, 1, 2, 3), np.uint16, 2)
    out = pk.kv_cache_append(prior, chunk, 2, dtype="bfloat16")
    assert out.dtype == np.uint16 and np.array_equal(out, expected(prior, chunk, 2))
    typed = pk.kv_cache_append(prior.view(ml_dtypes.bfloat16), chunk.view(ml_dtypes.bfloat16), 2)
    assert typed.dtype == ml_dtypes.bfloat16 and typed.tobytes() == out.tobytes()


def test_a_read_only_or_strided_prior_is_fine():
    prior = np.arange(48, dtype=np.float32).reshape(2, 2, 3, 4)[:, ::-1, :, ::2]
    prior.flags.writeable = False
    chunk = np.broadcast_to(np.float32(-1), (2, 2, 1, 2))
    assert np.array_equal(pk.kv_cache_append(prior, chunk, 0), expected(prior, chunk, 0))


def test_the_views_of_a_pool_are_a_prior():
    pool = pk.BlockPool(2, 3, 4)
    assert pk.kv_cache_append(pool.k, np.ones((2, 3, 1, 4), np.float32), 15)[:, :, 15].all() and not pool.k.any()


def raised(*args, **kwargs):
    with pytest.raises(pk.KvCacheAppendError) as caught:
        pk.kv_cache_append(*args, **kwargs)
    assert caught.value.chain == (caught.value.status,)
    return type(caught.value), caught.value.status, str(caught.value)


def giant(shape, dtype=np.float32):
    """An array of any shape that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("empty", ["prior", "chunk", "both"])
def test_a_zero_dimension_is_an_empty_shape(axis, empty):
    shape = [1, 1, 1, 1]
    shape[axis] = 0
    prior, chunk = ((1, 1, 1, 1), shape) if empty == "chunk" else (shape, shape if empty == "both" else (1, 1, 1, 1))
    assert raised(giant(prior), giant(chunk), 0)[:2] == (pk.EmptyShape, KVA.KVA_ERR_EMPTY_SHAPE)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint16, np.int8, bool, complex, ml_dtypes.float8_e4m3fn, ">f4"])
def test_other_dtypes_are_refused(dtype):
    array = np.zeros((1, 1, 2, 2), dtype)
    assert raised(array, array, 0)[:2] == (pk.UnsupportedDtype, KVA.KVA_ERR_UNSUPPORTED_DTYPE)


@pytest.mark.parametrize("prior, chunk, dtype", [("f4", "f2", None), ("f2", "f4", None), ("u2", "u2", "float16"),
                                                 ("f4", "f4", "bfloat16"), ("u2", "f4", "bfloat16")])  # fmt: skip
def test_a_chunk_or_meaning_of_another_dtype_is_refused(prior, chunk, dtype):
    assert raised(np.zeros((1, 1, 2, 2), prior), np.zeros((1, 1, 1, 2), chunk), 0, dtype=dtype)[0] is pk.UnsupportedDtype


@pytest.mark.parametrize("offset, chunk_len", [(3, 1), (1, 3), (0, 4), (-1, 1), (2**31, 1), (2**32 - 1, 1), (2**32, 1), (2**70, 1)])
def test_a_chunk_past_the_capacity_is_out_of_range(offset, chunk_len):
    error, status, message = raised(giant((1, 1, 3, 2)), giant((1, 1, chunk_len, 2)), offset)
    assert (error, status) == (pk.Range, KVA.KVA_ERR_RANGE)
    assert all(str(n) in message for n in (offset, chunk_len, 3))


@pytest.mark.parametrize("shape", [(2**16, 2**8, 2**8, 1), (1, 1, 2**16, 2**16), (2**31, 2, 1, 1), (2**20, 2**20, 1, 1),
                                   (1, 1, 2**33, 1)])  # fmt: skip
def test_more_than_32_bits_of_elements_overflow(shape):
    chunk = giant((*shape[:2], 1, shape[3]))
    assert raised(giant(shape), chunk, 0)[:2] == (pk.ElementCountOverflow, KVA.KVA_ERR_ELEMENT_COUNT_OVERFLOW)


def test_the_checks_come_in_the_seeds_order():
    shape, chunk = (2**20, 2**20, 2, 1), (2**20, 2**20, 1, 1)
    assert raised(giant((2**20, 0, 2, 1), "f8"), giant(chunk, "f8"), 9)[0] is pk.EmptyShape  # all four are wrong
    assert raised(giant(shape, "f8"), giant(chunk, "f8"), 9)[0] is pk.UnsupportedDtype
    assert raised(giant(shape), giant(chunk), 9)[0] is pk.Range
    assert raised(giant(shape), giant(chunk), 1)[0] is pk.ElementCountOverflow


@pytest.mark.parametrize("prior, chunk", [((1, 1, 2, 2), (2, 1, 1, 2)), ((1, 1, 2, 2), (1, 2, 1, 2)), ((1, 1, 2, 2), (1, 1, 1, 3)),
                                          ((1, 2, 2), (1, 1, 2)), ((1, 1, 1, 2, 2), (1, 1, 1, 1, 2))])  # fmt: skip
def test_shapes_that_differ_in_more_than_tokens_are_refused(prior, chunk):
    with pytest.raises(pk.BadDimError):
        pk.kv_cache_append(giant(prior), giant(chunk), 0)


@pytest.mark.parametrize("offset", [1.5, "1", None])
def test_an_offset_that_is_no_integer_is_refused(offset):
    with pytest.raises(TypeError):
        pk.kv_cache_append(giant((1, 1, 3, 2)), giant((1, 1, 1, 2)), offset)
