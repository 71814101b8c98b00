"""Offline batches: a file of prompts in, a file of rows out, one JSON object a line (the formats: docs/formats.md).

Rows are written as their requests finish, each whole, so that whatever ends the run - Ctrl-C, kill -9, a full disk -
the file holds finished rows and at most the beginning of one more. The same command then goes on. Writing in the order
of the input instead would hold finished rows back behind a slow one, and lose them; ``line`` in each row gives the
order.

A row depends on its line, the model and the parameters alone: the engine's tokens do not depend on what runs beside
them, and a line's seed is its own or the command's, never one of arrival. So pieces of a run add up to the whole run,
byte for byte. Each row carries a digest of these three, and rows of another line, model or parameters are refused
rather than mixed. What depends on the run, such as a pool too small for a request, gives no row.
"""

import errno
import json
import math
import os
import re
import shutil
import signal
import stat
import tempfile
import threading
import time
import typing
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from hashlib import blake2b

from pagedkv.engine.params import SamplingParams
from pagedkv.errors import BoundsError, PagedKVError, PoolExhausted
from pagedkv.progress import progress_bar

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two runs apart there
    fcntl = None

FORMAT = 1  # of rows; counted up when the same line, model and parameters would give another row
MAX_LINE_NBYTES = 64 << 20  # a prompt of some ten million tokens
# Of one line, so that no line can take the memory of all: a sample copies the prompt's ids, and each place of a text
# keeps an object a log-probability.
MAX_SAMPLES, MAX_LOGPROBS = 4096, 100
SYNC_S = 5.0  # between calls of fsync: what a power failure may cost
BAR_S, REPORT_S = 0.5, 30.0  # between what is shown on a terminal, and elsewhere
PROMPTS = ("prompt", "prompt_token_ids", "messages")
_PARAMS = {each.name: each.type for each in fields(SamplingParams)}
_OWN = SamplingParams()
_BOM = b"\xef\xbb\xbf"


class BatchError(PagedKVError, ValueError):
    """The input, the output or both together cannot be used; nothing was changed."""


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
        return _key(self.id, self.number)


def _key(row_id, number):
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
    digest = _digest(raw)
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
        raise LineError("bad_json", f"a line is an object or a text, not {_short(value)}")
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
        raise LineError("bad_request", f"id must be a text or a number, not {_short(value)}")
    return value


def _short(value):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _digest(*parts):
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
        if name == "stop":
            kinds = (str, *kinds)
        if not any(_fits(value, kind) for kind in kinds):
            what = " or ".join(_WORDS[kind] for kind in kinds)
            raise LineError("bad_request", f"{name} must be {what}, not {_short(value)}")
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
            raise LineError("bad_request", f"{name} must be a list of integers, not {_short(value)}")
        return value
    if name == "prompt" and not isinstance(value, str):
        raise LineError("bad_request", f"{name} must be a text, not {_short(value)}")
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
            raise LineError("bad_request", f"there is no field {_short(name)}")
    params = _params({name: value for name, value in line.fields.items() if name not in PROMPTS}, defaults)
    ids = _prompt_ids(line.fields, tokenizer, chat)
    if params.max_tokens is None:  # the engine would make it what the pool holds: another number on another machine
        try:
            params = replace(params, max_tokens=max(1, context_len - len(ids)))
        except ValueError as error:
            raise LineError("bad_request", str(error)) from None
    return ids, params


# ---- Rows ---------------------------------------------------------------------------------------


def _error_row(error):
    message = error.message if len(error.message) <= 500 else error.message[:497] + "..."
    return {"error": {"type": error.kind, "message": " ".join(message.split())}}


def _answer_row(request):
    """What a finished request gives; nothing that depends on how it ran, such as tokens found in the cache."""
    output = request.output()
    samples = []
    for each in output.outputs:
        sample = {"index": each.index, "text": each.text, "token_ids": each.token_ids,
                  "finish_reason": each.finish_reason, "stop_reason": each.stop_reason}  # fmt: skip
        if each.logprobs is not None:
            sample["cumulative_logprob"] = _number(each.cumulative_logprob)
            sample["logprobs"] = [_logprobs(place) for place in each.logprobs]
        samples.append(sample)
    row = {"outputs": samples}
    if output.prompt_logprobs is not None:
        row["prompt_logprobs"] = [_logprobs(place) for place in output.prompt_logprobs]
    n_prompt, n_tokens = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
    row["usage"] = {"prompt_tokens": n_prompt, "completion_tokens": n_tokens, "total_tokens": n_prompt + n_tokens}
    return row


def _logprobs(place):
    return place and {str(token): {"logprob": _number(each.logprob), "rank": each.rank,
                                   "decoded_token": each.decoded_token} for token, each in place.items()}  # fmt: skip


def _number(value):
    return value if math.isfinite(value) else None  # JSON has no infinity


def _bytes_of(row):
    # A lone surrogate, of an id, becomes the escape that it was.
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


_DIRECTORY_FILES = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"


class Stamp:
    """The two parts of a row's digest that all rows of a run share.

    Parameters
    ----------
    file : pagedkv.formats.ModelFile
        The model is known by its metadata, its tokenizer's among them, and three kilobytes of each tensor: another set
        of weights differs in all of them, and to read every byte would take longer than to load the model.
    settings : dict
        All else that rows depend on, as JSON.
    """

    def __init__(self, file, settings):
        state = blake2b(digest_size=6)
        for name, value in sorted(file.metadata.items()):
            # repr() of a long array is short.
            value = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode("utf-8", "backslashreplace")
            state.update(f"{name} {len(value)} ".encode())
            state.update(value)
        if file.path.is_dir():
            for name in _DIRECTORY_FILES:
                path = file.path / name
                state.update(f"{name} ".encode() + (path.read_bytes() if path.is_file() else b"-"))
        for name in sorted(file.names()):
            tensor = file.tensor(name)
            state.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            middle = len(tensor.raw) // 2
            for part in (tensor.raw[:1024], tensor.raw[middle:middle + 1024], tensor.raw[-1024:]):
                state.update(part.tobytes())
        self.model = state.hexdigest()
        self.settings = _digest(json.dumps([FORMAT, settings], sort_keys=True).encode())

    def row_digest(self, line):
        return f"{line.digest}-{self.model}-{self.settings}"


# ---- Output -------------------------------------------------------------------------------------


class RowStream:
    """Rows to something that is no file of its own: standard output, a pipe, a device. Cannot be resumed.

    Parameters
    ----------
    write : callable
        Takes a row's bytes and writes them all.
    name : str
    """

    is_file = False

    def __init__(self, write, name):
        self._write, self.name = write, name

    def rows(self):
        return iter(())

    def open(self):
        pass

    def write(self, row):
        self._write(_bytes_of(row))

    def close(self):
        pass


class RowFile:
    """Rows in a regular file, which this process alone may write while it is open.

    Parameters
    ----------
    path : str
        If it exists, it is opened and locked; nothing is changed before :meth:`open`.
    overwrite : bool
        Take it as empty.

    Raises
    ------
    OSError
    BatchError
        Another process writes to it.
    """

    is_file = True

    def __init__(self, path, overwrite=False):
        self.name, self._overwrite = path, overwrite
        path = self._path = os.path.realpath(path)  # a link may name a file that is yet to be made
        self._end = 0  # of the last whole row
        self._synced_s, self._is_synced = time.monotonic(), True
        self.fd = None
        try:
            self.fd = os.open(path, os.O_RDWR | _BINARY)
        except FileNotFoundError:
            return
        self._lock()

    def _lock(self):
        try:
            if fcntl is not None:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise BatchError(f"another process is writing to {self.name}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # a file system without locks
                raise

    def rows(self):
        """Yield the rows that are there. A last one that was cut off is left out; :meth:`open` takes it away.

        Raises
        ------
        BatchError
            The file holds something else.
        """
        if self.fd is None or self._overwrite:
            return
        with open(self.fd, "rb", closefd=False) as file:
            file.seek(0)
            for number, raw in enumerate(file, 1):
                row = _row(raw)
                if row is None or not raw.endswith(b"\n"):
                    if file.read(1) or (row is None and not _may_be_cut(raw)):
                        raise BatchError(f"line {number} of {self.name} is no row of this command; give another "
                                         "--output, or --overwrite to lose what it holds")
                    return
                self._end += len(raw)
                yield row

    def open(self):
        """Make the file ready for the next row; creates it where it is missing."""
        if self.fd is None:
            try:
                self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
            except FileExistsError:
                raise BatchError(f"another process has begun to write to {self.name}") from None
            self._lock()
        self._cut()

    def _cut(self):
        os.ftruncate(self.fd, self._end)
        os.lseek(self.fd, self._end, os.SEEK_SET)

    def write(self, row):
        """Write a row; after any error the file ends with the one before it."""
        data = memoryview(_bytes_of(row))
        n_written = 0
        try:
            while n_written < len(data):
                n_written += os.write(self.fd, data[n_written:])
        except BaseException as error:
            self._cut()
            if isinstance(error, OSError):
                raise OSError(error.errno, error.strerror, self.name) from None
            raise
        self._end += n_written
        self._is_synced = False
        if time.monotonic() - self._synced_s >= SYNC_S:
            self.sync()

    def sync(self):
        """Have the rows on the disk itself."""
        if not self._is_synced:
            os.fsync(self.fd)
            self._is_synced = True
        self._synced_s = time.monotonic()

    def close(self):
        if self.fd is not None:
            try:
                self.sync()
            finally:
                os.close(self.fd)
                self.fd = None


_BINARY = getattr(os, "O_BINARY", 0)
_NO_LOCKS = errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS
_DIGEST = re.compile("(?:[0-9a-f]{12}-){2}[0-9a-f]{12}")


def _row(raw):
    """A row of this command, or None."""
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if (isinstance(row, dict) and ("outputs" in row or "error" in row) and isinstance(row.get("line"), int)
            and isinstance(row.get("id"), (str, int, float, type(None)))
            and isinstance(row.get("digest"), str) and _DIGEST.fullmatch(row["digest"])):  # fmt: skip
        return row
    return None


def _may_be_cut(raw):
    """Whether this is the beginning of a row, or of none: a power failure may leave zeros at the end of a file."""
    try:
        json.loads(raw)
        return False  # whole, and of something else
    except (ValueError, RecursionError):
        start = b'{"id": '
        return start.startswith(raw.rstrip(b"\0\n")[: len(start)])


def open_output(path, lines, overwrite=False):
    """A :class:`RowFile`, or a :class:`RowStream` where the path is a pipe or a device; not the file of the input."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return RowFile(path, overwrite)
    try:
        is_input = os.path.samestat(status, os.fstat(lines.file.fileno()))
    except OSError:  # it is in memory
        is_input = False
    if is_input:
        raise BatchError(f"{path} is the input; give another --output")
    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        return RowFile(path, overwrite)
    return _stream_to(path)


def _stream_to(path):
    file = open(path, "wb", buffering=0)

    def write(data):
        data = memoryview(data)
        try:
            while data:
                data = data[file.write(data):]
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None

    return RowStream(write, path)


# ---- Which lines are left -----------------------------------------------------------------------


@dataclass
class Plan:
    """What a run has to do.

    Attributes
    ----------
    is_done : bytearray
        One byte a line of the input that is not blank: whether its row is there.
    n_errors : int
        Of the rows that are there, those with an error.
    """

    is_done: bytearray
    n_errors: int

    @property
    def n_rows(self):
        return len(self.is_done)

    @property
    def n_done(self):
        return self.is_done.count(1)


def make_plan(lines, output, stamp):
    """Compare the input with the rows that are there.

    Parameters
    ----------
    lines : Input
    output : RowFile or RowStream
    stamp : Stamp

    Returns
    -------
    Plan

    Raises
    ------
    BatchError
        Two lines, or two rows, have one id; a row is of another line, model or parameters.
    """
    anew = f"give another --output, or --overwrite to lose what {output.name} holds"
    done, n_errors = {}, 0
    for row in output.rows():
        key = _key(row["id"], row["line"])
        line, model, settings = row["digest"].split("-")
        if key in done:
            raise BatchError(f"{output.name} has two rows for {_name(key)}; {anew}")
        if model != stamp.model:
            raise BatchError(f"{output.name} was made with another model; use that one, or {anew}")
        if settings != stamp.settings:
            raise BatchError(f"{output.name} was made with other parameters; use those, or {anew}")
        done[key] = line
        n_errors += "error" in row
    seen, is_done = {}, bytearray()
    for line in lines:
        other = seen.setdefault(line.key, line.number)
        if other != line.number:
            raise BatchError(f"lines {other} and {line.number} of {lines.name} have the same id, {_short(line.id)}")
        digest = done.pop(line.key, None)
        if digest not in (None, line.digest):
            raise BatchError(f"the row for {_name(line.key)} in {output.name} was made from another line than line "
                             f"{line.number} of {lines.name}; {anew}")
        is_done.append(digest is not None)
    for key in done:
        raise BatchError(f"{output.name} has a row for {_name(key)}, {lines.name} has no such line; {anew}")
    return Plan(is_done, n_errors)


def _name(key):
    return f"line {key[1]}" if isinstance(key, tuple) else f"id {_short(key)}"


# ---- The run ------------------------------------------------------------------------------------


class _StepStopped(BaseException):
    """A signal came during a step, which is given up: the rows to come are those of any later run."""


class _Signals(list):
    """Numbers of the signals that came; `in_step` says whether a step runs."""

    in_step = False


@contextmanager
def stop_signals():
    """Collect SIGINT and SIGTERM in a list for :func:`run`; a second one raises KeyboardInterrupt."""
    received = _Signals()

    def receive(number, _):
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt
        if received.in_step:
            raise _StepStopped

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python lets no other set them
        before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Progress:
    """Rows, tokens a second, blocks and the time to go: a bar on a terminal, else a line now and then.

    Parameters
    ----------
    plan : Plan
    engine : Engine
    stream : text file or None
        None: show nothing.
    """

    def __init__(self, plan, engine, stream):
        self._engine, self._stream, self._bar = engine, stream, None
        self._n_rows, self._n_done, self._n_before = plan.n_rows, plan.n_done, plan.n_done
        self._started_s = self._shown_s = time.monotonic()
        if stream is not None and stream.isatty():
            try:
                self._bar = progress_bar(total=plan.n_rows, initial=plan.n_done, file=stream, dynamic_ncols=True,
                                         bar_format="{percentage:3.0f}%|{bar}| {n:,}/{total:,} rows{postfix}")  # fmt: skip
            except OSError:
                self._stream = None

    def _figures(self, now):
        stats, n_blocks = self._engine.stats(), self._engine.pool.n_blocks
        rate = stats["tokens"] / max(1e-9, now - self._started_s)
        # Rows that are half there count half, or the first ones would seem to take for ever.
        n_new = self._n_done - self._n_before + self._n_begun()
        n_left = self._n_rows - self._n_before - n_new
        left = _duration((now - self._started_s) * max(0.0, n_left / n_new)) if n_new else "?"
        return f"{rate:,.1f} tokens/s, {stats['blocks_used']:,}/{n_blocks:,} blocks, {left} to go"

    def _n_begun(self):
        """Of the requests that run, the parts that are there, each of its longest possible text."""
        scheduler = self._engine.scheduler
        requests = {sample.request.number: sample.request for sample in (*scheduler.running, *scheduler.waiting)}
        return sum((1.0 if sample.finish_reason else sample.n_generated / request.max_tokens) / request.params.n
                   for request in requests.values() for sample in request.samples)  # fmt: skip

    def show(self, n_new):
        """Called after each step, with the rows that it finished."""
        if self._stream is None:
            return
        self._n_done += n_new
        now = time.monotonic()
        if now - self._shown_s < (REPORT_S if self._bar is None else BAR_S):
            return
        self._shown_s = now
        try:
            if self._bar is not None:
                self._bar.n = self._n_done
                self._bar.set_postfix_str(self._figures(now))
            else:
                self._stream.write(f"pagedkv: {self._n_done:,} of {self._n_rows:,} rows, {self._figures(now)}\n")
                self._stream.flush()
        except OSError:  # nobody reads it any more; the rows matter
            self._stream = self._bar = None

    def close(self):
        try:
            if self._bar is not None:
                self._bar.n = self._n_done
                self._bar.set_postfix_str(self._figures(time.monotonic()))
                self._bar.close()
        except OSError:
            pass


def _duration(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


@dataclass
class Outcome:
    """How a run ended.

    Attributes
    ----------
    n_rows, n_done : int
        Lines, and those whose rows are there now.
    n_errors : int
        Rows with an error.
    n_tokens : int
        Of this run's rows.
    n_too_large, n_blocks_needed : int
        Lines that got no row because the pool has fewer blocks than they need, and what the largest of them needs.
    signal : int or None
        What stopped it.
    """

    n_rows: int
    n_done: int
    n_errors: int
    n_tokens: int = 0
    n_too_large: int = 0
    n_blocks_needed: int = 0
    signal: int | None = None


def run(engine, lines, plan, output, stamp, defaults, chat, outcome, progress, received=()):
    """Run the lines that are left, and write their rows.

    Parameters
    ----------
    engine : Engine
    lines : Input
        As many of its lines as fill the engine are in memory at a time, and as many again wait.
    plan : Plan
    output : RowFile or RowStream
        Open.
    stamp : Stamp
    defaults, chat
        As of :func:`read_request`.
    outcome : Outcome
        Counted up as rows are written, so that it holds whatever is raised.
    progress : Progress
    received : list of int
        The run stops when a signal is in it: before the next step, or, with what :func:`stop_signals` gives, inside one.

    Raises
    ------
    OSError, BatchError
        A row could not be written; the input has lost lines. The rows before are there.
    """
    most = 2 * engine.scheduler.max_num_seqs
    going, n_samples = {}, 0  # request number -> Line; samples of them

    def finish(line, row):
        output.write({"id": line.id, "line": line.number, **row, "digest": stamp.row_digest(line)})
        outcome.n_done += 1
        outcome.n_errors += "error" in row

    coming = _requests(lines, plan, engine, defaults, chat)
    ready = next(coming, None)
    while ready is not None or going:
        n_before = outcome.n_done
        # Lines that fail cost no step: look up now and then.
        while ready is not None and outcome.n_done < n_before + 100 and not received:
            line, ids, params, error = ready
            if error is not None:
                finish(line, _error_row(error))
            elif going and n_samples + params.n > most:
                break
            else:
                try:
                    request = _add(engine, ids, params, outcome)
                    if request is not None:
                        going[request.number] = line
                        n_samples += params.n
                except LineError as refusal:
                    finish(line, _error_row(refusal))
            ready = next(coming, None)
        if received:
            outcome.signal = received[0]
            break
        for request in _step(engine, received) if going else ():
            if not request.finished:
                continue
            line = going.pop(request.number)
            n_samples -= request.params.n
            if isinstance(request.error, PoolExhausted):
                raise request.error
            if request.error is not None:
                finish(line, _error_row(LineError("failed", str(request.error))))
                continue
            row = _answer_row(request)
            outcome.n_tokens += row["usage"]["completion_tokens"]
            finish(line, row)
        progress.show(outcome.n_done - n_before)
    if outcome.signal is None and outcome.n_done + outcome.n_too_large < outcome.n_rows:
        raise BatchError(f"{lines.name} was changed while it was read")


def _step(engine, received):
    """Requests of a step; none where a signal stopped it."""
    if not isinstance(received, _Signals):
        return engine.step()
    try:
        received.in_step = True
        return engine.step()
    except _StepStopped:
        return ()
    finally:
        received.in_step = False


def _requests(lines, plan, engine, defaults, chat):
    """Yield line, ids, SamplingParams and LineError of each line that is left."""
    for line, is_done in zip(lines, plan.is_done):
        if not is_done:
            try:
                yield line, *read_request(line, engine.tokenizer, defaults, chat, engine.model.config.context_len), None
            except LineError as error:
                yield line, None, None, error


def _add(engine, ids, params, outcome):
    """The engine's request; None where the pool is too small for it, which is no fault of the line."""
    try:
        return engine.add(None, ids, params)
    except PoolExhausted:
        n_rows = len(ids) + min(params.max_tokens, engine.model.config.context_len - len(ids)) - 1
        outcome.n_too_large += 1
        outcome.n_blocks_needed = max(outcome.n_blocks_needed, -(-n_rows // engine.pool.block_size))
        return None
    except BoundsError as error:
        raise LineError("too_long", f"the prompt is too long: {error.message}") from None
    except (PagedKVError, ValueError) as error:
        raise LineError("bad_request", f"the prompt: {getattr(error, 'message', error)}") from None
