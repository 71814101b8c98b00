"""The promise for windows and norms of Q and K: Mistral, Qwen3, and layers of both kinds in one model. On tiny models.

What their logits should be is tests/test_model.py's subject (transformers, float64).
"""

from contextlib import ExitStack
from dataclasses import replace
from itertools import product

import numpy as np
import pagedkv as pk
import pytest
import reference
import tiny
from promise_rows import assert_same_bits, assert_same_kv, rows_alone, rows_in_chunks, run_child, separate_forward, token_stream, workload_sha256

SHAPE = {"n_layers": 3, "context_len": 2048, "norm_eps": 2.0**-17}  # an epsilon that GGUF's float32 holds
CONFIGS = {
    "mistral_20": tiny.tiny_config("mistral", sliding_window=20, **SHAPE),
    "mistral_300": tiny.tiny_config("mistral", sliding_window=300, tied_embeddings=False, **SHAPE),
    "qwen3": tiny.tiny_config("qwen3", head_dim=32, **SHAPE),
    "qwen3_layers": tiny.tiny_config("qwen3", sliding_window=270, full_layers=(1,), **SHAPE),
}
WINDOWED = ["mistral_20", "mistral_300", "qwen3_layers"]
TOKENS = token_stream(3, 600, 128)
N_SHORT = 40  # tokens that a window of 20 ends in


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name -> (model, its tensors, its directory)."""
    out = {}
    for seed, (name, config) in enumerate(CONFIGS.items()):
        tensors = tiny.tiny_tensors(config, seed)
        directory = tiny.write_hf(tmp_path_factory.mktemp("family") / name, config, tensors)
        out[name] = pk.LlamaModel.load(directory), tensors, directory
    return out


@pytest.fixture(scope="module")
def alone(models):
    """Name -> Rows of TOKENS, one token at a time on one thread."""
    return {name: rows_alone(model, TOKENS) for name, (model, _, _) in models.items()}


def assert_same_rows(got, want, n=None):
    for what, a, b in zip(("logits", "K", "V"), got, want):
        assert_same_bits(a, b if n is None else b[:n] if what == "logits" else b[:, :n], what)


# -- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_600_rows_are_the_float64_oracle_s(models, alone, name):
    """Float32 rounds to 2**-24 of values up to 20 some hundred times; the difference was seen up to 3e-5."""
    model, tensors, _ = models[name]
    want = reference.forward(model.config, tensors, TOKENS)
    np.testing.assert_allclose(alone[name].logits, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", WINDOWED)
def test_rows_past_the_window_are_others_than_without_one(models, alone, tmp_path, name):
    model, tensors, _ = models[name]
    window = model.config.sliding_window
    full = pk.LlamaModel.load(tiny.write_hf(tmp_path, replace(model.config, sliding_window=None, full_layers=()), tensors))
    logits = rows_in_chunks(full, TOKENS, None).logits
    assert_same_bits(logits[:window], alone[name].logits[:window])
    assert (logits[window:] != alone[name].logits[window:]).any(axis=1).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_step_equals_single_operations_over_contiguous_buffers(models, alone, name):
    model, tensors, _ = models[name]
    assert_same_rows(separate_forward(model.config, tensors.__getitem__, TOKENS), alone[name])


@pytest.mark.parametrize("name", ["mistral_20", "mistral_300", "qwen3"])
def test_gguf_of_the_same_weights_gives_the_same_bits(models, alone, tmp_path, name):
    tiny.write_gguf(tmp_path / "model.gguf", CONFIGS[name], models[name][1])
    assert_same_rows(rows_in_chunks(pk.LlamaModel.load(tmp_path / "model.gguf"), TOKENS, None), alone[name])


# -- chunks, threads, types -----------------------------------------------------------------------


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("chunk", [15, 16, 17, 256, None])
@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_in_chunks_equals_rows_alone(models, alone, threads, name, chunk, n_threads):
    threads(n_threads)
    assert_same_rows(rows_in_chunks(models[name][0], TOKENS, chunk), alone[name])


@pytest.mark.parametrize("n_threads", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_single_rows_split_over_threads_equal_one_thread(models, alone, threads, name, n_threads):
    threads(n_threads)
    assert_same_rows(rows_in_chunks(models[name][0], TOKENS, 1), alone[name])


@pytest.mark.parametrize("name, dtype", [*product(CONFIGS, ["float16", "bfloat16"]), ("qwen3", "q8_0")])
def test_kv_types_keep_the_promise(models, threads, name, dtype):
    tokens = TOKENS[:330]
    want = rows_alone(models[name][0], tokens, kv_dtype=dtype)
    for n_threads, chunk in ((1, None), (3, 17), (2, 16)):
        threads(n_threads)
        assert_same_rows(rows_in_chunks(models[name][0], tokens, chunk, dtype), want)


def test_a_window_over_q8_0_keeps_the_promise(tmp_path, threads):
    config = tiny.tiny_config("mistral", head_dim=32, sliding_window=270)
    model = pk.LlamaModel.load(tiny.write_hf(tmp_path, config, tiny.tiny_tensors(config)))  # q8_0 takes heads of whole 32s
    want = rows_alone(model, TOKENS[:330], kv_dtype="q8_0")
    for n_threads, chunk in ((1, None), (3, 17)):
        threads(n_threads)
        assert_same_rows(rows_in_chunks(model, TOKENS[:330], chunk, "q8_0"), want)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_int8_keeps_the_promise(tmp_path, threads, family):
    config = tiny.tiny_config(family, sliding_window=20 if family == "mistral" else None)
    tiny.write_gguf(tmp_path / "model.gguf", config, tiny.tiny_tensors(config), "q8_0")
    model = pk.LlamaModel.load(tmp_path / "model.gguf", compute="int8")
    want = rows_alone(model, TOKENS[:N_SHORT])
    threads(2)
    for chunk in (15, 16, 17, None):
        assert_same_rows(rows_in_chunks(model, TOKENS[:N_SHORT], chunk), want)


# -- batches, forks -------------------------------------------------------------------------------


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_a_ragged_batch_equal_rows_alone(models, alone, threads, name, n_threads):
    threads(n_threads)
    model, want = models[name][0], alone[name]
    begins, news = [0, 5, 19, 20, 21, 255, 256, 299, 301, 511, 555, 570], [3, 30, 1, 1, 2, 1, 1, 1, 17, 1, 1, 9]
    pool = model.new_pool(n_tokens=len(begins) * 640)
    with ExitStack() as stack:
        seqs = [stack.enter_context(model.new_sequence(pool, 600)) for _ in begins]
        for seq, begin in zip(seqs, begins):
            if begin:
                model.prefill(TOKENS[:begin], seq)
        logits = model.step([(seq, TOKENS[begin : begin + n]) for seq, begin, n in zip(seqs, begins, news)], all_logits=True)
        row = 0
        for seq, begin, n in zip(seqs, begins, news):
            assert_same_bits(logits[row : row + n], want.logits[begin : begin + n], f"logits from {begin}")
            assert_same_kv(model, seq, want)
            row += n


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("name", WINDOWED)
def test_forks_whose_windows_begin_in_different_chunks_share_and_equal_rows_alone(models, alone, threads, name, block_size, n_threads):
    """Single rows of forks of one text, beside a stranger: the chunks that they see begin at 0, 1 or 2 and end at 0, 1 or 2."""
    threads(n_threads)
    model, want = models[name][0], alone[name]
    pool = model.new_pool(n_tokens=16 * 700, block_size=block_size)
    lengths = [598, 596, 570, 569, 557, 556, 555, 513, 400, 300, 299, 270]
    other_tokens = token_stream(4, 580, 128)
    other_want = rows_in_chunks(model, other_tokens, None)
    with ExitStack() as stack:
        parent, other = (stack.enter_context(model.new_sequence(pool, 640)) for _ in range(2))
        model.prefill(TOKENS, parent)
        model.prefill(other_tokens[:-2], other)
        seqs = [stack.enter_context(parent.fork()) for _ in lengths]
        for seq, n in zip(seqs, lengths):
            seq.truncate(n)
        for _ in range(2):
            positions = [len(seq) for seq in seqs]
            tokens = [*TOKENS[positions], other_tokens[len(other)]]
            logits = model.decode_step(tokens, [*seqs, other])
            assert_same_bits(logits[:-1], want.logits[positions], "logits of forks")
            assert_same_bits(logits[-1], other_want.logits[len(other) - 1], "logits of the stranger")
        for seq in seqs:
            assert_same_kv(model, seq, want)


@pytest.mark.parametrize("name", CONFIGS)
def test_truncate_and_redo_equals_rows_alone(models, alone, name):
    model, want = models[name][0], alone[name]
    with model.new_sequence(model.new_pool(n_tokens=640), 640) as seq:
        model.prefill([*TOKENS[:290], *TOKENS[:50]], seq)
        seq.truncate(290)
        assert_same_bits(model.prefill(TOKENS[290:310], seq, all_logits=True), want.logits[290:310])


# -- instruction sets -----------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "neon"])
@pytest.mark.parametrize("name", ["mistral_300", "qwen3_layers"])
def test_isa_does_not_show(models, name, isa):
    if isa not in pk.available_isas():
        pytest.skip(f"{isa} does not run on this machine")
    model, _, directory = models[name]
    result = run_child(directory, "--tokens", 330, PAGEDKV_ISA=isa)
    assert (result["isa"], result["sha256"]) == (isa, workload_sha256(model, 330))
