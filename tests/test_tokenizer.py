"""Tokenizer and chat templates against goldens of transformers and llama.cpp, and against small
tokenizers written here: Python's `re` for the splits, textbook BPE and SentencePiece for the merges."""

import enum
import itertools
import json
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.chat import ChatError, ChatTemplate
from pagedkv.errors import FormatError, TokenError
from pagedkv.hub import MODELS
from pagedkv.tokenizer import Tokenizer

GOLDEN_PATH = Path(__file__).parent / "golden" / "tokenizer_smollm2.json"
GOLDEN = json.loads(GOLDEN_PATH.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model_path():
    path = Path(os.environ.get("PAGEDKV_TEST_MODEL") or MODELS["smollm2-135m"].path)
    if not path.is_file():
        pytest.skip(f"no PAGEDKV_TEST_MODEL, and no {path.name} in the cache folder")
    return path


@pytest.fixture(scope="module")
def smollm2(model_path):
    return Tokenizer.from_model_file(model_path)


# ---- Small vocabularies -------------------------------------------------------------------------


def gpt2_alphabet():
    """GPT-2's characters by byte, as its paper's code lists them."""
    kept = "!~", "¡¬", "®ÿ"  # first and last of each printable range of Latin-1
    spare = itertools.count(256)
    characters = map(chr, range(256))
    return [c if any(a <= c <= z for a, z in kept) else chr(next(spare)) for c in characters]


ALPHABET = gpt2_alphabet()


def spell(text):
    return "".join(ALPHABET[byte] for byte in text.encode())


# Everything that merges: a piece of text that is not cut becomes as few tokens as its length lets it,
# so a wrong cut shows in the tokens.
LETTERS = "aS1 \n'!"
WORDS = [spell("".join(word)) for length in (2, 3) for word in itertools.product(LETTERS, repeat=length)]
MERGES = [(word[:cut], word[cut:]) for word in WORDS for cut in range(1, len(word))]
SPLITS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+",
    "smollm": r"'s|'t|'re|'ve|'m|'ll|'d|[0-9]| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?=[0-9])|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'[stmd]|'re|'ve|'ll)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'[stmd]|'re|'ve|'ll)|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]"
    r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


def byte_level_metadata(pre="gpt-2", **more):
    tokens = ALPHABET + WORDS + ["<end>", "<turn>", "<think>", "<beg>"]
    types = np.ones(len(tokens), np.int32)
    types[-4:] = (3, 3, 4, 3)
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": [" ".join(pair) for pair in MERGES],
        "token_type": types,
        "bos_token_id": len(tokens) - 1,
        "eos_token_id": len(tokens) - 4,
    } | more
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def merge_by_rank(symbols, ranks):
    """Textbook BPE: of all neighbours the best ranked pair, leftmost first, until none is left."""
    symbols = list(symbols)
    while True:
        pairs = [(ranks[pair], at) for at, pair in enumerate(zip(symbols, symbols[1:])) if pair in ranks]
        if not pairs:
            return symbols
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]


@pytest.mark.parametrize("pre", SPLITS)
def test_splits_match_the_published_rules(pre):
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata(pre, add_bos_token=False))
    ranks = {pair: rank for rank, pair in reversed(list(enumerate(MERGES)))}

    @settings(max_examples=600, deadline=None)
    @given(st.text(LETTERS, max_size=14))
    def check(text):
        expected = []
        for piece in re.findall(SPLITS[pre], text):
            piece = spell(piece)
            whole = pre == "llama-bpe" and piece in WORDS  # ignore_merges
            expected += [piece] if whole else merge_by_rank(piece, ranks)
        assert [tokenizer.id_to_token(i) for i in tokenizer.encode(text)] == expected
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


def test_llama3_takes_known_words_whole():
    """Its vocabulary has words that no merge makes (ignore_merges in its tokenizer.json)."""
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "aaaa"]
    for pre, n_ids in (("llama-bpe", 1), ("qwen2", 2)):
        metadata = byte_level_metadata(pre, tokens=tokens, token_type=None, add_bos_token=False)
        assert len(Tokenizer.from_gguf_metadata(metadata).encode("aaaa")) == n_ids


def test_names_of_one_split_are_one_split():
    text = "a11a '!S  1"
    ids = {
        pre: tuple(Tokenizer.from_gguf_metadata(byte_level_metadata(pre, add_bos_token=False)).encode(text))
        for pre in ("default", "gpt-2", "llama3", "llama-v3", "llama-bpe")
    }
    assert ids["default"] == ids["gpt-2"] != ids["llama-bpe"]
    assert ids["llama3"] == ids["llama-v3"] == ids["llama-bpe"]


def test_qwen2_composes_characters():
    composed, decomposed = "\u00e9", "e\u0301"
    qwen2 = Tokenizer.from_gguf_metadata(byte_level_metadata("qwen2"))
    assert qwen2.encode(decomposed) == qwen2.encode(composed)
    gpt2 = Tokenizer.from_gguf_metadata(byte_level_metadata("gpt-2"))
    assert gpt2.encode(decomposed) != gpt2.encode(composed)


def sentencepiece_metadata(words="the he th ▁the ▁ ▁▁ in ing ▁th e", **more):
    """A scored vocabulary with all bytes; longer words score higher, as in a trained one."""
    words = list(dict.fromkeys([*words.split(), *"abcdefghijklmnopqrstuvwxyz▁"]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<tool>"]
    types = np.array([2, 3, 3] + [6] * 256 + [1] * len(words) + [4], np.int32)
    scores = np.zeros(len(tokens), np.float32)
    scores[259:-1] = -np.arange(len(words))
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | more
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def sentencepiece_oracle(text, metadata):
    """SentencePiece's BPE: join the neighbours whose union scores highest; unknown text to bytes."""
    columns = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    scores = {token: score for token, score, kind in zip(*columns) if kind == 1}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = enumerate(zip(symbols, symbols[1:]))
        unions = [(-scores[a + b], at) for at, (a, b) in pairs if a + b in scores]
        if not unions:
            break
        _, at = min(unions)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        part for s in symbols for part in ([s] if s in scores else [f"<0x{byte:02X}>" for byte in s.encode()])
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab▁", min_size=2, max_size=5), unique=True, max_size=12), st.data())
def test_sentencepiece_merges_by_score(words, data):
    metadata = sentencepiece_metadata(" ".join(words))
    tokenizer = Tokenizer.from_gguf_metadata(metadata)
    for text in data.draw(st.lists(st.text("ab é\n", max_size=10), min_size=1, max_size=8)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer.id_to_token(i) for i in ids] == sentencepiece_oracle(text, metadata)
        assert tokenizer.decode(ids) == text


def test_sentencepiece_spaces_and_specials():
    tokenizer = Tokenizer.from_gguf_metadata(sentencepiece_metadata())

    def tokens(text, **options):
        return [tokenizer.id_to_token(i) for i in tokenizer.encode(text, **options)]

    assert tokens("the") == ["<s>", "▁the"]
    assert tokens(" the") == ["<s>", "▁", "▁the"]  # one space of the text's own, one put in front
    assert tokens("a</s>b") == ["<s>", "▁", "a", "</s>", "▁", "b"]  # each stretch gets its space
    assert tokens("a<tool>", add_special_tokens=False) == ["▁", "a", "<tool>"]
    assert tokens("\u00e9", add_special_tokens=False) == ["▁", "<0xC3>", "<0xA9>"]
    ids = tokenizer.encode("the thing")
    assert tokenizer.decode(ids) == "<s> the thing"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the thing"

    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == "the thing"
    onward = tokenizer.stream(continuing=True)  # after a prompt the first word keeps its space
    assert onward.push(tokenizer.token_to_id("▁the")) == " the"

    bare = Tokenizer.from_gguf_metadata(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert [bare.id_to_token(i) for i in bare.encode("the")] == ["the"]
    assert bare.decode([bare.token_to_id("▁the")]) == " the"


# ---- The real model -----------------------------------------------------------------------------


def test_real_model_encodes_like_transformers_and_llama_cpp(smollm2):
    wrong = [case["text"] for case in GOLDEN["cases"] if smollm2.encode(case["text"]) != case["ids"]]
    assert len(GOLDEN["cases"]) > 200 and wrong == []


def test_real_model_decodes_like_transformers(smollm2):
    for case in GOLDEN["cases"]:
        assert smollm2.decode(case["ids"]) == case["decoded"]
        stream = smollm2.stream(skip_special_tokens=False)
        assert "".join(map(stream.push, case["ids"])) + stream.finish() == case["decoded"]


def test_real_model_chat(smollm2):
    for chat in GOLDEN["chats"]:
        options = {"add_generation_prompt": chat["add_generation_prompt"]}
        assert smollm2.apply_chat_template(chat["messages"], tokenize=False, **options) == chat["text"]
        assert smollm2.apply_chat_template(chat["messages"], **options) == chat["ids"]
    # The template, not this package, adds the default system prompt.
    assert "named SmolLM" in smollm2.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)


def test_real_model_ids(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert smollm2.token_to_id("<|im_end|>") == 2 and smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.token_to_id("no such token") is None


def test_real_model_streams_no_half_character(smollm2):
    text = "naïve 日本語 👨‍👩‍👧 🏳️‍🌈 déjà"
    stream = smollm2.stream()
    parts = [stream.push(i) for i in smollm2.encode(text)]
    assert "".join(parts) == text and "\ufffd" not in "".join(parts) and stream.finish() == ""
    assert "" in parts  # some tokens did end inside a character


def test_fork_and_no_parallelism_warning(model_path):
    """A child encodes after os.fork; the library's warning about forks does not appear."""
    script = """
        import os, sys
        from pagedkv.tokenizer import Tokenizer
        tokenizer = Tokenizer.from_model_file(sys.argv[1])
        expected = tokenizer.encode("Hello, world! " * 2000)
        child = os.fork()
        if child == 0:
            os._exit(0 if tokenizer.encode("Hello, world! " * 2000) == expected else 1)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    environment = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(model_path)],
        capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")


# ---- Streaming ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both_kinds():
    return [
        Tokenizer.from_gguf_metadata(byte_level_metadata()),
        Tokenizer.from_gguf_metadata(sentencepiece_metadata()),
    ]


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_stream_adds_up_to_decode(both_kinds, data):
    for tokenizer in both_kinds:
        # Mostly single bytes, so that whole, cut and impossible characters come up.
        ids = data.draw(st.lists(st.integers(0, 258) | st.integers(0, tokenizer.vocab_size - 1), max_size=12))
        for skip in (True, False):
            stream = tokenizer.stream(skip_special_tokens=skip)
            assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids, skip)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_byte_level_decode_is_that_of_the_tokenizers_library(both_kinds, data):
    tokenizer = both_kinds[0]
    ids = data.draw(st.lists(st.integers(0, 255) | st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=12))
def test_text_survives_and_comes_character_by_character(both_kinds, text):
    for tokenizer in both_kinds:
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        stream, shown = tokenizer.stream(), ""
        for token_id in ids:
            shown += stream.push(token_id)
            assert text.startswith(shown)  # nothing shown has to be taken back


def test_invalid_bytes_become_replacement_characters(both_kinds):
    for tokenizer, byte in zip(both_kinds, (lambda b: b, lambda b: b + 3)):
        stream = tokenizer.stream()
        assert [stream.push(byte(b)) for b in (0xF0, 0x9F, 0x98, 0x80)] == ["", "", "", "😀"]
        assert stream.push(byte(0xFF)) == "\ufffd"
        assert stream.push(byte(0xC3)) == "" and stream.push(byte(ord("a"))) == "\ufffda"
        assert stream.push(byte(0xC3)) == "" and stream.finish() == "\ufffd" and stream.finish() == ""
        with pytest.raises(ValueError, match="finished"):
            stream.push(byte(0x41))
    # A character cut after its second byte: one U+FFFD in Python, Rust and byte-level decoders,
    # one a byte in SentencePiece, where every byte is a token.
    cut = (0xE6, 0x97)
    assert both_kinds[0].decode(cut) == "\ufffd"
    assert both_kinds[1].decode([byte + 3 for byte in cut]) == "\ufffd\ufffd"


def test_push_of_a_bad_id_changes_nothing(both_kinds):
    stream = both_kinds[0].stream()
    stream.push(0xC3)
    for bad in (-1, both_kinds[0].vocab_size, 2**31 - 1):
        with pytest.raises(TokenError, match=re.escape(f"token id {bad} is outside [0, ")):
            stream.push(bad)
    assert stream.push(0xA9) == "é"


# ---- Special tokens -----------------------------------------------------------------------------


def test_one_bos(both_kinds):
    """llama-cpp-python 1501: a prompt that writes its own BOS must not get another."""
    for metadata, adds in (
        (byte_level_metadata("llama-bpe"), True),
        (byte_level_metadata("gpt-2"), False),
        (byte_level_metadata("gpt-2", add_bos_token=True), True),
        (byte_level_metadata("llama-bpe", add_bos_token=False), False),
        (byte_level_metadata("llama-bpe", bos_token_id=None), False),
    ):
        tokenizer = Tokenizer.from_gguf_metadata(metadata)
        bos = tokenizer.token_to_id("<beg>")
        assert tokenizer.encode("aS").count(bos) == adds
        assert tokenizer.encode("").count(bos) == adds
        assert tokenizer.encode("<beg>aS").count(bos) == 1
        assert tokenizer.encode("aS", add_special_tokens=False).count(bos) == 0


def test_add_eos():
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata(add_eos_token=True))
    end = tokenizer.token_to_id("<end>")
    assert tokenizer.encode("a")[-1] == end and tokenizer.encode("a<end>").count(end) == 1


def test_every_end_id():
    """vLLM 4180: stop on each end id, not only the first."""
    n = len(byte_level_metadata()["tokenizer.ggml.tokens"])

    def ends(**more):
        return Tokenizer.from_gguf_metadata(byte_level_metadata(**more)).eos_token_ids

    assert ends() == (n - 4,)
    assert ends(eot_token_id=n - 3, eom_token_id=n - 4) == (n - 4, n - 3)
    assert ends(eos_token_id=None) == ()
    assert ends(eos_token_id=2**32 - 1) == ()  # how some files write "none"
    # A Llama-3 file without eot_token_id still ends its turns; an ordinary token of that name does not count.
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "<|eot_id|>"]
    kinds = [*byte_level_metadata()["tokenizer.ggml.token_type"], 3]
    assert ends(tokens=tokens, token_type=kinds) == (n - 4, n)
    assert ends(tokens=tokens, token_type=kinds[:-1] + [1]) == (n - 4,)


def test_parse_special(both_kinds):
    tokenizer = both_kinds[0]
    end, think = tokenizer.token_to_id("<end>"), tokenizer.token_to_id("<think>")
    assert tokenizer.encode("a<end>") == [*tokenizer.encode("a"), end]
    plain = tokenizer.encode("a<end><think>", parse_special=False)
    assert end not in plain and think in plain  # a user-defined token is a word, not control
    assert tokenizer.decode(plain) == "a<end><think>"
    assert tokenizer.encode("a<end>")[-1] == end  # the other mode did not stick
    assert tokenizer.decode([end, think], skip_special_tokens=True) == "<think>"


# ---- Bad input ----------------------------------------------------------------------------------


def test_bad_text_and_ids(both_kinds):
    tokenizer = both_kinds[0]
    for bad in (b"a", None, 7, ["a"]):
        with pytest.raises(TypeError, match="must be a str, not"):
            tokenizer.encode(bad)
    with pytest.raises(ValueError, match="lone surrogate, .* at index 1"):
        tokenizer.encode("a\ud800b")
    for bad in (-1, tokenizer.vocab_size, 2**31 - 1, 2**70):
        with pytest.raises(TokenError, match="outside"):
            tokenizer.decode([1, bad])
        with pytest.raises(TokenError, match="outside"):
            tokenizer.id_to_token(bad)
    assert tokenizer.decode(np.array([ord("a")], np.int32)) == "a" and tokenizer.decode([]) == ""


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": None}, "has no tokenizer"),
        ({"tokens": None}, "has no tokenizer"),
        ({"model": "bert"}, "'bert', which is not read here"),
        ({"pre": "tekken"}, "'tekken', a pre-tokenizer not read here"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["a a", "a  b"]}, r"merges\[1\] is 'a  b'"),
        ({"merges": ["a zzz"]}, "merges do not fit"),
        ({"token_type": [1, 1]}, "token_type has 2 entries for"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, "holds 'a' more than once"),
    ],
)
def test_damaged_metadata(change, message):
    with pytest.raises(FormatError, match=message):
        Tokenizer.from_gguf_metadata(byte_level_metadata(**change))


def test_sentencepiece_needs_scores():
    with pytest.raises(FormatError, match="scores has 0 entries for"):
        Tokenizer.from_gguf_metadata(sentencepiece_metadata(scores=None))
    # Some files carry merges as well; then those count.
    merged = Tokenizer.from_gguf_metadata(sentencepiece_metadata(scores=None, merges=["t h"]))
    assert [merged.id_to_token(i) for i in merged.encode("the")] == ["<s>", "▁", "th", "e"]


def test_missing_pre_tokenizer_warns():
    with pytest.warns(UserWarning, match="names no pre-tokenizer"):
        Tokenizer.from_gguf_metadata(byte_level_metadata(pre=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tokenizer.from_gguf_metadata(byte_level_metadata())


def test_padding_of_the_vocabulary():
    """Empty tokens, and ids of the embedding that no token has, decode to nothing."""
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "", ""]
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata(tokens=tokens, token_type=None))
    assert tokenizer.vocab_size == len(tokens)
    assert tokenizer.decode([ord("a"), len(tokens) - 1]) == "a"
    assert tokenizer.id_to_token(len(tokens) - 1) is None


# ---- Hugging Face directories -------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    """A directory whose tokenizer.json the tokenizers library wrote; files are added by name."""
    Tokenizer.from_gguf_metadata(byte_level_metadata("qwen2"))._backend.save(str(tmp_path / "tokenizer.json"))

    def write(**files):
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


def test_directory(directory):
    source = Tokenizer.from_gguf_metadata(byte_level_metadata("qwen2"))
    n = source.vocab_size
    path = directory(
        tokenizer_config={"bos_token": {"content": "<beg>"}, "eos_token": "<end>", "add_bos_token": True},
        config={"vocab_size": n + 100, "eos_token_id": n - 4, "bos_token_id": 3},
        generation_config={"eos_token_id": [n - 3, n - 4]},
    )
    tokenizer = Tokenizer.from_model_file(path)
    assert tokenizer.bos_token_id == n - 1 and tokenizer.eos_token_ids == (n - 4, n - 3)
    assert tokenizer.encode("aS 11") == [n - 1, *source.encode("aS 11")]
    assert tokenizer.encode("<beg>aS") == source.encode("<beg>aS")
    assert tokenizer.vocab_size == n + 100 and tokenizer.decode([ord("a"), n + 99]) == "a"
    with pytest.raises(TokenError):
        tokenizer.decode([n + 100])


def test_directory_without_settings(directory):
    tokenizer = Tokenizer.from_directory(directory(config={"bos_token_id": 5, "eos_token_id": 6}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.chat_template) == (5, (6,), None)
    with pytest.raises(ChatError, match="has no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_directory_post_processor(directory):
    """Where no setting says so, tokenizer.json itself tells what goes around a text (Llama 3)."""
    path = directory()
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    ids = {token: backend.token_to_id(token) for token in ("<beg>", "<end>")}
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<beg> $A <end>", special_tokens=list(ids.items())
    )
    backend.enable_truncation(2)  # as saved by somebody who had cut texts
    backend.enable_padding(length=50)
    backend.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(path)
    text = "aS1 'S!" * 3
    inner = tokenizer.encode(text, add_special_tokens=False)
    assert len(inner) > 2 and tokenizer.decode(inner) == text
    assert tokenizer.encode(text) == [ids["<beg>"], *inner, ids["<end>"]]
    directory(tokenizer_config={"bos_token": "<beg>", "add_bos_token": False})
    assert Tokenizer.from_directory(path).encode(text) == inner


def test_directory_sentencepiece_and_unknown_decoders(directory):
    path = directory()
    source = Tokenizer.from_gguf_metadata(sentencepiece_metadata())
    source._backend.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(path)
    ids = tokenizer.encode("the thing \u00e9")
    assert tokenizer.decode(ids) == "the thing \u00e9"
    stream = tokenizer.stream()
    assert stream.push(ids[0]) == "the"

    # A decoder without a rule here: right, though only at the end.
    source._backend.decoder = tokenizers.decoders.Metaspace()
    source._backend.save(str(path / "tokenizer.json"))
    odd = Tokenizer.from_directory(path)
    stream = odd.stream()
    assert "".join(map(stream.push, ids)) == ""
    assert stream.finish() == odd.decode(ids, skip_special_tokens=True)


def test_directory_chat_templates(directory):
    messages = [{"role": "user", "content": "Hi"}]
    config = {"bos_token": "<beg>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    path = directory(tokenizer_config=config)
    tokenizer = Tokenizer.from_directory(path)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<beg>Hi"
    assert tokenizer.apply_chat_template(messages)[0] == tokenizer.bos_token_id
    assert tokenizer.apply_chat_template(messages).count(tokenizer.bos_token_id) == 1

    # The template decides: on a model that puts a BOS before plain text, one without stays without.
    config |= {"chat_template": "{{ messages[0].content }}", "add_bos_token": True}
    silent = Tokenizer.from_directory(directory(tokenizer_config=config))
    assert silent.encode("Hi")[0] == silent.bos_token_id
    assert silent.bos_token_id not in silent.apply_chat_template(messages)

    config["chat_template"] = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    directory(tokenizer_config=config)
    assert Tokenizer.from_directory(path).apply_chat_template(messages, tokenize=False) == "D"

    config["chat_template"] = config["chat_template"][:1]
    directory(tokenizer_config=config)
    with pytest.raises(ChatError, match="called default, only tool_use"):
        Tokenizer.from_directory(path).apply_chat_template(messages)

    (path / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_directory(path).apply_chat_template(messages, tokenize=False) == "J"


def test_damaged_directories(directory):
    path = directory(tokenizer_config={"bos_token": "<nowhere>"})
    with pytest.raises(FormatError, match="names bos_token '<nowhere>', which tokenizer.json lacks"):
        Tokenizer.from_directory(path)
    directory(tokenizer_config=[1])
    with pytest.raises(FormatError, match="is not a JSON object"):
        Tokenizer.from_directory(path)
    directory(tokenizer_config={"chat_template": [{"name": "default"}]})
    with pytest.raises(FormatError, match="without name or text"):
        Tokenizer.from_directory(path)
    directory(tokenizer_config={"chat_template": 7})
    with pytest.raises(FormatError, match="is a int, not text"):
        Tokenizer.from_directory(path).apply_chat_template([])
    (path / "tokenizer_config.json").write_text("{")
    with pytest.raises(FormatError, match="is not valid JSON"):
        Tokenizer.from_directory(path)
    (path / "tokenizer_config.json").write_bytes(b"\xff")
    with pytest.raises(FormatError, match="is not valid JSON"):
        Tokenizer.from_directory(path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match="cannot be read"):
        Tokenizer.from_directory(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(FormatError, match="has no tokenizer.json"):
        Tokenizer.from_directory(path)


# ---- Chat templates -----------------------------------------------------------------------------


def render(source, messages=(), **variables):
    return ChatTemplate(source).render(list(messages), **variables)


def test_template_environment():
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\n") == "x\n"
    assert render("{{ x | tojson }}", x={"a": "<é>"}) == '{"a": "<é>"}'
    assert render("{{ x | tojson(indent=1) }}", x=[1]) == "[\n 1\n]"
    assert re.fullmatch(r"\d{4}-\d\d", render("{{ strftime_now('%Y-%m') }}"))
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("{{ bos_token is defined }}") == "False"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=True) == "True"


def test_template_errors():
    with pytest.raises(FormatError, match="does not parse"):
        ChatTemplate("{% if %}")
    with pytest.raises(ChatError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatError, match="fails on these messages: UndefinedError"):
        render("{{ 'a' + messages[0]['content'] }}", [{"role": "user"}])
    for bad in (
        "Hi",
        {"role": "user"},
        [7],
        [{"content": "x"}],
        [{"role": 7}],
        [{"role": "user", "content": object()}],
    ):
        with pytest.raises(TypeError):
            ChatTemplate("x").render(bad)


def test_template_is_in_a_sandbox():
    for attack in ("''.__class__.__mro__", "messages.append(1)", "''.__class__()", "x.__init__.__globals__"):
        with pytest.raises(ChatError, match="SecurityError"):
            render("{{ " + attack + " }}", x={})
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ChatError):
        render("{{ messages[0].update({'content': 'changed'}) }}", messages)
    assert messages == [{"role": "user", "content": "Hi"}]


def test_template_sees_plain_data_only():
    class Role(str, enum.Enum):
        USER = "user"

        def __str__(self):
            return "wrong"

    assert render("{{ messages[0].role }}", [{"role": Role.USER}]) == "user"
    assert render("{{ x }} {{ y }}", x=np.float64(0.5), y=(1, None, True)) == "0.5 [1, None, True]"
