"""Tensors as they lie in a file, the model file that names them, and what must be there.

Both readers end in :func:`check_config` and :class:`ModelFile`, so the loader may trust names,
shapes and types. No weight is read on opening; :class:`FileBytes` reads those that are asked for.
"""

import io
import math
import os
import threading
from pathlib import Path

import numpy as np

from pagedkv.errors import BadDimError, FormatError, NullError
from pagedkv.formats import quants
from pagedkv.rope import rope_inv_freq


class Tensor:
    """One weight, quantised or not, in the bytes of the file.

    Attributes
    ----------
    name : str
        Canonical (Hugging Face) name.
    dtype : str
        A key of ``quants.BLOCKS``: ``"f32"``, ``"f16"``, ``"bf16"``, ``"q8_0"``, ...
    shape : tuple of int
        ``(n, k)``, rows of ``k`` values, or ``(n,)``.
    stored : FileBytes or uint8 array [nbytes]
        The stored bytes, row after row, each ``row_nbytes`` long; a slice of it is an array.
    row_order : int64 array [n] or None
        Row ``i`` of the tensor is stored row ``row_order[i]``; None: in stored order.
    """

    __slots__ = ("name", "dtype", "shape", "stored", "row_order")

    def __init__(self, name, dtype, shape, stored, row_order=None):
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.stored = stored
        self.row_order = row_order

    @property
    def raw(self):
        """All stored bytes, uint8 array [nbytes]; of a file: read anew each time, and the caller's own."""
        return self.stored[:]

    @property
    def row_nbytes(self):
        """Bytes of one stored row; of one value, where the tensor has one dimension."""
        return self.stored.size // self.shape[0]

    def float32(self, start=0, stop=None):
        """Rows ``start:stop`` as float32, exactly the values that the codes stand for.

        Parameters
        ----------
        start, stop : int
            As in a slice; all rows by default.

        Returns
        -------
        float32 array [stop - start, k] or [stop - start], new and C-contiguous
            ``row_order`` is applied.
        """
        n, k = self.shape if len(self.shape) == 2 else (self.shape[0], 1)
        start, stop, _ = slice(start, stop).indices(n)
        stop = max(start, stop)
        if self.row_order is None:
            raw = self.stored[start * self.row_nbytes : stop * self.row_nbytes]
            rows = quants.dequantize(raw, self.dtype, (stop - start, k))
        else:
            rows = quants.dequantize(self.raw, self.dtype, (n, k), self.row_order[start:stop])
        return rows.reshape(-1, *self.shape[1:])

    def __repr__(self):
        return f"Tensor({self.name!r}, {self.dtype!r}, {self.shape})"


class ModelFile:
    """An open model: its configuration and its tensors.

    Made by :func:`pagedkv.formats.open_model`. A context manager; :meth:`close` drops the
    tensors, and the file is closed with the last of them.

    Parameters
    ----------
    path : pathlib.Path
    config : LlamaConfig
    metadata : dict
        GGUF keys and values, or the parsed ``config.json``.
    tensors : dict of str to Tensor
        By canonical name. All that ``config`` needs must be there, and nothing else.

    Raises
    ------
    FormatError
        A tensor is missing, not part of such a model, of another shape, or a quantised vector.
    """

    def __init__(self, path, config, metadata, tensors):
        self.path = path
        self.config = config
        self.metadata = metadata
        shapes = tensor_shapes(config)
        for name, shape in shapes.items():
            if name not in tensors:
                raise FormatError(f"{path}: tensor {name!r} of shape {shape} is missing")
            if tensors[name].shape != shape:
                raise FormatError(f"{path}: tensor {name!r} has shape {tensors[name].shape}, the configuration says {shape}")
            if len(shape) == 1 and quants.BLOCKS[tensors[name].dtype][0] > 1:
                raise FormatError(f"{path}: tensor {name!r} is a vector of type {tensors[name].dtype}; f32, f16 and bf16 are read")
        for name in tensors:
            if name not in shapes:
                raise FormatError(f"{path}: tensor {name!r} is no part of a {config.family} model with this configuration")
        self._tensors = {name: tensors[name] for name in shapes}
        # After the shapes, which bound the number of frequencies.
        try:
            rope_inv_freq(config.rope_theta, config.rope_dim, config.rope_scaling, config.rope_factor,
                          config.rope_low_freq_factor, config.rope_high_freq_factor,
                          config.rope_original_context_len, config.rope_freq_factors)
        except BadDimError as error:
            raise FormatError(f"{path}: {error.message}") from None

    def names(self):
        """Canonical names, list of str, in the order of the layers."""
        return list(self._open())

    def tensor(self, name):
        """The :class:`Tensor` of this canonical name; KeyError where there is none."""
        return self._open()[name]

    def close(self):
        """Drop the tensors. May be called again; tensors already handed out stay valid."""
        self._tensors = None

    def _open(self):
        if self._tensors is None:
            raise NullError(f"{self.path} was closed")
        return self._tensors

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __repr__(self):
        return f"ModelFile({str(self.path)!r}, {self.config.family}, {'closed' if self._tensors is None else 'open'})"


# Suffix within a layer: the fields of the shape.
_LAYER = {
    "input_layernorm.weight": ("hidden_dim",),
    "self_attn.q_proj.weight": ("q_dim", "hidden_dim"),
    "self_attn.q_proj.bias": ("q_dim",),
    "self_attn.k_proj.weight": ("kv_dim", "hidden_dim"),
    "self_attn.k_proj.bias": ("kv_dim",),
    "self_attn.v_proj.weight": ("kv_dim", "hidden_dim"),
    "self_attn.v_proj.bias": ("kv_dim",),
    "self_attn.q_norm.weight": ("head_dim",),
    "self_attn.k_norm.weight": ("head_dim",),
    "self_attn.o_proj.weight": ("hidden_dim", "q_dim"),
    "post_attention_layernorm.weight": ("hidden_dim",),
    "mlp.gate_proj.weight": ("ffn_dim", "hidden_dim"),
    "mlp.up_proj.weight": ("ffn_dim", "hidden_dim"),
    "mlp.down_proj.weight": ("hidden_dim", "ffn_dim"),
}

_QK_NORMS = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def tensor_shapes(config):
    """Shape of every tensor that a model of this configuration has, by canonical name.

    Returns
    -------
    dict of str to tuple of int
        Matrices are ``(n, k)``: ``y[n] = sum_k w[n, k] x[k]``.
    """
    dims = {
        "hidden_dim": config.hidden_dim,
        "ffn_dim": config.ffn_dim,
        "head_dim": config.head_dim,
        "q_dim": config.n_heads * config.head_dim,
        "kv_dim": config.kv_dim,
    }
    shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_dim)}
    for layer in range(config.n_layers):
        for suffix, fields in _LAYER.items():
            if (config.qkv_bias or not suffix.endswith(".bias")) and (config.qk_norm or suffix not in _QK_NORMS):
                shapes[f"model.layers.{layer}.{suffix}"] = tuple(dims[field] for field in fields)
    shapes["model.norm.weight"] = (config.hidden_dim,)
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_dim)
    return shapes


# Of a Llama layer: two norms, four attention and three feed-forward matrices.
MIN_LAYER_TENSORS = 9


def check_config(path, config, n_tensors):
    """Refuse a configuration that no model in this file can have.

    Parameters
    ----------
    path : path
        For the message.
    config : LlamaConfig
    n_tensors : int
        Tensors in the file. It bounds ``n_layers``, before anything is built for each layer.

    Raises
    ------
    FormatError
    """

    def refuse(what):
        raise FormatError(f"{path}: {what}")

    for field in ("n_layers", "hidden_dim", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "context_len"):
        # 2**31 - 1: the kernels and block tables count in int32.
        if not 1 <= getattr(config, field) < 2**31:
            refuse(f"{field} is {getattr(config, field)}, outside [1, 2**31)")
    if config.n_layers * MIN_LAYER_TENSORS > n_tensors:
        refuse(f"{config.n_layers} layers need {config.n_layers * MIN_LAYER_TENSORS} tensors, the file has {n_tensors}")
    if config.n_heads % config.n_kv_heads:
        refuse(f"{config.n_heads} heads are no multiple of {config.n_kv_heads} KV heads")
    if config.head_dim % 2:
        refuse(f"head_dim is {config.head_dim}; rotary embedding needs an even one")
    if config.rope_dim % 2 or not 2 <= config.rope_dim <= config.head_dim:
        refuse(f"{config.rope_dim} rotary dimensions of head_dim {config.head_dim}: must be even and in [2, head_dim]")
    for field in ("norm_eps", "rope_theta", "rope_factor", "rope_low_freq_factor"):
        value = getattr(config, field)
        if not (value > 0 and math.isfinite(value)):
            refuse(f"{field} is {value}, not a positive number")
    if not config.rope_low_freq_factor < config.rope_high_freq_factor < math.inf:
        refuse(f"RoPE frequency factors are {config.rope_low_freq_factor} (low) and {config.rope_high_freq_factor} (high)")
    if not 1 <= config.rope_original_context_len < 2**31:
        refuse(f"rope_original_context_len is {config.rope_original_context_len}, outside [1, 2**31)")
    if config.sliding_window is not None and not 1 <= config.sliding_window < 2**31:
        refuse(f"sliding_window is {config.sliding_window}, outside [1, 2**31)")
    factors = config.rope_freq_factors
    if factors is not None:
        if len(factors) != config.rope_dim // 2:
            refuse(f"{len(factors)} RoPE frequency factors for {config.rope_dim} rotary dimensions")
        if not all(factor > 0 and math.isfinite(factor) for factor in factors):
            refuse("a RoPE frequency factor is not a positive number")
    bos_ids = () if config.bos_token_id is None else (config.bos_token_id,)
    for token_id in bos_ids + config.eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            refuse(f"begin or end token {token_id} is outside the vocabulary of {config.vocab_size}")


class _File(io.FileIO):
    """Closed with the last tensor, and no warning: there is no one time to close it."""

    # A finaliser in Python would be a place where Ctrl-C is looked at, and dropped.
    __del__ = io.FileIO.close


class FileBytes:
    """The bytes of a file, or a range of them, read when a slice is asked for.

    Read, not mapped: where another program shortens the file meanwhile, a mapped one would end the process (SIGBUS).

    Parameters
    ----------
    path : path

    Attributes
    ----------
    size : int

    Raises
    ------
    FormatError
        The file is empty or not a regular file; later, from a slice: it has become shorter.
    OSError
        It cannot be opened or read.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"abcdef"), file.flush()
    ...     data = FileBytes(file.name)
    ...     data.size, data[1:3].tobytes(), data.range(2, 6)[:3].tobytes()
    (6, b'bc', b'cde')
    """

    __slots__ = ("path", "size", "_begin", "_file", "_lock")

    def __init__(self, path):
        if not Path(path).is_file():
            if Path(path).exists():
                raise FormatError(f"{path} is not a regular file")
            raise FileNotFoundError(f"{path} does not exist")
        self._file = _File(path)
        self.path, self.size, self._begin = path, os.fstat(self._file.fileno()).st_size, 0
        self._lock = threading.Lock()  # the file has one position
        if self.size == 0:
            raise FormatError(f"{path} is empty")

    def range(self, begin, end):
        """The bytes from `begin` up to `end` as a FileBytes of their own; reads nothing."""
        part = FileBytes.__new__(FileBytes)
        part.path, part._file, part._lock = self.path, self._file, self._lock
        part._begin, part.size = self._begin + begin, end - begin
        return part

    def __getitem__(self, where):
        """A slice of step 1, uint8 array, new."""
        start, stop, _ = where.indices(self.size)
        out = np.empty(max(0, stop - start), np.uint8)
        begin, n_read = self._begin + start, 0
        with self._lock:
            self._file.seek(begin)
            while n_read < out.size:
                n = self._file.readinto(out[n_read:])
                if not n:
                    raise FormatError(f"{self.path}: ends before byte {begin + out.size}, though it was longer when it "
                                      "was opened")  # fmt: skip
                n_read += n
        return out
