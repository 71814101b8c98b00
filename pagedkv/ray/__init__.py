"""Many machines, through Ray: :class:`BatchLLM` for its datasets, ``pagedkv.ray:app`` for Ray Serve. It is the extra
``pagedkv[ray]``; docs/scale.md says how to run it."""

import importlib

_HOMES = {"BatchLLM": "data", "app": "serve", "AppArgs": "serve"}
__all__ = list(_HOMES)


def __getattr__(name):  # a job without HTTP does not import the server
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
