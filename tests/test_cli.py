"""The command on a tiny model with a byte-level tokenizer: in this process where it can be, else as a user runs it."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from promise_rows import REAL_MODEL, child_env, real_model
from test_tokenizer import ALPHABET
from tiny import tiny_config, tiny_tensors, write_gguf, write_hf

import pagedkv as pk
from pagedkv import cli
from pagedkv.tokenizer import Tokenizer

CHILD_SECONDS = 120  # only ends a hang
END, BEGIN, USER = 256, 257, 258
TOKENS = [*ALPHABET, "<end>", "<beg>", "<user>", "Hi"]
METADATA = {f"tokenizer.ggml.{key}": value for key, value in {
    "model": "gpt2", "pre": "gpt-2", "tokens": TOKENS, "merges": ["H i"], "token_type": [1] * 256 + [3] * 3 + [1],
    "eos_token_id": END, "bos_token_id": BEGIN,
}.items()} | {"tokenizer.chat_template": "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}"}  # fmt: skip
CONFIG = tiny_config(vocab_size=len(TOKENS), context_len=3000, bos_token_id=BEGIN, eos_token_ids=(END,),
                     tied_embeddings=False)  # fmt: skip


def text_tensors():
    """Weights that say small letters, spaces and the end token more than others, whose logits are about 0."""
    tensors = tiny_tensors(CONFIG)
    likely = [*range(ord("a"), ord("z") + 1), ord(" "), END]
    tensors["lm_head.weight"][np.setdiff1d(np.arange(len(TOKENS)), likely)] *= np.float32(1e-3)
    return tensors


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, CONFIG, text_tensors(), metadata=METADATA)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "tiny"
    write_hf(path, CONFIG, text_tensors())
    Tokenizer.from_gguf_metadata(METADATA)._backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def run(capsys, threads):
    """Function that runs the command here: (status, standard output, standard error)."""

    def call(*args):
        status = cli.main([str(arg) for arg in args])
        return status, *capsys.readouterr()

    return call


def command(*args):
    return [sys.executable, "-m", "pagedkv", *map(str, args)]


def child(*args, shell="", env=(), entry=command, **options):
    """Run the command as a process; `shell` is redirections such as ``>&-``. `env` may unset with None."""
    variables = child_env() | {"PYTHONUNBUFFERED": None} | dict(env)  # unbuffered, no write could fail late
    variables = {name: value for name, value in variables.items() if value is not None}
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE} | options
    return subprocess.run(["sh", "-c", f'exec "$@" {shell}', "sh", *entry(*args)], env=variables, text=True,
                          stderr=subprocess.PIPE, timeout=CHILD_SECONDS, **options)  # fmt: skip


def refusal(done):
    """The one sentence of a process that refused, after checks that hold for all of them."""
    assert done.returncode == 2, done
    assert re.fullmatch(r"pagedkv: error: [^\n]+\n", done.stderr), done.stderr
    return done.stderr.removeprefix("pagedkv: error: ")


def feed(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def draw_by(monkeypatch, choose):
    """Have ``choose(sample, n)`` say the token of a sample that has n already; whatever the model."""

    def draw(self, logits, wanted):
        return [(choose(sample.index, sample.n_generated), None) for _, sample in wanted]

    monkeypatch.setattr("pagedkv.engine.sampler.Sampler.draw", draw)


def script(monkeypatch, *texts):
    """Have samples say these bytes, a token a step, then end; whatever the model."""
    draw_by(monkeypatch, lambda sample, n: texts[sample][n] if n < len(texts[sample]) else END)


# ---- generate -----------------------------------------------------------------------------------

STATISTICS = re.compile(
    r"\[(\d+) tokens? in (\d+) samples?, (?:[\d.]+ tokens/s|no token decoded after the prompt's) on \d+ threads?; "
    r"(?:none|\d+) ended by (?:itself|themselves); prompt of (\d+) tokens? in [\d.]+ s; "
    r"(\d+) blocks? used, (\d+) saved by sharing\]\n"
)


def samples_of(output):
    """Texts by sample, and the last line."""
    text, last = re.fullmatch(r"(.*\n)(\[[^\n]*\]\n)", output, re.S).groups()
    parts = re.split(r"--- sample \d+ of \d+ ---\n", text)
    return parts[1:] or parts, last


@pytest.mark.parametrize("form", ["gguf", "directory"])
def test_generate(run, request, form):
    model = request.getfixturevalue(form)
    status, output, errors = run("generate", "-n", 3, "--max-tokens", 40, "--seed", 1, "--model", model, "Hi there, you two")
    assert (status, errors) == (0, "")
    texts, last = samples_of(output)
    assert len(texts) == 3 and len(set(texts)) == 3
    assert output.startswith("--- sample 1 of 3 ---\n") and "--- sample 3 of 3 ---\n" in output
    n_tokens, n, n_prompt, used, saved = map(int, STATISTICS.fullmatch(last).groups())
    assert n == 3 and n_tokens <= 120 and n_prompt == 16 and 4 <= used <= 1 + 3 * 3
    # Each sample shares the prompt's block, as long as it lives.
    assert 1 <= saved <= 2


def test_the_text_is_that_of_the_library(run, gguf):
    """The tokens of single steps, decoded."""
    model = pk.LlamaModel.load(gguf)
    tokenizer, sampling = model.tokenizer, pk.SamplingParams(temperature=0.8, top_p=0.95, seed=5)
    want = [[], []]
    for sample, tokens in enumerate(want):
        seq = model.new_sequence(model.new_pool(n_tokens=200))
        logits = model.prefill(tokenizer.encode("Hi"), seq)
        while len(tokens) < 30 and END not in tokens:
            tokens.append(sampling.choose(logits, sample, len(seq)))
            logits = model.decode_step(tokens[-1:], [seq])[0]
    texts, _ = samples_of(run("generate", "-n", 2, "--max-tokens", 30, "--seed", 5, "--model", gguf, "Hi")[1])
    decoded = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in want]
    assert [text.removesuffix("\n") for text in texts] == [text.removesuffix("\ufffd") for text in decoded]


def test_compute_is_the_models(run, gguf):
    """`--compute` reaches the model, whose refusal for a file of floats is one sentence."""
    status, output, errors = run("generate", "--compute", "int8", "--model", gguf, "Hi")
    assert (status, output) == (2, "") and "compute='int8' needs quantised weights" in errors
    assert run("generate", "--compute", "int4", "--model", gguf, "Hi")[0] == 2
    assert run("generate", "--compute", "float32", "--max-tokens", 2, "--model", gguf, "Hi")[0] == 0


def test_same_seed_same_text(run, gguf):
    def texts(n, seed):
        return samples_of(run("generate", "-n", n, "--max-tokens", 20, "--seed", seed, "--model", gguf, "Hi")[1])[0]

    eight = texts(8, 3)
    assert texts(8, 3) == eight and texts(2, 3) == eight[:2] and texts(1, 3) == eight[:1]
    assert len(set(eight)) == 8 and texts(8, 4) != eight


def test_quiet_is_only_text(run, gguf):
    args = ("--max-tokens", 12, "--model", gguf, "Hi")
    (text,), _ = samples_of(run("generate", *args)[1])
    assert run("generate", "--quiet", *args) == (0, text, "")
    texts, _ = samples_of(run("generate", "-n", 2, *args)[1])
    want = f"--- sample 1 of 2 ---\n{texts[0]}--- sample 2 of 2 ---\n{texts[1]}"
    assert run("generate", "--quiet", "-n", 2, *args) == (0, want, "")


def test_statistics_in_the_singular(run, gguf, monkeypatch):
    *_, last = run("generate", "--max-tokens", 1, "--threads", 1, "--model", gguf, "i")[1].splitlines()
    assert re.fullmatch(r"\[1 token in 1 sample, no token decoded after the prompt's on 1 thread; none ended by "
                        r"itself; prompt of 1 token in \d+\.\d\d s; 1 block used, 0 saved by sharing\]", last)
    script(monkeypatch, b"ab")
    assert "; 1 ended by itself;" in run("generate", "--model", gguf, "i")[1]
    assert "; none ended by itself;" in run("generate", "--max-tokens", 2, "--model", gguf, "i")[1]
    script(monkeypatch, b"ab", b"c", b"d")
    assert "; 3 ended by themselves;" in run("generate", "-n", 3, "--model", gguf, "i")[1]


def test_the_prompts_time_ends_with_the_first_tokens(run, gguf, monkeypatch):
    step, calls = pk.LlamaModel.step, []

    def slow(self, rows, **options):
        calls.append(rows)
        if len(calls) < 3:  # a prompt in two chunks
            time.sleep(0.2)
        return step(self, rows, **options)

    monkeypatch.setattr(pk.LlamaModel, "step", slow)
    last = run("generate", "--max-tokens", 3, "--ignore-eos", "--model", gguf, "x" * 300)[1]
    assert [sum(len(tokens) for _, tokens in rows) for rows in calls] == [256, 44, 1, 1]  # Ctrl-C is heard between
    assert float(re.search(r"prompt of 300 tokens in (\S+) s", last)[1]) >= 0.4
    assert float(re.search(r"(\S+) tokens/s", last)[1]) > 2 / 0.2


def test_peak_of_blocks_though_samples_end_early(run, gguf, monkeypatch):
    """The second of two samples ends long before the first."""
    prompt = "x" * 20
    draw_by(monkeypatch, lambda sample, n: END if n == (5 if sample else 40) else 97)
    last = run("generate", "-n", 2, "--max-tokens", 50, "--model", gguf, prompt)[1]
    # The first alone has rows 0 to 59 in the end. Together they had one block each and one that they shared: without
    # sharing four too, so the pool could not have been smaller.
    assert "4 blocks used, 0 saved" in last
    draw_by(monkeypatch, lambda *_: 97)
    assert "7 blocks used, 1 saved" in run("generate", "-n", 2, "--max-tokens", 41, "--model", gguf, prompt)[1]
    draw_by(monkeypatch, lambda *_: END)
    assert "2 blocks used, 6 saved" in run("generate", "-n", 4, "--max-tokens", 50, "--model", gguf, prompt)[1]


@pytest.mark.parametrize("n_prompt", [1, 15, 16, 17, 32])
@pytest.mark.parametrize("max_tokens", [1, 2, 16, 17])
def test_the_pool_is_as_large_as_it_must_be(run, gguf, monkeypatch, n_prompt, max_tokens):
    """No sample is put off for want of blocks, and the last step has no block left."""
    made, init = [], pk.LLM.__init__
    monkeypatch.setattr(pk.LLM, "__init__", lambda self, *args, **options: (made.append(self),
                                                                            init(self, *args, **options))[1])
    args = ("--ignore-eos", "--max-tokens", max_tokens, "--model", gguf, "x" * n_prompt)
    assert run("generate", "-n", 3, *args)[0] == 0
    stats = made[0].stats()
    assert stats["preemptions"] == 0 and stats["blocks_used_most"] == made[0].pool.n_blocks
    assert stats["blocks_used"] == stats["blocks_cached"] == 0


def test_sampling_options_reach_the_engine(run, gguf, monkeypatch):
    asked, stream = [], pk.LLM.stream
    monkeypatch.setattr(pk.LLM, "stream", lambda self, prompt, params: (asked.append(params),
                                                                        stream(self, prompt, params))[1])
    options = {"max_tokens": 7, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1,
               "presence_penalty": -0.5, "frequency_penalty": 0.25, "seed": 9}  # fmt: skip
    args = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    run("generate", *args, "-n", 2, "--stop", "zq", "--stop", "\n", "--ignore-eos", "--model", gguf, "Hi")
    assert asked == [pk.SamplingParams(n=2, stop=["zq", "\n"], ignore_eos=True, **options)]


def test_a_stop_text_ends_a_sample(run, gguf, monkeypatch):
    """Across tokens, held back until it is clear, and left out."""
    script(monkeypatch, b"abcabd, no more", b"abab")
    status, output, _ = run("generate", "-n", 2, "--stop", "bd", "--model", gguf, "Hi")
    assert samples_of(output)[0] == ["abca\n", "abab\n"] and "; 2 ended by themselves;" in output
    pieces = []
    monkeypatch.setattr(cli, "_write", pieces.append)
    run("generate", "--quiet", "--stop", "cabd", "--model", gguf, "Hi")
    assert "".join(pieces) == "ab\n"


def test_speculation_shows_in_the_statistics_only(run, gguf, tmp_path):
    args = ("generate", "-n", 2, "--max-tokens", 60, "--temperature", 0.3, "--ignore-eos", "--model", gguf,
            "a b a b a b a")  # fmt: skip
    want, last = samples_of(run(*args)[1])
    assert "draft" not in last
    for what in ("ngram", gguf):
        texts, last = samples_of(run(*args, "--speculative", what)[1])
        n_accepted, n_drafted = map(int, re.search(r" tokens/s on \d+ threads?; (\d+) of (\d+) drafts accepted; ",
                                                   last).groups())  # fmt: skip
        assert texts == want and 0 < n_accepted <= n_drafted
    assert "no file or directory 'nowhere'" in run(*args, "--speculative", "nowhere")[2]


def test_half_a_character_is_never_printed(run, gguf, monkeypatch):
    texts = "né€😀", "😀 ok", "ü"
    script(monkeypatch, *(text.encode() for text in texts))
    pieces, write = [], cli._write
    monkeypatch.setattr(cli, "_write", lambda text: (pieces.append(text), write(text)))
    status, output, _ = run("generate", "-n", 3, "--quiet", "--model", gguf, "Hi")
    assert status == 0
    assert output == "".join(f"--- sample {i + 1} of 3 ---\n{text}\n" for i, text in enumerate(texts))
    assert "".join(pieces) == output and "\ufffd" not in output
    # A character that --max-tokens or an end token cuts is left out.
    assert run("generate", "--quiet", "--max-tokens", 9, "--model", gguf, "Hi")[1] == "né€\n"
    script(monkeypatch, "né€😀".encode()[:-1])
    assert run("generate", "--quiet", "--model", gguf, "Hi")[1] == "né€\n"


def test_text_streams_as_it_comes(run, gguf, monkeypatch):
    script(monkeypatch, b"abc", b"xy", b"12345")
    pieces = []
    monkeypatch.setattr(cli, "_write", pieces.append)
    run("generate", "-n", 3, "--quiet", "--model", gguf, "Hi")
    two, three = ("--- sample %d of 3 ---\n" % i for i in (2, 3))
    # A step each: the first streams; when it ends, what the others have said meanwhile is shown.
    assert pieces == ["--- sample 1 of 3 ---\na", "b", "c", f"\n{two}xy\n{three}1234", "5", "\n"]


@pytest.mark.parametrize("data, prompt", [
    (b"Hi\n", "Hi"), (b"Hi\r\n", "Hi"), (b"Hi", "Hi"), (b"Hi\n\n", "Hi\n"), (b" Hi \n", " Hi "), (b"\nHi", "\nHi"),
    (b"Hi\r", "Hi\r"), ("né€\n".encode(), "né€"),
])  # fmt: skip
@pytest.mark.parametrize("dash", [[], ["-"]])
def test_prompt_from_standard_input(run, gguf, monkeypatch, data, prompt, dash):
    feed(monkeypatch, data)
    encoded, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text: (encoded.append(text), encode(self, text))[1])
    assert run("generate", "--max-tokens", 1, "--model", gguf, *dash)[0] == 0
    assert encoded == [prompt]


def test_chat(run, gguf, directory, monkeypatch):
    script(monkeypatch, b"ok")
    # <user> H i ! <end> is 4 tokens with "Hi" merged.
    assert "prompt of 4 tokens" in run("generate", "--chat", "--model", gguf, "Hi!")[1]
    status, _, errors = run("generate", "--chat", "--model", directory, "Hi!")
    assert status == 2 and errors.startswith("pagedkv: error: this model has no chat template; pass it plain text")


def test_greedy_samples_are_the_same_and_said_so(run, gguf):
    status, output, errors = run("generate", "-n", 2, "--temperature", 0, "--max-tokens", 9, "--model", gguf, "Hi")
    texts, _ = samples_of(output)
    assert status == 0 and texts[0] == texts[1] and errors == "pagedkv: at temperature 0 all samples are the same\n"


def test_max_tokens_are_cut_at_the_context(run, gguf, monkeypatch):
    script(monkeypatch, b"a" * 3000)
    status, output, errors = run("generate", "--max-tokens", 3000, "--model", gguf, "x" * 2990)
    assert status == 0 and output.startswith("a" * 10 + "\n[10 tokens in 1 sample, ")
    assert errors == ("pagedkv: --max-tokens 3000 is cut to 10: the model's context holds 3,000 tokens, and the "
                      "prompt takes 2,990\n")  # fmt: skip
    assert run("generate", "--max-tokens", 10, "--model", gguf, "x" * 2990)[2] == ""


def test_an_extreme_temperature_does_not_warn(run, gguf):
    status, _, errors = run("generate", "--temperature", "1e39", "--max-tokens", 2, "--model", gguf, "Hi")
    assert (status, errors) == (0, "")


# ---- Bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("args, sentence", [
    ([], r"the following arguments are required: COMMAND \(see pagedkv --help\)"),
    (["frobnicate"], r"argument COMMAND: invalid choice: 'frobnicate' .*\(see pagedkv --help\)"),
    (["generate", ""], "the prompt is empty"),
    (["generate", "a", "b", "c"], r"the prompt must be one argument, but 'b' comes after 'a': put the whole prompt "
     r"in quotes \(see pagedkv generate --help\)"),
    (["generate", "a", "-n", "2", "b"], "the prompt must be one argument, but 'b' comes after 'a': .*"),
    (["generate", "--frob", "a"], r"unrecognized arguments: --frob \(see pagedkv generate --help\)"),
    (["info", "a", "b"], r"unrecognized arguments: b \(see pagedkv info --help\)"),
    (["info"], r"the following arguments are required: model \(see pagedkv info --help\)"),
    (["generate", "-n", "0", "a"], r"argument -n: must be from 1 to 2147483647, not 0 \(see pagedkv generate --help\)"),
    (["generate", "-n", "-3", "a"], "argument -n: must be from 1 to .*"),
    (["generate", "-n", "two", "a"], r"argument -n: invalid count value: 'two' \(see pagedkv generate --help\)"),
    (["generate", "-n", "9" * 23, "a"], "argument -n: must be from 1 to 2147483647, not 9{23} .*"),
    (["generate", "-n", "9" * 5000, "a"], "argument -n: invalid count value: .*"),
    (["generate", "--max-tokens", "0", "a"], "argument --max-tokens: must be from 1 .*"),
    (["generate", "--threads", "0", "a"], "argument --threads: must be from 1 .*"),
    (["generate", "--threads", "9999", "a"], "num_threads must be from 1 to 4096, not 9999"),
    (["generate", "--temperature", "-1", "a"], "temperature must be 0 or a positive number, not -1.0"),
    (["generate", "--temperature", "nan", "a"], "temperature must be .*"),
    (["generate", "--temperature", "warm", "a"], "argument --temperature: invalid float value: 'warm' .*"),
    (["generate", "--top-p", "0", "a"], r"top_p must be in \(0, 1\], not 0.0"),
    (["generate", "--top-k", "-2", "a"], "top_k must be 0 .*"),
    (["generate", "--min-p", "2", "a"], r"min_p must be in \[0, 1\], not 2.0"),
    (["generate", "--presence-penalty", "-2.5", "a"], r"presence_penalty must be in \[-2, 2\], not -2.5"),
    (["generate", "--repetition-penalty", "0", "a"], "repetition_penalty must be a number above 0, not 0.0"),
    (["generate", "--stop", "", "a"], r"stop must be a list of texts that are not empty, not \[''\]"),
    (["generate", "--seed", "-1", "a"], r"seed must be in \[0, 2\*\*64\), not -1"),
    (["generate", "a\udcffb"], "the prompt is not UTF-8: invalid start byte at byte 1"),
    (["generate", "a\ud800b"], "the prompt holds a lone surrogate, which is no character"),
    (["generate", "--model", "nowhere", "a"], "there is no file or directory 'nowhere', and no model of that name; .*"),
    (["info", "HuggingFaceTB/SmolLM2-135M-Instruct"], ".*ids of the Hugging Face hub are not fetched.*"),
    (["info", ""], "there is no file or directory '', .*"),
    (["info", "a\udcff"], "there is no file or directory .*"),
    (["info", "/dev/null"], "/dev/null is not a regular file"),
])  # fmt: skip
def test_bad_input_is_one_sentence(run, args, sentence):
    status, output, errors = run(*args)
    assert (status, output) == (2, "")
    assert re.fullmatch(f"pagedkv: error: {sentence}\n", errors), errors


def test_bad_standard_input(run, monkeypatch):
    feed(monkeypatch, b"caf\xe9 au lait")
    assert run("generate")[2] == "pagedkv: error: standard input is not UTF-8: invalid continuation byte at byte 3\n"
    feed(monkeypatch, b"\n")
    assert run("generate")[2] == "pagedkv: error: the prompt is empty\n"
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert "give a prompt as an argument or on standard input" in run("generate")[2]


def test_a_prompt_longer_than_the_context(run, gguf):
    status, _, errors = run("generate", "--model", gguf, "x" * 3000)
    assert status == 2
    assert errors == "pagedkv: error: the prompt has 3,000 tokens, the model's context holds 3,000\n"


def test_errors_are_without_status_codes(run, gguf, monkeypatch):
    def fail(error):
        def step(*_, **__):
            raise error

        monkeypatch.setattr(pk.LlamaModel, "step", step)

    for error, sentence in (
        (pk.PoolExhausted("needs 7 blocks, 3 of 64 are free", (pk.PkvStatus.PKV_ERR_EXHAUST,)),
         "needs 7 blocks, 3 of 64 are free"),
        (MemoryError(), "not enough memory"),
        (MemoryError("no memory for x"), "not enough memory: no memory for x"),
        (PermissionError(13, "Permission denied", "/a/b"), "/a/b: Permission denied"),
    ):  # fmt: skip
        fail(error)
        assert run("generate", "--model", gguf, "a") == (2, "", f"pagedkv: error: {sentence}\n")


def test_logits_that_are_no_numbers(run, gguf, monkeypatch):
    draw_by(monkeypatch, lambda *_: -1)
    status, output, errors = run("generate", "--model", gguf, "a")
    assert (status, output) == (2, "")
    assert errors == "pagedkv: error: the model's logits hold NaN, or no finite maximum\n"


def test_a_bug_is_not_hidden(gguf, monkeypatch):
    monkeypatch.setattr(pk.LlamaModel, "step", lambda *_, **__: [].pop())
    with pytest.raises(IndexError):
        cli.main(["generate", "--model", str(gguf), "a"])


def test_memory_is_asked_for_before_it_is_taken(run, gguf, monkeypatch):
    monkeypatch.setattr(pk.LlamaModel, "from_file", None)  # refused before the weights are read
    monkeypatch.setattr("pagedkv.model._available_nbytes", lambda: 20 * 10**9)
    status, _, errors = run("generate", "-n", 300_000, "--max-tokens", 2000, "--model", gguf, "Hi")
    assert status == 2  # 2 x 4 bytes x 2 layers x 32 x 16 tokens in each of 125 blocks
    assert errors == ("pagedkv: error: -n 300000 with 2,001 tokens (prompt and --max-tokens) needs about 307 GB for "
                      "the KV cache and 312 MB for logits, 20 GB are available\n")  # fmt: skip


def test_memory_that_just_suffices(run, gguf, monkeypatch):
    needed = 2 * 4 * 2 * 32 * 16 * 3 + 4 * 3 * len(TOKENS)  # three samples of one block
    monkeypatch.setattr("pagedkv.model._available_nbytes", lambda: needed)
    args = ("generate", "-n", 3, "--max-tokens", 9, "--model", gguf, "Hi")
    assert run(*args)[0] == 0 and run(*args, "--min-p", 0.1)[0] == 0
    assert run(*args, "--presence-penalty", 1)[0] == 2  # a second row of logits each
    monkeypatch.setattr("pagedkv.model._available_nbytes", lambda: needed - 1)
    assert run(*args)[0] == 2


@pytest.mark.parametrize("nbytes, words", [
    (999, "1.0 kB"), (46_080, "46 kB"), (538e6, "538 MB"), (1e9, "1.0 GB"), (9.96e9, "10 GB"), (999.6e9, "1.0 TB"),
    (189e12, "189 TB"), (5e30, "5000000000 ZB"),
])  # fmt: skip
def test_sizes(nbytes, words):
    assert cli._size(nbytes) == words


def test_a_directory_with_only_a_gguf_file(run, gguf, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        os.symlink(gguf, tmp_path / name)
        errors = run("info", tmp_path)[2]
        assert f"the directory {tmp_path} has no config.json; to use " in errors and str(tmp_path / "a.gguf") in errors
    assert "one of its GGUF files, such as" in errors
    (tmp_path / "empty").mkdir()
    assert "it has no config.json" in run("info", tmp_path / "empty")[2]


# ---- info, help, version ------------------------------------------------------------------------


def rows_of(output):
    return dict(re.split("  +", line, maxsplit=1) for line in output.splitlines())


def test_info(run, gguf, directory):
    status, output, errors = run("info", gguf)
    rows = rows_of(output)
    assert (status, errors) == (0, "") and rows["file"] == str(gguf)
    assert rows["tokenizer"] == "gpt2, gpt-2" and rows["chat template"] == "yes"
    assert rows["norm_eps"] == "1e-05" and rows["rope_theta"] == "10000" and rows["rope_scaling"] == "none"
    assert rows["tied_embeddings"] == "no" and rows["eos_token_ids"] == "256" and rows["context_len"] == "3000"
    assert not {"rope_factor", "rope_low_freq_factor", "rope_original_context_len", "rope_freq_factors"} & set(rows)
    n_params = sum(w.size for w in text_tensors().values())
    assert rows["parameters"] == f"{n_params:,}" and rows["weight types"] == f"f32 x {len(text_tensors())}"
    assert rows["KV bytes a token"] == "512"
    assert rows["memory needed"].startswith(f"{4 * n_params / 1e3:.0f} kB for the weights")
    assert rows["memory needed"].endswith("0.5 kB for each token in the KV cache: 1.5 MB for a full context")
    rows = rows_of(run("info", directory)[1])
    assert rows["tokenizer"] == "tokenizer.json" and rows["chat template"] == "none"


def test_info_of_a_model_without_a_tokenizer(run, tmp_path):
    config = tiny_config(rope_scaling="linear", rope_factor=4.0)
    write_gguf(tmp_path / "bare.gguf", config, tiny_tensors(config))
    rows = rows_of(run("info", tmp_path / "bare.gguf")[1])
    assert rows["tokenizer"] == rows["chat template"] == "none"
    assert rows["rope_scaling"] == "linear" and rows["rope_factor"] == "4" and "rope_low_freq_factor" not in rows
    assert "has no tokenizer" in run("generate", "--model", tmp_path / "bare.gguf", "a")[2]


def test_info_of_llama3_scaling(run, tmp_path):
    config = tiny_config(rope_scaling="llama3", rope_factor=8.0, rope_original_context_len=128)
    path = write_hf(tmp_path / "hf", config, tiny_tensors(config))
    rows = rows_of(run("info", path)[1])
    assert [rows[f"rope_{name}"] for name in ("scaling", "factor", "low_freq_factor", "high_freq_factor",
                                              "original_context_len")] == ["llama3", "8", "1", "4", "128"]  # fmt: skip
    assert rows["tokenizer"] == rows["chat template"] == "none"
    (path / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert rows_of(run("info", path)[1])["chat template"] == "yes"
    (path / "tokenizer_config.json").write_text("[]")
    (path / "chat_template.jinja").write_text("x")
    assert rows_of(run("info", path)[1])["chat template"] == "yes"
    write_gguf(tmp_path / "a.gguf", config, tiny_tensors(config))  # stores the scaling as factors
    assert re.fullmatch("8 values, 1 to 8", rows_of(run("info", tmp_path / "a.gguf")[1])["rope_freq_factors"])


def test_warnings_are_one_line(run, tmp_path):
    config = tiny_config()
    write_gguf(tmp_path / "a.gguf", config, tiny_tensors(config), metadata={"llama.rope.freq_base": None})
    status, _, errors = run("info", tmp_path / "a.gguf")
    assert status == 0
    assert errors == f"pagedkv: warning: {tmp_path}/a.gguf: llama.rope.freq_base is missing; 10000 is used\n"


def test_help_and_version(run):
    status, output, _ = run("--help")
    assert status == 0 and "generate" in output and "info" in output
    status, output, _ = run("generate", "--help")
    assert status == 0 and "--max-tokens" in output and "--quiet" in output
    assert run("--version") == (0, f"pagedkv {pk.__version__}\n", "")


# ---- As a process -------------------------------------------------------------------------------


def by_file(*args):
    """The command's file alone, so that the package is first imported by main()."""
    return [sys.executable, "-P", cli.__file__, *map(str, args)]


def test_python_m_is_the_command(gguf, run):
    args = ("generate", "--quiet", "-n", 2, "--max-tokens", 9, "--model", gguf, "Hi")
    done = child(*args)
    assert (done.returncode, done.stdout, done.stderr) == run(*args)


@pytest.mark.parametrize("env, sentence", [
    ({"PAGEDKV_NUM_THREADS": "abc"}, "PAGEDKV_NUM_THREADS must be an integer from 1 to 4096, not 'abc'"),
    ({"PAGEDKV_ISA": "foo"}, "foo"),
])  # fmt: skip
def test_bad_environment(gguf, env, sentence):
    assert sentence in refusal(child("info", gguf, env=env, entry=by_file))


def test_no_home(gguf):
    env = {"XDG_CACHE_HOME": None, "HOME": "", "PIP_NO_INDEX": "1"}
    assert "neither XDG_CACHE_HOME nor HOME says where" in refusal(child("generate", "a", env=env))
    assert child("info", gguf, env=env).returncode == 0


def test_closed_streams(gguf):
    assert refusal(child("generate", "--model", gguf, shell="<&-")) == (
        "standard input is closed; give the prompt as an argument\n")  # fmt: skip
    assert refusal(child("info", gguf, shell=">&-")) == "standard output is closed\n"
    done = child("info", "nowhere", shell="2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("args", [("generate", "Hi", "--model"), ("info",), ("--help",), ("--version",)])
def test_a_full_disk(gguf, args):
    args = args if args[0].startswith("--") else (*args, gguf)
    assert refusal(child(*args, shell=">/dev/full")) == "writing to standard output failed: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_for_errors():
    assert child("info", "nowhere", shell="2>/dev/full").returncode == 2


@pytest.mark.parametrize("args", [("generate", "Hi", "--model"), ("info",)])
def test_a_reader_that_goes_away(gguf, args):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = child(*args, gguf, stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")


# ---- Ctrl-C -------------------------------------------------------------------------------------


def test_interrupted_generation_shows_what_there_is(run, gguf, monkeypatch):
    texts = b"ad", b"b", b"c\xe2"  # the last: the first byte of three

    def choose(sample, n):
        if n == 2:
            raise KeyboardInterrupt
        return texts[sample][n] if n < len(texts[sample]) else END

    draw_by(monkeypatch, choose)
    status, output, errors = run("generate", "-n", 3, "--model", gguf, "Hi")
    assert (status, errors) == (130, "pagedkv: interrupted\n")
    assert output == "".join(f"--- sample {i} of 3 ---\n{text}\n" for i, text in ((1, "ad"), (2, "b"), (3, "c")))


def test_interrupted_before_the_first_token(run, gguf, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pk.LlamaModel, "step", interrupted)
    assert run("generate", "-n", 3, "--model", gguf, "Hi") == (130, "", "pagedkv: interrupted\n")


def test_interrupted_while_writing_repeats_nothing(run, gguf, monkeypatch):
    script(monkeypatch, b"abcdef")
    write, calls = cli._write, []

    def interrupted(text):
        write(text)
        calls.append(text)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_write", interrupted)
    assert run("generate", "--model", gguf, "Hi") == (130, "abc\n", "pagedkv: interrupted\n")


def test_interrupted_during_the_imports(gguf, tmp_path):
    (tmp_path / "tokenizers.py").write_text("raise KeyboardInterrupt\n")
    path = os.pathsep.join((str(tmp_path), child_env()["PYTHONPATH"]))
    done = child("info", gguf, env={"PYTHONPATH": path}, entry=by_file)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "pagedkv: interrupted\n")


def test_a_real_interrupt(tmp_path):
    """Ctrl-C in the middle of two long samples: the streaming one and the waiting one are shown, with no traceback."""
    config = tiny_config(vocab_size=len(TOKENS), context_len=1_000_000, eos_token_ids=())
    metadata = METADATA | {"tokenizer.ggml.eos_token_id": None}
    write_gguf(tmp_path / "long.gguf", config, tiny_tensors(config), metadata=metadata)
    args = ("generate", "-n", 2, "--max-tokens", 300_000, "--model", tmp_path / "long.gguf", "Hi")
    process = subprocess.Popen(command(*args), env=child_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored under nohup
    try:
        head = process.stdout.read(400)  # it streams
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=CHILD_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and errors == b"pagedkv: interrupted\n"
    text = (head + output).decode()
    assert text.startswith("--- sample 1 of 2 ---\n")
    first, second = text.removeprefix("--- sample 1 of 2 ---\n").split("--- sample 2 of 2 ---\n")
    assert len(first) > 300 and len(second) > 100 and second.endswith("\n") and "tokens/s" not in second


# ---- The real model -----------------------------------------------------------------------------


def test_the_real_model(run, monkeypatch):
    model = real_model()
    monkeypatch.setattr(pk.LlamaModel, "from_file", lambda file, compute: model)  # loaded already
    prompt = "The capital of France is"
    status, output, errors = run("generate", "--temperature", 0, "--max-tokens", 4, "--model", REAL_MODEL, prompt)
    assert (status, errors) == (0, "") and output.startswith(" Paris.\n")
    eight, _ = samples_of(run("generate", "-n", 8, "--max-tokens", 12, "--seed", 9, "A walk by the sea is")[1])
    two, last = samples_of(run("generate", "-n", 2, "--max-tokens", 12, "--seed", 9, "A walk by the sea is")[1])
    assert two == eight[:2] and len(set(eight)) == 8 and STATISTICS.fullmatch(last)
    status, output, _ = run("generate", "--chat", "--quiet", "--temperature", 0, "--max-tokens", 30, "Say hello.")
    assert status == 0 and output.strip()
    rows = rows_of(run("info", REAL_MODEL)[1])
    assert rows["norm_eps"] == "1e-05" and rows["tokenizer"] == "gpt2, smollm" and rows["chat template"] == "yes"
    assert Path(rows["file"]).suffix == ".gguf" and "rope_factor" not in rows
