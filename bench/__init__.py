"""Runs pagedkv.bench from the source tree. See README.md."""

import sys
from pathlib import Path

# `python -m bench` puts the source tree first on the path. Where its pagedkv is not compiled, an installed
# one is meant.
_root = Path(__file__).resolve().parent.parent
if not any(_root.glob("pagedkv/_core.*.so")) and not any(_root.glob("pagedkv/_core.*.pyd")):
    sys.path.sort(key=lambda entry: Path(entry or ".").resolve() == _root)  # stable: only the root moves, to the end
