"""Thread counts, and what other threads and processes around a model may do."""

import os
import subprocess
import sys
import threading

import numpy as np
import pagedkv as pk
import promise_rows
import pytest
import tiny
from pagedkv import threads as module
from pagedkv.threads import _cgroup_quota
from promise_rows import assert_same_bits, assert_same_kv, rows_alone, run_child, token_stream

N_TOKENS = 40


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Wide enough for threads to share each operation."""
    config = tiny.tiny_config(hidden_dim=128, n_heads=8, ffn_dim=320, vocab_size=640)
    return tiny.write_hf(tmp_path_factory.mktemp("threads") / "tiny", config, tiny.tiny_tensors(config))


@pytest.fixture(scope="module")
def model(directory):
    return pk.LlamaModel.load(directory)


@pytest.fixture(scope="module")
def streams(model):
    """(tokens, Rows) of four different sequences."""
    tokens = [token_stream(i, N_TOKENS, model.config.vocab_size) for i in range(4)]
    return [(t, rows_alone(model, t)) for t in tokens]


def python(code, *args, **env):
    """Run code in a new process; (exit status, last line of output or of the error)."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], env=promise_rows.child_env(**env), capture_output=True, text=True, timeout=promise_rows.RUN_SECONDS)
    return done.returncode, (done.stdout or done.stderr).strip().splitlines()[-1]


# -- the count ------------------------------------------------------------------------------------

COUNT = "import pagedkv as pk; print(pk.get_num_threads())"
COUNT_ON_ONE_CPU = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); " + COUNT


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_default_count_is_within_the_affinity():
    status, n = python(COUNT, PAGEDKV_NUM_THREADS="")
    assert status == 0 and 1 <= int(n) <= len(os.sched_getaffinity(0))
    assert python(COUNT_ON_ONE_CPU, PAGEDKV_NUM_THREADS="") == (0, "1")


@pytest.mark.parametrize("asked, n", [("1", "1"), ("3", "3"), (" 2 ", "2"), ("4096", "4096")])
def test_environment_sets_the_count(asked, n):
    assert python(COUNT, PAGEDKV_NUM_THREADS=asked) == (0, n)


@pytest.mark.parametrize("asked", ["0", "-1", "two", "1.5", "4097", "1e3", "٣"])
def test_bad_count_in_the_environment_is_refused(asked):
    status, message = python(COUNT, PAGEDKV_NUM_THREADS=asked)
    assert status == 1
    assert message == f"ValueError: PAGEDKV_NUM_THREADS must be an integer from 1 to 4096, not {asked!r}"


def test_unknown_instruction_set_in_the_environment_is_refused():
    status, message = python(COUNT, PAGEDKV_ISA="sse9")
    assert status == 1
    assert message == f"ValueError: instruction set 'sse9' does not run here; available: {', '.join(pk.available_isas())}"


@pytest.mark.parametrize("n", [0, -1, 4097, 2**40])
def test_counts_out_of_range_are_refused(threads, n):
    threads(2)
    with pytest.raises(ValueError, match=f"from 1 to 4096, not {n}"):
        pk.set_num_threads(n)
    assert pk.get_num_threads() == 2


@pytest.mark.parametrize("n", [None, "2", 1.5])
def test_counts_that_are_no_integer_are_refused(threads, n):
    threads(2)
    with pytest.raises(TypeError):
        pk.set_num_threads(n)
    assert pk.get_num_threads() == 2


STARTED = """
import os, sys, numpy as np, pagedkv as pk
model = pk.LlamaModel.load(sys.argv[1])
seq = model.new_sequence(model.new_pool())
before = len(os.listdir("/proc/self/task"))
model.prefill(np.arange(100), seq)
model.decode_step([1], [seq])
print(len(os.listdir("/proc/self/task")) - before + 1)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list a process's threads")
@pytest.mark.parametrize("n", [1, 3])
def test_no_more_threads_than_asked_for_run(directory, n):
    # Loading runs threads too, so a count of 3 may be reached before the step.
    status, n_running = python(STARTED, directory, PAGEDKV_NUM_THREADS=str(n), OMP_NUM_THREADS="8")
    assert status == 0 and int(n_running) <= n


RUNNING = """
import os, sys, numpy as np, pagedkv as pk
model = pk.LlamaModel.load(sys.argv[1])
seq = model.new_sequence(model.new_pool())
before = len(os.listdir("/proc/self/task"))  # NumPy's own are among them
pk.set_num_threads(4096)
model.prefill(np.arange(100), seq)
n_running = len(os.listdir("/proc/self/task")) - before + 1
print(pk.get_num_threads(), n_running <= len(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="this system does not list a process's threads")
def test_no_more_threads_run_than_there_are_processors(directory):
    assert python(RUNNING, directory, PAGEDKV_NUM_THREADS="1") == (0, "4096 True")


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_a_count_whose_stacks_do_not_fit_the_address_space_does_not_end_the_process(directory):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
    assert python(limit + RUNNING, directory, PAGEDKV_NUM_THREADS="4096") == (0, "4096 True")


N_CORES = os.cpu_count() or 1


@pytest.mark.parametrize("n", sorted({1, 2, 3, 4, 7, N_CORES - 1 or 1, N_CORES, 2 * N_CORES}))
def test_count_does_not_show(model, streams, threads, n):
    threads(n)
    for tokens, want in streams:
        with model.new_sequence(model.new_pool()) as seq:
            assert_same_bits(model.prefill(tokens[:30], seq, all_logits=True), want.logits[:30])
            for position in range(30, N_TOKENS):
                assert_same_bits(model.decode_step(tokens[position : position + 1], [seq])[0], want.logits[position])
            assert_same_kv(model, seq, want)


def test_limit_of_threadpoolctl_holds(model, streams, threads):
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed")
    threads(2)
    if not any(pool["user_api"] == "openmp" for pool in threadpoolctl.threadpool_info()):
        pytest.skip("threadpoolctl sees no OpenMP runtime")
    with threadpoolctl.threadpool_limits(1), model.new_sequence(model.new_pool()) as seq:
        assert pk.get_num_threads() == 1
        assert_same_bits(model.prefill(streams[0][0], seq), streams[0][1].logits[-1])
    assert pk.get_num_threads() == 2


LIMITS = """
import os, threading, pagedkv as pk
from threadpoolctl import threadpool_info, threadpool_limits
before = {pool["filepath"]: pool["num_threads"] for pool in threadpool_info()}
seen = []
for limit in range(1, 7):            # one of them is the OpenMP runtime's own default
    with threadpool_limits(limit):
        seen.append(pk.get_num_threads())
        with threadpool_limits(1, user_api="openmp"):
            seen.append(pk.get_num_threads())
        other = threading.Thread(target=lambda: seen.append(pk.get_num_threads()))
        other.start()
        other.join()
    seen.append(pk.get_num_threads())
    with threadpool_limits(limit, user_api="blas"):
        seen.append(pk.get_num_threads())
assert seen == [n for limit in range(1, 7) for n in (limit, 1, limit, 5, 5)], seen
assert {pool["filepath"]: pool["num_threads"] for pool in threadpool_info()} == before
pk.set_num_threads(3)
print([pool["num_threads"] for pool in threadpool_info() if pool["internal_api"] == "pagedkv"])
"""


@pytest.mark.parametrize("default", ["1", "2", "4", "5"])
def test_any_limit_of_threadpoolctl_holds_and_ends(default):
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="threadpoolctl is not installed")
    if not hasattr(threadpoolctl, "register"):
        pytest.skip("this threadpoolctl knows its own libraries only")
    assert python(LIMITS, PAGEDKV_NUM_THREADS="5", OMP_NUM_THREADS=default) == (0, "[3]")


# -- the default ----------------------------------------------------------------------------------


@pytest.mark.parametrize("affinity, cores, quota, openmp, n", [
    (8, 8, None, None, 8), (8, 4, None, None, 4), (8, 8, 3, None, 3), (2, 2, 16, None, 2), (8, 8, 5, "2", 2),
    (8, 8, 1, "6", 1), (1, 1, 64, "64", 1),
])  # fmt: skip
def test_default_is_the_least_of_cores_in_the_affinity_quota_and_openmp(monkeypatch, affinity, cores, quota, openmp, n):
    monkeypatch.setattr(module, "_affinity", lambda: set(range(affinity)))
    monkeypatch.setattr(module, "_physical_cores", lambda cpus: cores if len(cpus) == affinity else 0)
    monkeypatch.setattr(module, "_cgroup_quota", lambda: quota)
    monkeypatch.delenv("PAGEDKV_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if openmp:
        monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    assert module.default_num_threads() == n


# -- the cgroup's quota ---------------------------------------------------------------------------

V2, V1 = "0::/a/b/c", "7:memory:/m\n4:cpu,cpuacct:/a/b\n0::/"


@pytest.mark.parametrize("cgroup, files, n", [
    (V2, {}, None),
    (V2, {"cpu.max": "150000 100000"}, 2),  # seen from inside a container: the mount begins at the own group
    (V2, {"a/b/c/cpu.max": "max 100000", "a/b/cpu.max": "max 100000"}, None),
    (V2, {"a/b/c/cpu.max": "400000 100000"}, 4),
    (V2, {"a/b/c/cpu.max": "400000 100000", "a/cpu.max": "250000 100000", "cpu.max": "max 100000"}, 3),
    (V2, {"a/b/c/cpu.max": "20000 100000", "a/cpu.max": "250000 100000"}, 1),
    (V2, {"other/cpu.max": "100000 100000"}, None),
    (V2, {"a/b/c/cpu.max": "nonsense", "a/cpu.max": "100000 0"}, None),
    ("0::/../x", {"cpu.max": "300000 100000", "x/cpu.max": "200000 100000"}, 2),
    ("0::/", {"unified/cpu.max": "200000 100000"}, 2),
    (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, None),
    (V1, {"cpu,cpuacct/a/cpu.cfs_quota_us": "100001", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"}, 2),
    (V1, {"cpu/a/b/cpu.cfs_quota_us": "50000", "cpu/a/b/cpu.cfs_period_us": "100000",
          "cpu/cpu.cfs_quota_us": "700000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    (V1, {"cpu/cpu.cfs_quota_us": "700000", "cpu/cpu.cfs_period_us": "100000", "memory/m/cpu.max": "1 1"}, 7),
    (None, {"cpu.max": "100000 100000"}, None),
])  # fmt: skip
def test_the_smallest_quota_of_the_own_group_and_those_above_counts(tmp_path, cgroup, files, n):
    for name, text in {**{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
                       **({} if cgroup is None else {"proc/self/cgroup": cgroup})}.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert _cgroup_quota(tmp_path) == n


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, value", [("PAGEDKV_NUM_THREADS", "two"), ("PAGEDKV_ISA", "sse9")])
@pytest.mark.parametrize("script", [None, "pagedkv", "pagedkv.exe"])
def test_a_bad_environment_ends_the_command_in_one_line(tmp_path, name, value, script):
    command = [sys.executable, "-m", "pagedkv", "--version"]
    if script:  # as installers write it
        (tmp_path / script).write_text("import sys\nfrom pagedkv.cli import main\nsys.exit(main())\n")
        command = [sys.executable, str(tmp_path / script), "--version"]
    done = subprocess.run(command, env=promise_rows.child_env(**{name: value}), capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("pagedkv: error: ") and repr(value) in done.stderr


# -- Ctrl-C ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_directory(tmp_path_factory):
    """A small model whose context is so long that one step can take seconds."""
    config = tiny.tiny_config(hidden_dim=256, n_heads=8, ffn_dim=512, n_layers=4, context_len=8192)
    return tiny.write_hf(tmp_path_factory.mktemp("threads") / "slow", config, tiny.tiny_tensors(config))


PRESSED = """
import os, signal, sys, threading, time, numpy as np, pagedkv as pk

signal.signal(signal.SIGINT, signal.default_int_handler)   # ignored under nohup
model = pk.LlamaModel.load(sys.argv[1])
pool = model.new_pool(n_tokens=7000)
many = np.arange(6000) % 128


def pressing(pool):
    # Ctrl-C as soon as a step has its blocks, and so has begun.
    n_free = pool.n_free

    def press():
        while pool.n_free == n_free:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def interrupted(pool, call):
    thread = pressing(pool)
    try:
        call()
    except KeyboardInterrupt:
        return thread.join() or True
    return False


def state(pool, *seqs):
    ids = [pool.alloc_block() for _ in range(pool.n_free)]     # the order in which blocks will be given
    for block_id in ids[::-1]:
        pool.unref_block(block_id)
    rows = [[head.tobytes() for layer in range(4) for head in seq.gather_head(layer, 1, 32)] for seq in seqs]
    return ids, [pool.ref_count(i) for i in range(pool.n_blocks)], [seq.block_table.tolist() for seq in seqs], rows
"""

PRESSED_IN_A_STEP = PRESSED + """
first = model.new_sequence(pool)
model.prefill(many[:30], first)
short, other = first.fork(), first.fork()     # the tail has three owners, one of which is shorter
short.truncate(20)
other.free()
before = state(pool, first, short)
# The first to write gets a twin of the tail; the shorter one then writes over the rows that the first one had there.
assert interrupted(pool, lambda: model.step([(first, many[:5]), (short, many)]))
assert state(pool, first, short) == before and (len(first), len(short)) == (30, 20)
assert interrupted(pool, lambda: model.prefill(many, short, chunk=len(many), all_logits=True))
assert interrupted(pool, lambda: model.step([(short, many[:3000]), (first, many[:3000])], n_logits=[3000, 0]))
assert state(pool, first, short) == before
alone = model.new_sequence(pool)
want = model.prefill([*many[:30], *many[:5]], alone)
assert model.step([(first, many[:5]), (short, [1])])[0].tobytes() == want.tobytes()
print("as before")
"""

PRESSED_IN_GENERATE = PRESSED + """
llm = pk.LLM(model, n_blocks=400, max_num_batched_tokens=6001)
params = pk.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
assert interrupted(llm.pool, lambda: llm.generate([many.tolist()], params, use_tqdm=False))
stats = llm.stats()
assert stats["running"] == stats["waiting"] == stats["blocks_used"] == stats["steps"] == 0
tokens = llm.generate([many[:40].tolist()], params, use_tqdm=False)[0].outputs[0].token_ids
assert tokens[0] == model.prefill(many[:40], model.new_sequence(pool)).argmax()
print("as before")
"""

PRESSED_AND_HANDLED = PRESSED + """
for n in (1500, 3000):     # a step that signals are looked for in, which is ten times a second
    few, seq, began = many[:n], model.new_sequence(pool), time.perf_counter()
    want = model.prefill(few, seq, chunk=n).tobytes()
    seq.free()
    if time.perf_counter() - began > 0.3:
        break
calls, seq = [], model.new_sequence(pool)


def handler(number, frame):
    calls.append((number, frame is not None, len(seq), pool.n_free == n_free, seq.fork().free()))   # nothing is locked


signal.signal(signal.SIGINT, handler)
n_free = pool.n_free
thread = pressing(pool)
assert model.prefill(few, seq, chunk=len(few)).tobytes() == want     # begun anew
thread.join()
assert calls == [(signal.SIGINT, True, 0, True, None)], calls

# In another thread a step goes on: the signal is the main thread's.
signal.signal(signal.SIGINT, signal.default_int_handler)
got, other = [], model.new_sequence(pool)
worker = threading.Thread(target=lambda: got.append(model.prefill(few, other, chunk=len(few)).tobytes()))
press = pressing(pool)
try:
    worker.start()
    while True:
        time.sleep(0.01)
except KeyboardInterrupt:
    pass
worker.join()
assert got == [want]
print("as before")
"""


@pytest.mark.parametrize("code, n", [(PRESSED_IN_A_STEP, 1), (PRESSED_IN_A_STEP, 2), (PRESSED_IN_GENERATE, 2),
                                     (PRESSED_AND_HANDLED, 1)])  # fmt: skip
def test_ctrl_c_ends_a_step_half_way_and_leaves_no_trace(slow_directory, code, n):
    """A step that was computed to its end has advanced its sequences."""
    assert python(code, slow_directory, PAGEDKV_NUM_THREADS=str(n)) == (0, "as before")


# -- processes ------------------------------------------------------------------------------------

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@needs_fork
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_step_after_fork_finishes_and_equals_the_parents(directory, n):
    result = run_child(directory, "--tokens", 60, "--fork", PAGEDKV_NUM_THREADS=str(n))
    assert result["num_threads"] == n
    assert result["sha256_in_fork"] == result["sha256"]


FORK_GOES_ON = """
import os, signal, sys, numpy as np, pagedkv as pk
model = pk.LlamaModel.load(sys.argv[1])
seq = model.new_sequence(model.new_pool())
model.prefill(np.arange(50), seq)                # threads have run
child = os.fork()
if child == 0:
    signal.alarm(60)
bits = model.decode_step([7], [seq]).tobytes()   # parent and child go on with the same sequence, each its own copy
if child == 0:
    os.write(int(sys.argv[2]), bits)
    os._exit(0)
_, status = os.waitpid(child, 0)
again = model.new_sequence(model.new_pool())
assert status == 0 and model.prefill([*range(50), 7], again).tobytes() == bits
os.write(1, bits)
"""


@needs_fork
def test_a_sequence_goes_on_in_both_processes(directory):
    read_end, write_end = os.pipe()
    try:
        parent = subprocess.run([sys.executable, "-c", FORK_GOES_ON, str(directory), str(write_end)], env=promise_rows.child_env(PAGEDKV_NUM_THREADS="2"),
                                capture_output=True, pass_fds=[write_end], timeout=promise_rows.RUN_SECONDS)  # fmt: skip
    finally:
        os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        in_child = pipe.read()
    assert parent.returncode == 0, parent.stderr.decode()
    assert in_child == parent.stdout and len(in_child) == 4 * 640


# -- Python threads -------------------------------------------------------------------------------


def test_the_interpreter_s_lock_is_on():
    """The core relies on it: a free-threaded CPython turns it on when the core is imported, and warns."""
    assert getattr(sys, "_is_gil_enabled", lambda: True)()


def run_together(*works):
    """Run functions in Python threads that start at one moment; re-raises what one of them raised."""
    barrier, errors = threading.Barrier(len(works)), []

    def run(work):
        try:
            barrier.wait()
            work()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(promise_rows.RUN_SECONDS)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def decodes_alone(model, pool, tokens, want):
    """Work of one Python thread: grow, fork, truncate and free on `pool`, every row compared."""

    def work():
        for chunk in (1, 7, N_TOKENS):
            with model.new_sequence(pool, N_TOKENS) as seq:
                assert_same_bits(model.prefill(tokens, seq, chunk=chunk, all_logits=True), want.logits)
                with seq.fork() as child:
                    child.truncate(N_TOKENS // 2)
                    assert_same_bits(model.prefill(tokens[N_TOKENS // 2 :], child), want.logits[-1])
                assert_same_kv(model, seq, want)

    return work


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("n_pools", [1, 2])
def test_python_threads_with_one_model_decode_as_if_alone(model, streams, threads, n_threads, n_pools):
    threads(n_threads)
    pools = [model.new_pool() for _ in range(n_pools)]
    run_together(*(decodes_alone(model, pools[i % n_pools], tokens, want) for i, (tokens, want) in enumerate(streams)))
    assert all(pool.n_free == pool.n_blocks for pool in pools)


def random_work(model, pool, seed, done):
    """Steps, forks, truncations and ends of one Python thread; what came of each goes to `done`."""
    rng = np.random.default_rng(seed)
    seqs = {}  # Sequence -> its tokens

    def step():
        some = [seq for seq in seqs if rng.random() < 0.7] or list(seqs)[:1]
        new = [rng.integers(0, model.config.vocab_size, rng.integers(1, 6)) for _ in some]
        logits = model.step(list(zip(some, new)))
        for seq, ids, row in zip(some, new, logits):
            seqs[seq] = [*seqs[seq], *ids]
            done.append((seqs[seq], row.copy()))

    def fork():
        seq = list(seqs)[rng.integers(len(seqs))]
        seqs[seq.fork()] = seqs[seq]

    def truncate():
        seq = list(seqs)[rng.integers(len(seqs))]
        n = int(rng.integers(0, len(seqs[seq]) + 1))
        seq.truncate(n)
        seqs[seq] = seqs[seq][:n]

    def end():
        seq = list(seqs)[rng.integers(len(seqs))]
        del seqs[seq]
        seq.free()

    def work():
        for _ in range(25):
            if not seqs:
                seqs[model.new_sequence(pool, 400)] = []
            (step, step, step, fork, truncate, end)[rng.integers(6)]()
        for seq in seqs:
            seq.free()

    return work


def test_eight_threads_of_random_work_on_one_pool_compute_as_if_alone(model, threads):
    pool, results = model.new_pool(n_tokens=20000), [[] for _ in range(8)]
    threads(2)
    run_together(*(random_work(model, pool, seed, done) for seed, done in enumerate(results)))
    assert pool.n_free == pool.n_blocks and all(results)
    threads(1)
    for seed, done in enumerate(results):
        for tokens, row in done:
            assert_same_bits(row, rows_alone(model, tokens, chunk=512).logits[-1])


def test_batches_over_two_pools_in_either_order_do_not_lock_each_other_out(model, streams):
    pools = [model.new_pool(), model.new_pool()]

    def work(order):
        seqs = [model.new_sequence(pool, N_TOKENS) for pool in order]
        for position in range(N_TOKENS):
            logits = model.step([(seq, tokens[position : position + 1]) for seq, (tokens, _) in zip(seqs, streams)])
            assert_same_bits(logits, np.stack([want.logits[position] for _, want in streams[:2]]))

    run_together(lambda: work(pools), lambda: work(pools[::-1]))


def test_two_python_threads_on_one_sequence_take_turns(model, streams):
    """Which token goes first is open, but the row of each belongs to one of the two orders."""
    tokens, _ = streams[0]
    pool, rows = model.new_pool(), {}
    with model.new_sequence(pool) as seq:
        model.prefill(tokens[:20], seq)
        run_together(*(lambda token=token: rows.update({token: model.decode_step([token], [seq])[0]}) for token in (3, 4)))
        assert len(seq) == 22
        wants = [rows_alone(model, [*tokens[:20], *order]).logits[20:] for order in [(3, 4), (4, 3)]]
    as_bytes = {token: row.tobytes() for token, row in rows.items()}
    assert as_bytes in [{3: wants[0][0].tobytes(), 4: wants[0][1].tobytes()}, {4: wants[1][0].tobytes(), 3: wants[1][1].tobytes()}]


FORK_UNDER_A_LOCK = """
import os, signal, sys, pagedkv as pk
pool = pk.BlockPool(4, 1, 2)
with pool._lock:                     # as another thread's step would hold it
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        seq = pk.Sequence(pool, 16)
        seq.ensure_append(1)
        os._exit(0 if pool.n_free == 3 and pk.get_num_threads() == 1 else 1)
_, status = os.waitpid(child, 0)
sys.exit(status != 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork on this system")
def test_a_child_forked_while_a_pool_is_locked_can_use_it():
    subprocess.run([sys.executable, "-c", FORK_UNDER_A_LOCK], check=True, timeout=60)


ASKED_ONLY = """
import os, signal, sys, pagedkv as pk
pk.set_num_threads(2)
pk.get_num_threads()                 # asking starts no team
child = os.fork()
if child == 0:
    signal.alarm(20)
    pk.set_num_threads(2)
    os._exit(0 if pk.get_num_threads() == 2 else 1)
_, status = os.waitpid(child, 0)
sys.exit(status != 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork on this system")
def test_a_child_of_a_parent_without_a_team_may_ask_for_threads():
    subprocess.run([sys.executable, "-c", ASKED_ONLY], check=True, timeout=60)


def test_omp_num_threads_bounds_the_default():
    code = "import pagedkv as pk; print(pk.get_num_threads())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PAGEDKV_NUM_THREADS", None)
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout == "1\n"
