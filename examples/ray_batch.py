"""A Parquet file of questions becomes a folder of Parquet files with answers, on all machines of a Ray cluster.

    python examples/ray_batch.py questions.parquet answers/ --actors 4 --threads 2

The column `question` holds the texts. It runs on the cluster that RAY_ADDRESS names, or alone: then it starts one here.
"""

import argparse
import os

import ray
from pagedkv.ray import BatchLLM


def answer(source: str, target: str, model: str, actors: int, threads: int, max_tokens: int = 64) -> None:
    """Read, answer, write. Where an actor dies, the rows that it had are computed anew, and are the same."""
    wanted, there = actors * threads + 1, ray.cluster_resources().get("CPU", 0)
    if there < wanted:  # Ray would wait for ever
        raise SystemExit(f"{actors} actors of {threads} threads, and a CPU to read and write with, need {wanted} CPUs; the "
                         f"cluster has {there:g}")  # fmt: skip
    rows = ray.data.read_parquet(source).map_batches(
        BatchLLM,
        fn_constructor_kwargs={"model": model, "column": "question", "chat": True,
                               "sampling_params": {"temperature": 0.7, "max_tokens": max_tokens}},
        num_cpus=threads,  # also the threads of each actor
        # A batch takes long: none may wait in an actor while another one is idle.
        compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=1),
        batch_size=256,  # 64 of a batch's rows are decoded at a time, so a few times as many
        batch_format="pyarrow",
    )  # fmt: skip
    rows.write_parquet(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:  # "local": without it Ray looks for a cluster that runs here already, and then refuses a number of CPUs
        ray.init("local", num_cpus=args.actors * args.threads + 1)
    answer(args.source, args.target, args.model, args.actors, args.threads)
