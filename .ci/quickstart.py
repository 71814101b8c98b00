"""Print the n-th sh block of the README's section "Quick start" (1 or 2), exactly as it stands there."""

import re
import sys
from pathlib import Path

readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
section = re.split(r"^## ", readme, flags=re.M)
section = next(text for text in section if text.startswith("Quick start\n"))
blocks = re.findall(r"^```sh\n(.*?)^```$", section, flags=re.M | re.S)
if len(blocks) < 2:
    sys.exit(f"the section Quick start has {len(blocks)} sh blocks, not 2")
print(blocks[int(sys.argv[1]) - 1], end="")
