"""The server under load: beside the offline engine, beside llama.cpp's server, and at the end of long runs.

    python -m pagedkv.bench.server throughput | burst | steady | latency [--help]

``throughput``: tokens/s at some concurrency beside ``LLM.generate`` on the same requests, in turns; every text must
be equal. ``burst``: many requests at once, a third of whose clients leave midway. ``steady``: Poisson arrivals at a
part of the capacity measured just before. ``latency``: to the first token and between tokens, beside llama.cpp's.
"""

import argparse
import asyncio
import importlib.util
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import numpy as np

import pagedkv as pk
from pagedkv import hub
from pagedkv.bench import report
from pagedkv.bench.engine import real_prompts
from pagedkv.bench.measure import CheckFailed

SAMPLED, GREEDY = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}, {"temperature": 0}
N_TEXTS = 256  # prompts are beginnings of these, numbered, so that none begins as another one
IDLE_S = 60.0  # within which a server must be idle after the last request
REST_S = 1.0


class ServerFailed(Exception):
    """A server does not start, or not as it should; the message says what it wrote last."""


# ---- Requests -----------------------------------------------------------------------------------


class Exchange(asyncio.Protocol):
    """A request on a connection of its own, and what comes back: bytes and the times at which they came.

    They are read when the answer is there. The client shares the machine with the server, so it does next to nothing
    while tokens come: no parser of HTTP, no JSON.

    Parameters
    ----------
    request : bytes
    leave_after : int or None
        Hang up when so many events have come.
    """

    def __init__(self, request, leave_after=None):
        self._request, self._leave_after = request, leave_after
        self.times, self.pieces = [], []
        self.left = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self._transport = transport
        transport.write(self._request)
        if self._leave_after == 0:
            asyncio.get_running_loop().call_soon(self._leave)

    def data_received(self, data):
        self.times.append(time.perf_counter())
        self.pieces.append(data)
        if self._leave_after is not None and not self.left:
            self._leave_after -= data.count(b"data: ")
            if self._leave_after <= 0:
                self._leave()

    def _leave(self):
        self.left = True
        self._transport.abort()

    def connection_lost(self, _):
        self.ended.set_result(None)

    def chunks(self):
        """Status, 0 of nothing, and (time, bytes) of the chunks of the body; None at the end if it was cut off."""
        raw, ends = b"".join(self.pieces), np.cumsum([len(piece) for piece in self.pieces])
        head, there, _ = raw.partition(b"\r\n\r\n")
        if not there:
            return 0, [None]
        status, at, found = int(head[9:12]), len(head) + 4, []
        if b"transfer-encoding: chunked" not in head.lower():
            return status, [(self.times[-1], raw[at:])]
        while True:
            size = re.compile(rb"([0-9a-f]+)\r\n", re.I).match(raw, at)
            if size is None or len(raw) < size.end() + int(size[1], 16) + 2:
                return status, [*found, None]
            n = int(size[1], 16)
            if n == 0:
                return status, found
            at = size.end() + n + 2
            found.append((self.times[np.searchsorted(ends, at)], raw[size.end():at - 2]))


class Answer:
    """What a request got.

    Attributes
    ----------
    fate : str
        ``"ended"``; ``"left"``, by its client; ``"refused"``, by a status; ``"failed"``, by an error in the stream;
        ``"lost"``: anything else.
    text, finish_reason : str
    began : float
        When it was sent.
    times : list of float
        When text came.
    said : str
        Of a refusal or error, its words.
    """

    def __init__(self, began, exchange):
        self.began, self.text, self.finish_reason, self.times, self.said = began, "", None, [], ""
        status, chunks = exchange.chunks()
        lines, is_done = b"", False
        if status != 200:
            self.fate = "left" if exchange.left else "refused" if status else "lost"
            self.said = b"".join(chunk[1] for chunk in chunks if chunk is not None).decode(errors="replace")
            return
        for chunk in chunks:
            if chunk is None:
                break
            came, data = chunk
            *whole, lines = (lines + data).split(b"\n")
            for line in whole:
                if line.startswith(b"data: "):
                    is_done = line.strip() == b"data: [DONE]"
                    if not is_done:
                        self._take(came, json.loads(line[6:]))
        if self.said:
            self.fate = "failed"
        elif is_done and chunks[-1] is not None and self.finish_reason is not None:
            self.fate = "ended"
        else:
            self.fate = "left" if exchange.left else "lost"

    def _take(self, came, event):
        if "error" in event:
            self.said = event["error"]["message"]
        for choice in event.get("choices", ()):
            if choice["text"]:
                self.text += choice["text"]
                self.times.append(came)
            self.finish_reason = choice["finish_reason"] or self.finish_reason


class Client:
    """Asks a server, each request on a connection of its own."""

    def __init__(self, url, model):
        parts = urlsplit(url)
        self.host, self.port, self.model = parts.hostname, parts.port or 80, model

    async def ask(self, body, leave_after=None):
        content = json.dumps({"model": self.model, "stream": True, **body}).encode()
        request = (f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
                   f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n").encode() + content  # fmt: skip
        began, exchange = time.perf_counter(), Exchange(request, leave_after)
        try:
            await asyncio.get_running_loop().create_connection(lambda: exchange, self.host, self.port)
            await exchange.ended
        except OSError:  # nothing has come, and that is how it is read
            pass
        return Answer(began, exchange)

    async def ask_all(self, bodies, concurrency, leave_after=None):
        """Ask so many at a time; the answers in order, and the seconds until the last."""
        answers, coming = [None] * len(bodies), iter(range(len(bodies)))
        leave_after = leave_after or {}

        async def work():
            for i in coming:
                answers[i] = await self.ask(bodies[i], leave_after.get(i))

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return answers, time.perf_counter() - began


@cache
def all_texts():
    return real_prompts(N_TEXTS)


def make_bodies(n, args, first=0, **fields):
    """Bodies of `n` completions, always the same ones; from another `first`, others."""
    texts, rng = all_texts(), random.Random(first)
    least, most = map(int, args.tokens.split(","))
    return [{"prompt": f"{i}. {texts[i % N_TEXTS]}"[: args.prompt_chars], "seed": i,
             "max_tokens": rng.randint(least, most), **fields} for i in range(first, first + n)]  # fmt: skip


# ---- Servers, and the offline engine ------------------------------------------------------------


class Server:
    """A server process. A context manager.

    Parameters
    ----------
    command : list of str
    model : str
        Its name over there.
    threads : int
    """

    def __init__(self, command, model, threads):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS="1")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        env=environment)  # fmt: skip
        self.said = []
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.search(r"(?: at|running on) (http://[^\s/]+)", line):
                break
        else:
            raise ServerFailed(f"{' '.join(command[1:4])} ended with status {self.process.wait()}: "
                               f"{(self.said or ['it said nothing'])[-1].strip()[:200]}")  # fmt: skip
        self.client, self._url = Client(found[1], model), found[1]
        threading.Thread(target=self.said.extend, args=(self.process.stdout,), daemon=True).start()  # never a full pipe

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def metric(self, name):
        with urllib.request.urlopen(f"{self._url}/metrics") as response:
            text = response.read().decode()
        return sum(float(value) for value in re.findall(rf"^pagedkv:{name}(?:{{.*}})? (\S+)$", text, re.M))

    def wait_until_idle(self):
        end = time.perf_counter() + IDLE_S
        while self.metric("num_requests_running") + self.metric("num_requests_waiting"):
            if time.perf_counter() > end:
                raise CheckFailed(f"requests still run or wait {IDLE_S:.0f} s after the last one's end")
            time.sleep(0.1)

    def state(self):
        """What it holds now: memory, threads, open files, blocks."""
        return {**of_process(self.process.pid), "blocks_used": self.metric("kv_cache_usage_perc"),
                "blocks_cached": self.metric("kv_cache_blocks_cached")}  # fmt: skip


def of_process(pid):
    """Memory, threads, files and processor seconds of a process, as Linux tells them; elsewhere nothing."""
    folder = Path(f"/proc/{pid}")
    if not folder.is_dir():
        return {}
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    spent = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return {"rss_mb": int(status["VmRSS"].split()[0]) / 1024, "threads": int(status["Threads"]),
            "files": len(list((folder / "fd").iterdir())),
            "cpu_s": sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")}  # fmt: skip


def start_ours(args, max_queue=256):
    command = [sys.executable, "-m", "pagedkv", "serve", "--model", args.model, "--port", "0", "--compute",
               args.compute, "--threads", str(args.threads), "--max-num-seqs", str(args.max_num_seqs),
               "--max-queue", str(max_queue)]  # fmt: skip
    if args.n_blocks:
        command += ["--n-blocks", str(args.n_blocks)]
    return Server(command, Path(args.model).name.removesuffix(".gguf"), args.threads)


def start_peer(args, n_context):
    """llama.cpp's server, which answers one request at a time, and would cut it off for the next unless told not to."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    path = str(hub.find_model(args.model))
    command = [args.peer_python, "-m", "llama_cpp.server", "--model", path, "--host", "127.0.0.1", "--port", str(port),
               "--n_threads", str(args.threads), "--n_threads_batch", str(args.threads), "--n_ctx", str(n_context),
               "--interrupt_requests", "False",
               "--logits_all", "False"]  # only for log-probabilities, which nobody asks for; prompts take longer with it
    return Server(command, path, args.threads)


class Offline:
    """``LLM.generate`` in a process of its own, which takes turns with the server's. A context manager."""

    def __init__(self, args):
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))
        options = {"max_num_seqs": args.max_num_seqs, "n_blocks": args.n_blocks, "compute": args.compute,
                   "num_threads": args.threads}  # fmt: skip
        self._pool.submit(_open_llm, args.model, options).result()

    def generate(self, bodies):
        """Texts of the bodies' prompts, and the seconds."""
        return self._pool.submit(_generate, bodies).result()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.shutdown()


def _open_llm(model, options):
    global _llm
    _llm = pk.LLM(model, **options)


def _generate(bodies):
    params = [pk.SamplingParams(**{name: value for name, value in body.items() if name != "prompt"}) for body in bodies]
    began = time.perf_counter()
    outputs = _llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    took = time.perf_counter() - began
    return [output.outputs[0].text for output in outputs], took


# ---- What is measured ---------------------------------------------------------------------------


def quantiles(seconds):
    """p50 and p99 in ms; None of nothing."""
    if not len(seconds):
        return {"p50_ms": None, "p99_ms": None}
    p50, p99 = np.percentile(seconds, [50, 99]) * 1e3
    return {"p50_ms": float(p50), "p99_ms": float(p99)}


def latencies(answers):
    """Of those that ended: to the first text, between texts, and to the end."""
    answers = [answer for answer in answers if answer.fate == "ended" and answer.times]
    between = [np.diff(answer.times) for answer in answers]
    return {"first": quantiles([answer.times[0] - answer.began for answer in answers]),
            "between": quantiles(np.concatenate(between) if between else ()),
            "whole": quantiles([answer.times[-1] - answer.began for answer in answers])}  # fmt: skip


def check_texts(answers, texts):
    """Refuse answers that are not the offline engine's."""
    wrong = [i for i, (answer, text) in enumerate(zip(answers, texts, strict=True)) if answer.text != text]
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(texts)} answers are not LLM.generate's, the first is {wrong[0]}")


def check_all_ended(answers):
    for i, answer in enumerate(answers):
        if answer.fate != "ended":
            raise CheckFailed(f"request {i} was {answer.fate}: {answer.said[:200]}")


def throughput(args):
    """tokens/s of the server and of LLM.generate, in turns."""
    rounds = []
    with start_ours(args, max_queue=args.concurrency) as server, Offline(args) as offline:
        os.nice(args.nice)  # now, that they do not inherit it
        warm_up = make_bodies(args.max_num_seqs, args, first=10**6, **SAMPLED | {"max_tokens": 8})
        check_texts(asyncio.run(server.client.ask_all(warm_up, args.concurrency))[0], offline.generate(warm_up)[0])
        for i in range(args.rounds):
            bodies = make_bodies(args.requests, args, first=i * args.requests, **SAMPLED)
            n_tokens = sum(body["max_tokens"] for body in bodies)
            for turn in ("server", "offline") if i % 2 else ("offline", "server"):
                time.sleep(REST_S)
                if turn == "offline":
                    texts, offline_s = offline.generate(bodies)
                else:
                    before = [of_process(server.process.pid), of_process(os.getpid())]
                    answers, server_s = asyncio.run(server.client.ask_all(bodies, args.concurrency))
                    after = [of_process(server.process.pid), of_process(os.getpid())]
            check_all_ended(answers)
            check_texts(answers, texts)
            cpu = [a["cpu_s"] - b["cpu_s"] if a else None for a, b in zip(after, before)]
            rounds.append({"tokens": n_tokens, "offline_tokens_s": n_tokens / offline_s,
                           "server_tokens_s": n_tokens / server_s, "ratio": offline_s / server_s, "server_s": server_s,
                           "server_cpu_s": cpu[0], "client_cpu_s": cpu[1], **latencies(answers)})  # fmt: skip
            spent = "" if None in cpu else (f"; of {server_s:.1f} s the server used {cpu[0]:.1f} processor seconds and "
                                            f"the client {cpu[1]:.1f}")  # fmt: skip
            print(f"round {i}: server {n_tokens / server_s:.0f} tokens/s, offline {n_tokens / offline_s:.0f}: "
                  f"{offline_s / server_s:.1%}{spent}", flush=True)  # fmt: skip
    ratios = [each["ratio"] for each in rounds]
    best = max(each["server_tokens_s"] for each in rounds), max(each["offline_tokens_s"] for each in rounds)
    print(f"{args.requests} requests, {args.concurrency} at a time, all texts equal: median {median(ratios):.1%} of "
          f"the offline engine's tokens/s, {min(ratios):.1%} to {max(ratios):.1%}; best of each: {best[0]:.0f} of "
          f"{best[1]:.0f}, {best[0] / best[1]:.1%}", flush=True)  # fmt: skip
    return {"rounds": rounds, "median_ratio": median(ratios), "best_ratio": best[0] / best[1]}


def print_state(when, state):
    files = "" if "rss_mb" not in state else (f"{state['rss_mb']:.0f} MB resident, {state['threads']} threads, "
                                              f"{state['files']} files; ")  # fmt: skip
    print(f"{when}: {files}{state['blocks_used']:.1%} of the blocks used, {state['blocks_cached']:.0f} cached",
          flush=True)  # fmt: skip


def check_given_back(state):
    if state["blocks_used"]:
        raise CheckFailed(f"{state['blocks_used']:.1%} of the blocks are still used")


def burst(args):
    """Rounds of the same burst: what the second holds more than the first was not given back."""
    rounds = []
    with start_ours(args, max_queue=args.concurrency) as server, ExitStack() as stack:
        offline = stack.enter_context(Offline(args)) if args.check else None
        asyncio.run(server.client.ask_all(make_bodies(8, args, first=10**6, **SAMPLED), 8))
        states = [server.state()]
        print_state("before", states[0])
        for i in range(args.rounds):
            bodies = make_bodies(args.requests, args, first=i * args.requests, **SAMPLED)
            rng = random.Random(i)
            leaving = {k: rng.randint(0, bodies[k]["max_tokens"] // 2)
                       for k in rng.sample(range(len(bodies)), len(bodies) // 3)}  # fmt: skip
            answers, took = asyncio.run(server.client.ask_all(bodies, args.concurrency, leaving))
            fates = Counter(answer.fate for answer in answers)
            print(f"round {i}: {len(bodies)} requests, {args.concurrency} at once, {took:.1f} s: "
                  f"{', '.join(f'{n} {fate}' for fate, n in sorted(fates.items()))}", flush=True)  # fmt: skip
            check_fates(answers, leaving)
            server.wait_until_idle()
            states.append(server.state())
            print_state("after", states[-1])
            check_given_back(states[-1])
            ended = [k for k, answer in enumerate(answers) if answer.fate == "ended"]
            sample = sorted(rng.sample(ended, min(args.check, len(ended))))
            if sample:
                check_texts([answers[k] for k in sample], offline.generate([bodies[k] for k in sample])[0])
                print(f"{len(sample)} of those that ended are equal to LLM.generate's", flush=True)
            rounds.append({"seconds": took, "fates": dict(fates), "checked": len(sample), **latencies(answers)})
    return {"states": states, "rounds": rounds}


def check_fates(answers, leaving=()):
    """Refuse fates other than ended, and left of those that leave."""
    for i, answer in enumerate(answers):
        if answer.fate != "ended" and not (answer.fate == "left" and i in leaving):
            raise CheckFailed(f"request {i} was {answer.fate}: {answer.said[:200]}")


def steady(args):
    """Poisson arrivals."""
    with start_ours(args) as server, ExitStack() as stack:
        offline = stack.enter_context(Offline(args)) if args.check else None
        bodies = make_bodies(args.requests, args, first=10**6, **SAMPLED)
        answers, took = asyncio.run(server.client.ask_all(bodies, args.concurrency))
        check_all_ended(answers)
        rate = args.fraction * len(bodies) / took
        n_tokens = sum(body["max_tokens"] for body in bodies)
        print(f"capacity {len(bodies) / took:.2f} requests/s, {n_tokens / took:.0f} tokens/s, at {args.concurrency} at "
              f"a time; now {rate:.2f} requests/s for {args.seconds:.0f} s", flush=True)  # fmt: skip
        states = [server.state()]
        print_state("before", states[0])
        bodies, answers, minutes = asyncio.run(_arrive(args, server, rate, states))
        check_fates(answers)
        server.wait_until_idle()
        states.append(server.state())
        print_state("after", states[-1])
        check_given_back(states[-1])
        sample = sorted(random.Random(0).sample(range(len(bodies)), min(args.check, len(bodies))))
        if sample:
            check_texts([answers[k] for k in sample], offline.generate([bodies[k] for k in sample])[0])
            print(f"{len(sample)} of the answers are equal to LLM.generate's", flush=True)
        found = latencies(answers)
        print(f"{len(answers)} requests, none lost; ms to the first token {_pair(found['first'])}, between tokens "
              f"{_pair(found['between'])}, to the end {_pair(found['whole'])} (p50, p99)", flush=True)  # fmt: skip
        return {"capacity_requests_s": rate / args.fraction, "rate_requests_s": rate, "requests": len(answers),
                "states": states, "minutes": minutes, "checked": len(sample), **found}  # fmt: skip


async def _arrive(args, server, rate, states):
    rng, tasks, bodies, minutes, done = random.Random(1), [], [], [], []
    began = at = time.perf_counter()
    coming = iter(make_bodies(math.ceil(args.seconds * rate * 2) + 100, args, **SAMPLED))

    async def ask(body):
        done.append(await server.client.ask(body))
        return done[-1]

    async def report_minutes():
        n_before = 0
        while True:
            await asyncio.sleep(60)
            state = await asyncio.to_thread(server.state)
            states.append(state)
            fates = Counter(answer.fate for answer in done)
            minutes.append({"at_s": time.perf_counter() - began, "sent": len(tasks), "fates": dict(fates),
                            **latencies(done[n_before:])})  # fmt: skip
            print_state(f"{minutes[-1]['at_s']:.0f} s: {len(tasks)} sent, {len(tasks) - len(done)} under way, "
                        f"{', '.join(f'{n} {fate}' for fate, n in sorted(fates.items()))}; first "
                        f"{_pair(minutes[-1]['first'])}, between {_pair(minutes[-1]['between'])} ms", state)
            n_before = len(done)

    reporter = asyncio.ensure_future(report_minutes())
    while (at := at + rng.expovariate(rate)) < began + args.seconds:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        bodies.append(next(coming))
        tasks.append(asyncio.ensure_future(ask(bodies[-1])))
    answers = await asyncio.gather(*tasks)
    reporter.cancel()
    return bodies, answers, minutes


def _pair(found):
    return "-" if found["p50_ms"] is None else f"{found['p50_ms']:.0f}, {found['p99_ms']:.0f}"


def latency(args):
    """A table of latencies at several concurrencies, beside llama.cpp's server."""
    levels, rows = list(map(int, args.concurrency.split(","))), []
    for name in ("pagedkv", "llama.cpp"):
        try:
            # A prompt has a token a character at the most.
            n_context = args.prompt_chars + int(args.tokens.split(",")[1]) + 8
            server = start_ours(args) if name == "pagedkv" else start_peer(args, n_context)
        except (ServerFailed, OSError) as error:
            if name == "pagedkv":
                raise
            print(f"llama.cpp's server skipped: {error} (--peer-python)", flush=True)
            continue
        with server:
            asyncio.run(server.client.ask_all(make_bodies(2, args, first=10**6, **GREEDY), 1))
            for level in levels:
                n_requests = args.requests * level if level < 8 else 4 * level
                bodies = make_bodies(n_requests, args, first=1000 * level, **GREEDY)
                answers, took = asyncio.run(server.client.ask_all(bodies, level))
                check_fates(answers)
                n_texts = sum(len(answer.times) for answer in answers)
                rows.append({"server": name, "concurrency": level, "requests": len(bodies), "texts_s": n_texts / took,
                             **latencies(answers)})  # fmt: skip
                print(f"{name}, {level} at a time: {len(bodies)} requests in {took:.1f} s", flush=True)
    print("\n| at a time | server | first token, ms: p50 | p99 | between tokens, ms: p50 | p99 | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        cells = [f"{each:.0f}" for name in ("first", "between") for each in row[name].values()]
        print(f"| {row['concurrency']} | {row['server']} | {' | '.join(cells)} | {row['texts_s']:.0f} |")
    return {"rows": rows}


# ---- The command --------------------------------------------------------------------------------


def parse():
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--model", default="smollm2-135m")
    shared.add_argument("--compute", choices=("float32", "int8"), default="float32")
    shared.add_argument("--threads", type=int, default=pk.get_num_threads(), help="of each engine")
    shared.add_argument("--max-num-seqs", type=int, default=64)
    shared.add_argument("--n-blocks", type=int, help="of the KV cache; None: the engine's choice")
    shared.add_argument("--tokens", default="64,128", help="to come, of each request: least and most")
    shared.add_argument("--prompt-chars", type=int, default=400, help="of a prompt, at most; some 4 a token")
    shared.add_argument("--json", metavar="FILE", help="write the results")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(required=True, dest="kind")

    def add(name, what):
        formatter = argparse.ArgumentDefaultsHelpFormatter
        return kinds.add_parser(name, parents=[shared], help=what, formatter_class=formatter)

    kind = add("throughput", "tokens/s beside LLM.generate, on the same requests in turns")
    kind.add_argument("--concurrency", type=int, default=64)
    kind.add_argument("--requests", type=int, default=256, help="of a round")
    kind.add_argument("--rounds", type=int, default=5)
    kind.add_argument("--nice", type=int, default=0, help="of the client, which shares the machine with the server")
    kind = add("burst", "many at once, a third of whose clients leave midway")
    kind.add_argument("--concurrency", type=int, default=256)
    kind.add_argument("--requests", type=int, default=1000, help="of a round")
    kind.add_argument("--rounds", type=int, default=2)
    kind.add_argument("--check", type=int, default=100, help="answers to compare with LLM.generate's")
    kind = add("steady", "Poisson arrivals at a part of the capacity")
    kind.add_argument("--concurrency", type=int, default=64, help="at which the capacity is measured")
    kind.add_argument("--requests", type=int, default=256, help="to measure the capacity with")
    kind.add_argument("--fraction", type=float, default=0.8, help="of the capacity")
    kind.add_argument("--seconds", type=float, default=3600)
    kind.add_argument("--check", type=int, default=100, help="answers to compare with LLM.generate's")
    kind = add("latency", "a table of latencies, beside llama.cpp's server")
    kind.add_argument("--concurrency", default="1,4,16,64", help="at a time, in turn")
    kind.add_argument("--requests", type=int, default=16, help="of each client where there are fewer than 8; else 4")
    kind.add_argument("--peer-python", default=sys.executable, metavar="PYTHON",
                      help='of an environment with "llama-cpp-python[server]"')
    args = parser.parse_args()
    if args.json and not Path(args.json).resolve().parent.is_dir():
        parser.error(f"--json: there is no directory for {args.json}")  # now, not after an hour
    return args


def main():
    args = parse()
    pk.set_num_threads(args.threads)
    if importlib.util.find_spec("uvicorn") is None:
        print('bench: pagedkv\'s server is not installed: pip install "pagedkv[server]"', file=sys.stderr)
        return 2
    machine = report.machine()
    print(f"{machine['cpu']}, {machine['isa']}, {args.threads} threads, {args.model}, {args.compute}", flush=True)
    try:
        found = globals()[args.kind](args)
    except (CheckFailed, ServerFailed, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if args.json:
        document = {"schema": report.SCHEMA, "machine": machine, "arguments": vars(args), args.kind: found}
        report.write_json(args.json, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
