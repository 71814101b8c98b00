"""Online: OpenAI's routes over replicas of one model, through Ray Serve.

A front reads requests and hands each to a replica, which is an engine under the same application as ``pagedkv serve``;
what the replica answers goes through as it comes, streams event by event.
"""

import asyncio
import os
import secrets
from typing import Literal

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from starlette.responses import Response

from pagedkv.engine import AsyncLLM
from pagedkv.engine.speculation import speculative_of
from pagedkv.hub import find_model
from pagedkv.ray.routing import PrefixRouter, prefix_keys
from pagedkv.ray.threads import use_assigned_cpus
from pagedkv.server.answer import event
from pagedkv.server.api import ApiError
from pagedkv.server.app import make_app, respond
from pagedkv.server.door import Door
from pagedkv.threads import default_num_threads

TRIES = 3  # replicas that one request may lose before its answer begins
UNBOUNDED = 1 << 20  # of Serve's own queues: the replica counts choices, and refuses with 429
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


class Replica:
    """One engine, under the server's own application."""

    def __init__(self, model, model_name, app_options, llm_options):
        use_assigned_cpus()
        # Requests without a seed have one by their order of arrival here; another seed for each replica, or the first
        # ones of all replicas would draw alike.
        self._llm = AsyncLLM(model, seed=secrets.randbits(63), **llm_options)
        self._app = make_app(self._llm, model_name, **app_options)
        self._id = serve.get_replica_context().replica_id.unique_id

    async def answer(self, keys, scope, body):
        """The messages of an answer, as ASGI has them. `keys` are for the router."""
        messages = asyncio.Queue()
        told = False

        async def receive():
            nonlocal told
            if told:
                await asyncio.Event().wait()  # who goes away cancels this call
            told = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def run():
            try:
                await self._app(scope, receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-pagedkv-replica", self._id.encode())]
                yield message
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def metrics(self):
        return self._id, self._app.state.service.metrics.text().decode()


class _Through(Response):
    """An ASGI application as a deployment's response, which Serve calls with ASGI's arguments."""

    def __init__(self, application):
        self._application = application

    async def __call__(self, scope, receive, send):
        await self._application(scope, receive, send)


def _key():
    """The API key of this process, or None."""
    key = os.environ.get("PAGEDKV_API_KEY")
    if key is not None and not key.strip():
        raise ValueError("the API key, of PAGEDKV_API_KEY, is empty")
    return key


class Front:
    """Reads requests, and passes answers on. Without a key it asks for the one of its process."""

    def __init__(self, replicas, key=None):
        self._replicas = replicas
        self._response = _Through(Door(self._pass, respond, _key() if key is None else key))

    async def __call__(self, _):
        return self._response

    async def _pass(self, scope, receive, send):
        if scope["path"] == scope.get("root_path", "") + "/metrics":
            found = await self._replicas.broadcast("metrics").results_async()
            text = Response(merged(found), media_type="text/plain; version=0.0.4; charset=utf-8")
            return await text(scope, receive, send)
        parts, message = [], {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
        body = b"".join(parts)
        call = prefix_keys(body), {name: scope[name] for name in SCOPE if name in scope}, body
        for _ in range(TRIES):
            if await self._pass_answer(call, send):
                return
        raise ApiError(503, "the replicas that were asked have died; try again later", retry_after="10")

    async def _pass_answer(self, call, send):
        """Pass an answer on; False where the replica died before it began, and another may be asked."""
        began = is_stream = False
        messages = self._replicas.options(stream=True).answer.remote(*call)
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    began = True
                    is_stream = any(value.startswith(b"text/event-stream") for _, value in message["headers"])
                await send(message)
        except RayActorError:
            if is_stream:
                error = ApiError(503, "the replica died; try again")
                await send({"type": "http.response.body", "body": (event(error.body()) + "data: [DONE]\n\n").encode()})
            elif began:
                raise
            return is_stream
        finally:
            messages.cancel()  # nobody waits for it any more
        return True


def merged(texts):
    """Metrics of several replicas as one text, each with its replica as a label.

    Parameters
    ----------
    texts : list of (str, str)
        Replicas and their metrics.

    Returns
    -------
    bytes
    """
    families = {}
    for replica, text in texts:
        for family in text_string_to_metric_families(text):
            kept = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            kept.samples += [sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples]

    class Registry:
        def collect(self):
            return families.values()

    return generate_latest(Registry())


class AppArgs(BaseModel):
    """What ``serve run pagedkv.ray:app name=value ...`` and a configuration file's `args` may say.

    Attributes
    ----------
    model : str
        As for ``pagedkv serve``, and so are the others but these two. A file must be there on every machine.
    num_replicas : int
        Each loads the model.
    num_threads : int
        Of a replica, and the CPUs that Ray counts for it; by default the physical cores of the machine that reads this.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    model: str = "smollm2-135m"
    model_name: str | None = None
    num_replicas: PositiveInt = 1
    num_threads: PositiveInt | None = None
    max_num_seqs: PositiveInt = 64
    max_queue: NonNegativeInt = 256
    n_blocks: PositiveInt | None = None
    kv_dtype: Literal["float32", "float16", "bfloat16", "q8_0"] = "float32"
    compute: Literal["float32", "int8"] = "float32"
    speculative: str | None = None
    log_requests: bool = False

    def llm_options(self):
        """What the engine of a replica is made with, beside the model."""
        options = self.model_dump(include={"max_num_seqs", "n_blocks", "kv_dtype", "compute"})
        return options | {"speculative": speculative_of(self.speculative)}


def app(args: AppArgs) -> serve.Application:
    """The application: a front, and replicas behind it."""
    llm_options, app_options = args.llm_options(), args.model_dump(include={"max_queue", "log_requests"})
    # What is not there is said here, once and at once, and not by each replica after each of Serve's attempts.
    find_model(args.model)
    if isinstance(llm_options["speculative"], dict):
        find_model(llm_options["speculative"]["model"])
    name = args.model_name or os.path.basename(os.path.normpath(args.model)).removesuffix(".gguf")
    replicas = serve.deployment(
        Replica, name="Replica", num_replicas=args.num_replicas, max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": args.num_threads or default_num_threads()},
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
    ).bind(args.model, name, app_options, llm_options)  # fmt: skip
    # It waits more than it works: no CPU is counted for it.
    front = serve.deployment(Front, name="Front", max_ongoing_requests=UNBOUNDED, ray_actor_options={"num_cpus": 0})
    # The key of who starts it goes along, as processes of a cluster that is there already do not have it: without, a
    # server that was meant to ask for it would be open.
    return front.bind(replicas, _key())
