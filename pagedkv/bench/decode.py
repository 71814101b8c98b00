"""Whole decoding and prefill: tokens a second of everything that a step does, sampling aside."""

from pathlib import Path

import numpy as np

import pagedkv as pk
from pagedkv.bench.kernels import check_decode, filled_sequences
from pagedkv.bench.measure import Row, check, time_calls
from pagedkv.bench.models import DEFAULT_MODEL, Shapes, kv_dtypes, suffix

# What the default model should reach on a machine of 28 GB/s and 230 GFLOP/s: M -> tokens a second.
TARGETS = {1: 40, 8: 250, 32: 400}
TARGET_READ_GB_S = 28
TARGET_FMA_GFLOP_S = 230

# How a model is kept and computed with: label -> arguments of LlamaModel.load.
KINDS = {"float32": {"weights": "float32"}, "as in file": {}, "int8": {"compute": "int8"}}


def load(path_or_name, kind, run):
    """A model of a kind, or None, skipped by name, where this build or this file has no such kind."""
    try:
        return pk.LlamaModel.load(path_or_name, **KINDS[kind])
    except (TypeError, ValueError) as error:
        if kind != "int8":
            raise
        run.skip(f"compute {kind}", str(error))


def measure(paths_or_names, effort, run):
    """Decode and prefill rows.

    Parameters
    ----------
    paths_or_names : list of str
        Models; empty: the default one. The shapes of the second and later ones' rows end in the file's name.
    effort : Effort
    run : Run
        As for the kernels.
    """
    for i, path_or_name in enumerate(paths_or_names or [DEFAULT_MODEL]):
        for kind in KINDS:
            model = load(path_or_name, kind, run)
            if model is not None:
                measure_model(model, kind, f" {Path(path_or_name).name}" if i else "", effort, run)


def measure_model(model, kind, which, effort, run):
    """The rows of one model; `which` ends their shapes."""
    shapes = Shapes.of(model.config)
    short, middle, long = effort.pick((128, 1024, 4096), (16, 64, 96))
    sizes = [(m, short, False) for m in effort.pick((1, 8, 32, 64), (1, 4))]
    sizes += [(m, n, shared) for m, n, shared in ((1, long, False), (effort.pick(32, 4), middle, False),
                                                  (effort.pick(32, 4), middle, True))]
    # How KV is kept does not depend on the weights: its types are measured with one kind of them.
    for dtype in kv_dtypes(shapes, run) if kind == "as in file" else ("float32",):
        for m, n, shared in sizes:
            if dtype != "float32" and n == short and m != effort.pick(32, 4) or n + 64 > model.config.context_len:
                continue
            if not run.wants(m):
                continue
            with run.group() as add:
                decode(model, kind, m, n, shared, dtype, which, effort, add)
    with run.group() as add:
        prefill(model, kind, effort.pick(512, 48), which, effort, add)


def decode(model, kind, m, n_context, shared, dtype, which, effort, add):
    """Greedy steps of one token for each of `m` sequences, each step timed; the sequences keep their length.

    Their contexts are random rows of K and V, as a prompt's would be, or forks of one.
    """
    shapes = Shapes.of(model.config)
    n_steps = effort.pick(32, 4)
    n_owned = 1 if shared else m
    room = n_steps + 48  # of a fork: its steps, and the copy of a tail
    pool = pk.BlockPool(-(-n_owned * (n_context + 32) // 16) + 2 * m * -(-room // 16), shapes.n_layers, shapes.kv_dim,
                        dtype=dtype)  # fmt: skip
    seqs, _, _ = filled_sequences(pool, n_owned, n_context, np.random.default_rng(6), room)
    seqs = [seqs[0].fork() for _ in range(m)] if shared else seqs
    shape = f"M={m} ctx={n_context}{' shared' if shared else ''}{suffix(dtype)}{which}"
    out = np.empty((m, shapes.vocab_size), np.float32)
    rows = [seq.fork() for seq in seqs]
    # Different tokens in every row, so that forks of one prompt part at once.
    start = np.arange(m, dtype=np.int64) * 7 % shapes.vocab_size
    check_decode(model, seqs, start, f"decode {shape}")
    tokens = [start]

    def step(i):
        model.decode_step(tokens[0], rows, out=out)

    def sample(i):
        tokens[0] = out.argmax(1)
        if i == 0:  # the warm-up step
            tokens[0] = start
            for row in rows:
                row.truncate(n_context)

    timing = time_calls(step, effort, reset=sample, n_repeats=n_steps, n_calls=1)
    # Weights once; K and V of the context at the middle of the run once, the row's own written as well.
    own = timing.k / 2
    nbytes = model.weight_nbytes + shapes.kv_token_nbytes(dtype) * (n_owned * n_context + m * (own + 1))
    operations = (2 * m * (shapes.layer_weights + shapes.head_weights)
                  + shapes.attention_operations(m * (n_context + own)))
    add(Row("decode", f"decode {kind}", shape, timing, nbytes=round(nbytes), operations=round(operations), n_tokens=m,
            note="int8 activations" if kind == "int8" else ""))


def prefill(model, kind, n, which, effort, add):
    """One prompt into an empty sequence, logits of its last token."""
    shapes = Shapes.of(model.config)
    tokens = np.random.default_rng(7).integers(0, shapes.vocab_size, n)
    pool = model.new_pool(n_tokens=2 * n + 64)
    with model.new_sequence(pool, n) as seq, model.new_sequence(pool, n) as twin:
        logits = model.prefill(tokens, seq)
        check((logits == model.prefill(tokens, twin, chunk=n // 3 + 1)).all(), "prefill against prefill in chunks")
        seq.truncate(0)
        timing = time_calls(lambda i: model.prefill(tokens, seq), effort, reset=lambda i: seq.truncate(0), n_calls=1)
    n_positions = n * (n + 1) // 2
    add(Row("decode", f"prefill {kind}", f"n={n}{which}", timing,
            nbytes=model.weight_nbytes + shapes.kv_token_nbytes() * n,
            operations=2 * n * shapes.layer_weights + 2 * shapes.head_weights
            + shapes.attention_operations(n_positions), n_tokens=n,
            note="int8 activations" if kind == "int8" else ""))


def health(rows):
    """The project's targets, scaled to this machine, beside what was reached. Information, not a verdict.

    A target is the same share of the limit here as there: where both machines are limited by memory it scales
    with the bandwidth, where both are by arithmetic with the FMA rate. The ceilings are those that the row was
    set beside.

    Returns
    -------
    list of dict
        ``m``, ``target_tokens_s`` (scaled), ``tokens_s`` (median), ``limit``, ``met``.
    """
    found = []
    for row in rows:
        if row.name != "decode float32" or not row.limit or row.engine != "pagedkv":
            continue
        m = next((m for m in TARGETS if row.shape == f"M={m} ctx=128"), None)
        if m is None:
            continue
        there_s = max(row.nbytes / (TARGET_READ_GB_S * 1e9), row.operations / (TARGET_FMA_GFLOP_S * 1e9))
        target = TARGETS[m] * there_s / row.limit_s
        found.append({"m": m, "target_tokens_s": target, "tokens_s": row.tokens_s, "limit": row.limit,
                      "met": row.tokens_s >= target})
    return found
