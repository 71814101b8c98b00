"""Print the packages that an extra of pyproject.toml asks for, those of extras that it names too."""

import re
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]


def requirements(extra):
    for each in extras[extra]:
        if found := re.fullmatch(r"pagedkv\[(.*)\]", each):
            for other in found[1].split(","):
                yield from requirements(other)
        else:
            yield each


print("\n".join(requirements(sys.argv[1])))
