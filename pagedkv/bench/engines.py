"""The peers, each in a Python of its own: ``python -P engines.py ENGINE`` answers requests, one JSON object a line.

Nothing of pagedkv is imported in there: no engine sees another's threads, OpenMP settings or memory. The parent is
:mod:`pagedkv.bench.peers`, which takes turns with it.
"""

import json
import os
import sys
import time

import numpy as np

ROUND_S = 0.1  # a round of short calls fills this


def round_s(call):
    """Seconds of one ``call(i)``, i = 0, 1, 2, ..., over as many as fill a round."""
    clock = time.perf_counter
    call(0)
    n, took = 1, 0.0
    while True:
        begin = clock()
        for i in range(n):
            call(i)
        took = clock() - begin
        if took >= ROUND_S:
            return took / n
        n = max(2 * n, round(1.2 * n * ROUND_S / max(took, 1e-6)) if took > ROUND_S / 10 else 8 * n)


def row_difference(first, other):
    """How one sequence's run differs from the same run under other conditions.

    first, other : (ids, logits)
        Greedy ids and, where they can be had, the logits float32 [n, vocab_size] that they come from, or None.

    Returns ``same_ids`` and ``parted_at`` (the first id that differs, or None); with logits also ``same_bits`` and
    ``max_difference``, up to and with the first id that differs: what follows has another context.
    """
    (ids_a, logits_a), (ids_b, logits_b) = first, other
    ids_a, ids_b = list(map(int, ids_a)), list(map(int, ids_b))
    parted = next((i for i, (a, b) in enumerate(zip(ids_a, ids_b)) if a != b), None)
    found = {"same_ids": parted is None, "parted_at": parted, "same_bits": None, "max_difference": None}
    if logits_a is not None:
        n = len(ids_a) if parted is None else parted + 1
        found["same_bits"] = bool((logits_a[:n] == logits_b[:n]).all()) and parted is None
        found["max_difference"] = float(np.abs(logits_a[:n].astype(np.float64) - logits_b[:n]).max())
    return found


def compare_runs(run, batches, threads):
    """``run(m, n_threads)`` for all of both, each set beside the first; a list of what :func:`row_difference` says."""
    first, found = None, []
    for n_threads in threads:
        for m in batches:
            result = run(m, n_threads)
            first = result if first is None else first
            found.append({"m": m, "threads": n_threads, **row_difference(first, result)})
    return found


class LlamaCpp:
    """llama.cpp through llama_cpp's low-level batch API: M sequences decode in one call."""

    def __init__(self, file, threads):
        import llama_cpp

        self.lib, self.threads = llama_cpp, threads
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {os.path.basename(file)}")
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.context = None

    def _new_context(self, n_seqs, n_tokens, n_batch, unified, threads):
        """For `n_seqs` sequences; `n_tokens` cells for each, or, unified, for all."""
        self._close()
        params = self.lib.llama_context_default_params()
        params.n_ctx = n_tokens if unified else n_seqs * n_tokens
        params.n_seq_max = n_seqs
        params.n_batch = params.n_ubatch = n_batch
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = unified
        params.no_perf = True
        self.context = self.lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context for {n_seqs} sequences")
        self.memory = self.lib.llama_get_memory(self.context)
        self.batch = self.lib.llama_batch_init(n_batch, 0, 1)

    def _close(self):
        if self.context is not None:
            self.lib.llama_batch_free(self.batch)
            self.lib.llama_free(self.context)
            self.context = None

    def _fill(self, rows):
        """Put rows ``(token, position, sequence, wants_logits)`` into the batch."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq, wants) in enumerate(rows):
            batch.token[i], batch.pos[i] = int(token), position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = wants

    def _decode(self, n_outputs):
        """Compute the batch; logits [n_outputs, n_vocab], a view that the next call overwrites."""
        status = self.lib.llama_decode(self.context, self.batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returns {status}")
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), (n_outputs, self.n_vocab))

    def _append(self, tokens, seq, begin=0):
        for at in range(0, len(tokens), 512):
            part = tokens[at:at + 512]
            self._fill([(token, begin + at + i, seq, i == len(part) - 1) for i, token in enumerate(part)])
            logits = self._decode(1)
        return logits

    def open(self, prompts, m, room, shared):
        """A context of `m` sequences: of a prompt each, or all forks of the one there is. Greedy ids after each
        prompt."""
        self.m, self.n_context = m, len(prompts[0])
        per_seq = self.n_context + room
        n_tokens = self.n_context + m * room if shared else per_seq
        self._new_context(m, -(-n_tokens // 256) * 256, max(512, m), shared, self.threads)
        first = [int(self._append(prompt, seq)[0].argmax()) for seq, prompt in enumerate(prompts)]
        for seq in range(1, m if shared else 0):
            self.lib.llama_memory_seq_cp(self.memory, 0, seq, -1, -1)
        return first

    def decode(self, start, n_steps):
        """Seconds of a step, the mean of `n_steps` greedy ones; argmax outside the time. The sequences keep their
        length."""
        tokens, took = start, 0.0
        for i in range(-1, n_steps):  # the first one warms up
            self._fill([(token, self.n_context + max(i, 0), seq, 1) for seq, token in enumerate(tokens)])
            begin = time.perf_counter()
            logits = self._decode(self.m)
            if i >= 0:
                took += time.perf_counter() - begin
                tokens = logits.argmax(1)
            else:
                self._truncate()
        self._truncate()
        return took / n_steps

    def _truncate(self):
        for seq in range(self.m):
            self.lib.llama_memory_seq_rm(self.memory, seq, self.n_context, -1)

    def prefill(self, tokens):
        """Seconds of a prompt in an empty context, logits of its last token."""
        self._new_context(1, -(-len(tokens) // 256) * 256, 512, False, self.threads)
        self._append(tokens, 0)
        self.lib.llama_memory_clear(self.memory, True)
        begin = time.perf_counter()
        self._append(tokens, 0)
        return time.perf_counter() - begin

    def bits(self, prompts, batches, threads, n_new):
        def run(m, n_threads):
            n = len(prompts[0])
            self._new_context(m, -(-(n + n_new) // 256) * 256, max(512, m * n), False, n_threads)
            self._fill([(token, i, seq, i == n - 1) for seq in range(m) for i, token in enumerate(prompts[seq])])
            ids, kept = [], []
            for at in range(n, n + n_new):
                logits = self._decode(m)
                kept.append(logits[0].copy())
                tokens = logits.argmax(1)
                ids.append(int(tokens[0]))
                self._fill([(token, at, seq, 1) for seq, token in enumerate(tokens)])
            return ids, np.array(kept)

        return compare_runs(run, batches, threads)


class OpenVino:
    """OpenVINO GenAI's continuous batching over the GGUF file."""

    def __init__(self, file, threads, options):
        self.file, self.threads, self.options = file, threads, options
        self.pipe, self.prompts = None, ()

    def _new_pipe(self, n_rows, threads, keeps_prompts=False):
        """A pipeline that takes `n_rows` rows in a step, so that all prompts go in together.

        keeps_prompts: a prompt that came before is not computed again."""
        import openvino
        import openvino_genai

        self.lib, self.tensor = openvino_genai, openvino.Tensor
        self.pipe = None
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = max(256, n_rows)
        scheduler.max_num_seqs = 256
        scheduler.enable_prefix_caching = keeps_prompts
        options = {"INFERENCE_NUM_THREADS": threads, **self.options}
        self.pipe = openvino_genai.ContinuousBatchingPipeline(self.file, scheduler, "CPU", options)

    def _generate(self, prompts, n_new):
        config = self.lib.GenerationConfig()
        config.max_new_tokens = n_new
        config.min_new_tokens = n_new
        config.ignore_eos = True
        config.do_sample = False
        inputs = [self.tensor(np.array([prompt], np.int64)) for prompt in prompts]
        return self.pipe.generate(inputs, [config] * len(inputs))

    def open(self, prompts, m, room, shared):
        self.prompts = prompts
        self._new_pipe(sum(map(len, prompts)), self.threads, keeps_prompts=True)
        # The memory of the cache grows now.
        return [int(each.m_generation_ids[0][0]) for each in self._generate(prompts, 2)]

    def decode(self, start, n_steps):
        """Seconds of a step: the difference of two lengths, so that the prompts drop out; they are in the prefix
        cache besides, each sequence's its own. Sampling is in the time."""
        took = []
        for n_new in (1, 1 + n_steps):
            begin = time.perf_counter()
            self._generate(self.prompts, n_new)
            took.append(time.perf_counter() - begin)
        return (took[1] - took[0]) / n_steps

    def prefill(self, tokens):
        if self.prompts is not None:
            self.prompts = None
            self._new_pipe(len(tokens), self.threads)
            self._generate([tokens], 1)
        begin = time.perf_counter()
        self._generate([tokens], 1)
        return time.perf_counter() - begin

    def bits(self, prompts, batches, threads, n_new):
        def run(m, n_threads):
            self._new_pipe(len(prompts) * len(prompts[0]), n_threads)
            return self._generate(prompts[:m], n_new)[0].m_generation_ids[0], None

        return compare_runs(run, batches, threads)


def check_columns(x, w, y):
    """The first columns of ``y = x w^T`` are what float64 says, or nothing is timed."""
    want = x.astype(np.float64) @ w[:8].T.astype(np.float64)
    if not np.allclose(y[:, :8], want, atol=1e-5 * x.shape[1]):
        raise ArithmeticError("the product is wrong")


class Torch:
    """torch on float32 arrays: matmul, and attention over contiguous K and V."""

    def __init__(self, threads):
        import torch

        self.lib = torch
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)

    def open_matmul(self, m, n, k, copies):
        torch = self.lib
        torch.manual_seed(0)
        weights = [torch.randn(n, k) for _ in range(copies)]
        x = torch.randn(m, k)
        check_columns(x.numpy(), weights[0].numpy(), torch.nn.functional.linear(x, weights[0]).numpy())
        self.call = lambda i: torch.nn.functional.linear(x, weights[i % copies])

    def open_attention(self, n_heads, n_kv_heads, head_dim, n_context, copies):
        torch = self.lib
        sets = [torch.randn(2, 1, n_kv_heads, n_context, head_dim) for _ in range(copies)]
        # The query heads of a KV head as its query rows: K and V are read once for all of them.
        q = torch.randn(1, n_kv_heads, n_heads // n_kv_heads, head_dim)
        attention = torch.nn.functional.scaled_dot_product_attention
        k, v = sets[0].double()
        want = (q.double() @ k.transpose(-1, -2) / head_dim**0.5).softmax(-1) @ v
        if not torch.allclose(attention(q, *sets[0]).double(), want, atol=1e-4):
            raise ArithmeticError("the attention is wrong")

        def call(i):
            k, v = sets[i % copies]
            attention(q, k, v)

        self.call = call

    def time(self):
        return round_s(self.call)

    def first_rows(self, n, k, batches):
        """Row 0 of the product of M rows, for each M."""
        rng = np.random.default_rng(0)
        w, x = (self.lib.from_numpy(rng.standard_normal((rows, k), dtype=np.float32)) for rows in (n, 64))
        return [self.lib.nn.functional.linear(x[:m], w)[0].tolist() for m in batches]


class Numpy:
    """NumPy's matmul on float32 arrays; its threads are set in the environment before it loads."""

    def __init__(self, threads):
        pass

    def open_matmul(self, m, n, k, copies):
        rng = np.random.default_rng(0)
        weights = [rng.standard_normal((n, k), dtype=np.float32) for _ in range(copies)]
        x, out = rng.standard_normal((m, k), dtype=np.float32), np.empty((m, n), np.float32)
        check_columns(x, weights[0], x @ weights[0].T)
        self.call = lambda i: np.matmul(x, weights[i % copies].T, out=out)

    def time(self):
        return round_s(self.call)

    def first_rows(self, n, k, batches):
        """Row 0 of the product of M rows, for each M."""
        rng = np.random.default_rng(0)
        w, x = rng.standard_normal((n, k), dtype=np.float32), rng.standard_normal((64, k), dtype=np.float32)
        return [(x[:m] @ w.T)[0].tolist() for m in batches]


ENGINES = {"llama.cpp": LlamaCpp, "openvino": OpenVino, "torch": Torch, "numpy": Numpy}


def serve(engine, requests, answers):
    """Answer requests until there are no more: the first makes the engine, the others name a method of it."""
    made = None
    for line in requests:
        request = json.loads(line)
        try:
            if made is None:
                made, answer = ENGINES[engine](**request), None
            else:
                answer = getattr(made, request.pop("do"))(**request)
            reply = {"answer": answer}
        except Exception as error:  # any failure of a peer's is a line of the report
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(reply), file=answers, flush=True)


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    serve(sys.argv[1], sys.stdin, channel)
    channel.close()
    os._exit(0)  # without the libraries' own end, which some do not survive
