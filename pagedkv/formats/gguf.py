"""GGUF, versions 2 and 3, little-endian: metadata and tensors of one file.

Own reader: the ``gguf`` package takes 2 s for a vocabulary of 49,152. Every offset, count and
length is compared with the file's size before it is used. Source of the format: ggml's
docs/gguf.md; of the keys: gguf-py's constants.py and llama.cpp's load_hparams.
"""

import struct
import warnings
from reprlib import repr as short  # a hostile value may be megabytes long

import numpy as np

from pagedkv.config import LlamaConfig
from pagedkv.errors import FormatError
from pagedkv.formats import quants
from pagedkv.formats.tensor import FileBytes, ModelFile, Tensor, check_config

# enum ggml_type (ggml.h): those read here, by number.
_READ_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0",
    12: "q4_k", 13: "q5_k", 14: "q6_k", 30: "bf16",
}  # fmt: skip
# And those with a name but no reader, for the message.
_OTHER_TYPES = {
    9: "q8_1", 10: "q2_k", 11: "q3_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s",
    20: "iq4_nl", 21: "iq3_s", 22: "iq2_s", 23: "iq4_xs", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64",
    29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
}  # fmt: skip

# enum gguf_metadata_value_type: little-endian layout of the fixed-size ones.
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "u1", 10: "u8", 11: "i8", 12: "f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Limits of the format (gguf.md): a key takes at most 2**16 - 1 bytes, a tensor name 64, and a
# tensor has at most 4 dimensions.
_MAX_KEY_NBYTES = 2**16 - 1
_MAX_NAME_NBYTES = 64
_MAX_DIMS = 4
# Limits of this reader. The largest vocabularies have 2**18 tokens; the keys read here are flat.
_MAX_ARRAY_LEN = 2**24
_MAX_ARRAY_DEPTH = 4

# Read at first of a file, of which the header is a small and unknown part; then twice as much, and so on.
_HEAD_NBYTES = 1 << 16

_U64 = struct.Struct("<Q")


class _Cursor:
    """A position in the file that never passes its end.

    ``data`` is the file's beginning, read as far as it was needed."""

    def __init__(self, path, file):
        self.path = path
        self.file = file
        self.size = file.size
        self.data = memoryview(b"")
        self.pos = 0

    def refuse(self, what):
        raise FormatError(f"{self.path}: {what}")

    def take(self, n, what):
        """Step over ``n`` bytes; returns where they begin."""
        begin = self.pos
        if n > self.size - begin:
            self.refuse(f"{what} at byte {begin} needs {n} bytes, the file ends after {self.size - begin}")
        self.pos = begin + n
        if self.pos > len(self.data):
            self.read_on(self.pos)
        return begin

    def read_on(self, n):
        """``data``, which has at least ``n`` bytes then, no more than the file."""
        self.data = memoryview(self.file[:max(n, 2 * len(self.data), _HEAD_NBYTES)])
        return self.data

    def u32(self, what):
        return int.from_bytes(self.data[self.take(4, what) : self.pos], "little")

    def u64(self, what):
        return int.from_bytes(self.data[self.take(8, what) : self.pos], "little")

    def string(self, what, max_nbytes=None):
        n = self.u64(f"length of {what}")
        if max_nbytes is not None and n > max_nbytes:
            self.refuse(f"{what} at byte {self.pos} takes {n} bytes, at most {max_nbytes} are allowed")
        begin = self.take(n, what)
        try:
            return str(self.data[begin : self.pos], "utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{what} at byte {begin} is not UTF-8")

    def strings(self, n, what):
        """``n`` strings as a list: the inner loop of opening a model, so without calls."""
        data, pos, end = self.data, self.pos, len(self.data)
        length_at = _U64.unpack_from
        out = []
        append = out.append
        try:
            for _ in range(n):
                begin = pos + 8
                if begin > end:
                    if begin > self.size:
                        self.refuse(f"element {len(out)} of {what} at byte {pos} passes the end of the file")
                    data = self.read_on(begin)
                    end = len(data)
                pos = begin + length_at(data, begin - 8)[0]
                if pos > end:
                    if pos > self.size:
                        self.refuse(f"element {len(out)} of {what} at byte {begin - 8} passes the end of the file")
                    data = self.read_on(pos)
                    end = len(data)
                append(str(data[begin:pos], "utf-8"))
        except UnicodeDecodeError:
            self.refuse(f"element {len(out)} of {what} at byte {begin} is not UTF-8")
        self.pos = pos
        return out

    def value(self, kind, what, depth=0):
        """A metadata value: int, float, bool, str, list (of str or lists) or NumPy array."""
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what, depth + 1)
        if kind not in _SCALARS:
            self.refuse(f"{what} has the unknown value type {kind} at byte {self.pos - 4}")
        return self.numbers(kind, 1, what)[0].item()

    def array(self, what, depth):
        if depth > _MAX_ARRAY_DEPTH:
            self.refuse(f"{what} at byte {self.pos} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        kind = self.u32(f"element type of {what}")
        n = self.u64(f"length of {what}")
        if n > _MAX_ARRAY_LEN:
            self.refuse(f"{what} at byte {self.pos - 8} has {n} elements, more than {_MAX_ARRAY_LEN}")
        if kind == _STRING:
            return self.strings(n, what)
        if kind == _ARRAY:
            return [self.array(what, depth + 1) for _ in range(n)]
        if kind not in _SCALARS:
            self.refuse(f"{what} has the unknown element type {kind} at byte {self.pos - 12}")
        return self.numbers(kind, n, what)

    def numbers(self, kind, n, what):
        """``n`` numbers, copied out of ``data``."""
        dtype = np.dtype("<" + _SCALARS[kind])
        begin = self.take(n * dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype, n, begin)
        if kind != _BOOL:
            return values.astype(dtype.newbyteorder("="))
        if (values > 1).any():
            self.refuse(f"{what} at byte {begin} is a bool with a value other than 0 and 1")
        return values.astype(bool)


def _read_header(path, file):
    """Metadata (dict) and tensors (dict of GGUF name to Tensor, no two sharing a byte)."""
    cursor = _Cursor(path, file)
    if bytes(cursor.read_on(4)[:4]) != b"GGUF":
        cursor.refuse("is not a GGUF file: it does not begin with 'GGUF'")
    cursor.take(4, "magic")
    version = cursor.u32("version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, 2, 3):
            cursor.refuse("is a big-endian GGUF file; only little-endian ones are read")
        cursor.refuse(f"is a GGUF file of version {version}; versions 2 and 3 are read")
    n_tensors = cursor.u64("tensor count")
    n_keys = cursor.u64("key count")
    # The least that an entry takes: a key of 1 byte, its type and 1 byte; a name of 1 byte,
    # one dimension, type and offset.
    for n, nbytes, what in ((n_keys, 8 + 1 + 4 + 1, "keys"), (n_tensors, 8 + 1 + 4 + 8 + 4 + 8, "tensors")):
        if n * nbytes > cursor.size - cursor.pos:
            cursor.refuse(f"{n} {what} do not fit into a file of {cursor.size} bytes")

    metadata = {}
    for i in range(n_keys):
        key = cursor.string(f"key {i}", _MAX_KEY_NBYTES)
        if not key or key in metadata:
            cursor.refuse(f"key {i} {'repeats ' + repr(key[:100]) if key else 'is empty'}")
        what = f"key {key[:100]!r}"
        metadata[key] = cursor.value(cursor.u32(f"type of {what}"), what)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        cursor.refuse(f"general.alignment is {short(alignment)}, not a positive multiple of 8")

    infos = {}
    for i in range(n_tensors):
        name = cursor.string(f"name of tensor {i}", _MAX_NAME_NBYTES)
        if not name or name in infos:
            cursor.refuse(f"tensor {i} {'repeats the name ' + repr(name) if name else 'has no name'}")
        n_dims = cursor.u32(f"dimension count of tensor {name!r}")
        if not 1 <= n_dims <= _MAX_DIMS:
            cursor.refuse(f"tensor {name!r} has {n_dims} dimensions, outside [1, {_MAX_DIMS}]")
        dims = [cursor.u64(f"dimension of tensor {name!r}") for _ in range(n_dims)]
        kind = cursor.u32(f"type of tensor {name!r}")
        offset = cursor.u64(f"offset of tensor {name!r}")
        infos[name] = (kind, tuple(reversed(dims)), offset)

    data_begin = cursor.pos + -cursor.pos % alignment
    placed = {}
    for name, (kind, shape, offset) in infos.items():
        if kind not in _READ_TYPES:
            known = f"type {_OTHER_TYPES[kind]} ({kind})" if kind in _OTHER_TYPES else f"the unknown type {kind}"
            cursor.refuse(f"tensor {name!r} at offset {offset} has {known}, which is not read here")
        dtype = _READ_TYPES[kind]
        what = f"tensor {name!r} of type {dtype} and shape {shape} at offset {offset}"
        block_len, block_nbytes = quants.BLOCKS[dtype]
        if shape[-1] % block_len:
            cursor.refuse(f"{what} has rows that are no whole number of blocks of {block_len}")
        nbytes = block_nbytes
        for dim in (*shape[:-1], shape[-1] // block_len):
            nbytes *= dim  # Python integers: a hostile product is large, not wrong
        if nbytes == 0:
            cursor.refuse(f"{what} is empty")
        if offset % alignment:
            cursor.refuse(f"{what} is not aligned to {alignment} bytes")
        begin = data_begin + offset
        if begin + nbytes > cursor.size:
            cursor.refuse(f"{what} needs {nbytes} bytes from byte {begin} on, the file has {cursor.size}")
        placed[name] = (dtype, shape, begin, begin + nbytes)
    by_begin = sorted(placed, key=lambda name: placed[name][2])
    for before, after in zip(by_begin, by_begin[1:]):
        if placed[before][3] > placed[after][2]:
            cursor.refuse(
                f"tensors {before!r} (bytes {placed[before][2]} to {placed[before][3]}) and "
                f"{after!r} (from byte {placed[after][2]} on) overlap"
            )
    return metadata, {name: Tensor(name, dtype, shape, file.range(begin, end)) for name, (dtype, shape, begin, end) in placed.items()}


_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _canonical(name):
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``; None for other names."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return _NAMES.get(name)


def _half_split_order(n_heads, head_dim):
    """Stored row of each row of Q or K, for the half-split (NeoX) RoPE.

    The ``llama`` architecture stores dimension pairs ``(i, i + head_dim / 2)`` of a head side
    by side, as rows ``2 i`` and ``2 i + 1`` (llama.cpp's interleaved RoPE).

    Returns
    -------
    int64 array [n_heads * head_dim]
    """
    stored = np.arange(n_heads * head_dim, dtype=np.int64).reshape(n_heads, head_dim)
    return np.concatenate([stored[:, 0::2], stored[:, 1::2]], axis=1).reshape(-1)


class _Keys:
    """Typed access to the metadata of one architecture, which records what was read."""

    def __init__(self, path, metadata, arch):
        self.path = path
        self.metadata = metadata
        self.prefix = arch + "."
        self.seen = set()

    def get(self, key, default=None):
        self.seen.add(self.prefix + key)
        return self.metadata.get(self.prefix + key, default)

    def integer(self, key, default=None):
        """An int, or an array of equal ints; FormatError where it is missing without default."""
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise FormatError(f"{self.path}: {self.prefix}{key} differs between layers, which is not read here")
            value = value[0].item()
        return self.checked(key, value, int, "an integer")

    def number(self, key, default=None):
        value = self.get(key, default)
        return self.checked(key, float(value) if type(value) is int else value, float, "a number")

    def checked(self, key, value, kind, what):
        if value is None:
            raise FormatError(f"{self.path}: key {self.prefix}{key} is missing")
        if type(value) is not kind:
            raise FormatError(f"{self.path}: key {self.prefix}{key} is {short(value)}, not {what}")
        return value

    def refuse_others(self):
        """Every other key of the architecture would change the model unless it says "no".

        Experts, sliding windows, soft caps, scales: what is not known to be harmless is refused.
        """
        for key, value in self.metadata.items():
            if not key.startswith(self.prefix) or key in self.seen:
                continue
            name = key[len(self.prefix) :]
            neutral = _NEUTRAL.get(name, 0)
            if neutral is not None and not (isinstance(value, (bool, int, float)) and value == neutral):
                raise FormatError(f"{self.path}: key {key[:100]!r} = {short(value)} asks for something that is not built here")


# The one value of a key that changes nothing; None: any value; not listed: 0 or False.
_NEUTRAL = {
    "tensor_data_layout": None,  # where the converter found the weights
    "rope.scaling.finetuned": None,
    "rope.scaling.original_context_length": None,  # yarn only
    "rope.scaling.attn_factor": 1,
    "attention.causal": True,
}


def _read_config(path, metadata, tensors):
    """LlamaConfig from the metadata and from which tensors exist; both as of _read_header."""

    def refuse(what):
        raise FormatError(f"{path}: {what}")

    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ("llama", "qwen2", "qwen3"):
        refuse(f"architecture {short(arch)} is not read here; llama, qwen2 and qwen3 are" if arch is not None else "general.architecture is missing")
    n_files = metadata.get("split.count", 1)
    if type(n_files) is not int or n_files not in (0, 1):
        refuse(f"is one of {short(n_files)} files of a split model; merge them first")
    keys = _Keys(path, metadata, arch)

    hidden_dim = keys.integer("embedding_length")
    n_heads = keys.integer("attention.head_count")
    if n_heads < 1:
        refuse(f"{n_heads} attention heads")
    head_dim = keys.get("attention.key_length")
    if head_dim is not None:
        head_dim = keys.integer("attention.key_length")
    elif hidden_dim % n_heads:
        refuse(f"embedding_length {hidden_dim} is no multiple of {n_heads} heads, and attention.key_length is missing")
    else:
        head_dim = hidden_dim // n_heads
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        refuse(f"attention.key_length is {head_dim} but attention.value_length {value_dim}; they must be equal here")
    rope_dim = keys.integer("rope.dimension_count", head_dim)
    if arch == "llama" and rope_dim != head_dim:
        # llama.cpp refuses it too: the stored order of partly rotated rows is not defined.
        refuse(f"{rope_dim} rotary dimensions of head_dim {head_dim}; llama rotates all")
    if "token_embd.weight" not in tensors:
        refuse("tensor 'token_embd.weight' is missing")
    vocab_size = keys.integer("vocab_size", tensors["token_embd.weight"].shape[0])
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if isinstance(tokens, list) and len(tokens) > vocab_size:
        refuse(f"{len(tokens)} tokens for a vocabulary of {vocab_size}")

    if keys.get("rope.freq_base") is None:
        # load_hparams sets 10000 for every architecture; so do transformers' classes.
        warnings.warn(f"{path}: {arch}.rope.freq_base is missing; 10000 is used", stacklevel=4)
    scaling = keys.get("rope.scaling.type", "linear")
    if not isinstance(scaling, str) or scaling not in ("none", "linear"):
        refuse(f"RoPE scaling {short(scaling)} is not built here; none and linear are")
    # 0 stands for "not given" in load_hparams, and scale_linear is the older name.
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    if scaling == "none" or factor == 0:
        factor = 1.0
    rope_freq_factors = None
    if "rope_freqs.weight" in tensors:
        if factor != 1:
            refuse(f"has rope_freqs.weight and a linear RoPE factor of {factor}; both together are not built here")
        freqs = tensors["rope_freqs.weight"]
        if freqs.dtype != "f32" or freqs.shape != (rope_dim // 2,):
            refuse(f"tensor 'rope_freqs.weight' is {freqs.dtype} {freqs.shape}, not f32 ({rope_dim // 2},)")
        rope_freq_factors = tuple(freqs.float32().tolist())

    end_ids = []
    for name in ("eos", "eot", "eom"):  # end of text, of turn, of message: generation stops on each
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            end_ids.append(token_id)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    for token_id in [*end_ids, *([] if bos_id is None else [bos_id])]:
        if type(token_id) is not int:
            refuse(f"begin or end token {short(token_id)} is not an integer")

    window = keys.integer("attention.sliding_window", 0)  # Mistral's files are of architecture llama
    if window and arch != "llama":
        refuse(f"key '{arch}.attention.sliding_window' = {window}: which layers have the window is not said, and it is "
               "not built here")  # fmt: skip

    config = LlamaConfig(
        family=arch,
        n_layers=keys.integer("block_count"),
        hidden_dim=hidden_dim,
        n_heads=n_heads,
        n_kv_heads=keys.integer("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        ffn_dim=keys.integer("feed_forward_length"),
        vocab_size=vocab_size,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        rope_dim=rope_dim,
        context_len=keys.integer("context_length"),
        rope_scaling="none" if factor == 1 else "linear",
        rope_factor=factor,
        rope_freq_factors=rope_freq_factors,
        tied_embeddings="output.weight" not in tensors,
        qkv_bias=arch == "qwen2" or "blk.0.attn_q.bias" in tensors,
        qk_norm=arch == "qwen3",
        sliding_window=window or None,
        bos_token_id=bos_id,
        eos_token_ids=tuple(dict.fromkeys(end_ids)),
    )
    keys.refuse_others()
    return config


def open_gguf(path):
    """Open a GGUF file; see :func:`pagedkv.formats.open_model`.

    Parameters
    ----------
    path : pathlib.Path

    Returns
    -------
    ModelFile
    """
    metadata, stored = _read_header(path, FileBytes(path))
    config = _read_config(path, metadata, stored)
    check_config(path, config, len(stored))
    tensors = {}
    for name, tensor in stored.items():
        if name == "rope_freqs.weight":
            continue
        tensor.name = _canonical(name)
        if tensor.name is None:
            raise FormatError(f"{path}: tensor {name!r} is no part of a {config.family} model")
        tensors[tensor.name] = tensor
    file = ModelFile(path, config, metadata, tensors)

    if config.family == "llama":
        for letter, n_heads in (("q", config.n_heads), ("k", config.n_kv_heads)):
            order = _half_split_order(n_heads, config.head_dim)
            order.flags.writeable = False  # one array for all layers
            for name in file.names():
                if f".{letter}_proj." in name:
                    file.tensor(name).row_order = order
    return file
