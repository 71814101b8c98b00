"""Other processes: forked and spawned ones, pools of them, and what can be sent to them."""

import copy
import os
import pickle
import subprocess
import sys

import pytest
from promise_rows import child_env
from test_engine import model  # noqa: F401  (a fixture)
from tiny import tiny_config

import pagedkv as pk

RUN_SECONDS = 240  # of a script; the limit only ends a hang

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


@pytest.fixture
def script(tmp_path, model):  # noqa: F811
    """Function that runs Python text as a script, with the model's folder as its first argument; what it printed."""

    def run(text, *args, n_threads=2):
        path = tmp_path / "script.py"
        path.write_text(text)
        done = subprocess.run([sys.executable, path, model._source[0], *args], capture_output=True, text=True,
                              env=child_env(PAGEDKV_NUM_THREADS=str(n_threads)), timeout=RUN_SECONDS)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


# -- multiprocessing ------------------------------------------------------------------------------

POOLS = """
import multiprocessing, sys, pagedkv as pk
from concurrent.futures import ProcessPoolExecutor

inherited = None


def tokens_of(job):
    path, prompt = job
    model = inherited or pk.LlamaModel.load(path)
    outputs = pk.LLM(model, n_blocks=32).generate([prompt], pk.SamplingParams(n=2, max_tokens=8, seed=5), use_tqdm=False)
    logits = model.prefill(prompt, model.new_sequence(model.new_pool(n_tokens=64)))
    return outputs, logits.tobytes()


if __name__ == "__main__":
    path, method = sys.argv[1:]
    jobs = [(path, [7, 1, i]) for i in range(4)]
    want = [tokens_of(job) for job in jobs]                     # threads have run here
    context = multiprocessing.get_context(method)
    if method == "fork":
        inherited = pk.LlamaModel.load(path)
    with context.Pool(2) as pool:
        assert pool.map_async(tokens_of, jobs).get(100) == want
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        assert list(executor.map(tokens_of, jobs[:2], timeout=100)) == want[:2]
    child = context.Process(target=tokens_of, args=(jobs[0],))
    child.start()
    child.join(100)
    assert child.exitcode == 0, child.exitcode
    assert [tokens_of(job) for job in jobs] == want
    print("same")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pools_of_processes_give_what_one_process_gives(script, method):
    import multiprocessing

    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    assert script(POOLS, method) == "same\n"


# -- pickle ---------------------------------------------------------------------------------------


def test_parameters_and_results_can_be_pickled(model):  # noqa: F811
    params = pk.SamplingParams(n=2, max_tokens=4, seed=3, stop="zz", logprobs=2, prompt_logprobs=1, logit_bias={5: 2.0})
    output, = pk.LLM(model, n_blocks=16).generate(["Hi"], params, use_tqdm=False)
    refused, = pk.LLM(model, n_blocks=16).stream([[]])
    config = tiny_config(rope_scaling="llama3", rope_factor=8.0, rope_freq_factors=(1.0, 2.0))
    score, = pk.score(model, [([1, 2], [3, 4])])
    for each in (params, output, config, model.config):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(each, protocol)) == each
        assert copy.deepcopy(each) == each
    assert pickle.loads(pickle.dumps(score)).logprob == score.logprob
    assert str(pickle.loads(pickle.dumps(refused)).error) == str(refused.error)
    tokenizer = pickle.loads(pickle.dumps(model.tokenizer))
    assert tokenizer.decode(tokenizer.encode("Hello <|end|>")) == model.tokenizer.decode(model.tokenizer.encode("Hello <|end|>"))


def test_what_is_memory_of_this_process_says_so(model):  # noqa: F811
    pool = model.new_pool(n_blocks=4)
    llm = pk.LLM(model, n_blocks=4)
    array = model.prefill([1], model.new_sequence(pool))[None]
    for each, remedy in ((model, r"LlamaModel.load\('.*'\)"), (pool, "a BlockPool cannot"),
                         (model.new_sequence(pool), r"save\(\) and load\(\)"), (llm, "an? LLM cannot .* make one there"),
                         (pk.AsyncLLM(llm), "AsyncLLM cannot"), (pk.pack(array), "pack it anew")):  # fmt: skip
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=f"cannot be pickled or copied: .*|{remedy}") as caught:
                attempt(each)
            assert "cannot be pickled or copied" in str(caught.value)
            assert caught.match(remedy)


# -- fork -----------------------------------------------------------------------------------------

FORKED = """
import asyncio, os, signal, sys, threading, time, numpy as np, pagedkv as pk

model = pk.LlamaModel.load(sys.argv[1])
params = pk.SamplingParams(n=2, max_tokens=12, seed=5, ignore_eos=True)


def generated(llm, use_tqdm=False):
    return [sample.token_ids for sample in llm.generate([[1, 2, 3]], params, use_tqdm=use_tqdm)[0].outputs]


async def last(llm):
    async for output in llm.generate([1, 2, 3], params):
        pass
    return [sample.token_ids for sample in output.outputs]


def in_child(work):
    # A process that ends as processes do, by itself; a hang ends it by SIGALRM.
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        work()
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, status


def refuses(call):
    try:
        call()
    except RuntimeError as error:
        assert "was forked while another thread was inside a step" in str(error), error
    else:
        raise AssertionError("no error")


def equals(got, want):
    assert got == want, (got, want)


want = generated(pk.LLM(model, n_blocks=64))
"""

FORK_OF_AN_IDLE_ENGINE = FORKED + """
llm = pk.LLM(model, n_blocks=64)
both = pk.AsyncLLM(llm)
assert generated(llm) == want == asyncio.run(last(both))      # its thread waits now
for _ in range(2):
    in_child(lambda: equals(generated(llm, use_tqdm=True), want))
    in_child(lambda: equals(asyncio.run(last(both)), want))
    in_child(lambda: both.shutdown())
in_child(lambda: in_child(lambda: equals(asyncio.run(last(both)), want)))     # a child's child
assert generated(llm) == want == asyncio.run(last(both))
print("same")
"""

FORK_DURING_A_STEP_OF_THE_ENGINE = FORKED + """
llm = pk.LLM(model, n_blocks=64)
both = pk.AsyncLLM(llm)
inside, leave, step, got = threading.Event(), threading.Event(), model.step, []


def waits(*args, **options):
    inside.set()
    leave.wait()
    return step(*args, **options)


model.step = waits
threads = [threading.Thread(target=call) for call in (lambda: got.append(generated(llm)),
                                                      lambda: got.append(asyncio.run(last(both))))]
for thread in threads:
    thread.start()
inside.wait()


def child():
    model.step = step
    refuses(lambda: generated(llm))
    refuses(llm.stats)
    refuses(lambda: list(llm.stream([[1, 2, 3]], params)))
    refuses(lambda: asyncio.run(last(both)))
    both.shutdown()
    equals(generated(pk.LLM(llm.model, n_blocks=64), use_tqdm=True), want)
    equals(asyncio.run(last(pk.AsyncLLM(llm.model, n_blocks=64))), want)


in_child(child)
leave.set()
for thread in threads:
    thread.join()
assert got == [want, want]
both.shutdown()
print("same")
"""

# Between two steps as well as during one: the child's AsyncLLM has let go of the parent's requests, or refuses.
FORK_BESIDE_A_RUNNING_ASYNC_ENGINE = FORKED + """
llm = pk.AsyncLLM(model, n_blocks=64)


def child():
    signal.alarm(60)
    try:
        equals(asyncio.run(last(llm)), want)
        assert llm.stats()["running"] == llm.stats()["waiting"] == 0
    except RuntimeError as error:
        assert "was forked while" in str(error)
    os._exit(0)


async def parent():
    n = 0
    async for output in llm.generate([1, 2, 3], params):
        n += 1
        if n % 4 == 1:
            process = os.fork()
            if process == 0:
                asyncio._set_running_loop(None)
                child()
            _, status = os.waitpid(process, 0)
            assert status == 0, status
    return [sample.token_ids for sample in output.outputs]


assert asyncio.run(parent()) == want
print("same")
"""

FORK_DURING_A_STEP_OF_THE_MODEL = FORKED + """
pool = model.new_pool(n_tokens=8000)
tokens = np.arange(4000) % 250
seq, busy = model.new_sequence(pool, 4100), model.new_sequence(pool, 4100)
before = model.prefill(tokens[:20], seq).tobytes()
n_free = pool.n_free
worker = threading.Thread(target=lambda: model.step([(busy, tokens)]))
worker.start()
while pool.n_free == n_free:
    time.sleep(0.001)


def child():
    assert pk.get_num_threads() == 1 and len(busy) == 0
    again = model.new_sequence(pool)
    equals(model.prefill(tokens[:20], again).tobytes(), before)
    equals(model.decode_step([5], [seq]).tobytes(), model.decode_step([5], [again]).tobytes())
    equals(model.prefill(tokens[:20], busy).tobytes(), before)     # what the parent's step wrote is not there
    for each in (seq, busy, again):
        each.free()
    assert pool.n_free == pool.n_blocks


in_child(child)
assert worker.is_alive() or len(busy) == 4000
worker.join()
assert len(busy) == 4000
print("same")
"""


@needs_fork
@pytest.mark.parametrize("code", [FORK_OF_AN_IDLE_ENGINE, FORK_DURING_A_STEP_OF_THE_ENGINE,
                                  FORK_BESIDE_A_RUNNING_ASYNC_ENGINE, FORK_DURING_A_STEP_OF_THE_MODEL],
                         ids=["idle", "in_a_step", "async", "model"])  # fmt: skip
def test_a_forked_engine_works_or_says_why_not(script, code):
    assert script(code) == "same\n"
