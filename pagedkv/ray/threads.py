"""How many threads an actor of Ray computes with."""

import ray

import pagedkv


def use_assigned_cpus():
    """Set the thread count to the CPUs that Ray counts for this actor, so that the two cannot differ.

    Outside an actor nothing changes: a batch tried at a prompt computes with the threads of that process.

    Raises
    ------
    ValueError
        The actor's `num_cpus` is no positive integer: it would compute with more or less than Ray counts.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return
    n = ray.get_runtime_context().get_assigned_resources().get("CPU", 0)
    if n < 1 or n != int(n):
        raise ValueError(f"num_cpus is the number of threads, an integer from 1 on, not {n:g}")
    pagedkv.set_num_threads(int(n))
