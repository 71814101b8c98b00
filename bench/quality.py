"""What ``compute="int8"`` costs in quality: the same text under float32 and int8.

    python -m bench.quality [--model PATH_OR_NAME] [--tokens N] TEXT_FILE ...

Prints, over the rows of all files (each at most N tokens, one sequence a file): the mean log-probability of the next
token under both, the standard error of its difference, the divergence of int8 from float32 (mean Kullback-Leibler,
nats) and how often both put the same token first.
"""

import argparse
from pathlib import Path

import numpy as np
import pagedkv as pk


def log_probs(logits):
    """float64 log-softmax of float32 logits [n, vocab_size]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def compare(exact, other, tokens):
    """(log-probabilities of the next token under both, divergence, same first token), each [len(tokens) - 1]."""
    a, b = (log_probs(logits[:-1]) for logits in (exact, other))
    rows, following = np.arange(len(tokens) - 1), np.asarray(tokens[1:])
    divergence = (np.exp(a) * (a - b)).sum(axis=1)
    return a[rows, following], b[rows, following], divergence, a.argmax(axis=1) == b.argmax(axis=1)


def all_logits(model, tokens):
    with model.new_sequence(model.new_pool(n_tokens=len(tokens))) as seq:
        return model.prefill(tokens, seq, all_logits=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT_FILE")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of each file at most")
    args = parser.parse_args()
    exact, other = (pk.LlamaModel.load(args.model, compute=compute) for compute in ("float32", "int8"))
    parts = []
    for path in args.texts:
        tokens = exact.tokenizer.encode(path.read_text())[: args.tokens]
        parts.append(compare(all_logits(exact, tokens), all_logits(other, tokens), tokens))
    float32, int8, divergence, same = (np.concatenate(column) for column in zip(*parts))
    error = (int8 - float32).std() / len(int8) ** 0.5
    print(f"{len(int8)} rows of {', '.join(path.name for path in args.texts)}")
    print(f"mean log-probability: float32 {float32.mean():.4f}, int8 {int8.mean():.4f}, "
          f"difference {(int8 - float32).mean():+.4f} +- {error:.4f}")
    print(f"divergence {divergence.mean():.5f} nats; the same first token in {100 * same.mean():.2f}% of the rows")


if __name__ == "__main__":
    main()
