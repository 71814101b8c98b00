"""The routes, and the process that serves them."""

import asyncio
import json
import sys
from contextlib import ExitStack, aclosing, asynccontextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

import pagedkv
from pagedkv.server.answer import ChatAnswer, CompletionAnswer, encode, event
from pagedkv.server.api import ApiError, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from pagedkv.server.door import Door, log
from pagedkv.server.metrics import Metrics
from pagedkv.server.page import Viewers, page

RETRY_AFTER_S = 1


class _JSON(Response):
    media_type = "application/json"

    def render(self, content):
        return encode(content).encode()


class _Events(StreamingResponse):
    """Server-sent events. Their source, and what `held` holds, end with the response, however it ends."""

    def __init__(self, events, held):
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._held = held

    async def __call__(self, scope, receive, send):
        with self._held:
            async with aclosing(self.body_iterator):
                await super().__call__(scope, receive, send)


def respond(error):
    return _JSON(error.body(), error.status, error.headers)


class Service:
    """What the routes do, over one engine.

    Parameters
    ----------
    llm : AsyncLLM
    model_name : str
    max_queue : int
        Choices that may wait beside those that the engine runs at a time.
    log_requests : bool
        Write every request to standard error, its text too.
    """

    def __init__(self, llm, model_name, max_queue=256, log_requests=False):
        self.llm, self.model_name, self.log_requests = llm, model_name, log_requests
        self.metrics = Metrics(llm, model_name)
        self.viewers = Viewers(llm, event)
        self._most_open = llm._engine.scheduler.max_num_seqs + max_queue
        self._n_open = 0  # choices that were taken and have not ended

    def check_model(self, name):
        if name is not None and name != self.model_name:
            raise ApiError(404, f"the model {name!r:.100} does not exist; {self.model_name!r} is served here", "model",
                           "model_not_found")  # fmt: skip

    def describe(self):
        return {"id": self.model_name, "object": "model", "created": 0, "owned_by": "pagedkv",
                "max_model_len": self.llm._llm.max_model_len}  # fmt: skip

    async def answer(self, http, request):
        """The response to a completion or a chat."""
        self.check_model(request.model)
        if self.log_requests:
            body = json.dumps(request.model_dump(exclude_unset=True))
            print(f"pagedkv: {http.url.path} {body}", file=sys.stderr, flush=True)
        try:
            params = request.sampling()
            asked = [request.conversation()] if isinstance(request, ChatRequest) else request.prompts()
        except (ValueError, TypeError) as error:
            raise ApiError.of(error) from None
        with self._place_for(len(asked) * params.n) as held:
            prompts = await asyncio.to_thread(self._read_all, request, asked, params)
            answer = (ChatAnswer if isinstance(request, ChatRequest) else CompletionAnswer)(
                request, params, self.llm.model.tokenizer, prompts)  # fmt: skip
            pieces = self._pieces(answer, prompts, params)
            if request.stream:
                return _Events(self._stream(answer, pieces), held.pop_all())
            async with aclosing(pieces):
                return await _while_connected(http, self._whole(answer, pieces))

    def _place_for(self, n):
        """Count so many choices as open, until the ExitStack is left, or refuse them."""
        if n > self._most_open:
            raise ApiError(400, f"{n} choices (n for each prompt) are more than the {self._most_open} that may run and "
                           "wait here", "n")  # fmt: skip
        if self._n_open + n > self._most_open:
            raise ApiError(429, f"the queue is full: {self._n_open} choices run or wait, {self._most_open} may; try "
                           "again later", code="rate_limit_exceeded", retry_after=str(RETRY_AFTER_S))  # fmt: skip
        held = ExitStack()
        held.callback(self._end, n)
        self._n_open += n
        return held

    def _end(self, n):
        self._n_open -= n

    def _read_all(self, request, asked, params):
        """The (text or None, ids) of each prompt, none of which the engine will refuse."""
        prompts = []
        for place, each in enumerate(asked):
            try:
                if isinstance(request, ChatRequest):
                    text, ids = self.llm._llm._render(each, **request.variables())
                else:
                    text, ids = self.llm._llm._read(each)
                self._check(ids, params)
            except (ApiError, ValueError, TypeError, pagedkv.PagedKVError) as error:
                error = ApiError.of(error)
                if len(asked) > 1:
                    error.message = f"prompt {place}: {error.message}"
                raise error from None
            prompts.append((text, ids))
        return prompts

    def _check(self, ids, params):
        n, most = len(ids), self.llm._llm.max_model_len
        wanted = params.max_tokens or 1  # fewer may come of None
        if not n:
            raise ApiError(400, "the prompt has no tokens", "prompt")
        if n + wanted > most:
            raise ApiError(400, f"the prompt has {n} tokens and {wanted} are asked for, {n + wanted} together; this "
                           f"server holds {most}", "prompt", "context_length_exceeded")  # fmt: skip
        self.llm._engine.check(ids, params)

    async def _pieces(self, answer, prompts, params):
        """What comes of all prompts, as lists of pieces."""
        note, end = self.metrics.watch(answer.n_prompt_tokens)
        try:
            runs = [self.llm.generate({"prompt": text, "prompt_token_ids": ids}, params, f"{answer.id}-{place}", True)
                    for place, (text, ids) in enumerate(prompts)]  # fmt: skip
            async with aclosing(_merged(runs)) as outputs:
                async for place, output in outputs:
                    pieces = answer.pieces(place, output)
                    if any(reason == "abort" for *_, reason in pieces):
                        raise _shutting_down()
                    note(pieces)
                    yield pieces
        except ApiError:
            raise
        except Exception as error:  # the request was checked: what is left is not the client's fault
            if self.llm._closed:
                raise _shutting_down() from None
            log(error)
            raise ApiError.of(RuntimeError()) from None
        finally:
            end()

    async def _whole(self, answer, pieces):
        return _JSON(answer.whole([piece async for some in pieces for piece in some]))

    async def _stream(self, answer, pieces):
        async with aclosing(pieces):
            try:
                async for some in pieces:
                    if events := "".join([answer.events(*piece) for piece in some]):
                        yield events
                if last := answer.last_event():
                    yield last
            except ApiError as error:
                yield event(error.body())
        yield "data: [DONE]\n\n"

    def watch(self):
        """The pool, live."""
        self.viewers.enter()
        held = ExitStack()
        held.callback(self.viewers.leave)
        return _Events(self.viewers.events(), held)

    async def tokenize(self, request):
        self.check_model(request.model)
        tokenizer = self.llm.model.tokenizer
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "one of prompt and messages is needed", "prompt")

        def encode():
            if request.messages is None:
                return tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
            messages = [message.plain(place) for place, message in enumerate(request.messages)]
            return self.llm._llm._render(messages, add_generation_prompt=request.add_generation_prompt)[1]

        ids = await _refusing(encode)
        found = {"count": len(ids), "max_model_len": self.llm._llm.max_model_len, "tokens": ids}
        if request.return_token_strs:
            found["token_strs"] = [tokenizer.id_to_token(each) for each in ids]
        return found

    async def detokenize(self, request):
        self.check_model(request.model)
        return {"prompt": await _refusing(lambda: self.llm.model.tokenizer.decode(request.tokens))}


def _shutting_down():
    return ApiError(503, "the server is shutting down", code="shutting_down")


async def _refusing(work):
    """Work of a thread, whose errors are the client's."""
    try:
        return await asyncio.to_thread(work)
    except (ValueError, TypeError, pagedkv.PagedKVError) as error:
        raise ApiError.of(error) from None


async def _merged(generators):
    """What several generators yield, as (its place, item), as it comes. An error of one ends all."""
    if len(generators) == 1:  # without tasks and a queue between, which every token would pass
        async with aclosing(generators[0]) as generator:
            async for item in generator:
                yield 0, item
        return
    queue = asyncio.Queue()

    async def pump(place, generator):
        try:
            async with aclosing(generator):
                async for item in generator:
                    queue.put_nowait((place, item, None))
            queue.put_nowait((place, None, None))
        except Exception as error:
            queue.put_nowait((place, None, error))

    tasks = [asyncio.ensure_future(pump(*each)) for each in enumerate(generators)]
    try:
        n_going = len(tasks)
        while n_going:
            place, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                n_going -= 1
            else:
                yield place, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _while_connected(http, work):
    """The result of a coroutine, which is cancelled where the client goes away."""

    async def gone():
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else Response(status_code=499)  # nobody reads it
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_app(llm, model_name, api_key=None, max_queue=256, cors=(), log_requests=False):
    """The ASGI application.

    Parameters
    ----------
    llm : AsyncLLM
        Shut down with the application.
    model_name : str
        That clients name.
    api_key : str, optional
        That clients must send; asked by all routes but ``/health`` and ``/``, the page without its data.
    max_queue : int
        Choices that may wait beside those that the engine runs at a time.
    cors : list of str
        Origins whose pages may use the server from a browser.
    log_requests : bool
        Write every request to standard error, its text too.

    Returns
    -------
    fastapi.FastAPI
    """
    service, front = Service(llm, model_name, max_queue, log_requests), page()

    @asynccontextmanager
    async def lifespan(_):
        yield
        await asyncio.to_thread(llm.shutdown)

    # The pages /docs and /redoc load scripts from elsewhere.
    app = FastAPI(title="pagedkv", version=pagedkv.__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Door, respond=respond, api_key=api_key)
    if cors:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors), allow_methods=["*"], allow_headers=["*"])

    @app.exception_handler(ApiError)
    async def refuse(_, error):
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_body(_, error):
        first = error.errors()[0]
        where = ".".join(str(each) for each in first["loc"][1:] if first["type"] != "json_invalid")
        what = first["msg"] if where else "the body must be a JSON object, with Content-Type: application/json"
        return respond(ApiError(400, f"{where}: {what}" if where else what, where or None))

    @app.exception_handler(HTTPException)
    async def refuse_other(http, error):
        message = f"{http.method} {http.url.path}: {error.detail}"
        return respond(ApiError(error.status_code, message, **(error.headers or {})))

    @app.get("/")
    async def root():
        return front

    @app.get("/pool")
    async def pool():
        return service.watch()

    @app.get("/health")
    async def health():
        return Response()

    @app.get("/version")
    async def version():
        return _JSON({"version": pagedkv.__version__})

    @app.get("/metrics")
    async def metrics():
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models")
    async def models():
        return _JSON({"object": "list", "data": [service.describe()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str):
        service.check_model(name)
        return _JSON(service.describe())

    @app.post("/v1/completions")
    async def completions(http: Request, request: CompletionRequest):
        return await service.answer(http, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request, request: ChatRequest):
        return await service.answer(http, request)

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest):
        return _JSON(await service.tokenize(request))

    @app.post("/detokenize")
    async def detokenize(request: DetokenizeRequest):
        return _JSON(await service.detokenize(request))

    return app


class _Server(uvicorn.Server):
    """Ends requests that are under way `drain_s` after it was told to end, each with an error that says so."""

    def __init__(self, config, llm, drain_s, on_ready):
        super().__init__(config)
        self._llm, self._drain_s, self._on_ready = llm, drain_s, on_ready

    async def startup(self, sockets=None):
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets=None):
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._drain_s, loop.run_in_executor, None, self._llm.shutdown)
        self.config.app.state.service.viewers.close()  # who only watches is not waited for
        await super().shutdown(sockets)
        timer.cancel()


def serve(llm, model_name, sock, on_ready, drain_s=30.0, **options):
    """Serve until SIGTERM or Ctrl-C, then for as long as requests under way take, `drain_s` at most.

    Parameters
    ----------
    llm : AsyncLLM
    model_name : str
    sock : socket.socket
        Bound; the server listens on it and closes it.
    on_ready : function
        Called when it listens.
    drain_s : float
    **options
        As of :func:`make_app`.
    """
    app = make_app(llm, model_name, **options)
    # The access log would show what clients put into addresses.
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, ws="none",
                            timeout_graceful_shutdown=int(drain_s) + 10)  # fmt: skip
    _Server(config, llm, drain_s, on_ready).run(sockets=[sock])
