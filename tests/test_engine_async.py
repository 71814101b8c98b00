"""AsyncLLM: the same outputs as LLM, requests that come and go, and ends of all kinds."""

import asyncio
import threading
import time

import pytest
from test_engine import VOCAB, assert_idle, ids, model, requests  # noqa: F401  (model is a fixture)

import pagedkv as pk
from pagedkv import LLM, AsyncLLM, SamplingParams


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


@pytest.fixture
def llm(model):  # noqa: F811
    """An AsyncLLM over a small pool; after the test nothing is left in it."""
    llm = AsyncLLM(model, n_blocks=24)
    yield llm
    llm.shutdown()
    assert_idle(llm._llm)


async def last(llm, prompt, params, **options):
    async for output in llm.generate(prompt, params, **options):
        pass
    return output


async def idle(llm):
    """Wait until nothing runs; the test's time limit ends a hang."""
    while llm.stats()["running"] or llm.stats()["waiting"]:
        await asyncio.sleep(0.001)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_outputs_are_those_of_generate(model, llm):  # noqa: F811
    prompts, params = requests(3, 10)
    want = LLM(model, n_blocks=64).generate(prompts, params, use_tqdm=False)

    async def all_of_them():
        return await asyncio.gather(*(last(llm, p, q) for p, q in zip(prompts, params)))

    for _ in range(2):  # two event loops, one after the other
        got = run(all_of_them())
        for mine, other in zip(got, want):
            assert (mine.outputs, mine.prompt_logprobs) == (other.outputs, other.prompt_logprobs)


def test_outputs_grow_and_deltas_add_up(llm):
    params = SamplingParams(n=2, max_tokens=12, seed=3, ignore_eos=True, logprobs=1)

    async def both():
        whole = [output async for output in llm.generate(ids(1, 20), params)]
        return whole, [output async for output in llm.generate(ids(1, 20), params, delta=True)]

    whole, deltas = run(both())
    assert [len(out.outputs[1].token_ids) for out in whole] == list(range(1, 13))
    for i in range(2):
        end = whole[-1].outputs[i]
        assert [token for out in deltas for token in out.outputs[i].token_ids] == end.token_ids
        assert "".join(out.outputs[i].text for out in deltas) == end.text
        assert [each for out in deltas for each in out.outputs[i].logprobs] == end.logprobs
    assert [out.finished for out in whole] == [False] * 11 + [True] == [out.finished for out in deltas]


@pytest.mark.parametrize("how", ["break", "cancel", "abort"])
def test_leaving_frees_the_blocks(llm, how):
    params = SamplingParams(max_tokens=200, ignore_eos=True)

    async def leave():
        other = asyncio.ensure_future(last(llm, ids(2, 20), SamplingParams(max_tokens=30, ignore_eos=True, seed=1)))
        if how == "break":
            stream = llm.generate(ids(1, 20), params)
            async for _ in stream:
                break
            await stream.aclose()
        elif how == "cancel":
            task = asyncio.ensure_future(last(llm, ids(1, 20), params))
            while not llm.stats()["running"]:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            async for output in llm.generate(ids(1, 20), params, request_id="mine"):
                llm.abort("mine")
            assert output.outputs[0].finish_reason == "abort" and output.finished and output.request_id == "mine"
            llm.abort("mine"), llm.abort("nobody's")
        await idle(llm)
        return await other

    assert len(run(leave()).outputs[0].token_ids) == 30
    assert_idle(llm._llm)


def test_who_leaves_before_a_step_begins_takes_no_part_in_it(llm, model, monkeypatch):  # noqa: F811
    """Here between the thread's look at what was asked of it and the step."""
    params, left, rows = SamplingParams(max_tokens=200, ignore_eos=True), threading.Event(), []
    engine, start, step = llm._llm._engine, llm._llm._engine.start, model.step

    def logged_step(batch, **options):
        rows.append(len(batch))
        return step(batch, **options)

    async def leave():
        loop = asyncio.get_running_loop()
        mine = asyncio.ensure_future(last(llm, ids(1, 20), params))
        mine.add_done_callback(lambda _: left.set())
        while not llm.stats()["tokens"]:
            await asyncio.sleep(0.001)

        def start_late(request):
            loop.call_soon_threadsafe(mine.cancel)
            assert left.wait(60)
            rows.clear()
            start(request)

        monkeypatch.setattr(engine, "start", start_late)
        monkeypatch.setattr(model, "step", logged_step)
        await last(llm, ids(2, 10), SamplingParams(max_tokens=5, ignore_eos=True))

    run(leave())
    assert rows == [1] * 5


def test_a_loop_that_was_closed_ends_its_requests_alone(llm):
    async def begin():
        stream = llm.generate(ids(1, 20), SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    stream = loop.run_until_complete(begin())
    loop.close()
    assert run(last(llm, ids(2, 20), SamplingParams(max_tokens=30, ignore_eos=True))).finished
    run(idle(llm))
    del stream


def test_a_refusal_ends_one_request(llm):
    async def both():
        return await asyncio.gather(last(llm, [5, VOCAB], None), last(llm, ids(1, 9), SamplingParams(max_tokens=5)),
                                    last(llm, [1] * 250, SamplingParams(max_tokens=400)),
                                    return_exceptions=True)  # fmt: skip

    refused, output, fits = run(both())
    assert isinstance(refused, pk.TokenError) and output.finished and fits.finished

    async def too_long():
        await last(llm, [1] * 256, None)

    with pytest.raises(pk.BoundsError, match="256 tokens"):
        run(too_long())


def test_an_exception_in_a_step_reaches_all_and_ends_none_of_the_next(llm, monkeypatch):
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    want = run(last(llm, ids(1, 9), params))

    def fail(*_, **__):
        raise RuntimeError("on purpose")

    async def two():
        return await asyncio.gather(*(last(llm, ids(i, 9), params) for i in range(2)), return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.sampler, "draw", fail)
        assert [str(each) for each in run(two())] == ["on purpose"] * 2
    assert run(last(llm, ids(1, 9), params)).outputs == want.outputs


def test_chat(llm, model, monkeypatch):  # noqa: F811
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "_chat_templates", {"default": template})
    monkeypatch.delattr(model.tokenizer, "_compiled_template", raising=False)

    async def answer():
        return [out async for out in llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=2))]

    assert run(answer())[-1].prompt == "[Hi]"


def test_shutdown_ends_what_runs(model):  # noqa: F811
    llm = AsyncLLM(model, n_blocks=24)

    async def interrupted():
        async with llm:
            task = asyncio.ensure_future(last(llm, ids(1, 9), SamplingParams(max_tokens=200, ignore_eos=True)))
            while not llm.stats()["running"]:
                await asyncio.sleep(0.001)
        return await task

    assert run(interrupted()).outputs[0].finish_reason == "abort"
    assert_idle(llm._llm)
    with pytest.raises(RuntimeError, match="shut down"):
        run(last(llm, [1], None))
    llm.shutdown()


def test_options_of_an_llm_that_exists_are_refused(model):  # noqa: F811
    """They would change nothing."""
    llm = LLM(model, n_blocks=24)
    with pytest.raises(TypeError, match="n_blocks, seed are chosen when an LLM is made, and this one exists"):
        AsyncLLM(llm, n_blocks=48, seed=None)


def test_beside_calls_of_the_same_llm(model):  # noqa: F811
    llm = LLM(model, n_blocks=64)
    both, params = AsyncLLM(llm), SamplingParams(max_tokens=30, ignore_eos=True, seed=2)

    async def two():
        beside = asyncio.to_thread(llm.generate, [ids(1, 9)], params, False)
        return await asyncio.gather(last(both, ids(1, 9), params), beside)

    output, outputs = run(two())
    both.shutdown()
    assert output.outputs == outputs[0].outputs


def test_two_event_loops_at_the_same_time(model, llm):  # noqa: F811
    prompts, params = requests(5, 12)
    want = LLM(model, n_blocks=64).generate(prompts, params, use_tqdm=False)
    got = {}

    async def some(i):
        got[i] = await asyncio.gather(*(last(llm, p, q) for p, q in zip(prompts[i::2], params[i::2])))

    workers = [threading.Thread(target=run, args=(some(i),)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    for i in range(2):
        assert [output.outputs for output in got[i]] == [output.outputs for output in want[i::2]]


def test_the_thread_sleeps_when_there_is_nothing_to_do(llm):
    run(last(llm, [1], SamplingParams(max_tokens=1)))
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15  # the process has used next to nothing
