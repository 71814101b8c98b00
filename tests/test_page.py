"""The server's page: its data against the engine's own, and itself in a headless Chromium (Debian's package), by playwright.

The server runs in this process, so that the engine can be held between two steps while the page is compared with it.
"""

import json
import math
import re
import shutil
import socket
import threading
import time
from base64 import b64encode
from contextlib import contextmanager
from hashlib import sha256

import numpy as np
import pytest
from test_cli import CONFIG, METADATA, text_tensors
from tiny import write_gguf

import pagedkv as pk

for _name in ("fastapi", "uvicorn", "prometheus_client", "httpx"):
    pytest.importorskip(_name)
import httpx
import uvicorn

from pagedkv.server import app as server_app
from pagedkv.server import page as server_page

SECONDS = 60  # only ends a hang
PROMPT = "a long walk along the shore, abcdefgh"  # 37 bytes, as many tokens: two full blocks and five rows


def until(holds):
    """Wait; what it gave."""
    end = time.monotonic() + SECONDS
    while not (found := holds()):
        assert time.monotonic() < end, "this never came"
        time.sleep(0.01)
    return found


class Gate:
    """An engine's steps, taken when the test lets them."""

    def __init__(self, llm):
        self._llm, engine = llm, llm._engine
        self._step, engine.step = engine.step, self._gated
        self._n, self.n_taken = 0, 0
        engine._end_ids = frozenset()  # no text ends by itself

    def _gated(self):
        if self._n < 1:
            time.sleep(0.002)
            return []
        self._n -= 1
        found = self._step()
        self.n_taken += 1
        return found

    def let(self, n):
        """So many, or those until nothing is left to do."""
        wanted = self.n_taken + n
        self._n = n
        until(lambda: self.n_taken == wanted or not self._llm._listeners)
        self._n = 0

    def open(self):
        self._n = math.inf


class Served:
    """A server in a thread of this process."""

    def __init__(self, model, name="tiny", gated=False, api_key=None, **options):
        self.llm = pk.AsyncLLM(model, **options)
        self.gate = Gate(self.llm) if gated else None
        self.app = server_app.make_app(self.llm, name, api_key)
        self.service = self.app.state.service
        sock = socket.create_server(("127.0.0.1", 0))
        self.url, ready = f"http://127.0.0.1:{sock.getsockname()[1]}", threading.Event()
        config = uvicorn.Config(self.app, log_level="warning", access_log=False, ws="none")
        self._server = server_app._Server(config, self.llm, SECONDS, ready.set)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [sock]}, daemon=True)
        self._thread.start()
        assert ready.wait(SECONDS)

    def end(self):
        if self.gate:
            self.gate.open()
        self._server.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive(), "the server does not end"

    def map(self):
        """The map of now; the engine is at rest."""
        return self.llm._llm.pool_map()


@contextmanager
def serving(model, **options):
    served = Served(model, **options)
    try:
        yield served
    finally:
        served.end()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "tiny.gguf"
    write_gguf(path, CONFIG, text_tensors(), metadata=METADATA)
    return pk.LlamaModel.load(path)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


# ---- The data -----------------------------------------------------------------------------------


def pictures(served, **options):
    """What a viewer gets."""
    with httpx.stream("GET", served.url + "/pool", timeout=SECONDS, **options) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def same(told, pool_map):
    """Whether a picture, read as the page reads it, is this map."""
    refs, cached = [], []
    for n, count, in_cache in np.reshape(told["blocks"], (-1, 3)).tolist():
        refs += [count] * n
        cached += [bool(in_cache)] * n
    table, samples = [], []
    for request in told["requests"]:
        for index, state, n_tokens, n_rows, (n_same, *others), copied in request["samples"]:
            table = table[:n_same] + others
            samples.append((request["id"], request["number"], request["prompt"], index, state, n_tokens, n_rows, table,
                            copied and tuple(copied)))  # fmt: skip
    return (refs, cached) == (pool_map.ref_counts.tolist(), pool_map.cached.tolist()) and samples == [
        (each.request_id, each.number, each.n_prompt, each.index, each.state, each.n_tokens, each.n_rows,
         each.block_table.tolist(), each.copied) for each in pool_map.samples
    ] and told["stats"] == pool_map.stats and told["saved"] == pool_map.n_saved  # fmt: skip


def asked(served, answers, **fields):
    """Send a completion from a thread; its answer comes into the list."""
    body = {"model": "tiny", "max_tokens": 40, "ignore_eos": True, "prompt": PROMPT} | fields

    def send():
        answers.append(httpx.post(served.url + "/v1/completions", json=body, timeout=SECONDS).json())

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_pictures_are_the_map(model):
    """Of each state that a small pool brings about: forks, copies, preemption, eviction."""
    with serving(model, gated=True, n_blocks=14, max_num_seqs=6) as served:
        seen, answers = pictures(served), []
        assert same(next(seen), served.map())
        threads = [asked(served, answers, n=3, seed=1), asked(served, answers, n=2, prompt="z" * 50, seed=2)]
        until(lambda: len(served.map().samples) == 5)
        states, n_copied = set(), 0
        told = next(told for told in seen if sum(len(request["samples"]) for request in told["requests"]) == 5)
        while True:
            assert same(told, served.map())
            states |= {sample[1] for request in told["requests"] for sample in request["samples"]}
            n_copied += sum(sample[5] is not None for request in told["requests"] for sample in request["samples"])
            if not told["requests"]:
                break
            served.gate.let(1 if served.gate.n_taken < 3 else 7)
            told = next(told for told in seen if told["stats"]["steps"] == served.map().stats["steps"])
        assert states == {"running", "waiting", "preempted"} and n_copied and told["stats"]["evicted"]
        for thread in threads:
            thread.join()
        assert sorted(len(answer["choices"]) for answer in answers) == [2, 3]
        assert PROMPT[:9] not in json.dumps(told) and not re.search(r"[g-z]{9}", json.dumps(told["requests"]))


def test_one_task_for_all_viewers_and_none_without(model, monkeypatch):
    with serving(model, n_blocks=40) as served:
        viewers, n_maps = served.service.viewers, []
        ask = served.llm.pool_map
        monkeypatch.setattr(served.llm, "pool_map", lambda: n_maps.append(1) or ask())
        monkeypatch.setattr(server_page, "PERIOD_S", 3600)
        assert (viewers._n, viewers._task) == (0, None)
        all_of_them = [pictures(served) for _ in range(5)]
        assert len({json.dumps(next(each)) for each in all_of_them}) == 1 and viewers._n == 5
        httpx.post(served.url + "/v1/completions", json={"model": "tiny", "prompt": PROMPT, "ignore_eos": True}, timeout=SECONDS)
        assert len(n_maps) == 1  # not again for an hour
        task = viewers._task
        for each in all_of_them:
            each.close()
        until(lambda: viewers._n == 0)
        assert viewers._task is None and until(task.done)
        again = pictures(served)
        assert next(again)["stats"]["tokens"] == 16 and len(n_maps) == 2
        again.close()


def test_viewers_are_bounded(model, monkeypatch):
    monkeypatch.setattr(server_page, "MOST_VIEWERS", 2)
    with serving(model, n_blocks=40) as served:
        both = [pictures(served), pictures(served)]
        assert all(map(next, both))
        refused = httpx.get(served.url + "/pool")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "10")
        both.pop().close()
        until(lambda: served.service.viewers._n == 1)
        assert next(pictures(served))


def test_a_viewer_does_not_keep_the_server(model):
    with serving(model, n_blocks=40) as served:
        seen = pictures(served)
        next(seen)
        served.end()  # fails where it takes as long as requests may
        assert list(seen) == []
        with pytest.raises(server_page.ApiError, match="shutting down"):
            served.service.viewers.enter()


def test_an_error_ends_the_streams_and_not_the_next_ones(model, monkeypatch, capfd):
    with serving(model, n_blocks=40) as served:
        with monkeypatch.context() as patch:
            patch.setattr(server_page, "picture", lambda pool_map: 1 / 0)
            assert list(pictures(served)) == []
        assert "ZeroDivisionError" in capfd.readouterr().err
        assert next(pictures(served))["n_blocks"] == 40


def test_silent_streams_say_that_they_live(model, monkeypatch):
    monkeypatch.setattr(server_page, "ALIVE_S", 0.01)
    with serving(model, n_blocks=40) as served, httpx.stream("GET", served.url + "/pool", timeout=SECONDS) as response:
        lines = response.iter_lines()
        assert ": alive" in [next(lines) for _ in range(9)]


def test_the_key_guards_the_data_and_not_the_page(model):
    with serving(model, n_blocks=40, api_key="k") as served:
        assert httpx.get(served.url + "/").status_code == 200
        for headers in ({}, {"authorization": "Bearer x"}):
            assert httpx.get(served.url + "/pool", headers=headers).status_code == 401
        assert next(pictures(served, headers={"authorization": "Bearer k"}))


def test_the_page_allows_itself_and_nothing_else():
    response = server_page.page()
    html, policy = response.body.decode(), response.headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        assert rules[f"{tag}-src"] == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy and rules["connect-src"] == "'self'" and rules["img-src"] == "data:"
    assert re.findall(r"[a-z]+://[^'\" ]*", html) == ["http://www.w3.org/2000/svg"]  # a name, in the icon
    assert not re.search(r"<[^>]* (on\w+|style)=|innerHTML|insertAdjacent|document\.write|eval\(", html)
    assert response.headers["x-content-type-options"] == "nosniff" and response.headers["x-frame-options"] == "DENY"
    assert response.headers["referrer-policy"] == "no-referrer"


def test_pictures_of_many_sequences_are_compact(model):
    """32 samples of a prompt of 125 blocks: those are told once."""
    llm = pk.LLM(model, n_blocks=4096, max_num_seqs=32, max_num_batched_tokens=2048)
    llm._engine.add(None, [5] * 2000, pk.SamplingParams(n=32, max_tokens=40, ignore_eos=True))
    llm._engine.step()
    llm._engine.step()
    told = server_page.picture(llm.pool_map())
    assert len(json.dumps(told)) < 6000
    assert same(json.loads(json.dumps(told)), llm.pool_map())


# ---- The page, in a browser ---------------------------------------------------------------------

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Shown:
    """The page of a server in a browser of its own profile."""

    def __init__(self, browser, served, **options):
        self.served, self.errors, self.asked = served, [], []
        self.page = browser.new_page(viewport={"width": 1200, "height": 900}, **options)
        self.page.set_default_timeout(1000 * SECONDS)
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(served.url + "/")

    def until(self, expression):
        return until(lambda: self.page.evaluate(expression))

    def catch_up(self):
        """Wait until it shows the engine as it is; returns that."""
        pool_map = self.served.map()
        self.until(f"pool && pool.stats.steps === {pool_map.stats['steps']} && pool.samples.length === {len(pool_map.samples)}")
        return pool_map

    def send(self, prompt=PROMPT, kind="completion", **fields):
        self.page.fill("#prompt", prompt)
        self.page.select_option("#kind", kind)
        for name, value in fields.items():
            self.page.fill(f"#{name.replace('_', '-')}", str(value))
        self.page.click("#send")

    def point(self, block):
        """What it says of a block that the mouse is on."""
        size, columns = (int(self.page.get_attribute("#cells", f"data-{name}")) for name in ("size", "columns"))
        self.page.hover("#cells", position={"x": block % columns * size + 3, "y": block // columns * size + 3})
        return self.page.inner_text("#tip").split("\n")

    def colour(self, block):
        """Of the lower middle of a cell, as the canvas has it."""
        return self.page.evaluate(f"""() => {{ const [x, y] = placeOf({block}), r = grid.ratio;
            return [...cells.getContext("2d").getImageData((x + 2) * r, (y + grid.size - 6) * r, 1, 1).data]; }}""")

    def sequences(self):
        return [row.split("\t") for row in self.page.inner_text("#sequences").split("\n") if row]

    def texts(self, answer=0):
        return [each.inner_text() for each in self.page.locator(".answer").nth(answer).locator(".text").all()]

    def news(self):
        return self.page.inner_text("#news")


@pytest.fixture
def show(chromium):
    """Function that opens a page. All end without an error in the console, and asked their own server alone."""
    shown = []

    def open_page(served, **options):
        shown.append(Shown(chromium, served, **options))
        return shown[-1]

    yield open_page
    for each in shown:
        assert each.errors == []
        assert each.asked and all(url.startswith((each.served.url + "/", "data:")) for url in each.asked)
        each.page.close()


def check_blocks(shown, pool_map):
    """What the page says of each block is what the pool says."""
    pool = shown.served.llm.pool
    told = shown.page.evaluate("[...Array(pool.n).keys()].map(describe)")
    assert len(told) == pool.n_blocks
    for block in (0, 2, pool.n_blocks - 1):
        assert shown.point(block) == told[block].split("\n")
    for block, text in enumerate(told):
        head, *lines = text.split("\n")
        n, cached = pool.ref_count(block), bool(pool_map.cached[block])
        if n == 0:
            assert (head, lines) == (f"Block {block}: free", [])
            continue
        n_owners = n - cached
        who = [f"{n_owners} sequence{'s' if n_owners > 1 else ''}"] * bool(n_owners) + ["the prefix cache"] * cached
        assert head == f"Block {block}: reference count {n} ({' and '.join(who)})"
        assert f"{pool_map.n_filled[block]} of 16 tokens filled" in lines
        owners = {}
        for sample in pool_map.samples:
            if block in sample.block_table:
                owners.setdefault(sample.number, []).append(sample.index)
        told = {int(number): indices for number, indices in re.findall(r"held by request (\d+), samples? (.*)", "\n".join(lines))}
        assert {number: {*read_ranges(indices)} for number, indices in told.items()} == {
            number: set(indices) for number, indices in owners.items()}  # fmt: skip
        copied = [f"copied from block {sample.copied[1]} when its sequence appended" for sample in pool_map.samples
                  if sample.copied and sample.copied[0] == block]  # fmt: skip
        assert [line for line in lines if line.startswith("copied")] == copied


def read_ranges(text):
    for part in text.split(", "):
        first, _, last = part.partition("\u2013")
        yield from range(int(first), int(last or first) + 1)


def test_a_prompt_is_shared_and_its_tail_copied(model, show):
    with serving(model, gated=True, n_blocks=24) as served:
        shown = show(served)
        shown.until("pool")
        assert shown.page.inner_text("#model") == "tiny" and shown.page.inner_text("#link") == "live"
        shown.send(n=4, max_tokens=30, seed=7)
        until(lambda: served.map().samples)
        shown.catch_up()
        assert [row[1:3] for row in shown.sequences()] == [[f"{i} of 4", "waiting"] for i in range(4)]

        served.gate.let(1)  # the prompt, and the forks
        forked = shown.catch_up()
        assert [forked.ref_counts[b] - forked.cached[b] for b in range(4)] == [4, 4, 4, 0]
        check_blocks(shown, forked)
        assert [row[1:] for row in shown.sequences()] == [[f"{i} of 4", "running", "37 + 1", "3", "3"] for i in range(4)]
        assert "Request 0: 4 samples run, 3 blocks of the prompt held once for all" in shown.news()
        shared = shown.colour(0)

        served.gate.let(1)  # all four append: three copy the tail
        appended = shown.catch_up()
        assert [each.copied for each in appended.samples].count(None) == 1
        check_blocks(shown, appended)
        assert "3 sequences copied a shared block, only partly filled, to append to it" in shown.news()
        assert shown.page.inner_text("#counts").split("\n")[2:7] == ["Blocks held", "6 of 24", "Saved by sharing", "6 blocks",
                                                                     "Prefix cache keeps"]  # fmt: skip
        # The same hue, stronger where four hold it than where one does; and a free block is none of these.
        own, free = shown.colour(2), shown.colour(20)
        assert sum(shared[:3]) < sum(own[:3]) < sum(free[:3]) and len({max(free[:3]) - min(free[:3]) < 16, shared[2] > shared[0],
                                                                       own[2] > own[0]}) == 1  # fmt: skip

        served.gate.let(28)
        until(lambda: not served.map().samples)
        ended = shown.catch_up()
        check_blocks(shown, ended)
        assert ended.cached.sum() == served.llm.stats()["blocks_cached"] > 4
        assert shown.page.inner_text("#others") == "None runs or waits."


def test_the_cache_fills_and_is_evicted_and_sequences_are_preempted(model, show):
    with serving(model, gated=True, n_blocks=14, max_num_seqs=6) as served:
        shown = show(served)
        shown.until("pool")
        shown.send(n=3, max_tokens=60, seed=1)
        shown.send("b" * 50, n=2, max_tokens=60, seed=2)
        until(lambda: len(served.map().samples) == 5)
        seen, n_evicted, pool_map = set(), 0, served.map()
        while True:
            states = {sample.state for sample in pool_map.samples}
            evicted = pool_map.stats["evicted"] > n_evicted
            if states - seen or (evicted and not n_evicted) or not pool_map.samples:
                shown.catch_up()
                check_blocks(shown, pool_map)
                assert [row[2] for row in shown.sequences()] == [sample.state for sample in pool_map.samples]
                if evicted:
                    assert "gave" in shown.news() and "the ones left longest ago" in shown.news()
                if "preempted" in states - seen:
                    assert re.search(r"Out of blocks: \d+ sequences? preempted", shown.news())
                seen |= states
                n_evicted = pool_map.stats["evicted"]
            if not pool_map.samples:
                break
            served.gate.let(1)
            pool_map = served.map()
        assert seen == {"running", "waiting", "preempted"} and n_evicted
        counts = shown.page.inner_text("#counts")
        assert f"Preemptions\n{pool_map.stats['preemptions']}" in counts
        assert f"Prefix cache keeps\n{pool_map.stats['blocks_cached']} {n_evicted} evicted" in counts
        # Only the cache has what is left: one colour, neither free nor a request's.
        kept, = {tuple(shown.colour(b)) for b in np.flatnonzero(pool_map.cached)}
        assert kept not in {tuple(shown.colour(b)) for b in np.flatnonzero(pool_map.ref_counts == 0)}


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_answers_are_those_of_the_api(model, show, kind):
    oracle = pk.LLM(model, n_blocks=200)
    params = pk.SamplingParams(n=3, max_tokens=50, temperature=0.9, seed=11)
    want, = oracle.chat([{"role": "user", "content": PROMPT}], params, use_tqdm=False) if kind == "chat" else oracle.generate(
        PROMPT, params, use_tqdm=False)  # fmt: skip
    with serving(model, n_blocks=30) as served:
        shown = show(served)
        shown.until("pool")
        for _ in range(2):  # the second from the prefix cache
            shown.send(kind=kind, n=3, max_tokens=50, temperature=0.9, seed=11)
            until(lambda: "complete" in shown.page.inner_text(".answer"))
            got = shown.page.evaluate("answers[0].samples.map((sample) => [sample.text.textContent, sample.reason])")
            assert got == [[sample.text, sample.finish_reason] for sample in want.outputs]
        api = httpx.post(served.url + "/v1/completions", timeout=SECONDS, json={
            "model": "tiny", "prompt": PROMPT, "n": 3, "max_tokens": 50, "temperature": 0.9, "seed": 11}).json()  # fmt: skip
        if kind == "completion":
            assert [choice["text"] for choice in api["choices"]] == [text for text, _ in got]


def test_answers_stream_and_stop(model, show):
    with serving(model, gated=True, n_blocks=200) as served:
        shown = show(served)
        shown.until("pool")
        shown.send(n=2, max_tokens=2000, seed=3, temperature=0.5)
        until(lambda: served.map().samples)
        served.gate.let(4)
        until(lambda: any(shown.texts()))
        shown.until("answers[0].number === 0")
        chip = shown.page.locator(".answer .chip").evaluate("each => each.style.background")
        assert chip == shown.page.locator("#sequences .chip").first.evaluate("each => each.style.background") != ""
        shown.page.click(".answer button")
        until(lambda: "stopped" in shown.page.inner_text(".answer"))
        until(lambda: not served.map().samples)  # the server freed it all
        assert served.llm.stats()["blocks_used"] == 0


def test_refusals_are_shown(model, show):
    with serving(model, n_blocks=4) as served:
        shown = show(served)
        shown.until("pool")
        shown.send("c" * 100, n=1, max_tokens=30)
        until(lambda: "failed" in shown.page.inner_text(".answer"))
        assert "100 tokens" in shown.page.inner_text(".answer .bad")
        assert [error for error in shown.errors if "400" not in error] == []  # the browser's own note of the status
        shown.errors.clear()


ATTACK = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'


def test_texts_are_inert(model, show):
    """Of a prompt, of the model's name, of its answers, and of the server's errors."""
    with serving(model, name=ATTACK, n_blocks=40) as served:
        shown = show(served)
        shown.until("pool && model")
        assert shown.page.inner_text("#model") == ATTACK
        shown.page.evaluate("document.title = 'mine'")
        shown.send(ATTACK, n=1, max_tokens=5, seed=1)
        until(lambda: "complete" in shown.page.inner_text(".answer"))
        shown.page.evaluate("""text => { tell(text); answers[0].samples[0].text.append(text); say(answers[0].error, text);
                                        link(text, true); }""", ATTACK)  # fmt: skip
        assert ATTACK in shown.news() and ATTACK in shown.texts()[0]
        assert shown.page.title() == "mine" and shown.page.locator("main img, main script").count() == 0
    # What would run elsewhere is refused here, even to a script of the page.
    for attack in ("document.body.innerHTML = '<p>x'", "fetch('http://192.0.2.1/')"):
        with pytest.raises(Exception, match="TrustedHTML|Content Security Policy|Failed to fetch"):
            shown.page.evaluate(f"async () => {{ await ({attack}); }}")
    shown.errors.clear()
    shown.asked = [url for url in shown.asked if "192.0.2.1" not in url]


def test_the_key(model, show):
    with serving(model, n_blocks=40, api_key="secret key") as served:
        shown = show(served)
        shown.page.wait_for_selector("#door:not([hidden])")
        assert shown.page.evaluate("document.activeElement.id") == "key" and not shown.page.evaluate("!!pool")
        for key in ("wrong", "secret key"):
            shown.page.fill("#key", key)
            shown.page.keyboard.press("Enter")
            if key == "wrong":
                until(lambda: shown.page.inner_text("#key-error") == "That key is not the server's.")
        shown.until("pool && model === 'tiny'")
        assert not shown.page.is_visible("#door")
        shown.send(n=1, max_tokens=5, seed=1)
        until(lambda: "complete" in shown.page.inner_text(".answer"))
        shown.page.reload()
        shown.until("pool && model === 'tiny'")  # kept for as long as the tab is
        assert not any("secret" in url for url in shown.asked)
        assert all("401" in error for error in shown.errors)  # the browser's own note of the status
        shown.errors.clear()


def test_by_keyboard(model, show):
    with serving(model, gated=True, n_blocks=24) as served:
        shown = show(served)
        shown.until("pool")
        press = shown.page.keyboard.press
        shown.page.focus("#prompt")
        press("Control+a")
        shown.page.keyboard.type(PROMPT)
        press("Tab")
        shown.page.keyboard.type("2")
        press("Enter")
        until(lambda: served.map().samples)
        served.gate.let(2)
        shown.catch_up()
        shown.page.focus("#cells")
        press("Home")
        press("ArrowRight")
        assert shown.page.inner_text("#tip").startswith("Block 1: reference count 3")
        assert shown.page.text_content("#spoken") == shown.page.inner_text("#tip")
        press("End")
        assert shown.page.inner_text("#tip") == "Block 23: free"
        press("ArrowRight")
        press("ArrowDown")
        assert shown.page.inner_text("#tip") == "Block 23: free"
        press("Escape")
        assert not shown.page.is_visible("#tip")
        shown.page.focus("#sequences tr:nth-child(2)")
        assert shown.page.evaluate("highlighted()") == served.map().samples[1].block_table.tolist()
        shown.page.focus("#pause")
        press("Space")
        served.gate.let(3)
        shown.until(f"latest.stats.steps === {served.map().stats['steps']}")
        assert shown.page.evaluate("pool.stats.steps") == served.map().stats["steps"] - 3
        press("Space")
        assert shown.page.evaluate("pool === latest")


def test_a_large_pool_on_a_small_screen_in_the_dark(model, show):
    with serving(model, n_blocks=9000) as served:
        shown = show(served, color_scheme="dark")
        shown.page.set_viewport_size({"width": 380, "height": 700})
        shown.until("pool && grid.n === 1024")
        assert "1,024 of 9,000 blocks are shown; the others were never used." in shown.page.inner_text("#under")
        shown.page.click("#all")
        assert shown.page.evaluate("grid.n") == 9000 == int(shown.page.get_attribute("#cells", "data-shown"))
        assert shown.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert shown.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 19, 24)"
        red, green, blue, _ = shown.colour(8000)
        assert red < 60 and green < 60 and blue < 70


def test_a_server_that_goes_away(model, show):
    with serving(model, n_blocks=24) as served:
        shown = show(served)
        shown.until("pool")
    until(lambda: shown.page.inner_text("#link") == "no connection to the server")
    assert all("ERR_" in error for error in shown.errors)
    shown.errors.clear()


def test_nobody_is_watched_by_a_hidden_page(model, show):
    with serving(model, n_blocks=24) as served:
        shown = show(served)
        shown.until("pool")
        shown.page.evaluate("""Object.defineProperty(document, "hidden", { configurable: true, get: () => true });
                               document.dispatchEvent(new Event("visibilitychange"));""")  # fmt: skip
        until(lambda: served.service.viewers._n == 0)
        shown.page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'));")
        until(lambda: served.service.viewers._n == 1)
        shown.page.close()
        until(lambda: served.service.viewers._n == 0)
