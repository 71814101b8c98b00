"""AsyncLLM: the engine for asyncio. One thread steps; requests come and go between steps."""

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable
from typing import Any, Self

from pagedkv.engine.llm import LLM, Message, Prompt, Torn
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.pool_map import PoolMap
from pagedkv.model import LlamaModel
from pagedkv.pool import BlockPool

_ASYNC_LLMS = weakref.WeakSet()  # whose threads a forked child lacks


def _after_fork():
    for llm in _ASYNC_LLMS:
        llm._begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)  # after LLM's


class AsyncLLM:
    """The asynchronous twin of :class:`LLM`.

    Parameters
    ----------
    model : str, os.PathLike, LlamaModel or LLM
        An LLM is used as it is, and its own calls still work; the others become one.
    **options
        As of :class:`LLM`, and not beside one.

    Notes
    -----
    Leaving the generator of a request, or cancelling its task, ends it: its blocks are free before the next step
    begins. :meth:`shutdown` ends the thread; so does leaving ``async with``. Several event loops may use one object. In
    a child of ``os.fork`` it begins anew, without the requests of the parent; see :class:`LLM`.

    Examples
    --------
    >>> async def answer(llm):                                                        # doctest: +SKIP
    ...     async for output in llm.generate("The capital of France is"):
    ...         print(output.outputs[0].text)
    """

    def __init__(self, model: str | os.PathLike[str] | LlamaModel | LLM, **options: Any) -> None:
        if isinstance(model, LLM) and options:
            raise TypeError(f"{', '.join(options)} are chosen when an LLM is made, and this one exists")
        self._llm = model if isinstance(model, LLM) else LLM(model, **options)
        self._engine = self._llm._engine
        self._wake = threading.Condition()
        self._inbox = deque()  # calls for the thread to make between steps
        self._listeners = {}  # request number -> (Request, event loop, Queue, delta); the thread's own
        self._outbox = {}  # event loop -> list of (Queue, output); the thread's own
        self._by_id = {}  # request_id -> abort function
        self._thread = None
        self._closed = False
        _ASYNC_LLMS.add(self)

    def _begin_anew(self):
        """In a forked child: the thread and all who wait for it are in the parent."""
        requests = [request for request, *_ in self._listeners.values()]
        self._wake, self._inbox, self._by_id = threading.Condition(), deque(), {}
        self._listeners, self._outbox = {}, {}
        self._thread = None
        try:
            with self._llm._lock:
                for request in requests:
                    self._engine.abort(request)
        except RuntimeError:  # a step is half done there; generate says so
            pass

    __reduce__ = LLM.__reduce__

    @property
    def model(self) -> LlamaModel:
        return self._llm.model

    @property
    def pool(self) -> BlockPool:
        return self._llm.pool

    def stats(self) -> dict[str, Any]:
        """As :meth:`LLM.stats`, and without waiting for the step that runs: numbers may be a step apart."""
        return self._engine.stats()

    async def pool_map(self) -> PoolMap:
        """As :meth:`LLM.pool_map`, taken by the thread before its next step.

        Raises
        ------
        RuntimeError
            After :meth:`shutdown`; in a child that was forked during a step.
        """
        if isinstance(self._llm._lock, Torn):
            self._llm._lock.refuse()
        future = concurrent.futures.Future()

        def take():
            if future.set_running_or_notify_cancel():
                try:
                    self._engine.settle()
                    future.set_result(self._engine.pool_map())
                except BaseException as error:  # this call's alone
                    future.set_exception(error)

        if not self._send(take):
            raise RuntimeError("this AsyncLLM was shut down")
        return await asyncio.wrap_future(future)

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None,
                       delta: bool = False) -> AsyncIterator[RequestOutput]:
        """Continue one prompt.

        Parameters
        ----------
        prompt, sampling_params
            As of :meth:`LLM.generate`, one of each.
        request_id : str, optional
            For :meth:`abort`.
        delta : bool
            Yield what is new, as :meth:`LLM.stream` does, and not all so far.

        Yields
        ------
        RequestOutput
            After each step that brought something; the last one is finished.

        Raises
        ------
        ValueError, TokenError, BoundsError, PoolExhausted
            The prompt can never run. It ends this request alone.
        RuntimeError
            After :meth:`shutdown`; in a child that was forked during a step.
        """
        if isinstance(self._llm._lock, Torn):
            self._llm._lock.refuse()
        (text, ids, params, _), = self._llm._read_all([prompt], sampling_params)
        loop, outputs = asyncio.get_running_loop(), asyncio.Queue()
        request = None

        def add():
            nonlocal request
            try:
                request = self._engine.request(text, ids, params, request_id)
                self._listeners[request.number] = request, loop, outputs, delta
                self._engine.start(request)
            except BaseException as error:  # this request's alone
                if request is None or request.number not in self._listeners:
                    self._put(loop, outputs, error)
                else:
                    self._engine.abort(request, "error", error)
                    self._tell(request)

        def end():
            if request is not None and request.number in self._listeners:
                self._engine.abort(request)
                self._tell(request)

        try:
            if not self._send(add):
                raise RuntimeError("this AsyncLLM was shut down")
            if request_id is not None:
                self._by_id[request_id] = end
            while True:
                output = await outputs.get()
                if isinstance(output, BaseException):
                    raise output
                yield output
                if output.finished:
                    return
        finally:
            if request_id is not None:
                self._by_id.pop(request_id, None)
            self._send(end)

    async def chat(self, messages: Iterable[Message], sampling_params: SamplingParams | None = None,
                   request_id: str | None = None, delta: bool = False, **variables: Any) -> AsyncIterator[RequestOutput]:
        """Answer one conversation; as :meth:`generate`."""
        text, ids = self._llm._render(messages, **variables)
        prompt = {"prompt": text, "prompt_token_ids": ids}
        async for output in self.generate(prompt, sampling_params, request_id, delta):
            yield output

    def abort(self, request_id: str) -> None:
        """End a request; its generator yields what there is and ends. One that is unknown or has ended: nothing."""
        end = self._by_id.get(request_id)
        if end is not None:
            self._send(end)

    def shutdown(self) -> None:
        """End all requests and the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown)

    # ---- The thread ---------------------------------------------------------------------------------

    def _send(self, call):
        """Let the thread make a call; False where it was shut down, and has ended all requests."""
        with self._wake:
            if self._closed:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="pagedkv-engine", daemon=True)
                thread.start()  # raises where the system gives no thread; then nothing has happened
                self._thread = thread
            self._inbox.append(call)
            self._wake.notify()
            return True

    def _run(self):
        while True:
            with self._wake:
                while not (self._inbox or self._listeners or self._outbox or self._closed):
                    self._wake.wait()
            with self._llm._lock:
                closed = self._closed  # read before the calls: none comes after it
                try:
                    while self._inbox:  # up to the step's very beginning: whoever has left takes no part in it
                        self._inbox.popleft()()
                    self._hand_over()
                    if not closed and self._listeners:
                        self._engine.step_for_all()
                except BaseException as error:  # whose it is nobody knows; the thread goes on for others
                    self._end_all("error", error)
                if closed:
                    self._end_all("abort", None)
                for request, *_ in list(self._listeners.values()):
                    if request.has_news:
                        self._tell(request)
                self._hand_over()
                if closed and not (self._inbox or self._outbox):
                    return

    def _end_all(self, reason, error):
        for request, *_ in list(self._listeners.values()):
            try:
                self._engine.abort(request, reason, error)
            except BaseException:  # the engine comes back to it
                request.end(reason, error)
            self._tell(request)

    def _tell(self, request):
        """Put what is new before who waits for it. An exception on the way ends this request, and nothing else."""
        _, loop, outputs, delta = self._listeners[request.number]
        try:
            output = request.error or request.output(delta=True)
            if not delta and request.error is None:
                output = request.output()
            is_last = request.finished
        except BaseException as error:
            output, is_last = error, True
        self._put(loop, outputs, output)
        if is_last:
            del self._listeners[request.number]
            if not request.finished:
                self._engine.abort(request)

    def _put(self, loop, outputs, output):
        self._outbox.setdefault(loop, []).append((outputs, output))

    def _hand_over(self):
        """Hand what was put to the event loops, all of a step at once: waking one takes longer than an output."""
        for loop, told in list(self._outbox.items()):
            try:
                loop.call_soon_threadsafe(_put_all, told)
            except BaseException:
                if not loop.is_closed():  # no memory, say: once more after the next step
                    continue
                for request, its_loop, *_ in list(self._listeners.values()):  # nobody waits any more
                    if its_loop is loop:
                        del self._listeners[request.number]
                        self._engine.abort(request)
            del self._outbox[loop]


def _put_all(told):
    for outputs, output in told:
        outputs.put_nowait(output)
