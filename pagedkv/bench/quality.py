"""What rounding costs in quality: the same text under float32, and under int8 products or another type of K and V.

    python -m pagedkv.bench.quality [--model PATH_OR_NAME] [--tokens N] TEXT_FILE ...

Each file is one sequence of at most N tokens. A line for each variant: the mean log-probability of the next token less
that of float32, with its standard error; the divergence from float32 (mean Kullback-Leibler, nats); how often both put
the same token first; the largest difference of a logit.
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
    """Columns of [len(tokens) - 1]: log-probability of the next token, exact and other; divergence; same first token;
    largest difference of a logit."""
    a, b = (log_probs(logits[:-1]) for logits in (exact, other))
    rows, following = np.arange(len(tokens) - 1), np.asarray(tokens[1:])
    divergence = (np.exp(a) * (a - b)).sum(axis=1)
    return (a[rows, following], b[rows, following], divergence, a.argmax(axis=1) == b.argmax(axis=1),
            np.abs(exact[:-1] - other[:-1]).max(axis=1))  # fmt: skip


def all_logits(model, tokens, kv_dtype="float32"):
    with model.new_sequence(model.new_pool(n_tokens=len(tokens), dtype=kv_dtype)) as seq:
        return model.prefill(tokens, seq, all_logits=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", type=Path, metavar="TEXT_FILE")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of each file at most")
    args = parser.parse_args()
    models = {compute: pk.LlamaModel.load(args.model, compute=compute) for compute in ("float32", "int8")}
    variants = [("float32", dtype) for dtype in ("float16", "bfloat16", "q8_0")] + [("int8", "float32"), ("int8", "q8_0")]
    columns = {variant: [] for variant in variants}
    for path in args.texts:
        tokens = models["float32"].tokenizer.encode(path.read_text())[: args.tokens]
        exact = all_logits(models["float32"], tokens)
        for compute, kv_dtype in variants:
            columns[compute, kv_dtype].append(compare(exact, all_logits(models[compute], tokens, kv_dtype), tokens))
    for (compute, kv_dtype), parts in columns.items():
        exact, other, divergence, same, largest = (np.concatenate(column) for column in zip(*parts))
        if (compute, kv_dtype) == variants[0]:
            print(f"{len(exact)} rows of {', '.join(path.name for path in args.texts)}; "
                  f"mean log-probability of the next token {exact.mean():.4f} in float32")  # fmt: skip
        error = (other - exact).std() / len(exact) ** 0.5
        print(f"compute {compute:7}  K and V {kv_dtype:8}  log-probability {(other - exact).mean():+.5f} +- {error:.5f}  "
              f"divergence {divergence.mean():.6f}  same first token {100 * same.mean():6.2f}%  "
              f"largest difference {largest.max():.4f}")  # fmt: skip


if __name__ == "__main__":
    main()
