"""A progress bar with a lock of its own.

tqdm's bars share one lock, and a bar whose display fails (Ctrl-C, a full disk, a closed stream) keeps it for good: the
next bar in another thread then waits forever.
"""

import threading
from weakref import WeakSet


def progress_bar(**options):
    """A :class:`tqdm.tqdm` made with `options`."""
    from tqdm import tqdm  # only here: it takes 30 ms, and hardly any start shows a bar

    class Bar(tqdm):
        monitor_interval = 0
        _instances = WeakSet()

    Bar.set_lock(threading.RLock())
    return Bar(**options)
