"""The one owner of the thread count: environment, then cores within affinity and cgroup quota."""

import math
import operator
import os
from pathlib import Path

# How long GNU OpenMP's threads spin at a barrier before they sleep. Its own default is milliseconds: on a busy
# machine a thread then burns the time slice that the one it waits for needs, and a step of 20 ms took a second.
# This is some 20 microseconds, longer than a quiet machine's threads ever wait, and just as fast there
# (docs/performance.md). The runtime reads it when it is loaded, with the core; a user's own setting wins.
_SPIN = {} if {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ) else {"GOMP_SPINCOUNT": "1000"}
os.environ.update(_SPIN)
try:
    from pagedkv import _core
finally:
    for _name in _SPIN:
        del os.environ[_name]

MOST_THREADS = 4096


def _affinity():
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS or Windows
        return set(range(os.cpu_count() or 1))


def _physical_cores(cpus):
    """Distinct cores among logical `cpus`: two hyperthreads share one FMA unit and one cache."""
    cores = set()
    for cpu in cpus:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            cores.add(((topology / "physical_package_id").read_text(), (topology / "core_id").read_text()))
        except OSError:
            return len(cpus)
    return len(cores)


def _cgroup_quota(root=Path("/")):
    """Processors that the cgroups of this process grant, rounded up; None without a limit.

    A quota binds all groups below it, so the smallest on the way from the own group to the root counts. In a
    container the mounted tree may begin at the own group, whose path then is not found in it: what is found counts.

    Parameters
    ----------
    root : pathlib.Path
        Where ``proc`` and ``sys`` are.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return None
    quotas = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # The second folder is where hybrid systems mount version 2, or the same tree by its other name.
        folders = (controllers, "cpu") if controllers else ("", "unified")
        read = _quota_v1 if controllers else _quota_v2
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for folder in folders:
            top = root / "sys/fs/cgroup" / folder
            quotas += [read(top.joinpath(*parts[:depth])) for depth in range(len(parts) + 1)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(group):
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return _processors(quota, period)
    except (OSError, ValueError):
        return None


def _quota_v1(group):
    try:
        return _processors((group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None


def _processors(quota, period):
    """Of microseconds in a period of microseconds; None without a limit, which is "max" or -1."""
    quota, period = (0 if text.strip() == "max" else int(text) for text in (quota, period))
    return max(1, math.ceil(quota / period)) if quota > 0 and period > 0 else None


def _openmp_limit():
    """``OMP_NUM_THREADS``, which users of numeric libraries set to bound them all; None where unset or odd."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None


def default_num_threads() -> int:
    """Threads used unless set: ``PAGEDKV_NUM_THREADS``, else physical cores that this process may use.

    Those are bounded by affinity, the cgroup's quota and ``OMP_NUM_THREADS``.

    Raises
    ------
    ValueError
        ``PAGEDKV_NUM_THREADS`` is set and is not a positive integer.
    """
    asked = os.environ.get("PAGEDKV_NUM_THREADS", "").strip()
    if asked:
        if not asked.isascii() or not asked.isdigit() or not 1 <= int(asked) <= MOST_THREADS:
            raise ValueError(f"PAGEDKV_NUM_THREADS must be an integer from 1 to {MOST_THREADS}, not {asked!r}")
        return int(asked)
    n = _physical_cores(_affinity())
    limits = [n, _cgroup_quota(), _openmp_limit()]
    return max(1, min(limit for limit in limits if limit is not None))


def set_num_threads(n: int) -> None:
    """Use at most `n` threads in every later call of this process.

    No more run than the process has processors, by its affinity and its cgroup's quota: more would only wait for each
    other. ``threadpoolctl.threadpool_limits`` sets the same count, and puts it back at the end. A number set on the
    OpenMP runtime afterwards by ``omp_set_num_threads``, in C, holds too where it is lower.

    Parameters
    ----------
    n : int
        From 1 to 4096. No result depends on it.

    Raises
    ------
    ValueError
        `n` is outside that range.
    """
    n = operator.index(n)
    if not 1 <= n <= MOST_THREADS:
        raise ValueError(f"num_threads must be from 1 to {MOST_THREADS}, not {n}")
    _core._set_num_threads(n)


def _register_with_threadpoolctl():
    """Have ``threadpoolctl`` list this library and set its count.

    Without it, threadpoolctl reaches only the OpenMP runtime, where a limit that equals the runtime's own default
    looks like no limit.
    """
    try:
        from threadpoolctl import LibController, register
    except ImportError:  # not installed, or older than 3.2
        return

    class Controller(LibController):
        user_api = "openmp"
        internal_api = "pagedkv"
        filename_prefixes = ("_core.",)
        check_symbols = ("pagedkv_core",)

        def get_num_threads(self):
            return _core._asked_num_threads()

        def set_num_threads(self, num_threads):
            set_num_threads(min(num_threads, MOST_THREADS))

        def get_version(self):
            return None

    register(Controller)


_core._set_quota(_cgroup_quota() or 0)
set_num_threads(default_num_threads())
_register_with_threadpoolctl()
if os.environ.get("PAGEDKV_ISA"):
    _core._set_isa(os.environ["PAGEDKV_ISA"])
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_core._after_fork)
