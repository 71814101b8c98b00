"""Files that lie, a few thousand of them, the same in each run: tests/fuzz makes them and says what a reader may do.

Every case runs in a process of its own kind with little memory to spare, and with a watch on the processor time of each
case, so that an allocation by a number of the file, or a loop by one, is a failure and not a slow test. Named cases are
what fuzzing has found.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from promise_rows import child_env

FUZZ = Path(__file__).parent / "fuzz"
sys.path.insert(0, str(FUZZ))

import corpus  # noqa: E402
import targets  # noqa: E402

from pagedkv.errors import FormatError  # noqa: E402
from pagedkv.tokenizer import Tokenizer  # noqa: E402

N_MUTANTS = {"gguf": 600, "hf": 600, "saved": 500, "template": 200, "jsonl": 400}
SPARE_MIB = 512
CASE_SECONDS = 20  # of processor time; the slowest takes a tenth of one. Only ends a hang.

CHILD = """
import json, resource, signal, sys, time, traceback
fuzz, tests, kind, n, seed, spare, seconds, folder = sys.argv[1:]
sys.path[:0] = [fuzz, tests]
import corpus, targets
from pagedkv import sandbox
sandbox.BASE_NBYTES >>= 5  # for the time's sake
right = corpus.seeds(kind)
unused = [i for i, files in enumerate(right) if not targets.check(kind, files, folder)]
wrong = list(corpus.mutants(kind, int(n), int(seed)))
vm = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (vm + (int(spare) << 20),) * 2)
def late(*_):
    raise TimeoutError(f"takes more than {seconds} s")
signal.signal(signal.SIGPROF, late)
escaped, n_used = [], 0
for i, files in enumerate(wrong):
    signal.setitimer(signal.ITIMER_PROF, float(seconds))
    try:
        n_used += targets.check(kind, files, folder)
    except BaseException as error:
        escaped.append([i, "".join(traceback.format_exception(error))[-3000:]])
        if len(escaped) > 5:
            break
    signal.setitimer(signal.ITIMER_PROF, 0)
print(json.dumps({"unused": unused, "escaped": escaped, "n_used": n_used}))
"""


def replay(kind, n, seed, folder):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            CHILD,
            FUZZ,
            FUZZ.parent,
            kind,
            str(n),
            str(seed),
            str(SPARE_MIB),
            str(CASE_SECONDS),
            folder / "case",
        ],
        text=True,
        capture_output=True,
        env=child_env() | {"PAGEDKV_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])  # a signal: a crash
    out = json.loads(done.stdout)
    assert not out["unused"], f"right files {out['unused']} were refused"
    assert not out["escaped"], "\n".join(f"mutant {i} of {kind}, seed {seed}: {text}" for i, text in out["escaped"])
    assert 0 < out["n_used"] < n, out["n_used"]  # some change nothing that counts, and are to be read


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/status")
@pytest.mark.parametrize("kind", corpus.KINDS)
def test_wrong_files_are_refused_or_read(kind, tmp_path):
    replay(kind, N_MUTANTS[kind], 0, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/status")
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("kind", corpus.KINDS)
def test_many_wrong_files(kind, seed, tmp_path):
    replay(kind, 10 * N_MUTANTS[kind], seed, tmp_path)


def test_mutants_are_the_same_each_time():
    for kind in corpus.KINDS:
        assert list(corpus.mutants(kind, 10)) == list(corpus.mutants(kind, 10)) != list(corpus.mutants(kind, 10, 1))


# ---- Found by fuzzing: each escaped as another exception, or loaded and could not be used ----


def gguf(**changes):
    """The first right GGUF file with other values of some keys, named by the last part where they are there; None removes one."""
    (files,) = corpus.seeds("gguf")[:1]
    keys, tensors, rest = corpus.take_apart(files["model.gguf"])
    by_name = {key[0].decode(): key for key in keys}
    for name, change in changes.items():
        name = next((full for full in by_name if full.endswith("." + name)), name)
        keys = [key for key in keys if key[0] != name.encode()] + ([[name.encode(), *change]] if change else [])
    return {"model.gguf": corpus.put_together(keys, tensors, rest)}


GGUF = {
    "token types fewer than tokens": (
        gguf(token_type=(9, (5, [1] * 7))),
        "tokenizer.ggml.token_type has 7 entries for 260 tokens",
    ),
    "token types as a number": (gguf(token_type=(4, 1)), "tokenizer.ggml.token_type is 1, not a list of integers"),
    "token types as texts": (gguf(token_type=(9, (8, [b"a"] * 260))), "token_type is .* not a list of integers"),
    "token types as lists": (gguf(token_type=(9, (9, [(4, [1])] * 260))), "token_type is .* not a list of integers"),
    "tokens as numbers": (gguf(tokens=(9, (4, [1] * 260))), "tokenizer.ggml.tokens is .* not a list of texts"),
    "tokens as a text": (gguf(tokens=(8, b"abc")), "tokenizer.ggml.tokens is 'abc', not a list of texts"),
    "merges as a number": (gguf(merges=(4, 7)), "tokenizer.ggml.merges is 7, not a list of texts"),
    "merges of unknown tokens": (gguf(merges=(9, (8, [b"nowhere nothing"]))), "merges do not fit its tokens"),
    "an unknown token that is a text": (
        gguf(**{"tokenizer.ggml.padding_token_id": (8, b"")}),
        "tokenizer.ggml.padding_token_id is '', not an integer",
    ),
    "an end token that is a list": (gguf(eos_token_id=(9, (4, [1, 2]))), "end token .* is not an integer"),
    "a flag that is a list": (gguf(add_bos_token=(9, (4, [1, 2]))), "add_bos_token is .* not true or false"),
    "a kind that is a list": (gguf(model=(9, (4, [1, 2]))), "tokenizer.ggml.model is .* not a text"),
    "a pre-tokenizer that is a list": (gguf(pre=(9, (8, [b"a"]))), "tokenizer.ggml.pre is .* not a text"),
    "an architecture that is a list": (gguf(architecture=(9, (4, [1, 2]))), "architecture .* is not read here"),
    "a split that is a list": (gguf(**{"split.count": (9, (4, [1, 2]))}), "of a split model"),
    "a RoPE scaling that is a list": (
        gguf(**{"llama.rope.scaling.type": (9, (4, [1, 2]))}),
        "RoPE scaling .* is not built here",
    ),
    "frequencies over the kernels' limit": (
        gguf(freq_base=(12, 1e-30)),
        "rotary frequencies must be finite and at most 64",
    ),
    "a token of 100,000 characters": (
        gguf(
            tokens=(9, (8, [b"x" * 100_000] + [b"%d" % i for i in range(259)])),
            model=(8, b"llama"),
            merges=None,
            **{"tokenizer.ggml.scores": (9, (6, [0.0] * 260))},
            token_type=(9, (5, [1] * 260)),
        ),
        "has 100000 characters, at most 1024 are read",
    ),
}


@pytest.mark.parametrize("name", GGUF)
def test_gguf_files_that_escaped(name, tmp_path):
    files, message = GGUF[name]
    targets.check("gguf", files, tmp_path / "case")
    path = tmp_path / "case" / "model.gguf"
    with pytest.raises(FormatError, match=message) as caught:
        Tokenizer.from_model_file(path)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def hf(name, change):
    """The first right directory, one of its JSON files changed (or given as bytes)."""
    (files,) = corpus.seeds("hf")[:1]
    if isinstance(change, bytes):
        return files | {name: change}
    content = json.loads(files.get(name, b"{}"))
    change(content)
    return files | {name: json.dumps(content).encode()}


def put(**values):
    return lambda content: content.update(values)


def own_vocab(token_id):
    def change(content):
        content["model"]["vocab"]["far"] = token_id

    return change


REPLACE = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
DIRECTORIES = {
    "a JSON file nested deeply": (
        hf("tokenizer_config.json", b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
        "nested too deeply",
    ),
    "a number of 5,000 digits": (hf("tokenizer_config.json", b'{"a":' + b"1" * 5000 + b"}"), "is not valid JSON"),
    "a key twice": (hf("tokenizer_config.json", b'{"bos_token":"a","bos_token":"b"}'), "a key occurs twice"),
    "a beginning that is a list": (
        hf("tokenizer_config.json", put(bos_token=["a"])),
        r"names bos_token \['a'\], which tokenizer.json lacks",
    ),
    "a beginning that is a lone surrogate": (
        hf("tokenizer_config.json", put(bos_token="\ud800")),
        "names bos_token .*, which tokenizer.json lacks",
    ),
    "a flag that is a text": (
        hf("tokenizer_config.json", put(add_bos_token="yes")),
        "add_bos_token or add_eos_token is not true or false",
    ),
    "templates that are numbers": (
        hf("tokenizer_config.json", put(chat_template=[1])),
        "lists chat templates without name or text",
    ),
    "an end that is an object": (
        hf("generation_config.json", put(eos_token_id={"a": 1})),
        "eos_token_id is .* not an i",
    ),
    "ends that are lists": (hf("generation_config.json", put(eos_token_id=[[1]])), "eos_token_id is .* not an i"),
    "an end outside the vocabulary": (hf("generation_config.json", put(eos_token_id=10**30)), "outside|not an id in"),
    "a vocabulary of a text": (hf("config.json", put(vocab_size=["a"])), r"vocab_size is \['a'\], not an integer"),
    "a vocabulary of 10**30": (
        hf("config.json", put(vocab_size=10**30)),
        "vocab_size is 10+.*, (not an integer in|outside)",
    ),
    "an id of 2**32 - 1": (
        hf("tokenizer.json", own_vocab(2**32 - 1)),
        r"the largest id is 4294967295, outside \[0, 2\*\*31\)",
    ),
    "a tokenizer.json of 100 kB in one text": (hf("tokenizer.json", put(version="x" * 100_000)), "cannot be read"),
    "a normaliser that panics": (
        hf("tokenizer.json", put(normalizer=REPLACE | {"pattern": {"String": ""}})),
        "tokenizer.json cannot encode: index out of",
    ),
    "a normaliser that writes 10**5 for one": (
        hf("tokenizer.json", put(normalizer={"type": "Sequence", "normalizers": [REPLACE] * 5})),
        "make a text 100000 times as long",
    ),
    "frequencies over the kernels' limit": (
        hf("config.json", lambda content: (content.pop("rope_parameters"), content.update(rope_theta=1e-30))),
        "rotary frequencies must be finite",
    ),
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_directories_that_escaped(name, tmp_path):
    import pagedkv as pk

    files, message = DIRECTORIES[name]
    targets.check("hf", files, tmp_path / "case")
    with pytest.raises(FormatError, match=message) as caught:
        pk.LlamaModel.load(tmp_path / "case").tokenizer
    assert str(tmp_path / "case") in str(caught.value) and len(str(caught.value)) < 900


def test_an_id_beyond_the_others_is_counted(tmp_path):
    files = hf("tokenizer.json", own_vocab(5000))
    targets.check("hf", files, tmp_path / "case")
    tokenizer = Tokenizer.from_directory(tmp_path / "case")
    assert tokenizer.vocab_size == 5001 and tokenizer.decode([5000, 4000]) == "far"


def test_dropout_of_training_is_off(tmp_path):
    targets.check("hf", hf("tokenizer.json", lambda content: content["model"].update(dropout=0.5)), tmp_path / "case")
    tokenizer = Tokenizer.from_directory(tmp_path / "case")
    assert len({tuple(tokenizer.encode("Hi Hi Hi Hi Hi")) for _ in range(50)}) == 1


def test_lines_that_escaped(tmp_path):
    lines = [
        b'{"prompt": "Hi", "top_k": 9223372036854775808}',
        b'{"prompt": "Hi", "top_k": 1' + b"0" * 100 + b"}",
        b'{"messages": [{"role": "user", "content": ' + b"[" * 700 + b"]" * 700 + b"}]}",
    ]
    assert targets.check("jsonl", {"in.jsonl": b"\n".join(lines)}, tmp_path / "case")
