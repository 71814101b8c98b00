"""The GGUF reader: against the ``gguf`` package, against damage, against every trap of the field."""

import gc
import os
import struct
import tracemalloc
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.errors import FormatError, NullError
from pagedkv.formats import open_model

# Of the tests here: the file that the issue names, or another by the environment.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagedkv" / "smollm2-135m"


@pytest.fixture(scope="module")
def real_path():
    named = os.environ.get("PAGEDKV_TEST_MODEL")
    found = [Path(named)] if named else sorted(CACHE.glob("*.gguf"))
    if not found:
        pytest.skip("smollm2-135m is not in the cache and PAGEDKV_TEST_MODEL is not set")
    return found[0]


def assert_agrees_with_gguf_package(path):
    """Metadata and every tensor's bytes, shape and type as ``gguf.GGUFReader`` sees them."""
    theirs = gguf.GGUFReader(path)
    with open_model(path) as ours:
        fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
        assert list(ours.metadata) == list(fields)
        for key, field in fields.items():
            value = ours.metadata[key]
            if isinstance(value, np.ndarray):
                values = np.array([field.parts[i][0] for i in field.data], field.parts[field.data[0]].dtype if len(field.data) else value.dtype)
                assert value.dtype == values.dtype and value.tolist() == values.tolist(), key
            else:
                assert value == field.contents() and type(value) is type(field.contents()), key
        names = []
        for tensor in theirs.tensors:
            if tensor.name == "rope_freqs.weight":
                assert ours.config.rope_freq_factors == tuple(tensor.data.tolist())
                continue
            name = next(name for name in ours.names() if tiny.gguf_name(name) == tensor.name)
            mine = ours.tensor(name)
            assert mine.shape == tuple(reversed(tensor.shape.tolist()))
            assert mine.dtype == tensor.tensor_type.name.lower()
            assert mine.raw.tobytes() == tensor.data.tobytes()
            names.append(name)
        assert sorted(names) == sorted(ours.names())


# -- reading what is right ---------------------------------------------------------------------


def test_real_file(real_path):
    assert_agrees_with_gguf_package(real_path)


def test_real_file_config(real_path):
    if real_path.name != "SmolLM2-135M-Instruct.Q4_1.gguf":
        pytest.skip("the model under test is not SmolLM2-135M-Instruct.Q4_1")
    config = open_model(real_path).config
    expected = tiny.tiny_config(
        n_layers=30, hidden_dim=576, n_heads=9, n_kv_heads=3, ffn_dim=1536, vocab_size=49152,
        norm_eps=float(np.float32(1e-5)), rope_theta=100000.0, context_len=8192,
    )  # fmt: skip
    assert config == expected


TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q5_k", "q6_k"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("qtype", TYPES)
def test_types(tmp_path, family, qtype):
    config = tiny.tiny_config(family, hidden_dim=256, ffn_dim=256, n_layers=1, vocab_size=32, tied_embeddings=False)
    path = tmp_path / "model.gguf"
    meaning = tiny.write_gguf(path, config, tiny.tiny_tensors(config, 3), qtype)
    assert_agrees_with_gguf_package(path)
    with open_model(path) as file:
        assert sorted(file.names()) == sorted(meaning)
        for name, w in meaning.items():
            tensor = file.tensor(name)
            values = tensor.float32()
            assert values.dtype == np.float32 and values.flags.c_contiguous and values.flags.writeable
            np.testing.assert_array_equal(values, w, err_msg=name)
            assert tensor.dtype == (qtype if w.ndim == 2 else "f32")
            if family == "llama" and ("q_proj" in name or "k_proj" in name):
                assert tensor.row_order.dtype == np.int64 and sorted(tensor.row_order) == list(range(len(w)))
            else:
                assert tensor.row_order is None


def test_mixed_types_and_alignment(tmp_path):
    config = tiny.tiny_config()
    tensors = tiny.tiny_tensors(config)
    types = dict(zip(tensors, ["q8_0", "f32", "q4_1", "q5_0", "f16", "bf16"] * 9))
    for alignment in (8, 32, 64, 4096):
        path = tmp_path / f"{alignment}.gguf"
        meaning = tiny.write_gguf(path, config, tensors, types, alignment=alignment)
        assert_agrees_with_gguf_package(path)
        file = open_model(path)
        assert all((file.tensor(name).float32() == w).all() for name, w in meaning.items())


@pytest.mark.parametrize(
    "config",
    [
        tiny.tiny_config(n_heads=8, n_kv_heads=2),
        tiny.tiny_config(n_heads=4, n_kv_heads=1, qkv_bias=True),
        tiny.tiny_config(hidden_dim=512, n_heads=9, n_kv_heads=3, head_dim=56, ffn_dim=32, n_layers=1),
        tiny.tiny_config("qwen2", n_heads=8, n_kv_heads=2, tied_embeddings=False),
        tiny.tiny_config("qwen3", n_heads=8, n_kv_heads=2, head_dim=32),
        tiny.tiny_config("mistral", n_heads=8, n_kv_heads=2, sliding_window=20),
    ],
    ids=["gqa", "bias", "head_dim_56", "qwen2", "qwen3", "mistral"],
)
def test_same_weights_as_hf_directory(tmp_path, config):
    # HF 31766: the permutation of K goes by the KV heads; HF 46082: explicit head_dim.
    config = replace(config, norm_eps=2.0**-17)  # exact in the float32 of GGUF
    tensors = tiny.tiny_tensors(config, 5)
    tiny.write_gguf(tmp_path / "model.gguf", config, tensors)
    ours, hf = open_model(tmp_path / "model.gguf"), open_model(tiny.write_hf(tmp_path / "hf", config, tensors))
    assert hf.config == config and ours.config == replace(config, family=tiny.gguf_arch(config))
    assert ours.names() == hf.names()
    for name in ours.names():
        np.testing.assert_array_equal(ours.tensor(name).float32(), hf.tensor(name).float32(), err_msg=name)
    q = ours.tensor("model.layers.0.self_attn.q_proj.weight")
    assert (q.row_order is not None and (q.row_order != np.arange(len(q.row_order))).any()) == (ours.config.family == "llama")


def test_slices_of_rows(tmp_path):
    config = tiny.tiny_config()
    tiny.write_gguf(tmp_path / "model.gguf", config, tiny.tiny_tensors(config), "q4_0")
    file = open_model(tmp_path / "model.gguf")
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        tensor = file.tensor(name)
        whole = tensor.float32()
        for part in (slice(0, 1), slice(3, 17), slice(20, None), slice(5, 5), slice(7, 2), slice(-4, None), slice(0, 10**9)):
            got = tensor.float32(part.start or 0, part.stop)
            assert got.shape == whole[part].shape and (got == whole[part]).all()


def test_tied_untied(tmp_path):
    tied, untied = tiny.tiny_config(), tiny.tiny_config(tied_embeddings=False)
    tensors = tiny.tiny_tensors(untied)
    tiny.write_gguf(tmp_path / "untied.gguf", untied, tensors)
    head = tensors.pop("lm_head.weight")
    tiny.write_gguf(tmp_path / "tied.gguf", tied, tensors)
    with open_model(tmp_path / "tied.gguf") as file:
        assert file.config.tied_embeddings and "lm_head.weight" not in file.names()
    with open_model(tmp_path / "untied.gguf") as file:
        assert not file.config.tied_embeddings
        assert (file.tensor("lm_head.weight").float32() == head).all()


def test_version_2(tmp_path):
    path = written(tmp_path, tiny.tiny_config(n_layers=1))
    data = bytearray(path.read_bytes())
    assert data[4] == 3
    data[4] = 2
    path.write_bytes(data)
    assert open_model(path).config.n_layers == 1


@contextmanager
def traced():
    """A list that holds the peak of allocated bytes once the block is left."""
    peak = []
    tracemalloc.start()
    try:
        yield peak
    finally:
        peak.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc/self/fd")
def test_the_file_is_open_as_long_as_a_tensor(tmp_path):
    def is_open():
        return str(path) in [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]

    path = written(tmp_path, tiny.tiny_config())
    with open_model(str(path)) as file:
        tensor = file.tensor("model.norm.weight")
        raw = tensor.raw
        assert raw.flags.owndata and raw.dtype == np.uint8 and raw.ndim == 1
        before = tensor.float32()
    assert is_open() and (tensor.float32() == before).all() and (tensor.raw == raw).all()
    del tensor
    gc.collect()
    assert not is_open()
    for call in (file.names, lambda: file.tensor("model.norm.weight")):
        with pytest.raises(NullError, match="was closed"):
            call()
    file.close()
    assert file.config.n_layers == 2 and file.path == path and file.metadata["general.name"] == "tiny"


def test_opening_copies_no_weights(tmp_path):
    config = tiny.tiny_config(vocab_size=65536, n_layers=1)
    path = written(tmp_path, config)
    with traced() as peak:
        file = open_model(path)
    assert file.tensor("model.embed_tokens.weight").stored.size == 4 * 65536 * 64
    assert peak[0] < 1 << 20


# -- configurations ----------------------------------------------------------------------------


def written(tmp_path, config=None, name="model.gguf", tensors=None, **options):
    config = config or tiny.tiny_config(n_layers=1)
    path = tmp_path / name
    tiny.write_gguf(path, config, tiny.tiny_tensors(config) if tensors is None else tensors, **options)
    return path


@pytest.mark.parametrize(
    "metadata, expected",
    [
        ({"llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [96, 96]}, {}),
        ({"llama.vocab_size": None}, {}),
        ({"llama.rope.dimension_count": None}, {}),
        ({"llama.attention.key_length": 16, "llama.attention.value_length": 16}, {}),
        ({"llama.block_count": np.uint64(1), "llama.context_length": np.uint16(512)}, {}),
        ({"llama.rope.freq_base": np.float64(1e6)}, {"rope_theta": 1e6}),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"rope_scaling": "linear", "rope_factor": 4.0}),
        ({"llama.rope.scaling.factor": 4.0}, {"rope_scaling": "linear", "rope_factor": 4.0}),
        ({"llama.rope.scale_linear": 2.5}, {"rope_scaling": "linear", "rope_factor": 2.5}),
        ({"llama.rope.scale_linear": 2.5, "llama.rope.scaling.factor": 8.0}, {"rope_scaling": "linear", "rope_factor": 8.0}),
        ({"llama.rope.scaling.factor": 0.0}, {}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, {}),
        ({"llama.rope.scaling.attn_factor": 1.0, "llama.rope.scaling.original_context_length": 64}, {}),
        ({"llama.expert_count": 0, "llama.expert_used_count": 0, "llama.attention.causal": True, "llama.use_parallel_residual": False}, {}),
        ({"llama.tensor_data_layout": "Meta AI original pth", "llama.rope.scaling.finetuned": True}, {}),
        ({"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}, {"eos_token_ids": (2, 7, 9)}),
        ({"tokenizer.ggml.eot_token_id": 2}, {"eos_token_ids": (2,)}),
        ({"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.bos_token_id": None}, {"eos_token_ids": (), "bos_token_id": None}),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(128)]}, {}),
        ({"split.count": np.uint16(1)}, {}),
        ({"other.expert_count": 8}, {}),
        ({"llama.attention.sliding_window": 4096}, {"sliding_window": 4096}),  # a Mistral file
        ({"llama.attention.sliding_window": 0}, {}),
    ],
)
def test_spellings(tmp_path, metadata, expected):
    config = tiny.tiny_config(n_layers=1, norm_eps=2.0**-17)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_model(written(tmp_path, config, metadata=metadata)).config == replace(config, **expected)


def test_head_count_kv_missing_means_all(tmp_path):
    config = tiny.tiny_config(n_layers=1, n_kv_heads=4)
    assert open_model(written(tmp_path, config, metadata={"llama.attention.head_count_kv": None})).config.n_kv_heads == 4


def test_qwen2_may_rotate_part_of_a_head(tmp_path):
    assert open_model(written(tmp_path, tiny.tiny_config("qwen2", rope_dim=8))).config.rope_dim == 8


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_missing_theta_warns(tmp_path, family):
    path = written(tmp_path, tiny.tiny_config(family, rope_theta=5e5), metadata={f"{family}.rope.freq_base": None})
    with pytest.warns(UserWarning, match="freq_base is missing; 10000 is used") as caught:
        assert open_model(path).config.rope_theta == 10000.0
    assert caught[0].filename == __file__


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors(tmp_path, factor):
    config = tiny.tiny_config(rope_scaling="llama3", rope_factor=factor, rope_original_context_len=64)
    got = open_model(written(tmp_path, config)).config
    assert got.rope_scaling == "none" and got.rope_freq_factors == tuple(tiny.llama3_freq_factors(config).tolist())
    assert got.rope_freq_factors[0] == 1 and got.rope_freq_factors[-1] == factor


REFUSED_METADATA = [
    ({"llama.embedding_length": None}, "llama.embedding_length is missing"),
    ({"llama.block_count": None}, "llama.block_count is missing"),
    ({"llama.block_count": 2}, "2 layers need 18 tensors, the file has 11"),
    ({"llama.block_count": 0}, r"n_layers is 0, outside \[1"),
    ({"llama.block_count": 2**32 - 1}, "n_layers is 4294967295"),
    ({"llama.block_count": np.int32(-1)}, "n_layers is -1"),
    ({"llama.block_count": "1"}, "block_count is '1', not an integer"),
    ({"llama.block_count": True}, "block_count is True, not an integer"),
    ({"llama.block_count": 1.0}, "block_count is 1.0, not an integer"),
    ({"llama.attention.head_count": 0}, "0 attention heads"),
    ({"llama.attention.head_count": [4, 8]}, "head_count differs between layers"),
    ({"llama.attention.head_count": 3}, "embedding_length 64 is no multiple of 3 heads"),
    ({"llama.attention.head_count_kv": 3}, "4 heads are no multiple of 3 KV heads"),
    ({"llama.attention.head_count_kv": 1}, r"'model.layers.0.self_attn.k_proj.weight' has shape \(32, 64\), the configuration says \(16, 64\)"),
    ({"llama.attention.key_length": 8}, "attention.key_length is 8 but attention.value_length 16|rotary dimensions of head_dim 8"),
    ({"llama.attention.value_length": 8}, "attention.key_length is 16 but attention.value_length 8"),
    ({"llama.attention.key_length": 15, "llama.attention.value_length": 15, "llama.rope.dimension_count": None}, "head_dim is 15; rotary"),
    ({"llama.rope.dimension_count": 8}, "8 rotary dimensions of head_dim 16; llama rotates all"),
    ({"llama.feed_forward_length": 64}, "mlp.gate_proj.weight' has shape"),
    ({"llama.vocab_size": 127}, "embed_tokens.weight' has shape"),
    ({"tokenizer.ggml.tokens": ["a"] * 129}, "129 tokens for a vocabulary of 128"),
    ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "norm_eps is nan"),
    ({"llama.attention.layer_norm_rms_epsilon": -1e-5}, "norm_eps is -"),
    ({"llama.rope.freq_base": 0.0}, "rope_theta is 0.0"),
    ({"llama.rope.freq_base": float("inf")}, "rope_theta is inf"),
    ({"llama.rope.scaling.factor": -4.0}, "rope_factor is -4.0"),
    ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "RoPE scaling 'yarn' is not built here"),
    ({"llama.rope.scaling.attn_factor": 1.2}, "rope.scaling.attn_factor' = 1.2.* asks for something that is not built"),
    ({"llama.expert_count": 8}, "key 'llama.expert_count' = 8 asks for something that is not built"),
    ({"llama.attention.sliding_window": np.int32(-1)}, "sliding_window is -1"),
    ({"llama.attention.sliding_window": 1.5}, "sliding_window is 1.5, not an integer"),
    ({"llama.attention.sliding_window_pattern": 2}, "key 'llama.attention.sliding_window_pattern' = 2"),
    ({"llama.logit_scale": 0.5}, "key 'llama.logit_scale' = 0.5"),
    ({"llama.attention.causal": False}, "key 'llama.attention.causal' = False"),
    ({"tokenizer.ggml.eos_token_id": 128}, "token 128 is outside the vocabulary of 128"),
    ({"tokenizer.ggml.bos_token_id": 2**32 - 1}, "token 4294967295 is outside the vocabulary"),
    ({"tokenizer.ggml.eos_token_id": "2"}, "token '2' is not an integer"),
    ({"split.count": np.uint16(3)}, "is one of 3 files of a split model"),
]


@pytest.mark.parametrize("metadata, message", REFUSED_METADATA)
def test_refused_metadata(tmp_path, metadata, message):
    path = written(tmp_path, metadata=metadata)
    with pytest.raises(FormatError, match=message) as caught:
        open_model(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_unnamed_layers(tmp_path, family):
    config = tiny.tiny_config(family, n_layers=1)
    with pytest.raises(FormatError, match=f"'{family}.attention.sliding_window' = 4096: which layers have the window is not said"):
        open_model(written(tmp_path, config, metadata={f"{family}.attention.sliding_window": 4096}))
    assert open_model(written(tmp_path, config, metadata={f"{family}.attention.sliding_window": 0})).config.sliding_window is None


def test_norms_of_q_and_k_must_be_there(tmp_path):
    config = tiny.tiny_config("qwen3", n_layers=1)
    for name in ("q_norm", "k_norm"):
        rest = {key: w for key, w in tiny.tiny_tensors(config).items() if name not in key}
        with pytest.raises(FormatError, match=f"self_attn.{name}.weight' of shape .* is missing"):
            open_model(written(tmp_path, config, tensors=rest))


@pytest.mark.parametrize("arch", ["mistral3", "gpt2", "qwen2moe"])
def test_other_architectures(tmp_path, arch):
    with pytest.raises(FormatError, match=f"architecture '{arch}' is not read here"):
        open_model(written(tmp_path, arch=arch))


def test_tensors_that_do_not_belong(tmp_path):
    config = tiny.tiny_config(n_layers=1)
    tensors = tiny.tiny_tensors(config)
    w = np.ones(64, np.float32)
    for name in ("blk.0.attn_q_norm.weight", "blk.0.attn_output.bias", "blk.7.attn_norm.weight", "model.norm.weight", "blk.00.attn_norm.weight"):
        with pytest.raises(FormatError, match="is no part of a llama model"):
            open_model(written(tmp_path, config, extra={name: w}))
    for bad in (np.ones(7, np.float32), np.ones(8, np.float16)):
        with pytest.raises(FormatError, match="'rope_freqs.weight' is"):
            open_model(written(tmp_path, config, extra={"rope_freqs.weight": bad}))
    for bad in (0, -1, np.nan, np.inf):
        with pytest.raises(FormatError, match="frequency factor is not a positive number"):
            open_model(written(tmp_path, config, extra={"rope_freqs.weight": np.full(8, bad, np.float32)}))
    with pytest.raises(FormatError, match="both together are not built"):
        open_model(written(tmp_path, config, extra={"rope_freqs.weight": np.ones(8, np.float32)}, metadata={"llama.rope.scaling.factor": 2.0}))
    with pytest.raises(FormatError, match=r"token_embd.weight' is missing"):
        open_model(written(tmp_path, config, tensors={name: w for name, w in tensors.items() if "embed" not in name}))
    for name in list(tensors)[1:]:
        rest = {key: w for key, w in tensors.items() if key != name} | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
        with pytest.raises(FormatError, match=f"tensor '{name}' of shape .* is missing"):
            open_model(written(tmp_path, config, tensors=rest))
    biased = tiny.tiny_config(n_layers=1, qkv_bias=True)
    tensors = tiny.tiny_tensors(biased)
    del tensors["model.layers.0.self_attn.k_proj.bias"]
    with pytest.raises(FormatError, match="k_proj.bias' of shape .* is missing"):
        open_model(written(tmp_path, biased, tensors=tensors))
    qwen2 = tiny.tiny_config("qwen2", n_layers=1)
    with pytest.raises(FormatError, match="q_proj.bias' of shape .* is missing"):
        open_model(written(tmp_path, qwen2, tensors=tiny.tiny_tensors(replace(qwen2, qkv_bias=False))))


def test_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no model file or directory at"):
        open_model(tmp_path / "none.gguf")
    for name, content, message in (
        ("empty.gguf", b"", "is empty"),
        ("text.gguf", b"hello, world", "does not begin with 'GGUF'"),
        ("short.gguf", b"GG", "does not begin with 'GGUF'"),
        ("model.safetensors", b"\0" * 16, "give the directory"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatError, match=message):
            open_model(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="not a regular file"):
        open_model(tmp_path / "pipe")


# -- damage --------------------------------------------------------------------------------------


class Bytes:
    """A GGUF file put together field by field; ``at[label]`` is where and how a field lies."""

    def __init__(self):
        self.data = bytearray()
        self.at = {}

    def put(self, fmt, value, label):
        self.at[label] = len(self.data), fmt
        self.data += struct.pack(fmt, value)

    def string(self, text, label):
        text = text if isinstance(text, bytes) else text.encode()
        self.put("<Q", len(text), label + ".length")
        self.data += text

    def patched(self, label, value):
        at, fmt = self.at[label]
        out = bytearray(self.data)
        struct.pack_into(fmt, out, at, value & (256 ** struct.calcsize(fmt) - 1))
        return bytes(out)


def small_file(keys=(), infos=(), tail=b""):
    """A one-layer f32 model of 1.5 kB: 2 heads of 4, hidden 8, vocabulary 6.

    ``keys`` are further (key, type, bytes); ``infos`` further (name, dims, type, offset).
    """
    config = tiny.tiny_config(n_layers=1, hidden_dim=8, n_heads=2, n_kv_heads=1, ffn_dim=6, vocab_size=6)
    out = Bytes()
    out.data += b"GGUF"
    out.put("<I", 3, "version")
    metadata = tiny.gguf_metadata(config) | {"general.architecture": "llama"}
    stored = {
        name: tiny.permute(w, 2) if "q_proj" in name else tiny.permute(w, 1) if "k_proj" in name else w
        for name, w in tiny.tiny_tensors(config).items()
    }
    out.put("<Q", len(stored) + len(infos), "n_tensors")
    out.put("<Q", len(metadata) + 3 + len(keys), "n_keys")
    for key, value in metadata.items():
        out.string(key, key + ".key")
        kind, fmt = {str: (8, None), int: (4, "<I"), float: (6, "<f")}[type(value)]
        out.put("<I", kind, key + ".type")
        out.string(value, key) if kind == 8 else out.put(fmt, value, key)
    out.string("tokenizer.ggml.tokens", "tokens.key")
    out.put("<I", 9, "tokens.type")
    out.put("<I", 8, "tokens.element")
    out.put("<Q", 6, "tokens.count")
    for i, token in enumerate(["<s>", "é", "", "ab", "日本", "z"]):
        out.string(token, f"tokens.{i}")
    out.string("tokenizer.ggml.scores", "scores.key")
    out.put("<I", 9, "scores.type")
    out.put("<I", 6, "scores.element")
    out.put("<Q", 6, "scores.count")
    out.data += np.arange(6, dtype="<f4").tobytes()
    out.string("tokenizer.ggml.add_bos_token", "bool.key")
    out.put("<I", 7, "bool.type")
    out.put("<B", 1, "bool")
    for key, kind, payload in keys:
        out.string(key, key + ".key")
        out.put("<I", kind, key + ".type")
        out.data += payload
    offset, blobs = 0, []
    all_infos = []
    for name, w in stored.items():
        all_infos.append((tiny.gguf_name(name), tuple(reversed(w.shape)), 0, offset))
        blobs.append(w.tobytes() + bytes(-w.nbytes % 32))
        offset += len(blobs[-1])
    for name, dims, kind, at in [*all_infos, *infos]:
        out.string(name, name + ".name")
        out.put("<I", len(dims), name + ".n_dims")
        for i, dim in enumerate(dims):
            out.put("<Q", dim, f"{name}.dim{i}")
        out.put("<I", kind, name + ".kind")
        out.put("<Q", at, name + ".offset")
    out.data_begin = len(out.data) + -len(out.data) % 32
    out.data += bytes(out.data_begin - len(out.data)) + b"".join(blobs)[: offset - (-stored["model.norm.weight"].nbytes % 32)] + tail
    return out


def opened(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return open_model(path)


def test_small_file_is_right(tmp_path):
    file = opened(tmp_path, small_file().data)
    assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "é", "", "ab", "日本", "z"]
    assert file.metadata["tokenizer.ggml.scores"].tolist() == [0, 1, 2, 3, 4, 5]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    expected = tiny.tiny_tensors(file.config)
    assert all((file.tensor(name).float32() == expected[name]).all() for name in file.names())
    assert_agrees_with_gguf_package(tmp_path / "model.gguf")


def test_truncated_at_every_byte(tmp_path):
    data = bytes(small_file().data)
    for n in range(len(data)):
        with pytest.raises(FormatError):
            opened(tmp_path, data[:n])


HOSTILE = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
SIZES = [label for label in small_file().at if label.endswith((".length", ".count", ".offset", "n_tensors", "n_keys", "n_dims", ".dim0", ".dim1"))]


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_sizes(tmp_path, value):
    small = small_file()
    for label in SIZES:
        data = small.patched(label, value)
        if data == small.data:
            continue  # 2**32 + 1 in 32 bits may be what was there
        with traced() as peak, pytest.raises(FormatError):
            opened(tmp_path, data)
        assert peak[0] < 1 << 20, label


def test_dimensions_whose_product_wraps(tmp_path):
    for dims in ((2**32, 2**32), (2**62, 4), (2**63, 2**63), (2**31, 2**31, 2**31, 2**31)):
        with pytest.raises(FormatError, match=r"tensor 'x' of type f32 and shape \(.*\) at offset 0 needs \d+ bytes"):
            opened(tmp_path, small_file(infos=[("x", dims, 0, 0)]).data)


@settings(deadline=None, max_examples=400)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes(tmp_path_factory, flips):
    small = small_file()
    data = bytearray(small.data)
    for where, mask in flips:
        data[int(where * small.data_begin)] ^= mask
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            file = opened(tmp_path_factory.mktemp("flip"), data)
        except FormatError as error:
            assert "\n" not in str(error)
        else:
            for name in file.names():
                assert file.tensor(name).float32().shape == file.tensor(name).shape


U32 = struct.Struct("<I").pack
U64 = struct.Struct("<Q").pack


@pytest.mark.parametrize(
    "data, message",
    [
        (small_file().patched("version", 1), "version 1; versions 2 and 3"),
        (small_file().patched("version", 4), "version 4"),
        (small_file().patched("version", 0x03000000), "big-endian"),
        (small_file(keys=[("llama.block_count", 4, U32(1))]).data, "repeats 'llama.block_count'"),
        (small_file(keys=[("", 4, U32(1))]).data, "is empty"),
        (small_file(keys=[("k", 8, U64(2) + b"\xff\xfe")]).data, "key 'k' at byte .* is not UTF-8"),
        (small_file(keys=[("k", 9, U32(8) + U64(2) + U64(1) + b"a" + U64(1) + b"\xff")]).data, "element 1 of key 'k' at byte [0-9]+ is not UTF-8"),
        (small_file().patched("tokens.5.length", 2**63), "element 5 of key 'tokenizer.ggml.tokens' at byte [0-9]+ passes the end"),
        (small_file().patched("n_keys", 1000), "1000 keys do not fit into a file of"),
        (small_file().patched("n_tensors", 2**63), "9223372036854775808 tensors do not fit into a file of"),
        (small_file(keys=[("k" * 65536, 4, U32(1))]).data, "takes 65536 bytes, at most 65535"),
        (small_file(keys=[("k", 13, U32(1))]).data, "unknown value type 13"),
        (small_file(keys=[("k", 9, U32(13) + U64(1))]).data, "unknown element type 13"),
        (small_file(keys=[("k", 7, b"\2")]).data, "bool with a value other than 0 and 1"),
        (small_file(keys=[("k", 9, U32(7) + U64(2) + b"\0\2")]).data, "bool with a value other than 0 and 1"),
        (small_file(keys=[("k", 9, (U32(9) + U64(1)) * 4 + U32(4) + U64(0))]).data, "nests arrays deeper than 4"),
        (small_file(keys=[("k", 9, U32(0) + U64(2**24 + 1))], tail=bytes(2**24 + 1)).data, "16777217 elements, more than 16777216"),
        (small_file(keys=[("general.alignment", 4, U32(0))]).data, "general.alignment is 0"),
        (small_file(keys=[("general.alignment", 4, U32(12))]).data, "general.alignment is 12"),
        (small_file(keys=[("general.alignment", 8, U64(1) + b"8")]).data, "general.alignment is '8'"),
        (small_file(infos=[("output_norm.weight", (8,), 0, 0)]).data, "repeats the name 'output_norm.weight'"),
        (small_file(infos=[("", (8,), 0, 0)]).data, "has no name"),
        (small_file(infos=[("n" * 65, (8,), 0, 0)]).data, "takes 65 bytes, at most 64"),
        (small_file(infos=[("x", (), 0, 0)]).data, "'x' has 0 dimensions"),
        (small_file(infos=[("x", (1, 1, 1, 1, 1), 0, 0)]).data, "'x' has 5 dimensions"),
        (small_file(infos=[("x", (8, 0), 0, 0)]).data, r"'x' of type f32 and shape \(0, 8\) at offset 0 is empty"),
        (small_file(infos=[("x", (256,), 10, 0)]).data, r"'x' at offset 0 has type q2_k \(10\), which is not read"),
        (small_file(infos=[("x", (256,), 99, 0)]).data, "'x' at offset 0 has the unknown type 99"),
        (small_file(infos=[("x", (48,), 2, 0)]).data, "'x' of type q4_0 .* no whole number of blocks of 32"),
        (small_file(infos=[("x", (8,), 0, 16)]).data, "'x' .* at offset 16 is not aligned to 32"),
        (small_file(infos=[("x", (8,), 0, 2**20)]).data, "'x' .* at offset 1048576 needs 32 bytes from byte"),
        (small_file(infos=[("x", (1,), 0, 0)]).data, "'token_embd.weight' .* and 'x' .* overlap|'x' .* and 'token_embd.weight' .* overlap"),
        (small_file().patched("blk.0.ffn_norm.weight.offset", 32), "overlap"),
        (small_file(infos=[("rope_freqs.weight", (2,), 0, 0)]).data, "overlap"),
    ],
)  # fmt: skip
def test_refused_bytes(tmp_path, data, message):
    with pytest.raises(FormatError, match=message) as caught:
        opened(tmp_path, data)
    assert str(caught.value).startswith(str(tmp_path)) and len(str(caught.value)) < 1000


def test_nested_arrays(tmp_path):
    inner = U32(4) + U64(2) + U32(5) + U32(6)
    file = opened(tmp_path, small_file(keys=[("k", 9, U32(9) + U64(2) + inner + inner)]).data)
    assert [part.tolist() for part in file.metadata["k"]] == [[5, 6], [5, 6]]


def test_types_of_vectors(tmp_path):
    config = tiny.tiny_config(n_layers=1)
    tensors = tiny.tiny_tensors(config)
    norm = tensors.pop("model.norm.weight")
    path = written(tmp_path, config, tensors=tensors, extra={"output_norm.weight": norm.astype(np.float16)})
    assert open_model(path).tensor("model.norm.weight").dtype == "f16"
    # The same vector, but its 128 bytes are declared as 64 values of q8_0 (68 bytes).
    data = path.read_bytes()
    at = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    assert data[at : at + 4] == U32(1)
    with pytest.raises(FormatError, match="'model.norm.weight' is a vector of type q8_0"):
        opened(tmp_path, data[:at] + U32(8) + data[at + 4 :])


def test_same_logits_as_hf_directory(tmp_path):
    # HF 31766: were K un-permuted by the wrong number of heads, these would differ.
    import pagedkv as pk

    config = tiny.tiny_config(n_heads=8, n_kv_heads=2, norm_eps=2.0**-17)
    tensors = tiny.tiny_tensors(config, 6)
    tiny.write_gguf(tmp_path / "model.gguf", config, tensors)
    logits = []
    for path in (tmp_path / "model.gguf", tiny.write_hf(tmp_path / "hf", config, tensors)):
        model = pk.LlamaModel.load(path)
        logits.append(model.prefill(range(20), model.new_sequence(model.new_pool(n_tokens=32)), all_logits=True))
    assert logits[0].tobytes() == logits[1].tobytes() and np.ptp(logits[0]) > 1
