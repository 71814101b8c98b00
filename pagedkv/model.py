"""A Llama-family model: weights packed at load, and one primitive, step."""

import dataclasses
import hashlib
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pagedkv import _core, hub
from pagedkv.config import LlamaConfig
from pagedkv.errors import BadDimError, FormatError, NullError, TokenError
from pagedkv.formats import open_model
from pagedkv.pool import BlockPool
from pagedkv.rope import rope_inv_freq
from pagedkv.sequence import Sequence
from pagedkv.tokenizer import Tokenizer


# Part of a model's fingerprint: to be counted up when a change to the canonical order changes bits.
_ARITHMETIC = 1

# Of a weight, read at once: a multiple of 4096, and little enough to stay in cache until it is packed or summed.
_PIECE_NBYTES = 1 << 20


def _token_array(tokens):
    """Token ids as int64 [n]. Range is checked by the step, against the vocabulary."""
    if tokens is None:
        raise NullError("the tokens are missing", (_core.Flv4Status.FLV4_ERR_NULL,))
    if isinstance(tokens, str):
        raise TypeError("tokens are ids, not text: encode it first, for example with model.tokenizer.encode(text)")
    array = np.asarray(tokens)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)
    if array.ndim != 1:
        raise BadDimError(f"tokens are a flat list of ids, not an array of {array.ndim} dimensions",
                          (_core.Flv4Status.FLV4_ERR_BAD_DIM,))
    # A list that mixes ids below and above 2**63 becomes float64 or object.
    wide = array.dtype.kind in "Of" and array is not tokens and all(type(token) is int for token in tokens)
    if wide or (array.dtype == np.uint64 and array.max() >= 2**63):
        raise TokenError("a token id does not fit 64 bits", (_core.Flv4Status.FLV4_ERR_TOKEN,))
    if array.dtype.kind not in "iu":
        raise TypeError(f"token ids are integers, not {array.dtype}")
    return np.ascontiguousarray(array, np.int64)


def _lengths(seqs):
    return [len(seq) if isinstance(seq, Sequence) else None for seq in seqs]


def _cut_back(seqs, lengths):
    """Take back what a step appended."""
    for seq, length in zip(seqs, lengths):
        if length is not None and len(seq) > length:
            seq.truncate(length)


def _read_int(path):
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _available_nbytes():
    """Bytes that this process may still take: what the system says, page cache included, within the cgroup's limit."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):  # not Linux
        try:
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        except (AttributeError, ValueError, OSError):
            available = 4 << 30
    limit, used = _read_int("/sys/fs/cgroup/memory.max"), _read_int("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def _n_panels(n):
    return -(-n // _core.PANEL)


class _Matrix:
    """A matrix to be: parts of a file, each in panels of its own, one part after the other or panel by panel in turn.

    Parameters
    ----------
    parts : list of Tensor
        ``[n_i, k]``. Several parts are padded to whole panels each.
    expand : bool
        Keep float32 values instead of the parts' own types.
    in_turn : bool
        Panel 0 of every part, then panel 1 of every part, ...; the parts have equally many.
    """

    def __init__(self, parts, expand, in_turn):
        self.parts, self.expand = parts, expand
        self.k = parts[0].shape[1]
        counts = [_n_panels(part.shape[0]) for part in parts]
        self.n = parts[0].shape[0] if len(parts) == 1 else sum(counts) * _core.PANEL
        types = [_core.DTYPES["f32" if expand else part.dtype] for part in parts]
        if in_turn:
            self.dtypes = types * counts[0]
            self.first, self.step = list(range(len(parts))), len(parts)
        else:
            self.dtypes = [dtype for dtype, count in zip(types, counts) for _ in range(count)]
            self.first, self.step = [sum(counts[:i]) for i in range(len(parts))], 1

    @property
    def nbytes(self):
        return sum(_core.packed_nbytes(dtype, _core.PANEL, self.k) for dtype in self.dtypes)

    @property
    def is_quantised(self):
        return not self.expand and any(part.dtype not in ("f32", "f16", "bf16") for part in self.parts)

    def pack(self, arena):
        packed = _core.PackedWeight(self.n, self.k, self.dtypes, arena)
        for part, first in zip(self.parts, self.first):
            n = part.shape[0]
            if self.expand or part.row_order is not None:
                raw = part.float32().reshape(-1).view(np.uint8) if self.expand else part.raw
                packed._fill(raw, n, None if self.expand else part.row_order, first, self.step)
                continue
            n_rows = max(1, _PIECE_NBYTES // part.row_nbytes // _core.PANEL) * _core.PANEL  # of whole panels
            for begin in range(0, n, n_rows):
                raw = part.stored[begin * part.row_nbytes:(begin + n_rows) * part.row_nbytes]
                packed._fill(raw, min(n_rows, n - begin), None, first + self.step * (begin // _core.PANEL), self.step)
        return packed


class _Origin:
    """Where a model's weights came from: what its fingerprint is made of, when somebody asks for it.

    The tensors keep the file open, whatever becomes of its name. They are the weights that were loaded unless
    somebody writes into the file, which its size and time of change show."""

    def __init__(self, file, compute):
        self.config, self.compute = file.config, compute
        self.tensors = [file.tensor(name) for name in file.names()]
        self.stamps = {path: _stamp(path) for path in
                       (sorted(file.path.glob("*.safetensors")) if file.path.is_dir() else [file.path])}  # fmt: skip

    def check(self):
        for path, stamp in self.stamps.items():
            now = _stamp(path)
            # Another file of that name, or none: the one that was loaded is as it was.
            if now is not None and stamp is not None and now[0] == stamp[0] and now != stamp:
                raise FormatError(f"{path} was written to after the model was loaded from it, so the model cannot be told "
                                  "from others by it any more; load it again")  # fmt: skip

    def fingerprint(self):
        """See :attr:`LlamaModel.fingerprint`."""
        self.check()
        config = self.config
        # Fields at their default are left out, so that a later field does not change the models that lack it.
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)
                  if f.name not in ("context_len", "bos_token_id", "eos_token_ids")
                  and getattr(config, f.name) != f.default}  # fmt: skip
        digest = hashlib.sha256(repr((_ARITHMETIC, self.compute, sorted(fields.items()))).encode())
        for tensor in self.tensors:
            stored = tensor.stored
            digest.update(repr((tensor.name, tensor.dtype, tensor.shape, tensor.row_order is None)).encode())
            digest.update(stored[:4096].tobytes() + stored[-4096:].tobytes())
            # Sums modulo 2**64 of 512 columns: all bytes take part, at the memory's speed.
            sums, n_whole = np.zeros(512, np.uint64), stored.size // 4096 * 4096
            for begin in range(0, n_whole, _PIECE_NBYTES):
                sums += stored[begin:min(begin + _PIECE_NBYTES, n_whole)].view(np.uint64).reshape(-1, 512).sum(0)
            digest.update(sums.tobytes())
        self.check()
        return f"{config.family}-{config.n_layers}x{config.hidden_dim}-{self.compute}-{digest.hexdigest()[:32]}"


def _stamp(path):
    """Which file is there and when it was changed; None where there is none."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return (stat.st_dev, stat.st_ino), stat.st_size, stat.st_mtime_ns


def kv_token_nbytes(config, dtype):
    """Bytes of one token's K and V in all layers; :class:`BadDimError` where a pool cannot hold them as `dtype`."""
    chain = (_core.PkvStatus.PKV_ERR_BAD_DIM,)
    if dtype not in _core.KV_DTYPES:
        raise BadDimError(f"a pool holds {', '.join(_core.KV_DTYPES)}, not {dtype!r}", chain)
    group = _core.kv_group(dtype)
    if config.head_dim % group:
        raise BadDimError(f"{dtype} has a scale for each {group} values, which do not divide head_dim "
                          f"{config.head_dim}", chain)
    return 2 * config.n_layers * _core.kv_row_nbytes(dtype, config.kv_dim)


class LlamaModel:
    """Llama, Mistral, Qwen2 or Qwen3 weights, ready to run. Made by :meth:`load`.

    A token's logits depend on the model and on that sequence's tokens and on nothing else, to the last
    bit: not on the other sequences of a step, chunks, block placement, sharing, threads or instruction
    set. Several Python threads may use one model; steps on one pool are serialised.

    Attributes
    ----------
    config : LlamaConfig
    fingerprint : str
        Names the model by what its K, V and logits depend on, the same in each process: the configuration (not
        ``context_len`` or the begin and end tokens), `compute`, this library's order of sums, and the file's tensors,
        each by name, type, shape and sums over all its bytes. The sums find any one change and any honest difference;
        they are no proof against forgery. Made on first use, for which the
        file stays mapped; :class:`FormatError` where it was written to since it was loaded. Equal for
        both kinds of `weights`; another for the same weights in another type or format.

    Examples
    --------
    >>> import pagedkv as pk
    >>> model = pk.LlamaModel.load("smollm2-135m")       # doctest: +SKIP
    >>> pool = model.new_pool(n_tokens=1024)             # doctest: +SKIP
    >>> seq = model.new_sequence(pool)                   # doctest: +SKIP
    >>> ids = model.tokenizer.encode("The capital of France is")   # doctest: +SKIP
    >>> model.tokenizer.decode([model.prefill(ids, seq).argmax()])   # doctest: +SKIP
    ' Paris'
    """

    def __init__(self, config: LlamaConfig, core: _core.ModelCore, source: Any, origin: Any) -> None:
        self.config: LlamaConfig = config
        self._origin = origin
        self._fingerprint = None
        self._core = core
        self._source = source
        self._tokenizer = None

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str], weights: str = "auto", compute: str = "float32") -> Self:
        """Read a model.

        Parameters
        ----------
        path_or_name : str or os.PathLike
            A ``.gguf`` file, a directory with ``config.json`` and safetensors, or a known name
            (``"smollm2-135m"``), which is fetched once.
        weights : {"auto", "float32"}
            How weights are kept in memory: as the file has them (quantised ones stay so, and stand for exactly
            the float32 values that the format defines), or all expanded to float32. The logits are the same.
        compute : {"float32", "int8"}
            What a quantised weight meets. With ``"int8"`` each row's activations are quantised too, in groups of 32,
            by a rule that sees this row only: faster, at a small cost in quality (docs/performance.md). The logits
            are not those of float32; among themselves they keep the promise, to the last bit. Matrices that the
            file keeps in f32, f16 or bf16, norms, rotary positions and attention stay in float32.

        Raises
        ------
        ValueError
            ``compute="int8"`` with ``weights="float32"``, or for a file without a quantised matrix.
        FormatError
            The file is damaged, contradicts itself or is of a kind that is not read.
        ModelNotFound
            No such path or name.
        """
        if weights not in ("auto", "float32"):
            raise ValueError(f"weights must be 'auto' or 'float32', not {weights!r}")
        if compute not in ("float32", "int8"):
            raise ValueError(f"compute must be 'float32' or 'int8', not {compute!r}")
        if compute == "int8" and weights == "float32":
            raise ValueError("compute='int8' multiplies the codes of quantised weights, and weights='float32' expands "
                             "them; leave weights at 'auto'")
        with open_model(hub.find_model(path_or_name)) as file:
            return cls.from_file(file, weights, compute)

    @classmethod
    def from_file(cls, file: Any, weights: str = "auto", compute: str = "float32") -> Self:
        """Build from an open :class:`pagedkv.formats` model file; the file may be closed after."""
        config = file.config
        origin = _Origin(file, compute)  # before anything is read

        def vector(name):
            return file.tensor(name).float32()

        def matrix(*names, in_turn=False):
            return _Matrix([file.tensor(name) for name in names], weights == "float32", in_turn)

        def bias(prefix):
            parts = [vector(f"{prefix}{x}_proj.bias") for x in "qkv"]
            return np.concatenate([np.pad(part, (0, -len(part) % _core.PANEL)) for part in parts])

        layers = []
        for i in range(config.n_layers):
            prefix = f"model.layers.{i}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            layers.append({
                "attn_norm": vector(prefix + "input_layernorm.weight"),
                "ffn_norm": vector(prefix + "post_attention_layernorm.weight"),
                "qkv_bias": bias(attention) if config.qkv_bias else None,
                "q_norm": vector(attention + "q_norm.weight") if config.qk_norm else None,
                "k_norm": vector(attention + "k_norm.weight") if config.qk_norm else None,
                "window": config.window(i),
                "qkv": matrix(*(f"{attention}{x}_proj.weight" for x in "qkv")),
                "o": matrix(attention + "o_proj.weight"),
                "gate_up": matrix(mlp + "gate_proj.weight", mlp + "up_proj.weight", in_turn=True),
                "down": matrix(mlp + "down_proj.weight"),
            })
        embedding = matrix("model.embed_tokens.weight")
        head = embedding if config.tied_embeddings else matrix("lm_head.weight")
        in_order = [layer[name] for layer in layers for name in ("qkv", "o", "gate_up", "down")]
        if compute == "int8" and not any(each.is_quantised for each in [*in_order, head]):
            types = ", ".join(sorted({part.dtype for each in [*in_order, head] for part in each.parts}))
            raise ValueError(f"compute='int8' needs quantised weights, and the matrices of {file.path.name} are {types}")
        in_order += [embedding] if head is embedding else [embedding, head]
        arena = _core.Arena(sum(each.nbytes for each in in_order))
        packed = {each: each.pack(arena) for each in in_order}
        layers = [{name: packed[value] if isinstance(value, _Matrix) else value
                   for name, value in layer.items()} for layer in layers]
        embedding, head = packed[embedding], packed[head]
        inv_freq = rope_inv_freq(config.rope_theta, config.rope_dim, config.rope_scaling, config.rope_factor,
                                 config.rope_low_freq_factor, config.rope_high_freq_factor,
                                 config.rope_original_context_len, config.rope_freq_factors)
        core = _core.ModelCore(config, inv_freq, layers, vector("model.norm.weight"), embedding, head,
                               compute == "int8")
        return cls(config, core, (file.path.resolve(), file.metadata), origin)

    @property
    def fingerprint(self) -> str:
        # No lock, which a fork could leave locked: of two threads at once, both come to the same text.
        origin = self._origin
        if origin is not None:
            self._fingerprint = origin.fingerprint()
            self._origin = None  # and with it the mapped file
        return self._fingerprint

    @property
    def compute(self) -> str:
        """``"float32"`` or ``"int8"``: what a quantised weight meets. See :meth:`load`."""
        return self._core.compute

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the packed weights in memory: what a step reads, an untied embedding aside."""
        return self._core.weight_nbytes

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's :class:`Tokenizer`, built on first use."""
        if self._tokenizer is None:
            path, metadata = self._source
            self._tokenizer = (Tokenizer.from_directory(path) if path.is_dir()
                               else Tokenizer.from_gguf_metadata(metadata, path))
        return self._tokenizer

    def new_pool(self, n_blocks: int | None = None, n_tokens: int | None = None, block_size: int = 16,
                 dtype: str = "float32", n_seqs: int = 1) -> BlockPool:
        """A pool whose blocks fit this model.

        Parameters
        ----------
        n_blocks : int, optional
        n_tokens : int, optional
            Blocks for this many tokens, in place of `n_blocks`. With neither: the model's context length for
            `n_seqs` sequences, or less where half of the available memory holds less.
        block_size : int
            Tokens in a block.
        dtype : str
            How K and V are stored, see :class:`BlockPool`: ``"float32"``, ``"float16"``, ``"bfloat16"`` or
            ``"q8_0"``.
        n_seqs : int

        Returns
        -------
        BlockPool

        Raises
        ------
        BadDimError
            A type unknown, or ``"q8_0"`` where head_dim is not a multiple of 32.
        """
        config = self.config
        token_nbytes = kv_token_nbytes(config, dtype)
        if n_blocks is not None and n_tokens is not None:
            raise ValueError("give n_blocks or n_tokens, not both")
        if n_blocks is None:
            if n_tokens is None:
                n_tokens = max(block_size, min(n_seqs * config.context_len, _available_nbytes() // 2 // token_nbytes))
            if block_size < 1:
                raise BadDimError(f"block_size must be positive, not {block_size}")
            n_blocks = -(-operator.index(n_tokens) // block_size)
        return BlockPool(n_blocks, config.n_layers, config.kv_dim, block_size, dtype)

    def new_sequence(self, pool: BlockPool, max_tokens: int | None = None) -> Sequence:
        """An empty :class:`Sequence` over `pool`; `max_tokens` defaults to the model's context length."""
        return Sequence(pool, self.config.context_len if max_tokens is None else max_tokens)

    def step(self, rows: Iterable[tuple[Sequence, npt.ArrayLike]], all_logits: bool = False,
             out: npt.NDArray[np.float32] | None = None, n_logits: list[int] | None = None) -> npt.NDArray[np.float32]:
        """Append tokens to sequences and return logits: the one primitive.

        Parameters
        ----------
        rows : list of (Sequence, tokens)
            Any number of sequences, each once; any number of tokens for each, at least one. Positions
            follow from the sequences' lengths.
        all_logits : bool
            Logits of every row, in order, instead of the last row of each sequence.
        out : numpy.ndarray, optional
            float32 array of the result's shape to write into. After Ctrl-C some of it may be written.
        n_logits : list of int, optional
            Logits of so many last rows of each sequence, none for 0, in order. A row without costs no head.

        Returns
        -------
        numpy.ndarray
            float32 ``[len(rows), vocab_size]``, ``[n_tokens_in_all, vocab_size]`` or ``[sum(n_logits), vocab_size]``.

        Raises
        ------
        TokenError
            An id outside ``[0, vocab_size)``.
        PoolExhausted
            The pool lacks blocks for the whole batch; the message says how many.
        BoundsError, BadDimError, NullError
            A full table; no rows or tokens, one sequence twice, a pool of another shape; a freed sequence.

        Notes
        -----
        All or nothing: after an error no sequence and no block has changed. Called from the main thread, a step that
        takes longer than a tenth of a second ends soon after Ctrl-C, and its ``KeyboardInterrupt`` is such an error;
        where another handler of SIGINT returns, the step is computed anew. Ported from ``nx_f32_llm_forward_v4b``
        (continuous batching: Yu et al. 2022).
        """
        rows = list(rows)
        logits_of = n_logits if n_logits is not None else "all" if all_logits else "last"
        seqs, tokens = [seq for seq, _ in rows], [_token_array(tokens) for _, tokens in rows]
        lengths = _lengths(seqs)
        try:
            logits = self._core.step(seqs, tokens, logits_of, out)
            return logits
        except BaseException:  # Ctrl-C that came while it computed is raised as it returns
            _cut_back(seqs, lengths)
            raise

    def decode_step(self, token_ids: npt.ArrayLike, seqs: Iterable[Sequence],
                    out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """One new token for each sequence; logits float32 ``[len(seqs), vocab_size]``. See :meth:`step`."""
        if seqs is None:
            raise NullError("the sequences are missing", (_core.Flv4Status.FLV4_ERR_NULL,))
        token_ids, seqs = _token_array(token_ids), list(seqs)
        if len(token_ids) != len(seqs):
            raise BadDimError(f"{len(token_ids)} tokens for {len(seqs)} sequences",
                              (_core.Flv4Status.FLV4_ERR_BAD_DIM,))
        tokens, lengths = [token_ids[i:i + 1] for i in range(len(seqs))], _lengths(seqs)
        try:
            logits = self._core.step(seqs, tokens, "last", out)
            return logits
        except BaseException:  # as in step
            _cut_back(seqs, lengths)
            raise

    def prefill(self, tokens: npt.ArrayLike, seq: Sequence, chunk: int | None = None,
                all_logits: bool = False) -> npt.NDArray[np.float32]:
        """Append a prompt to one sequence.

        Parameters
        ----------
        tokens : list of int
        seq : Sequence
        chunk : int, optional
            Tokens a step, 512 by default. Chunks do not change a bit.
        all_logits : bool
            Logits of every token instead of the last.

        Returns
        -------
        numpy.ndarray
            float32 ``[vocab_size]``, or ``[n, vocab_size]``.

        Raises
        ------
        As :meth:`step`; everything but memory is checked before the first chunk. After any error, Ctrl-C too, the
        sequence has the rows it had before (a last block that it shared may have become its own).
        """
        tokens = _token_array(tokens)
        if chunk is None:
            chunk = _core.STEP_ROWS
        elif chunk < 1:
            raise BadDimError(f"chunk must be positive, not {chunk}", (_core.Flv4Status.FLV4_ERR_BAD_DIM,))
        self._core.check(seq, tokens)
        length = len(seq)
        logits = np.empty((len(tokens) if all_logits else 1, self.config.vocab_size), np.float32)
        try:
            for i in range(0, len(tokens), chunk):
                part = tokens[i:i + chunk]
                if all_logits:
                    self._core.step([seq], [part], "all", logits[i:i + chunk])
                elif i + chunk >= len(tokens):
                    self._core.step([seq], [part], "last", logits)
                else:
                    self._core.step([seq], [part], "none", None)
            return logits if all_logits else logits[0]
        except BaseException:  # Ctrl-C, too
            seq.truncate(length)
            raise

    def __reduce__(self):
        raise TypeError("a LlamaModel cannot be pickled or copied: its weights are memory of this process; in another "
                        f"process call LlamaModel.load({str(self._source[0])!r})")

    def __repr__(self) -> str:
        c = self.config
        return (f"LlamaModel({c.family}, n_layers={c.n_layers}, hidden_dim={c.hidden_dim}, n_heads={c.n_heads}, "
                f"n_kv_heads={c.n_kv_heads}, vocab_size={c.vocab_size})")
