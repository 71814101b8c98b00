"""Random requests with cancellations at a nearly full pool, for as long as asked.

    python tests/soak.py [--seconds 3600] [--model smollm2-135m] [--seed 0]

Rounds: clients of an AsyncLLM send requests of all kinds for some seconds and leave a third of them midway, in a pool so
small that samples are preempted all the time; every second round speculates. Between rounds nothing runs: the pool must be
whole again, and every output that came to its end is computed once more, alone in a large fresh pool: token ids, texts and
log-probabilities must be equal. A line a minute: requests, tokens, memory, open files, threads. Ends with status 1 at the
first difference. Throughput is tokens a second of this process's own CPU time, within rounds, so that other work on the
machine counts little; and as the machine itself is not always equally fast, each minute a new process does the same for
some seconds, and the two are compared. Without --model it is a tiny seeded model, which does tens of thousands of requests
an hour.
"""

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pagedkv as pk

PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


def tiny_model():
    from tiny import tiny_config, tiny_tensors, write_hf

    config = tiny_config(context_len=256)
    directory = Path(tempfile.mkdtemp(prefix="soak"))
    write_hf(directory, config, tiny_tensors(config, 1))
    return pk.LlamaModel.load(directory)


class Load:
    """Requests and their outcomes.

    Parameters
    ----------
    model : LlamaModel
    rng : random.Random
    most : int
        Tokens of a prompt, and of a sample, at most.
    """

    def __init__(self, model, rng, most):
        self.model, self.rng, self.most = model, rng, most
        self.vocab_size = min(model.config.vocab_size, 5000)
        self.beginnings = [self._ids(most) for _ in range(4)]  # prompts begin alike, for the prefix cache
        self.done = []  # (ids, params, RequestOutput) to be computed once more
        self.n_tokens = self.n_ended = self.n_left = self.n_compared = 0

    def _ids(self, n):
        return [self.rng.randrange(3, self.vocab_size) for _ in range(n)]

    def request(self):
        rng = self.rng
        beginning = rng.choice(self.beginnings)
        ids = beginning[:rng.randrange(self.most)] + self._ids(rng.randint(1, 8))
        temperature = rng.choice((0, 0.3, 0.8, 1.0, 1.5))
        params = pk.SamplingParams(
            n=rng.choice((1, 1, 1, 2, 3)) if temperature else 1, temperature=temperature, seed=rng.randrange(1 << 32),
            top_p=rng.choice((1, 0.9)), top_k=rng.choice((0, 5)), min_p=rng.choice((0, 0, 0.02)), max_tokens=rng.randint(1, self.most),
            logprobs=rng.choice((None, 0, 3)), prompt_logprobs=rng.choice((None,) * 7 + (0,)), ignore_eos=rng.random() < 0.5,
            repetition_penalty=rng.choice((1, 1, 1.2)), frequency_penalty=rng.choice((0, 0, 0.5)),
            stop_token_ids=self._ids(rng.choice((0, 2))), min_tokens=rng.choice((0, 0, 1)),
            logit_bias=rng.choice((None, None, {5: 3.0})),
        )  # fmt: skip
        return ids, params

    async def client(self, llm, until):
        while time.monotonic() < until:
            ids, params = self.request()
            leave_after = self.rng.randint(1, self.most) if self.rng.random() < 1 / 3 else None
            outputs, n_seen = llm.generate(ids, params), 0
            async for output in outputs:
                n_seen += 1
                if n_seen == leave_after and not output.finished:
                    break
            await outputs.aclose()
            self.n_tokens += sum(len(sample.token_ids) for sample in output.outputs)
            if output.finished:
                self.n_ended += 1
                self.done.append((ids, params, output))
            else:
                self.n_left += 1

    async def round(self, llm, seconds, n_clients):
        until = time.monotonic() + seconds
        await asyncio.gather(*(self.client(llm, until) for _ in range(n_clients)))
        for _ in range(1000):  # requests that were left end with the engine's next step
            stats = llm.stats()
            if stats["running"] == stats["waiting"] == 0:
                return stats
            await asyncio.sleep(0.01)
        raise SystemExit(f"requests that were left still run: {stats}")

    def compare(self, alone):
        """Every output that ended, against the same request alone."""
        for ids, params, output in self.done:
            want, = alone.generate([ids], params, use_tqdm=False)
            if (want.outputs, want.prompt_logprobs) != (output.outputs, output.prompt_logprobs):
                raise SystemExit(f"differs from itself alone: {ids} {params}\n{output.outputs}\n{want.outputs}")
        self.n_compared += len(self.done)
        self.done.clear()


def own():
    """Resident MiB, open files, threads of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_NBYTES / 2**20
    return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def of_a_new_process(args):
    """Tokens a CPU second of the same load in a process that has just begun."""
    command = [sys.executable, __file__, "--yardstick", *sys.argv[1:]]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


async def yardstick(args, load, llms):
    for seconds in (1, 2):  # warm, then in earnest
        cpu_s, n_before = 0.0, load.n_tokens
        for llm in llms:
            before = time.process_time()
            await load.round(llm, seconds, args.n_clients)
            cpu_s += time.process_time() - before
    print((load.n_tokens - n_before) / cpu_s)


async def soak(args):
    model = pk.LlamaModel.load(args.model) if args.model else tiny_model()
    load = Load(model, random.Random(args.seed), most=48)
    options = {"n_blocks": args.n_blocks, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    llms = [pk.AsyncLLM(pk.LLM(model, speculative=each, **options)) for each in (None, "ngram")]
    if args.yardstick:
        return await yardstick(args, load, llms)
    alone = pk.LLM(model, n_blocks=64, enable_prefix_caching=False)
    print(f"{args.model or 'a tiny model'}, {pk.isa()}, {pk.get_num_threads()} threads, a pool of {args.n_blocks} blocks, "
          f"{args.n_clients} clients, seed {args.seed}", flush=True)  # fmt: skip
    started = shown = time.monotonic()
    minutes, cpu_s, n_before, n_rounds = [], 0.0, 0, 0
    while time.monotonic() - started < args.seconds:
        llm = llms[n_rounds % 2]
        n_rounds += 1
        before = time.process_time()
        stats = await load.round(llm, args.round_seconds, args.n_clients)
        cpu_s += time.process_time() - before
        if stats["blocks_used"] or stats["blocks_free"] + stats["blocks_cached"] != args.n_blocks:
            raise SystemExit(f"blocks are missing: {stats}")
        load.compare(alone)
        if time.monotonic() - shown >= 60:
            shown = time.monotonic()
            rate = (load.n_tokens - n_before) / cpu_s
            minutes.append(((shown - started) / 60, rate, rate / of_a_new_process(args), *own()))
            cpu_s, n_before = 0.0, load.n_tokens
            preempted = sum(each.stats()["preemptions"] for each in llms)
            print("{:3.0f} min  {:5.0f} tokens/CPU-s, {:.2f} of a new process  {:.1f} MiB  {} files  {} threads".format(*minutes[-1]),
                  f" {load.n_ended} ended and equal alone, {load.n_left} left midway, {preempted} preemptions", flush=True)  # fmt: skip
    for llm in llms:
        llm.shutdown()
    n = min(10, len(minutes) // 2)
    if n:
        for place, what in ((1, "tokens/CPU-s"), (2, "beside a new process")):
            first, last = (sum(minute[place] for minute in part) / n for part in (minutes[:n], minutes[-n:]))
            print(f"{what}: first {n} minutes {first:.4g}, last {n} {last:.4g}, {last / first - 1:+.1%}")
    print(f"{load.n_ended + load.n_left} requests, {load.n_tokens} tokens, {load.n_compared} outputs compared, no difference")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--round-seconds", type=float, default=5)
    parser.add_argument("--model", default="", help="default: a tiny one")
    parser.add_argument("--n-blocks", type=int, default=24)
    parser.add_argument("--n-clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--yardstick", action="store_true", help="print the tokens a CPU second of a few seconds, and end")
    asyncio.run(soak(parser.parse_args()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
