"""Timing, the rows that come of it, and the checks before it."""

import gc
import statistics
import time
from dataclasses import dataclass, field


class CheckFailed(Exception):
    """A result is wrong, so its time would mean nothing."""


def check(holds, what):
    """Refuse to time a wrong result."""
    if not holds:
        raise CheckFailed(f"{what}: the result is wrong; nothing was timed")


@dataclass(frozen=True)
class Effort:
    """How much time and memory a run spends.

    Attributes
    ----------
    quick : bool
        A smoke test: small sizes, few repetitions, figures without worth.
    n_repeats : int
        Repetitions of a timing; median and best are over these.
    repeat_s : float
        A repetition makes as many calls as fill this, so that the clock's resolution and one
        interrupt do not count.
    budget_s : float
        Slow calls get fewer repetitions, at least 3, to stay within it.
    cold_nbytes : int
        Data that a cold row goes round in, so that it comes from memory and not from the cache.
    """

    quick: bool = False
    n_repeats: int = 11
    repeat_s: float = 0.02
    budget_s: float = 6.0
    cold_nbytes: int = 320 << 20

    def pick(self, full, quick):
        """`full`, or `quick` in a quick run."""
        return quick if self.quick else full

    def n_copies(self, nbytes, at_most=4096):
        """Copies of something of `nbytes` that do not fit a cache together."""
        return max(1, min(at_most, -(-self.cold_nbytes // nbytes)))


QUICK = Effort(quick=True, n_repeats=3, repeat_s=0.001, budget_s=0.5, cold_nbytes=8 << 20)


@dataclass(frozen=True)
class Timing:
    """Seconds of one call over `k` repetitions of `n_calls` calls.

    ``spread`` is the distance of the quartiles, as a fraction of the median.
    """

    median_s: float
    best_s: float
    spread: float
    k: int
    n_calls: int = 1

    @classmethod
    def of(cls, seconds, n_calls=1):
        """From the seconds a call of each repetition."""
        ordered = sorted(seconds)
        median = statistics.median(ordered)
        quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [median] * 3
        return cls(median, ordered[0], (quartiles[2] - quartiles[0]) / median, len(ordered), n_calls)


def time_calls(call, effort, reset=None, n_repeats=None, n_calls=None):
    """Time ``call(i)`` for i = 0, 1, 2, ...

    Parameters
    ----------
    call : callable
        Takes the call's number, to go round among copies.
    effort : Effort
    reset : callable, optional
        ``reset(i)`` undoes call i, outside the timed part. The clock is then read for each call.
    n_repeats, n_calls : int, optional
        In place of what `effort` says.

    Returns
    -------
    Timing
    """
    clock = time.perf_counter
    i = 0

    def repeat(n):
        nonlocal i
        if reset is None:
            begin = clock()
            for i in range(i, i + n):
                call(i)
            total = clock() - begin
            i += 1
            return total
        total = 0.0
        for i in range(i, i + n):
            begin = clock()
            call(i)
            total += clock() - begin
            reset(i)
        i += 1
        return total

    collecting = gc.isenabled()
    gc.disable()  # a collection belongs to nobody's call
    try:
        call_s = max(repeat(1), 1e-9)  # warm-up: first touch of pages, start of the threads
        n = n_calls or 1
        if n_calls is None:
            # Grow until the estimate rests on more than the clock's grain, then aim for repeat_s.
            while (call_s := max(repeat(n), 1e-9) / n) * n < effort.repeat_s / 4:
                n *= 4
            n = max(1, round(effort.repeat_s / call_s))
        k = n_repeats or effort.n_repeats
        k = min(k, max(3, int(effort.budget_s / (call_s * n))))
        return Timing.of([repeat(n) / n for _ in range(k)], n)
    finally:
        if collecting:
            gc.enable()


@dataclass
class Row:
    """One result. :meth:`limit_by` sets it beside the ceilings.

    Attributes
    ----------
    section, name, shape : str
        Together with `engine` they identify a row between runs.
    timing : Timing
        Seconds of one call.
    nbytes : int
        Bytes that the call has to move, read and written; 0 where that is no useful count.
    operations : int
        Additions, multiplications and so on; 0 likewise.
    cold : bool
        The bytes come from memory. A hot row's come from the cache: no ceiling here limits them.
    n_tokens : int
        Tokens that the call brings forth or takes in; 0 where it deals in none.
    engine : str
        Who did it.
    note : str
        The arithmetic and whatever else sets the engine's work apart; empty for float32 throughout.
    """

    section: str
    name: str
    shape: str
    timing: Timing
    nbytes: int = 0
    operations: int = 0
    cold: bool = True
    n_tokens: int = 0
    engine: str = "pagedkv"
    note: str = ""
    limit: str = ""
    limit_s: float = 0.0
    probes: list = field(default_factory=list)

    def limit_by(self, probes, numbers):
        """Take the better of two probes of the ceilings, those around this row, as what it cannot pass."""
        self.probes = list(numbers)
        if not self.cold or not probes or not (self.nbytes or self.operations):
            return
        read_s = self.nbytes / (max(probe.read_gb_s for probe in probes) * 1e9)
        fma_s = self.operations / (max(probe.fma_gflop_s for probe in probes) * 1e9)
        self.limit, self.limit_s = ("read", read_s) if read_s >= fma_s else ("fma", fma_s)

    @property
    def fraction(self):
        """Share of the limit that the median reaches, or None without a limit."""
        return self.limit_s / self.timing.median_s if self.limit else None

    @property
    def gb_s(self):
        return self.nbytes / self.timing.median_s / 1e9 if self.nbytes else None

    @property
    def gflop_s(self):
        return self.operations / self.timing.median_s / 1e9 if self.operations else None

    @property
    def tokens_s(self):
        return self.n_tokens / self.timing.median_s if self.n_tokens else None

    def as_dict(self):
        """The row as it stands in the JSON file; README.md documents the fields."""
        t = self.timing
        return {
            "engine": self.engine, "section": self.section, "name": self.name, "shape": self.shape,
            "note": self.note,
            "k": t.k, "n_calls": t.n_calls, "median_s": t.median_s, "best_s": t.best_s, "spread": t.spread,
            "nbytes": self.nbytes, "operations": self.operations, "cold": self.cold, "n_tokens": self.n_tokens,
            "gb_s": self.gb_s, "gflop_s": self.gflop_s, "tokens_s": self.tokens_s,
            "limit": self.limit or None, "limit_s": self.limit_s if self.limit else None,
            "fraction": self.fraction, "probes": self.probes,
        }  # fmt: skip
