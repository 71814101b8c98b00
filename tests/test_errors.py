"""Statuses and the exceptions that carry them."""

import pickle

import pytest

import pagedkv as pk

# docs/design.md, section 3; the values are the seeds'.
STATUSES = {
    pk.PkvStatus: "PKV_OK PKV_ERR_NULL PKV_ERR_BAD_DIM PKV_ERR_EXHAUST PKV_ERR_BOUNDS",
    pk.ApStatus: "AP_OK AP_ERR_BAD_DIM AP_ERR_BAD_GQA AP_ERR_SEQ",
    pk.Blk4Status: "BLK4_OK BLK4_ERR_BAD_DIM BLK4_ERR_NULL BLK4_ERR_CACHE",
    pk.Stk4Status: "STK4_OK STK4_ERR_BAD_DIM STK4_ERR_NULL STK4_ERR_LAYER",
    pk.Flv4Status: "FLV4_OK FLV4_ERR_NULL FLV4_ERR_BAD_DIM FLV4_ERR_TOKEN FLV4_ERR_STACK",
}


@pytest.mark.parametrize("enum", STATUSES, ids=lambda enum: enum.__name__)
def test_statuses_have_the_values_of_the_seeds(enum):
    assert [(s.name, int(s)) for s in enum] == [(name, i) for i, name in enumerate(STATUSES[enum].split())]


@pytest.mark.parametrize("error, builtin", [
    (pk.PoolExhausted, Exception), (pk.BoundsError, IndexError), (pk.BadDimError, ValueError),
    (pk.BadGQAError, ValueError), (pk.NullError, ValueError), (pk.TokenError, ValueError), (pk.FormatError, ValueError),
    (pk.EmptyShape, ValueError), (pk.Range, IndexError), (pk.ElementCountOverflow, OverflowError),
    (pk.UnsupportedDtype, TypeError)])  # fmt: skip
def test_each_error_is_a_pagedkv_error_and_a_builtin_one(error, builtin):
    assert issubclass(error, pk.PagedKVError) and issubclass(error, builtin)


def test_status_is_the_innermost_of_the_chain():
    chain = (pk.Flv4Status.FLV4_ERR_STACK, pk.Stk4Status.STK4_ERR_LAYER, pk.PkvStatus.PKV_ERR_EXHAUST)
    error = pk.PoolExhausted("needs 7 blocks, 3 of 64 are free", chain)
    assert error.status is pk.PkvStatus.PKV_ERR_EXHAUST and error.chain == chain
    assert str(error).startswith("needs 7 blocks, 3 of 64 are free")
    assert all(status.name in str(error) for status in chain)


def test_an_error_without_a_status_says_so():
    error = pk.FormatError("no such tensor")
    assert error.status is None and error.chain == () and str(error) == "no such tensor"


def test_errors_survive_pickling():
    error = pk.BoundsError("block 9 is outside [0, 4)", (pk.PkvStatus.PKV_ERR_BOUNDS,))
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is pk.BoundsError and (str(back), back.chain) == (str(error), error.chain)


@pytest.mark.parametrize("call, error, status", [
    (lambda pool, seq: pool.ref_block(0), pk.BoundsError, pk.PkvStatus.PKV_ERR_BOUNDS),
    (lambda pool, seq: pool.ref_count(2), pk.BoundsError, pk.PkvStatus.PKV_ERR_BOUNDS),
    (lambda pool, seq: pk.BlockPool(0, 1, 1), pk.BadDimError, pk.PkvStatus.PKV_ERR_BAD_DIM),
    (lambda pool, seq: seq.ensure_append(0), pk.BadDimError, pk.PkvStatus.PKV_ERR_BAD_DIM),
    (lambda pool, seq: seq.ensure_append(33), pk.PoolExhausted, pk.PkvStatus.PKV_ERR_EXHAUST),
    (lambda pool, seq: (seq.free(), seq.fork()), pk.NullError, pk.PkvStatus.PKV_ERR_NULL)])  # fmt: skip
def test_a_status_becomes_its_exception(call, error, status):
    pool = pk.BlockPool(2, 1, 4)
    with pytest.raises(error) as caught:
        call(pool, pk.Sequence(pool, 64))
    assert caught.value.status is status and caught.value.chain == (status,)
