"""Lines of the input, and the requests that they ask for."""

import json
import math
import os
import re
import shutil
import tempfile
import typing
from dataclasses import dataclass, fields, replace
from hashlib import blake2b

from pagedkv.engine.params import SamplingParams

MAX_LINE_NBYTES = 64 << 20  # a prompt of some ten million tokens
# Of one line, so that no line can take the memory of all: a sample copies the prompt's ids, and each place of a text
# keeps an object a log-probability.
MAX_SAMPLES, MAX_LOGPROBS = 4096, 100
PROMPTS = ("prompt", "prompt_token_ids", "messages")
_PARAMS = {each.name: each.type for each in fields(SamplingParams)}
_OWN = SamplingParams()
_BOM = b"\xef\xbb\xbf"


class LineError(Exception):
    """A line that cannot be run; `kind` is one of ``bad_json``, ``bad_request``, ``too_long``, ``failed``."""

    def __init__(self, kind, message):
        super().__init__(message)
        self.kind, self.message = kind, message


# ---- Input --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Line:
    """A line of the input that is not blank.

    Attributes
    ----------
    number : int
        From 1 on; blank lines count.
    id : str, int, float or None
        Its own, else its number; None where it cannot be read.
    digest : str
    fields : dict
    error : LineError or None
        Why it has no fields.
    """

    number: int
    id: str | int | float | None
    digest: str
    fields: dict
    error: LineError | None = None

    @property
    def key(self):
        return key_of(self.id, self.number)


def key_of(row_id, number):
    """What tells rows apart: the id, or the line where there is none."""
    return ("line", number) if row_id is None else row_id


class Input:
    """The lines of a binary file from where it stands, read several times.

    Parameters
    ----------
    file : binary file
        One that can be read only once, such as a pipe, is copied to a temporary file first: ids are compared before
        the first step, and with the same lines again the run can be resumed.
    name : str
        For messages.

    Examples
    --------
    >>> import io
    >>> lines = Input(io.BytesIO(b'"Hi"\\n{"id": "b", "prompt": "Ho", "n": 2}\\n'), "two lines")
    >>> [(line.number, line.id, line.fields) for line in lines]
    [(1, 1, {'prompt': 'Hi'}), (2, 'b', {'prompt': 'Ho', 'n': 2})]
    """

    def __init__(self, file, name):
        self.name = name
        if not file.seekable():
            copy = tempfile.TemporaryFile()
            shutil.copyfileobj(file, copy, 1 << 20)
            copy.seek(0)
            file = copy
        self.file, self._begin = file, file.tell()
        self._nbytes = file.seek(0, os.SEEK_END)  # lines that come later are not seen, in neither pass

    def __iter__(self):
        """Yield a :class:`Line` for each that is not blank."""
        self.file.seek(self._begin)
        number, at = 0, self._begin
        while at < self._nbytes:
            raw = self.file.readline(min(MAX_LINE_NBYTES + 1, self._nbytes - at))
            if not raw:
                return
            at += len(raw)
            number += 1
            rest = raw
            while not rest.endswith(b"\n") and at < self._nbytes and rest:
                rest = self.file.readline(min(1 << 20, self._nbytes - at))
                at += len(rest)
            raw = raw.removeprefix(_BOM) if number == 1 else raw
            if raw.strip():
                yield _read_line(number, raw.strip())


def _read_line(number, raw):
    digest = digest_of(raw)
    try:
        if len(raw) > MAX_LINE_NBYTES:
            raise LineError("bad_json", f"the line is longer than {MAX_LINE_NBYTES} bytes")
        each = _object(raw)
        return Line(number, _id(each.pop("id", number)), digest, each)
    except LineError as error:
        return Line(number, None, digest, {}, error)


def _object(raw):
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise LineError("bad_json", f"the line is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise LineError("bad_json", "the line is not read: it is nested too deeply") from None
    except ValueError as error:
        raise LineError("bad_json", f"the line is not JSON: {error}") from None
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, dict):
        raise LineError("bad_json", f"a line is an object or a text, not {short(value)}")
    return value


def _once(pairs):
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice in one object")
    return value


def _no_constant(name):
    raise ValueError(f"{name} is no number of JSON")


def _id(value):
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or value in (math.inf, -math.inf):
        raise LineError("bad_request", f"id must be a text or a number, not {short(value)}")
    return value


def short(value):
    text = json.dumps(value, ensure_ascii=False, default=str)  # a dataset's values may be dates or bytes
    return text if len(text) <= 60 else text[:57] + "..."


def digest_of(*parts):
    """12 hexadecimal digits: enough against accidents, which is all that happens here."""
    state = blake2b(digest_size=6)
    for part in parts:
        state.update(b"%d " % len(part))
        state.update(part)
    return state.hexdigest()


# ---- A line becomes a request -------------------------------------------------------------------

_WORDS = {
    int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null",
    list[str]: "a list of texts", list[int]: "a list of integers",
    dict[int, float]: "an object of token ids and numbers",
}  # fmt: skip


def _fits(value, kind):
    """Whether a value of JSON is of a type; true and false are no numbers."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            re.fullmatch("[0-9]{1,18}", name) and _fits(each, inner[1]) for name, each in value.items())
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _params(given, defaults):
    """The command's parameters with a line's own in their places."""
    for name, value in given.items():
        kinds = typing.get_args(_PARAMS[name]) if _PARAMS[name] not in _WORDS else (_PARAMS[name],)
        if not any(_fits(value, kind) for kind in kinds):
            what = " or ".join(_WORDS[kind] for kind in kinds)
            raise LineError("bad_request", f"{name} must be {what}, not {short(value)}")
    if given.get("seed", 0) in (None, -1):
        given = {name: value for name, value in given.items() if name != "seed"}
    try:
        params = replace(defaults, **given)
    except (ValueError, TypeError, OverflowError) as error:
        raise LineError("bad_request", str(error)) from None
    check_params(params)
    return params


def changed_params(params):
    """Those that are not SamplingParams' own, as a dict; a field that is new there changes no digest."""
    return {name: getattr(params, name) for name in _PARAMS if getattr(params, name) != getattr(_OWN, name)}


def check_params(params):
    """Refuse what would take too much memory for one line of many; a :class:`LineError`."""
    if params.n > MAX_SAMPLES:
        raise LineError("bad_request", f"n is at most {MAX_SAMPLES} in a batch, not {params.n}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and not 0 <= value <= MAX_LOGPROBS:
            raise LineError("bad_request", f"{name} is from 0 to {MAX_LOGPROBS} in a batch, not {value}")


def _prompt_ids(given, tokenizer, chat):
    names = [name for name in PROMPTS if name in given]
    if len(names) != 1:
        has = " and ".join(names) or "none"
        raise LineError("bad_request", f"a line has one of {', '.join(PROMPTS)}; this one has {has}")
    (name,) = names
    value = given[name]
    if name == "prompt_token_ids":
        if not _fits(value, list[int]):
            raise LineError("bad_request", f"{name} must be a list of integers, not {short(value)}")
        return value
    if name == "prompt" and not isinstance(value, str):
        raise LineError("bad_request", f"{name} must be a text, not {short(value)}")
    if tokenizer is None:
        raise LineError("bad_request", f"the model has no tokenizer for {name}; give prompt_token_ids")
    if name == "prompt" and chat:
        value = [{"role": "user", "content": value}]
    is_chat = chat or name == "messages"
    try:
        text = tokenizer.apply_chat_template(value, tokenize=False) if is_chat else value
        text.encode()
    except UnicodeEncodeError:
        raise LineError("bad_request", f"{name} holds a lone surrogate, which is no character") from None
    except (TypeError, ValueError) as error:
        raise LineError("bad_request", getattr(error, "message", str(error))) from None
    # A template writes the beginning-of-text token itself.
    return tokenizer.encode(text, add_special_tokens=not is_chat)


def read_request(line, tokenizer, defaults, chat, context_len):
    """The prompt's ids and the SamplingParams of a line.

    Parameters
    ----------
    line : Line
    tokenizer : Tokenizer or None
    defaults : SamplingParams
        Of what the line does not say. Its `seed` is one for all lines: equal prompts give equal texts, as in vLLM,
        and a line gives what it gives alone. For other samples of a prompt there are `n` and a seed of its own.
    chat : bool
        Take ``"prompt"`` as a user's message.
    context_len : int

    Returns
    -------
    list of int, SamplingParams

    Raises
    ------
    LineError
        An unknown field, a wrong type, an impossible value, a prompt that the chat template refuses.
    """
    if line.error is not None:
        raise line.error
    for name in line.fields:
        if name not in PROMPTS and name not in _PARAMS:
            raise LineError("bad_request", f"there is no field {short(name)}")
    params = _params({name: value for name, value in line.fields.items() if name not in PROMPTS}, defaults)
    ids = _prompt_ids(line.fields, tokenizer, chat)
    if params.max_tokens is None:  # the engine would make it what the pool holds: another number on another machine
        try:
            params = replace(params, max_tokens=max(1, context_len - len(ids)))
        except ValueError as error:
            raise LineError("bad_request", str(error)) from None
    return ids, params
