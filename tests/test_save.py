"""Sequences saved and restored, exported and imported, and described for other kernels.

What lies in a pool is read here through the pool's views; what lies in a file, by the safetensors package.
"""

import json
import os
import resource
import stat
import threading
import zlib

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

import pagedkv as pk
import promise_rows
import tiny
from pagedkv.formats import saved
from promise_rows import assert_same_bits, rows_alone, token_stream

DTYPES = ("float32", "float16", "bfloat16", "q8_0")
N_LAYERS, KV_DIM = 3, 64


def stored(seq):
    """The stored rows, part -> [n_layers, len, width], as the bits they are."""
    pool, n = seq.pool, len(seq)
    views = {"k": pool.k, "v": pool.v, "k_scale": pool.k_scale, "v_scale": pool.v_scale}
    out = {}
    for name, view in views.items():
        if view is not None:
            rows = view[seq.block_table].transpose(1, 0, 2, 3).reshape(pool.n_layers, -1, view.shape[3])[:, :n]
            out[name] = np.ascontiguousarray(rows).view(f"u{view.itemsize}")
    return out


def assert_same_rows(seq, want):
    got = stored(seq)
    assert got.keys() == want.keys()
    for name in got:
        np.testing.assert_array_equal(got[name], want[name], name)


def extend(seq, n, seed):
    """Append n random rows to all layers; infinities and a NaN among them, which have to keep their bits too."""
    rng = np.random.default_rng(seed)
    if n:
        seq.ensure_append(n)
        for layer in range(seq.pool.n_layers):
            scale = np.float32(10.0 ** int(rng.integers(-9, 9)))
            k, v = rng.standard_normal((2, n, seq.pool.kv_dim), dtype=np.float32) * scale
            k[0, 0], v[-1, -1] = np.inf, np.nan
            seq.append_layer(layer, k, v)
        seq.advance(n)
    return seq


def new_pool(n_tokens=320, dtype="float32", block_size=16, n_layers=N_LAYERS, kv_dim=KV_DIM):
    return pk.BlockPool(max(1, -(-n_tokens // block_size)), n_layers, kv_dim, block_size, dtype)


def new_sequence(n, dtype="float32", block_size=16, seed=0, **shape):
    return extend(pk.Sequence(new_pool(n, dtype, block_size, **shape), n), n, seed)


def state(pool):
    """All that a failed call must leave: owners, and the order in which the free blocks go."""
    taken = [pool.alloc_block() for _ in range(pool.n_free)]
    for block_id in reversed(taken):
        pool.unref_block(block_id)
    return pool.n_free, taken, [pool.ref_count(i) for i in range(pool.n_blocks)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny.tiny_config(n_heads=4, n_kv_heads=2, head_dim=32)
    return pk.LlamaModel.load(tiny.write_hf(tmp_path_factory.mktemp("save"), config, tiny.tiny_tensors(config, 3)))


# ---- Save and load ----


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 300])
@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_to_the_bit(tmp_path, dtype, block_size, n):
    seq = new_sequence(n, dtype, block_size)
    seq.save(tmp_path / "kv")
    for other_size in (1, 16, 256):
        pool = new_pool(n, dtype, other_size)  # not a block more than it needs
        again = pk.Sequence.load(tmp_path / "kv", pool)
        assert_same_rows(again, stored(seq))
        assert len(again.block_table) == -(-n // other_size)
        again.free()
        assert pool.n_free == pool.n_blocks
    assert os.listdir(tmp_path) == ["kv"]


@pytest.mark.parametrize("tokens", [None, range(17)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_file_is_safetensors(tmp_path, dtype, tokens):
    seq = new_sequence(17, dtype)
    seq.save(tmp_path / "kv", tokens, "a model")
    tensors = dict(safetensors.deserialize((tmp_path / "kv").read_bytes()))
    for name, rows in stored(seq).items():
        assert tensors[name]["shape"] == list(rows.shape) and bytes(tensors[name]["data"]) == rows.tobytes()
    with safetensors.safe_open(tmp_path / "kv", "numpy") as file:
        assert file.metadata() == {"format": "pagedkv sequence", "version": "1", "dtype": dtype, "model": "a model"}
        assert set(file.keys()) == {*stored(seq), "head_crc32", "crc32"} | ({"tokens"} if tokens else set())
        if tokens:
            assert file.get_tensor("tokens").tolist() == list(tokens)
        assert file.get_tensor("crc32")[0] == zlib.crc32((tmp_path / "kv").read_bytes()[:-4])
    data = (tmp_path / "kv").read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    assert end % 64 == 0 and json.loads(data[8:end])["k"]["data_offsets"][0] == 0


def test_the_header_says_what_was_saved(tmp_path, model):
    seq = new_sequence(17, "bfloat16")
    seq.save(tmp_path / "kv", np.arange(17, dtype=np.uint16), "smoll\N{INFINITY}\N{GRINNING FACE}")
    header = pk.Sequence.read_header(str(tmp_path / "kv"))
    assert header == (N_LAYERS, 17, KV_DIM, "bfloat16", "smoll\N{INFINITY}\N{GRINNING FACE}", list(range(17)))
    assert type(header) is pk.SequenceHeader and all(type(token) is int for token in header.tokens)
    seq.save(tmp_path / "kv")
    assert pk.Sequence.read_header(tmp_path / "kv")[4:] == (None, None)
    seq.truncate(0)
    seq.save(tmp_path / "kv", [], model)
    assert pk.Sequence.read_header(tmp_path / "kv") == (N_LAYERS, 0, KV_DIM, "bfloat16", model.fingerprint, [])


def test_only_used_rows_take_place(tmp_path):
    seq = new_sequence(300, block_size=256)
    seq.truncate(20)
    seq.save(tmp_path / "kv")
    assert 0 <= (tmp_path / "kv").stat().st_size - 2 * N_LAYERS * 20 * KV_DIM * 4 < 1024


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_do_not_show(tmp_path, monkeypatch, dtype):
    seq = new_sequence(40, dtype)
    seq.save(tmp_path / "whole", range(40))
    for nbytes in (1, 1000):
        monkeypatch.setattr(saved, "_PIECE_NBYTES", nbytes)
        seq.save(tmp_path / "pieces", range(40))
        assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()
        assert_same_rows(pk.Sequence.load(tmp_path / "pieces", new_pool(40, dtype, 1)), stored(seq))


@pytest.mark.parametrize("dtype", DTYPES)
def test_forks_truncation_reservation_and_placement(tmp_path, dtype):
    pool = new_pool(400, dtype)
    hole = [extend(pk.Sequence(pool, 64), 20, 9) for _ in range(3)]
    seq = extend(pk.Sequence(pool, 200), 70, 1)
    hole[1].free()
    child = seq.fork()
    extend(child, 30, 2)  # into the hole
    child.truncate(75)
    child.ensure_append(40)
    assert sorted(child.block_table.tolist()) != child.block_table.tolist()
    before = state(pool)
    for i, each in enumerate((seq, child)):
        each.save(tmp_path / str(i))
    assert state(pool) == before
    for i, each in enumerate((seq, child)):
        again = pk.Sequence.load(tmp_path / str(i), pool, max_tokens=100)
        assert_same_rows(again, stored(each))
        extend(again, 5, 4)  # its blocks are its own
    assert len(seq) == 70 and len(child) == 75


def test_max_tokens_bounds_the_table(tmp_path):
    new_sequence(40).save(tmp_path / "kv")
    pool = new_pool(400)
    seq = pk.Sequence.load(tmp_path / "kv", pool, max_tokens=40)
    with pytest.raises(pk.BoundsError):
        seq.ensure_append(40)
    seq.free()
    before = state(pool)
    with pytest.raises(pk.BoundsError, match="0 [+] 40 tokens do not fit a table of 2 blocks of 16"):
        pk.Sequence.load(tmp_path / "kv", pool, max_tokens=16)
    with pytest.raises(pk.BadDimError, match="max_tokens"):
        pk.Sequence.load(tmp_path / "kv", pool, max_tokens=-1)
    assert state(pool) == before
    seq = pk.Sequence.load(tmp_path / "kv", pool)
    seq.ensure_append(360)  # the whole pool


def test_what_another_thread_appends_is_not_saved(tmp_path, monkeypatch):
    source = extend(pk.Sequence(new_pool(64), 64), 20, 0)
    want, take = stored(source), pk.Sequence._take_rows

    def take_while_it_changes(self, *args):
        thread = threading.Thread(target=lambda: (source.truncate(10), extend(source, 7, 5)))
        thread.start()
        thread.join()
        return take(self, *args)

    monkeypatch.setattr(pk.Sequence, "_take_rows", take_while_it_changes)
    source.save(tmp_path / "kv")
    assert_same_rows(pk.Sequence.load(tmp_path / "kv", new_pool(64)), want)


@settings(max_examples=40)
@given(dtype=st.sampled_from(DTYPES), sizes=st.tuples(*[st.sampled_from([1, 2, 8, 16, 64, 256])] * 2),
       n=st.integers(0, 90), cut=st.integers(0, 90), n_layers=st.integers(1, 4), groups=st.integers(1, 3),
       with_tokens=st.booleans(), name=st.one_of(st.none(), st.text(max_size=20)))  # fmt: skip
def test_round_trips(tmp_path_factory, dtype, sizes, n, cut, n_layers, groups, with_tokens, name):
    path = tmp_path_factory.mktemp("round") / "kv"
    seq = new_sequence(n, dtype, sizes[0], seed=n, n_layers=n_layers, kv_dim=32 * groups)
    seq.truncate(min(n, cut))
    tokens = list(range(len(seq))) if with_tokens else None
    seq.save(path, tokens, name)
    again = pk.Sequence.load(path, new_pool(90, dtype, sizes[1], n_layers, 32 * groups), model=name)
    assert_same_rows(again, stored(seq))
    assert pk.Sequence.read_header(path) == (n_layers, len(seq), 32 * groups, dtype, name, tokens)


# ---- The promise ----


def go_on(model, seq, tokens):
    return np.stack([model.decode_step([token], [seq])[0] for token in tokens])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 16, 31, 257])
def test_a_restored_sequence_goes_on_with_the_same_bits(tmp_path, model, dtype, n):
    tokens = token_stream(n, n + 4, model.config.vocab_size)
    want = rows_alone(model, tokens, 64, dtype)
    seq = model.new_sequence(model.new_pool(n_tokens=n + 4, dtype=dtype))
    model.prefill(tokens[:n], seq)
    seq.save(tmp_path / "kv", tokens[:n], model)
    assert_same_bits(go_on(model, seq, tokens[n:]), want.logits[n:])
    pool = model.new_pool(n_tokens=3 * (n + 64), block_size=64, dtype=dtype)
    first = pk.Sequence.load(tmp_path / "kv", pool, model=model)
    second = pk.Sequence.load(tmp_path / "kv", pool, model=model.fingerprint)
    third = first.fork()
    for token, row in zip(tokens[n:], want.logits[n:]):
        for logits in model.decode_step([token] * 3, [third, first, second]):
            assert_same_bits(logits, row)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_real_model(tmp_path, dtype):
    model = promise_rows.real_model()
    tokens = token_stream(1, 24, model.config.vocab_size)
    want = rows_alone(model, tokens, kv_dtype=dtype)
    seq = model.new_sequence(model.new_pool(n_tokens=32, dtype=dtype))
    model.prefill(tokens[:20], seq)
    seq.save(tmp_path / "kv", tokens[:20], model)
    again = pk.Sequence.load(tmp_path / "kv", model.new_pool(n_tokens=64, block_size=8, dtype=dtype), model=model)
    assert_same_bits(go_on(model, again, tokens[20:]), want.logits[20:])


def test_a_fingerprint_names_what_the_rows_depend_on(tmp_path):
    config = tiny.tiny_config(hidden_dim=64, n_heads=2, n_kv_heads=1, head_dim=32)
    tensors = tiny.tiny_tensors(config, 1)

    def fingerprint(config=config, tensors=tensors, **how):
        path = tiny.write_hf(tmp_path / str(len(os.listdir(tmp_path))), config, tensors)
        return pk.LlamaModel.load(path, **how).fingerprint

    same = fingerprint()
    assert same == fingerprint() == fingerprint(weights="float32") and same.startswith("llama-2x64-float32-")
    assert same == fingerprint(tiny.replace(config, context_len=77, eos_token_ids=(5,), bos_token_id=4))
    others = [fingerprint(tiny.replace(config, rope_theta=5000.0)), fingerprint(tiny.replace(config, norm_eps=1e-6))]
    for name in tensors:
        changed = tensors | {name: tensors[name].copy()}
        flat = changed[name].reshape(-1)
        flat[flat.size // 2] = np.nextafter(flat[flat.size // 2], np.float32(9))
        others.append(fingerprint(tensors=changed))
    assert len({same, *others}) == len(others) + 1


@pytest.mark.parametrize("kind", ["gguf", "hf"])
def test_a_fingerprint_is_of_the_weights_that_were_loaded(tmp_path, kind):
    """It is made when somebody asks: whatever the file's name leads to by then."""
    config = tiny.tiny_config(hidden_dim=64, n_heads=2, n_kv_heads=1, head_dim=32)

    def write(name, seed=1):
        if kind == "gguf":
            tiny.write_gguf(tmp_path / name, config, tiny.tiny_tensors(config, seed), "f32")
            return tmp_path / name, tmp_path / name
        path = tiny.write_hf(tmp_path / name, config, tiny.tiny_tensors(config, seed))
        return path, next(path.glob("*.safetensors"))

    path, weights = write("model")
    want = pk.LlamaModel.load(path).fingerprint
    models = [pk.LlamaModel.load(path) for _ in range(4)]
    names = []
    asking = [threading.Thread(target=lambda: names.append(models[0].fingerprint)) for _ in range(4)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert names == [want] * 4
    os.replace(write("other", 2)[1], weights)
    assert models[1].fingerprint == want != pk.LlamaModel.load(path).fingerprint
    weights.unlink()
    assert models[2].fingerprint == want

    path, weights = write("again")
    model, known = pk.LlamaModel.load(path), pk.LlamaModel.load(path)
    assert known.fingerprint == want
    with open(weights, "r+b") as file:
        file.truncate(weights.stat().st_size - 4096)
    with pytest.raises(pk.FormatError, match="was written to after"):
        model.fingerprint
    assert known.fingerprint == want


def test_int8_is_another_model(tmp_path):
    config = tiny.tiny_config(hidden_dim=64, n_heads=2, n_kv_heads=1, head_dim=32)
    path = tmp_path / "model.gguf"
    tiny.write_gguf(path, config, tiny.tiny_tensors(config, 1), "q8_0")
    names = {pk.LlamaModel.load(path, compute=compute).fingerprint for compute in ("float32", "int8")}
    assert len(names) == 2


def test_either_kind_of_weights_goes_on_with_the_other_s_rows(tmp_path):
    config = tiny.tiny_config(hidden_dim=64, n_heads=2, n_kv_heads=1, head_dim=32)
    path = tmp_path / "model.gguf"
    tiny.write_gguf(path, config, tiny.tiny_tensors(config, 1), "q8_0")
    packed, expanded = (pk.LlamaModel.load(path, weights=weights) for weights in ("auto", "float32"))
    tokens = token_stream(1, 24, config.vocab_size)
    seq = packed.new_sequence(packed.new_pool(n_tokens=32))
    packed.prefill(tokens[:20], seq)
    seq.save(tmp_path / "kv", model=packed)
    again = pk.Sequence.load(tmp_path / "kv", expanded.new_pool(n_tokens=32), model=expanded)
    assert_same_bits(go_on(expanded, again, tokens[20:]), go_on(packed, seq, tokens[20:]))


# ---- What is refused ----


def test_what_does_not_fit_the_sequence_is_not_saved(tmp_path):
    seq = new_sequence(3)
    before = state(seq.pool)
    for tokens, error, match in [
        ([1, 2], pk.BadDimError, r"tokens of shape \[2\] for a sequence of 3 rows"),
        ([[1, 2, 3]], pk.BadDimError, r"shape \[1, 3\]"), (7, pk.BadDimError, "shape"),
        ("abc", pk.BadDimError, "shape"), ([1.0, 2.0, 3.0], TypeError, "float64"), ([True] * 3, TypeError, "bool"),
        (["a", "b", "c"], TypeError, "integers"),
        ([1, 2, -1], pk.TokenError, "-1 to 2"), ([1, 2, 2**31], pk.TokenError, "2147483648"),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            seq.save(tmp_path / "kv", tokens)
    for name in (3, b"name", object()):
        with pytest.raises(TypeError, match="a LlamaModel or a name"):
            seq.save(tmp_path / "kv", model=name)
    for name in ("x" * 2049, "\ud800"):
        with pytest.raises(ValueError):
            seq.save(tmp_path / "kv", model=name)
    assert state(seq.pool) == before and os.listdir(tmp_path) == []
    seq.save(tmp_path / "kv", model="\N{GRINNING FACE}" * 2048)
    assert pk.Sequence.read_header(tmp_path / "kv").model == "\N{GRINNING FACE}" * 2048
    seq.free()
    with pytest.raises(pk.NullError, match="freed"):
        seq.save(tmp_path / "kv")


def test_a_pool_that_does_not_fit(tmp_path):
    new_sequence(40, "float16").save(tmp_path / "kv", model="mine")
    for pool, error, match in [
        (pk.BlockPool(9, 2, 64, dtype="float16"), pk.BadDimError,
         "3 layers of 64 values of float16, the pool holds 2 of 64 of float16"),
        (pk.BlockPool(9, 3, 32, dtype="float16"), pk.BadDimError, "the pool holds 3 of 32 of float16"),
        (pk.BlockPool(9, 3, 64, dtype="bfloat16"), pk.BadDimError, "the pool holds 3 of 64 of bfloat16"),
        (pk.BlockPool(9, 3, 64), pk.BadDimError, "float32"),
        (pk.BlockPool(2, 3, 64, dtype="float16"), pk.PoolExhausted, "needs 3 blocks, 2 of 2 are free"),
    ]:  # fmt: skip
        before = state(pool)
        with pytest.raises(error, match=match):
            pk.Sequence.load(tmp_path / "kv", pool)
        assert state(pool) == before
    pool = new_pool(40, "float16")
    before = state(pool)
    with pytest.raises(pk.FormatError, match="of 'mine', not of 'yours'"):
        pk.Sequence.load(tmp_path / "kv", pool, model="yours")
    new_sequence(40, "float16").save(tmp_path / "kv")
    with pytest.raises(pk.FormatError, match="of no named model, not of 'mine'"):
        pk.Sequence.load(tmp_path / "kv", pool, model="mine")
    assert state(pool) == before
    pk.Sequence.load(tmp_path / "kv", pool)


def refused(path, data, pool):
    """The message of a file with these bytes; the pool is as before."""
    path.write_bytes(data)
    before = state(pool)
    with pytest.raises(pk.FormatError) as caught:
        pk.Sequence.load(path, pool)
    assert state(pool) == before and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype, tokens", [("float32", None), ("q8_0", [5, 6])])
def test_every_truncation_and_every_flip(tmp_path, dtype, tokens):
    path = tmp_path / "kv"
    new_sequence(2, dtype, n_layers=1, kv_dim=32).save(path, tokens, "m")
    data, pool = path.read_bytes(), new_pool(32, dtype, n_layers=1, kv_dim=32)
    for n in range(len(data)):
        refused(path, data[:n], pool)
        with pytest.raises(pk.FormatError):
            pk.Sequence.read_header(path)
    refused(path, data + b"\0", pool)
    for i in range(len(data)):
        for bits in (1, 0x80, 0xFF) if i < 8 else (1 << i % 8, 0xFF):
            refused(path, data[:i] + bytes([data[i] ^ bits]) + data[i + 1:], pool)
    path.write_bytes(data)
    pk.Sequence.load(path, pool)


def test_damage_is_named_with_its_place(tmp_path):
    path = tmp_path / "kv"
    new_sequence(2, n_layers=1, kv_dim=32).save(path, [1, 2])
    data, pool = bytearray(path.read_bytes()), new_pool(2, n_layers=1, kv_dim=32)
    size, head_nbytes = len(data), 8 + int.from_bytes(data[:8], "little")
    data[head_nbytes] ^= 1
    assert f"bytes 0 to {size - 4} do not have the checksum at byte {size - 4}" in refused(path, bytes(data), pool)
    assert pk.Sequence.read_header(path).tokens == [1, 2]  # these are intact
    data[-20] ^= 1
    assert f"tokens at byte {size - 24} do not have the checksum at byte {size - 8}" in refused(path, bytes(data), pool)
    data[:8] = (2**63).to_bytes(8, "little")
    assert f"a header of {2**63} bytes at byte 0 does not fit" in refused(path, data, pool)


def written(described, data=b"", length=None):
    """A file with a header of one's own and checksums that are right."""
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    head = (len(text) if length is None else length).to_bytes(8, "little") + text
    out = head + data + zlib.crc32(head).to_bytes(4, "little")
    return out + zlib.crc32(out).to_bytes(4, "little")


def described(n_layers, n_tokens, kv_dim):
    """A header of float32 rows."""
    nbytes, shape = 4 * n_layers * n_tokens * kv_dim, [n_layers, n_tokens, kv_dim]
    return {
        "__metadata__": {"format": "pagedkv sequence", "version": "1", "dtype": "float32"},
        "k": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]},
        "v": {"dtype": "F32", "shape": list(shape), "data_offsets": [nbytes, 2 * nbytes]},
        "head_crc32": {"dtype": "U32", "shape": [1], "data_offsets": [2 * nbytes, 2 * nbytes + 4]},
        "crc32": {"dtype": "U32", "shape": [1], "data_offsets": [2 * nbytes + 4, 2 * nbytes + 8]},
    }


BIG = (-1, 2**31 - 1, 2**31, 2**32 + 1, 2**39 - 1, 2**39, 2**62, 2**63 - 1, 2**63, 2**64, 10**300)


def test_absurd_counts(tmp_path):
    pool = new_pool(32, n_layers=1, kv_dim=32)
    ok = described(1, 0, 32)
    (tmp_path / "kv").write_bytes(written(ok))
    assert len(pk.Sequence.load(tmp_path / "kv", pool)) == 0
    for i in range(3):
        for count in BIG:
            shape = [1, 0 if i != 1 else count, 32]
            shape[i] = count
            wrong = json.loads(json.dumps(ok))
            for name in ("k", "v"):
                wrong[name]["shape"] = shape
            (tmp_path / "kv").write_bytes(written(wrong))
            before = state(pool)
            with pytest.raises((pk.FormatError, pk.BadDimError)):  # a layer count may fit no pool and yet be possible
                pk.Sequence.load(tmp_path / "kv", pool)
            assert state(pool) == before
            (tmp_path / "kv").write_bytes(written(described(*(max(1, abs(n)) for n in shape))))
            with pytest.raises(pk.FormatError):
                pk.Sequence.load(tmp_path / "kv", pool)
    for length in (0, 2**16 + 1, 2**31, 2**32, 2**63, 2**64 - 1):
        refused(tmp_path / "kv", written(ok, length=length), pool)


@pytest.mark.parametrize("change", [
    lambda d: d["__metadata__"].update(version="2"), lambda d: d["__metadata__"].update(version=1),
    lambda d: d["__metadata__"].update(format="pt"), lambda d: d["__metadata__"].update(dtype="float64"),
    lambda d: d["__metadata__"].update(dtype=["float32"]), lambda d: d["__metadata__"].update(dtype="float16"),
    lambda d: d["__metadata__"].update(model=3), lambda d: d["__metadata__"].update(more="x"),
    lambda d: d.pop("__metadata__"), lambda d: d.update(__metadata__=[]), lambda d: d.pop("v"), lambda d: d.pop("k"),
    lambda d: d.update(k=[]), lambda d: d["k"].update(shape="abc"), lambda d: d["k"].update(shape=[True, 0, 32]),
    lambda d: d["k"].update(shape=[1, 0]), lambda d: d["k"].update(shape=[1.0, 0, 32]),
    lambda d: d["k"].update(shape=None),
    lambda d: d["v"].update(data_offsets=[4, 4]), lambda d: d["crc32"].update(data_offsets=[0, 4]),
    lambda d: d.update(other=d["k"]), lambda d: d["k"].update(shape=[[[]] * 30] * 3),
])  # fmt: skip
def test_headers_that_say_something_else(tmp_path, change):
    wrong = described(1, 0, 32)
    change(wrong)
    refused(tmp_path / "kv", written(wrong), new_pool(32, n_layers=1, kv_dim=32))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 60000, b'{"a":' * 10000, b"1" * 60000,
                                  b'{"__metadata__":1,"__metadata__":2}', b"GGUF", b"{}"])  # fmt: skip
def test_headers_that_are_none(tmp_path, text):
    refused(tmp_path / "kv", written(text), new_pool(32))


def test_other_files(tmp_path):
    pool = new_pool(32)
    with pytest.raises(FileNotFoundError):
        pk.Sequence.load(tmp_path / "kv", pool)
    with pytest.raises(pk.FormatError, match="not a regular file"):
        pk.Sequence.load(tmp_path, pool)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(pk.FormatError, match="not a regular file"):
        pk.Sequence.read_header(tmp_path / "fifo")
    from safetensors.numpy import save_file

    save_file({"k": np.zeros((3, 0, 64), np.float32)}, tmp_path / "kv")
    with pytest.raises(pk.FormatError, match="not a saved sequence"):
        pk.Sequence.load(tmp_path / "kv", pool)


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    path, put = tmp_path / "kv", pk.Sequence._put_rows
    new_sequence(40).save(path)

    def put_and_cut(self, *args):
        os.truncate(path, 3000)
        put(self, *args)

    monkeypatch.setattr(pk.Sequence, "_put_rows", put_and_cut)
    monkeypatch.setattr(saved, "_PIECE_NBYTES", 1 << 13)
    pool = new_pool(40)
    before = state(pool)
    with pytest.raises(pk.FormatError, match="ends before byte"):
        pk.Sequence.load(path, pool)
    assert state(pool) == before


# ---- Writing: all of it or nothing ----


@pytest.mark.parametrize("existed", [False, True])
def test_a_full_disk(tmp_path, existed):
    seq, path = new_sequence(300), tmp_path / "kv"
    if existed:
        path.write_bytes(b"before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        before = state(seq.pool)
        with pytest.raises(OSError):
            seq.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert state(seq.pool) == before
    assert os.listdir(tmp_path) == (["kv"] if existed else []) and (not existed or path.read_bytes() == b"before")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_save(tmp_path, monkeypatch, error):
    seq, taken = new_sequence(20), []

    def take(self, *args):
        taken.append(args)
        if len(taken) == 3:
            raise error

    monkeypatch.setattr(pk.Sequence, "_take_rows", take)
    before = state(seq.pool)
    with pytest.raises(error):
        seq.save(tmp_path / "kv")
    assert os.listdir(tmp_path) == [] and state(seq.pool) == before


def test_where_nothing_can_be_written(tmp_path):
    seq = new_sequence(2)
    with pytest.raises(OSError):
        seq.save(tmp_path / "no such folder" / "kv")
    os.mkfifo(tmp_path / "fifo")
    for target in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(FileExistsError, match="not a regular file"):
            seq.save(target)
    assert os.listdir(tmp_path) == ["fifo"] and stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)


def test_permissions_are_those_of_a_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        new_sequence(2).save(tmp_path / ("k" * 250))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ("k" * 250)).stat().st_mode) == 0o640


# ---- Arrays ----


@pytest.mark.parametrize("n", [0, 1, 16, 33])
@pytest.mark.parametrize("dtype", DTYPES)
def test_export_is_what_attention_reads(dtype, n):
    seq = new_sequence(n, dtype, block_size=8)
    array = seq.export(32)
    assert array.shape == (N_LAYERS, 2, 2, n, 32) and array.dtype == np.float32 and array.flags.carray
    for layer in range(N_LAYERS):
        for head in range(2):
            for part, rows in enumerate(seq.gather_head(layer, head, 32)):
                assert_same_bits(array[layer, part, head], rows)
    again = pk.Sequence.import_(array, new_pool(n, dtype, 16))
    if dtype == "q8_0":
        assert again.export(32).shape == array.shape
    else:
        assert_same_rows(again, stored(seq))


@pytest.mark.parametrize("dtype", DTYPES)
def test_import_rounds_as_appending_does(dtype):
    rng = np.random.default_rng(0)
    array = rng.standard_normal((N_LAYERS, 2, 2, 21, 32), dtype=np.float32)
    for given_ in (array, array.astype(np.float16), np.asfortranarray(array), array[:, :, ::-1, ::-1]):
        want = pk.Sequence(new_pool(21, dtype), 21)
        want.ensure_append(21)
        for layer in range(N_LAYERS):
            k, v = (np.concatenate(list(given_[layer, part]), 1).astype(np.float32) for part in (0, 1))
            want.append_layer(layer, k, v)
        want.advance(21)
        assert_same_rows(pk.Sequence.import_(given_, new_pool(21, dtype), max_tokens=21), stored(want))


def test_an_imported_sequence_goes_on(model):
    tokens = token_stream(3, 40, model.config.vocab_size)
    seq = model.new_sequence(model.new_pool(n_tokens=64))
    model.prefill(tokens[:30], seq)
    again = pk.Sequence.import_(seq.export(model.config.head_dim), model.new_pool(n_tokens=64, block_size=1))
    assert_same_bits(go_on(model, again, tokens[30:]), go_on(model, seq, tokens[30:]))


def test_arrays_that_do_not_fit():
    pool, rows = new_pool(40), np.zeros((N_LAYERS, 2, 2, 17, 32), np.float32)
    before = state(pool)
    for array, error, match in [
        (rows.astype(np.float64), TypeError, "float64"), (rows.astype(np.int32), TypeError, "int32"),
        (rows[0], pk.BadDimError, r"\[2, 2, 17, 32\], needs \[3, 2, n_kv_heads, n_tokens, head_dim\] with .* = 64"),
        (rows[:2], pk.BadDimError, "shape"), (rows[:, :1], pk.BadDimError, "shape"),
        (rows[:, :, :1], pk.BadDimError, "shape"), (rows[..., :31], pk.BadDimError, "shape"),
        (np.concatenate([rows] * 3, 3), pk.PoolExhausted, "needs 4 blocks, 3 of 3"),
    ]:  # fmt: skip
        with pytest.raises(error, match=match):
            pk.Sequence.import_(array, pool)
    with pytest.raises(pk.BoundsError):
        pk.Sequence.import_(np.concatenate([rows] * 2, 3), pool, max_tokens=16)
    assert state(pool) == before
    quantised = new_pool(17, "q8_0")
    with pytest.raises(pk.BadDimError, match="do not divide head_dim 16"):
        pk.Sequence.import_(rows.reshape(N_LAYERS, 2, 4, 17, 16), quantised)
    seq = pk.Sequence.import_(rows, quantised)
    for head_dim, match in ((16, "not divide head_dim 16"), (0, "not divide"), (-32, "not divide"), (48, "kv_dim 64")):
        with pytest.raises(pk.BadDimError, match=match):
            seq.export(head_dim)
    seq.free()
    with pytest.raises(pk.NullError):
        seq.export(32)


# ---- Indices ----


@given(lengths=st.lists(st.integers(0, 70), max_size=6), block_size=st.sampled_from([1, 2, 16, 64]))
def test_indices_find_every_row(lengths, block_size):
    pool = pk.BlockPool(500, 1, 4, block_size)
    seqs = [extend(pk.Sequence(pool, 80), n, seed) for seed, n in enumerate(lengths)]
    for seq in seqs[::2]:
        seq.ensure_append(9)
    indptr, indices, last = pk.paged_kv_indices(iter(seqs))
    assert indptr.dtype == indices.dtype == last.dtype == np.int32
    assert len(indptr) == len(last) + 1 == len(seqs) + 1 and len(indices) == indptr[-1] and indptr[0] == 0
    for i, seq in enumerate(seqs):
        n_pages = indptr[i + 1] - indptr[i]
        assert max(0, n_pages - 1) * block_size + last[i] == len(seq) == lengths[i]  # FlashInfer's get_seq_lens
        rows = pool.k[indices[indptr[i]:indptr[i + 1]], 0].reshape(-1, 4)[:len(seq)]
        assert_same_bits(rows, seq.gather_head(0, 0, 4)[0])


def test_a_layer_of_the_pool_is_in_flashinfers_layout():
    seq = new_sequence(17)
    pool, indices = seq.pool, pk.paged_kv_indices([seq, seq.fork()])
    assert indices.kv_indptr.tolist() == [0, 2, 4] and indices.kv_last_page_len.tolist() == [1, 1]
    cache = pool.k[:, 1].reshape(pool.n_blocks, pool.block_size, 2, 32)
    assert np.shares_memory(cache, pool.k)
    assert_same_bits(cache[indices.kv_page_indices[1], 0, 1], seq.gather_head(1, 1, 32)[0][16])


def test_indices_of_what_is_no_batch():
    seq, other = new_sequence(3), new_sequence(3)
    with pytest.raises(pk.BadDimError, match="sequences 0 and 1 of the batch are of different pools"):
        pk.paged_kv_indices([seq, other])
    with pytest.raises(TypeError, match="sequence 1 of the batch is a NoneType"):
        pk.paged_kv_indices([seq, None])
    other.free()
    with pytest.raises(pk.NullError):
        pk.paged_kv_indices([other])
