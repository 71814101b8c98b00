"""The layers of docs/design.md: a module imports its own layer and those below, never one above."""

import ast
import re
from pathlib import Path

import pagedkv

PACKAGE = Path(pagedkv.__file__).parent
LAYERS = [{"errors", "progress"}, {"_core"}, {"threads", "config", "rope"},
          {"pool", "sequence", "ops", "attention", "formats", "hub", "tokenizer", "chat", "sandbox"},
          {"model"}, {"plot"}, {"engine", "batch", "scoring"}, {"__init__"}, {"bench", "lm_eval", "server", "ray"},
          {"cli", "__main__"}]  # fmt: skip
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def imports(path, source):
    """Modules of pagedkv that a source file imports, wherever the statement stands."""
    package = path.relative_to(PACKAGE.parent).parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            stem = [*package[: len(package) + 1 - node.level]] if node.level else []
            stem = ".".join([*stem, *([node.module] if node.module else [])])
            dotted = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        for first, *rest in (name.split(".") for name in dotted):
            if first == "pagedkv":  # a name that is no module comes from the package itself
                yield rest[0] if rest and rest[0] in LEVEL else "__init__"


def edges():
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        yield from ((name, other) for other in imports(path, path.read_text()) if other != name)
    pyx = PACKAGE / "_core.pyx"
    if pyx.exists():  # not in an installed package
        statements = "\n".join(re.findall(r"^\s*((?:from|import) pagedkv.*)$", pyx.read_text(), re.M))
        yield from (("_core", other) for other in imports(pyx, statements))


def test_every_module_has_a_layer():
    assert {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in PACKAGE.rglob("*.py")} <= set(LEVEL)


def test_no_module_imports_a_layer_above_its_own():
    found = set(edges())
    assert ("model", "sequence") in found  # the walk sees something
    assert not [f"{a} -> {b}" for a, b in found if LEVEL[b] > LEVEL[a]]


def test_nothing_imports_the_command():
    assert not [a for a, b in edges() if b in ("cli", "__main__") and a != "__main__"]
