"""A Llama-family model: weights packed at load, and one primitive, step."""

import operator
import os

import numpy as np

from pagedkv import _core, hub
from pagedkv.errors import BadDimError, NullError, TokenError
from pagedkv.formats import open_model
from pagedkv.pool import BlockPool
from pagedkv.rope import rope_inv_freq
from pagedkv.sequence import Sequence
from pagedkv.tokenizer import Tokenizer


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


def _available_nbytes():
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 4 << 30


def _pad(n):
    """Rows of whole panels that hold `n` rows."""
    return -(-n // _core.PANEL) * _core.PANEL


def _packed(arena, *parts):
    """One packed matrix from row-wise parts."""
    packed = _core.PackedWeight(sum(part.shape[0] for part in parts), parts[0].shape[1], arena)
    row = 0
    for part in parts:
        packed._fill(part.float32(), row)
        row += part.shape[0]
    return packed


def _packed_pair(arena, gate, up):
    """Gate and up in turn, panel by panel, each padded to whole panels."""
    packed = _core.PackedWeight(2 * _pad(gate.shape[0]), gate.shape[1], arena)
    packed._fill(gate.float32(), 0, 0, 2)
    packed._fill(up.float32(), 0, 1, 2)
    return packed


def _arena(config):
    """Room for all packed weights, in the order in which :meth:`LlamaModel.from_file` takes it."""
    c, q_dim = config, config.n_heads * config.head_dim
    layer = [(q_dim + 2 * c.kv_dim, c.hidden_dim), (c.hidden_dim, q_dim), (2 * _pad(c.ffn_dim), c.hidden_dim),
             (c.hidden_dim, c.ffn_dim)]
    return _core.Arena(c.n_layers * layer + [(c.vocab_size, c.hidden_dim)] * (1 if c.tied_embeddings else 2))


class LlamaModel:
    """Llama or Qwen2 weights, ready to run. Made by :meth:`load`.

    A token's logits depend on the model and on that sequence's tokens and on nothing else, to the last
    bit: not on the other sequences of a step, chunks, block placement, sharing, threads or instruction
    set. Several Python threads may use one model; steps on one pool are serialised.

    Attributes
    ----------
    config : LlamaConfig

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

    def __init__(self, config, core, source):
        self.config = config
        self._core = core
        self._source = source
        self._tokenizer = None

    @classmethod
    def load(cls, path_or_name, weights="auto"):
        """Read a model.

        Parameters
        ----------
        path_or_name : str or os.PathLike
            A ``.gguf`` file, a directory with ``config.json`` and safetensors, or a known name
            (``"smollm2-135m"``), which is fetched once.
        weights : {"auto", "float32"}
            How weights are kept in memory. Both expand to float32 in this version.

        Raises
        ------
        FormatError
            The file is damaged, contradicts itself or is of a kind that is not read.
        ModelNotFound
            No such path or name.
        """
        if weights not in ("auto", "float32"):
            raise ValueError(f"weights must be 'auto' or 'float32', not {weights!r}")
        with open_model(hub.find_model(path_or_name)) as file:
            return cls.from_file(file)

    @classmethod
    def from_file(cls, file):
        """Build from an open :class:`pagedkv.formats` model file; the file may be closed after."""
        config = file.config

        def vector(name):
            return file.tensor(name).float32()

        arena = _arena(config)
        layers = []
        for i in range(config.n_layers):
            prefix = f"model.layers.{i}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            layers.append({
                "attn_norm": vector(prefix + "input_layernorm.weight"),
                "ffn_norm": vector(prefix + "post_attention_layernorm.weight"),
                "qkv_bias": np.concatenate([vector(f"{attention}{x}_proj.bias") for x in "qkv"])
                if config.qkv_bias else None,
                "qkv": _packed(arena, *(file.tensor(f"{attention}{x}_proj.weight") for x in "qkv")),
                "o": _packed(arena, file.tensor(attention + "o_proj.weight")),
                "gate_up": _packed_pair(arena, file.tensor(mlp + "gate_proj.weight"),
                                        file.tensor(mlp + "up_proj.weight")),
                "down": _packed(arena, file.tensor(mlp + "down_proj.weight")),
            })
        embedding = _packed(arena, file.tensor("model.embed_tokens.weight"))
        head = embedding if config.tied_embeddings else _packed(arena, file.tensor("lm_head.weight"))
        inv_freq = rope_inv_freq(config.rope_theta, config.rope_dim, config.rope_scaling, config.rope_factor,
                                 config.rope_low_freq_factor, config.rope_high_freq_factor,
                                 config.rope_original_context_len, config.rope_freq_factors)
        core = _core.ModelCore(config, inv_freq, layers, vector("model.norm.weight"), embedding, head)
        return cls(config, core, (file.path.resolve(), file.metadata))

    @property
    def tokenizer(self):
        """The file's :class:`Tokenizer`, built on first use."""
        if self._tokenizer is None:
            path, metadata = self._source
            self._tokenizer = (Tokenizer.from_directory(path) if path.is_dir()
                               else Tokenizer.from_gguf_metadata(metadata))
        return self._tokenizer

    def new_pool(self, n_blocks=None, n_tokens=None, block_size=16):
        """A pool whose blocks fit this model.

        Parameters
        ----------
        n_blocks : int, optional
        n_tokens : int, optional
            Blocks for this many tokens, in place of `n_blocks`. With neither: the model's context length,
            or less where half of the available memory holds less.
        block_size : int
            Tokens in a block.

        Returns
        -------
        BlockPool
        """
        config = self.config
        if n_blocks is not None and n_tokens is not None:
            raise ValueError("give n_blocks or n_tokens, not both")
        if n_blocks is None:
            if n_tokens is None:
                token_nbytes = 2 * 4 * config.n_layers * config.kv_dim
                n_tokens = max(block_size, min(config.context_len, _available_nbytes() // 2 // token_nbytes))
            if block_size < 1:
                raise BadDimError(f"block_size must be positive, not {block_size}")
            n_blocks = -(-operator.index(n_tokens) // block_size)
        return BlockPool(n_blocks, config.n_layers, config.kv_dim, block_size)

    def new_sequence(self, pool, max_tokens=None):
        """An empty :class:`Sequence` over `pool`; `max_tokens` defaults to the model's context length."""
        return Sequence(pool, self.config.context_len if max_tokens is None else max_tokens)

    def step(self, rows, all_logits=False, out=None):
        """Append tokens to sequences and return logits: the one primitive.

        Parameters
        ----------
        rows : list of (Sequence, tokens)
            Any number of sequences, each once; any number of tokens for each, at least one. Positions
            follow from the sequences' lengths.
        all_logits : bool
            Logits of every row, in order, instead of the last row of each sequence.
        out : numpy.ndarray, optional
            float32 array of the result's shape to write into.

        Returns
        -------
        numpy.ndarray
            float32 ``[len(rows), vocab_size]``, or ``[n_tokens_in_all, vocab_size]``.

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
        All or nothing: after an error no sequence and no block has changed. Ported from
        ``nx_f32_llm_forward_v4b`` (continuous batching: Yu et al. 2022).
        """
        rows = list(rows)
        return self._core.step([seq for seq, _ in rows], [_token_array(tokens) for _, tokens in rows],
                               "all" if all_logits else "last", out)

    def decode_step(self, token_ids, seqs, out=None):
        """One new token for each sequence; logits float32 ``[len(seqs), vocab_size]``. See :meth:`step`."""
        if seqs is None:
            raise NullError("the sequences are missing", (_core.Flv4Status.FLV4_ERR_NULL,))
        token_ids, seqs = _token_array(token_ids), list(seqs)
        if len(token_ids) != len(seqs):
            raise BadDimError(f"{len(token_ids)} tokens for {len(seqs)} sequences",
                              (_core.Flv4Status.FLV4_ERR_BAD_DIM,))
        return self._core.step(seqs, [token_ids[i:i + 1] for i in range(len(seqs))], "last", out)

    def prefill(self, tokens, seq, chunk=None, all_logits=False):
        """Append a prompt to one sequence.

        Parameters
        ----------
        tokens : list of int
        seq : Sequence
        chunk : int, optional
            Tokens a step, 512 by default. Chunks do not change a bit; Ctrl-C is seen between them.
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
        except BaseException:  # Ctrl-C between the chunks, too
            seq.truncate(length)
            raise
        return logits if all_logits else logits[0]

    def __repr__(self):
        c = self.config
        return (f"LlamaModel({c.family}, n_layers={c.n_layers}, hidden_dim={c.hidden_dim}, n_heads={c.n_heads}, "
                f"n_kv_heads={c.n_kv_heads}, vocab_size={c.vocab_size})")
