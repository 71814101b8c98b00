"""Weights kept as the file has them: the values they stand for, products with them, whole models, memory, bad calls.

The measure is always the float32 matrix that the format defines, packed and multiplied as such; `==` on bits.
As a script it runs every GGUF file of a directory, for one instruction set, and prints what came out as JSON::

    python test_weights.py DIRECTORY
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pagedkv as pk
import promise_rows
from pagedkv import _core, hub
from pagedkv.formats import open_model, quants
from pagedkv.formats.tensor import Tensor
from pagedkv.model import _Matrix
from promise_rows import assert_same_bits, rows_in_chunks, token_stream
from tiny import K_QUANTS, random_quantised, tiny_config, tiny_tensors, write_gguf, write_hf

TYPES = tuple(_core.DTYPES)
FLOATS = ("f32", "f16", "bf16")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 40, 120)  # both sides of every change of kernel and tile
CHUNKS = (1, 2, 3, 4, 5, 8, 13, 40)
N_TOKENS = 40


def depths(dtype):
    """One block, an odd number of them, and beyond one tile of k."""
    return (1, 31, 600) if dtype in FLOATS else (256, 768) if dtype in K_QUANTS else (32, 96, 544)


def stored(dtype, n, k, seed=0):
    """A tensor of random rows, values roughly within 0.4."""
    rng = np.random.default_rng(seed)
    if dtype not in FLOATS:
        return Tensor("w", dtype, (n, k), random_quantised(dtype, n, k, rng).reshape(-1))
    w = rng.standard_normal((n, k), dtype=np.float32) * np.float32(0.1)
    if dtype != "f32":
        w = w.astype(np.float16) if dtype == "f16" else (w.view(np.uint32) >> 16).astype(np.uint16)
    return Tensor("w", dtype, (n, k), w.reshape(-1).view(np.uint8))


def wild(dtype, n, k, seed=0):
    """Every byte random but the scales and minima, which are any finite float16: subnormal, zero, negative, largest."""
    rng = np.random.default_rng(seed)
    block_len, block_nbytes = quants.BLOCKS[dtype]
    blocks = rng.integers(0, 256, (n * k // block_len, block_nbytes), dtype=np.uint8)
    halves = (208,) if dtype == "q6_k" else (0, 2) if dtype in ("q4_1", "q5_1", "q4_k", "q5_k") else (0,)
    for at in halves:
        bits = rng.integers(0, 31 << 10, len(blocks)) | rng.integers(0, 2, len(blocks)) << 15
        bits[rng.integers(0, 4, len(blocks)) == 0] &= 0x83FF
        bits[rng.integers(0, 8, len(blocks)) == 0] &= 0x8000
        blocks[:, at : at + 2] = bits.astype("<u2")[:, None].view(np.uint8)
    return Tensor("w", dtype, (n, k), blocks.reshape(-1))


def pack(tensor):
    packed = _core.PackedWeight(*tensor.shape, [_core.DTYPES[tensor.dtype]] * -(-tensor.shape[0] // _core.PANEL))
    packed._fill(tensor.raw, tensor.shape[0], tensor.row_order)
    return packed


def pack_parts(*parts, in_turn=False):
    matrix = _Matrix(list(parts), False, in_turn)
    return matrix.pack(_core.Arena(matrix.nbytes))


def padded(values):
    return np.pad(values, ((0, -len(values) % _core.PANEL), (0, 0)))


def assert_products(packed, values, rows=ROWS):
    """Products with `packed` are those with the packed float32 matrix."""
    k = values.shape[1]
    x, expanded = np.random.default_rng(k).standard_normal((max(rows), k), dtype=np.float32), pk.pack(values)
    for m in rows:
        assert_same_bits(pk.matmul(x[:m], packed), pk.matmul(x[:m], expanded), f"{m} rows")


# -- one matrix ----------------------------------------------------------------------------------------


def test_every_type_of_the_readers_is_kept():
    assert set(TYPES) == set(quants.BLOCKS)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
def test_values(dtype, n):
    for k in depths(dtype):
        tensor = stored(dtype, n, k, seed=n)
        assert_same_bits(pack(tensor)._expand(), tensor.float32(), f"k = {k}")


@pytest.mark.parametrize("dtype", [dtype for dtype in TYPES if dtype not in FLOATS])
def test_values_of_any_finite_scale(dtype):
    tensor = wild(dtype, 64, 2048)
    assert np.isfinite(tensor.float32()).all()
    assert_same_bits(pack(tensor)._expand(), tensor.float32())


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_of_any_bits(dtype):
    """Infinities, NaN, subnormals: every float16 and bfloat16, and as many float32."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    raw = (bits << 16 | bits) if dtype == "f32" else bits.astype(np.uint16)
    tensor = Tensor("w", dtype, (64, 1024), raw.view(np.uint8))
    got, want = pack(tensor)._expand(), tensor.float32()
    assert ((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", [1, 45, 300])
def test_products(dtype, n):
    for k in depths(dtype):
        tensor = stored(dtype, n, k, seed=n)
        assert_products(pack(tensor), tensor.float32())


@pytest.mark.parametrize("dtype", [dtype for dtype in TYPES if dtype not in FLOATS])
def test_products_of_any_finite_scale(dtype):
    tensor = wild(dtype, 45, 512)
    assert_products(pack(tensor), tensor.float32(), (1, 2, 3, 4, 13))


@pytest.mark.parametrize("dtype", TYPES)
def test_products_on_threads(dtype, threads):
    tensor = stored(dtype, 300, depths(dtype)[-1])
    packed, values = pack(tensor), tensor.float32()
    for n_threads in (1, 2, 3):
        threads(n_threads)
        assert_products(packed, values, (1, 4, 13))


@pytest.mark.parametrize("dtype", TYPES)
def test_row_order(dtype):
    """Rows in another order, as Q and K of GGUF's llama, and one row twice."""
    tensor = stored(dtype, 70, depths(dtype)[-1])
    tensor.row_order = np.random.default_rng(1).permutation(70)
    tensor.row_order[3] = tensor.row_order[66]
    assert_same_bits(pack(tensor)._expand(), tensor.float32())
    assert_products(pack(tensor), tensor.float32(), (1, 5))


@pytest.mark.parametrize("dtype", TYPES)
def test_memory_is_within_15_per_cent_of_the_file(dtype):
    tensor = stored(dtype, 64, 1024)
    assert tensor.raw.size <= pack(tensor).nbytes <= 1.15 * tensor.raw.size


# -- several parts in one matrix -------------------------------------------------------------------------


@pytest.mark.parametrize("types", [("q4_k", "q4_k", "q6_k"), ("q8_0", "f16", "q5_0"), ("f32", "q4_1", "bf16")])
def test_parts_of_different_types(types):
    """As Q, K and V: each in panels of its own, with columns of zeros at its end."""
    parts = [stored(dtype, n, 512, seed=n) for dtype, n in zip(types, (96, 45, 20))]
    parts[0].row_order = np.random.default_rng(1).permutation(96)
    packed, values = pack_parts(*parts), np.concatenate([padded(part.float32()) for part in parts])
    assert packed.shape == values.shape
    assert (packed._expand() == values).all()  # an absent column may hold -0
    assert_products(packed, values)


@pytest.mark.parametrize("types", [("q4_k", "q6_k"), ("q5_1", "f32"), ("q4_0", "q4_0")])
@pytest.mark.parametrize("n", [64, 83])
def test_parts_in_turn(types, n):
    """As gate and up: a panel of either in turn."""
    parts = [stored(dtype, n, 256, seed=i) for i, dtype in enumerate(types)]
    packed = pack_parts(*parts, in_turn=True)
    by_part = [padded(part.float32()).reshape(-1, _core.PANEL, 256) for part in parts]
    values = np.stack(by_part, axis=1).reshape(-1, 256)
    assert (packed._expand() == values).all()
    assert_products(packed, values)


# -- whole models ----------------------------------------------------------------------------------------

K_SIZES = dict(hidden_dim=256, n_heads=4, n_kv_heads=2, ffn_dim=512, vocab_size=150)
BLOCK_SIZES = dict(hidden_dim=96, n_heads=3, n_kv_heads=1, ffn_dim=160, vocab_size=130)


def model_files(directory):
    """A GGUF file of every type, and of mixtures; name -> path."""
    cases = {dtype: (tiny_config(**(K_SIZES if dtype in K_QUANTS else BLOCK_SIZES)), dtype) for dtype in TYPES}
    config = tiny_config(**K_SIZES)  # as llama.cpp's Q4_K_M: V, down and the embedding finer, in some layers only
    types = dict.fromkeys(tiny_tensors(config), "q4_k") | {"model.embed_tokens.weight": "q6_k"}
    for part in ("self_attn.v_proj", "mlp.down_proj"):
        types[f"model.layers.0.{part}.weight"] = "q6_k"
    cases["q4_k_m"] = config, types
    config = tiny_config(tied_embeddings=False, **BLOCK_SIZES)
    kinds = ("q8_0", "q4_0", "q5_1", "f16", "q4_1", "bf16", "q5_0", "f32")
    types = {name: kinds[i % len(kinds)] for i, name in enumerate(tiny_tensors(config))}
    cases["mixed_untied"] = config, types | {"model.embed_tokens.weight": "q4_0", "lm_head.weight": "q5_0"}
    # KV heads of 24 columns: biases and parts padded to whole panels.
    config = tiny_config("qwen2", **(BLOCK_SIZES | dict(n_heads=4, tied_embeddings=False)))
    cases["qwen2_q8_0"] = config, "q8_0"
    paths = {}
    for name, (config, types) in cases.items():
        paths[name] = Path(directory) / f"{name}.gguf"
        write_gguf(paths[name], config, tiny_tensors(config, seed=3), types)
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return model_files(tmp_path_factory.mktemp("weights"))


def tokens_of(model):
    return token_stream(7, N_TOKENS, model.config.vocab_size)


def assert_same_rows(got, want, what):
    for part in want._fields:
        assert_same_bits(getattr(got, part), getattr(want, part), f"{part}, {what}")


NAMES = (*TYPES, "q4_k_m", "mixed_untied", "qwen2_q8_0")


@pytest.mark.parametrize("name", NAMES)
def test_model_equals_its_float32_twin(files, name, threads):
    model, twin = (pk.LlamaModel.load(files[name], weights=weights) for weights in ("auto", "float32"))
    threads(1)
    want = rows_in_chunks(twin, tokens_of(model), N_TOKENS)
    assert np.isfinite(want.logits).all() and np.ptp(want.logits) > 1
    for n_threads in (1, 2, 3):
        threads(n_threads)
        for chunk in CHUNKS:
            assert_same_rows(rows_in_chunks(model, tokens_of(model), chunk), want, f"chunks of {chunk}")


@pytest.mark.parametrize("name", NAMES)
def test_model_equals_separate_operations(files, name):
    """Operations on the readers' float32 values, the embedding rows out of them by NumPy."""
    model = pk.LlamaModel.load(files[name])
    with open_model(files[name]) as file:
        want = promise_rows.separate_forward(model.config, lambda name: file.tensor(name).float32(), tokens_of(model))
    assert_same_rows(rows_in_chunks(model, tokens_of(model), 13), want, name)


def test_every_embedding_row(files):
    """Token by token on a fresh sequence: all rows of a tied, quantised matrix whose last panel is not full."""
    for name in ("q4_k_m", "q5_0"):
        model = pk.LlamaModel.load(files[name])
        with open_model(files[name]) as file:
            def tensor(name):
                return file.tensor(name).float32()

            for token in range(0, model.config.vocab_size, 7):
                want = promise_rows.separate_forward(model.config, tensor, np.array([token]))
                assert_same_rows(rows_in_chunks(model, np.array([token]), 1), want, f"token {token}")


def test_real_model_equals_its_float32_twin():
    model = promise_rows.real_model()
    twin = pk.LlamaModel.load(promise_rows.REAL_MODEL, weights="float32")
    tokens = tokens_of(model)
    want = rows_in_chunks(twin, tokens, N_TOKENS)
    for chunk in (3, 5, 13):
        assert_same_rows(rows_in_chunks(model, tokens, chunk), want, f"chunks of {chunk}")


def test_real_embedding_rows():
    """Tied and quantised: rows at both ends of the vocabulary, through one layer's worth of separate operations."""
    model = promise_rows.real_model()
    last = model.config.vocab_size - 1
    with open_model(hub.find_model(promise_rows.REAL_MODEL)) as file:
        tokens = np.array([0, 31, 32, last - 1, last])
        want = promise_rows.separate_forward(model.config, lambda name: file.tensor(name).float32(), tokens)
    assert_same_rows(rows_in_chunks(model, tokens, 2), want, "five tokens")


# -- each instruction set, in a process of its own ---------------------------------------------------------


def sha256(*arrays):
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def main():
    """Checks within this instruction set by assertion; what differs between sets would show in the output."""
    out = {"isa": pk.isa()}
    for dtype in TYPES:
        tensors = [stored(dtype, 45, k) for k in depths(dtype)] + ([] if dtype in FLOATS else [wild(dtype, 45, 512)])
        for tensor in tensors:
            assert_same_bits(pack(tensor)._expand(), tensor.float32(), dtype)
            assert_products(pack(tensor), tensor.float32(), ROWS[:-1])
    for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
        model, twin = (pk.LlamaModel.load(path, weights=weights) for weights in ("auto", "float32"))
        pk.set_num_threads(1)
        want = rows_in_chunks(twin, tokens_of(model), N_TOKENS)
        for n_threads, chunk in ((1, 4), (2, 1), (2, 7), (3, 13)):
            pk.set_num_threads(n_threads)
            assert_same_rows(rows_in_chunks(model, tokens_of(model), chunk), want, f"{path.name}, chunks of {chunk}")
        out[path.stem] = sha256(*want)
    print(json.dumps(out))


def run_isa(isa, directory):
    package = str(Path(pk.__file__).resolve().parent.parent)
    path = os.pathsep.join([package, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PAGEDKV_ISA": isa, "PYTHONPATH": path}
    command = [sys.executable, __file__, directory]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def scalar_results(files):
    return run_isa("scalar", files["f32"].parent)


@pytest.mark.parametrize("isa", ["avx2", "avx512", "neon"])
def test_isa_does_not_show(files, scalar_results, isa):
    if isa not in pk.available_isas():
        pytest.skip(f"{isa} does not run on this machine")
    assert len(scalar_results) == 1 + len(NAMES)
    assert run_isa(isa, files["f32"].parent) == scalar_results | {"isa": isa}


# -- bad calls ---------------------------------------------------------------------------------------------

Q8_0, Q4_K, F32 = (_core.DTYPES[name] for name in ("q8_0", "q4_k", "f32"))
BAD_DIM = _core.PkvStatus.PKV_ERR_BAD_DIM


@pytest.mark.parametrize("n, k, dtypes", [
    (33, 32, [Q8_0]), (32, 32, [Q8_0] * 2), (32, 32, []), (0, 32, [Q8_0]), (-1, 32, [Q8_0]),
    (32, 0, [Q8_0]), (32, -32, [Q8_0]), (32, 33, [Q8_0]), (32, 128, [Q4_K]), (64, 256, [Q4_K, 99]), (32, 32, [-1]),
])  # fmt: skip
def test_weight_that_cannot_be(n, k, dtypes):
    with pytest.raises(pk.BadDimError) as error:
        _core.PackedWeight(n, k, dtypes)
    assert error.value.status == BAD_DIM


@pytest.mark.parametrize("k", [1 << 41, (1 << 63) - 32])
def test_weight_beyond_memory(k):
    with pytest.raises(MemoryError):
        _core.PackedWeight(64, k, [F32, F32])


def test_weight_beyond_its_arena():
    arena = _core.Arena(3 * _core.packed_nbytes(Q8_0, 32, 64))
    _core.PackedWeight(64, 64, [Q8_0] * 2, arena)
    with pytest.raises(pk.BadDimError):
        _core.PackedWeight(64, 64, [Q8_0] * 2, arena)
    _core.PackedWeight(32, 64, [Q8_0], arena)


ROW = 2 * 34  # bytes of a Q8_0 row of 64 values
BAD_FILLS = {
    "no rows": (64 * ROW, 0, None, 0, 1),
    "less than no rows": (64 * ROW, -1, None, 0, 1),
    "too many rows": (97 * ROW, 97, None, 0, 1),
    "far too many rows": (64 * ROW, 1 << 62, None, 0, 1),
    "a byte short": (64 * ROW - 1, 64, None, 0, 1),
    "a row short": (63 * ROW, 64, None, 0, 1),
    "a byte long": (64 * ROW + 1, 64, None, 0, 1),
    "nothing": (0, 64, None, 0, 1),
    "a panel before the first": (32 * ROW, 32, None, -1, 1),
    "a panel after the last": (32 * ROW, 32, None, 3, 1),
    "first far away": (32 * ROW, 32, None, 1 << 62, 1),
    "backwards": (64 * ROW, 64, None, 0, -1),
    "on the spot": (64 * ROW, 64, None, 0, 0),
    "a step too wide": (64 * ROW, 64, None, 0, 3),
    "a step that overflows": (96 * ROW, 96, None, 0, 1 << 62),
    "an order too short": (64 * ROW, 64, range(63), 0, 1),
    "an order of nothing": (64 * ROW, 64, (), 0, 1),
    "an order before the first row": (64 * ROW, 64, range(-1, 63), 0, 1),
    "an order after the last row": (64 * ROW, 64, range(1, 65), 0, 1),
}


@pytest.mark.parametrize("name", BAD_FILLS)
def test_fill_that_cannot_be(name):
    """A status, and the panels as they were."""
    n_bytes, n, order, first, step = BAD_FILLS[name]
    packed = _core.PackedWeight(96, 64, [Q8_0] * 3)
    order = None if order is None else np.array(order, np.int64)
    with pytest.raises(pk.BadDimError) as error:
        packed._fill(np.full(n_bytes, 1, np.uint8), n, order, first, step)
    assert error.value.status == BAD_DIM
    assert (packed._expand() == 0).all()


def test_fill_across_panels_of_different_types():
    """Rows of one type would be read as another's."""
    packed = _core.PackedWeight(64, 64, [Q8_0, F32])
    with pytest.raises(pk.BadDimError):
        packed._fill(np.zeros(64 * ROW, np.uint8), 64)


def test_filled_again():
    """A panel holds the last rows it was given, high bits too."""
    for dtype in TYPES:
        first, second = (stored(dtype, 64, depths(dtype)[-1], seed) for seed in (1, 2))
        packed = pack(first)
        packed._fill(second.raw, 64)
        assert_same_bits(packed._expand(), second.float32(), dtype)


if __name__ == "__main__":
    main()


def test_weight_nbytes_counts_what_the_file_stores(tmp_path):
    config = tiny_config()
    path = write_hf(tmp_path, config, tiny_tensors(config, 1), dtype="f16")
    small, large = pk.LlamaModel.load(path), pk.LlamaModel.load(path, weights="float32")
    assert large.weight_nbytes == 2 * small.weight_nbytes > 0
