"""More replicas or more threads: the same rows through LLM and through actors of Ray.

    python -m pagedkv.bench.scale [--cores 2] [--rows 128] [--tokens 64] [--rounds 3] [--weights auto]

In turns: LLM in a process without Ray, on one thread and on all cores; one actor with all cores for its threads; as
many actors as cores, each with one thread. Every row is a prompt of the standard library's documentation with a seed
of its own, and each actor gets its part of them as one batch. The tokens are compared with those of LLM before a figure
is printed. Printed, medians of the rounds: generated tokens/s from the first batch's beginning to the last one's end,
seconds of the whole job with the start of the actors, the largest resident memory of one process.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from statistics import median

import pagedkv as pk


def prompts_and_params(args):
    from pagedkv.bench.engine import real_prompts

    rows = [{"prompt": prompt, "seed": i} for i, prompt in enumerate(real_prompts(args.rows))]
    return rows, {"temperature": 0.8, "top_p": 0.95, "max_tokens": args.tokens, "ignore_eos": True}


def resident_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def plain(args):
    """LLM alone; prints its tokens and figures as JSON."""
    rows, params = prompts_and_params(args)
    started = time.time()
    llm = pk.LLM(args.model, num_threads=args.threads, weights=args.weights)
    begin = time.time()
    outs = llm.generate([row["prompt"] for row in rows],
                        [pk.SamplingParams(**params, seed=row["seed"]) for row in rows], use_tqdm=False)  # fmt: skip
    end = time.time()
    json.dump({"tokens": [out.outputs[0].token_ids for out in outs], "busy_s": end - begin, "job_s": end - started,
               "resident_mb": resident_mb()}, sys.stdout)  # fmt: skip


def in_a_process(args, threads):
    """:func:`plain` where nothing was loaded before."""
    counts = {"--rows": args.rows, "--tokens": args.tokens, "--threads": threads}
    command = [sys.executable, "-m", "pagedkv.bench.scale", "--model", args.model, "--weights", args.weights,
               *(str(each) for pair in counts.items() for each in pair)]  # fmt: skip
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.splitlines()[-1])


def with_ray(args, n_actors, threads):
    import pyarrow as pa
    import ray

    from pagedkv.ray import BatchLLM

    class Timed(BatchLLM):
        def __call__(self, batch):
            begin = time.time()
            found = super().__call__(batch)
            for name, value in (("begin", begin), ("end", time.time()), ("resident_mb", resident_mb())):
                found = found.append_column(name, pa.array([value] * len(found)))
            return found

    rows, params = prompts_and_params(args)
    rows = [{"row": i} | row for i, row in enumerate(rows)]
    options = {"model": args.model, "weights": args.weights, "row_params": ["seed"], "sampling_params": params}
    started = time.time()
    found = ray.data.from_items(rows, override_num_blocks=n_actors).map_batches(
        Timed, fn_constructor_kwargs=options, num_cpus=threads, batch_size=None, batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=n_actors, max_tasks_in_flight_per_actor=1)).take_all()  # fmt: skip
    job_s = time.time() - started
    found.sort(key=lambda row: row["row"])
    return {"tokens": [row["generated_token_ids"] for row in found], "job_s": job_s,
            "busy_s": max(row["end"] for row in found) - min(row["begin"] for row in found),
            "resident_mb": max(row["resident_mb"] for row in found)}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--cores", type=int, default=pk.get_num_threads())
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)  # of the process that in_a_process starts
    args = parser.parse_args()
    if args.threads is not None:
        return plain(args)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(num_cpus=args.cores, include_dashboard=False, log_to_driver=False, logging_level="warning",
             object_store_memory=100 << 20)  # fmt: skip
    ray.data.DataContext.get_current().enable_progress_bars = False
    n = args.cores
    setups = {"LLM, 1 thread": (in_a_process, 1), f"LLM, {n} threads": (in_a_process, n),
              f"Ray, 1 actor x {n} threads": (with_ray, 1, n),
              f"Ray, {n} actors x 1 thread": (with_ray, n, 1)}  # fmt: skip
    rounds = [{name: run(args, *counts) for name, (run, *counts) in setups.items()} for _ in range(args.rounds)]
    want = rounds[0]["LLM, 1 thread"]["tokens"]
    if not all(found["tokens"] == want for each in rounds for found in each.values()):
        raise SystemExit("the tokens differ")
    n_tokens = sum(map(len, want))
    print(f"{args.model}, {args.weights} weights, {args.rows} rows, {n_tokens} tokens, {args.rounds} rounds, "
          f"{pk.isa()}; the same tokens everywhere\n")  # fmt: skip
    print("| | tokens/s | lowest - highest | whole job, s | MB a process |\n|---|---|---|---|---|")
    for name in setups:
        rates = [n_tokens / each[name]["busy_s"] for each in rounds]
        job_s, mb = (median(each[name][what] for each in rounds) for what in ("job_s", "resident_mb"))
        print(f"| {name} | {median(rates):.0f} | {min(rates):.0f} - {max(rates):.0f} | {job_s:.1f} | {mb:.0f} |")


if __name__ == "__main__":
    main()
