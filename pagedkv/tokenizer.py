"""Text to token ids and back, for GGUF metadata and Hugging Face directories.

The `tokenizers` library does the encoding. Detokenisation is here: it works on bytes, so one
rule serves `decode` and the stream, and the stream's parts add up to what `decode` returns.
"""

import codecs
import json
import math
import operator
import os
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from reprlib import repr as short  # a hostile value may be megabytes long
from typing import Any, Self

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pagedkv.errors import FormatError, TokenError
from pagedkv.formats.hf import read_bytes, read_object

# tokenizer.ggml.token_type, from the GGUF specification (llama_token_type).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_SPACE = "\u2581"  # SentencePiece's visible space
_REPLACEMENT = "\ufffd"

# How each vocabulary's text was cut before its merges were learned, as the models' own
# tokenizer.json say it. A different cut gives other tokens, so an unknown name is an error.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "qwen2": "qwen2",
}

# Of a token that can be merged: every place to cut it is looked at. The longest in use have some hundred characters.
_MOST_TOKEN_LEN = 1024

# Of a text, by the Replace steps of a tokenizer.json; those in use write one character for another, or "&lt;" for "<".
_MOST_GROWTH = 64

# Control tokens that end a turn. Older Llama-3 files name only <|end_of_text|> as their end
# and would talk on past the turn; asked only where the file has no eot_token_id.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


class Tokenizer:
    """The tokenizer of one model.

    Made by :meth:`from_model_file`, :meth:`from_gguf_metadata` or :meth:`from_directory`.
    Encoding one text uses no thread pool, so a later ``os.fork`` is safe, and several Python
    threads may share an object.

    Attributes
    ----------
    vocab_size : int
        Ids are in ``[0, vocab_size)``. Padding of the model's embedding counts: such an id
        decodes to nothing.
    bos_token_id : int or None
    eos_token_ids : tuple of int
        Every id that the file calls an end; the first is the main one.
    chat_template : str or None
        The Jinja source.

    Examples
    --------
    >>> alphabet = sorted(_BYTE_OF)
    >>> tokenizer = Tokenizer.from_gguf_metadata({
    ...     "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
    ...     "tokenizer.ggml.tokens": ["<end>", *alphabet, "Hi"], "tokenizer.ggml.merges": ["H i"],
    ...     "tokenizer.ggml.token_type": [3] + [1] * 257, "tokenizer.ggml.eos_token_id": 0})
    >>> ids = tokenizer.encode("Hi!<end>")
    >>> [tokenizer.id_to_token(i) for i in ids]
    ['Hi', '!', '<end>']
    >>> tokenizer.decode(ids, skip_special_tokens=True)
    'Hi!'
    """

    def __init__(
        self, backend, *, vocab_size, bos_token_id, eos_token_ids, prefix, suffix, chat_template, named,
        source="this tokenizer"
    ):
        self._backend = backend
        self._source = source  # for messages
        self._prefix = list(prefix)  # ids put before and after a text with add_special_tokens
        self._suffix = list(suffix)
        self._named = named  # {"bos_token": "<s>", ...}, as templates know them
        self._special_ids = {
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._join = _join_rule(backend.decoder)
        self._pieces = {}  # id -> bytes, filled as ids are met: 49,000 at once would cost 50 ms
        self.vocab_size: int = vocab_size
        self.bos_token_id: int | None = bos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(eos_token_ids))
        # By name, as some files have several.
        self._chat_templates = (
            chat_template if isinstance(chat_template, dict) else {"default": chat_template}
        )

    @classmethod
    def from_model_file(cls, model: Any) -> Self:
        """Read the tokenizer that belongs to a model.

        Parameters
        ----------
        model : str, os.PathLike or pagedkv.formats.ModelFile
            A ``.gguf`` file or a Hugging Face directory, by path or already open.

        Raises
        ------
        FormatError
            There is none, or it is damaged or of a kind not read here.
        """
        path = Path(getattr(model, "path", model))
        if path.is_dir():
            return cls.from_directory(path)
        if hasattr(model, "metadata"):
            return cls.from_gguf_metadata(model.metadata, path)
        from pagedkv.formats import open_model  # only here: the readers know nothing of tokens

        with open_model(path) as file:
            return cls.from_gguf_metadata(file.metadata, path)

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> Self:
        """Build the tokenizer that a GGUF file describes in its ``tokenizer.*`` keys.

        Parameters
        ----------
        metadata : dict of str to value
            Arrays of strings are ``list[str]``, numeric arrays NumPy arrays or lists.
        path : path, optional
            Of the file, for messages.

        Raises
        ------
        FormatError
            No tokenizer there, a kind or pre-tokenizer not read here, values of another type, or lists that disagree.
        """
        try:
            return cls._from_gguf_metadata(metadata)
        except FormatError as error:
            raise FormatError(error.message if path is None else f"{path}: {error.message}") from None

    @classmethod
    def _from_gguf_metadata(cls, metadata):
        def get(key, default=None):
            value = metadata.get(f"tokenizer.ggml.{key}", default)
            if value is not None:
                kind, what = _KINDS[key.removesuffix("_token_id") if key.endswith("_token_id") else key]
                if not kind(value):
                    raise FormatError(f"tokenizer.ggml.{key} is {short(value)}, not {what}")
            return value

        kind = get("model")
        tokens = get("tokens")
        if kind is None or not tokens:
            raise FormatError(
                "this model file has no tokenizer: tokenizer.ggml.model or tokenizer.ggml.tokens is missing"
            )
        types = get("token_type")
        types = np.full(len(tokens), _NORMAL) if types is None else np.asarray(types)
        if len(types) != len(tokens):
            raise FormatError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
        # An empty token can come from no text; some files hold several as padding.
        vocab = {token: token_id for token_id, token in enumerate(tokens) if token}
        if len(vocab) + tokens.count("") != len(tokens):
            twice = next(token for token_id, token in enumerate(tokens) if token and vocab[token] != token_id)
            raise FormatError(f"tokenizer.ggml.tokens holds {short(twice)} more than once")

        if kind == "gpt2":
            split = _split_name(get("pre"))
            backend = _byte_level_backend(vocab, get("merges"), split)
            adds_bos = split == "llama-bpe"
        elif kind == "llama":
            backend = _sentencepiece_backend(
                vocab,
                types,
                merges=get("merges"),
                scores=get("scores"),
                unknown_id=_token_id(get, "unknown", tokens),
                space_prefix=bool(get("add_space_prefix", True)),
            )
            adds_bos = True
        else:
            raise FormatError(
                f"tokenizer.ggml.model is {short(kind)}, which is not read here; known are 'gpt2' and 'llama'"
            )

        special = np.flatnonzero((types == _CONTROL) | (types == _UNKNOWN))
        backend.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in special if tokens[i]])
        whole = np.flatnonzero(types == _USER_DEFINED)
        backend.add_tokens([AddedToken(tokens[i], normalized=False) for i in whole if tokens[i]])

        ends = [_token_id(get, name, tokens) for name in ("eos", "eot", "eom")]
        if ends[1] is None:
            ends += [vocab[name] for name in _TURN_ENDS if name in vocab and types[vocab[name]] == _CONTROL]
        ends = [token_id for token_id in ends if token_id is not None]
        bos = _token_id(get, "bos", tokens)
        named = {
            f"{short}_token": _token_id(get, name, tokens)
            for short, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        adds_bos = bool(get("add_bos_token", adds_bos)) and bos is not None
        adds_eos = bool(get("add_eos_token", False)) and bool(ends)
        return cls(
            backend,
            vocab_size=len(tokens),
            bos_token_id=bos,
            eos_token_ids=ends,
            prefix=[bos] if adds_bos else [],
            suffix=ends[:1] if adds_eos else [],
            chat_template=metadata.get("tokenizer.chat_template"),
            named={name: tokens[token_id] for name, token_id in named.items() if token_id is not None},
        )

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Read ``tokenizer.json`` and the files that complete it.

        Parameters
        ----------
        path : str or os.PathLike
            A Hugging Face model directory. ``tokenizer_config.json``, ``chat_template.jinja``,
            ``config.json`` and ``generation_config.json`` are read where they exist.

        Raises
        ------
        FormatError
            There is no ``tokenizer.json``, or a file is damaged.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise FormatError(f"{path} has no tokenizer.json, so text cannot be turned into tokens")
        backend = _checked(f"{file} cannot be read", tokenizers.Tokenizer.from_buffer, read_bytes(file))
        for part in (backend.normalizer, backend.decoder):
            growth = 1 if part is None else _growth(json.loads(part.__getstate__()))
            if growth > _MOST_GROWTH:
                raise FormatError(
                    f"{file}: its Replace steps make a text {growth} times as long, at most {_MOST_GROWTH} are read"
                )
        # Settings of whoever saved the file, which would cut or pad every text.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None):  # of training: each encoding would be another
            backend.model.dropout = None
        around = _checked(f"{file} cannot encode", _post_processor_ids, backend)

        settings = _read_json(path / "tokenizer_config.json")
        config = _read_json(path / "config.json")
        vocab_size = config.get("vocab_size") or 0
        if type(vocab_size) is not int or not 0 <= vocab_size < 2**31:
            raise FormatError(f"{path}/config.json: vocab_size is {short(vocab_size)}, not an integer in [0, 2**31)")
        # By the largest id: a vocabulary may leave some out.
        n_ids = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        if not 0 < n_ids < 2**31:
            raise FormatError(f"{file}: the largest id is {n_ids - 1}, outside [0, 2**31)")
        vocab_size = max(vocab_size, n_ids)

        def checked_ids(name, value):
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(token_id) is not int or not 0 <= token_id < vocab_size for token_id in ids):
                raise FormatError(f"{path}/{name} is {short(value)}, not an id in [0, {vocab_size}), or several")
            return ids

        named = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = settings.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if token is None:
                continue
            if not isinstance(token, str) or _token_to_id(backend, token) is None:
                raise FormatError(
                    f"{path}/tokenizer_config.json names {name} {short(token)}, which tokenizer.json lacks"
                )
            named[name] = token
        if settings:
            bos = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
        else:
            bos = next(iter(checked_ids("config.json: bos_token_id", config.get("bos_token_id"))), None)

        ends = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
        generation = _read_json(path / "generation_config.json")
        for name, source in (("generation_config.json", generation), ("config.json", config)):
            ends += checked_ids(f"{name}: eos_token_id", source.get("eos_token_id"))

        adds = [settings.get("add_bos_token"), settings.get("add_eos_token")]
        if any(value not in (None, True, False) for value in adds):
            raise FormatError(f"{path}/tokenizer_config.json: add_bos_token or add_eos_token is not true or false")
        if "add_bos_token" in settings or "add_eos_token" in settings:
            prefix = [bos] if adds[0] and bos is not None else []
            suffix = ends[:1] if adds[1] else []
        else:
            prefix, suffix = around

        template = settings.get("chat_template")
        if isinstance(template, list):
            try:
                template = {str(entry["name"]): entry["template"] for entry in template}
            except (TypeError, KeyError):
                raise FormatError(
                    f"{path}/tokenizer_config.json lists chat templates without name or text"
                ) from None
        jinja = path / "chat_template.jinja"
        if jinja.is_file():
            template = _read_text(jinja)
        return cls(
            backend,
            vocab_size=vocab_size,
            source=file,
            bos_token_id=bos,
            eos_token_ids=ends,
            prefix=prefix,
            suffix=suffix,
            chat_template=template,
            named=named,
        )

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Turn text into token ids.

        Parameters
        ----------
        text : str
        add_special_tokens : bool
            Put the beginning-of-text id in front where the model asks for one and the text
            does not begin with it.
        parse_special : bool
            Text that spells a control token, such as ``<|im_end|>``, becomes that token; False
            takes it as plain text, which is what text from strangers needs.

        Returns
        -------
        list of int

        Raises
        ------
        TypeError
            ``text`` is not a str.
        ValueError
            ``text`` holds a lone surrogate.
        FormatError
            The ``tokenizer.json`` describes a tokenizer that fails on this text.
        """
        if not isinstance(text, str):
            raise TypeError(f"text to encode must be a str, not {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text holds a lone surrogate, {text[error.start]!r} at index {error.start}, "
                "which is no character"
            ) from None
        backend = self._backend if parse_special else self._plain_backend
        ids = _checked(f"{self._source} cannot encode the text", backend.encode, text, add_special_tokens=False).ids
        if add_special_tokens:
            if ids[: len(self._prefix)] != self._prefix:
                ids = self._prefix + ids
            if self._suffix and ids[-len(self._suffix) :] != self._suffix:
                ids = ids + self._suffix
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Turn token ids into text.

        Bytes that are no UTF-8 become U+FFFD. SentencePiece vocabularies lose the space that
        encoding put in front.

        Parameters
        ----------
        ids : iterable of int
        skip_special_tokens : bool
            Leave out control tokens.

        Returns
        -------
        str

        Raises
        ------
        TokenError
            An id is outside ``[0, vocab_size)``.
        """
        ids = [self._check_id(token_id) for token_id in ids]
        if self._join is None:
            return self._decoded(ids, skip_special_tokens)
        stream = TextStream(self, skip_special_tokens)
        text = stream._push_bytes(b"".join(stream._piece(token_id) for token_id in ids))
        return text + stream.finish()

    def stream(self, skip_special_tokens: bool = True, continuing: bool = False) -> "TextStream":
        """Start turning token ids into text one at a time.

        Parameters
        ----------
        skip_special_tokens : bool
            Leave out control tokens.
        continuing : bool
            The ids go on from a text that is already shown, such as the prompt. A SentencePiece
            vocabulary then keeps the space in front of the first word.

        Returns
        -------
        TextStream
        """
        return TextStream(self, skip_special_tokens, continuing)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token as the vocabulary spells it, or None."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Spelling of a token, or None for an id that pads the vocabulary."""
        return self._backend.id_to_token(self._check_id(token_id))

    @property
    def chat_template(self) -> str | None:
        return self._chat_templates.get("default")

    def apply_chat_template(self, messages: Iterable[Mapping[str, Any]], add_generation_prompt: bool = True,
                            tokenize: bool = True, **variables: Any) -> Any:
        """Write a conversation the way the model was trained on it.

        Parameters
        ----------
        messages : list of dict
            ``{"role": "user", "content": "Hi"}`` and so on.
        add_generation_prompt : bool
            End with the opening of the assistant's turn.
        tokenize : bool
            Return ids; False: the text.
        **variables
            Further names for the template, such as ``tools``.

        Returns
        -------
        list of int or str
            The template writes the beginning-of-text token itself where the model wants one, so
            none is added.

        Raises
        ------
        pagedkv.chat.ChatError
            The model has no template, or the template refuses the messages.
        FormatError
            The template does not parse.
        """
        variables = {**self._named, **variables}
        text = self._compiled_template.render(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @cached_property
    def _compiled_template(self):
        from pagedkv.chat import ChatError, ChatTemplate  # jinja2 takes 60 ms, and most uses need none

        if self.chat_template is None:
            names = ", ".join(name for name, source in self._chat_templates.items() if source)
            raise ChatError(
                "this model has no chat template" + (f" called default, only {names}" if names else "")
                + "; pass it plain text instead"
            )
        if not isinstance(self.chat_template, str):
            raise FormatError(f"the chat template is a {type(self.chat_template).__name__}, not text")
        return ChatTemplate(self.chat_template)

    @cached_property
    def _plain_backend(self):
        # A second object: the switch is a field of the backend, and flipping it back and forth
        # would let one thread see another's setting.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend

    def _decoded(self, ids, skip_special_tokens):
        """By the library, where its decoder has no rule here."""
        return _checked(f"{self._source} cannot decode the ids", self._backend.decode, ids,
                        skip_special_tokens=skip_special_tokens)  # fmt: skip

    def _check_id(self, token_id):
        token_id = operator.index(token_id)
        if not 0 <= token_id < self.vocab_size:
            raise TokenError(f"token id {token_id} is outside [0, {self.vocab_size})")
        return token_id

    def _piece(self, token_id):
        """The bytes that a checked id stands for."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._backend.id_to_token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else self._join.piece(token)
        return piece


class TextStream:
    """Text of one sequence as its tokens come; made by :meth:`Tokenizer.stream`.

    What :meth:`push` and :meth:`finish` return adds up to
    ``decode(ids, skip_special_tokens=True)``. Bytes of an unfinished character, three at most,
    are held back. A ``tokenizer.json`` with a decoder not known here gives all its text at the
    end.

    Examples
    --------
    >>> stream = tokenizer.stream()                                  # doctest: +SKIP
    >>> text = "".join(stream.push(i) for i in ids) + stream.finish()   # doctest: +SKIP
    """

    def __init__(self, tokenizer, skip_special_tokens=True, continuing=False):
        self._tokenizer = tokenizer
        self._skipped = tokenizer._special_ids if skip_special_tokens else ()
        self._skip_special_tokens = skip_special_tokens
        self._join = tokenizer._join
        self._n_strip = 0 if continuing or self._join is None else self._join.n_strip
        self._held = b""
        self._ids = []  # all of them, only where no rule is known
        self._finished = False

    def push(self, token_id: int) -> str:
        """Take the next token.

        Parameters
        ----------
        token_id : int

        Returns
        -------
        str
            Whole characters that it completes; often empty.

        Raises
        ------
        TokenError
            The id is outside ``[0, vocab_size)``; the stream goes on as before.
        ValueError
            The stream was finished.
        """
        if self._finished:
            raise ValueError("this text stream is finished; start another one")
        token_id = self._tokenizer._check_id(token_id)
        if self._join is None:
            self._ids.append(token_id)
            return ""
        return self._push_bytes(self._piece(token_id))

    def finish(self) -> str:
        """End the text.

        Returns
        -------
        str
            U+FFFD for bytes that no character came of; as a rule empty.
        """
        self._finished = True
        if self._join is None:
            ids, self._ids = self._ids, []
            return self._tokenizer._decoded(ids, self._skip_special_tokens)
        return self._push_bytes(b"", final=True)

    def _piece(self, token_id):
        return b"" if token_id in self._skipped else self._tokenizer._piece(token_id)

    def _push_bytes(self, data, final=False):
        data = self._held + data
        text, n_used = self._join.text(data, final)
        self._held = data[n_used:]
        while self._n_strip and text:
            if text[0] != " ":
                self._n_strip = 0
            else:
                text = text[1:]
                self._n_strip -= 1
        return text


class _ByteLevelJoin:
    """GPT-2 style: a token's characters each stand for one byte; the bytes join up."""

    n_strip = 0

    @staticmethod
    def piece(token):
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:
            # A control token spelled in ordinary text.
            return token.encode()

    @staticmethod
    def text(data, final):
        return codecs.utf_8_decode(data, "replace", final)


class _SentencePieceJoin:
    """SentencePiece style: tokens are text with a visible space, or ``<0xNN>`` for one byte.

    Each byte that belongs to no character becomes one U+FFFD, as in SentencePiece. (Hugging
    Face's decoder replaces a whole run of byte tokens if one of them is bad. It could then show
    nothing before the run ends, which for a script without tokens of its own is the whole answer.)

    Parameters
    ----------
    n_strip : int
        Spaces dropped from the front of a text.
    """

    def __init__(self, n_strip):
        self.n_strip = n_strip

    @staticmethod
    def piece(token):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(_SPACE, " ").encode()

    @staticmethod
    def text(data, final):
        # surrogateescape gives one code point a bad byte, which "replace" does not.
        text, n_used = codecs.utf_8_decode(data, "surrogateescape", final)
        return text.translate(_ESCAPED), n_used


_ESCAPED = dict.fromkeys(range(0xDC80, 0xDD00), _REPLACEMENT)


def _gpt2_bytes():
    """The byte that each character of GPT-2's alphabet stands for.

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100, U+0101, ...
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _gpt2_bytes()


def _join_rule(decoder):
    """How the tokens of a backend with this decoder become bytes; None: not known here."""
    if decoder is None:
        return None
    spec = json.loads(decoder.__getstate__())
    if spec["type"] == "ByteLevel":
        return _ByteLevelJoin()
    if spec["type"] != "Sequence":
        return None
    steps = spec["decoders"]
    sentencepiece = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if steps[:3] != sentencepiece:
        return None
    if not steps[3:]:
        return _SentencePieceJoin(0)
    strip = steps[3]
    if len(steps) == 4 and strip["type"] == "Strip" and strip["content"] == " " and strip["stop"] == 0:
        return _SentencePieceJoin(strip["start"])
    return None


def _split_name(pre):
    if pre is None:
        warnings.warn(
            "the model file names no pre-tokenizer (tokenizer.ggml.pre); cutting text as GPT-2 does",
            stacklevel=4,
        )
        pre = "default"
    if pre not in _SPLITS:
        known = ", ".join(sorted(_SPLITS))
        raise FormatError(f"tokenizer.ggml.pre is {short(pre)}, a pre-tokenizer not read here; known are {known}")
    return _SPLITS[pre]


def _byte_level_backend(vocab, merges, split):
    if merges is None:
        raise FormatError("tokenizer.ggml.merges is missing, which a 'gpt2' tokenizer needs")
    backend = tokenizers.Tokenizer(_bpe(vocab, _pairs(merges), ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    if split in ("llama-bpe", "qwen2"):
        pattern = Regex(_LLAMA3_SPLIT if split == "llama-bpe" else _QWEN2_SPLIT)
        steps = [
            pre_tokenizers.Split(pattern, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    else:
        steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if split == "smollm":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_backend(vocab, types, merges, scores, unknown_id, space_prefix):
    if merges is not None:
        pairs = _pairs(merges)
    elif scores is None or len(scores) != len(types):
        n_scores = 0 if scores is None else len(scores)
        raise FormatError(f"tokenizer.ggml.scores has {n_scores} entries for {len(types)} tokens")
    else:
        pairs = _merges_of_scores(vocab, types, scores)
    unknown = next((token for token, token_id in vocab.items() if token_id == unknown_id), None)
    backend = tokenizers.Tokenizer(_bpe(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Replace(" ", _SPACE)]
    joins = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        # In front of every stretch between special tokens, also one that begins with a space:
        # so do SentencePiece and the tokenizer.json of Llama 2.
        steps.insert(0, normalizers.Prepend(_SPACE))
        joins.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(joins)
    return backend


def _merges_of_scores(vocab, types, scores):
    """The merges that a scored vocabulary implies, best first.

    SentencePiece joins the neighbours whose union scores highest. As a ranked list: every way to
    cut a token into two tokens, by the token's score; among equals by id, as the converters of
    Hugging Face write it.
    """
    made = (types == _NORMAL) | (types == _USER_DEFINED) | (types == _UNUSED)  # what text can become
    ids = {token: token_id for token, token_id in vocab.items() if made[token_id]}
    scores = np.asarray(scores, dtype=np.float64).tolist()
    cuts = []
    for token, token_id in ids.items():
        if len(token) > _MOST_TOKEN_LEN:
            raise FormatError(
                f"tokenizer.ggml.tokens[{token_id}] has {len(token)} characters, at most {_MOST_TOKEN_LEN} are read"
            )
        for n_left in range(1, len(token)):
            left, right = ids.get(token[:n_left]), ids.get(token[n_left:])
            if left is not None and right is not None:
                cuts.append((-scores[token_id], token_id, left, right, n_left, token))
    cuts.sort()
    return [(token[:n_left], token[n_left:]) for *_, n_left, token in cuts]


def _pairs(merges):
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for number, pair in enumerate(pairs):
        if len(pair) != 2:
            raise FormatError(f"tokenizer.ggml.merges[{number}] is {short(merges[number])}, not two tokens")
    return pairs


def _bpe(vocab, pairs, **options):
    return _checked("the tokenizer's merges do not fit its tokens", BPE, vocab=vocab, merges=pairs, **options)


def _is_text(value):
    return isinstance(value, str)


def _is_flag(value):
    return isinstance(value, bool)


def _is_id(value):
    return type(value) is int


def _is_texts(value):
    return isinstance(value, list) and all(map(_is_text, value))


def _is_counts(value):
    array = np.asarray(value)
    return array.ndim == 1 and array.dtype.kind in "iu"


def _is_numbers(value):
    array = np.asarray(value)
    return array.ndim == 1 and array.dtype.kind in "iuf"


# What the values of tokenizer.ggml.* must be; of *_token_id by what stands before it.
_KINDS = dict.fromkeys(("model", "pre"), (_is_text, "a text"))
_KINDS |= dict.fromkeys(("tokens", "merges"), (_is_texts, "a list of texts"))
_KINDS |= dict.fromkeys(("add_bos_token", "add_eos_token", "add_space_prefix"), (_is_flag, "true or false"))
_KINDS |= dict.fromkeys(("bos", "eos", "eot", "eom", "unknown", "padding"), (_is_id, "an integer"))
_KINDS |= {"token_type": (_is_counts, "a list of integers"), "scores": (_is_numbers, "a list of numbers")}


def _checked(what, call, *args, **options):
    """Call the tokenizers library; what it raises becomes a FormatError that begins with `what`."""
    try:
        return call(*args, **options)
    except Exception as error:  # it raises bare Exception
        words = error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust code, no Exception; KeyboardInterrupt is none of ours
            raise
        words = error
    words = " ".join(str(words).split())
    raise FormatError(f"{what}: {words if len(words) <= 300 else words[:300] + '...'}")


def _growth(spec):
    """How many times as long the Replace steps of a normaliser or decoder can make a text."""
    if isinstance(spec, list):
        return math.prod(map(_growth, spec))
    if not isinstance(spec, dict):
        return 1
    if spec.get("type") == "Replace":  # of a text by its length; a regex may match one character, or none
        return max(1, len(spec["content"]) // max(1, len(spec["pattern"].get("String", ""))))
    return math.prod(map(_growth, spec.values()))


def _token_to_id(backend, token):
    try:
        return backend.token_to_id(token)
    except UnicodeEncodeError:  # a lone surrogate, which no token has
        return None


def _token_id(get, name, tokens):
    """The id under ``tokenizer.ggml.<name>_token_id``; None: not given, or no token's."""
    token_id = get(f"{name}_token_id")
    # Files write -1 or 2^32 - 1 for "none".
    return token_id if token_id is not None and 0 <= token_id < len(tokens) else None


def _post_processor_ids(backend):
    """The ids that a tokenizer.json puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start], full[start + len(bare) :]
    return [], []


def _read_json(path):
    return read_object(path) if path.is_file() else {}


def _read_text(path):
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"{path} is not UTF-8: {error}") from None
