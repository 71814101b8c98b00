"""``python -m bench``, from the source tree: the harness of pagedkv.bench."""

import sys

from pagedkv.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
