"""The model whose shapes are measured, and a thin one that is nearly all attention."""

import json
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import pagedkv as pk
from pagedkv import hub
from pagedkv.formats import open_model

DEFAULT_MODEL = "smollm2-135m"

# Types of the KV cache, and bytes of a value with its share of the scales.
KV_VALUE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "q8_0": 34 / 32}


@dataclass(frozen=True)
class Shapes:
    """The dimensions that fix what a step costs; defaults: SmolLM2-135M."""

    n_layers: int = 30
    hidden_dim: int = 576
    n_heads: int = 9
    n_kv_heads: int = 3
    head_dim: int = 64
    ffn_dim: int = 1536
    vocab_size: int = 49152

    @classmethod
    def of(cls, config):
        """From a LlamaConfig."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})

    @property
    def q_dim(self):
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self):
        return self.n_kv_heads * self.head_dim

    @property
    def matrices(self):
        """Name -> (n, k) of the matrices of one layer, as the step multiplies them."""
        return {
            "qkv": (self.q_dim + 2 * self.kv_dim, self.hidden_dim),
            "o": (self.hidden_dim, self.q_dim),
            "gate_up": (2 * self.ffn_dim, self.hidden_dim),
            "down": (self.hidden_dim, self.ffn_dim),
        }

    @property
    def layer_weights(self):
        """Weights in the matrices of all layers."""
        return self.n_layers * sum(n * k for n, k in self.matrices.values())

    @property
    def head_weights(self):
        return self.vocab_size * self.hidden_dim

    def kv_token_nbytes(self, dtype="float32"):
        """Bytes of K and V of one token in all layers."""
        return int(2 * KV_VALUE_NBYTES[dtype] * self.n_layers * self.kv_dim)

    def attention_operations(self, n_positions):
        """Operations of attention in all layers for rows that see `n_positions` positions together.

        A multiplication and an addition for each dimension of each query head, for K and for V.
        """
        return 4 * n_positions * self.q_dim * self.n_layers


def find_shapes(model):
    """Shapes of a model by path or name; those of the default without reading it."""
    if model is None:
        return Shapes()
    with open_model(hub.find_model(model)) as file:
        return Shapes.of(file.config)


def kv_dtypes(shapes, run):
    """The types that this build's pools hold, float32 first; the others are skipped by name."""
    found = []
    for dtype in KV_VALUE_NBYTES:
        try:
            pk.BlockPool(1, 1, shapes.kv_dim, dtype=dtype)
            found.append(dtype)
        except (pk.PagedKVError, ValueError, TypeError) as error:
            run.skip(f"KV {dtype}", str(error))
    return found


def suffix(dtype):
    """What a row's shape says of its KV type: nothing for float32."""
    return "" if dtype == "float32" else f" KV {dtype}"


def _safetensors(tensors):
    """The bytes of a safetensors file of float32 arrays."""
    header, data = {}, b""
    for name, array in tensors.items():
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": (len(data), len(data) + array.nbytes)}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


THIN_DIM = 32  # one panel


def load_attention_model(shapes, context_len):
    """A model with the attention of `shapes` and next to nothing else.

    The hidden layer, the feed-forward layer and the vocabulary are one panel wide, so a step of it costs
    attention, plus what any step costs. Random weights.
    """
    rng = np.random.default_rng(1)

    def random(*shape):
        return rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[-1] ** 0.5)

    tensors = {"model.embed_tokens.weight": random(THIN_DIM, THIN_DIM) * np.float32(THIN_DIM**0.5),
               "model.norm.weight": np.ones(THIN_DIM, np.float32)}  # fmt: skip
    for i in range(shapes.n_layers):
        at = f"model.layers.{i}."
        tensors |= {
            at + "input_layernorm.weight": np.ones(THIN_DIM, np.float32),
            at + "self_attn.q_proj.weight": random(shapes.q_dim, THIN_DIM),
            at + "self_attn.k_proj.weight": random(shapes.kv_dim, THIN_DIM),
            at + "self_attn.v_proj.weight": random(shapes.kv_dim, THIN_DIM),
            at + "self_attn.o_proj.weight": random(THIN_DIM, shapes.q_dim),
            at + "post_attention_layernorm.weight": np.ones(THIN_DIM, np.float32),
            at + "mlp.gate_proj.weight": random(THIN_DIM, THIN_DIM),
            at + "mlp.up_proj.weight": random(THIN_DIM, THIN_DIM),
            at + "mlp.down_proj.weight": random(THIN_DIM, THIN_DIM),
        }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "hidden_size": THIN_DIM, "intermediate_size": THIN_DIM, "vocab_size": THIN_DIM,
        "num_hidden_layers": shapes.n_layers, "num_attention_heads": shapes.n_heads,
        "num_key_value_heads": shapes.n_kv_heads, "head_dim": shapes.head_dim,
        "max_position_embeddings": context_len, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        (Path(folder) / "model.safetensors").write_bytes(_safetensors(tensors))
        return pk.LlamaModel.load(folder, weights="float32")
