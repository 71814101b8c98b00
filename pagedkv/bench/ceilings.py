"""What this machine cannot pass: read bandwidth and FMA rate of all threads, probed between the rows."""

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pagedkv.bench.measure import Row, Timing

SOURCE = Path(__file__).with_name("ceilings.c")

# Four times the last cache, so that less than a quarter of a pass can come from it; 512 MiB where that is
# not known or less.
READ_NBYTES = 512 << 20
CACHES_TIMES = 4


class NoCeilings(Exception):
    """The ceilings cannot be measured here."""


@dataclass(frozen=True)
class Probe:
    """Both ceilings at one moment: the best of `k` passes is the ceiling, the median shows the drift."""

    at_s: float
    read_gb_s: float
    read_median_gb_s: float
    fma_gflop_s: float
    fma_median_gflop_s: float
    k: int

    def as_dict(self):
        return asdict(self)


def last_cache_nbytes():
    """Bytes of the largest cache that the system tells of, or 0."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            size = file.read_text().strip()
            sizes.append(int(size.rstrip("KM")) << {"K": 10, "M": 20}.get(size[-1], 0))
        except (OSError, ValueError):
            pass
    return max(sizes)


def _compile(folder):
    """Build ceilings.c for this very machine; path of the library."""
    compiler = shlex.split(os.environ.get("CC", "")) or [c for c in ("cc", "gcc", "clang") if shutil.which(c)][:1]
    if not compiler:
        raise NoCeilings("there is no C compiler (set CC)")
    library = Path(folder) / "ceilings.so"
    openmp = ["-Xpreprocessor", "-fopenmp", "-lomp"] if sys.platform == "darwin" else ["-fopenmp"]
    command = [*compiler, "-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC", str(SOURCE),
               "-o", str(library), *openmp]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NoCeilings(f"the C compiler {compiler[0]} does not start ({error.strerror})") from None
    if done.returncode != 0:
        message = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise NoCeilings(f"the C compiler {compiler[0]} fails: {message[0].strip()}")
    return library


class Ceilings:
    """The compiled probe and its memory.

    Parameters
    ----------
    n_threads : int
        As many as the library uses, or the comparison would not be one.
    effort : Effort

    Raises
    ------
    NoCeilings
        No compiler, or no memory.
    """

    def __init__(self, n_threads, effort):
        with tempfile.TemporaryDirectory() as folder:
            lib = ctypes.CDLL(str(_compile(folder)))  # stays mapped after the file is gone
        lib.ceilings_alloc.restype = ctypes.c_void_p
        lib.ceilings_alloc.argtypes = [ctypes.c_int64, ctypes.c_int]
        lib.ceilings_read.restype = ctypes.c_float
        lib.ceilings_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
        lib.ceilings_fma.restype = ctypes.c_float
        lib.ceilings_fma.argtypes = [ctypes.c_int64, ctypes.c_float, ctypes.c_float, ctypes.c_int]
        lib.ceilings_fma_operations.restype = ctypes.c_int64
        self._lib = lib
        self.n_threads = n_threads
        full = max(READ_NBYTES, CACHES_TIMES * last_cache_nbytes())
        self._n_read = effort.pick(full, 64 << 20) >> 20
        # 1 G FMAs a thread at most a few tens of milliseconds each: long beside the start of the threads.
        operations = effort.pick(2e9, 1e8) * n_threads
        self._n_fma = max(n_threads, round(operations / lib.ceilings_fma_operations()))
        self._k = effort.pick(6, 2)
        self._memory = lib.ceilings_alloc(self._n_read, n_threads)
        if not self._memory:
            raise NoCeilings(f"no memory for {self._n_read} MiB")
        self._begin = time.perf_counter()
        self._fma_s()  # warm-up of the threads and of the clock

    @property
    def read_nbytes(self):
        """Bytes of one pass."""
        return self._n_read << 20

    @property
    def fma_operations(self):
        """Operations of one pass."""
        return self._n_fma * self._lib.ceilings_fma_operations()

    def _read_s(self, n_streams):
        begin = time.perf_counter()
        self._lib.ceilings_read(self._memory, self._n_read, n_streams, self.n_threads)
        return time.perf_counter() - begin

    def _fma_s(self):
        begin = time.perf_counter()
        self._lib.ceilings_fma(self._n_fma, 0.999, 0.001, self.n_threads)
        return time.perf_counter() - begin

    def time_passes(self, k):
        """Timings of `k` passes each, ``(read, fma)``; of the two ways to read the faster one."""
        read = [Timing.of(t) for t in zip(*[(self._read_s(1), self._read_s(4)) for _ in range(k)])]
        return min(read, key=lambda t: t.best_s), Timing.of([self._fma_s() for _ in range(k)])

    def probe(self):
        """Measure both ceilings now, in about half a second."""
        read, fma = self.time_passes(self._k)
        return Probe(
            time.perf_counter() - self._begin,
            self.read_nbytes / read.best_s / 1e9, self.read_nbytes / read.median_s / 1e9,
            self.fma_operations / fma.best_s / 1e9, self.fma_operations / fma.median_s / 1e9, self._k,
        )  # fmt: skip


def measure(ceilings, effort, run):
    """The ceilings as rows of their own."""
    with run.group() as add:
        if ceilings is None:
            return
        read, fma = ceilings.time_passes(effort.pick(21, 3))
        add(Row("ceilings", "read", f"{ceilings.read_nbytes >> 20} MiB", read, nbytes=ceilings.read_nbytes))
        add(Row("ceilings", "fma", "in registers", fma, operations=ceilings.fma_operations))
