"""Other engines beside pagedkv, in turns, on the same files with the same threads."""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import numpy as np

import pagedkv as pk
from pagedkv import _core, hub
from pagedkv.bench import files, report
from pagedkv.bench.engines import compare_runs, round_s
from pagedkv.bench.kernels import check_matmul, filled_sequences, new_pool
from pagedkv.bench.measure import Row, Timing
from pagedkv.bench.models import DEFAULT_MODEL, find_shapes, kv_dtypes
from pagedkv.formats import open_model

# Engine -> (module, distribution).
PEERS = {"llama.cpp": ("llama_cpp", "llama-cpp-python"), "openvino": ("openvino_genai", "openvino-genai"),
         "torch": ("torch", "torch"), "numpy": ("numpy", "numpy")}  # fmt: skip

# What an engine computes with, by type of the file: pagedkv is float32 throughout.
LLAMA_CPP_NOTE = {"F32": "f32, KV f16", "F16": "activations f16, KV f16"}
OPENVINO = {"F16": ("f32, KV f32", {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}),
            "Q8_0": ("its defaults, KV u8", {})}  # fmt: skip

N_ROUNDS = 3
REST_S = 0.1  # between turns: an engine's threads have stopped spinning by then


class PeerFailed(Exception):
    """A peer does not do what it is asked; the message is its own."""


def installed(names, run):
    """Those of the peers that are here; the others are skipped by name. The run keeps their versions."""
    found = run.peers
    for name in names:
        module, distribution = PEERS[name]
        if importlib.util.find_spec(module) is None:
            run.skip(name, f"{distribution} is not installed")
        else:
            found[name] = importlib.metadata.version(distribution)
    return found


class Peer:
    """An engine in its own Python. A context manager.

    Parameters
    ----------
    engine : str
        A key of ``PEERS``.
    **options
        Of its class in :mod:`pagedkv.bench.engines`; ``threads`` among them.

    Raises
    ------
    PeerFailed
        It does not start, or not with these options; a method raises it likewise.
    """

    def __init__(self, engine, **options):
        # Its own libraries' threads too, which read the environment.
        environment = dict(os.environ, OMP_NUM_THREADS=str(options["threads"]),
                           OPENBLAS_NUM_THREADS=str(options["threads"]), MKL_NUM_THREADS=str(options["threads"]),
                           OPENVINO_TELEMETRY_OPT_OUT="1")  # fmt: skip
        self.engine = engine
        self.said = tempfile.TemporaryFile("w+", errors="replace")
        script = str(Path(__file__).with_name("engines.py"))
        self.child = subprocess.Popen([sys.executable, "-P", script, engine], stdin=subprocess.PIPE, text=True,
                                      stdout=subprocess.PIPE, stderr=self.said, env=environment)
        try:
            self._ask(options)
        except PeerFailed:
            self.__exit__()
            raise

    def _ask(self, request):
        try:
            print(json.dumps(request), file=self.child.stdin, flush=True)
            line = self.child.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.said.seek(0)
            words = self.said.read().split("\n")
            last = next((line for line in reversed(words) if line.strip()), "it said nothing")
            raise PeerFailed(f"{self.engine} ended with status {self.child.wait()}: {last.strip()[:200]}")
        reply = json.loads(line)
        if "error" in reply:
            raise PeerFailed(f"{self.engine}: {reply['error']}")
        return reply["answer"]

    def __getattr__(self, method):
        """``peer.method(name=value)`` calls the method over there."""
        return lambda **arguments: self._ask({"do": method, **arguments})

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        with suppress(BrokenPipeError):  # it has ended already
            self.child.stdin.close()
        self.child.wait()
        self.child.stdout.close()
        self.said.close()


class Contestant:
    """An engine in a contest: how it takes a turn, and how its rows say what it is."""

    def __init__(self, engine, note, turn):
        self.engine, self.note, self.turn = engine, note, turn


def contest(contestants, run, add, name, shape, **counts):
    """Take turns and add a row for each; one that fails is skipped by name."""
    took = {each: [] for each in contestants}
    for _ in range(N_ROUNDS):
        for each in list(took):
            time.sleep(REST_S)
            try:
                took[each].append(each.turn())
            except PeerFailed as error:
                run.skip(f"{each.engine} {name} {shape}", str(error))
                del took[each]
    for each, seconds in took.items():
        add(Row("peers", name, shape, Timing.of(seconds), engine=each.engine, note=each.note, **counts))


# ---------------------------------------------------------------------------------------------------
# Whole steps


class Ours:
    """pagedkv in the same contest."""

    def __init__(self, path, compute=None, kv_dtype="float32"):
        self.model = pk.LlamaModel.load(path, **({"compute": compute} if compute else {}))
        self.kv_dtype = kv_dtype

    def _new_sequences(self, prompts, m, room, shared):
        config, n = self.model.config, len(prompts[0])
        pool = pk.BlockPool(len(prompts) * (n // 16 + 2) + m * (room // 16 + 4), config.n_layers, config.kv_dim,
                            dtype=self.kv_dtype)
        seqs = [pk.Sequence(pool, n + room) for _ in prompts]
        logits = self.model.step(list(zip(seqs, prompts)))
        return ([seqs[0].fork() for _ in range(m)] if shared else seqs), logits

    def open(self, prompts, m, room, shared):
        self.n_context = len(prompts[0])
        self.seqs, logits = self._new_sequences(prompts, m, room, shared)
        self.out = np.empty((m, self.model.config.vocab_size), np.float32)
        return logits

    def decode(self, start, n_steps):
        """As the peer's: seconds of a step, argmax outside the time."""
        tokens, took = np.array(start), 0.0
        self.model.decode_step(tokens, self.seqs, out=self.out)
        self._truncate()
        for _ in range(n_steps):
            begin = time.perf_counter()
            self.model.decode_step(tokens, self.seqs, out=self.out)
            took += time.perf_counter() - begin
            tokens = self.out.argmax(1)
        self._truncate()
        return took / n_steps

    def _truncate(self):
        for seq in self.seqs:
            seq.truncate(self.n_context)

    def prefill(self, tokens):
        pool = self.model.new_pool(n_tokens=len(tokens))
        with self.model.new_sequence(pool, len(tokens)) as seq:
            self.model.prefill(tokens, seq)
            seq.truncate(0)
            begin = time.perf_counter()
            self.model.prefill(tokens, seq)
            return time.perf_counter() - begin

    def bits(self, prompts, batches, threads, n_new):
        n_threads_before = pk.get_num_threads()

        def run(m, n_threads):
            pk.set_num_threads(n_threads)
            seqs, logits = self._new_sequences(prompts[:m], m, n_new, False)
            ids, kept = [], []
            for _ in range(n_new):
                kept.append(logits[0].copy())
                tokens = logits.argmax(1)
                ids.append(int(tokens[0]))
                logits = self.model.decode_step(tokens, seqs)
            return ids, np.array(kept)

        try:
            return compare_runs(run, batches, threads)
        finally:
            pk.set_num_threads(n_threads_before)


def started(kind, path, found, shapes, run, stack):
    """The engines that take part on a file of a type: a list of ``(engine, note, side)``."""
    threads = pk.get_num_threads()
    begun = [("pagedkv", "f32, KV f32", Ours(path))]
    if kind not in ("F32", "F16"):
        kv = "q8_0" if "q8_0" in kv_dtypes(shapes, run) else "float32"
        try:
            begun.append(("pagedkv int8", f"activations int8, KV {kv}", Ours(path, "int8", kv)))
        except (TypeError, ValueError) as error:
            run.skip("pagedkv int8", str(error))
    wanted = [("llama.cpp", LLAMA_CPP_NOTE.get(kind, "activations int8, KV f16"), {})]
    if kind in OPENVINO:
        note, options = OPENVINO[kind]
        wanted.append(("openvino", note, {"options": options}))
    for engine, note, options in wanted:
        if engine in found:
            try:
                peer = stack.enter_context(Peer(engine, file=str(path), threads=threads, **options))
                begun.append((engine, note, peer))
            except PeerFailed as error:
                run.skip(f"{engine} {kind}", str(error))
    return begun


def shared_files(source, run):
    """``(type, path)`` of the files that the engines share: those that :mod:`files` writes, and the model's own."""
    own = source.suffix == ".gguf" and files.kind_of(source)
    for kind in files.TYPES:
        if kind != own and not (run.files and kind not in run.files):
            try:
                yield kind, files.write(source, kind)
            except files.NoFile as error:
                run.skip(f"the {kind} file", str(error))
    if own and not (run.files and own not in run.files):
        yield own, source


def opened(begun, prompts, m, room, shared, what, run):
    """Those of the engines that have taken the prompts in, and agree with pagedkv on what could follow them."""
    ready, likely = [], None
    for engine, note, side in begun:
        try:
            answer = side.open(prompts=prompts, m=m, room=room, shared=shared)
        except PeerFailed as error:
            run.skip(f"{engine} {what}", str(error))
            continue
        if likely is None:  # pagedkv itself, the first: its logits, which tests/ check
            likely = np.argsort(answer, axis=1)[:, -10:]
        elif isinstance(side, Peer) and not all(token in row for token, row in zip(answer, likely)):
            run.skip(f"{engine} {what}", "its greedy token is not among pagedkv's first ten: it runs another model")
            continue
        ready.append((engine, note, side))
    return ready


def whole_steps(kind, path, found, effort, run):
    """Decode and prefill on one file."""
    shapes = find_shapes(path)
    rng = np.random.default_rng(9)
    n_context, n_shared, n_steps = effort.pick((128, 1024, 16), (16, 32, 4))

    def prompts(n, length):
        return rng.integers(0, shapes.vocab_size, (n, length)).tolist()

    with ExitStack() as stack:
        begun = started(kind, path, found, shapes, run, stack)
        sizes = [(m, n_context, False) for m in effort.pick((1, 8, 32, 64), (1, 4))]
        for m, length, shared in [*sizes, (effort.pick(32, 4), n_shared, True)]:
            if not run.wants(m):
                continue
            # OpenVINO has no forks; its prefix cache is another thing.
            able = [each for each in begun if not shared or each[0] != "openvino"]
            shape = f"M={m} ctx={length}{' shared' if shared else ''}"
            taken = prompts(1 if shared else m, length)
            ready = opened(able, taken, m, n_steps + 16, shared, f"{kind} {shape}", run)
            start = [i * 7 % shapes.vocab_size for i in range(m)]
            with run.group() as add:
                contest([Contestant(engine, note, partial(side.decode, start=start, n_steps=n_steps))
                         for engine, note, side in ready], run, add, f"decode {kind}", shape, n_tokens=m)
        n = effort.pick(512, 48)
        tokens = prompts(1, n)[0]
        if not run.wants(1):
            return
        with run.group() as add:
            contest([Contestant(engine, note, partial(side.prefill, tokens=tokens)) for engine, note, side in begun],
                    run, add, f"prefill {kind}", f"n={n}", n_tokens=n)


# ---------------------------------------------------------------------------------------------------
# Kernels


def kernels(shapes, found, effort, run):
    """float32 matmul and attention, data from memory."""
    threads = pk.get_num_threads()
    with ExitStack() as stack:
        begun = []
        for engine in ("torch", "numpy"):
            if engine in found:
                try:
                    begun.append((engine, stack.enter_context(Peer(engine, threads=threads))))
                except PeerFailed as error:
                    run.skip(engine, str(error))
        for name, (n, k) in shapes.matrices.items():
            if name in ("gate_up", "down"):
                for m in filter(run.wants, effort.pick((1, 8, 32, 64), (1, 4))):
                    with run.group() as add:
                        contest_matmul(name, m, n, k, begun, effort, run, add)
        for n_context in effort.pick((512, 4096), (64,)):
            with run.group() as add:
                contest_attention(shapes, n_context, [each for each in begun if each[0] == "torch"], effort, run, add)


def contest_matmul(name, m, n, k, begun, effort, run, add):
    copies = effort.n_copies(4 * n * k)
    rng = np.random.default_rng(0)
    w = rng.standard_normal((n, k), dtype=np.float32)
    weights = [pk.pack(w) for _ in range(copies)]
    x, out = rng.standard_normal((m, k), dtype=np.float32), np.empty((m, n), np.float32)
    _core.matmul(x, weights[0], out)
    check_matmul(x, w, weights[0], out, f"matmul {name} M={m}")
    contestants = [Contestant("pagedkv", "", lambda: round_s(lambda i: _core.matmul(x, weights[i % copies], out)))]
    contestants += open_peers(begun, "open_matmul", f"matmul {name} M={m}", run, m=m, n=n, k=k, copies=copies)
    contest(contestants, run, add, f"matmul {name}", f"M={m} n={n} k={k}", nbytes=4 * (n * k + m * k + m * n),
            operations=2 * m * n * k)


def contest_attention(shapes, n_context, begun, effort, run, add):
    heads = {"n_heads": shapes.n_heads, "n_kv_heads": shapes.n_kv_heads, "head_dim": shapes.head_dim}
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, shapes.q_dim), dtype=np.float32)
    new = rng.standard_normal((1, shapes.kv_dim), dtype=np.float32)
    n_seqs, n_layers = effort.n_copies(n_context * shapes.kv_token_nbytes(), at_most=64), shapes.n_layers
    seqs, _, _ = filled_sequences(new_pool(shapes, n_seqs, n_context), n_seqs, n_context, rng)
    for seq in seqs:
        seq.ensure_append(1)

    def call(i):
        pk.paged_attention(q, new, new, seqs[i // n_layers % n_seqs], i % n_layers, **heads)

    what = f"M=1 ctx={n_context}, 1 layer"
    contestants = [Contestant("pagedkv", "paged, appends a row first", lambda: round_s(call))]
    contestants += open_peers(begun, "open_attention", f"attention {what}", run, **heads, n_context=n_context + 1,
                              copies=n_seqs * n_layers)
    contest(contestants, run, add, "attention", what, nbytes=(n_context + 1) * shapes.kv_token_nbytes() // n_layers,
            operations=shapes.attention_operations(n_context + 1) // n_layers)


def open_peers(begun, method, what, run, **arguments):
    ready = []
    for engine, peer in begun:
        try:
            getattr(peer, method)(**arguments)
            ready.append(Contestant(engine, "", peer.time))
        except PeerFailed as error:
            run.skip(f"{engine} {what}", str(error))
    return ready


# ---------------------------------------------------------------------------------------------------
# The same bits


def same_bits(source, found, effort, run):
    """One row under M sequences and on one and two threads, by each engine.

    Returns
    -------
    list of dict
        As :func:`pagedkv.bench.engines.compare_runs`, with ``engine``, ``what`` and ``note``.
    """
    shapes = find_shapes(source)
    batches, threads = effort.pick((1, 8, 32), (1, 3)), (1, 2)
    n, n_new = 32, effort.pick(32, 4)
    prompts = np.random.default_rng(10).integers(0, shapes.vocab_size, (max(batches), n)).tolist()
    prompts[0] = fixed_prompt(source, n) or prompts[0]
    table = []

    def take(engine, what, note, results):
        table.extend({"engine": engine, "what": what, "note": note, **each} for each in results)
        report.print_same_bits(table[-len(results):])

    for kind, path in shared_files(source, run):
        with ExitStack() as stack:
            for engine, note, side in started(kind, path, found, shapes, run, stack):
                try:
                    take(engine, kind, note, side.bits(prompts=prompts, batches=batches, threads=threads, n_new=n_new))
                except PeerFailed as error:
                    run.skip(f"{engine} {kind}", str(error))
    n, k = shapes.matrices["gate_up"]
    what = f"matmul n={n} k={k}"
    rng = np.random.default_rng(0)
    w, x = pk.pack(rng.standard_normal((n, k), dtype=np.float32)), rng.standard_normal((64, k), dtype=np.float32)
    before = pk.get_num_threads()

    def ours(m, n_threads):
        pk.set_num_threads(n_threads)
        return [0], pk.matmul(x[:m], w)[:1]

    def theirs(engine):
        rows = {}
        for n_threads in threads:
            with Peer(engine, threads=n_threads) as peer:
                rows[n_threads] = np.array(peer.first_rows(n=n, k=k, batches=batches), np.float32)
        return lambda m, n_threads: ([0], rows[n_threads][None, batches.index(m)])

    take("pagedkv", what, "", compare_runs(ours, batches, threads))
    pk.set_num_threads(before)
    for engine in ("torch", "numpy"):
        if engine in found:
            try:
                take(engine, what, "", compare_runs(theirs(engine), batches, threads))
            except PeerFailed as error:
                run.skip(f"{engine} {what}", str(error))
    return table


TEXT = ("The lighthouse keeper wrote in his log every evening, and what he wrote was mostly about the weather. "
        "One day in the autumn, a ship came closer than any ship had come before, and he")  # fmt: skip


def fixed_prompt(source, n):
    """The first `n` tokens of a text, or None where the model brings no tokenizer."""
    try:
        with open_model(source) as file:
            ids = pk.Tokenizer.from_model_file(file).encode(TEXT)
    except pk.FormatError:
        return None
    return list(ids[:n]) if len(ids) >= n else None


# ---------------------------------------------------------------------------------------------------


def measure(path_or_name, names, effort, run):
    """The contests: whole steps on each file, then matmul and attention.

    Parameters
    ----------
    path_or_name : str or None
        None: the default model.
    names : list of str
        Peers that are asked for.
    effort : Effort
    run : Run
    """
    found = installed(names, run)
    source = hub.find_model(path_or_name or DEFAULT_MODEL)
    if found.keys() & {"llama.cpp", "openvino"}:
        for kind, path in shared_files(source, run):
            whole_steps(kind, path, found, effort, run)
    if found.keys() & {"torch", "numpy"} and not run.files:
        kernels(find_shapes(source), found, effort, run)


def measure_same_bits(path_or_name, names, effort, run):
    """The table of the same bits; see :func:`same_bits`."""
    run.same_bits =  same_bits(hub.find_model(path_or_name or DEFAULT_MODEL), installed(names, run), effort, run)
