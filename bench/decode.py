"""Whole decoding and prefill: tokens a second of everything that a step does, sampling aside."""

import numpy as np

import pagedkv as pk
from bench.kernels import check_decode
from bench.measure import Row, check, time_calls
from bench.models import DEFAULT_MODEL, Shapes

# What the default model should reach on a machine of 28 GB/s and 230 GFLOP/s: M -> tokens a second.
TARGETS = {1: 40, 8: 250, 32: 400}
TARGET_READ_GB_S = 28
TARGET_FMA_GFLOP_S = 230


def run(path_or_name, effort, group):
    """Decode and prefill rows.

    Parameters
    ----------
    path_or_name : str or None
        None: the default model.
    effort : Effort
    group : callable
        As for the kernels.
    """
    for weights in ("float32", "auto"):
        run_weights(pk.LlamaModel.load(path_or_name or DEFAULT_MODEL, weights=weights), effort, group,
                    "float32" if weights == "float32" else "as in file")


def run_weights(model, effort, group, label):
    """The rows of one model; `label` says how its weights are kept."""
    shapes = Shapes.of(model.config)
    rng = np.random.default_rng(6)
    n_prompt = effort.pick(128, 16)
    batches = effort.pick((1, 8, 32, 64), (1, 8))
    n_steps = effort.pick(32, 4)

    room = n_prompt + n_steps + 24
    pool = model.new_pool(n_tokens=(max(batches) + 1) * 2 * room)
    prompts = [rng.integers(0, shapes.vocab_size, n_prompt) for _ in range(max(batches))]
    seqs = [model.new_sequence(pool, room) for _ in prompts]
    model.step(list(zip(seqs, prompts)))
    for m in batches:
        with group() as add:
            decode(model, shapes, seqs[:m], m * n_prompt, f"M={m} ctx={n_prompt}", n_steps, effort, add, label)
    del pool, seqs

    n_shared, m = effort.pick((1024, 32), (64, 4))
    pool = model.new_pool(n_tokens=n_shared + (2 * m + 2) * (n_steps + 48))
    with model.new_sequence(pool, n_shared + n_steps + 24) as first, group() as add:
        model.prefill(rng.integers(0, shapes.vocab_size, n_shared), first)
        forks = [first.fork() for _ in range(m)]
        decode(model, shapes, forks, n_shared, f"M={m} ctx={n_shared} shared", n_steps, effort, add, label)
    del pool, forks

    with group() as add:
        prefill(model, shapes, effort.pick(512, 48), effort, add, label)


def decode(model, shapes, seqs, n_positions, shape, n_steps, effort, add, label):
    """Greedy steps of one token for each sequence, each step timed; the sequences keep their length.

    `n_positions` is how many positions the sequences hold, shared ones counted once.
    """
    m, n_context = len(seqs), len(seqs[0])
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
    for row in rows:
        row.free()
    # Weights once; K and V of the context at the middle of the run once, the row's own written as well.
    own = timing.k / 2
    nbytes = model.weight_nbytes + shapes.kv_token_nbytes * (n_positions + m * (own + 1))
    operations = (2 * m * (shapes.layer_weights + shapes.head_weights)
                  + shapes.attention_operations(m * (n_context + own)))
    add(Row("decode", f"decode {label}", shape, timing, nbytes=round(nbytes), operations=round(operations), n_tokens=m))


def prefill(model, shapes, n, effort, add, label):
    """One prompt into an empty sequence, logits of its last token."""
    tokens = np.random.default_rng(7).integers(0, shapes.vocab_size, n)
    pool = model.new_pool(n_tokens=2 * n + 64)
    with model.new_sequence(pool, n) as seq, model.new_sequence(pool, n) as twin:
        logits = model.prefill(tokens, seq)
        check((logits == model.prefill(tokens, twin, chunk=n // 3 + 1)).all(), "prefill against prefill in chunks")
        seq.truncate(0)
        timing = time_calls(lambda i: model.prefill(tokens, seq), effort, reset=lambda i: seq.truncate(0), n_calls=1)
    n_positions = n * (n + 1) // 2
    add(Row("decode", f"prefill {label}", f"n={n}", timing,
            nbytes=model.weight_nbytes + shapes.kv_token_nbytes * n,
            operations=2 * n * shapes.layer_weights + 2 * shapes.head_weights
            + shapes.attention_operations(n_positions), n_tokens=n))


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
