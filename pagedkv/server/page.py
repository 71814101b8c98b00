"""The page at ``/``: one file, and the events of the pool that it draws."""

import asyncio
import base64
import hashlib
import re
import time
from importlib.resources import files

import numpy as np
from starlette.responses import Response

from pagedkv.server.api import ApiError
from pagedkv.server.door import log

MOST_VIEWERS = 64
PERIOD_S = 0.1  # between two pictures, at least
MOST_SHARE = 0.02  # of the time that making pictures may take
ALIVE_S = 15.0  # proxies end connections that are silent for longer


def page():
    """The response to ``/``. Nothing but the file's own script and style may run, and it may ask nobody but this server."""
    html = files("pagedkv.server").joinpath("page.html").read_text("utf-8")
    hashes = {tag: " ".join(f"'sha256-{_sha256(text)}'" for text in re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S))
              for tag in ("script", "style")}  # fmt: skip
    policy = (f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
              "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
              "require-trusted-types-for 'script'; trusted-types 'none'")  # fmt: skip
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "x-frame-options": "DENY",
               "referrer-policy": "no-referrer", "cross-origin-opener-policy": "same-origin",
               "cross-origin-resource-policy": "same-origin", "cache-control": "no-cache"}  # fmt: skip
    return Response(html, media_type="text/html", headers=headers)


def _sha256(text):
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def picture(pool_map):
    """A PoolMap as what the page reads: counts and ids in runs, no texts.

    Returns
    -------
    dict
        ``blocks``: ``[count, reference count, 1 where cached, ...]`` for one run of like blocks after the other.
        ``requests``: of each its id, number, tokens of the prompt, and its samples ``[index, state, tokens, rows,
        table, copied]``. A table begins with how many blocks are those of the sample before; the ids of the others
        follow.
    """
    both = 2 * pool_map.ref_counts.astype(np.int64) + pool_map.cached
    begins = np.flatnonzero(np.diff(both, prepend=-1))
    runs = np.stack([np.diff(begins, append=len(both)), both[begins] // 2, both[begins] % 2], axis=1)
    requests, before = {}, np.empty(0, np.int32)
    for sample in pool_map.samples:
        table = sample.block_table
        n = min(len(table), len(before))
        n_same = int(np.argmin(np.append(table[:n] == before[:n], False)))
        before = table
        request = requests.setdefault(sample.number, {"id": sample.request_id, "number": sample.number,
                                                      "prompt": sample.n_prompt, "samples": []})  # fmt: skip
        request["samples"].append([sample.index, sample.state, sample.n_tokens, sample.n_rows,
                                   [n_same, *table[n_same:].tolist()], sample.copied])  # fmt: skip
    return {"n_blocks": pool_map.n_blocks, "block_size": pool_map.block_size, "blocks": runs.ravel().tolist(),
            "saved": pool_map.n_saved, "requests": list(requests.values()), "stats": pool_map.stats}  # fmt: skip


class Viewers:
    """Those who watch the pool. While there are any, one task takes pictures, which all of them get.

    Parameters
    ----------
    llm : AsyncLLM
    to_event : function of dict -> str
        Words a picture, once for all.
    """

    def __init__(self, llm, to_event):
        self._llm, self._to_event = llm, to_event
        self._n, self._closed = 0, False
        self._task = None  # takes pictures
        self._event = None  # the latest one
        self._news = None  # the future of the one after

    def enter(self):
        """Count a viewer, who calls :meth:`leave` at the end, or refuse one too many."""
        if self._closed:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if self._n >= MOST_VIEWERS:
            raise ApiError(429, f"{MOST_VIEWERS} viewers watch the pool already, the most that may",
                           code="rate_limit_exceeded", retry_after="10")  # fmt: skip
        if self._task is None or self._task.done():  # an error ended it
            self._event, self._news = None, asyncio.get_running_loop().create_future()
            self._task = asyncio.ensure_future(self._watch())
        self._n += 1

    def leave(self):
        self._n -= 1
        if not self._n and self._task is not None:
            self._task.cancel()
            self._task = None  # who comes before it has ended begins another

    def close(self):
        """Take no more pictures, so that all streams end and the server can."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()

    async def events(self):
        """Pictures for one viewer, as the pool changes; who reads slowly misses some. The first comes at once."""
        task, seen = self._task, None
        while not task.done():
            if self._event is not seen:
                seen = self._event
                yield seen
            elif not (await asyncio.wait([self._news, task], timeout=ALIVE_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                yield ": alive\n\n"

    async def _watch(self):
        last = None
        try:
            while True:
                began = time.perf_counter()
                pool_map = await self._llm.pool_map()
                told = time.perf_counter()
                found = picture(pool_map)
                if found != last:
                    last, self._event = found, self._to_event(found | {"time": time.time()})
                    self._news.set_result(None)
                    self._news = asyncio.get_running_loop().create_future()
                now = time.perf_counter()
                await asyncio.sleep(max(began + PERIOD_S - now, (now - told) / MOST_SHARE))
        except Exception as error:
            if not self._llm._closed:
                log(error)
