"""Small seeded models, written as Hugging Face directories and as GGUF files.

Independent of the code under test, LlamaConfig aside: the writers are the ``safetensors`` and
``gguf`` packages, the permutation and the frequency factors are those of llama.cpp's
convert_hf_to_gguf.py, stated anew. Everything is float32 unless a type is named.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from pagedkv.config import LlamaConfig

GOLDEN = Path(__file__).parent / "golden" / "tiny_logits.npz"


def tiny_config(family="llama", **fields):
    """A two-layer GQA configuration; ``fields`` of LlamaConfig replace the defaults.

    ``head_dim`` follows ``hidden_dim // n_heads`` and ``rope_dim`` follows ``head_dim``
    unless given. qwen2 gets QKV biases, qwen3 norms of Q and K.
    """
    hidden_dim, n_heads = fields.get("hidden_dim", 64), fields.get("n_heads", 4)
    head_dim = fields.get("head_dim", hidden_dim // n_heads)
    config = LlamaConfig(
        family=family, n_layers=2, hidden_dim=hidden_dim, n_heads=n_heads, n_kv_heads=2, head_dim=head_dim,
        ffn_dim=96, vocab_size=128, norm_eps=1e-5, rope_theta=10000.0, rope_dim=head_dim, context_len=512,
        tied_embeddings=True, qkv_bias=family == "qwen2", qk_norm=family == "qwen3", bos_token_id=1, eos_token_ids=(2,),
    )  # fmt: skip
    return replace(config, **fields)


def tiny_shapes(config):
    """Canonical name -> shape of every tensor, in the order of the layers."""
    hidden, ffn, vocab = config.hidden_dim, config.ffn_dim, config.vocab_size
    q, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for i in range(config.n_layers):
        layer = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, q),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
        if config.qkv_bias:
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if config.qk_norm:
            layer |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
        shapes |= {f"model.layers.{i}.{suffix}": shape for suffix, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def tiny_tensors(config, seed=0):
    """Random weights, canonical name -> float32 array.

    Matrices keep a row's size, Q and K enlarge it a little so that attention is not flat, and
    the head gives logits of standard deviation 4, so the greatest is clear of the next.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tiny_shapes(config).items():
        noise = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + np.float32(0.1) * noise
        elif name.endswith(".bias"):
            tensors[name] = np.float32(0.3) * noise
        else:
            gain = 4 if name in ("model.embed_tokens.weight", "lm_head.weight") else 1.5 if "q_proj" in name or "k_proj" in name else 1
            tensors[name] = np.float32(gain / shape[1] ** 0.5) * noise
    return tensors


def _storage(dtype):
    if dtype == "bf16":
        from ml_dtypes import bfloat16

        return bfloat16
    return {"f32": np.float32, "f16": np.float16}[dtype]


def round_to(tensors, dtype):
    """The float32 values that f32, f16 or bf16 storage keeps of ``tensors``."""
    return {name: w.astype(_storage(dtype)).astype(np.float32) for name, w in tensors.items()}


def hf_config(config, rope="top", rope_type_key="rope_type", **fields):
    """The ``config.json`` of a configuration, as a dict.

    Parameters
    ----------
    config : LlamaConfig
    rope : {"top", "parameters", "both", "none"}
        Where RoPE stands: ``rope_theta`` and ``rope_scaling``; ``rope_parameters``; both; nowhere.
    rope_type_key : {"rope_type", "type"}
    **fields
        Further or other fields; None removes one. (A mistral's ``sliding_window`` is null where it has no window.)
    """
    scaling = {}
    if config.rope_scaling != "none":
        scaling = {rope_type_key: config.rope_scaling, "factor": config.rope_factor}
    if config.rope_scaling == "llama3":
        scaling |= {
            "low_freq_factor": config.rope_low_freq_factor,
            "high_freq_factor": config.rope_high_freq_factor,
            "original_max_position_embeddings": config.rope_original_context_len,
        }
    eos = list(config.eos_token_ids)
    out = {
        "architectures": [f"{config.family.capitalize()}ForCausalLM"],
        "model_type": config.family,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_len,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }
    if config.head_dim * config.n_heads != config.hidden_dim or config.family == "qwen3":
        out["head_dim"] = config.head_dim
    if config.family in ("llama", "qwen3"):
        out["attention_bias"] = config.qkv_bias
    if config.sliding_window is not None:
        out["sliding_window"] = config.sliding_window
        if config.family in ("qwen2", "qwen3"):
            out["use_sliding_window"] = True
            if config.full_layers == tuple(range(len(config.full_layers))):
                out["max_window_layers"] = len(config.full_layers)
            else:
                out["layer_types"] = ["full_attention" if i in config.full_layers else "sliding_attention" for i in range(config.n_layers)]
    if rope in ("top", "both"):
        out |= {"rope_theta": config.rope_theta, "rope_scaling": scaling or None}
    if rope in ("parameters", "both"):
        out["rope_parameters"] = {rope_type_key: "default", "rope_theta": config.rope_theta, **scaling}
    out |= fields
    out = {key: value for key, value in out.items() if value is not None}
    if config.family == "mistral" and config.sliding_window is None:
        out.setdefault("sliding_window", None)
    return out


def write_hf(directory, config, tensors, dtype="f32", n_shards=1, generation=None, **spelling):
    """Write an HF directory (created); returns its Path.

    Parameters
    ----------
    dtype : {"f32", "f16", "bf16"}
    n_shards : int
        More than one writes shards and ``model.safetensors.index.json``.
    generation : dict, optional
        Becomes ``generation_config.json``.
    **spelling
        As of :func:`hf_config`.
    """
    from safetensors.numpy import save

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(config, **spelling), indent=1))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    def write(name, part):
        (directory / name).write_bytes(save({key: w.astype(_storage(dtype)) for key, w in part.items()}, {"format": "pt"}))

    if n_shards == 1:
        write("model.safetensors", tensors)
        return directory
    weight_map = {}
    for i in range(n_shards):
        shard = f"model-{i + 1:05d}-of-{n_shards:05d}.safetensors"
        part = dict(list(tensors.items())[i::n_shards])
        write(shard, part)
        weight_map |= dict.fromkeys(part, shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


# ggml type: (values a block, bytes a block, bytes at which a float16 scale or minimum lies).
K_QUANTS = {"q4_k": (256, 144, (0, 2)), "q5_k": (256, 176, (0, 2)), "q6_k": (256, 210, (208,))}


def random_quantised(qtype, rows, cols, rng):
    """Random stored blocks of any quantised type, uint8 [rows, row bytes].

    Every code occurs; the scales are finite and such that values are roughly within 0.2.
    """
    import gguf

    if qtype not in K_QUANTS:
        kind = gguf.GGMLQuantizationType[qtype.upper()]
        return gguf.quants.quantize(rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(0.1), kind).view(np.uint8)
    block_len, block_nbytes, half_at = K_QUANTS[qtype]
    blocks = rng.integers(0, 256, (rows * cols // block_len, block_nbytes), dtype=np.uint8)
    # Codes reach 15, 31 or +-32 and inner scales 63 or +-128; a minimum sits mid-range.
    largest = {"q4_k": 15 * 63, "q5_k": 31 * 63, "q6_k": 32 * 128}[qtype]
    scales = rng.uniform(0.1, 0.4, len(blocks)) / largest
    middle = {"q4_k": 7.5, "q5_k": 15.5, "q6_k": 0}[qtype]
    for at, values in zip(half_at, (scales, scales * middle)):
        blocks[:, at : at + 2] = values.astype("<f2")[:, None].view(np.uint8)
    return blocks.reshape(rows, -1)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name):
    """``model.layers.3.mlp.up_proj.weight`` -> ``blk.3.ffn_up.weight``."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def permute(w, n_heads):
    """Half-split Q or K rows -> the interleaved order of GGUF's ``llama``; also for biases."""
    return w.reshape(n_heads, 2, len(w) // n_heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute(w, n_heads):
    return w.reshape(n_heads, len(w) // n_heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def llama3_freq_factors(config):
    """Divisors of the rotary frequencies, float32 [rope_dim / 2], as a GGUF file stores them."""
    dim, factor, context = config.rope_dim, config.rope_factor, config.rope_original_context_len
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * np.pi * config.rope_theta ** (i / dim)
        if wavelength < context / high:
            out.append(1.0)
        elif wavelength > context / low:
            out.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def gguf_arch(config):
    """``general.architecture`` of a family: llama.cpp has none of its own for Mistral."""
    return "llama" if config.family == "mistral" else config.family


def gguf_metadata(config, arch=None):
    """Keys and values of a configuration, as llama.cpp's converter writes them."""
    arch = arch or gguf_arch(config)
    out = {
        "general.name": "tiny",
        f"{arch}.block_count": config.n_layers,
        f"{arch}.context_length": config.context_len,
        f"{arch}.embedding_length": config.hidden_dim,
        f"{arch}.feed_forward_length": config.ffn_dim,
        f"{arch}.attention.head_count": config.n_heads,
        f"{arch}.attention.head_count_kv": config.n_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_theta),
        f"{arch}.rope.dimension_count": config.rope_dim,
        f"{arch}.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
    }
    if config.head_dim * config.n_heads != config.hidden_dim:
        out |= {f"{arch}.attention.key_length": config.head_dim, f"{arch}.attention.value_length": config.head_dim}
    if config.sliding_window is not None:
        out[f"{arch}.attention.sliding_window"] = config.sliding_window
    if config.rope_scaling == "linear":
        out |= {f"{arch}.rope.scaling.type": "linear", f"{arch}.rope.scaling.factor": float(config.rope_factor)}
    for name, token_id in zip(("eos", "eot", "eom"), config.eos_token_ids):
        out[f"tokenizer.ggml.{name}_token_id"] = token_id
    return out


def write_gguf(path, config, tensors, types="f32", arch=None, metadata=None, extra=None, alignment=None, seed=0):
    """Write a GGUF file with the ``gguf`` package.

    Parameters
    ----------
    types : str or dict of str to str
        One type for all matrices, or a type by canonical name (others: f32). Vectors are
        always f32. K-quants, which gguf cannot make, hold random blocks of ``seed``.
    arch : str, optional
        ``general.architecture``; that of :func:`gguf_arch` by default. ``llama`` permutes Q and K.
    metadata : dict, optional
        Further or other keys; None removes one. str, bool, int (uint32), float (float32),
        NumPy scalars (their type) and lists are understood.
    extra : dict of str to array, optional
        Further tensors, by GGUF name, stored as they are.

    Returns
    -------
    dict of str to float32 array
        What each tensor of the file stands for, by canonical name, not permuted.
    """
    import gguf

    arch = arch or gguf_arch(config)
    writer = gguf.GGUFWriter(path, arch)
    if alignment:
        writer.add_custom_alignment(alignment)
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY", np.uint8: "UINT8", np.int8: "INT8",
             np.uint16: "UINT16", np.int16: "INT16", np.int32: "INT32", np.uint64: "UINT64", np.int64: "INT64", np.float64: "FLOAT64"}  # fmt: skip
    for key, value in (gguf_metadata(config, arch) | (metadata or {})).items():
        if value is not None:
            kind = gguf.GGUFValueType[kinds[type(value)]]
            writer.add_key_value(key, value.item() if isinstance(value, np.generic) else value, kind)

    rng = np.random.default_rng(seed)
    n_heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads} if arch == "llama" else {}
    meaning = {}
    for name, w in tensors.items():
        heads = n_heads.get(name.split(".")[-2])
        w = permute(w, heads) if heads else w
        qtype = "f32" if w.ndim == 1 else types if isinstance(types, str) else types.get(name, "f32")
        kind = gguf.GGMLQuantizationType[qtype.upper()]
        if qtype in K_QUANTS:
            stored = random_quantised(qtype, *w.shape, rng)
        else:
            stored = gguf.quants.quantize(w, kind)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(stored), raw_dtype=kind)
        back = np.asarray(gguf.quants.dequantize(stored, kind), np.float32).reshape(w.shape)
        meaning[name] = unpermute(back, heads) if heads else back
    extra = dict(extra or {})
    if config.rope_scaling == "llama3":
        extra.setdefault("rope_freqs.weight", llama3_freq_factors(config))
    elif config.rope_freq_factors is not None:
        extra.setdefault("rope_freqs.weight", np.array(config.rope_freq_factors, np.float32))
    for name, w in extra.items():
        writer.add_tensor(name, w)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meaning


# Name: (configuration, seed, spelling of config.json, tokens of the prompt, rows kept).
# Rotary wavelengths of head_dim 16 are 6, 20, 63, 199, 628, ... tokens: with an original context
# of 64, Llama-3 scaling keeps the first, blends two and divides the others.
_LLAMA3 = {"rope_scaling": "llama3", "rope_original_context_len": 64, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
_LONG_ROWS = (0, 1, 62, 63, 64, 65, 100, 127, 128, 158, 159)
# Around the edges of attention's chunks of 256, and where a window of 300 begins at one.
_WINDOW_ROWS = (0, 1, 255, 256, 299, 300, 301, 511, 512, 554, 555, 556, 598, 599)
GOLDEN_CASES = {
    "llama_gqa": (tiny_config(), 11, {}, 24, range(24)),
    "llama_untied": (tiny_config(tied_embeddings=False, n_kv_heads=4), 12, {}, 24, range(24)),
    # transformers insists on hidden_dim being a multiple of n_heads even so.
    "llama_head_dim": (tiny_config(hidden_dim=96, n_heads=3, n_kv_heads=1, head_dim=24), 13, {}, 24, range(24)),
    "llama_linear_4": (tiny_config(rope_scaling="linear", rope_factor=4.0), 14, {"rope_type_key": "type"}, 24, range(24)),
    "llama3_8": (tiny_config(rope_factor=8.0, **_LLAMA3), 15, {}, 24, range(24)),
    "llama3_8_long": (tiny_config(rope_factor=8.0, **_LLAMA3), 15, {}, 160, _LONG_ROWS),
    "llama3_32_long": (tiny_config(rope_factor=32.0, **_LLAMA3), 16, {"rope": "parameters"}, 160, _LONG_ROWS),
    "qwen2_untied": (tiny_config("qwen2", tied_embeddings=False, norm_eps=1e-6), 17, {}, 24, range(24)),
    "rope_parameters": (tiny_config(rope_theta=500000.0), 18, {"rope": "parameters"}, 24, range(24)),
    "mistral": (tiny_config("mistral", tied_embeddings=False, hidden_dim=96, n_heads=3, n_kv_heads=1, head_dim=24), 19, {}, 24, range(24)),
    "mistral_window_20": (tiny_config("mistral", sliding_window=20), 20, {}, 60, range(60)),
    "mistral_window_300": (tiny_config("mistral", sliding_window=300, context_len=1024), 21, {}, 600, _WINDOW_ROWS),
    "qwen3": (tiny_config("qwen3", head_dim=32, norm_eps=1e-6), 22, {}, 24, range(24)),
    "qwen3_window_20": (tiny_config("qwen3", n_layers=3, sliding_window=20, full_layers=(0,)), 23, {}, 60, range(60)),
    "qwen2_window_20": (tiny_config("qwen2", n_layers=3, sliding_window=20, full_layers=(1,)), 24, {}, 60, range(60)),
}


def golden_cases():
    """Models with the logits that transformers computed for them (float32, eager attention).

    Yields
    ------
    name : str
    config : LlamaConfig
    tensors : dict of str to float32 array
    tokens : int64 array [n]
    rows : int64 array [m]
        Positions whose logits are kept.
    logits : float32 array [m, vocab_size]
    """
    with np.load(GOLDEN) as golden:
        for name, (config, seed, _, _, _) in GOLDEN_CASES.items():
            yield name, config, tiny_tensors(config, seed), *(golden[f"{name}/{part}"] for part in ("tokens", "rows", "logits"))
