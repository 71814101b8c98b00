"""Rows of the output: what they say, what they are made from, and the file that they stand in."""

import errno
import json
import math
import os
import re
import stat
import time

from pagedkv.batch.lines import digest_of
from pagedkv.errors import PagedKVError

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two runs apart there
    fcntl = None

FORMAT = 1  # of rows; counted up when the same line, model and parameters would give another row
SYNC_S = 5.0  # between calls of fsync: what a power failure may cost


class BatchError(PagedKVError, ValueError):
    """The input, the output or both together cannot be used; nothing was changed."""


# ---- What a row says and is made from --------------------------------------------------------------


def error_row(error):
    message = error.message if len(error.message) <= 500 else error.message[:497] + "..."
    return {"error": {"type": error.kind, "message": " ".join(message.split())}}


def answer_row(request):
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


_TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"


class Stamp:
    """The parts of a row's digest that all rows of a run share.

    Parameters
    ----------
    file : pagedkv.formats.ModelFile
        Read for what a model's fingerprint leaves out: what makes tokens of text and text of tokens, where a text ends
        and how long it may be.
    settings : dict
        All else that rows depend on, as JSON.

    Attributes
    ----------
    tokenizer, settings : str
    model : str or None
        Of :attr:`LlamaModel.fingerprint`, which is to be named when the model is loaded.
    """

    def __init__(self, file, settings):
        config = file.config
        parts = [repr((config.context_len, config.bos_token_id, config.eos_token_ids)).encode()]
        for name, value in sorted(file.metadata.items()):
            if name.startswith("tokenizer."):
                # repr() of a long array is short.
                value = value.tobytes() if hasattr(value, "tobytes") else repr(value).encode("utf-8", "backslashreplace")
                parts += [name.encode(), value]
        if file.path.is_dir():
            for name in _TOKENIZER_FILES:
                path = file.path / name
                parts += [name.encode(), path.read_bytes() if path.is_file() else b"-"]
        self.tokenizer = digest_of(*parts)
        self.settings = digest_of(json.dumps([FORMAT, settings], sort_keys=True).encode())
        self.model = None

    def name_model(self, model):
        self.model = digest_of(model.fingerprint.encode())

    def row_digest(self, line):
        return f"{line.digest}-{self.model}-{self.tokenizer}-{self.settings}"


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
                        raise BatchError(f"line {number} of {self.name} is no row of this command, in this "
                                         "version; give another --output, or --overwrite to lose what it holds")
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
_DIGEST = re.compile("(?:[0-9a-f]{12}-){3}[0-9a-f]{12}")


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
