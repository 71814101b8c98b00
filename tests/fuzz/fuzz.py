"""Coverage-guided fuzzing of the readers with atheris (``pip install atheris``, which the tests do not need).

    python tests/fuzz/corpus.py corpus                                  # seeds and mutants, a folder a kind
    python tests/fuzz/fuzz.py gguf corpus/gguf -max_total_time=180 -timeout=20 -rss_limit_mb=2048

The first argument is one of gguf, hf, saved, template and jsonl, the others are libFuzzer's. What escapes is written to
``crash-...``; ``python tests/fuzz/fuzz.py hf crash-...`` runs it again. Its case then goes into
tests/test_fuzz_corpus.py by name. Only Python code is instrumented, which is where files are read.
"""

import sys
import tempfile
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent.parent)]

with atheris.instrument_imports(include=["pagedkv", "jinja2"]):
    import corpus
    import targets
    from pagedkv import sandbox

FILES = {"gguf": "model.gguf", "saved": "kv", "template": "template", "jsonl": "in.jsonl"}


def main():
    kind = sys.argv.pop(1)
    folder = Path(tempfile.mkdtemp()) / "case"
    sandbox.BASE_NBYTES >>= 5  # more templates a second
    right = corpus.seeds("hf")

    def one_input(data):
        if kind == "hf":  # a file that the input does not have is the right one
            files = right[len(data) % len(right)] | corpus.split(data)
        else:
            files = {FILES[kind]: data}
        targets.check(kind, files, folder)

    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
