"""Sequences: tables, sharing, reservation, truncation.

Tags in comments name users' public reports of other systems: V vLLM, SG SGLang, HF transformers, LC llama.cpp,
LCP llama-cpp-python, ORG ONNX Runtime GenAI, OV OpenVINO; others in full.
"""

import gc
import random
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import pagedkv as pk
from pagedkv import _core
from seed_model import PAGEDKV, SEED, accounts, append, refused, rows_of, snapshot, values

NULL, BAD_DIM, EXHAUST, BOUNDS = (pk.PkvStatus(i) for i in range(1, 5))


def test_a_new_sequence_is_empty_and_owns_nothing():
    pool = pk.BlockPool(4, 1, 2)
    seq = pk.Sequence(pool, 64)
    assert (len(seq), seq.block_table.tolist(), seq.pool, pool.n_free) == (0, [], pool, 4)
    assert seq.block_table.dtype == np.int32


def test_the_table_is_a_copy():
    seq = pk.Sequence(pk.BlockPool(4, 1, 2), 64)
    append(seq, 1, n=20)
    seq.block_table[:] = 3
    assert seq.block_table.tolist() == [0, 1]


def test_rows_lie_where_the_table_says():
    pool = pk.BlockPool(4, 2, 3, block_size=4)
    pool.alloc_block()
    seq = pk.Sequence(pool, 16)
    for t in range(10):
        append(seq, t)
    assert seq.block_table.tolist() == [1, 2, 3]
    for t in range(10):
        assert (pool.k[seq.block_table[t // 4], :, t % 4] == t).all()


def test_append_layer_does_not_advance_and_advance_does_not_write():
    seq = pk.Sequence(pk.BlockPool(2, 1, 2), 16)
    seq.ensure_append(3)
    seq.append_layer(0, rows_of(1, 3, 2), rows_of(-1, 3, 2))
    assert len(seq) == 0 and values(seq) == [] and seq.gather_head(0, 0, 2, total_k=3)[0][:, 0].tolist() == [1, 1, 1]
    seq.advance(2)
    assert values(seq) == [1, 1]


@pytest.mark.parametrize("n", [0, 15, 16, 17, 32])
def test_the_tail_at_the_edges_of_a_block(n):  # MinivLLM 87
    pool = pk.BlockPool(8, 1, 2)
    seq = pk.Sequence(pool, 64)
    if n:
        append(seq, 1, n)
    assert len(seq.block_table) == -(-n // 16)
    child = seq.fork()
    append(child, 2)
    append(seq, 3)
    assert values(child) == [1] * n + [2] and values(seq) == [1] * n + [3]
    assert len(seq.block_table) == n // 16 + 1 and accounts(pool, [seq, child])
    seq.free(), child.free()
    assert pool.n_free == 8


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_counts_are_the_owning_tables_at_each_step(order):  # V 1556, V 3347
    pool = pk.BlockPool(8, 1, 2)
    seq = pk.Sequence(pool, 64)
    append(seq, 1, n=24)
    both = [seq, seq.fork()]
    assert [pool.ref_count(b) for b in range(3)] == [2, 2, 0] and accounts(pool, both)
    for i, each in enumerate(both):
        append(each, i, n=10)
        assert accounts(pool, both)
    assert [pool.ref_count(b) for b in both[0].block_table] == [2, 1, 1]
    for i in order:
        both[i].free()
        assert accounts(pool, both)
    assert pool.n_free == 8


def test_only_the_tail_is_copied_and_only_once():
    pool = pk.BlockPool(8, 2, 2)
    seq = pk.Sequence(pool, 64)
    append(seq, 1, n=24)
    child = seq.fork()
    assert pool.n_free == 6
    append(child, 2)
    assert child.block_table.tolist() == [0, 2] and pool.n_free == 5
    append(seq, 3)  # its tail is its own by now
    assert seq.block_table.tolist() == [0, 1] and pool.n_free == 5
    assert values(child, layer=1) == [1] * 24 + [2] and values(seq, layer=1) == [1] * 24 + [3]


def test_a_failed_call_on_a_full_table_or_pool_says_the_numbers():
    pool = pk.BlockPool(3, 1, 2)
    seq = pk.Sequence(pool, 40)  # as in the seed: ceil(40 / 16) + 1 = 4 blocks
    append(seq, 1, n=20)
    with pytest.raises(pk.PoolExhausted, match="needs 2 blocks, 1 of 3 are free"):
        seq.ensure_append(30)
    with pytest.raises(pk.BoundsError, match="table of 4 blocks"):
        seq.ensure_append(45)


@pytest.mark.parametrize("n_blocks", [1, 3])
def test_a_prompt_larger_than_the_pool_is_refused_at_once(n_blocks):  # vllm-rbln 957
    pool = pk.BlockPool(n_blocks, 1, 2)
    seq = pk.Sequence(pool, 1000)
    assert refused(seq.ensure_append, 16 * n_blocks + 1) is EXHAUST and pool.n_free == n_blocks
    append(seq, 1, n=16 * n_blocks)
    assert pool.n_free == 0 and refused(seq.ensure_append, 1) is EXHAUST


# The seed's faults: each scenario runs on the seed's logic too, where the property must fail.


def exhaust(Pool, Sequence):
    """Fault 1. (status, whether nothing changed) of a reservation that the pool can only half meet."""
    pool = Pool(4, 2, 2)
    seq = Sequence(pool, 128)
    append(seq, 1, n=8)
    child = seq.fork()
    other = Sequence(pool, 128)
    append(other, 5, n=16)
    before = snapshot(pool, seq, child, other)
    status = refused(child.ensure_append, 41)  # a twin of the tail and three more; two are free
    return status, snapshot(pool, seq, child, other) == before


def test_a_failed_reservation_changes_nothing():
    assert exhaust(*PAGEDKV) == (EXHAUST, True)
    assert exhaust(*SEED) == (EXHAUST, False)


def full_table(Pool, Sequence):
    """Fault 1 again: the table's bound is met after the tail was already made private."""
    pool = Pool(8, 1, 2)
    seq = Sequence(pool, 16)  # two blocks
    append(seq, 1, n=8)
    child = seq.fork()
    before = snapshot(pool, seq, child)
    return refused(child.ensure_append, 32), snapshot(pool, seq, child) == before


def test_a_full_table_changes_nothing():
    assert full_table(*PAGEDKV) == (BOUNDS, True)
    assert full_table(*SEED) == (BOUNDS, False)


def reserved_tail(Pool, Sequence):
    """Fault 2. What a source holds after it and a fork appended behind a reservation that was too large."""
    pool = Pool(8, 1, 2)
    seq = Sequence(pool, 64)
    append(seq, 1, n=8)
    seq.ensure_append(24)
    child = seq.fork()
    append(seq, 2)
    append(child, 3)
    return values(seq)[8:], values(child)[8:]


def test_the_tail_is_found_by_length_not_by_table():
    assert reserved_tail(*PAGEDKV) == ([2], [3])
    assert reserved_tail(*SEED) == ([3], [3])


def reserved_blocks(Pool, Sequence):
    """Fault 3. The same where the rows end at a block's edge, and the blocks that the fork got."""
    pool = Pool(8, 1, 2)
    seq = Sequence(pool, 64)
    append(seq, 1, n=16)
    seq.ensure_append(32)
    child = seq.fork()
    n_shared = len(child.block_table)
    append(child, 3)
    append(seq, 2)
    return n_shared, values(seq)[16:], values(child)[16:]


def test_a_fork_gets_only_the_blocks_that_hold_rows():
    assert reserved_blocks(*PAGEDKV) == (1, [2], [3])
    assert reserved_blocks(*SEED) == (3, [2], [2])


def test_every_block_about_to_be_written_becomes_private():  # fault 2, reserved blocks that a caller shared
    pool = pk.BlockPool(8, 1, 2)
    seq = pk.Sequence(pool, 64)
    append(seq, 1, n=8)
    seq.ensure_append(40)
    for block_id in seq.block_table:
        pool.ref_block(block_id)
    append(seq, 2, n=20)
    assert [pool.ref_count(b) for b in seq.block_table] == [1, 1, 2]  # the third is not written yet
    assert values(seq) == [1] * 8 + [2] * 20


def negative_length(Pool, Sequence):
    """Fault 5. (status, blocks left) after truncate(-1)."""
    seq = Sequence(Pool(4, 1, 2), 64)
    append(seq, 1, n=20)
    return refused(seq.truncate, -1), len(seq.block_table)


def advance_too_far(Pool, Sequence):
    """Fault 5. (status, length) after advance over rows that were never reserved."""
    seq = Sequence(Pool(4, 1, 2), 64)
    append(seq, 1, n=15)
    return refused(seq.advance, 2), len(seq)


def append_unreserved(Pool, Sequence):
    """Fault 5. (status, a bystander's rows) after rows that were never reserved were written."""
    pool = Pool(4, 1, 2)
    first, seq = Sequence(pool, 64), Sequence(pool, 64)
    append(first, 1, n=16)  # block 0, which is what an unset table entry says
    append(seq, 2, n=16)
    return refused(seq.append_layer, 0, rows_of(9, 1, 2), rows_of(-9, 1, 2)), values(first)


def append_to_another_layer(Pool, Sequence):
    """Fault 5. (status, the next block's rows) after a layer that does not exist was written."""
    pool = Pool(4, 1, 2)
    seq, other = Sequence(pool, 64), Sequence(pool, 64)
    seq.ensure_append(1)
    append(other, 1)
    return refused(seq.append_layer, 1, rows_of(9, 1, 2), rows_of(-9, 1, 2)), values(other)


def append_to_a_shared_tail(Pool, Sequence):
    """Fault 5. (status, a fork's rows) after append_layer without a reservation, into the shared tail."""
    seq = Sequence(Pool(4, 1, 2), 64)
    append(seq, 1, n=8)
    child = seq.fork()
    append(seq, 2)
    seq.truncate(8)
    rows = rows_of(9, 1, 2)
    other = child.fork()
    child.ensure_append(1)
    child.append_layer(0, rows_of(3, 1, 2), rows_of(-3, 1, 2))
    child.advance(1)
    grandchild = child.fork()
    grandchild.truncate(8)
    status = refused(grandchild.append_layer, 0, rows, -rows)
    return status, values(child)[8:], len(other)


def gather_too_much(Pool, Sequence):
    """Fault 5. Statuses of rows, a layer and a head that are not there."""
    seq = Sequence(Pool(4, 2, 8), 64)
    append(seq, 1, n=3)
    return [refused(seq.gather_head, 0, 0, 4, 17), refused(seq.gather_head, 2, 0, 4), refused(seq.gather_head, 0, 2, 4)]


@pytest.mark.parametrize("scenario, right, seed", [
    (negative_length, (BOUNDS, 2), (None, 0)),
    (advance_too_far, (BOUNDS, 15), (None, 17)),
    (append_unreserved, (BOUNDS, [1] * 16), (None, [9] + [1] * 15)),
    (append_to_another_layer, (BOUNDS, [1]), (None, [9])),
    (append_to_a_shared_tail, (BOUNDS, [3], 8), (None, [9], 8)),
    (gather_too_much, [BOUNDS] * 3, [None] * 3)])  # fmt: skip
def test_what_the_seed_does_not_check_has_its_status(scenario, right, seed):
    assert scenario(*PAGEDKV) == right
    assert scenario(*SEED) == seed


def test_without_its_faults_the_seed_takes_the_same_blocks():
    """Exact reservations on a pool that suffices: tables, counts and rows are the seed's, op by op."""
    rng = random.Random(7)
    pool, seed = pk.BlockPool(400, 2, 2, 4), SEED[0](400, 2, 2, 4)
    twins = [(pk.Sequence(pool, 96), SEED[1](seed, 96))]
    for i in range(400):
        ours, theirs = rng.choice(twins)
        op = rng.choice("aaaaftdn")
        if op == "a" and len(ours) < 80:
            n = rng.randrange(1, 9)
            append(ours, i, n), append(theirs, i, n)
        elif op == "f" and len(twins) < 12:
            twins.append((ours.fork(), theirs.fork()))
        elif op == "t":
            n = rng.randrange(len(ours) + 1)
            ours.truncate(n), theirs.truncate(n)
        elif op == "d" and len(twins) > 1:
            ours.free(), theirs.free()
            twins.remove((ours, theirs))
        elif op == "n" and len(twins) < 12:
            twins.append((pk.Sequence(pool, 96), SEED[1](seed, 96)))
        assert snapshot(pool, *[t[0] for t in twins]) == snapshot(seed, *[t[1] for t in twins])


# Statuses


@pytest.mark.parametrize("call, status", [
    (lambda s: s.ensure_append(0), BAD_DIM), (lambda s: s.ensure_append(-1), BAD_DIM),
    (lambda s: s.ensure_append(81), BOUNDS), (lambda s: s.ensure_append(2**63 - 1), BOUNDS),
    (lambda s: s.advance(0), BAD_DIM), (lambda s: s.advance(-3), BAD_DIM), (lambda s: s.advance(2**63 - 1), BOUNDS),
    (lambda s: s.truncate(-1), BOUNDS), (lambda s: s.truncate(21), BOUNDS), (lambda s: s.truncate(2**63 - 1), BOUNDS),
    (lambda s: s.append_layer(-1, rows_of(0, 1, 8), rows_of(0, 1, 8)), BOUNDS),
    (lambda s: s.append_layer(2, rows_of(0, 1, 8), rows_of(0, 1, 8)), BOUNDS),
    (lambda s: s.append_layer(0, rows_of(0, 13, 8), rows_of(0, 13, 8)), BOUNDS),
    (lambda s: s.append_layer(0, rows_of(0, 0, 8), rows_of(0, 0, 8)), BAD_DIM),
    (lambda s: s.append_layer(0, rows_of(0, 1, 7), rows_of(0, 1, 7)), BAD_DIM),
    (lambda s: s.append_layer(0, rows_of(0, 2, 8), rows_of(0, 1, 8)), BAD_DIM),
    (lambda s: s.append_layer(0, rows_of(0, 1, 8)[0], rows_of(0, 1, 8)[0]), BAD_DIM),
    (lambda s: s.gather_head(0, 0, 0), BAD_DIM), (lambda s: s.gather_head(0, 0, 4, total_k=-1), BAD_DIM),
    (lambda s: s.gather_head(0, 0, 4, total_k=33), BOUNDS), (lambda s: s.gather_head(0, -1, 4), BOUNDS),
    (lambda s: s.gather_head(0, 2, 4), BOUNDS), (lambda s: s.gather_head(-1, 0, 4), BOUNDS),
    (lambda s: s.gather_head(0, 0, 9), BOUNDS), (lambda s: s.gather_head(0, 2**62, 4), BOUNDS),
    (lambda s: s.gather_head(2**62, 0, 4), BOUNDS), (lambda s: s.gather_head(0, 0, 2**62), BOUNDS)])  # fmt: skip
def test_impossible_lengths_have_a_status_and_change_nothing(call, status):  # flashinfer 320, HF 47433
    pool = pk.BlockPool(8, 2, 8)
    seq = pk.Sequence(pool, 80)
    append(seq, 1, n=20)
    before = snapshot(pool, seq)
    assert refused(call, seq) is status and snapshot(pool, seq) == before


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_rows_of_another_dtype_are_refused(dtype):
    seq = pk.Sequence(pk.BlockPool(2, 1, 4), 16)
    seq.ensure_append(1)
    with pytest.raises(TypeError, match="float32"):
        seq.append_layer(0, np.zeros((1, 4), dtype), np.zeros((1, 4), np.float32))


def test_rows_may_be_strided():
    seq = pk.Sequence(pk.BlockPool(2, 1, 3), 16)
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)
    seq.ensure_append(4)
    seq.append_layer(0, wide[:, ::2], wide.T[::2].T)
    seq.advance(4)
    assert np.array_equal(seq.gather_head(0, 0, 3)[0], wide[:, ::2])


@pytest.mark.parametrize("max_tokens", [-1, -(2**40)])
def test_a_negative_bound_is_refused(max_tokens):
    assert refused(pk.Sequence, pk.BlockPool(2, 1, 4), max_tokens) is BAD_DIM


@pytest.mark.parametrize("max_tokens", [0, 1, 2**40, 2**63 - 1])
def test_any_other_bound_gives_a_usable_table(max_tokens):
    for block_size in (1, 16):
        seq = pk.Sequence(pk.BlockPool(2, 1, 4, block_size=block_size), max_tokens)
        append(seq, 1)  # even max_tokens 0 has the seed's spare block
        assert values(seq) == [1]


def test_gather_copies_one_head():
    seq = pk.Sequence(pk.BlockPool(4, 2, 6, block_size=4), 16)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 2, 10, 6), dtype=np.float32)
    seq.ensure_append(10)
    for layer in range(2):
        seq.append_layer(layer, k[layer], v[layer])
    seq.advance(10)
    for layer in range(2):
        for head in range(3):
            got_k, got_v = seq.gather_head(layer, head, 2, total_k=9)
            assert np.array_equal(got_k, k[layer, :9, 2 * head : 2 * head + 2])
            assert np.array_equal(got_v, v[layer, :9, 2 * head : 2 * head + 2])


# Truncation


def test_truncate_to_0_empties_and_to_the_length_does_nothing():  # HF 47433, LC 13985
    pool = pk.BlockPool(4, 1, 2)
    seq = pk.Sequence(pool, 64)
    append(seq, 1, n=20)
    before = snapshot(pool, seq)
    seq.truncate(20)
    assert snapshot(pool, seq) == before
    seq.truncate(0)
    assert (len(seq), seq.block_table.tolist(), pool.n_free) == (0, [], 4)


def test_a_sequence_truncated_to_0_is_as_new():  # ORG 2140
    pool = pk.BlockPool(4, 1, 2)
    seq = pk.Sequence(pool, 64)
    append(seq, 1, n=40)
    seq.truncate(0)
    append(seq, 2, n=17)
    fresh = pk.Sequence(pk.BlockPool(4, 1, 2), 64)
    append(fresh, 2, n=17)
    assert values(seq) == values(fresh) and seq.block_table.tolist() == fresh.block_table.tolist()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 31])
def test_rows_after_truncate_do_not_show_in_a_fork(n):
    pool = pk.BlockPool(8, 1, 2)
    seq = pk.Sequence(pool, 64)
    append(seq, 1, n=32)
    child = seq.fork()
    seq.truncate(n)
    append(seq, 2, n=20)
    assert values(child) == [1] * 32 and values(seq) == [1] * n + [2] * 20 and accounts(pool, [seq, child])


def test_truncate_gives_reserved_blocks_back():
    pool = pk.BlockPool(8, 1, 2)
    seq = pk.Sequence(pool, 128)
    append(seq, 1, n=10)
    seq.ensure_append(60)
    seq.truncate(10)
    assert pool.n_free == 7


# Lifetime


def test_leaving_the_context_frees():
    pool = pk.BlockPool(4, 1, 2)
    with pk.Sequence(pool, 64) as seq:
        append(seq, 1, n=20)
    assert pool.n_free == 4 and len(seq) == 0 and seq.block_table.tolist() == []


def test_free_is_idempotent_and_everything_after_it_is_refused():
    pool = pk.BlockPool(4, 1, 2)
    seq = pk.Sequence(pool, 64)
    append(seq, 1, n=20)
    seq.free(), seq.free()
    assert pool.n_free == 4
    rows = rows_of(0, 1, 2)
    for call in (partial(seq.ensure_append, 1), partial(seq.append_layer, 0, rows, rows), partial(seq.advance, 1),
                 partial(seq.truncate, 0), seq.fork, partial(seq.gather_head, 0, 0, 2)):  # fmt: skip
        assert refused(call) is NULL


def test_dropping_a_sequence_frees_it():
    pool = pk.BlockPool(4, 1, 2)
    seq = pk.Sequence(pool, 64)
    append(seq, 1, n=20)
    child = seq.fork()
    del seq
    assert pool.n_free == 2 and values(child) == [1] * 20
    del child
    assert pool.n_free == 4


def test_a_sequence_keeps_its_pool():
    seq = pk.Sequence(pk.BlockPool(4, 1, 2), 64)
    gc.collect()
    append(seq, 1, n=20)
    assert values(seq.fork()) == [1] * 20


def test_a_cycle_of_pool_and_sequences_is_collected_in_silence():
    class Engine:
        pass

    pool, unraisable, hook = pk.BlockPool(4, 1, 2), [], sys.unraisablehook
    engine = Engine()
    engine.pool, engine.seqs, engine.self = pool, [pk.Sequence(pool, 64) for _ in range(3)], engine
    for seq in engine.seqs:
        append(seq, 1)
    sys.unraisablehook = lambda report: unraisable.append(str(report.exc_value))
    try:
        del engine, pool, seq
        gc.collect()
    finally:
        sys.unraisablehook = hook
    assert unraisable == []


def test_a_sequence_dropped_while_the_pool_is_busy_is_freed_afterwards():
    pool = pk.BlockPool(4, 1, 2)
    seq, other = pk.Sequence(pool, 64), pk.Sequence(pool, 64)
    append(seq, 1, n=20)
    append(other, 2, n=32)
    child = seq.fork()
    with pool._lock:  # as inside a step
        del seq
        assert child.block_table.tolist() == [0, 1]
    assert values(child) == [1] * 20 and pool.ref_count(0) == 1
    with pool._lock:
        del child
    append(other, 3, n=32)  # the blocks for it are those of the dropped child
    assert accounts(pool, [other]) and pool.n_free == 0


def test_dropping_while_another_thread_attends():
    pool = pk.BlockPool(160, 1, 64)
    long, short = pk.Sequence(pool, 2048), [pk.Sequence(pool, 64) for _ in range(10)]
    for seq in short:
        append(seq, 1, n=33)
    del seq
    long.ensure_append(1500)
    x = np.random.default_rng(0).standard_normal((1500, 64), dtype=np.float32)
    outs = []
    worker = threading.Thread(target=lambda: outs.append(pk.paged_attention(x, x, x, long, 0, n_heads=4, n_kv_heads=4, head_dim=16)))
    worker.start()
    while short:
        short.pop()
    worker.join()
    assert pool.n_free == 160 - len(long.block_table)
    assert np.array_equal(outs[0], pk.attention(x, x, x, n_heads=4, n_kv_heads=4, head_dim=16))


FREE_WHILE_WAITING = """
import threading, time, numpy as np, pagedkv as pk
pool, rows = pk.BlockPool(4, 1, 2), np.ones((1, 2), np.float32)
names = {}
for call in (lambda s: s.truncate(0), lambda s: s.append_layer(0, rows, rows), lambda s: s.advance(1), lambda s: s.fork(),
             lambda s: s.ensure_append(1), lambda s: s.gather_head(0, 0, 2),
             lambda s: pk.paged_attention(rows, rows, rows, s, 0, n_heads=1, n_kv_heads=1, head_dim=2)):
    seq = pk.Sequence(pool, 64)
    seq.ensure_append(1)
    raised = []
    def late():
        try: call(seq)
        except Exception as error: raised.append(error)
    with pool._lock:                            # as a step holds it
        first = threading.Thread(target=seq.free); first.start(); time.sleep(0.05)
        second = threading.Thread(target=late); second.start(); time.sleep(0.05)
    first.join(); second.join()
    assert not raised or raised[0].status is pk.PkvStatus.PKV_ERR_NULL, raised
assert pool.n_free == 4
"""


def test_a_call_that_waits_while_its_sequence_is_freed_is_refused():  # LCP 471
    done = subprocess.run([sys.executable, "-c", FREE_WHILE_WAITING], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)


def test_a_table_never_grows_past_its_memory():
    """Even where a caller gives back a block that a sequence still names."""
    code = ("import pagedkv as pk\n"
            "pool = pk.BlockPool(1, 1, 4); seq = pk.Sequence(pool, 100000); seq.ensure_append(16)\n"
            "try:\n"
            "    for i in range(2000): pool.unref_block(0); seq.ensure_append(16 * (i + 2))\n"
            "except pk.PagedKVError: pass\n"
            "assert len(seq.block_table) <= pool.n_blocks\n"
            "seq.free()\n")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)


# Operation sequences


def test_10000_random_operations_lose_and_share_nothing():  # SG 35270
    rng = random.Random(0)
    pool = pk.BlockPool(24, 1, 1, block_size=4)
    seqs, n_refused = [pk.Sequence(pool, 40)], 0
    for i in range(10_000):
        seq, op = rng.choice(seqs), rng.choice("aaaarftdn")
        before = snapshot(pool, *seqs)
        try:
            if op == "a":
                append(seq, i, rng.randrange(1, 7))
            elif op == "r":
                seq.ensure_append(rng.randrange(1, 13))
            elif op == "t":
                seq.truncate(rng.randrange(len(seq) + 2))
            elif op == "d" and len(seqs) > 1:
                seq.free()
                seqs.remove(seq)
            elif op == "f" and len(seqs) < 10:
                seqs.append(seq.fork())
            elif op == "n" and len(seqs) < 10:
                seqs.append(pk.Sequence(pool, 40))
        except pk.PagedKVError:
            n_refused += 1
            assert snapshot(pool, *seqs) == before
        assert accounts(pool, seqs)
    assert 300 < n_refused < 7000


class Sequences(RuleBasedStateMachine):
    """Sequences against lists of numbers; the blocks each operation needs are counted from the tables."""

    def __init__(self):
        super().__init__()
        self.pool = pk.BlockPool(7, 2, 3, block_size=4)
        self.max_blocks = 5
        self.seqs, self.rows, self.stamp = [], [], 0
        self.new()

    @precondition(lambda self: len(self.seqs) < 6)
    @rule()
    def new(self):
        self.seqs.append(pk.Sequence(self.pool, 4 * self.max_blocks - 4))
        self.rows.append([])

    def pick(self, i):
        i %= len(self.seqs)
        return i, self.seqs[i]

    def owners(self, block_id):
        return sum(int(block_id in seq.block_table) for seq in self.seqs)

    def fails(self, seq, n):
        """The status that reserving n rows must meet, or None."""
        table, need = seq.block_table, -(-(len(seq) + n) // 4)
        twins = sum(self.owners(b) > 1 for b in table[len(seq) // 4 : need])
        if twins > self.pool.n_free:
            return EXHAUST
        if need > self.max_blocks:
            return BOUNDS
        return EXHAUST if twins + max(0, need - len(table)) > self.pool.n_free else None

    @rule(i=st.integers(0, 5), n=st.integers(1, 9))
    def append(self, i, n):
        i, seq = self.pick(i)
        self.stamp += 1
        before, status = snapshot(self.pool, *self.seqs), self.fails(seq, n)
        assert refused(append, seq, self.stamp, n) is status
        if status is None:
            self.rows[i] += [self.stamp] * n
        else:
            assert snapshot(self.pool, *self.seqs) == before

    @rule(i=st.integers(0, 5), n=st.integers(1, 17))
    def reserve(self, i, n):
        i, seq = self.pick(i)
        status = self.fails(seq, n)
        assert refused(seq.ensure_append, n) is status

    @precondition(lambda self: len(self.seqs) < 6)
    @rule(i=st.integers(0, 5))
    def fork(self, i):
        i, seq = self.pick(i)
        self.seqs.append(seq.fork())
        self.rows.append(list(self.rows[i]))
        assert len(self.seqs[-1].block_table) == -(-len(seq) // 4)

    @rule(i=st.integers(0, 5), n=st.integers(0, 20))
    def truncate(self, i, n):
        i, seq = self.pick(i)
        assert refused(seq.truncate, n) is (BOUNDS if n > len(self.rows[i]) else None)
        del self.rows[i][n:]

    @precondition(lambda self: len(self.seqs) > 1)
    @rule(i=st.integers(0, 5), drop=st.booleans())
    def free(self, i, drop):
        i, seq = self.pick(i)
        if not drop:
            seq.free()
        del seq, self.seqs[i], self.rows[i]

    @invariant()
    def blocks_add_up_and_rows_are_as_written(self):
        assert accounts(self.pool, self.seqs)
        for seq, rows in zip(self.seqs, self.rows):
            assert len(seq) == len(rows) and values(seq) == values(seq, layer=1) == rows


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, database=None)


FREED_BY_THE_COLLECTOR = """
import gc, pagedkv as pk
pool = pk.BlockPool(2, 1, 2)
class Owner:
    def __init__(self):
        self.seq, self.me = pk.Sequence(pool, 64), self
        self.seq.ensure_append(1)
    def __del__(self):
        self.seq.free()          # runs inside the call below, which holds the pool's lock
gc.disable()
Owner()
gc.set_threshold(1, 1, 1)
gc.enable()
seq = pk.Sequence(pool, 10**6)
for i in range(200):
    try:
        seq.ensure_append(10**5)
    except pk.PoolExhausted:
        pass
gc.collect()
assert pool.n_free == 2
"""


def test_a_finaliser_that_frees_does_not_wait_for_the_call_it_runs_in():
    subprocess.run([sys.executable, "-c", FREED_BY_THE_COLLECTOR], check=True, timeout=60)


# ---- From blocks that somebody owns ----


def filled(n_rows, n_blocks=8):
    """A pool and a sequence of so many rows, each row its own number."""
    pool = pk.BlockPool(n_blocks=n_blocks, n_layers=1, kv_dim=4)
    seq = pk.Sequence(pool, 128)
    rows = np.repeat(np.arange(n_rows, dtype=np.float32)[:, None], 4, 1)
    seq.ensure_append(n_rows)
    seq.append_layer(0, rows, -rows)
    seq.advance(n_rows)
    return pool, seq


def test_from_blocks_shares_and_copies_on_write():
    pool, seq = filled(40)
    table = seq.block_table.tolist()
    with pk.Sequence.from_blocks(pool, table[:2], 128) as other:
        assert (len(other), other.block_table.tolist()) == (32, table[:2])
        assert [pool.ref_count(b) for b in table] == [2, 2, 1] and pool.n_free == 5
        assert other.gather_head(0, 0, 4)[0].tobytes() == seq.gather_head(0, 0, 4, 32)[0].tobytes()
        seq.free()
        assert pool.n_free == 6
        other.truncate(31)
        child = other.fork()
        child.ensure_append(1)  # the shared tail is copied
        assert child.block_table[1] != table[1]
        child.free()
    assert pool.n_free == 8


def test_from_no_blocks_is_an_empty_sequence():
    pool, _ = filled(1)
    seq = pk.Sequence.from_blocks(pool, [], 16)
    assert len(seq) == 0 and seq.block_table.tolist() == []


@pytest.mark.parametrize("block_ids, error", [
    ([0, 3], pk.BoundsError), ([3], pk.BoundsError), ([-1], pk.BoundsError), ([8], pk.BoundsError),
    ([0, 1, 0], pk.BadDimError), ([1, 1], pk.BadDimError), ([0, 1, 2, 0, 9], pk.BadDimError),
])  # fmt: skip
def test_from_blocks_that_nobody_owns_or_twice(block_ids, error):
    pool, seq = filled(40)
    with pytest.raises(error):
        pk.Sequence.from_blocks(pool, block_ids, 128)
    assert [pool.ref_count(b) for b in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0] and pool.n_free == 5
    assert len(seq) == 40


def test_from_more_blocks_than_the_table_holds():
    pool, seq = filled(40)
    with pytest.raises(pk.BoundsError, match="3 blocks do not fit a table of 2"):
        pk.Sequence.from_blocks(pool, seq.block_table, 16)
    assert [pool.ref_count(b) for b in seq.block_table] == [1, 1, 1]
    with pytest.raises(pk.BadDimError, match="blocks already"):
        seq._adopt(seq.block_table)


def test_blocks_needed_counts_twins_once():
    pool, seq = filled(20)
    fork, fresh = seq.fork(), pk.Sequence(pool, 128)
    assert _core.blocks_needed([seq, fork], [1, 1]) == 1  # the first to go on copies, and leaves the tail to the other
    assert _core.blocks_needed([seq, fork, fresh], [13, 1, 33]) == 1 + 1 + 3
    assert _core.blocks_needed([], []) == 0 and pool.n_free == 6
    for seqs, counts in (([seq], [0]), ([seq, filled(1)[1]], [1, 1])):
        with pytest.raises(pk.NullError):
            _core.blocks_needed(seqs, counts)
    fork.free()
    with pytest.raises(pk.NullError):
        _core.blocks_needed([fork], [1])
