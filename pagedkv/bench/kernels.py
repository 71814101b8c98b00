"""The kernels one by one: each checked against NumPy float64 and against its one-row twin, then timed."""

import numpy as np

import pagedkv as pk
from pagedkv import _core
from pagedkv.bench.measure import Row, check, time_calls
from pagedkv.bench.models import kv_dtypes, load_attention_model, suffix
from pagedkv.formats import quants

U = 2.0**-24  # unit roundoff of float32


def measure(shapes, effort, run):
    """All kernel rows, group by group; the ceilings are probed after each group.

    Parameters
    ----------
    shapes : Shapes
    effort : Effort
    run : Run
        Its ``group()`` is a context manager, which gives a function that takes a Row.
    """
    dtypes = kv_dtypes(shapes, run)
    for name, (n, k) in (shapes.matrices | {"head": (shapes.vocab_size, shapes.hidden_dim)}).items():
        with run.group() as add:
            matmul(name, n, k, effort, add)
    n, k = 2 * shapes.ffn_dim, -(-shapes.hidden_dim // 256) * 256
    for dtype in quants.BLOCKS:
        with run.group() as add:
            matmul_of_type(dtype, n, k, effort, add)
    with run.group() as add:
        rows_ops(shapes, effort, add)
    with run.group() as add:
        append_and_gather(shapes, effort, add)
    for dtype in dtypes:
        with run.group() as add:
            paged_attention(shapes, dtype, effort, add)
    for dtype in dtypes:
        attention_steps(shapes, dtype, effort, run)
    with run.group() as add:
        pool_ops(shapes, effort, add)


# ---------------------------------------------------------------------------------------------------
# Matrices

def matmul(name, n, k, effort, add):
    """``y = x W^T`` for a matrix [n, k] at every M; weights go round in copies that leave the cache."""
    rng = np.random.default_rng(n * k)
    w = rng.standard_normal((n, k), dtype=np.float32)
    copies = [pk.pack(w)]
    copies += [pk.pack(w) for _ in range(effort.n_copies(copies[0].nbytes) - 1)]
    for m in effort.pick((1, 2, 4, 8, 16, 32, 64, 128, 512), (1, 8)):
        shape = f"M={m} n={n} k={k}"
        x = rng.standard_normal((m, k), dtype=np.float32)
        out = np.empty((m, n), np.float32)
        _core.matmul(x, copies[0], out)
        check_matmul(x, w, copies[0], out, f"matmul {name} {shape}")
        timing = time_calls(lambda i: _core.matmul(x, copies[i % len(copies)], out), effort)
        add(Row("kernels", f"matmul {name}", shape, timing, nbytes=copies[0].nbytes + x.nbytes + out.nbytes,
                operations=2 * m * n * k))


def check_matmul(x, w, packed, out, what):
    """Rows equal themselves alone; some columns are as near to float64 as k roundings allow."""
    m, k = x.shape
    for i in {0, m // 2, m - 1}:
        check((pk.matmul(x[i], packed) == out[i]).all(), f"{what}, row {i} against the row alone")
    columns = np.unique(np.linspace(0, len(w) - 1, 48).astype(int))
    rows = np.unique(np.linspace(0, m - 1, 16).astype(int))
    x64, w64 = x[rows].astype(np.float64), w[columns].astype(np.float64)
    bound = 1.01 * k * U * (np.abs(x64) @ np.abs(w64).T)
    check((np.abs(out[np.ix_(rows, columns)] - x64 @ w64.T) <= bound).all(), f"{what} against float64")


# Where the float16 scales and minima stand in a block; all else is codes, of which any bits will do.
HALFS = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2),
         "q6_k": (208,)}  # fmt: skip


def random_codes(dtype, n, k, rng):
    """Stored rows of random weights [n, k], as a file has them: uint8, one row after the other."""
    if dtype not in HALFS:
        w = rng.standard_normal((n, k), dtype=np.float32)
        if dtype == "bf16":
            return np.ascontiguousarray((w.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8).ravel()
        return w.astype(np.float16 if dtype == "f16" else np.float32).view(np.uint8).ravel()
    block_len, block_nbytes = quants.BLOCKS[dtype]
    blocks = rng.integers(0, 256, (n * k // block_len, block_nbytes), np.uint8)
    for at in HALFS[dtype]:
        blocks[:, at:at + 2] = (0.01 * (1 + rng.random((len(blocks), 1)))).astype(np.float16).view(np.uint8)
    return blocks.ravel()


def matmul_of_type(dtype, n, k, effort, add):
    """As :func:`matmul`, the weights kept as codes."""
    rng = np.random.default_rng(8)
    raw = random_codes(dtype, n, k, rng)
    w = quants.dequantize(raw, dtype, (n, k))
    expanded = pk.pack(w)

    def pack():
        packed = pk.PackedWeight(n, k, [_core.DTYPES[dtype]] * -(-n // _core.PANEL))
        packed._fill(raw, n)
        return packed

    copies = [pack()]
    copies += [pack() for _ in range(effort.n_copies(copies[0].nbytes) - 1)]
    for m in effort.pick((1, 8, 32, 64), (1, 8)):
        shape = f"M={m} n={n} k={k}"
        x = rng.standard_normal((m, k), dtype=np.float32)
        out = np.empty((m, n), np.float32)
        _core.matmul(x, copies[0], out)
        check_matmul(x, w, copies[0], out, f"matmul {dtype} {shape}")
        check((pk.matmul(x, expanded) == out).all(), f"matmul {dtype} {shape} against the float32 weights")
        timing = time_calls(lambda i: _core.matmul(x, copies[i % len(copies)], out), effort)
        add(Row("kernels", f"matmul {dtype}", shape, timing, nbytes=copies[0].nbytes + x.nbytes + out.nbytes,
                operations=2 * m * n * k))


# ---------------------------------------------------------------------------------------------------
# Operations on rows

def rows_ops(shapes, effort, add):
    """RMSNorm, SwiGLU and softmax: hot as in a step, and cold, streaming through memory.

    Operations an element: RMSNorm 4 (square, add, scale, gamma), SwiGLU 5 (negate, exp, add, divide, multiply),
    softmax 5 (compare, subtract, exp, add, multiply); an exp counts as one.
    """
    rng = np.random.default_rng(2)
    for name, width, n_arrays, n_operations in (
        ("rmsnorm", shapes.hidden_dim, 2, 4), ("swiglu", shapes.ffn_dim, 3, 5), ("softmax", shapes.vocab_size, 2, 5),
    ):  # fmt: skip
        for m, cold in effort.pick(((1, False), (32, False), (512, True)), ((1, False), (8, True))):
            if name == "softmax":
                m = min(m, 32)  # 32 rows of a vocabulary are as many bytes as 512 of the others
            nbytes = 4 * m * width * n_arrays
            n_copies = effort.n_copies(nbytes) if cold else 1
            arrays = [[rng.standard_normal((m, width), dtype=np.float32) for _ in range(n_arrays)]]
            arrays += [[array.copy() for array in arrays[0]] for _ in range(n_copies - 1)]
            gamma = np.abs(rng.standard_normal((1, width), dtype=np.float32))

            def call(i):
                a = arrays[i % n_copies]
                if name == "rmsnorm":
                    _core.rmsnorm(a[0], gamma, 1e-5, a[-1])
                elif name == "swiglu":
                    _core.swiglu(a[0], a[1], a[-1])
                else:
                    _core.softmax(a[0], a[-1])

            call(0)
            check_rows(name, arrays[0], gamma, f"{name} M={m}")
            add(Row("kernels", name, f"M={m} n={width}{'' if cold else ' hot'}", time_calls(call, effort),
                    nbytes=nbytes, operations=n_operations * m * width, cold=cold))


def check_rows(name, arrays, gamma, what):
    x, y = arrays[0], arrays[-1]
    x64, m, n = x.astype(np.float64), *x.shape
    if name == "rmsnorm":
        want = x64 / np.sqrt((x64 * x64).mean(1, keepdims=True) + 1e-5) * gamma
        alone = pk.rmsnorm(x[-1], gamma[0], 1e-5)
    elif name == "swiglu":
        want = x64 / (1 + np.exp(-x64)) * arrays[1]
        alone = pk.swiglu(x[-1], arrays[1][-1])
    else:
        e = np.exp(x64 - x64.max(1, keepdims=True))
        want = e / e.sum(1, keepdims=True)
        alone = pk.softmax(x[-1])
    check((alone == y[-1]).all(), f"{what}, the last row against the row alone")
    # n roundings of a sum of one sign, and a few of an exp whose argument was rounded.
    check(np.allclose(y, want, rtol=(n + 64) * U, atol=1e-37), f"{what} against float64")


# ---------------------------------------------------------------------------------------------------
# Rows into the pool and out of it

def filled_sequences(pool, n, n_tokens, rng, room=16):
    """`n` sequences of `n_tokens` random rows, and the rows ``(k, v)`` that each layer of each got."""
    k, v = (rng.standard_normal((n_tokens, pool.kv_dim), dtype=np.float32) for _ in range(2))
    seqs = []
    for _ in range(n):
        seq = pk.Sequence(pool, n_tokens + room)
        seq.ensure_append(n_tokens)
        for layer in range(pool.n_layers):
            seq.append_layer(layer, k, v)
        seq.advance(n_tokens)
        seqs.append(seq)
    return seqs, k, v


def new_pool(shapes, n_seqs, n_tokens, dtype="float32"):
    """A pool for `n_seqs` sequences of `n_tokens` tokens and a few more each."""
    return pk.BlockPool(n_seqs * (n_tokens // 16 + 2), shapes.n_layers, shapes.kv_dim, dtype=dtype)


def stored_rows(seq, shapes, layer, n):
    """What a layer of a sequence holds, ``(K, V)``, each float32 [n, kv_dim]: the rows, rounded as the pool does."""
    heads = [seq.gather_head(layer, head, shapes.head_dim, total_k=n) for head in range(shapes.n_kv_heads)]
    return tuple(np.hstack(each) for each in zip(*heads))


def append_and_gather(shapes, effort, add):
    """Copies into blocks and out of them, round all layers of enough sequences to leave the cache."""
    rng = np.random.default_rng(3)
    n_context, n_layers = effort.pick(512, 64), shapes.n_layers
    n_seqs = effort.n_copies(n_context * shapes.kv_token_nbytes(), at_most=64)
    pool = new_pool(shapes, n_seqs, n_context)
    seqs, k, v = filled_sequences(pool, n_seqs, n_context, rng)

    for n in (1, n_context):
        for seq in seqs:
            seq.truncate(n_context - n)
            seq.ensure_append(n)
        k_new, v_new = k[-n:], v[-n:]

        def append(i):
            seqs[i // n_layers % n_seqs].append_layer(i % n_layers, k_new, v_new)

        timing = time_calls(append, effort)
        for seq in seqs:
            seq.advance(n)
        add(Row("kernels", "append_layer", f"n={n} kv_dim={shapes.kv_dim}", timing, nbytes=2 * 2 * k_new.nbytes))

    head_dim = shapes.head_dim
    for seq in seqs[:2]:
        for layer in {0, n_layers - 1}:
            for head in {0, shapes.n_kv_heads - 1}:
                got = seq.gather_head(layer, head, head_dim)
                for rows, source in zip(got, (k, v)):
                    check((rows == source[:, head * head_dim:(head + 1) * head_dim]).all(), "append_layer, gather_head")
    timing = time_calls(lambda i: seqs[i // n_layers % n_seqs].gather_head(i % n_layers, 0, head_dim), effort)
    add(Row("kernels", "gather_head", f"n={n_context} head_dim={head_dim}", timing,
            nbytes=2 * 2 * 4 * n_context * head_dim))


# ---------------------------------------------------------------------------------------------------
# Attention

def reference_attention(q, k, v, n_kv_heads):
    """One query row over all positions in float64, and a bound for a careful float32 one's error.

    q [n_heads, head_dim], k and v [n, n_kv_heads * head_dim].
    """
    n_heads, head_dim = q.shape
    q, k, v = (a.astype(np.float64) for a in (q, k.reshape(len(k), -1, head_dim), v.reshape(len(v), -1, head_dim)))
    out, scale = np.empty((n_heads, head_dim)), head_dim**-0.5
    for h in range(n_heads):
        kv_head = h // (n_heads // n_kv_heads)
        scores = k[:, kv_head] @ q[h] * scale
        weights = np.exp(scores - scores.max())
        out[h] = weights / weights.sum() @ v[:, kv_head]
    score_error = head_dim * U * scale * (np.abs(k).max() * np.abs(q).sum(1).max())
    return out.ravel(), (2 * score_error + (len(k) + 64) * U) * np.abs(v).max()


def paged_attention(shapes, dtype, effort, add):
    """The public call on one layer of one sequence, round the layers of enough sequences to leave the cache."""
    rng = np.random.default_rng(4)
    heads = {"n_heads": shapes.n_heads, "n_kv_heads": shapes.n_kv_heads, "head_dim": shapes.head_dim}
    q = rng.standard_normal((1, shapes.q_dim), dtype=np.float32)
    new = rng.standard_normal((1, shapes.kv_dim), dtype=np.float32)
    n_layers = shapes.n_layers
    for n in effort.pick((512, 4096), (64, 300)):
        n_seqs = effort.n_copies(n * shapes.kv_token_nbytes(dtype), at_most=64)
        pool = new_pool(shapes, n_seqs, n, dtype)
        seqs, _, _ = filled_sequences(pool, n_seqs, n, rng)
        for seq in seqs:
            seq.ensure_append(1)

        def call(i):
            return pk.paged_attention(q, new, new, seqs[i // n_layers % n_seqs], i % n_layers, **heads)

        out = call(0)
        k, v = stored_rows(seqs[0], shapes, 0, n + 1)
        check((out == pk.attention(q, k, v, **heads)).all(), f"paged_attention over {n} against contiguous rows")
        want, bound = reference_attention(q.reshape(shapes.n_heads, -1), k, v, shapes.n_kv_heads)
        check(np.abs(out[0] - want).max() <= bound, f"paged_attention over {n} against float64")
        add(Row("kernels", "paged_attention", f"M=1 ctx={n}, 1 layer{suffix(dtype)}", time_calls(call, effort),
                nbytes=(n + 1) * shapes.kv_token_nbytes(dtype) // n_layers,
                operations=shapes.attention_operations(n + 1) // n_layers))


def attention_steps(shapes, dtype, effort, run):
    """Steps of a model that is nearly all attention, over all layers.

    What such a step costs beside attention is the row with ctx=1.
    """
    rng = np.random.default_rng(5)
    long, short, shared, m_rows = effort.pick((4096, 512, 1024, 32), (300, 64, 128, 4))
    model = load_attention_model(shapes, 8192)
    for m, n, is_shared in ((1, 1, False), (m_rows, 1, False), (1, short, False), (1, long, False),
                            (m_rows, short, False), (m_rows, shared, True)):  # fmt: skip
        if n == 1 and dtype != "float32":
            continue
        with run.group() as add:
            n_owned = 1 if is_shared else m
            # Sets of sequences to go round in, where one set would stay in the cache.
            n_sets = 1 if n == 1 else effort.n_copies(n_owned * n * shapes.kv_token_nbytes(dtype), at_most=64)
            pool = pk.BlockPool(n_sets * (n_owned * (n // 16 + 2) + 2 * m), shapes.n_layers, shapes.kv_dim, dtype=dtype)
            sets = []
            for _ in range(n_sets):
                seqs, _, _ = filled_sequences(pool, n_owned, n, rng)
                sets.append([seqs[0].fork() for _ in range(m)] if is_shared else seqs)
            tokens = np.arange(m) % model.config.vocab_size
            what = f"M={m} ctx={n}{' shared' if is_shared else ''}{suffix(dtype)}"
            check_decode(model, sets[0], tokens, f"attention step {what}")

            def step(i):
                model.decode_step(tokens, sets[i % n_sets])

            def back(i):
                for seq in sets[i % n_sets]:
                    seq.truncate(n)

            # Every row reads its own new position too.
            n_read = n_owned * n + m
            add(Row("kernels", "attention step", what, time_calls(step, effort, reset=back),
                    nbytes=n_read * shapes.kv_token_nbytes(dtype), operations=shapes.attention_operations(m * (n + 1)),
                    cold=n > 1))


def check_decode(model, seqs, tokens, what):
    """A step's logits are finite, and rows of it equal the same rows in steps of their own."""
    m = len(seqs)
    logits = model.decode_step(tokens, [seq.fork() for seq in seqs])
    check(np.isfinite(logits).all(), f"{what}, finite logits")
    for i in sorted({0, m // 2, m - 1}) if m > 1 else ():
        alone = model.decode_step(tokens[i:i + 1], [seqs[i].fork()])
        check((alone[0] == logits[i]).all(), f"{what}, row {i} against the row alone")
    return logits


# ---------------------------------------------------------------------------------------------------
# The pool's bookkeeping

def pool_ops(shapes, effort, add):
    """Fork and truncate of a long sequence, a block taken and given back: bookkeeping, but for the tail's copy."""
    n_tokens = effort.pick(32768, 512)
    # Rows are reserved and counted, never written: the system gives no memory for them.
    pool = pk.BlockPool(n_tokens // 16 + 8, shapes.n_layers, shapes.kv_dim)
    seq = pk.Sequence(pool, n_tokens + 16)
    seq.ensure_append(n_tokens)
    seq.advance(n_tokens)
    forks = []

    def fork(i):
        forks.append(seq.fork())

    def unfork(i):
        forks.pop().free()

    fork(0)
    n_free, table = pool.n_free, forks[0].block_table
    check((table == seq.block_table).all() and pool.ref_count(table[-1]) == 2, "fork")
    unfork(0)
    check(pool.n_free == n_free and pool.ref_count(table[-1]) == 1, "free of a fork")
    add(Row("kernels", "fork", f"{n_tokens} tokens", time_calls(fork, effort, reset=unfork), cold=False))

    def grow(i):
        seq.ensure_append(n_tokens - 16)
        seq.advance(n_tokens - 16)

    seq.truncate(16)
    check(len(seq) == 16 and pool.n_free == pool.n_blocks - 1, "truncate")
    grow(0)
    timing = time_calls(lambda i: seq.truncate(16), effort, reset=grow)
    add(Row("kernels", "truncate", f"{n_tokens} to 16 tokens", timing, cold=False))

    # A fork that appends into a half filled block takes a copy of it, in all layers.
    seq.truncate(n_tokens - 16)
    seq.ensure_append(8)
    rows = np.ones((8, shapes.kv_dim), np.float32)
    for layer in range(shapes.n_layers):
        seq.append_layer(layer, rows, rows)
    seq.advance(8)

    def own_tail(i):
        forks[-1].ensure_append(1)

    def next_fork(i):
        forks.pop().free()
        fork(i)

    fork(0)
    own_tail(0)
    tail, own = seq.block_table[-1], forks[0].block_table[-1]
    check(own != tail and (pool.k[own, :, :8] == pool.k[tail, :, :8]).all(), "copy of a shared tail")
    next_fork(0)
    add(Row("kernels", "copy of a shared tail", f"8 rows, {shapes.n_layers} layers",
            time_calls(own_tail, effort, reset=next_fork), nbytes=2 * 8 * shapes.kv_token_nbytes(), cold=False))
    unfork(0)

    for n_blocks in effort.pick((1000, 1000000), (100, 1000)):
        pool = pk.BlockPool(n_blocks, 1, 16)
        first = pool.alloc_block()
        check(first == 0 and pool.ref_count(0) == 1 and pool.n_free == n_blocks - 1, "alloc_block")

        def alloc_free(i):
            pool.unref_block(pool.alloc_block())

        timing = time_calls(alloc_free, effort)
        add(Row("kernels", "alloc_block, unref_block", f"{n_blocks} blocks", timing, cold=False))
