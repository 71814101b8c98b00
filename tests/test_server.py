"""The server as its users meet it: a process on loopback, the openai package in front of it, LLM as the oracle."""

import asyncio
import json
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from promise_rows import child_env
from test_cli import CONFIG, METADATA, text_tensors
from tiny import write_gguf

import pagedkv as pk

CHILD_SECONDS = 60  # only ends a hang
NAN = "Z"  # a letter whose embedding is not a number


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    for name in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx"):
        pytest.importorskip(name)
    path = tmp_path_factory.mktemp("served") / "tiny.gguf"
    write_gguf(path, CONFIG, text_tensors(), metadata=METADATA)
    return path


@pytest.fixture(scope="module")
def nan_server(gguf, tmp_path_factory):
    """Of the same model, but for a letter after which its logits are not numbers."""
    path = tmp_path_factory.mktemp("nan") / "tiny.gguf"
    tensors = text_tensors()
    tensors["model.embed_tokens.weight"][METADATA["tokenizer.ggml.tokens"].index(NAN)] = np.nan
    write_gguf(path, CONFIG, tensors, metadata=METADATA)
    with serving(path, "--n-blocks", "60") as served:
        yield served
        served.wait_until_idle()


@pytest.fixture(scope="module")
def oracle(gguf):
    return pk.LLM(gguf, n_blocks=400)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # the server's turn


class Served:
    """A server process, and what it wrote to standard error."""

    def __init__(self, process):
        self.process, self.lines = process, []
        for line in process.stderr:
            self.lines.append(line)
            if found := re.search(r" at (http://\S+:(\d+))/v1", line):
                break
        else:
            raise RuntimeError("".join(self.lines))
        self.url, self.port = found[1], int(found[2])
        self._reader = threading.Thread(target=lambda: self.lines.extend(process.stderr), daemon=True)
        self._reader.start()

    def client(self, kind="OpenAI", **options):
        import openai

        return getattr(openai, kind)(base_url=self.url + "/v1", **{"api_key": "none", "max_retries": 0} | options)

    def get(self, path, **options):
        import httpx

        return httpx.get(self.url + path, **options)

    def post(self, path, body, **options):
        import httpx

        return httpx.post(self.url + path, timeout=CHILD_SECONDS, **({"json": body} if isinstance(body, dict) else
                          {"content": body, "headers": {"content-type": "application/json"}}), **options)  # fmt: skip

    def metric(self, name):
        text = self.get("/metrics").text
        return sum(float(value) for value in re.findall(rf"^pagedkv:{name}{{.*}} (\S+)$", text, re.M))

    def wait_until_idle(self):
        """The test's time limit ends a hang."""
        end = time.monotonic() + CHILD_SECONDS
        while self.metric("num_requests_running") or self.metric("num_requests_waiting"):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert self.metric("kv_cache_usage_perc") == 0

    def log(self):
        """All that it wrote, when it has ended."""
        self.process.wait(CHILD_SECONDS)
        self._reader.join(CHILD_SECONDS)
        return "".join(self.lines)


@contextmanager
def serving(path, *args, **env):
    variables = child_env() | {"PAGEDKV_NUM_THREADS": "1"} | env
    process = subprocess.Popen([sys.executable, "-m", "pagedkv", "serve", "--model", str(path), "--port", "0", *args],
                               stderr=subprocess.PIPE, text=True, env=variables)  # fmt: skip
    try:
        yield Served(process)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def server(gguf):
    """A server over a pool that is small enough to preempt."""
    with serving(gguf, "--n-blocks", "40", "--max-num-seqs", "16") as served:
        yield served
        served.wait_until_idle()  # whatever the tests did


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def texts(response):
    return [choice.text for choice in sorted(response.choices, key=lambda each: each.index)]


def random_body(rng, **fields):
    """Fields of a completion, their SamplingParams, and a prompt."""
    body = {"max_tokens": rng.randint(1, 60), "seed": rng.randrange(2**63), "temperature": rng.choice([0, 0.7, 1.0, 1.5]),
            "top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([0, 5]), "min_p": rng.choice([0.0, 0.05]),
            "presence_penalty": rng.choice([0.0, 0.5]), "frequency_penalty": rng.choice([0.0, -0.5]),
            "repetition_penalty": rng.choice([1.0, 1.2]), "n": rng.choice([1, 1, 2, 3]), "ignore_eos": rng.random() < 0.5,
            "logprobs": rng.choice([0, 2, 5]), "stop": rng.choice([None, ["e"], ["ab", "q"]]),
            "min_tokens": rng.choice([0, 1]), "logit_bias": rng.choice([None, {"97": 3.0, "98": -100.0}])} | fields  # fmt: skip
    params = dict(body)
    if params["logit_bias"] is not None:
        params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    prompt = "".join(rng.choices("abcdefgh ", k=rng.randint(1, 80)))
    return body, pk.SamplingParams(**params), prompt


# ---- The API ------------------------------------------------------------------------------------


def test_models_and_version(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    assert server.get("/version").json() == {"version": pk.__version__}
    assert server.get("/health").status_code == 200
    assert "access-control-allow-origin" not in server.get("/health", headers={"origin": "http://a.example"}).headers


def test_completions_are_those_of_llm(server, oracle):
    rng = random.Random(1)
    for _ in range(15):
        body, params, prompt = random_body(rng)
        want, = oracle.generate(prompt, params, use_tqdm=False)
        got = server.post("/v1/completions", body | {"model": "tiny", "prompt": prompt, "return_tokens_as_token_ids": True})
        for choice, sample in zip(got.json()["choices"], want.outputs, strict=True):
            assert (choice["text"], choice["finish_reason"]) == (sample.text, sample.finish_reason)
            assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in sample.token_ids]
            assert choice["logprobs"]["token_logprobs"] == [
                each[token].logprob for token, each in zip(sample.token_ids, sample.logprobs)]  # fmt: skip
            assert choice["logprobs"]["top_logprobs"] == [
                {f"token_id:{token}": one.logprob for token, one in each.items()} for each in sample.logprobs]  # fmt: skip
        usage = got.json()["usage"]
        assert usage["prompt_tokens"] == len(want.prompt_token_ids)
        assert usage["completion_tokens"] == sum(len(sample.token_ids) for sample in want.outputs)


def test_streams_add_up_to_the_whole(client):
    rng = random.Random(2)
    for _ in range(8):
        body, _, prompt = random_body(rng)
        extra = {name: body.pop(name) for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens")}
        create = partial(client.completions.create, model="tiny", prompt=[prompt, prompt + "b"], extra_body=extra, **body)
        whole, parts = create(), {}
        for event in create(stream=True, stream_options={"include_usage": True}):
            for choice in event.choices:
                text, lists, _ = parts.get(choice.index, ("", {}, None))
                for name, values in choice.logprobs.to_dict().items():
                    lists[name] = lists.get(name, []) + values
                parts[choice.index] = text + choice.text, lists, choice.finish_reason
        assert (event.choices, event.usage.completion_tokens) == ([], whole.usage.completion_tokens)
        assert parts == {choice.index: (choice.text, choice.logprobs.to_dict(), choice.finish_reason)
                         for choice in whole.choices}  # fmt: skip


def test_prompts_of_all_kinds(server, client, oracle):
    ids = [oracle.model.tokenizer.encode(text) for text in ("abc", "hello you")]
    create = partial(client.completions.create, model="tiny", max_tokens=9, temperature=0)
    both = texts(create(prompt=["abc", "hello you"]))
    assert both == texts(create(prompt=ids)) == [texts(create(prompt=each))[0] for each in ids]
    assert both == [texts(create(prompt=each))[0] for each in ("abc", "hello you")]
    tokens = server.post("/tokenize", {"prompt": "hello you", "return_token_strs": True}).json()
    assert (tokens["tokens"], tokens["count"]) == (ids[1], len(ids[1]))
    assert server.post("/detokenize", {"tokens": ids[1]}).json() == {"prompt": oracle.model.tokenizer.decode(ids[1])}
    assert server.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"] == (
        oracle.model.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]))  # fmt: skip


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_has_the_prompts_logprobs(client, oracle, max_tokens):
    params = pk.SamplingParams(temperature=0, max_tokens=max(1, max_tokens), logprobs=2, prompt_logprobs=2)
    want, = oracle.generate("hello you", params, use_tqdm=False)
    sample, ids = want.outputs[0], want.prompt_token_ids
    create = partial(client.completions.create, model="tiny", prompt="hello you", echo=True, logprobs=2, temperature=0,
                     max_tokens=max_tokens)  # fmt: skip
    got = create()
    assert got.choices[0].text == "hello you" + (sample.text if max_tokens else "")
    assert got.choices[0].logprobs.token_logprobs == [
        each and each[token].logprob for token, each in zip(ids, want.prompt_logprobs)
    ] + [each[token].logprob for token, each in zip(sample.token_ids, sample.logprobs)][:max_tokens]
    assert got.usage.completion_tokens == (len(sample.token_ids) if max_tokens else 0)
    assert "".join(event.choices[0].text for event in create(stream=True)) == got.choices[0].text


def test_chats(server, client, oracle):
    messages = [{"role": "developer", "content": "Be."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    plain = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    params = pk.SamplingParams(n=2, seed=2**64 - 7, max_tokens=20, logprobs=3)
    want, = oracle.chat([plain], params, use_tqdm=False)
    create = partial(client.chat.completions.create, model="tiny", messages=messages, n=2, seed=-7,
                     max_completion_tokens=20, logprobs=True, top_logprobs=3)  # fmt: skip
    got = create()
    for choice, sample in zip(got.choices, want.outputs, strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", sample.text)
        assert choice.finish_reason == sample.finish_reason
        assert [each.logprob for each in choice.logprobs.content] == [
            each[token].logprob for token, each in zip(sample.token_ids, sample.logprobs)]  # fmt: skip
        for mine, each in zip(choice.logprobs.content, sample.logprobs):
            assert [top.logprob for top in mine.top_logprobs] == sorted((one.logprob for one in each.values()),
                                                                        reverse=True)[:3]  # fmt: skip
    said = ["", ""]
    events = list(create(stream=True))
    assert [event.choices[0].delta.role for event in events if event.choices[0].delta.role] == ["assistant"] * 2
    for event in events:
        said[event.choices[0].index] += event.choices[0].delta.content or ""
    assert said == [choice.message.content for choice in got.choices]

    async def asynchronous():
        async with server.client("AsyncOpenAI") as client:
            whole = await client.chat.completions.create(model="tiny", messages=messages, seed=-7, max_tokens=20)
            stream = await client.chat.completions.create(model="tiny", messages=messages, seed=-7, max_tokens=20,
                                                          stream=True)  # fmt: skip
            return whole.choices[0].message.content, "".join([part.choices[0].delta.content or "" async for part in stream])

    assert asyncio.run(asynchronous()) == (said[0], said[0])


def test_unfinished_characters_are_named_by_their_bytes(client):
    bias = {str(METADATA["tokenizer.ggml.tokens"].index("Ã")): 100}  # GPT-2's sign for byte 0xC3
    got = client.completions.create(model="tiny", prompt="a", max_tokens=1, logit_bias=bias, logprobs=1)
    assert got.choices[0].logprobs.tokens == ["bytes:\\xc3"]
    got = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=1,
                                         logit_bias=bias, logprobs=True)  # fmt: skip
    assert got.choices[0].logprobs.content[0].bytes == [0xC3]


@pytest.mark.slow  # its import takes ten seconds
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_litellm(server, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network
    litellm = pytest.importorskip("litellm")
    options = {"model": "openai/tiny", "api_base": server.url + "/v1", "api_key": "none", "max_tokens": 8, "seed": 3,
               "messages": [{"role": "user", "content": "Hi"}]}  # fmt: skip
    whole = litellm.completion(**options).choices[0].message.content
    assert whole == "".join(part.choices[0].delta.content or "" for part in litellm.completion(stream=True, **options))
    assert len(whole) > 0


# ---- Refusals -----------------------------------------------------------------------------------

GOOD = {"model": "tiny", "prompt": "abc"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(("body", "status", "param", "words"), [
    (GOOD | {"model": "other"}, 404, "model", "'other' does not exist"),
    (GOOD | {"prompt": "a" * 630}, 400, "prompt", "630 tokens and 16 are asked for, 646 together; this server holds 641"),
    (GOOD | {"prompt": "a" * 1_000_000}, 400, "prompt", "1000000 tokens"),
    (GOOD | {"prompt": [97] * 1_000_000}, 400, "prompt", "1000000 tokens"),
    (GOOD | {"max_tokens": 10**30}, 400, "prompt", "are asked for"),
    (GOOD | {"prompt": ["abc", "a" * 700]}, 400, "prompt", "prompt 1: the prompt has 700 tokens"),
    (GOOD | {"prompt": 3}, 400, "prompt", "prompt must be"),
    (GOOD | {"prompt": []}, 400, "prompt", "prompt must be"),
    (GOOD | {"prompt": ""}, 400, "prompt", "the prompt has no tokens"),
    (GOOD | {"prompt": [["a"]]}, 400, "prompt", "prompt 0 of the list"),
    (GOOD | {"prompt": [True]}, 400, "prompt", "prompt 0 of the list"),
    (GOOD | {"prompt": [999]}, 400, None, "token 999 at place 0 is outside"),
    (GOOD | {"prompt": [-1]}, 400, None, "token -1 at place 0 is outside"),
    (GOOD | {"prompt": "\ud800"}, 400, None, "lone surrogate"),
    (GOOD | {"model": "\ud800"}, 404, "model", "does not exist"),
    (GOOD | {"temperature": "hot"}, 400, "temperature", "valid number"),
    (GOOD | {"temperature": -1}, 400, "temperature", "temperature must be"),
    (GOOD | {"top_p": 0}, 400, "top_p", "top_p must be"),
    (GOOD | {"n": 0}, 400, "n", "n must be"),
    (GOOD | {"n": 10**9}, 400, "n", "are more than"),
    (GOOD | {"n": 1.5}, 400, "n", "integer"),
    (GOOD | {"seed": 2**64}, 400, "seed", "less than"),
    (GOOD | {"max_tokens": -1}, 400, "max_tokens", "max_tokens must be"),
    (GOOD | {"logprobs": 21}, 400, "logprobs", "from 0 to 20"),
    (GOOD | {"stop": [1]}, 400, "stop", "stop must be"),
    (GOOD | {"stop": ["a"] * 65}, 400, "stop", "65 texts"),
    (GOOD | {"logit_bias": {"a": 1}}, 400, "logit_bias", "no token id"),
    (GOOD | {"logit_bias": {"1": 101}}, 400, "logit_bias", "[-100, 100]"),
    (GOOD | {"logit_bias": {"999": 1}}, 400, None, "token 999 of logit_bias"),
    (GOOD | {"max_tokns": 3}, 400, "max_tokns", "not permitted"),
    (GOOD | {"suffix": "x"}, 400, "suffix", "not supported"),
    (GOOD | {"best_of": 4}, 400, "best_of", "not supported"),
    (GOOD | {"stream_options": {"include_usage": True}}, 400, "stream_options", "stream=true"),
    (CHAT | {"messages": []}, 400, "messages", "at least 1"),
    (CHAT | {"messages": [{"role": "usr", "content": "Hi"}]}, 400, "messages.0.role", "Input should be"),
    (CHAT | {"messages": [{"role": "user"}]}, 400, "messages.0.content", "a text or"),
    (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content", "only texts"),
    (CHAT | {"tools": [{"type": "function"}]}, 400, "tools", "not supported"),
    (CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format", "not supported"),
    (CHAT | {"top_logprobs": 2}, 400, "top_logprobs", "logprobs=true"),
    (CHAT | {"chat_template_kwargs": {"messages": 1}}, 400, "chat_template_kwargs", "cannot set messages"),
    (b'{"model":', 400, None, "JSON object"),
    (b'{"model": "\xff"}', 400, None, "parsing the body"),
    (b"[" * 100_000, 400, None, "parsing the body"),
    (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, None, "parsing the body"),
    (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "temperature", "temperature must be"),
    (b"[1]", 400, None, "JSON object"),
    (b"", 400, None, "JSON object"),
])  # fmt: skip
def test_refusals_have_openais_shape(server, body, status, param, words):
    path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
    got = server.post(path, json.dumps(body).encode() if isinstance(body, dict) else body)
    error = got.json()["error"]
    assert (got.status_code, set(error)) == (status, {"message", "type", "param", "code"})
    assert error["param"] == param
    assert words in error["message"]
    assert len(error["message"]) < 300


def test_unknown_routes_have_openais_shape(server):
    assert server.get("/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert (server.get("/v1/completions").status_code, server.get("/v1/nothing").status_code) == (405, 404)
    assert server.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("head", [b"Content-Length: 1000000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_a_huge_body_is_refused_unread(server, head):
    """By its length before any byte of it; where it has none, soon after the limit. A gigabyte is never sent."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=CHILD_SECONDS) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n" + head)
        n_sent, chunk = 0, b"100000\r\n" + b" " * 0x100000 + b"\r\n"
        try:
            while b"chunked" in head and n_sent < 64:
                sock.sendall(chunk)
                n_sent += 1
        except OSError:  # it hung up
            pass
        assert n_sent < 64
        if b"chunked" not in head:
            answer = sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 413")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"
    assert server.get("/health").status_code == 200


def test_a_failing_request_fails_alone(nan_server, oracle):
    params = pk.SamplingParams(temperature=1, seed=5, max_tokens=150, ignore_eos=True)
    want = oracle.generate("abc", params, use_tqdm=False)[0].outputs[0].text
    body = {"model": "tiny", "max_tokens": 150, "seed": 5, "ignore_eos": True}
    got = {}
    threads = [threading.Thread(target=lambda i=i, text=text: got.update({i: nan_server.post(
        "/v1/completions", body | {"prompt": text})})) for i, text in enumerate(["abc", NAN, "abc", NAN * 30])]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i].status_code for i in range(4)] == [200, 500, 200, 500]
    assert [got[i].json()["choices"][0]["text"] for i in (0, 2)] == [want, want]
    assert got[1].json()["error"]["type"] == "server_error"
    import openai

    with pytest.raises(openai.APIError, match="failed on this request"):
        list(nan_server.client().completions.create(model="tiny", prompt=NAN, stream=True))


def test_keys(gguf):
    with serving(gguf, PAGEDKV_API_KEY="sesame") as served:
        import openai

        for key in ("none", "sesam", "sesame1", "\u00fc"):
            assert served.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()}).status_code == 401
        with pytest.raises(openai.AuthenticationError) as caught:
            served.client().completions.create(model="tiny", prompt="a")
        assert caught.value.code == "invalid_api_key"
        assert [served.get(path).status_code for path in ("/metrics", "/v1/models", "/health")] == [401, 401, 200]
        assert served.client(api_key="sesame").completions.create(model="tiny", prompt="a").usage.prompt_tokens == 1


def test_cors_where_asked(gguf):
    with serving(gguf, "--cors", "http://a.example", "--api-key", "k") as served:
        import httpx

        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        answers = [httpx.options(served.url + "/v1/completions", headers=ask | {"origin": origin})
                   for origin in ("http://a.example", "http://b.example")]  # fmt: skip
        assert [answer.headers.get("access-control-allow-origin") for answer in answers] == ["http://a.example", None]


# ---- Coming and going ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_blocks(server, stream):
    import httpx

    body = {"model": "tiny", "prompt": "abc", "max_tokens": 600, "n": 16, "ignore_eos": True, "stream": stream}
    before, n_times = server.metric("generation_tokens_total"), 3
    for _ in range(n_times):
        if stream:
            with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
                next(response.iter_lines())
        else:
            raw = json.dumps(body).encode()
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
                             b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw))  # fmt: skip
                while not server.metric("num_requests_running"):
                    pass
        server.wait_until_idle()
    assert 0 < server.metric("generation_tokens_total") - before < n_times * 16 * 600


class Gated:
    """Stands in for `model.step`: a step begins, says so, and computes when the test lets it."""

    def __init__(self, model):
        self._step, self._begun, self._go = model.step, queue.Queue(), threading.Semaphore(0)
        model.step = self

    def __call__(self, batch, **options):
        self._begun.put(None)
        self._go.acquire(timeout=CHILD_SECONDS)
        return self._step(batch, **options)

    async def next(self):
        """Let the step go that has begun; return when the one after it has begun."""
        self._go.release()
        await self.begun()

    async def begun(self):
        await asyncio.to_thread(self._begun.get, timeout=CHILD_SECONDS)

    def open(self):
        self._go.release(10**6)


class Gone:
    """A client of an ASGI application in this process, which goes away when it is told to."""

    def __init__(self, app, body):
        self._content = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self._has_gone = asyncio.Event()
        scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
                 "path": "/v1/completions", "query_string": b"", "headers": [(b"content-type", b"application/json")]}  # fmt: skip
        self.served = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self):
        if self._content:
            return self._content.pop()
        await self._has_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, _):
        pass

    async def go(self):
        """Return when the application knows it."""
        self._has_gone.set()
        await self.served


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("n_steps", "max_num_seqs", "where"), [(1, 1, (1, 2)), (1, 16, (2, 1)), (12, 16, (7, 0))],
                         ids=["waiting", "prefilling", "decoding"])  # fmt: skip
def test_a_client_that_goes_is_not_in_the_next_step(gguf, stream, n_steps, max_num_seqs, where):
    """Wherever its request, of two prompts with three samples each, is by then."""
    pytest.importorskip("fastapi")
    from pagedkv.server.app import make_app

    llm = pk.AsyncLLM(gguf, n_blocks=100, max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
    scheduler, gate, app = llm._llm._engine.scheduler, Gated(llm.model), make_app(llm, "tiny")
    body = {"model": "tiny", "prompt": "a", "max_tokens": 600, "ignore_eos": True, "stream": stream}

    async def all_of_it():
        other = Gone(app, body)
        await gate.begun()
        mine = Gone(app, body | {"prompt": ["a" * 60, "b" * 60], "n": 3})
        while len(llm._inbox) < 2:
            await asyncio.sleep(0)
        for _ in range(n_steps):
            await gate.next()
        assert (len(scheduler.running), len(scheduler.waiting)) == where
        await mine.go()
        await gate.next()
        alone, = scheduler.running
        assert alone.request.prompt == "a" and not scheduler.waiting
        assert llm.stats()["blocks_used"] == len(alone.seq.block_table)
        await other.go()

    try:
        asyncio.run(asyncio.wait_for(all_of_it(), CHILD_SECONDS))
    finally:
        gate.open()
        llm.shutdown()
    assert llm.stats()["blocks_used"] == 0


def test_a_full_queue_is_429(gguf):
    import openai

    with serving(gguf, "--max-num-seqs", "1", "--max-queue", "1") as served:
        client = served.client()
        create = partial(client.completions.create, model="tiny", prompt="abc", max_tokens=2900, stream=True,
                         extra_body={"ignore_eos": True})  # fmt: skip
        streams = [create(), create()]
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt="abc")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert served.get("/health").status_code == 200
        for stream in streams:
            stream.close()
        served.wait_until_idle()
        assert client.completions.create(model="tiny", prompt="abc").choices
        for _ in range(20):  # places come back however a request ends
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="tiny", prompt="a" * 5000)
        assert texts(client.completions.create(model="tiny", prompt="abc", n=2))


@pytest.mark.parametrize(("drain_s", "n_tokens"), [("60", 300), ("0", 2900)])
def test_sigterm_drains(gguf, drain_s, n_tokens):
    import httpx

    with serving(gguf, "--drain-s", drain_s) as served:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": n_tokens, "n": 8, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=CHILD_SECONDS) as response:
            lines = response.iter_lines()
            next(lines)
            served.process.send_signal(signal.SIGTERM)
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]"
        if drain_s == "0":
            assert json.loads(events[-2])["error"]["code"] == "shutting_down"
        else:
            ends = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
            assert ends.count("length") == 8
        served.log()
        assert served.process.returncode == -signal.SIGTERM
        with pytest.raises(httpx.ConnectError):
            served.get("/health")


@pytest.mark.parametrize("asked", [False, True])
def test_texts_are_logged_where_asked(gguf, asked):
    with serving(gguf, *["--log-requests"] * asked) as served:
        for prompt in ("secretly", "secret" * 900):
            served.post("/v1/completions?secret", {"model": "tiny", "prompt": prompt})
        served.post("/v1/completions", b'{"secret')
        served.post("/v1/completions", {"model": "tiny", "prompt": "a", "secret": 1})
        served.process.terminate()
        assert ("secret" in served.log()) == asked


def test_errors_are_logged_without_texts(nan_server):
    assert nan_server.post("/v1/completions", {"model": "tiny", "prompt": "secret" + NAN}).status_code == 500
    end = time.monotonic() + CHILD_SECONDS
    while not any("error in a request: ValueError" in line for line in nan_server.lines):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "secret" not in "".join(nan_server.lines)


# ---- The same bytes under load ------------------------------------------------------------------


@pytest.mark.parametrize(("n", "at_a_time"), [(40, 16), pytest.param(200, 64, marks=pytest.mark.slow)])
def test_the_same_bytes_alone_and_under_load(gguf, n, at_a_time):
    """Each request alone, and among others that come and go, in a pool that preempts: equal in every field."""
    import httpx

    rng = random.Random(n)
    bodies = []
    for i in range(n):
        body, _, prompt = random_body(rng, logprobs=3)
        bodies.append(body | {"model": "tiny", "prompt": prompt, "echo": rng.random() < 0.3})
        if i % 3 == 0:  # begins as another one does
            bodies[-1]["prompt"] = bodies[0]["prompt"] + prompt[:20]
    others = [random_body(rng)[0] | {"model": "tiny", "prompt": "abcdefgh" * rng.randint(1, 9)} for _ in range(n)]

    async def run(client, body, limit):
        async with limit:
            response = await client.post("/v1/completions", json=body)
            return response.status_code, response.json().get("choices")

    async def leave(client, body, limit):
        async with limit:
            try:
                async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                    async for _ in response.aiter_lines():
                        break
            except httpx.HTTPError:
                pass

    async def all_of_them(served):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=served.url, timeout=CHILD_SECONDS * 5, limits=limits) as client:
            alone = [await run(client, body, asyncio.Semaphore(1)) for body in bodies]
            limit = asyncio.Semaphore(at_a_time)
            tasks = [*(run(client, body, limit) for body in bodies),
                     *((run if rng.random() < 0.5 else leave)(client, body, limit) for body in others)]  # fmt: skip
            order = rng.sample(range(len(tasks)), len(tasks))
            done = dict(zip(order, await asyncio.gather(*(tasks[i] for i in order))))
            return alone, [done[i] for i in range(n)]

    with serving(gguf, "--n-blocks", "24", "--max-num-seqs", "64", "--max-queue", "1000") as served:
        alone, crowded = asyncio.run(all_of_them(served))
        assert all(status == 200 for status, _ in alone)
        assert crowded == alone
        assert served.metric("num_preemptions_total") > 0
        assert served.metric("prefix_cache_hits_total") > 0
        served.wait_until_idle()


def test_metrics(server, client):
    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count",
             "inter_token_latency_seconds_count", "prefix_cache_queries_total", "e2e_request_latency_seconds_count")  # fmt: skip
    before = {name: server.metric(name) for name in names}
    usage = client.completions.create(model="tiny", prompt="abc", max_tokens=9, n=2, extra_body={"ignore_eos": True}).usage
    grown = {name: server.metric(name) - before[name] for name in names}
    assert (usage.prompt_tokens, usage.completion_tokens) == (3, 18)
    assert list(grown.values()) == [3, 18, 1, 16, 3, 1]


def test_the_dashboard_shows_every_metric(server, client):
    """And none that is not there."""
    file = Path(__file__).parents[1] / "docs" / "grafana.json"
    if not file.is_file():
        pytest.skip("the source tree with docs/grafana.json is not here")
    board = json.loads(file.read_text())
    client.completions.create(model="tiny", prompt="abc")  # a reason for an end
    text = server.get("/metrics").text
    there = set(re.findall(r"^(pagedkv:\w+){", text, re.M))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = set(re.findall(r"pagedkv:\w+", " ".join(expressions)))
    assert shown <= there
    families = {name for name, kind in re.findall(r"^# TYPE (pagedkv:\w+) (\w+)$", text, re.M)
                if not name.endswith("_created")}  # fmt: skip
    assert {name.removesuffix("_bucket") for name in shown} == families

    variables = {each["name"]: each for each in board["templating"]["list"]}
    assert set(variables) == {"datasource", "model"} and variables["datasource"]["query"] == "prometheus"
    of_variable = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["model"]["datasource"] == of_variable
    taken = set()
    for panel in board["panels"]:
        assert panel["datasource"] == of_variable == panel["targets"][0]["datasource"]
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(cells)[0] < 24
        taken |= cells
    for expression in expressions:  # each sample is of the model that was chosen
        assert expression.count("pagedkv:") == expression.count('{model_name=~"$model"}')
        assert expression.count("(") == expression.count(")")
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) == len({p["title"] for p in board["panels"]})


def test_shared_blocks_are_those_with_several_owners(gguf):
    """Four samples of a prompt of two blocks and a bit; another request has begun alike; and one that shares nothing."""
    from pagedkv.server.metrics import Metrics

    llm = pk.LLM(gguf, n_blocks=60)
    streams = [llm.stream([prompt], pk.SamplingParams(n=n, max_tokens=60, ignore_eos=True, seed=1))
               for prompt, n in (("a" * 35, 4), ("a" * 16 + "b" * 20, 1), ("c" * 40, 1))]  # fmt: skip
    for stream in streams:
        next(stream), next(stream)
    counts = Counter(block for sample in llm._engine.scheduler.running for block in sample.seq.block_table.tolist())
    metrics = Metrics(pk.AsyncLLM(llm), "tiny")
    assert sorted(counts.values())[-2:] == [4, 5]
    assert "pagedkv:kv_cache_blocks_shared{model_name=\"tiny\"} 2.0" in metrics.text().decode()
    for stream in streams:
        stream.close()
    assert "pagedkv:kv_cache_blocks_shared{model_name=\"tiny\"} 0.0" in metrics.text().decode()


# ---- The load of pagedkv.bench.server -----------------------------------------------------------

EVENT = b'data: {"choices":[{"index":0,"text":"%b","finish_reason":%b}]}\n\n'
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*chunks):
    return b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)


WHOLE = HEAD + chunked(EVENT % (b"a", b"null"), EVENT % (b"", b"null") + EVENT % (b"b", b'"length"'), b"data: [DO", b"NE]\n\n")


@pytest.mark.parametrize(("sent", "fate", "text", "n_times"), [
    (WHOLE + chunked(b""), "ended", "ab", 2),
    (WHOLE, "lost", "ab", 2),  # its last chunk is missing
    (HEAD + chunked(EVENT % (b"a", b"null"), b""), "lost", "a", 1),
    (HEAD + chunked(EVENT % (b"a", b"null"))[:-5], "lost", "", 0),
    (HEAD + chunked(EVENT % (b"a", b"null"), b"data: [DONE]\n\n", b""), "lost", "a", 1),  # without a reason
    (HEAD + chunked(b'data: {"error": {"message": "no"}}\n\n', b"data: [DONE]\n\n", b""), "failed", "", 0),
    (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}", "refused", "", 0),
    (b"HTTP/1.1 20", "lost", "", 0),
    (b"", "lost", "", 0),
])  # fmt: skip
def test_the_load_sees_what_became_of_a_request(sent, fate, text, n_times):
    from pagedkv.bench import server as load

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for i in range(0, len(sent), 7):  # cut anywhere
            writer.write(sent[i:i + 7])
            await writer.drain()
        writer.close()

    async def ask():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            return await load.Client(f"http://127.0.0.1:{port}", "tiny").ask_all([{"prompt": "a"}], 1)

    (got,), _ = asyncio.run(asyncio.wait_for(ask(), CHILD_SECONDS))
    assert (got.fate, got.text, len(got.times)) == (fate, text, n_times)
    assert got.times == sorted(got.times)
    if fate != "ended":
        with pytest.raises(load.CheckFailed, match=f"request 0 was {fate}"):
            load.check_fates([got])


def run_load(path, kind, *args):
    return subprocess.run([sys.executable, "-m", "pagedkv.bench.server", kind, "--model", path, "--threads", "1", "--tokens", "4,40",
                           "--prompt-chars", "60", *args], capture_output=True, text=True, timeout=5 * CHILD_SECONDS,
                          env=child_env())  # fmt: skip


@pytest.mark.parametrize(("kind", "args", "said"), [
    ("throughput", ["--requests", "20", "--rounds", "1"], "20 requests, 64 at a time, all texts equal"),
    ("burst", ["--requests", "60", "--check", "10"], "10 of those that ended are equal to LLM.generate's"),
    ("steady", ["--requests", "20", "--seconds", "2", "--fraction", "0.3", "--check", "3"], "none lost"),
    ("latency", ["--concurrency", "1,8", "--requests", "2"], "llama.cpp's server skipped"),
])  # fmt: skip
def test_load(gguf, tmp_path, kind, args, said):
    if kind == "latency":
        args = [*args, "--peer-python", str(tmp_path / "no-python")]
    done = run_load(gguf, kind, *args, "--json", tmp_path / "load.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout
    found = json.loads((tmp_path / "load.json").read_text())[kind]
    if kind == "burst":
        assert sum(found["rounds"][0]["fates"].values()) == 60 and found["rounds"][0]["fates"]["left"] > 0
        assert all(state["blocks_used"] == 0 for state in found["states"][1:])
    if kind == "latency":
        assert [(row["server"], row["concurrency"], row["requests"]) for row in found["rows"]] == [
            ("pagedkv", 1, 2), ("pagedkv", 8, 32)]  # fmt: skip
        assert done.stdout.count("\n| ") == 3


# ---- Without the extra --------------------------------------------------------------------------


def test_the_package_does_not_load_the_server():
    done = subprocess.run([sys.executable, "-c", "import pagedkv, pagedkv.cli, sys; print([n for n in sys.modules if n.split"
                           "('.')[0] in ('fastapi', 'uvicorn', 'starlette', 'pydantic', 'prometheus_client')])"],
                          capture_output=True, text=True, timeout=CHILD_SECONDS, env=child_env())  # fmt: skip
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_without_the_extra_one_line_says_what_to_install(missing):
    if missing != "uvicorn":
        pytest.importorskip("uvicorn")
    if missing == "prometheus_client":
        pytest.importorskip("fastapi")
    code = f"import sys; sys.modules[{missing!r}] = None; from pagedkv.cli import main; sys.exit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=CHILD_SECONDS,
                          env=child_env())  # fmt: skip
    assert (done.returncode, done.stderr) == (
        2, f'pagedkv: error: serve needs {missing}, which is not installed: pip install "pagedkv[server]"\n')  # fmt: skip


@pytest.mark.parametrize(("args", "words"), [
    (["--api-key", " "], "is empty"), (["--port", "70000"], "from 0 to 65535"), (["--drain-s", "nan"], "--drain-s"),
    (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"), (["--model", "nothing-of-this-name"], "nothing-of-this-name"),
])  # fmt: skip
def test_bad_arguments_are_one_line(gguf, args, words, capsys):
    from pagedkv import cli

    assert cli.main(["serve", "--port", "0", *args]) == 2
    assert words in capsys.readouterr().err
