"""BatchLLM and the Serve application, on a cluster of two nodes where it matters; LLM in this process is the oracle."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="needs the extra pagedkv[ray]")
for name in ("pyarrow", "fastapi", "httpx", "openai"):
    pytest.importorskip(name, reason="needs the extra pagedkv[ray], and openai")

import httpx  # noqa: E402
import openai  # noqa: E402
import pagedkv as pk  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own
    from pagedkv.ray import AppArgs, BatchLLM, app
    from pagedkv.ray.routing import SLACK, PrefixRouter, prefix_keys
    from pagedkv.ray.serve import Front, merged
    from pagedkv.server.metrics import Metrics
from promise_rows import child_env  # noqa: E402
from test_cli import CONFIG, METADATA, text_tensors  # noqa: E402
from test_examples import example  # noqa: E402
from tiny import write_gguf  # noqa: E402

WAIT_S = 120  # only ends a hang
PARAMS = {"temperature": 0.9, "max_tokens": 12, "logprobs": 2}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("ray") / "tiny.gguf"
    write_gguf(path, CONFIG, text_tensors(), metadata=METADATA)
    return str(path)


@pytest.fixture(scope="module")
def oracle(gguf):
    return pk.LLM(gguf, n_blocks=8000)


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)


def places(logprobs):
    return [[{"token_id": token, "logprob": each.logprob, "rank": each.rank, "decoded_token": each.decoded_token}
             for token, each in place.items()] for place in logprobs]  # fmt: skip


def check_rows(oracle, rows, **params):
    """Each row of a dataset is what LLM gives for its prompt alone, with the seed that the row names."""
    for row in rows:
        assert row["generated_error"] is None
        prompt = row["prompt"] if isinstance(row["prompt"], str) else {"prompt_token_ids": row["prompt"]}
        wanted = pk.SamplingParams(**PARAMS | params, seed=row["generated_seed"])
        (out,) = oracle.generate([prompt], wanted, use_tqdm=False)
        sample = out.outputs[row["generated_sample"]]
        assert row["generated_token_ids"] == sample.token_ids and row["generated_text"] == sample.text
        assert row["generated_finish_reason"] == sample.finish_reason
        assert row["generated_cumulative_logprob"] == sample.cumulative_logprob
        assert row["generated_logprobs"] == places(sample.logprobs)


# -- offline, without a cluster -------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch_llm(gguf):
    return BatchLLM(gguf, sampling_params=PARAMS, n_blocks=400)


def texts(n):
    return [f"row {i} " * (1 + i % 3) for i in range(n)]


def test_rows_are_those_of_llm(gguf, oracle, batch_llm):
    found = batch_llm(pa.table({"id": range(9), "prompt": texts(9)})).to_pylist()
    assert [(row["id"], row["prompt"]) for row in found] == list(enumerate(texts(9)))
    check_rows(oracle, found)
    ids = [oracle.model.tokenizer.encode(text) for text in texts(4)]
    check_rows(oracle, batch_llm(pa.table({"prompt": ids})).to_pylist())
    samples = BatchLLM(gguf, sampling_params=PARAMS | {"n": 3, "prompt_logprobs": 1}, n_blocks=400)
    found = samples(pa.table({"id": ["a", "b"], "prompt": texts(2)})).to_pylist()
    assert [(row["id"], row["generated_sample"]) for row in found] == [(name, i) for name in "ab" for i in range(3)]
    check_rows(oracle, found, n=3)
    assert found[0]["generated_prompt_logprobs"][0] is None and found[0]["generated_prompt_logprobs"][1]


def test_messages(gguf, oracle):
    conversations = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi", "name": "Ann"}]]
    chat = BatchLLM(gguf, "talk", sampling_params={"temperature": 0, "max_tokens": 8}, n_blocks=400)
    found = chat(pa.table({"talk": conversations})).to_pylist()
    want = oracle.chat(conversations, pk.SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert [row["generated_text"] for row in found] == [out.outputs[0].text for out in want]
    alike = BatchLLM(gguf, "text", chat=True, sampling_params={"temperature": 0, "max_tokens": 8}, n_blocks=400)
    assert alike(pa.table({"text": ["Hi"]})).to_pylist()[0]["generated_text"] == found[0]["generated_text"]


def test_a_row_says_its_own_parameters(gguf, oracle):
    llm = BatchLLM(gguf, sampling_params=PARAMS, row_params=["seed", "max_tokens", "logit_bias", "stop"], n_blocks=400)
    bias = pa.array([None, [(ord("q"), 50.0)], None], pa.map_(pa.int32(), pa.float32()))
    table = pa.table({"prompt": ["x"] * 3, "seed": [7, None, 7], "max_tokens": [None, 5, 3],
                      "stop": [None, None, ["zz"]], "logit_bias": bias})  # fmt: skip
    first, second, third = llm(table).to_pylist()
    assert first["generated_seed"] == 7 and third["generated_token_ids"] == first["generated_token_ids"][:3]
    check_rows(oracle, [first])
    assert second["generated_text"] == "qqqqq"


def test_seeds_come_from_the_row_alone(gguf, batch_llm):
    def seeds(llm, rows, size):
        tables = (pa.Table.from_pylist(rows[begin:begin + size]) for begin in range(0, len(rows), size))
        return {row["id"]: row["generated_seed"] for table in tables for row in llm(table).to_pylist()}

    rows = [{"id": f"r{i}", "prompt": text} for i, text in enumerate([*texts(6), *texts(2)])]
    found = seeds(batch_llm, rows, 8)
    assert found == seeds(batch_llm, rows[::-1], 3) == seeds(batch_llm, rows, 1)
    assert found["r0"] == found["r6"] and len(set(found.values())) == 6  # equal prompts, equal seeds
    by_id = BatchLLM(gguf, sampling_params=PARAMS, id_column="id", n_blocks=400)
    assert len(set(seeds(by_id, rows, 8).values())) == 8
    assert seeds(by_id, rows, 8) == seeds(by_id, rows[::-1], 3)
    other = BatchLLM(gguf, sampling_params=PARAMS, seed=1, n_blocks=400)
    assert not set(seeds(other, rows, 8).values()) & set(found.values())
    fixed = BatchLLM(gguf, sampling_params=PARAMS | {"seed": 3}, n_blocks=400)
    assert set(seeds(fixed, rows, 8).values()) == {3}


def test_bad_rows_lose_no_others(gguf, oracle):
    llm = BatchLLM(gguf, sampling_params=PARAMS, row_params=["temperature", "max_tokens"], id_column="id", n_blocks=8)
    prompts = ["one", None, "x", "word " * 700, "word " * 30, "x", "", "eight"]
    rows = [{"id": i, "prompt": prompt, "temperature": 0.9, "max_tokens": 12} for i, prompt in enumerate(prompts)]
    rows[2]["temperature"], rows[5]["id"] = -1.0, None
    found = llm(pa.Table.from_pylist(rows)).to_pylist()
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    check_rows(oracle, [found[0], found[7]])
    bad = [row["generated_error"]["type"] for row in found[1:7]]
    assert bad == ["bad_request", "bad_request", "too_long", "pool_too_small", "bad_request", "bad_request"]
    assert all(row["generated_text"] is None and row["generated_seed"] is None for row in found[1:7])
    assert "temperature" in found[2]["generated_error"]["message"]
    for prompt in ([5, None], [10**6], b"bytes", 3, [2.5]):
        table = pa.table({"prompt": [prompt], "id": [1], "temperature": [1.0], "max_tokens": [1]})
        assert llm(table).to_pylist()[0]["generated_error"]["type"] == "bad_request"
    odd = pa.table({"prompt": ["x"], "id": [1], "temperature": [b"cold"], "max_tokens": [1]})
    assert "temperature" in llm(odd).to_pylist()[0]["generated_error"]["message"]


def test_all_batches_have_one_schema(batch_llm):
    good = batch_llm(pa.table({"prompt": ["x"]}))
    assert good.schema == batch_llm(pa.table({"prompt": ["x" * 4000]})).schema
    empty = batch_llm(pa.table({"prompt": pa.array([], pa.string())}))
    assert empty.schema == good.schema and len(empty) == 0
    import numpy as np

    assert batch_llm({"prompt": np.array(["x"])}).to_pylist() == good.to_pylist()


def test_what_is_no_rows_fault_is_said_at_once(gguf, batch_llm):
    with pytest.raises(ValueError, match="no column 'prompt'; it has text"):
        batch_llm(pa.table({"text": ["x"]}))
    with pytest.raises(ValueError, match="'generated_text' already"):
        batch_llm(pa.table({"prompt": ["x"], "generated_text": ["y"]}))
    with pytest.raises(ValueError, match="no temprature"):
        BatchLLM(gguf, row_params=["temprature"])
    with pytest.raises(TypeError, match="num_cpus"):
        BatchLLM(gguf, num_threads=2)
    with pytest.raises(ValueError, match="n is at most"):
        BatchLLM(gguf, sampling_params={"n": 5000})


# -- offline, on the cluster ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers find the package, not the tests
    before = dict(os.environ)
    os.environ.update(child_env(PAGEDKV_NUM_THREADS="3"))  # which no actor has
    cluster = Cluster()
    try:
        for _ in range(2):
            add_node(cluster)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


def add_node(cluster):
    return cluster.add_node(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False)


def meet(folder, n):
    """Wait until so many actors are here."""
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    end = time.monotonic() + WAIT_S
    while len(list(folder.iterdir())) < n and time.monotonic() < end:
        time.sleep(0.02)


class Watched(BatchLLM):
    """Says where rows were made. Each of two actors gets a batch before any gets two."""

    def __init__(self, *args, folder, **options):
        super().__init__(*args, **options)
        self.folder, self.n_calls = Path(folder), 0

    def __call__(self, batch):
        self.n_calls += 1
        meet(self.folder / "actors", 2)
        found = super().__call__(batch)
        for name, value in (("threads", pk.get_num_threads()), ("node", ray.get_runtime_context().get_node_id())):
            found = found.append_column(name, pa.array([value] * len(found)))
        return found


class Mortal(Watched):
    """The first actor to begin a second batch is killed in the middle of it."""

    def __call__(self, batch):
        if self.n_calls == 1:
            step, left = self._engine.step, [3]

            def last_steps():
                left[0] -= 1
                if left[0] == 0:
                    self.die()
                return step()

            self._engine.step = last_steps
        return super().__call__(batch)

    def die(self):
        try:
            os.close(os.open(self.folder / "dead", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Stranded(Mortal):
    """On the node of the file `doomed` it stops in the middle of its second batch, and says so."""

    def die(self):
        if (self.folder / "doomed").read_text() == ray.get_runtime_context().get_node_id():
            (self.folder / "stopped").touch()
            time.sleep(WAIT_S)


def run_job(kind, gguf, folder, batch_size, **resources):
    rows = [{"id": i, "prompt": text} for i, text in enumerate(texts(24))]
    options = {"model": gguf, "sampling_params": PARAMS, "folder": str(folder), "n_blocks": 400}
    dataset = ray.data.from_items(rows, override_num_blocks=8)
    found = dataset.map_batches(kind, fn_constructor_kwargs=options, batch_size=batch_size, batch_format="pyarrow",
                                compute=ray.data.ActorPoolStrategy(size=2), **resources).take_all()  # fmt: skip
    assert sorted(row["id"] for row in found) == list(range(24))  # each once
    return sorted(found, key=lambda row: row["id"])


def without_place(rows):
    return [{name: value for name, value in row.items() if name not in ("threads", "node")} for row in rows]


def test_two_nodes_give_what_one_process_gives(cluster, gguf, oracle, batch_llm, tmp_path):
    found = run_job(Watched, gguf, tmp_path, 3, num_cpus=2)
    assert len({row["node"] for row in found}) == 2 and {row["threads"] for row in found} == {2}
    check_rows(oracle, found)
    alone = batch_llm(pa.table({"id": range(24), "prompt": texts(24)})).to_pylist()  # one batch of all
    assert without_place(found) == alone


def test_a_killed_worker_costs_no_row(cluster, gguf, oracle, tmp_path):
    found = run_job(Mortal, gguf, tmp_path, 3, num_cpus=1)
    assert (tmp_path / "dead").exists()
    check_rows(oracle, found)


@pytest.mark.slow
def test_a_lost_node_costs_no_row(cluster, gguf, oracle, tmp_path):
    doomed = next(node for node in cluster.list_all_nodes() if node is not cluster.head_node)
    (tmp_path / "doomed").write_text(doomed.node_id)
    errors = []

    def lose():
        try:
            end = time.monotonic() + WAIT_S
            while not (tmp_path / "stopped").exists():
                assert time.monotonic() < end
                time.sleep(0.05)
            cluster.remove_node(doomed, allow_graceful=False)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=lose)
    thread.start()
    try:
        found = run_job(Stranded, gguf, tmp_path, 3, num_cpus=2)
    finally:
        thread.join()
        add_node(cluster)
    assert not errors
    check_rows(oracle, found)


def test_cpus_that_are_no_threads_are_refused(cluster, gguf):
    with pytest.raises(ray.exceptions.ActorDiedError, match="integer from 1 on, not 0.5"):
        ray.get(ray.remote(num_cpus=0.5)(BatchLLM).remote(gguf).__ray_ready__.remote())


def test_the_example_reads_and_writes_parquet(cluster, gguf, oracle, tmp_path):
    questions = tmp_path / "questions.parquet"
    pq.write_table(pa.table({"question": texts(6), "topic": list(range(6))}), questions)
    target = str(tmp_path / "answers")
    example("ray_batch").answer(str(questions), target, gguf, actors=2, threads=1, max_tokens=8)
    found = sorted(pq.read_table(target).to_pylist(), key=lambda row: row["topic"])
    assert [row["question"] for row in found] == texts(6)
    for row in found:
        params = pk.SamplingParams(temperature=0.7, max_tokens=8, seed=row["generated_seed"])
        (want,) = oracle.chat([{"role": "user", "content": row["question"]}], params, use_tqdm=False)
        assert row["generated_text"] == want.outputs[0].text
    with pytest.raises(SystemExit, match="need 5 CPUs; the cluster has 4"):
        example("ray_batch").answer(str(questions), target, gguf, actors=2, threads=2)


@pytest.mark.slow
def test_the_example_starts_a_ray_of_its_own_beside_one_that_runs(cluster, gguf, tmp_path):
    pq.write_table(pa.table({"question": texts(2)}), tmp_path / "questions.parquet")
    script = Path(__file__).parents[1] / "examples" / "ray_batch.py"
    env = child_env()
    env.pop("RAY_ADDRESS", None)
    done = subprocess.run([sys.executable, script, tmp_path / "questions.parquet", tmp_path / "answers", "--model", gguf],
                          env=env, capture_output=True, text=True, timeout=WAIT_S)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(row["question"] for row in pq.read_table(tmp_path / "answers").to_pylist()) == sorted(texts(2))


# -- routing --------------------------------------------------------------------------------------


def test_keys_of_a_prompt():
    def keys(**body):
        return prefix_keys(json.dumps(body).encode())

    long = "a" * 300
    assert len(keys(prompt=long)) == 3 and len(keys(prompt="a")) == 1
    assert keys(prompt=long) == keys(prompt=long + "b") == keys(prompt=[long, "c"])
    assert keys(prompt=long)[:2] == keys(prompt=long[:130] + "b" * 200)[:2] != keys(prompt="b" + long)[:2]
    assert keys(prompt=list(range(100)))[0] == keys(prompt=list(range(60)))[0]
    turn = [{"role": "user", "content": long}]
    assert keys(messages=turn)[0] == keys(messages=[*turn, {"role": "assistant", "content": "Yes."}])[0]
    assert prefix_keys(b"{") == prefix_keys(b"[" * 100_000) == prefix_keys(b"[3]") == keys(prompt="") == []
    assert len(keys(prompt="a" * 5_000_000)) == 15


class Router(PrefixRouter):
    """Without a cluster: replicas are names, and their queues are as long as the test says."""

    def __init__(self, **loads):
        from ray.serve._private.common import DeploymentHandleSource, DeploymentID
        from ray.serve.request_router import ReplicaID

        deployment = DeploymentID("replicas")
        super().__init__(deployment, DeploymentHandleSource.UNKNOWN)
        self.ids = {name: ReplicaID(name, deployment) for name in loads}
        self.set(**loads)

    def set(self, **loads):
        self.loads = loads
        for name, load in loads.items():
            self.replica_queue_len_cache.update(self.ids[name], load)

    def ranks(self, prompt):
        keys = prefix_keys(json.dumps({"prompt": prompt}).encode())
        pending = SimpleNamespace(args=(keys,), routing_context=SimpleNamespace())
        replicas = [SimpleNamespace(replica_id=self.ids[name]) for name in self.loads]
        return asyncio.run(self.choose_replicas(replicas, pending)), pending

    def route(self, prompt):
        """The replica that Serve takes, as it reads the ranks."""
        (first, *_), pending = self.ranks(prompt)
        chosen = min(first, key=lambda replica: self.loads[replica.replica_id.unique_id]).replica_id
        self.on_request_routed(pending, chosen, None)
        return chosen.unique_id


def test_a_prefix_stays_with_its_replica_unless_others_are_idle():
    router = Router(a=0, b=0, c=0)
    prompts = [f"{i} " * 100 for i in range(40)]
    homes = [router.route(prompt) for prompt in prompts]
    assert set(homes) == {"a", "b", "c"}
    assert homes == [Router(c=3, b=1, a=2).route(prompt + "more") for prompt in prompts]  # of another process too
    talk, home = prompts[0], homes[0]
    other = min({"a", "b", "c"} - {home})
    router.set(**{name: SLACK if name == home else 0 for name in "abc"})
    assert router.route(talk) == home
    router.set(**{name: SLACK + 1 if name == home else 0 if name == other else 1 for name in "abc"})
    assert router.route(talk) == other
    router.set(a=0, b=0, c=0)
    assert router.route(talk + "and so on") == other  # which has it by now
    router.set(**{name: 0 for name in "abc" if name != other})
    assert router.route(talk) != other  # it died


def test_a_home_with_too_much_to_do_is_left():
    router = Router(a=0, b=0)
    home = router.route("x")
    router.set(**{name: 30 if name == home else 0 for name in "ab"})
    assert router.route("x") != home


def test_the_longest_prefix_that_is_known_counts():
    router, beginning = Router(a=0, b=0), "You are helpful. " * 4
    one, two = beginning + "A cat. " * 20, beginning + "A dog. " * 20
    home = router.route(one)
    router.set(**{name: 30 if name == home else 0 for name in "ab"})
    other = router.route(two)  # which is now the last to have had the beginning, too
    assert other != home
    router.set(a=0, b=0)
    assert router.route(one + "And?") == home and router.route(two + "And?") == other


def test_ranks_name_all_replicas_and_ask_for_a_pause_between_rounds():
    """Serve goes on to the second rank where the first one is full, and would ask again and again without the pause."""
    ranks, pending = Router(a=0, b=0, c=0).ranks("x")
    assert [len(rank) for rank in ranks] == [1, 2]
    assert {replica.replica_id.unique_id for rank in ranks for replica in rank} == {"a", "b", "c"}
    assert pending.routing_context.should_backoff


def test_a_replica_of_which_nothing_was_heard_counts_as_idle():
    router = Router(a=0, b=0)
    home = router.route("x")
    router.replica_queue_len_cache.update(router.ids[home], 30)
    for name in {"a", "b"} - {home}:
        router.replica_queue_len_cache.invalidate_key(router.ids[name])
    ranks, _ = router.ranks("x")
    assert [len(rank) for rank in ranks] == [2]  # the least busy one


def test_prefixes_that_were_not_seen_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr("pagedkv.ray.routing.MOST_PREFIXES", 3)
    router = Router(a=0, b=0)
    for prompt in ("old", "used", "x", "used", "y", "z"):
        router.route(prompt)
    (kept,), (gone,) = (prefix_keys(json.dumps({"prompt": prompt}).encode()) for prompt in ("used", "old"))
    assert len(router._homes) == 3 and kept in router._homes and gone not in router._homes


def test_merged_metrics(oracle):
    text = "# HELP t:n_total Things.\n# TYPE t:n_total counter\nt:n_total{{m=\"x\"}} {}\n"
    lines = merged([("a", text.format(1.0)), ("b", text.format(2.0))]).decode().splitlines()
    assert lines == ["# HELP t:n_total Things.", "# TYPE t:n_total counter", 't:n_total{m="x",replica="a"} 1.0',
                     't:n_total{m="x",replica="b"} 2.0']  # fmt: skip
    text = Metrics(pk.AsyncLLM(oracle), "tiny").text().decode()
    series = [line for line in text.splitlines() if line[0] != "#"]
    both = [line for line in merged([("a", text), ("b", text)]).decode().splitlines() if line[0] != "#"]
    assert len(both) == len(set(both)) == 2 * len(series) > 40


def test_the_key_is_asked_for_at_the_front(monkeypatch):
    monkeypatch.setenv("PAGEDKV_API_KEY", "secret")
    front = Front(None)  # no replica is asked

    async def status(**headers):
        transport = httpx.ASGITransport(await front(None))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return (await client.get("/v1/models", headers=headers)).status_code

    assert asyncio.run(status()) == asyncio.run(status(authorization="Bearer wrong")) == 401
    assert asyncio.run(status(authorization="Bearer secret")) == 500  # it goes on, to no replica
    monkeypatch.setenv("PAGEDKV_API_KEY", " ")
    with pytest.raises(ValueError, match="empty"):
        Front(None)


def test_the_key_of_who_starts_the_application_goes_with_it(monkeypatch, gguf):
    """A cluster that is there already has another environment than the command that starts the application."""
    bound = []

    def deployment(*_, **__):
        return SimpleNamespace(bind=lambda *args: bound.append(args))

    monkeypatch.setattr("ray.serve.deployment", deployment)
    monkeypatch.setenv("PAGEDKV_API_KEY", "secret")
    app(AppArgs(model=gguf))
    monkeypatch.delenv("PAGEDKV_API_KEY")

    async def status(front, **headers):
        transport = httpx.ASGITransport(await front(None))
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return (await client.get("/v1/models", headers=headers)).status_code

    front = Front(*bound[-1])
    assert asyncio.run(status(front)) == 401
    assert asyncio.run(status(front, authorization="Bearer secret")) == 500  # it goes on, to no replica
    monkeypatch.setenv("PAGEDKV_API_KEY", "other")  # of the machine where the front runs
    assert asyncio.run(status(Front(*bound[-1]), authorization="Bearer other")) == 401
    monkeypatch.setenv("PAGEDKV_API_KEY", " ")
    with pytest.raises(ValueError, match="empty"):
        app(AppArgs(model=gguf))


# -- online ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(cluster, gguf):
    from ray import serve

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        args = AppArgs(model=gguf, model_name="tiny", num_replicas=2, num_threads=1, n_blocks=8000)
        serve.run(app(args), name="tiny")
        url, end = f"http://127.0.0.1:{port}", time.monotonic() + WAIT_S
        while True:  # Serve's proxy may listen later than the replicas are there
            try:
                httpx.get(url + "/health", timeout=WAIT_S).raise_for_status()
                break
            except httpx.HTTPError:
                assert time.monotonic() < end
                time.sleep(0.2)
        yield url
    finally:
        serve.shutdown()


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


def replica_of(response):
    return response.headers["x-pagedkv-replica"]


def metrics(url):
    return httpx.get(url + "/metrics", timeout=WAIT_S).raise_for_status().text


def metric(url, name):
    values = [float(value) for value in re.findall(rf"^pagedkv:{name}{{.*}} (\S+)$", metrics(url), re.M)]
    assert values
    return sum(values)


def test_answers_are_those_of_llm(client, oracle):
    params = pk.SamplingParams(temperature=0.9, seed=5, n=2, max_tokens=16, logprobs=1)
    want = oracle.generate(texts(3), params, use_tqdm=False)
    options = {"model": "tiny", "temperature": 0.9, "seed": 5}
    got = client.completions.create(prompt=texts(3), n=2, max_tokens=16, logprobs=1, **options)
    samples = [sample for out in want for sample in out.outputs]
    assert [choice.text for choice in got.choices] == [sample.text for sample in samples]
    assert [choice.finish_reason for choice in got.choices] == [sample.finish_reason for sample in samples]
    assert [choice.logprobs.token_logprobs for choice in got.choices] == [
        [place[token].logprob for token, place in zip(sample.token_ids, sample.logprobs)]
        for sample in samples]  # fmt: skip
    messages = [{"role": "user", "content": "Hi"}]
    (want,) = oracle.chat(messages, pk.SamplingParams(temperature=0.9, seed=5, max_tokens=40), use_tqdm=False)
    got = client.chat.completions.create(messages=messages, max_tokens=40, **options)
    assert got.choices[0].message.content == want.outputs[0].text
    stream = client.chat.completions.create(messages=messages, max_tokens=40, stream=True, **options)
    parts = [event.choices[0].delta.content or "" for event in stream]
    assert "".join(parts) == want.outputs[0].text and len(parts) > 5


def test_refusals_are_openais(url, client):
    with pytest.raises(openai.NotFoundError, match="is served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="x", max_tokens=-1)
    headers = {"content-type": "application/json"}
    for body, status in ((b"{", 400), (b" " * (9 << 20), 413)):
        response = httpx.post(url + "/v1/completions", content=body, headers=headers, timeout=WAIT_S)
        assert response.status_code == status and response.json()["error"]["message"]
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_prefix_goes_to_the_replica_that_holds_it(client):
    homes = {}
    for family in range(40):  # two replicas: all of these at one of them has probability 2**-39
        prefix = f"family {family} " * 20
        for end in ("one", "two", "three"):
            raw = client.completions.with_raw_response.create(model="tiny", prompt=prefix + end, max_tokens=1)
            homes.setdefault(family, []).append(replica_of(raw))
            n_cached = raw.parse().usage.prompt_tokens_details.cached_tokens
            assert (n_cached > 0) == (end != "one")
        assert len(set(homes[family])) == 1
        if len({home for home, *_ in homes.values()}) == 2:
            return
    raise AssertionError(homes)


def test_a_client_that_goes_away_ends_its_request(url):
    before = metric(url, "generation_tokens_total")
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=WAIT_S) as response:
        next(response.iter_lines())
    end = time.monotonic() + WAIT_S
    while metric(url, "num_requests_running"):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert metric(url, "generation_tokens_total") - before < 2900
    assert metric(url, "kv_cache_usage_perc") == 0


def test_a_killed_replica(url, client, oracle):
    """The stream that it was in ends with an error; a request whose answer had not begun is answered by the other one,
    and so are those that come; and the replica comes back."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "seed": 1}
    whole = []
    thread = threading.Thread(target=lambda: whole.append(
        httpx.post(url + "/v1/completions", json=body | {"n": 16}, timeout=WAIT_S)))  # fmt: skip
    thread.start()
    end = time.monotonic() + WAIT_S
    while metric(url, "num_requests_running") < 16:
        assert time.monotonic() < end
    with httpx.stream("POST", url + "/v1/completions", json=body | {"stream": True}, timeout=WAIT_S) as response:
        lines = response.iter_lines()
        next(lines)
        killed = replica_of(response)
        ray.kill(ray.get_actor(f"SERVE_REPLICA::tiny#Replica#{killed}", namespace="serve"))
        *_, last, done = [line for line in lines if line]
    assert "died" in json.loads(last.removeprefix("data: "))["error"]["message"] and done == "data: [DONE]"
    raw = client.completions.with_raw_response.create(model="tiny", prompt="x", max_tokens=20, seed=1)
    assert replica_of(raw) != killed
    (want,) = oracle.generate(["x"], pk.SamplingParams(max_tokens=20, seed=1), use_tqdm=False)
    assert raw.parse().choices[0].text == want.outputs[0].text
    thread.join()
    (want,) = oracle.generate(["x"], pk.SamplingParams(n=16, max_tokens=1500, ignore_eos=True, seed=1), use_tqdm=False)
    assert whole[0].status_code == 200 and replica_of(whole[0]) != killed
    assert [choice["text"] for choice in whole[0].json()["choices"]] == [sample.text for sample in want.outputs]
    end = time.monotonic() + WAIT_S
    while metrics(url).count("pagedkv:num_requests_running{") < 2:
        assert time.monotonic() < end
        time.sleep(0.2)


def test_arguments_as_the_command_gives_them():
    args = AppArgs.model_validate({"model": "m/tiny.gguf", "num_replicas": "2", "num_threads": "3"})
    assert (args.num_replicas, args.num_threads) == (2, 3)
    for wrong in ({"num_replica": 2}, {"num_replicas": 0}, {"kv_dtype": "float8"}, {"compute": "int4"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AppArgs.model_validate(wrong)


def test_a_model_that_is_not_there_is_said_before_a_replica_starts(gguf):
    with pytest.raises(pk.ModelNotFound, match="other.gguf"):
        app(AppArgs(model="other.gguf"))
    with pytest.raises(pk.ModelNotFound, match="nonsense"):
        app(AppArgs(model=gguf, speculative="nonsense"))


def test_speculative_names_what_it_names_for_the_server(gguf):
    for said, meant in ((None, None), ("ngram", "ngram"), (gguf, {"model": gguf})):
        options = AppArgs(model=gguf, speculative=said, n_blocks=100).llm_options()
        assert options["speculative"] == meant
        pk.LLM(gguf, **options)
