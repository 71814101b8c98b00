"""Hugging Face directories: every spelling of the configuration, and damage."""

import json
import struct
import warnings
from dataclasses import replace

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pagedkv.errors import FormatError
from pagedkv.formats import open_model
from pagedkv.formats.hf import read_safetensors

CONFIG = tiny.tiny_config(n_layers=1)


def written(tmp_path, config=CONFIG, tensors=None, **options):
    return tiny.write_hf(tmp_path / "model", config, tiny.tiny_tensors(config) if tensors is None else tensors, **options)


def refuses(path, message):
    with pytest.raises(FormatError, match=message) as caught:
        open_model(path)
    text = str(caught.value)
    assert text.startswith(str(path)) and "\n" not in text and len(text) < 1000


# -- reading what is right ---------------------------------------------------------------------


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_types_and_shards(tmp_path, family, dtype, n_shards):
    config = tiny.tiny_config(family, tied_embeddings=False)
    tensors = tiny.tiny_tensors(config, 3)
    path = written(tmp_path, config, tensors, dtype=dtype, n_shards=n_shards)
    with open_model(path) as file:
        assert file.config == config and file.path == path
        assert file.metadata == json.loads((path / "config.json").read_text())
        assert sorted(file.names()) == sorted(tensors)
        for name, w in tiny.round_to(tensors, dtype).items():
            tensor = file.tensor(name)
            assert tensor.dtype == dtype and tensor.shape == w.shape and tensor.row_order is None
            values = tensor.float32()
            assert values.dtype == np.float32 and values.flags.c_contiguous
            np.testing.assert_array_equal(values, w, err_msg=name)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_agrees_with_safetensors_package(tmp_path, dtype):
    path = written(tmp_path, dtype=dtype) / "model.safetensors"
    theirs, ours = load_file(path), read_safetensors(path)
    assert sorted(theirs) == sorted(ours)
    assert all(ours[name].raw.tobytes() == w.tobytes() and ours[name].shape == w.shape for name, w in theirs.items())


def test_misaligned_tensors(tmp_path):
    # The header need not be padded, so a float32 may lie at any byte.
    path = written(tmp_path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + n].rstrip(b" ") + b" "
    for pad in range(4):
        file.write_bytes(struct.pack("<Q", len(header) + pad) + header + b" " * pad + data[8 + n :])
        model = open_model(path)
        assert all((model.tensor(name).float32() == w).all() for name, w in tiny.tiny_tensors(CONFIG).items())


def test_tied_untied_untrue(tmp_path):
    # SG 1508, V 6758: a head that is missing, present although tied, missing although untied.
    untied = replace(CONFIG, tied_embeddings=False)
    tensors = tiny.tiny_tensors(untied)
    without = {name: w for name, w in tensors.items() if name != "lm_head.weight"}
    assert open_model(written(tmp_path, CONFIG, without)).config == CONFIG
    assert open_model(written(tmp_path, untied, tensors)).config == untied
    present = open_model(written(tmp_path, untied, tensors, tie_word_embeddings=True))
    assert present.config == untied
    assert (present.tensor("lm_head.weight").float32() == tensors["lm_head.weight"]).all()
    for flag in (False, None):  # transformers' llama and qwen2 default to untied
        refuses(written(tmp_path, CONFIG, without, tie_word_embeddings=flag), "tie_word_embeddings is not true, but the file has no lm_head")


def test_explicit_head_dim(tmp_path):
    config = tiny.tiny_config(hidden_dim=512, n_heads=9, n_kv_heads=3, head_dim=56, ffn_dim=32, n_layers=1)
    file = open_model(written(tmp_path, config))
    assert file.config == config
    assert file.tensor("model.layers.0.self_attn.o_proj.weight").shape == (512, 504)


def test_old_frequencies_are_passed_over(tmp_path):
    tensors = tiny.tiny_tensors(CONFIG) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert "inv_freq" not in "".join(open_model(written(tmp_path, tensors=tensors)).names())


# -- configurations ----------------------------------------------------------------------------

LINEAR = replace(CONFIG, rope_scaling="linear", rope_factor=4.0)
LLAMA3 = [
    replace(CONFIG, rope_scaling="llama3", rope_factor=factor, rope_low_freq_factor=1.0, rope_high_freq_factor=4.0, rope_original_context_len=64)
    for factor in (8.0, 32.0)
]


@pytest.mark.parametrize("rope_type_key", ["rope_type", "type"])
@pytest.mark.parametrize("rope", ["top", "parameters", "both"])
@pytest.mark.parametrize("config", [replace(CONFIG, rope_theta=5e5), LINEAR, *LLAMA3], ids=["theta", "linear", "llama3-8", "llama3-32"])
def test_rope_spellings(tmp_path, config, rope, rope_type_key):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_model(written(tmp_path, config, rope=rope, rope_type_key=rope_type_key)).config == config


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_missing_theta_warns(tmp_path, family):
    # V 42624: the new spelling was ignored and theta fell back without a word.
    path = written(tmp_path, tiny.tiny_config(family, rope_theta=5e5), rope="none")
    with pytest.warns(UserWarning, match="rope_theta is missing; 10000 is used") as caught:
        assert open_model(path).config.rope_theta == 10000.0
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "spelling, expected",
    [
        ({"eos_token_id": [2, 7, 9]}, {"eos_token_ids": (2, 7, 9)}),
        ({"eos_token_id": None, "bos_token_id": None}, {"eos_token_ids": (), "bos_token_id": None}),
        ({"generation": {"eos_token_id": [7, 2], "bos_token_id": 5}}, {"eos_token_ids": (7, 2)}),
        ({"generation": {"eos_token_id": 7, "bos_token_id": 5}, "bos_token_id": None}, {"eos_token_ids": (7, 2), "bos_token_id": 5}),
        ({"generation": {}}, {}),
        ({"head_dim": 16}, {}),
        ({"hidden_act": None, "attention_bias": None, "mlp_bias": False, "use_sliding_window": False, "sliding_window": 4096}, {}),
        ({"layer_types": ["full_attention"]}, {}),
        ({"rms_norm_eps": None}, {"norm_eps": 1e-6}),
        ({"rope_theta": 10000}, {}),
        ({"rope_scaling": {"rope_type": "default"}}, {}),
        ({"rope_scaling": {"rope_type": "llama3", "type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}},
         {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_context_len": 64}),
        ({"partial_rotary_factor": 1.0, "torch_dtype": "bfloat16", "pretraining_tp": 1, "attention_dropout": 0.0}, {}),
    ],
)  # fmt: skip
def test_spellings(tmp_path, spelling, expected):
    assert open_model(written(tmp_path, **spelling)).config == replace(CONFIG, **expected)


def test_key_value_heads_missing_means_all(tmp_path):
    config = tiny.tiny_config(n_layers=1, n_kv_heads=4)
    assert open_model(written(tmp_path, config, num_key_value_heads=None)).config == config


def test_bias(tmp_path):
    config = replace(CONFIG, qkv_bias=True)
    tensors = tiny.tiny_tensors(config)
    assert open_model(written(tmp_path, config, tensors)).config.qkv_bias
    refuses(written(tmp_path, config, tiny.tiny_tensors(CONFIG)), r"q_proj.bias' of shape \(64,\) is missing")
    refuses(written(tmp_path, config, tensors, attention_bias=False), "self_attn.._proj.bias' is no part of a llama model")
    more = tensors | {"model.layers.0.self_attn.o_proj.bias": np.zeros(64, np.float32)}
    refuses(written(tmp_path, config, more), "o_proj.bias' is no part of a llama model")
    qwen2 = tiny.tiny_config("qwen2", n_layers=1)
    assert open_model(written(tmp_path, qwen2, attention_bias=False)).config.qkv_bias


MISTRAL, QWEN2, QWEN3 = (tiny.tiny_config(family, n_layers=3) for family in ("mistral", "qwen2", "qwen3"))
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    "config, spelling, expected",
    [
        (MISTRAL, {"sliding_window": 20}, {"sliding_window": 20}),
        (MISTRAL, {}, {}),  # written as null
        (MISTRAL, {"use_sliding_window": False}, {}),
        (MISTRAL, {"sliding_window": 20, "layer_types": [SLIDING] * 3, "use_sliding_window": True}, {"sliding_window": 20}),
        (MISTRAL, {"layer_types": [FULL] * 3, "max_window_layers": 2}, {}),
        (QWEN2, {"sliding_window": 20, "max_window_layers": 1}, {}),  # not in use
        (QWEN2, {"use_sliding_window": True}, {}),  # from layer 28 on
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 2}, {"sliding_window": 4096, "full_layers": (0, 1)}),
        (QWEN2, {"use_sliding_window": True, "max_window_layers": 10**30, "sliding_window": 20}, {}),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 20}, {"sliding_window": 20}),
        (QWEN3, {"use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 20}, {"sliding_window": 20, "full_layers": (1,)}),
        (QWEN3, {"use_sliding_window": True, "layer_types": [FULL] * 3, "max_window_layers": 0}, {}),
        (tiny.tiny_config(n_layers=3), {"sliding_window": 20, "layer_types": [FULL] * 3}, {}),
    ],
)  # fmt: skip
def test_windows(tmp_path, config, spelling, expected):
    assert open_model(written(tmp_path, config, **spelling)).config == replace(config, **expected)


def test_a_window_that_is_missing_or_null(tmp_path):
    for family, null, missing in (("mistral", None, 4096), ("qwen2", None, 4096), ("qwen3", None, 4096), ("llama", None, None)):
        config = tiny.tiny_config(family, n_layers=1)
        path = written(tmp_path, config, **({"use_sliding_window": True, "max_window_layers": 0} if family[:4] == "qwen" else {}))
        fields = json.loads((path / "config.json").read_text())
        for given, window in (({"sliding_window": None}, null), ({}, missing)):
            fields.pop("sliding_window", None)
            (path / "config.json").write_text(json.dumps(fields | given))
            assert open_model(path).config.sliding_window == window


@pytest.mark.parametrize(
    "config, spelling, message",
    [
        (MISTRAL, {"sliding_window": 0}, r"sliding_window is 0, outside \[1"),
        (MISTRAL, {"sliding_window": -4}, "sliding_window is -4"),
        (MISTRAL, {"sliding_window": 10**30}, "sliding_window is 10+, outside"),
        (MISTRAL, {"sliding_window": "20"}, "sliding_window is '20', not an integer"),
        (MISTRAL, {"sliding_window": 20, "use_sliding_window": False}, "use_sliding_window is False, but a mistral model with this sliding_window has a window"),
        (MISTRAL, {"use_sliding_window": True}, "use_sliding_window is True, but a mistral model with this sliding_window has no window"),
        (MISTRAL, {"sliding_window": 20, "layer_types": [SLIDING, FULL, FULL]}, "layer_types is .*, but the layers of this mistral model have a sliding window"),
        (MISTRAL, {"layer_types": [SLIDING] * 3}, "layer_types is .*, but the layers of this mistral model have no sliding window"),
        (QWEN2, {"layer_types": [SLIDING] * 3}, "layer_types is .*, but the layers of this qwen2 model have no sliding window"),
        (QWEN3, {"use_sliding_window": True, "layer_types": [SLIDING] * 2}, "layer_types is .*; full_attention or sliding_attention for each of 3 layers is read"),
        (QWEN3, {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "layer_types is .*; full_attention or sliding_attention"),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": "2"}, "max_window_layers is '2', not an integer"),
        (QWEN3, {"use_sliding_window": 1}, "use_sliding_window is 1, not true or false"),
        (QWEN3, {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 0}, "sliding_window is 0"),
        (QWEN3, {"head_dim": None}, r"q_proj.weight' has shape \(64, 64\), the configuration says \(512, 64\)"),
    ],
)  # fmt: skip
def test_refused_windows(tmp_path, config, spelling, message):
    refuses(written(tmp_path, config, **spelling), message)


def test_norms_of_q_and_k(tmp_path):
    config = tiny.tiny_config("qwen3", n_layers=1)
    tensors = tiny.tiny_tensors(config)
    assert open_model(written(tmp_path, config, tensors)).config == config
    name = "model.layers.0.self_attn.k_norm.weight"
    refuses(written(tmp_path, config, {key: w for key, w in tensors.items() if key != name}), f"{name}' of shape .* is missing")
    refuses(written(tmp_path, CONFIG, tiny.tiny_tensors(CONFIG) | {name: tensors[name]}), f"{name}' is no part of a llama model")
    refuses(written(tmp_path, config, tensors | {name: np.ones(32, np.float32)}), r"k_norm.weight' has shape \(32,\), the configuration says \(16,\)")
    biased = replace(config, qkv_bias=True)
    assert open_model(written(tmp_path, biased)).config == biased


LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "spelling, message",
    [
        ({"model_type": "ministral"}, "model_type 'ministral' is not read here"),
        ({"model_type": None}, "model_type None is not read"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not built here"),
        ({"mlp_bias": True}, "mlp_bias is not built"),
        ({"mlp_bias": 1}, "mlp_bias is 1, not true or false"),
        ({"use_sliding_window": True}, "use_sliding_window is True, but a llama model with this sliding_window has no window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types is .*, but the layers of this llama model have no sliding window"),
        ({"layer_types": 1}, "layer_types is 1; full_attention or sliding_attention for each of 1 layers is read"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', not an integer"),
        ({"hidden_size": True}, "hidden_size is True, not an integer"),
        ({"hidden_size": 63}, "hidden_size 63 is no multiple of 4 heads, and head_dim is missing"),
        ({"hidden_size": 128}, "tensor .* has shape"),
        ({"num_hidden_layers": 2}, "2 layers need 18 tensors, the file has 11"),
        ({"num_hidden_layers": 10**30}, r"n_layers is 10+, outside"),
        ({"num_hidden_layers": 0}, "n_layers is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, "4 heads are no multiple of 3 KV heads"),
        ({"num_key_value_heads": 4}, r"k_proj.weight' has shape \(32, 64\), the configuration says \(64, 64\)"),
        ({"head_dim": 15}, "head_dim is 15; rotary embedding needs an even one"),
        ({"vocab_size": 100}, r"embed_tokens.weight' has shape \(128, 64\), the configuration says \(100, 64\)"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5', not a number"),
        ({"rms_norm_eps": float("inf")}, "norm_eps is inf"),
        ({"rope_theta": 10**400}, "rope_theta does not fit a float64"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000.0 in the top level but 500000.0 before"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE type 'yarn' is not built here"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "RoPE type 'dynamic' is not built here"),
        ({"rope_scaling": {"type": "mrope", "rope_type": "default"}}, "rope_type is 'default' in rope_scaling but 'mrope' before"),
        ({"rope_scaling": {"factor": 4.0}}, "a RoPE factor of 4.0 without a type"),
        ({"rope_scaling": {"type": "linear"}}, "RoPE: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_factor is 0.0"),
        ({"rope_scaling": 4}, "rope_scaling is 4, not an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters differs between kinds of layer"),
        ({"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": None}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "frequency factors are 1.0 .low. and 1.0 .high."),
        ({"rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 0}}, "rope_original_context_len is 0"),
        ({"rope_scaling": LLAMA3_ROPE, "rope_parameters": LLAMA3_ROPE | {"factor": 32.0}}, "factor is 8.0 in rope_scaling but 32.0 before"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not built"),
        ({"eos_token_id": 128}, "token 128 is outside the vocabulary of 128"),
        ({"eos_token_id": [2, "7"]}, "eos_token_id is .*, not an integer or a list"),
        ({"bos_token_id": -1}, "token -1 is outside"),
        ({"generation": {"eos_token_id": [500]}}, "token 500 is outside"),
    ],
)
def test_refused_config(tmp_path, spelling, message):
    refuses(written(tmp_path, **spelling), message)


def test_directories(tmp_path):
    refuses(tmp_path, "is not a model directory: it has no config.json")
    path = written(tmp_path)
    for text, message in (
        ("[1]", "is not a JSON object"),
        ("{", "is not valid JSON"),
        ('{"a": 1, "a": 2}', "a key occurs twice"),
        ("[" * 100000, "is nested too deeply"),
        (b"\xff\xfe\xff", "is not valid JSON"),
        ('{"a": ' + "1" * 5000 + "}", "is not valid JSON"),
    ):
        (path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        refuses(path, message)
    path = written(tmp_path)
    (path / "model.safetensors").unlink()
    refuses(path, "has neither model.safetensors nor model.safetensors.index.json$")
    (path / "pytorch_model.bin").write_bytes(b"PK")
    refuses(path, "pytorch_model.bin is a PyTorch pickle, which is not read")


def test_index(tmp_path):
    path = written(tmp_path, n_shards=2)
    index = path / "model.safetensors.index.json"
    right = json.loads(index.read_text())
    secret = tmp_path / "secret.safetensors"
    secret.write_bytes((path / "model-00001-of-00002.safetensors").read_bytes())
    for shard in ("../secret.safetensors", str(secret), "", ".", "..", "a/../../secret.safetensors", "..\\secret.safetensors", "x\0"):
        index.write_text(json.dumps({"weight_map": right["weight_map"] | {"model.norm.weight": shard}}))
        refuses(path, "is not the name of a file in the directory")
    for weight_map, message in (
        ([], "weight_map does not map names"),
        (None, "weight_map does not map names"),
        ({"model.norm.weight": 3}, "weight_map does not map names"),
        ({"model.norm.weight": "model-00003-of-00002.safetensors"}, "shard 'model-00003-of-00002.safetensors' is not in the directory"),
        (right["weight_map"] | {"other": "model-00001-of-00002.safetensors"}, "tensor 'other' is not in 'model-00001"),
        ({key: shard for key, shard in right["weight_map"].items() if "up_proj" not in key}, "up_proj.weight' of shape .* is missing"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refuses(path, message)


# -- damage --------------------------------------------------------------------------------------


def safetensors_bytes(header, data=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(header)) + header + data


def entry(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


DAMAGED = [
    (b"", "is empty"),
    (b"1234567", "7 bytes are too few"),
    (struct.pack("<Q", 1) + b"", "a header of 1 bytes does not fit"),
    (struct.pack("<Q", 2**64 - 1) + b"{}", "a header of 18446744073709551615 bytes does not fit"),
    (struct.pack("<Q", 2**63) + b"{}", "does not fit"),
    (safetensors_bytes(b"[]"), "is not a JSON object"),
    (safetensors_bytes(b"{" * 100000), "is not valid JSON"),
    (safetensors_bytes(b'{"x":' * 100000), "is nested too deeply"),
    (safetensors_bytes(b'{"a":{},"a":{}}'), "a key occurs twice"),
    (safetensors_bytes({"x": 3}), "'x' is described by 3"),
    (safetensors_bytes({"x": entry("I64", (3,))}, bytes(24)), "'x' has type 'I64'; F32, F16 and BF16 are read"),
    (safetensors_bytes({"x": entry("F8_E4M3", (24,))}, bytes(24)), "'x' has type 'F8_E4M3'"),
    (safetensors_bytes({"x": entry([])}, bytes(24)), r"'x' has type \[\]"),
    (safetensors_bytes({"x": entry(shape=(2, -3))}, bytes(24)), r"the shape \[2, -3\]"),
    (safetensors_bytes({"x": entry(shape=(2, 3.0))}, bytes(24)), r"the shape \[2, 3.0\]"),
    (safetensors_bytes({"x": entry(shape=(6, True))}, bytes(24)), r"the shape \[6, True\]"),
    (safetensors_bytes({"x": entry() | {"shape": "23"}}, bytes(24)), "the shape '23'"),
    (safetensors_bytes({"x": entry(shape=(2, 4))}, bytes(24)), "does not take the 24 bytes"),
    (safetensors_bytes({"x": entry(shape=(2**62, 4))}, bytes(24)), "does not take the 24 bytes"),
    (safetensors_bytes({"x": entry(shape=(2**32, 2**32))}, bytes(24)), "does not take the 24 bytes"),
    (safetensors_bytes({"x": entry(shape=[2**63] * 5000)}, bytes(24)), "does not take the 24 bytes"),
    (safetensors_bytes({"x": entry(offsets=(0, 25))}, bytes(24)), "takes bytes 0 to 25 of 24"),
    (safetensors_bytes({"x": entry(offsets=(2**63, 2**63 + 24))}, bytes(24)), "takes bytes"),
    (safetensors_bytes({"x": entry(offsets=(24, 0))}, bytes(24)), "takes bytes 24 to 0"),
    (safetensors_bytes({"x": entry(offsets=(-24, 0))}, bytes(24)), r"the offsets \[-24, 0\]"),
    (safetensors_bytes({"x": entry(offsets=(0,))}, bytes(24)), r"the offsets \[0\]"),
    (safetensors_bytes({"x": entry(offsets=(4, 28))}, bytes(28)), "begins at byte 4, where byte 0 must follow: a hole"),
    (safetensors_bytes({"x": entry(), "y": entry(offsets=(20, 44))}, bytes(44)), "'y' begins at byte 20, where byte 24 must follow: an overlap"),
    (safetensors_bytes({"x": entry(), "y": entry()}, bytes(24)), "an overlap"),
    (safetensors_bytes({"x": entry()}, bytes(25)), "the tensors take 24 of 25 bytes"),
]


@pytest.mark.parametrize("data, message", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_safetensors(tmp_path, data, message):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message) as caught:
        read_safetensors(path)
    assert str(caught.value).startswith(str(path)) and len(str(caught.value)) < 500


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A directory with a small model, and the bytes of its safetensors."""
    config = tiny.tiny_config(n_layers=1, hidden_dim=8, n_heads=2, n_kv_heads=1, ffn_dim=6, vocab_size=6)
    path = tiny.write_hf(tmp_path_factory.mktemp("small"), config, tiny.tiny_tensors(config))
    return path, (path / "model.safetensors").read_bytes()


def test_truncated_at_every_byte(small):
    path, data = small
    for n in range(len(data)):
        (path / "model.safetensors").write_bytes(data[:n])
        with pytest.raises(FormatError):
            open_model(path)


@settings(deadline=None, max_examples=400)
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes(small, flips):
    path, data = small
    flipped = bytearray(data)
    n = 8 + struct.unpack("<Q", data[:8])[0]
    for where, mask in flips:
        flipped[int(where * n)] ^= mask
    (path / "model.safetensors").write_bytes(flipped)
    try:
        file = open_model(path)
    except FormatError as error:
        assert "\n" not in str(error)
    else:
        for name in file.names():
            assert file.tensor(name).float32().shape == file.tensor(name).shape


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3)
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted({*tiny.hf_config(CONFIG, rope="both"), *LLAMA3_ROPE, "head_dim", "layer_types", "quantization_config"})), JSON, st.booleans())
def test_any_value_of_any_field(tmp_path_factory, key, value, inside_rope):
    fields = {"rope_scaling": LLAMA3_ROPE | {key: value}} if inside_rope else {key: value}
    path = written(tmp_path_factory.mktemp("field"), **fields)
    opens_or_refuses(path)


WINDOW_FIELDS = ["sliding_window", "use_sliding_window", "layer_types", "max_window_layers", "num_hidden_layers"]


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(["mistral", "qwen2", "qwen3"]), st.dictionaries(st.sampled_from(WINDOW_FIELDS), JSON | st.just(True), max_size=3))
def test_any_value_of_the_fields_of_a_window(tmp_path_factory, family, fields):
    opens_or_refuses(written(tmp_path_factory.mktemp("field"), tiny.tiny_config(family, n_layers=1), **fields))


def opens_or_refuses(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            open_model(path)
        except FormatError as error:
            assert "\n" not in str(error)
