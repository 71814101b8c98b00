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


def _cgroup_quota():
    """Processors that the container may use, rounded up; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()  # cgroup v2
    except (OSError, ValueError):
        try:
            quota = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text().strip()  # v1
            period = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        if quota == "max" or int(quota) <= 0:
            return None
        return max(1, math.ceil(int(quota) / int(period)))
    except (ValueError, ZeroDivisionError):
        return None


def _openmp_limit():
    """``OMP_NUM_THREADS``, which users of numeric libraries set to bound them all; None where unset or odd."""
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isascii() and first.isdigit() and int(first) > 0 else None


def default_num_threads():
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


def set_num_threads(n):
    """Use at most `n` threads in every later call of this process.

    A limit set on the OpenMP runtime afterwards (``threadpoolctl``) holds too where it is lower.

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


set_num_threads(default_num_threads())
if os.environ.get("PAGEDKV_ISA"):
    _core._set_isa(os.environ["PAGEDKV_ISA"])
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_core._after_fork)
