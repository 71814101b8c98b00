"""Compute a long prompt once, keep its rows on disk, and go on from them in another process: the same bits."""

import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pagedkv as pk


def save(model: pk.LlamaModel, text: str, path: Path) -> None:
    """Prefill `text` and write its rows and token ids."""
    tokens = model.tokenizer.encode(text)
    with model.new_sequence(model.new_pool(n_tokens=len(tokens))) as seq:
        model.prefill(tokens, seq)
        seq.save(path, tokens, model)


def go_on(model: pk.LlamaModel, path: Path, text: str) -> npt.NDArray[np.float32]:
    """Logits ``[vocab_size]`` after the saved prefix and `text`, of which only `text` is computed."""
    more = model.tokenizer.encode(text, add_special_tokens=False)
    n_saved = pk.Sequence.read_header(path).n_tokens
    with pk.Sequence.load(path, model.new_pool(n_tokens=n_saved + len(more)), model=model) as seq:
        return model.prefill(more, seq)


if __name__ == "__main__":
    model = pk.LlamaModel.load("smollm2-135m")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefix.kv"
        save(model, "A list of capitals. Spain: Madrid. Italy: Rome.", path)
        for country in (" France:", " Germany:"):
            token = int(go_on(model, path, country).argmax())
            print(f"{path.stat().st_size:,} bytes;{country}{model.tokenizer.decode([token])}")
