"""Lets each allocation of a call fail in turn, and looks at what is left; run by test_faults.py as a process of its own.

    python failing_memory.py python|c FOLDER [every]

``python``: allocations of the interpreter's objects. ``c``: those that the compiled core and NumPy ask the C library for,
with failing_memory.c preloaded. FOLDER holds a tiny model with a tokenizer. Calls that allocate thousands of times fail at
fewer and fewer places, or, with ``every``, at each.
"""

import ctypes
import gc
import os
import sys
import tempfile

import numpy as np

import pagedkv as pk
from pagedkv import _core

KIND, FOLDER, EVERY = sys.argv[1], sys.argv[2], "every" in sys.argv[3:]

# A call may get by without one allocation, but not without so many in a row: then it has no more of them.
ENOUGH = 12

if KIND == "python":
    import _testcapi

    def arm(n):
        _testcapi.set_nomemory(n, n + 1)

    disarm = _testcapi.remove_mem_hooks
else:
    shim = ctypes.CDLL(None)
    shim.failing_memory_watch.argtypes = [ctypes.c_size_t] * 2
    arm = shim.failing_memory_arm
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "pagedkv/_core" in line or "_multiarray_umath" in line:
                shim.failing_memory_watch(*(int(each, 16) for each in line.split()[0].split("-")))

    def disarm():
        arm(-1)


def snapshot(pool, *seqs):
    """All that a failed call must leave as it was."""
    head_dim = 16
    return (pool.n_free, [pool.ref_count(i) for i in range(pool.n_blocks)], [len(seq) for seq in seqs],
            [seq.block_table.tolist() for seq in seqs], [seq.export(head_dim).tobytes() for seq in seqs])  # fmt: skip


def failures(call, every=True):
    """Let `call` fail at each of its allocations; yields its error after each, None where it got by without."""
    n, n_through = 0, 0
    while n_through < ENOUGH:
        gc.disable()  # so that the places are the same each time
        # Small tuples come from free lists, which would hide their allocations. (Not pairs: where it gets none, CPython 3.11
        # crashes in iter(dict.items()).)
        small = [[(None,) * size for _ in range(2500)] for size in (1, 3)] if n % 2 else None
        error = None
        arm(n)
        try:
            call()
        except BaseException as raised:
            disarm()
            error = raised
        disarm()
        del small
        gc.enable()
        # Most say MemoryError; CPython itself may lose or replace one that it has no memory to note the place of.
        assert error is None or isinstance(error, Exception), repr(error)
        if error is not None:
            error.__traceback__ = None
            n_through = 0
            yield error
        else:
            n_through += 1
            yield None
        n += 1 if every else 1 + n // 12


def check(name, model, call, n_blocks=600):
    """One call on a pool with sequences that share: nothing changes when it fails, and then it gives what it gives alone."""

    def make():
        pool = model.new_pool(n_blocks=n_blocks)
        held = [pool.alloc_block() for _ in range(300)]  # block ids past those that Python keeps as objects
        seqs = [model.new_sequence(pool)]
        model.prefill(list(range(1, 20)), seqs[0])
        seqs += [seqs[0].fork(), model.new_sequence(pool)]
        return pool, seqs, held

    call(*make()[:2])  # it goes
    state, n_failed = make(), 0
    before = snapshot(state[0], *state[1])
    for error in failures(lambda: call(*state[:2])):
        if error is None:  # it went through: what it did is not undone
            state = make()
            continue
        n_failed += 1
        assert not state[0]._lock.locked(), f"{name}: the lock is held after {error!r}"
        assert snapshot(state[0], *state[1]) == before, f"{name}: changed by {error!r}"
    twin = make()
    got, want = call(*state[:2]), call(*twin[:2])
    assert not isinstance(want, np.ndarray) or want.tobytes() == got.tobytes(), name
    assert snapshot(state[0], *state[1]) == snapshot(twin[0], *twin[1]), name
    print(f"{name}: {n_failed} failures")


def exhausted(call):
    """The refusal itself may fail too."""

    def refused(pool, seqs):
        try:
            call(pool, seqs)
        except pk.PoolExhausted:
            pass
        else:
            raise AssertionError("was not refused")

    return refused


def check_calls(model, folder):
    rows = np.ones((3, model.config.kv_dim), np.float32)
    path = os.path.join(folder, "saved")

    def load(pool, seqs):
        return pk.Sequence.load(path, pool, model=model)

    def save(pool, seqs):
        seqs[0].save(path, tokens=range(19), model=model)

    def attend(pool, seqs):
        q = np.ones((3, model.config.n_heads * model.config.head_dim), np.float32)
        seqs[2].ensure_append(3)
        try:
            return pk.paged_attention(q, rows, rows, seqs[2], 0, n_heads=4, n_kv_heads=2, head_dim=16)
        finally:
            seqs[2].truncate(0)

    def write(pool, seqs):
        seqs[2].ensure_append(3)
        try:
            for layer in range(2):
                seqs[2].append_layer(layer, rows, rows)
            seqs[2].advance(3)
        except BaseException:
            seqs[2].truncate(0)
            raise

    array = np.ones((2, 2, 2, 20, 16), np.float32)
    for name, call in (
        ("step", lambda pool, seqs: model.step([(seqs[0], [1, 2]), (seqs[1], [3]), (seqs[2], [4] * 20)])),
        ("decode_step", lambda pool, seqs: model.decode_step([5, 6], seqs[:2])),
        ("prefill", lambda pool, seqs: model.prefill([7] * 50, seqs[2], chunk=16)),
        ("exhausted step", exhausted(lambda pool, seqs: model.step([(seqs[2], [1] * 200)]))),
        ("exhausted append", exhausted(lambda pool, seqs: seqs[2].ensure_append(200))),
        ("ensure_append", lambda pool, seqs: seqs[2].ensure_append(40)),
        ("append and advance", write),
        ("attention", attend),
        ("fork", lambda pool, seqs: seqs[0].fork()),
        ("fork and drop", lambda pool, seqs: seqs[0].fork() and None),
        ("new", lambda pool, seqs: model.new_sequence(pool)),
        ("from_blocks", lambda pool, seqs: pk.Sequence.from_blocks(pool, seqs[0].block_table[:1], 64)),
        ("alloc_block", lambda pool, seqs: pool.alloc_block()),
        ("save", save),
        ("load", load),
        ("export", lambda pool, seqs: seqs[0].export(16)),
        ("import_", lambda pool, seqs: pk.Sequence.import_(array, pool)),
        ("score", lambda pool, seqs: [each.logprob for each in pk.score(model, [([1, 2], [3]), ([1, 2], [4, 5])], pool)]),
    ):  # fmt: skip
        check(name, model, call, 306 if name.startswith("exhausted") else 600)
        assert sorted(os.listdir(folder)) in (["saved"], []), os.listdir(folder)


def check_making(folder):
    """Objects that are made of nothing: all of it or nothing."""
    for name, call in (("pool", lambda: pk.BlockPool(9, 2, 64, dtype="q8_0")),
                       ("matmul", lambda: pk.matmul(np.ones((3, 64), np.float32), pk.pack(np.ones((5, 64), np.float32)))),
                       ("model", lambda: pk.LlamaModel.load(folder))):  # fmt: skip
        call()
        n_failed = sum(error is not None for error in failures(call, EVERY or name != "model"))
        print(f"{name}: {n_failed} failures")


def check_engine(model):
    """The engine goes on after each failure, and the next call gives what it gives alone."""
    prompts = [[1, 2, 3] * 7, [1, 2, 3] * 6 + [9]]
    params = pk.SamplingParams(n=2, max_tokens=5, seed=3, logprobs=1, ignore_eos=True)
    for options in ({}, {"speculative": "ngram"}):
        llm = pk.LLM(model, n_blocks=9, **options)
        want = [out.outputs for out in pk.LLM(model, n_blocks=99).generate(prompts, params, use_tqdm=False)]
        n_failed = 0
        for error in failures(lambda: llm.generate(prompts, params, use_tqdm=False), EVERY):
            n_failed += error is not None
            stats = llm.stats()
            assert (stats["running"], stats["waiting"], stats["blocks_used"]) == (0, 0, 0), (error, stats)
            assert all(llm.pool.ref_count(i) <= 1 for i in range(9))
            assert [out.outputs for out in llm.generate(prompts, params, use_tqdm=False)] == want
        llm._engine.cache.evict(9)
        assert llm.pool.n_free == 9
        print(f"engine {options}: {n_failed} failures")


if __name__ == "__main__":
    pk.set_num_threads(1)
    tiny = pk.LlamaModel.load(FOLDER)
    tiny.tokenizer
    with tempfile.TemporaryDirectory() as scratch:
        check_calls(tiny, scratch)
    check_making(FOLDER)
    check_engine(tiny)
    assert _core.get_num_threads() == 1
