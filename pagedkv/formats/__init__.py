"""Model files: a GGUF file or a Hugging Face directory becomes a configuration and tensors."""

import os
from pathlib import Path

from pagedkv.errors import FormatError
from pagedkv.formats.gguf import open_gguf
from pagedkv.formats.hf import open_hf
from pagedkv.formats.tensor import ModelFile, Tensor

__all__ = ["ModelFile", "Tensor", "open_model"]


def open_model(path):
    """Open a model and check every tensor that it needs.

    Parameters
    ----------
    path : str or os.PathLike
        A ``.gguf`` file, or a directory with ``config.json`` and safetensors.

    Returns
    -------
    ModelFile
        No weight is read yet.

    Raises
    ------
    FileNotFoundError
        Nothing is there.
    FormatError
        The file is damaged, contradicts itself or is of a kind not read here.

    Examples
    --------
    >>> with open_model("model.gguf") as file:                      # doctest: +SKIP
    ...     q = file.tensor("model.layers.0.self_attn.q_proj.weight")
    ...     q.dtype, q.shape, q.float32().dtype
    ('q4_1', (576, 576), dtype('float32'))
    """
    path = Path(os.fspath(path))
    if path.is_dir():
        return open_hf(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no model file or directory at {path}")
    if path.suffix == ".safetensors":
        raise FormatError(f"{path} is a single safetensors file; give the directory that holds it and its config.json")
    return open_gguf(path)
