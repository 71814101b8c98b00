"""Make ``tiny_logits.npz``: logits of transformers for the seeded models of ``tests/tiny.py``.

Needs torch and transformers, which the tests do not. Made with transformers 5.24.0 and
torch 2.13.0 (CPU)::

    PYTHONPATH=.:tests python tests/golden/make_golden.py

For each name in ``tiny.GOLDEN_CASES`` the file holds

    <name>/tokens  int64 [n]             the prompt
    <name>/rows    int64 [m]             positions kept
    <name>/logits  float32 [m, vocab]    logits at these positions: float32 weights, eager attention

Names that the file holds already stay as they are: delete it to make all anew.

The models are written as Hugging Face directories, in the case's own spelling of the
configuration, and read back by transformers. ``tiny.golden_cases()`` reads the result.
"""

import tempfile

import numpy as np
import tiny
import torch
from transformers import AutoModelForCausalLM


def logits_of(config, seed, spelling, tokens):
    """Logits float32 [n, vocab] of all positions, from one forward pass."""
    with tempfile.TemporaryDirectory() as directory:
        tiny.write_hf(directory, config, tiny.tiny_tensors(config, seed), **spelling)
        model, report = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
            raise SystemExit(f"transformers did not take the weights as they are: {report}")
        print("   ", model.config.rope_parameters)
        with torch.no_grad():
            return model.eval()(torch.from_numpy(tokens)[None]).logits[0].numpy()


def main():
    arrays = dict(np.load(tiny.GOLDEN)) if tiny.GOLDEN.exists() else {}
    for name, (config, seed, spelling, n_tokens, rows) in tiny.GOLDEN_CASES.items():
        if f"{name}/logits" in arrays:
            continue
        tokens = np.random.default_rng(seed + 1000).integers(0, config.vocab_size, n_tokens)
        logits = logits_of(config, seed, spelling, tokens)
        rows = np.array(rows)
        arrays |= {f"{name}/tokens": tokens, f"{name}/rows": rows, f"{name}/logits": logits[rows]}
        top = np.sort(logits, axis=-1)
        print(f"{name}: logits within {np.abs(logits).max():.1f}, std {logits.std():.2f}, least margin {(top[:, -1] - top[:, -2]).min():.1e}")
    np.savez_compressed(tiny.GOLDEN, **arrays)
    print(f"{tiny.GOLDEN.name}: {tiny.GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
