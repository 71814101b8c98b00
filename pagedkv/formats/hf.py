"""Hugging Face directories: ``config.json`` and safetensors, one file or shards.

Own safetensors reader rather than the package's: ``safetensors.numpy`` knows no bfloat16 and
copies each tensor, while the format is a JSON header and plain bytes that can be read where they lie. It
checks what the package checks (format.md of safetensors: header within the file, no holes, no
overlap), and the package is the tests' oracle. Configuration fields: transformers'
LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config and modeling_rope_utils.
"""

import json
import warnings
from reprlib import repr as short  # a hostile value may be megabytes long

from pagedkv.config import LlamaConfig
from pagedkv.errors import FormatError
from pagedkv.formats import quants
from pagedkv.formats.tensor import FileBytes, ModelFile, Tensor, check_config

_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}

# The format's own limit (safetensors: MAX_HEADER_SIZE).
_MAX_HEADER_NBYTES = 100_000_000


def _unique(pairs):
    """A JSON object in which no key occurs twice."""
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def _parse_object(text, what):
    """A JSON object from str or bytes; FormatError for anything else."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        raise FormatError(f"{what} is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError too
        raise FormatError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{what} is not a JSON object")
    return value


# A file beside the weights: the largest tokenizer.json in use have some 40 MB.
_MOST_TEXT_NBYTES = 1 << 28


def read_bytes(path):
    """All of a small file; FormatError where it has more than 256 MiB, which nothing here needs."""
    nbytes = path.stat().st_size
    if nbytes > _MOST_TEXT_NBYTES:
        raise FormatError(f"{path} has {nbytes} bytes, at most {_MOST_TEXT_NBYTES} are read")
    return path.read_bytes()


def read_object(path):
    """The JSON object of a small file; FormatError for anything else."""
    return _parse_object(read_bytes(path), path)


def _is_count(value):
    return type(value) is int and value >= 0


def read_safetensors(path):
    """Map a safetensors file.

    Parameters
    ----------
    path : pathlib.Path

    Returns
    -------
    dict of str to Tensor
        Of which nothing is read yet.

    Raises
    ------
    FormatError
        The header passes the file, the tensors overlap or leave holes, a shape and its bytes
        disagree, or a type is none of f32, f16 and bf16.
    """

    def refuse(what):
        raise FormatError(f"{path}: {what}")

    data = FileBytes(path)
    if data.size < 8:
        refuse(f"{data.size} bytes are too few for a safetensors file")
    header_nbytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_nbytes > min(data.size - 8, _MAX_HEADER_NBYTES):
        refuse(f"a header of {header_nbytes} bytes does not fit (file: {data.size} bytes, limit: {_MAX_HEADER_NBYTES})")
    header = _parse_object(data[8 : 8 + header_nbytes].tobytes(), f"{path}: the header")
    header.pop("__metadata__", None)
    data = data.range(8 + header_nbytes, data.size)

    entries = []
    for name, entry in header.items():
        what = f"tensor {name[:80]!r}"
        if not isinstance(entry, dict):
            refuse(f"{what} is described by {short(entry)}")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not (isinstance(dtype, str) and dtype in _DTYPES):
            refuse(f"{what} has type {short(dtype)}; F32, F16 and BF16 are read")
        dtype = _DTYPES[dtype]
        if not (isinstance(shape, list) and all(map(_is_count, shape))):
            refuse(f"{what} has the shape {short(shape)}")
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_count, offsets))):
            refuse(f"{what} has the offsets {short(offsets)}")
        begin, end = offsets
        if not begin <= end <= data.size:
            refuse(f"{what} takes bytes {begin} to {end} of {data.size}")
        nbytes = quants.BLOCKS[dtype][1]
        for dim in shape:
            nbytes *= dim
            if nbytes > data.size:
                break  # a product of thousands of large numbers would take long
        if nbytes != end - begin:
            refuse(f"{what} of type {dtype} and shape {short(shape)} does not take the {end - begin} bytes it is given")
        entries.append((begin, end, name, dtype, tuple(shape)))
    entries.sort()
    covered = 0
    for begin, end, name, _, _ in entries:
        if begin != covered:
            refuse(f"tensor {name[:80]!r} begins at byte {begin}, where byte {covered} must follow: {'a hole' if begin > covered else 'an overlap'}")
        covered = end
    if covered != data.size:
        refuse(f"the tensors take {covered} of {data.size} bytes")
    return {name: Tensor(name, dtype, shape, data.range(begin, end)) for begin, end, name, dtype, shape in entries}


def _read_tensors(directory):
    """Tensors of ``model.safetensors``, else of the shards that its index names."""
    single = directory / "model.safetensors"
    if single.exists():
        return read_safetensors(single)
    index_path = directory / "model.safetensors.index.json"
    if not index_path.exists():
        pickles = sorted(p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        hint = f"; {pickles[0]} is a PyTorch pickle, which is not read: save the model as safetensors" if pickles else ""
        raise FormatError(f"{directory} has neither model.safetensors nor model.safetensors.index.json{hint}")
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FormatError(f"{index_path}: weight_map does not map names to file names")
    shards = {}
    for shard in sorted(set(weight_map.values())):
        # A plain name: what leads out of the directory is not opened. (A link may: caches use them.)
        if shard in ("", ".", "..") or any(mark in shard for mark in "/\\:\0"):
            raise FormatError(f"{index_path}: {shard[:80]!r} is not the name of a file in the directory")
        if not (directory / shard).exists():
            raise FormatError(f"{index_path}: the shard {shard!r} is not in the directory")
        shards[shard] = read_safetensors(directory / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise FormatError(f"{index_path}: tensor {name[:80]!r} is not in {shard!r}")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


class _Fields:
    """Typed access to a JSON object. A null counts as missing, as it does for transformers."""

    def __init__(self, path, fields):
        self.path = path
        self.fields = fields

    def get(self, key, default=None):
        value = self.fields.get(key)
        return default if value is None else value

    def typed(self, key, default, kinds, what):
        value = self.get(key, default)
        if value is None:
            raise FormatError(f"{self.path}: {key} is missing")
        if type(value) not in kinds:
            raise FormatError(f"{self.path}: {key} is {short(value)}, not {what}")
        return value

    def integer(self, key, default=None):
        return self.typed(key, default, (int,), "an integer")

    def number(self, key, default=None):
        value = self.typed(key, default, (int, float), "a number")
        try:
            return float(value)
        except OverflowError:
            raise FormatError(f"{self.path}: {key} does not fit a float64") from None

    def flag(self, key):
        return self.typed(key, False, (bool,), "true or false")


def _read_rope(fields):
    """RoPE part of the configuration, as a dict of LlamaConfig fields.

    Two spellings: ``rope_theta`` at top level and ``rope_scaling``, or all of it in
    ``rope_parameters`` (transformers 5). Both may be there if they agree.
    """
    path = fields.path

    def refuse(what):
        raise FormatError(f"{path}: {what}")

    top = {key: fields.get(key) for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")}
    merged = {}
    for source, part in (
        ("rope_parameters", fields.get("rope_parameters", {})),
        ("rope_scaling", fields.get("rope_scaling", {})),
        ("the top level", top),
    ):
        if not isinstance(part, dict):
            refuse(f"{source} is {short(part)}, not an object")
        for key, value in part.items():
            key = "rope_type" if key == "type" else key
            if isinstance(value, dict):
                refuse(f"{source} differs between kinds of layer, which is not built here")
            if value is not None and merged.setdefault(key, value) != value:
                refuse(f"{key} is {short(value)} in {source} but {short(merged[key])} before it")
    rope = _Fields(f"{path}: RoPE", merged)

    if rope.number("partial_rotary_factor", 1.0) != 1:
        refuse(f"partial_rotary_factor {rope.number('partial_rotary_factor')} is not built here")
    if rope.get("rope_theta") is None:
        # default_theta of transformers' RotaryEmbeddingConfigMixin, which no family here
        # changes; llama.cpp's load_hparams agrees.
        warnings.warn(f"{path}: rope_theta is missing; 10000 is used", stacklevel=5)
    kind = rope.typed("rope_type", "default", (str,), "a string")
    if kind not in ("default", "linear", "llama3"):
        refuse(f"RoPE type {short(kind)} is not built here; default, linear and llama3 are")
    if kind == "default" and rope.get("factor") is not None:
        refuse(f"a RoPE factor of {short(rope.get('factor'))} without a type")
    out = {"rope_theta": rope.number("rope_theta", 10000.0), "rope_scaling": "none" if kind == "default" else kind}
    if kind != "default":
        out["rope_factor"] = rope.number("factor")
    if kind == "llama3":
        out["rope_low_freq_factor"] = rope.number("low_freq_factor")
        out["rope_high_freq_factor"] = rope.number("high_freq_factor")
        out["rope_original_context_len"] = rope.integer("original_max_position_embeddings")
    return out


# Of MistralConfig, Qwen2Config and Qwen3Config, where the file says nothing; a null says that there is no window.
_DEFAULT_WINDOW = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


def _read_window(fields, family, n_layers):
    """``sliding_window`` and ``full_layers`` of LlamaConfig, as a dict.

    All layers of a Mistral model have the window. Of the Qwen families those have it that ``layer_types`` names, else
    those from ``max_window_layers`` on, and none unless ``use_sliding_window`` is true. Llama's have none.
    """

    def refuse(what):
        raise FormatError(f"{fields.path}: {what}")

    use = fields.get("use_sliding_window")
    in_use = fields.flag("use_sliding_window")
    window, n_full = None, 0
    if family != "llama" and fields.fields.get("sliding_window", _DEFAULT_WINDOW) is not None:
        window = fields.integer("sliding_window", _DEFAULT_WINDOW)
    if family in ("qwen2", "qwen3"):
        window = window if in_use else None
        n_full = fields.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
    elif use is not None and in_use != (window is not None):
        # transformers does not read the field for these families.
        has = "a" if window else "no"
        refuse(f"use_sliding_window is {short(use)}, but a {family} model with this sliding_window has {has} window")
    kinds = ["full_attention" if window is None or i < n_full else "sliding_attention" for i in range(n_layers)]
    given = fields.get("layer_types")
    if given is not None and given != kinds:
        what = f"layer_types is {short(given)}"
        names = ("full_attention", "sliding_attention")
        if not (isinstance(given, list) and len(given) == n_layers and all(kind in names for kind in given)):
            refuse(f"{what}; full_attention or sliding_attention for each of {n_layers} layers is read")
        if window is None or family == "mistral":
            refuse(f"{what}, but the layers of this {family} model have {'a' if window else 'no'} sliding window")
        kinds = given
    full_layers = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    return {} if len(full_layers) == n_layers else {"sliding_window": window, "full_layers": full_layers}


def _end_ids(fields):
    """``eos_token_id``, one or a list, as a list of int."""
    value = fields.get("eos_token_id", [])
    ids = value if isinstance(value, list) else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise FormatError(f"{fields.path}: eos_token_id is {short(value)}, not an integer or a list of them")
    return ids


def _read_config(fields, generation, tensors):
    """LlamaConfig from ``config.json``, ``generation_config.json`` and the tensors' names."""
    path = fields.path

    def refuse(what):
        raise FormatError(f"{path}: {what}")

    family = fields.get("model_type")
    if family not in ("llama", "mistral", "qwen2", "qwen3"):
        refuse(f"model_type {short(family)} is not read here; llama, mistral, qwen2 and qwen3 are")
    if fields.get("quantization_config") is not None:
        refuse("quantised weights (quantization_config) are not read from a directory; GGUF is for that")
    if fields.get("hidden_act", "silu") != "silu":
        refuse(f"hidden_act {short(fields.get('hidden_act'))} is not built here; silu is")
    if fields.flag("mlp_bias"):
        refuse("mlp_bias is not built here")

    hidden_dim = fields.integer("hidden_size")
    n_heads = fields.integer("num_attention_heads")
    if n_heads < 1:
        refuse(f"num_attention_heads is {n_heads}")
    default_head_dim = 128 if family == "qwen3" else hidden_dim // n_heads  # Qwen3Config's is a constant
    if fields.get("head_dim") is None and family != "qwen3" and hidden_dim % n_heads:
        refuse(f"hidden_size {hidden_dim} is no multiple of {n_heads} heads, and head_dim is missing")
    head_dim = fields.integer("head_dim", default_head_dim)
    # transformers ties where told to; a head in the file wins, as it does for llama.cpp.
    tied = "lm_head.weight" not in tensors
    if tied and not fields.flag("tie_word_embeddings"):
        refuse("tie_word_embeddings is not true, but the file has no lm_head.weight")
    n_layers = fields.integer("num_hidden_layers")
    end_ids = [*_end_ids(generation), *_end_ids(fields)]
    bos_ids = [source.integer("bos_token_id") for source in (fields, generation) if source.get("bos_token_id") is not None]
    return LlamaConfig(
        family=family,
        n_layers=n_layers,
        hidden_dim=hidden_dim,
        n_heads=n_heads,
        n_kv_heads=fields.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        ffn_dim=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),  # all four classes' default
        rope_dim=head_dim,
        context_len=fields.integer("max_position_embeddings"),
        tied_embeddings=tied,
        qkv_bias=family == "qwen2" or family in ("llama", "qwen3") and fields.flag("attention_bias"),
        qk_norm=family == "qwen3",
        bos_token_id=bos_ids[0] if bos_ids else None,
        eos_token_ids=tuple(dict.fromkeys(end_ids)),
        **_read_window(fields, family, min(n_layers, len(tensors))),  # check_config refuses more layers than tensors
        **_read_rope(fields),
    )


def open_hf(directory):
    """Open a Hugging Face directory; see :func:`pagedkv.formats.open_model`.

    Parameters
    ----------
    directory : pathlib.Path

    Returns
    -------
    ModelFile
    """
    path = directory / "config.json"
    if not path.is_file():
        raise FormatError(f"{directory} is not a model directory: it has no config.json")
    metadata = read_object(path)
    generation_path = directory / "generation_config.json"
    generation = read_object(generation_path) if generation_path.is_file() else {}
    tensors = _read_tensors(directory)
    # Old Llama checkpoints carry the frequencies, which follow from the configuration.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".rotary_emb.inv_freq")}
    config = _read_config(_Fields(path, metadata), _Fields(generation_path, generation), tensors)
    check_config(path, config, len(tensors))
    return ModelFile(directory, config, metadata, tensors)
