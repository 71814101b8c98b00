"""Numbers for Prometheus, named as vLLM's with the prefix ``pagedkv:``."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

# Seconds; from a step of a small model to a long wait in the queue.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Numbers of one server, in a registry of its own.

    Parameters
    ----------
    llm : AsyncLLM
        Asked for its numbers at each reading.
    model_name : str
        Label of all.
    """

    def __init__(self, llm, model_name):
        self._llm, self._model_name, self._registry = llm, model_name, CollectorRegistry()

        def make(kind, name, what, labels=(), **options):
            metric = kind(f"pagedkv:{name}", what, ["model_name", *labels], registry=self._registry, **options)
            return metric if labels else metric.labels(model_name)

        self._prompt_tokens = make(Counter, "prompt_tokens", "Tokens of prompts that were taken.")
        self._ended = make(Counter, "request_success", "Choices that ended, by reason.", ["finished_reason"])
        self._first = make(Histogram, "time_to_first_token_seconds", "From a request to its first token.", buckets=BUCKETS)
        self._between = make(Histogram, "inter_token_latency_seconds", "Between outputs of one choice.", buckets=BUCKETS)
        self._whole = make(Histogram, "e2e_request_latency_seconds", "From a request to its end.", buckets=BUCKETS)
        self._registry.register(self)

    def collect(self):
        """The engine's own numbers, for the registry."""
        stats = self._llm.stats()
        for name, what, value in (
            ("num_requests_running", "Choices that hold blocks.", stats["running"]),
            ("num_requests_waiting", "Choices that wait for their turn.", stats["waiting"]),
            ("kv_cache_usage_perc", "Part of the blocks that running choices hold; 1 is all.",
             stats["blocks_used"] / self._llm.pool.n_blocks),
            ("kv_cache_blocks_shared", "Blocks that several running choices hold; the prefix cache is not counted.",
             stats["blocks_shared"]),
            ("kv_cache_blocks_cached", "Blocks kept for later prompts, evicted when needed.", stats["blocks_cached"]),
        ):  # fmt: skip
            gauge = GaugeMetricFamily(f"pagedkv:{name}", what, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, what, key in (
            ("prefix_cache_queries", "Tokens looked for in the prefix cache.", "prefix_queries"),
            ("prefix_cache_hits", "Tokens found there.", "prefix_hits"),
            ("num_preemptions", "Times that a choice gave its blocks up, to be computed again.", "preemptions"),
            ("generation_tokens", "Tokens drawn.", "tokens"),
            ("spec_decode_num_draft_tokens", "Tokens that speculation proposed.", "drafted"),
            ("spec_decode_num_accepted_tokens", "Those that were drawn then.", "accepted"),
        ):
            counter = CounterMetricFamily(f"pagedkv:{name}", what, labels=["model_name"])
            counter.add_metric([self._model_name], stats[key])
            yield counter

    def text(self):
        return generate_latest(self._registry)

    def watch(self, n_prompt_tokens):
        """Of a request that begins now: a function for the pieces of each output, and one for its end."""
        began, last = time.perf_counter(), {}
        self._prompt_tokens.inc(n_prompt_tokens)

        def note(pieces):
            now = time.perf_counter()
            if not last and pieces:
                self._first.observe(now - began)
            for index, _, _, reason in pieces:
                if index in last:
                    self._between.observe(now - last[index])
                last[index] = now
                if reason is not None:
                    self._ended.labels(self._model_name, reason).inc()

        def end():
            self._whole.observe(time.perf_counter() - began)

        return note, end
