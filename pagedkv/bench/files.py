"""The default model in other types, as GGUF files that every engine reads. Written once, into the cache folder."""

import hashlib
import os
from collections import Counter

import numpy as np

from pagedkv import hub
from pagedkv.formats import open_model

TYPES = ("F32", "F16", "Q8_0")


class NoFile(Exception):
    """A file for the peers cannot be made; the message says why."""


def kind_of(path):
    """The type of most weights of a GGUF file, as in ``TYPES``."""
    nbytes = Counter()
    with open_model(path) as file:
        for name in file.names():
            tensor = file.tensor(name)
            nbytes[tensor.dtype] += tensor.stored.size
    return nbytes.most_common(1)[0][0].upper()


def write(path, kind):
    """`path`, a GGUF file, with all its matrices as `kind`; vectors stay float32.

    The source's values are what its own types stand for, so F32 is the same model and F16 and Q8_0 are it rounded.
    Metadata is copied. `gguf` (ggml's own package) reads, quantises and writes.

    Returns
    -------
    pathlib.Path
        In the cache folder; a file that is there already is not written again.

    Raises
    ------
    NoFile
        `gguf` is not installed, or `path` is no GGUF file.
    """
    try:
        import gguf
    except ImportError:
        raise NoFile("gguf is not installed (pip install 'pagedkv[bench]')") from None
    if path.suffix != ".gguf":
        raise NoFile(f"{path.name} is no GGUF file, which is what the peers read")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    target = hub.cache_folder() / "bench" / f"{path.stem}-{digest}-{kind}.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(path)
    values = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    partial = target.with_suffix(f".{os.getpid()}.part")
    writer = gguf.GGUFWriter(partial, values.pop("general.architecture").contents())
    values.pop("general.file_type", None)
    writer.add_file_type({"F32": 0, "F16": 1, "Q8_0": 7}[kind])
    for name, field in values.items():
        kinds = field.types
        writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    stored = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        w = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if w.ndim == 1:
            writer.add_tensor(tensor.name, w)
        else:
            writer.add_tensor(tensor.name, gguf.quantize(w, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(partial, target)
    return target
