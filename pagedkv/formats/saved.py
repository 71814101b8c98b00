"""A saved sequence: a safetensors file with the stored rows, their tokens and the name of their model.

safetensors, so that any of its readers opens the file; docs/formats.md lists the tensors. From the shape of ``k`` and
the metadata every byte of the layout follows, so a header is valid if it says what the writer would have said.
"""

import json
import os
import secrets
import zlib
from pathlib import Path
from reprlib import repr as short  # a hostile value may be long
from typing import NamedTuple

import numpy as np

from pagedkv import _core
from pagedkv.errors import FormatError
from pagedkv.formats.hf import _parse_object

VERSION = 1

_FORMAT = "pagedkv sequence"

# A character is 12 bytes of JSON at most (two times \uXXXX), and all else that a header says is under 4 KiB.
_MOST_MODEL_LEN = 2048
_MOST_HEADER_NBYTES = 1 << 16

# Of a pass over the rows: small beside a sequence of any length, large beside a call.
_PIECE_NBYTES = 4 << 20

# How a pool's values look to safetensors.
_VALUES = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "q8_0": ("I8", 1)}


class SequenceHeader(NamedTuple):
    """What a saved sequence says of itself; :meth:`Sequence.read_header` reads it without the rows.

    Attributes
    ----------
    n_layers, n_tokens, kv_dim : int
        K and V are ``[n_layers, n_tokens, kv_dim]`` each.
    dtype : str
        Of the pool that it came from, and of those that it can be loaded into.
    model : str or None
        :attr:`LlamaModel.fingerprint`, or the name that it was saved under.
    tokens : list of int or None
        One for each row, where they were saved.
    """

    n_layers: int
    n_tokens: int
    kv_dim: int
    dtype: str
    model: str | None = None
    tokens: list[int] | None = None


def _parts(header):
    """The tensors that hold rows: name -> bytes of a row in one layer."""
    scales_nbytes = _core.kv_scales_nbytes(header.dtype, header.kv_dim)
    values_nbytes = _core.kv_row_nbytes(header.dtype, header.kv_dim) - scales_nbytes
    parts = {"k": values_nbytes, "v": values_nbytes}
    return parts | {"k_scale": scales_nbytes, "v_scale": scales_nbytes} if scales_nbytes else parts


def _describe(header, has_tokens):
    """The JSON object, and the bytes after it. Rows first, so that K begins at a multiple of 64."""
    groups = header.kv_dim // _core.kv_group(header.dtype)
    shapes = {
        name: ("F16", [header.n_layers, header.n_tokens, groups]) if name.endswith("scale")
        else (_VALUES[header.dtype][0], [header.n_layers, header.n_tokens, header.kv_dim]) for name in _parts(header)
    }  # fmt: skip
    sizes = {name: header.n_layers * header.n_tokens * nbytes for name, nbytes in _parts(header).items()}
    if has_tokens:
        shapes["tokens"], sizes["tokens"] = ("I64", [header.n_tokens]), 8 * header.n_tokens
    for name in ("head_crc32", "crc32"):
        shapes[name], sizes[name] = ("U32", [1]), 4
    model = {} if header.model is None else {"model": header.model}
    described = {"__metadata__": {"format": _FORMAT, "version": str(VERSION), "dtype": header.dtype} | model}
    end = 0
    for name, (dtype, shape) in shapes.items():
        described[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    return described, end


def _head(described):
    """Length and JSON, padded with spaces to a multiple of 64 bytes."""
    text = json.dumps(described).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def _pieces(header):
    """(part, layer, first row, rows, bytes of a row) of every piece of the data, in the order of the file."""
    if header.n_tokens == 0:  # of any number of layers
        return
    for part, row_nbytes in _parts(header).items():
        n = max(1, _PIECE_NBYTES // row_nbytes)
        for layer in range(header.n_layers):
            for begin in range(0, header.n_tokens, n):
                yield part, layer, begin, min(n, header.n_tokens - begin), row_nbytes


def _crc_bytes(crc):
    return crc.to_bytes(4, "little")


def write_saved(path, header, take):
    """Write a sequence, or nothing: a file of this name appears, or is replaced, when all of it is on the disk.

    Parameters
    ----------
    path : str or os.PathLike
    header : SequenceHeader
    take : callable
        ``take(part, layer, begin, rows)`` fills the uint8 array `rows` with the stored rows from `begin` on.

    Raises
    ------
    ValueError
        The model's name is longer than 2048 characters or is no text.
    OSError
        The file cannot be written, or what is there is no regular file. Nothing is left behind.
    """
    path = Path(os.fspath(path))
    if header.model is not None:
        header.model.encode()  # a lone surrogate, which no JSON reader takes, is a ValueError
        if len(header.model) > _MOST_MODEL_LEN:
            raise ValueError(f"a model's name of {len(header.model)} characters; at most {_MOST_MODEL_LEN} are kept")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is not a regular file, and is not replaced")
    head = _head(_describe(header, header.tokens is not None)[0])
    tokens = b"" if header.tokens is None else np.asarray(header.tokens, "<i8").tobytes()
    # Beside the target, so that the move stays within one file system; not by mkstemp, as its files are the owner's
    # alone and this one should have a new file's usual permissions.
    unfinished = path.parent / f".pagedkv-{secrets.token_hex(8)}.tmp"
    try:
        with open(unfinished, "xb") as file:
            crc = zlib.crc32(head)
            file.write(head)
            for part, layer, begin, n, row_nbytes in _pieces(header):
                rows = np.empty((n, row_nbytes), np.uint8)
                take(part, layer, begin, rows)
                crc = zlib.crc32(rows, crc)
                file.write(rows)
            tail = tokens + _crc_bytes(zlib.crc32(tokens, zlib.crc32(head)))
            file.write(tail + _crc_bytes(zlib.crc32(tail, crc)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


class SavedSequence:
    """An open file of :func:`write_saved`, its header checked. A context manager.

    Parameters
    ----------
    path : str or os.PathLike

    Attributes
    ----------
    header : SequenceHeader

    Raises
    ------
    FormatError
        It is no saved sequence, or is cut off, damaged, or of another version. Nothing larger than the header, which
        is small, and the tokens is read or allocated.
    OSError
        It cannot be read.
    """

    def __init__(self, path):
        self._path = Path(os.fspath(path))
        if self._path.exists() and not self._path.is_file():
            raise FormatError(f"{self._path} is not a regular file")
        self._file = open(self._path, "rb")
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _refuse(self, what):
        raise FormatError(f"{self._path}: {what}")

    def _read_into(self, array):
        """Fill a uint8 array from where the file stands."""
        at = self._file.tell()
        if array.size and self._file.readinto(array.reshape(-1)) != array.size:
            self._refuse(f"ends before byte {at + array.size}, though it was longer when it was opened")

    def _read(self, n):
        array = np.empty(n, np.uint8)
        self._read_into(array)
        return array.tobytes()

    def _read_header(self):
        file_nbytes = os.fstat(self._file.fileno()).st_size
        if file_nbytes < 8:
            self._refuse(f"{file_nbytes} bytes are too few for a saved sequence")
        length = self._read(8)
        text_nbytes = int.from_bytes(length, "little")
        if text_nbytes > min(file_nbytes - 8, _MOST_HEADER_NBYTES):
            self._refuse(f"a header of {text_nbytes} bytes at byte 0 does not fit (file: {file_nbytes} bytes, limit: "
                         f"{_MOST_HEADER_NBYTES})")
        self._head = length + self._read(text_nbytes)
        described = _parse_object(self._head[8:], f"{self._path}: the header at byte 8")
        metadata, k = described.get("__metadata__"), described.get("k")
        if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
            self._refuse(f"is not a saved sequence: its header does not say {_FORMAT!r}")
        if metadata.get("version") != str(VERSION):
            self._refuse(f"is of version {short(metadata.get('version'))}; {VERSION} is read")
        dtype, model = metadata.get("dtype"), metadata.get("model")
        shape = k.get("shape") if isinstance(k, dict) else None
        if not isinstance(dtype, str) or dtype not in _core.KV_DTYPES or not isinstance(model, str | None):
            self._refuse(f"its rows are of type {short(dtype)}, of the model {short(model)}")
        # As many as a pool can have (2**31 - 1 blocks of 256 tokens); the products stay small for Python.
        if not isinstance(shape, list) or len(shape) != 3 or any(
                type(count) is not int or not least <= count < 2**39 for count, least in zip(shape, (1, 0, 1))):
            self._refuse(f"the shape of k is {short(shape)}, not [n_layers, n_tokens, kv_dim]")
        header = SequenceHeader(*shape, dtype, model)
        if header.kv_dim % _core.kv_group(dtype):
            self._refuse(f"kv_dim {header.kv_dim} is no multiple of the {_core.kv_group(dtype)} values of a scale")
        expected, data_nbytes = _describe(header, "tokens" in described)
        if described != expected:
            self._refuse(f"the header at byte 8 does not describe {header.n_tokens} rows of {header.n_layers} layers "
                         f"of {header.kv_dim} values of {dtype}")
        if file_nbytes != len(self._head) + data_nbytes:
            self._refuse(f"has {file_nbytes} bytes, its header describes {len(self._head) + data_nbytes}")
        self._end = file_nbytes
        tokens_nbytes = 8 * header.n_tokens if "tokens" in described else 0
        at = self._file.seek(file_nbytes - 8 - tokens_nbytes)
        self._tail = self._read(tokens_nbytes + 8)
        if _crc_bytes(zlib.crc32(self._tail[:-8], zlib.crc32(self._head))) != self._tail[-8:-4]:
            self._refuse(f"the header at byte 0 and the tokens at byte {at} do not have the checksum at byte "
                         f"{file_nbytes - 8}: the file is damaged")
        if "tokens" in described:
            header = header._replace(tokens=np.frombuffer(self._tail[:-8], "<i8").tolist())
        return header

    def read_rows(self, put):
        """Hand all rows over, then compare the checksum: until this returns they are not to be trusted.

        Parameters
        ----------
        put : callable
            ``put(part, layer, begin, rows)`` gets the stored rows from `begin` on, as a uint8 array.
        """
        self._file.seek(len(self._head))
        crc, rows = zlib.crc32(self._head), None
        for part, layer, begin, n, row_nbytes in _pieces(self.header):
            if rows is None or rows.shape != (n, row_nbytes):
                rows = np.empty((n, row_nbytes), np.uint8)
            self._read_into(rows)
            crc = zlib.crc32(rows, crc)
            put(part, layer, begin, rows)
        if _crc_bytes(zlib.crc32(self._tail[:-4], crc)) != self._tail[-4:]:
            self._refuse(f"bytes 0 to {self._end - 4} do not have the checksum at byte {self._end - 4}: the file is "
                         "damaged")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()
