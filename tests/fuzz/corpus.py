"""Small right files, and thousands of wrong ones made from them, the same each time.

A case is a dict: file name -> bytes, of a directory or of the one file that a reader gets. ``seeds(kind)`` are right,
``mutants(kind, n)`` are damaged where a reader could believe them: at counts, offsets, lengths, types and names.
Written with the writers of tests/tiny.py; the GGUF parts are taken apart and put together here, so that they can lie.

    python tests/fuzz/corpus.py DIR       # writes the seeds and 200 mutants of each kind for fuzz.py
"""

import json
import random
import struct
import sys
import tempfile
import zlib
from copy import deepcopy
from functools import cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tiny  # noqa: E402
from test_cli import TOKENS  # noqa: E402

import pagedkv as pk  # noqa: E402
from pagedkv.tokenizer import Tokenizer  # noqa: E402

KINDS = ("gguf", "hf", "saved", "template", "jsonl")
# Where a sign, a width or a product changes; and one more or less.
EDGES = [
    n + d for n in (0, 2**7, 2**8, 2**15, 2**16, 2**24, 2**31, 2**32, 2**39, 2**62, 2**63, 2**64) for d in (-1, 0, 1)
]
NUMBERS = [
    *EDGES,
    -(2**31),
    -(2**63),
    10**30,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e-30,
    1e30,
    1.7e308,
    float("inf"),
    float("-inf"),
    float("nan"),
]
TEXTS = [
    "",
    "a",
    "\0",
    "\ud800",
    "é" * 300,
    "x" * 100_000,
    "../../etc/passwd",
    "/etc/passwd",
    "__class__",
    "<0xZZ>",
    "<0x41>",
    "\u2581",
    "llama",
]
BYTES = [b"", b"\xff\xfe", b"\x80", b"\xc3", b"\xed\xa0\x80", b"a\0b", b"x" * 70_000]

GGUF_METADATA = {
    f"tokenizer.ggml.{key}": value
    for key, value in {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "merges": ["H i"],
        "token_type": [1] * 256 + [3] * 3 + [1],
        "eos_token_id": 256,
        "bos_token_id": 257,
        "add_bos_token": True,
    }.items()
} | {"tokenizer.chat_template": "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}"}
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "\u2581",
    "t",
    "h",
    "e",
    "th",
    "the",
    "\u2581the",
]
SENTENCEPIECE = {
    f"tokenizer.ggml.{key}": value
    for key, value in {
        "model": "llama",
        "pre": None,
        "merges": None,
        "tokens": PIECES,
        "scores": [-float(i) for i in range(len(PIECES))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * 7,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }.items()
}


def config(family, n_tokens):
    return tiny.tiny_config(
        family,
        n_layers=1,
        hidden_dim=32,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        ffn_dim=32,
        vocab_size=n_tokens,
        context_len=64,
        bos_token_id=1,
        eos_token_ids=(2,),
        tied_embeddings=family != "qwen2",
    )


# ---- Seeds ----


@cache
def _gguf_seeds():
    out = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        for family, types, vocabulary in (
            ("llama", "q8_0", GGUF_METADATA),
            ("qwen2", "q4_0", GGUF_METADATA),
            ("qwen3", "f16", GGUF_METADATA),
            ("llama", "f32", GGUF_METADATA | SENTENCEPIECE),
        ):
            shape = config(family, len(vocabulary["tokenizer.ggml.tokens"]))
            extra = {"rope_freqs.weight": np.ones(8, np.float32)} if types == "q8_0" else None
            tiny.write_gguf(path, shape, tiny.tiny_tensors(shape), types, metadata=vocabulary, extra=extra)
            out.append({"model.gguf": path.read_bytes()})
    return out


@cache
def _hf_seeds():
    out = []
    for family, n_shards, vocabulary in (
        ("llama", 1, GGUF_METADATA),
        ("qwen3", 2, GGUF_METADATA),
        ("mistral", 1, SENTENCEPIECE | {"tokenizer.ggml.pre": None}),
    ):
        with tempfile.TemporaryDirectory() as folder:
            shape = config(family, len(vocabulary["tokenizer.ggml.tokens"]))
            window = {"sliding_window": 20} if family == "mistral" else {}
            path = tiny.write_hf(
                folder,
                shape,
                tiny.tiny_tensors(shape),
                "bf16",
                n_shards,
                {"eos_token_id": [2, 3]},
                rope="both",
                **window,
            )
            vocabulary = {
                key: np.array(value) if key.endswith("token_type") else value
                for key, value in vocabulary.items()
                if value is not None
            }
            Tokenizer.from_gguf_metadata(vocabulary)._backend.save(str(path / "tokenizer.json"))
            settings = {
                "bos_token": vocabulary["tokenizer.ggml.tokens"][1],
                "eos_token": {"content": vocabulary["tokenizer.ggml.tokens"][2]},
                "add_bos_token": True,
                "chat_template": [{"name": "default", "template": "{{ messages }}"}],
            }
            (path / "tokenizer_config.json").write_text(json.dumps(settings))
            out.append({each.name: each.read_bytes() for each in sorted(path.iterdir())})
    return out


@cache
def _saved_seeds():
    out = []
    for dtype, n in (("float32", 3), ("q8_0", 20), ("float16", 0)):
        pool = pk.BlockPool(4, 1, 32, dtype=dtype)
        seq = pk.Sequence.import_(np.ones((1, 2, 1, n, 32), np.float32), pool)
        with tempfile.TemporaryDirectory() as folder:
            seq.save(Path(folder) / "kv", list(range(n)) if n == 20 else None, "a model")
            out.append({"kv": (Path(folder) / "kv").read_bytes()})
    return out


def seeds(kind):
    """Right files of a kind, list of dict of str to bytes."""
    if kind == "template":
        return [{"template": text.encode()} for text in TEMPLATES]
    if kind == "jsonl":
        return [{"in.jsonl": "".join(json.dumps(line) + "\n" for line in LINES).encode()}]
    return deepcopy({"gguf": _gguf_seeds, "hf": _hf_seeds, "saved": _saved_seeds}[kind]())


# ---- Mutants ----


def mutants(kind, n, seed=0):
    """Yield ``n`` wrong files of a kind, always the same."""
    rng = random.Random(f"{kind} {seed}")
    right = seeds(kind)
    wrong = {
        "gguf": wrong_gguf,
        "hf": wrong_hf,
        "saved": wrong_saved,
        "template": wrong_template,
        "jsonl": wrong_jsonl,
    }[kind]
    for i in range(n):
        yield wrong(rng, deepcopy(right[i % len(right)]))


def damaged(rng, data, most=None):
    """Cut short, or with a few bytes or a number of 4 or 8 bytes changed within the first ``most``."""
    out, end = bytearray(data), min(len(data), most or len(data))
    kind = rng.randrange(4)
    if kind == 0:
        return bytes(out[: rng.randrange(end)])
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(max(1, end - 8))
        if kind == 1:
            out[at] ^= rng.randint(1, 255)
        elif kind == 2:
            nbytes = rng.choice((4, 8))
            out[at : at + nbytes] = (rng.choice(EDGES) % 256**nbytes).to_bytes(nbytes, "little")
        else:
            out[at:at] = rng.choice(BYTES)
    return bytes(out)


# GGUF value types: struct formats by number; 8 is a string, 9 an array.
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


def take_apart(data):
    """A GGUF file as lists that can be changed: [[key, type, value]], [[name, dims, type, offset]], bytes of the tensors."""
    at = 24

    def number(form):
        nonlocal at
        (value,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        return value

    def text():
        nonlocal at
        n = number("<Q")
        at += n
        return data[at - n : at]

    def value(kind):
        if kind == 8:
            return text()
        if kind == 9:
            inner, n = number("<I"), number("<Q")
            return inner, [value(inner) for _ in range(n)]
        return number(SCALARS[kind])

    n_tensors, n_keys = struct.unpack_from("<QQ", data, 8)
    keys, tensors = [], []
    for _ in range(n_keys):
        key, kind = text(), number("<I")
        keys.append([key, kind, value(kind)])
    for _ in range(n_tensors):
        name, n_dims = text(), number("<I")
        tensors.append([name, [number("<Q") for _ in range(n_dims)], number("<I"), number("<Q")])
    return keys, tensors, data[at + -at % 32 :]


def put_together(keys, tensors, data, version=3, n_tensors=None, n_keys=None, string_len=None):
    """The way back; a count or the length of one string (index, length) may be another than it is."""
    strings = 0

    def text(value):
        nonlocal strings
        n = string_len[1] if string_len and string_len[0] == strings else len(value)
        strings += 1
        return struct.pack("<Q", n % 2**64) + value

    def packed(kind, value):
        if kind == 8:
            return text(value)
        if kind == 9:
            inner, values, *n = value
            return struct.pack("<IQ", inner % 2**32, (n[0] if n else len(values)) % 2**64) + b"".join(
                packed(inner, each) for each in values
            )
        form = SCALARS.get(kind, "<Q")
        if form in ("<f", "<d"):
            try:
                return struct.pack(form, value)
            except (OverflowError, struct.error):
                return struct.pack(form, float("inf"))
        size = struct.calcsize(form)
        return (int(value) % 256**size if value == value and abs(value) != float("inf") else 0).to_bytes(size, "little")

    out = b"GGUF" + struct.pack("<I", version)
    out += struct.pack(
        "<QQ",
        (len(tensors) if n_tensors is None else n_tensors) % 2**64,
        (len(keys) if n_keys is None else n_keys) % 2**64,
    )
    for key, kind, value in keys:
        out += text(key) + struct.pack("<I", kind % 2**32) + packed(kind, value)
    for name, dims, kind, offset in tensors:
        out += text(name) + struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", dim % 2**64) for dim in dims)
        out += struct.pack("<IQ", kind % 2**32, offset % 2**64)
    return out + bytes(-len(out) % 32) + data


def random_value(rng, depth=0):
    """(type, value) of any GGUF value."""
    kind = rng.choice([*SCALARS, 8, 8, 9, 9])
    if kind == 8:
        return 8, rng.choice([*(text.encode("utf-8", "surrogatepass") for text in TEXTS), *BYTES])
    if kind == 9:
        inner, value = random_value(rng, depth + 1) if depth < 6 else (4, 1)
        n = rng.choice([0, 1, 3, 260])
        return 9, ((inner, [value] * n) if rng.random() < 0.9 else (inner, [value] * n, rng.choice(EDGES)))
    return kind, rng.choice(NUMBERS)


def wrong_gguf(rng, files):
    data = files["model.gguf"]
    keys, tensors, rest = take_apart(data)
    lies = {}
    kind = rng.randrange(10)
    if kind == 0:
        files["model.gguf"] = damaged(rng, data, len(data) - len(rest))
        return files
    for _ in range(rng.choice((1, 1, 1, 2))):
        key, tensor = rng.choice(keys), rng.choice(tensors)
        if kind == 1:  # a key of another type
            key[1:] = random_value(rng)
        elif kind == 2:  # the type kept, another value
            if key[1] in SCALARS:
                key[2] = rng.choice(NUMBERS)
            elif key[1] == 8:
                key[2] = random_value(rng)[1] if rng.random() < 0.1 else rng.choice(BYTES)
                key[2] = key[2] if isinstance(key[2], bytes) else b"?"
            else:
                key[2] = key[2][0], key[2][1], rng.choice(EDGES)
        elif kind == 3:  # a key twice, none, or another name
            rng.choice(
                (
                    lambda: keys.insert(0, list(key)),
                    lambda: keys.remove(key),
                    lambda: key.__setitem__(0, rng.choice(BYTES)),
                )
            )()
        elif kind == 4:
            tensor[1] = rng.choice(
                (
                    [],
                    [0],
                    [1] * 5,
                    [rng.choice(EDGES)] * rng.randint(1, 4),
                    tensor[1][::-1],
                    tensor[1] + [1],
                    tensor[1] + [0],
                )
            )
        elif kind == 5:
            tensor[2] = rng.choice([*range(45), *EDGES])
        elif kind == 6:
            tensor[3] = rng.choice([*EDGES, rng.choice(tensors)[3], len(rest), len(rest) - 32, 8, 32, 2**64 - 32])
        elif kind == 7:
            tensor[0] = rng.choice(
                [
                    *BYTES,
                    rng.choice(tensors)[0],
                    b"blk.0.attn_q.bias",
                    b"blk.1.attn_q.weight",
                    b"blk.-1.attn_q.weight",
                    b"x" * 64,
                ]
            )
            if rng.random() < 0.3:
                tensors.remove(tensor)
        elif kind == 8:  # lists of the vocabulary that disagree
            lists = [each for each in keys if each[1] == 9]
            inner, values, *_ = (each := rng.choice(lists))[2]
            values = list(values)
            for _ in range(rng.choice((1, 2, 50))):
                at = rng.randrange(max(1, len(values)))
                some = rng.choice([*BYTES, "é".encode(), b"a b", b"<0x41>"]) if inner == 8 else rng.choice(NUMBERS)
                values[at : at + rng.choice((0, 1, 1, 100))] = rng.choice(
                    ([], [some], [some] * 2, values[:1], values[-3:])
                )
            each[2] = inner, values
        else:
            lies = rng.choice(
                (
                    {"version": rng.choice(EDGES) % 2**32},
                    {"n_tensors": rng.choice(EDGES)},
                    {"n_keys": rng.choice(EDGES)},
                    {"string_len": (rng.randrange(300), rng.choice(EDGES))},
                )
            )
        if not keys or not tensors:
            break
    files["model.gguf"] = put_together(keys, tensors, rest, **lies)
    return files


def random_json(rng, depth=0):
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind < 5:
        return rng.choice((None, True, False, [], {}))
    if kind < 7:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {
        rng.choice(["a", "content", "type", "type", "", "\ud800"]): random_json(rng, depth + 1)
        for _ in range(rng.randrange(4))
    }


RAW_JSON = [
    b"",
    b"null",
    b"[]",
    b"3",
    b"{",
    b'"',
    b"\xff",
    b"\0",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"a":1,"a":2}',
    b"1" * 5000,
    b'{"a":' + b"1" * 5000 + b"}",
    b"{}",
    b"\xef\xbb\xbf{}",
    b'{"a":NaN}',
    b'{"a":"\\ud800"}',
    b"[" * 900 + b"]" * 900,
]


def wrong_json(rng, text):
    """A JSON document with some node of another value, gone, or twice."""
    if rng.random() < 0.1:
        return rng.choice(RAW_JSON)
    if rng.random() < 0.1:
        return damaged(rng, text)
    root = json.loads(text)
    for _ in range(rng.choice((1, 1, 2))):
        node = root
        while True:
            places = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not places:
                break
            place = rng.choice(places)
            if isinstance(node[place], (dict, list)) and node[place] and rng.random() < 0.8:
                node = node[place]
                continue
            what = rng.randrange(4)
            if what == 0:
                del node[place]
            elif what == 1 and isinstance(node, dict):
                node[rng.choice(TEXTS)] = node[place]
            else:
                node[place] = random_json(rng)
            break
    out = json.dumps(root).encode()
    if rng.random() < 0.05:
        out = out.replace(b"{", b'{"x": 1, "x": 1, ', 1)
    if rng.random() < 0.05:
        out = b'{"deep": ' + b"[" * 5000 + b"]" * 5000 + b", " + out[1:]
    return out


def wrong_hf(rng, files):
    name = rng.choice(
        [name for name in files if name.endswith(".json")] * 2 + [name for name in files if not name.endswith(".json")]
    )
    data = files[name]
    if name.endswith(".json"):
        files[name] = wrong_json(rng, data)
        if rng.random() < 0.1:
            files["chat_template.jinja"] = rng.choice(BYTES)
    elif rng.random() < 0.3:
        files[name] = damaged(rng, data, 8 + int.from_bytes(data[:8], "little"))
    else:
        n = int.from_bytes(data[:8], "little")
        head = wrong_json(rng, data[8 : 8 + n])
        files[name] = (
            (rng.choice(EDGES) % 2**64 if rng.random() < 0.1 else len(head)).to_bytes(8, "little")
            + head
            + data[8 + n :]
        )
    if rng.random() < 0.03:
        del files[name]
    return files


def wrong_saved(rng, files):
    data = files["kv"]
    if rng.random() < 0.3:
        return {"kv": damaged(rng, data)}
    n = int.from_bytes(data[:8], "little")
    text = wrong_json(rng, data[8 : 8 + n])
    head = (rng.choice(EDGES) % 2**64 if rng.random() < 0.1 else len(text)).to_bytes(8, "little") + text
    # Checksums that are right, so that the header is believed.
    out = head + data[8 + n : -8]
    tail = out[len(out) - 160 :] if b'"tokens"' in text else b""
    out += zlib.crc32(tail, zlib.crc32(head)).to_bytes(4, "little")
    return {"kv": out + zlib.crc32(out).to_bytes(4, "little")}


TEMPLATES = [
    "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}",
    (
        "{%- set ns = namespace(n=0, x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m['content'] | trim %}{%"
        " endfor %}{{ ns.x }}"
    ),
    (
        "{% macro show(m, n=2) %}{{ m.role.upper() }}: {{ '%s|%d' % (m.content, n) }}{% endmacro %}{% for m in messages"
        " %}{{ show(m, loop.index) }}{% endfor %}"
    ),
    (
        "{% if messages[0].content is string and '</t>' in messages[0].content %}{{"
        " messages[0].content.split('</t>')[-1] }}{% else %}{{ messages | tojson(indent=2) }}{% endif %}"
    ),
    (
        "{% set x %}a{{ 1 + 2 }}{% endset %}{{ x | indent(4) }}{{ ['b', 'a'] | sort | join(', ') }}{{ '{:>4}'.format(x)"
        " }}{{ range(3) | list }}"
    ),
]
NAMES = "messages m x ns ns.x loop loop.index self caller varargs range dict namespace cycler joiner bos_token".split()
ATOMS = (
    "0 1 -1 7 10**9 2**31 2**63 10**18 1.5 1e308 '' 'x' '%s' '%9d' '{}' '{0.a}' '\\n' true none [] {} 'content'"
    " '__class__' 'a.b'".split()
)
FILTERS = (
    "abs attr batch capitalize center count default dictsort e first float format groupby indent int items join last"
    " length list lower map max min pprint reject rejectattr replace reverse round safe select selectattr slice sort"
    " string sum title tojson trim truncate unique upper wordcount wordwrap xmlattr".split()
)
TESTS = "defined none string mapping iterable odd divisibleby eq in lt sameas callable lower number filter".split()
METHODS = (
    "upper split rsplit splitlines strip rstrip replace join format format_map center ljust zfill startswith find rfind"
    " encode items get keys values index count append update copy __class__ __init__ mro next title".split()
)


def expression(rng, depth=0):
    """A random expression of Jinja, mostly of a kind that could grow."""
    if depth > 3 or rng.random() < 0.25:
        return rng.choice(NAMES + ATOMS)
    a, b, c = (expression(rng, depth + 1) for _ in range(3))
    return rng.choice(
        (
            f"({a} {rng.choice(('+', '-', '*', '*', '/', '//', '%', '**', '~', '==', '<', 'in', 'and', 'or'))} {b})",
            f"({a} | {rng.choice(FILTERS)})",
            f"({a} | {rng.choice(FILTERS)}({b}))",
            f"({a} | {rng.choice(FILTERS)}({b}, {c}))",
            f"({a} is {rng.choice(TESTS)})",
            f"({a} is {rng.choice(TESTS)}({b}))",
            f"({a}).{rng.choice(METHODS)}({b})",
            f"({a}).{rng.choice(METHODS)}()",
            f"({a}).{rng.choice(METHODS)}({b}, {c})",
            f"({a})[{b}]",
            f"({a})[{b}:{c}]",
            f"[{a}, {b}]",
            f"({a}, {b})",
            f"{{{a}: {b}}}",
            f"({a} if {b} else {c})",
            f"range({a})",
            f"namespace(x={a})",
            f"dict(a={a})",
            f"({a})({b})",
            f"f({a})",
        )
    )


def statement(rng, depth=0):
    a, b = expression(rng), expression(rng)
    inner = (lambda: "") if depth > 3 else lambda: "".join(statement(rng, depth + 1) for _ in range(rng.randrange(3)))
    return rng.choice(
        (
            lambda: f"{{{{ {a} }}}}",
            lambda: f"{{{{ {a} }}}}",
            lambda: f"{{% set x = {a} %}}",
            lambda: f"{{% set ns.x = {a} %}}",
            lambda: f"{{% set x %}}{inner()}{{% endset %}}",
            lambda: f"{{% for m in {a} %}}{inner()}{{% endfor %}}",
            lambda: f"{{% for m in range(99999) %}}{inner()}{{% endfor %}}",
            lambda: f"{{% for m in {a} if {b} recursive %}}{{{{ loop({b}) }}}}{{% endfor %}}",
            lambda: f"{{% if {a} %}}{inner()}{{% endif %}}",
            lambda: f"{{% macro f(x) %}}{inner()}{{{{ f({a}) }}}}{{% endmacro %}}",
            lambda: f"{{% call f({a}) %}}{inner()}{{% endcall %}}",
            lambda: f"{{% filter {rng.choice(FILTERS)} %}}{inner()}{{% endfilter %}}",
            lambda: f"{{% with x = {a} %}}{inner()}{{% endwith %}}",
            lambda: f"{{% block b %}}{inner()}{{{{ self.b() }}}}{{% endblock %}}",
            lambda: f"{{% autoescape {a} %}}{inner()}{{% endautoescape %}}",
        )
    )()


def wrong_template(rng, files):
    if rng.random() < 0.2:
        return {"template": damaged(rng, files["template"])}
    text = "{% set ns = namespace(x='x') %}" + "".join(statement(rng) for _ in range(rng.randint(1, 5)))
    return {"template": text.encode("utf-8", "surrogatepass")}


LINES = [
    {
        "id": "a",
        "prompt": "Hi there",
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 1,
        "max_tokens": 4,
    },
    {
        "messages": [{"role": "user", "content": "Hi!"}],
        "logprobs": 2,
        "prompt_logprobs": 1,
        "stop": ["e"],
        "stop_token_ids": [3],
    },
    {
        "prompt_token_ids": [72, 105],
        "logit_bias": {"97": -3.5},
        "min_tokens": 1,
        "ignore_eos": True,
        "presence_penalty": 1,
        "repetition_penalty": 1.1,
    },
]


def wrong_jsonl(rng, files):
    lines = [wrong_json(rng, line) for line in files["in.jsonl"].splitlines()]
    data = rng.choice((b"\n", b"\n", b"\r\n", b"", b"\n\0\n")).join(lines)
    return {"in.jsonl": damaged(rng, data) if data and rng.random() < 0.1 else data}


# ---- For fuzz.py: one file of bytes a case ----

MARK = b"\n%%%% "


def joined(files):
    """A case as bytes: the file itself, or every file behind a line with its name."""
    if len(files) == 1:
        return next(iter(files.values()))
    return b"".join(MARK + name.encode() + b"\n" + data for name, data in files.items())


def split(data):
    """The way back, for a directory; a name that could lead elsewhere is left out."""
    files = {}
    for part in data.split(MARK)[1:]:
        name, _, content = part.partition(b"\n")
        name = name.decode("latin-1")
        if (
            name.replace("-", "").replace("_", "").replace(".", "").isalnum()
            and not name.startswith(".")
            and len(name) < 64
        ):
            files[name] = content
    return files


def main(folder):
    for kind in KINDS:
        target = Path(folder) / kind
        target.mkdir(parents=True, exist_ok=True)
        for i, files in enumerate([*seeds(kind), *mutants(kind, 200, seed=1)]):
            (target / f"{i:04}").write_bytes(joined(files))


if __name__ == "__main__":
    main(sys.argv[1])
