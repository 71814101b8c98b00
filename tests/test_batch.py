"""Batches from file to file on a tiny model: rows against each prompt run alone, and against runs that were cut off."""

import hashlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from promise_rows import child_env
from test_cli import CHILD_SECONDS, CONFIG, METADATA, TOKENS, child, command, refusal, text_tensors
from tiny import tiny_config, tiny_tensors, write_gguf, write_hf

import pagedkv as pk
from pagedkv import batch, cli
from pagedkv.engine.core import Engine
from pagedkv.tokenizer import Tokenizer

LINES = [
    {"prompt": "Hi there"},
    {"id": "greedy", "prompt": "a walk", "temperature": 0, "max_tokens": 9},
    "by the sea",
    {"id": -2.5, "prompt_token_ids": [72, 105, 33], "n": 3, "max_tokens": 20, "seed": 7},
    {"id": "né\ud800", "messages": [{"role": "user", "content": "Hi!"}], "logprobs": 2, "prompt_logprobs": 1,
     "max_tokens": 4},
    {"prompt": "x" * 50, "stop": ["e", "zz"], "min_tokens": 2, "logit_bias": {"97": -3.5}, "ignore_eos": True},
    {"prompt": "Hi there", "seed": None, "top_k": -1},
    {"prompt": "all there is", "max_tokens": None, "top_p": 0.5},
    {"prompt": 5},
]  # fmt: skip
FLAGS = ("--max-tokens", "12", "--seed", "3")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("batch") / "tiny.gguf"
    write_gguf(path, CONFIG, text_tensors(), metadata=METADATA)
    return path


@pytest.fixture
def run(capsys, gguf, threads):
    """Function that runs a batch here: (status, standard output, standard error)."""

    def call(*args, model=gguf):
        status = cli.main(["generate", "--model", str(model), *map(str, args)])
        return status, *capsys.readouterr()

    return call


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read_rows(path):
    data = path.read_bytes() if hasattr(path, "read_bytes") else path.encode()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def sorted_lines(path):
    return sorted(path.read_bytes().splitlines(keepends=True), key=lambda raw: json.loads(raw)["line"])


@pytest.fixture(scope="module")
def rows_of_lines(tmp_path_factory, gguf):
    """The output of one run of LINES, bytes."""
    folder = tmp_path_factory.mktemp("rows")
    source, target = write_lines(folder / "in", LINES), folder / "out"
    assert cli.main(["generate", "--model", str(gguf), "--input", str(source), "--output", str(target), *FLAGS]) == 1
    return target.read_bytes()


@pytest.fixture
def whole(rows_of_lines, tmp_path):
    """Input and output of one run of LINES."""
    source, target = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    target.write_bytes(rows_of_lines)
    return source, target


# ---- Rows ---------------------------------------------------------------------------------------


def test_rows_are_those_of_each_prompt_alone(whole, gguf):
    """A new LLM for each line, with nothing beside it."""
    rows = {row["line"]: row for row in read_rows(whole[1])}
    model = pk.LlamaModel.load(gguf)
    assert sorted(rows) == list(range(1, len(LINES) + 1))
    for number, line in enumerate(LINES, 1):
        row = rows[number]
        line = {"prompt": line} if isinstance(line, str) else dict(line)
        assert row["id"] == line.pop("id", number)
        if line.get("prompt") == 5:
            assert row["error"] == {"type": "bad_request", "message": "prompt must be a text, not 5"}
            continue
        messages = line.pop("messages", None)
        prompt = {name: line.pop(name) for name in ("prompt", "prompt_token_ids") if name in line}
        given = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 12, "seed": 3} | line
        if given["seed"] is None:
            given["seed"] = 3
        if given["max_tokens"] is None:
            given["max_tokens"] = CONFIG.context_len - 12
        given["logit_bias"] = {int(token): value for token, value in given.get("logit_bias", {}).items()}
        llm, params = pk.LLM(model, n_blocks=400), pk.SamplingParams(**given)
        (want,) = llm.chat(messages, params, False) if messages else llm.generate(prompt, params, False)
        assert len(row["outputs"]) == len(want.outputs) == given.get("n", 1)
        for got, each in zip(row["outputs"], want.outputs):
            logprobs = got.pop("logprobs", None)
            assert got.pop("cumulative_logprob", None) == each.cumulative_logprob
            names = "index", "text", "token_ids", "finish_reason", "stop_reason"
            assert got == {name: getattr(each, name) for name in names}
            assert (logprobs is None) == (each.logprobs is None)
            for place, other in zip(logprobs or (), each.logprobs or (), strict=True):
                assert place == {str(token): {"logprob": p.logprob, "rank": p.rank, "decoded_token": p.decoded_token}
                                 for token, p in other.items()}  # fmt: skip
        assert ("prompt_logprobs" in row) == (want.prompt_logprobs is not None)
        n_prompt, n = len(want.prompt_token_ids), sum(len(each.token_ids) for each in want.outputs)
        assert row["usage"] == {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}


def test_the_text_is_that_of_the_command_for_one_prompt(run, whole):
    rows = {row["line"]: row for row in read_rows(whole[1])}
    status, output, _ = run(*FLAGS, "--quiet", "Hi there")
    assert status == 0 and output == rows[1]["outputs"][0]["text"] + "\n"
    # One seed for all lines: equal prompts, equal texts.
    assert rows[7]["outputs"] == rows[1]["outputs"]


def test_rows_do_not_depend_on_order_or_load(run, whole, tmp_path):
    source, target = whole
    want = sorted_lines(target)
    for n, args in enumerate((("--max-num-seqs", 1), ("--max-num-seqs", 2, "--n-blocks", 190), ("--threads", 2))):
        again = tmp_path / f"again{n}.jsonl"
        assert run("--input", source, "--output", again, *FLAGS, *args)[0] == 1
        assert sorted_lines(again) == want
    with_ids = [line | {"id": line.get("id", n)} for n, line in enumerate(LINES, 1) if isinstance(line, dict)]
    backwards = write_lines(tmp_path / "back.jsonl", with_ids[::-1])
    run("--input", backwards, "--output", tmp_path / "back_out.jsonl", *FLAGS)
    parts = {row["id"]: row for row in read_rows(target)}
    for row in read_rows(tmp_path / "back_out.jsonl"):
        for name in ("outputs", "usage", "error"):
            assert row.get(name) == parts[row["id"]].get(name)


def test_types_of_the_cache_and_of_activations_are_passed_on(run, whole, tmp_path, monkeypatch):
    asked = []
    from_file, new_pool = pk.LlamaModel.from_file, pk.LlamaModel.new_pool
    monkeypatch.setattr(pk.LlamaModel, "from_file", lambda file, compute: asked.append(compute) or from_file(file))
    monkeypatch.setattr(pk.LlamaModel, "new_pool", lambda self, **given: asked.append(given) or new_pool(self, **given))
    args = ("--input", whole[0], "--output", tmp_path / "out2", *FLAGS, "--kv-dtype", "bfloat16", "--compute", "int8")
    assert run(*args, "--n-blocks", 300, "--max-num-seqs", 5)[0] == 1
    assert asked == ["int8", {"n_blocks": 300, "block_size": 16, "dtype": "bfloat16", "n_seqs": 5}]


def test_chat_takes_prompts_as_messages(run, tmp_path):
    source = write_lines(tmp_path / "in", ["Hi!", {"messages": [{"role": "user", "content": "Hi!"}]}])
    assert run("--input", source, "--output", tmp_path / "out", "--chat", *FLAGS)[0] == 0
    one, two = sorted(read_rows(tmp_path / "out"), key=lambda row: row["line"])
    assert one["outputs"] == two["outputs"] and one["usage"]["prompt_tokens"] == 4  # <user> Hi ! <end>


def test_line_ends_blank_lines_and_a_byte_order_mark(run, tmp_path):
    (tmp_path / "in").write_bytes(b'\xef\xbb\xbf"Hi"\r\n\r\n  \n\t{"prompt": "a"} \n\n"b"')
    assert run("--input", tmp_path / "in", "--output", tmp_path / "out", *FLAGS)[0] == 0
    assert sorted(row["id"] for row in read_rows(tmp_path / "out")) == [1, 4, 6]


def test_an_input_that_was_read_from_already():
    file = io.BytesIO(b'"a"\n"b"\n"c"')
    file.readline()
    lines = batch.Input(file, "lines")
    for _ in range(2):
        assert [(line.number, line.fields["prompt"]) for line in lines] == [(1, "b"), (2, "c")]


def test_nothing_to_do(run, tmp_path, monkeypatch):
    (tmp_path / "in").write_bytes(b"\n")
    monkeypatch.setattr(pk.LlamaModel, "from_file", None)
    args = ("--input", tmp_path / "in", "--output", tmp_path / "out")
    assert run(*args) == (0, "", f"pagedkv: 0 rows in {tmp_path}/out\n") and (tmp_path / "out").read_bytes() == b""


# ---- Lines that fail ----------------------------------------------------------------------------

BAD = [
    (b"nonsense", None, "bad_json", "the line is not JSON: Expecting value.*"),
    (b'{"prompt": "a"', None, "bad_json", "the line is not JSON: .*"),
    (b'"caf\xe9"', None, "bad_json", "the line is not UTF-8: invalid continuation byte at byte 4"),
    (b"5", None, "bad_json", "a line is an object or a text, not 5"),
    (b"null", None, "bad_json", "a line is an object or a text, not null"),
    (b"[" * 100_000, None, "bad_json", "the line is not .*"),
    (b'{"prompt": "a", "prompt": "b"}', None, "bad_json", "the line is not JSON: 'prompt' comes twice in one object"),
    (b'{"prompt": "a", "temperature": NaN}', None, "bad_json", "the line is not JSON: NaN is no number of JSON"),
    (b'{"id": ' + b"9" * 5000 + b"}", None, "bad_json", "the line is not JSON: .*"),
    (b'{"id": true, "prompt": "a"}', None, "bad_request", "id must be a text or a number, not true"),
    (b'{"id": [1], "prompt": "a"}', None, "bad_request", r"id must be a text or a number, not \[1\]"),
    (b'{"id": 1e999, "prompt": "a"}', None, "bad_request", "id must be .*"),
    (b"{}", 1, "bad_request", "a line has one of prompt, prompt_token_ids, messages; this one has none"),
    (b'{"prompt": "a", "messages": []}', 1, "bad_request", ".*; this one has prompt and messages"),
    (b'{"id": "q", "prompt": "a", "tempreature": 1}', "q", "bad_request", 'there is no field "tempreature"'),
    (b'{"prompt": ["a"]}', 1, "bad_request", r'prompt must be a text, not \["a"\]'),
    (b'{"prompt": "\\ud800"}', 1, "bad_request", "prompt holds a lone surrogate, which is no character"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 1, "bad_request", "messages holds a lone surrogate.*"),
    (b'{"prompt": ""}', 1, "bad_request", "the prompt: it has no tokens"),
    (b'{"prompt_token_ids": []}', 1, "bad_request", "the prompt: it has no tokens"),
    (b'{"prompt_token_ids": [1.0]}', 1, "bad_request", r"prompt_token_ids must be a list of integers, not \[1.0\]"),
    (b'{"prompt_token_ids": [true]}', 1, "bad_request", "prompt_token_ids must be a list of integers.*"),
    (b'{"prompt_token_ids": [1, 260]}', 1, "bad_request", r"the prompt: token 260 at place 1 is outside \[0, 260\)"),
    (b'{"prompt_token_ids": [-1]}', 1, "bad_request", "the prompt: token -1 .*"),
    (b'{"messages": "Hi"}', 1, "bad_request", "messages must be a list of dicts, not str"),
    (b'{"messages": [{"content": "Hi"}]}', 1, "bad_request", 'message 0 must be a dict with a str "role".*'),
    (b'{"prompt": "a", "max_tokens": 5.0}', 1, "bad_request", "max_tokens must be an integer or null, not 5.0"),
    (b'{"prompt": "a", "max_tokens": 0}', 1, "bad_request", "max_tokens must be at least 1 or None, not 0"),
    (b'{"prompt": "a", "n": true}', 1, "bad_request", "n must be an integer, not true"),
    (b'{"prompt": "a", "n": 1000000000}', 1, "bad_request", "n is at most 4096 in a batch, not 1000000000"),
    (b'{"prompt": "a", "logprobs": -1}', 1, "bad_request", "logprobs is from 0 to 100 in a batch, not -1"),
    (b'{"prompt": "a", "temperature": "warm"}', 1, "bad_request", 'temperature must be a number, not "warm"'),
    (b'{"prompt": "a", "temperature": -1}', 1, "bad_request", "temperature must be 0 or a positive number, not -1"),
    (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", 1, "bad_request", "int too large.*"),
    (b'{"prompt": "a", "seed": 18446744073709551616}', 1, "bad_request", "seed must be .*"),
    (b'{"prompt": "a", "stop": [3]}', 1, "bad_request", r"stop must be a text or a list of texts, not \[3\]"),
    (b'{"prompt": "a", "stop": ""}', 1, "bad_request", "stop must be a list of texts that are not empty.*"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', 1, "bad_request", "logit_bias must be an object of token ids .*"),
    (b'{"prompt": "a", "logit_bias": {"260": 1}}', 1, "bad_request", "the prompt: token 260 of logit_bias .*"),
    (b'{"prompt": "a", "min_tokens": 4000, "max_tokens": null}', 1, "bad_request", "min_tokens must be at most .*"),
    (b'{"prompt": "' + b"x" * 3000 + b'"}', 1, "too_long", "the prompt is too long: it has 3000 tokens, .* 3000,.*"),
]  # fmt: skip


def test_bad_lines_get_rows_and_stop_nobody(run, tmp_path):
    """All of them in one file, a good line after each."""
    good = b'{"prompt": "Hi"}'
    (tmp_path / "in").write_bytes(b"".join(raw + b"\n" + good + b"\n" for raw, *_ in BAD))
    status, _, errors = run("--input", tmp_path / "in", "--output", tmp_path / "out", *FLAGS)
    assert status == 1
    assert f"pagedkv: {2 * len(BAD)} rows in {tmp_path}/out, {len(BAD)} of them with an error; " in errors
    rows = {row["line"]: row for row in read_rows(tmp_path / "out")}
    assert len(rows) == 2 * len(BAD)
    for i, (_, row_id, kind, message) in enumerate(BAD):
        row = rows[2 * i + 1]
        assert row["id"] == (2 * i + 1 if row_id == 1 else row_id), row
        assert row["error"]["type"] == kind and re.fullmatch(message, row["error"]["message"]), row
        assert rows[2 * i + 2]["outputs"] == rows[2]["outputs"]
    # The rows are kept: nothing is left to do, and the status is the same.
    before = (tmp_path / "out").read_bytes()
    assert run("--input", tmp_path / "in", "--output", tmp_path / "out", *FLAGS)[0] == 1
    assert (tmp_path / "out").read_bytes() == before


def test_a_line_too_long_for_memory(run, tmp_path, monkeypatch):
    monkeypatch.setattr(batch.lines, "MAX_LINE_NBYTES", 100)
    (tmp_path / "in").write_bytes(b'"' + b"x" * 98 + b'"\n"' + b"x" * 99 + b'"\n"a"\n"' + b"x" * 300)
    assert run("--input", tmp_path / "in", "--output", tmp_path / "out", *FLAGS)[0] == 1
    rows = {row["line"]: row for row in read_rows(tmp_path / "out")}
    assert ["error" in rows[i] for i in (1, 2, 3, 4)] == [False, True, False, True]
    assert rows[2]["error"]["message"] == "the line is longer than 100 bytes"


def test_logits_that_are_nan(run, tmp_path):
    tensors = text_tensors()
    tensors["model.embed_tokens.weight"][97] = np.nan
    write_gguf(tmp_path / "nan.gguf", CONFIG, tensors, metadata=METADATA)
    source = write_lines(tmp_path / "in", ["a", {"prompt_token_ids": [72], "max_tokens": 1}])
    assert run("--input", source, "--output", tmp_path / "out", model=tmp_path / "nan.gguf")[0] == 1
    one, two = sorted(read_rows(tmp_path / "out"), key=lambda row: row["line"])
    assert one["error"] == {"type": "failed", "message": "the model's logits hold NaN, or no finite maximum"}
    assert "outputs" in two


def test_a_model_without_a_tokenizer(run, tmp_path):
    config = tiny_config()
    write_gguf(tmp_path / "bare.gguf", config, tiny_tensors(config))
    source = write_lines(tmp_path / "in", [{"prompt_token_ids": [5, 6], "max_tokens": 3}, "Hi"])
    assert run("--input", source, "--output", tmp_path / "out", model=tmp_path / "bare.gguf")[0] == 1
    one, two = sorted(read_rows(tmp_path / "out"), key=lambda row: row["line"])
    assert one["outputs"][0]["text"] == "" and one["usage"]["total_tokens"] >= 3
    assert two["error"]["message"] == "the model has no tokenizer for prompt; give prompt_token_ids"


def test_a_pool_too_small_is_no_fault_of_the_line(run, whole, tmp_path):
    """Such a line gets no row, and the same command with more blocks adds it."""
    source, target = whole
    again = tmp_path / "again"
    args = ("--input", source, "--output", again, *FLAGS)
    status, _, errors = run(*args, "--n-blocks", 5)
    assert status == 1 and len(read_rows(again)) == len(LINES) - 1
    assert errors.startswith("pagedkv: 1 of 9 lines got no row: more blocks are needed than the pool has; the same "
                             "command with --n-blocks 188 runs them all\n")  # fmt: skip
    assert run(*args, "--n-blocks", 187)[0] == 1 and len(read_rows(again)) == len(LINES) - 1
    run(*args, "--n-blocks", 188)
    assert sorted_lines(again) == sorted_lines(target)


# ---- Going on -----------------------------------------------------------------------------------


def test_cut_at_every_byte_of_the_last_two_rows(run, tmp_path, gguf):
    """As the command does it, but with one model and engine for all."""
    source = write_lines(tmp_path / "in", ["Hi", {"id": "é", "prompt": "né"}, {"prompt": 5}, "a"])
    target, args = tmp_path / "out", ("--max-tokens", 3)
    run("--input", source, "--output", target, *args)
    data, want = target.read_bytes(), sorted_lines(target)
    begin = len(b"".join(data.splitlines(keepends=True)[:-2]))
    assert len(data) - begin > 300
    model = pk.LlamaModel.load(gguf)
    engine = Engine(model, model.new_pool(n_blocks=20), 64, 512)
    params = pk.SamplingParams(max_tokens=3, temperature=0.8, top_p=0.95, seed=0)
    lines = batch.Input(io.BytesIO(source.read_bytes()), "lines")

    class SameStamp:
        _, model, tokenizer, settings = read_rows(target)[0]["digest"].split("-")
        row_digest = batch.Stamp.row_digest

    # And what a power failure may leave: zeros after what reached the disk.
    for left in (*(data[:end] for end in range(begin, len(data) + 1)), data[:begin] + bytes(5000),
                 data[:begin + 20] + bytes(5000)):  # fmt: skip
        target.write_bytes(left)
        output = batch.open_output(str(target), lines)
        plan = batch.make_plan(lines, output, SameStamp())
        assert target.read_bytes() == left
        output.open()
        outcome, progress = batch.Outcome(plan.n_rows, plan.n_done, plan.n_errors), batch.Progress(plan, engine, None)
        batch.run(engine, lines, plan, output, SameStamp(), params, False, outcome, progress)
        output.close()
        assert target.read_bytes()[:begin] == data[:begin] and sorted_lines(target) == want
        assert (outcome.n_done, outcome.n_errors) == (4, 1)


def test_deleted_rows_run_again(run, whole):
    source, target = whole
    lines, want = target.read_bytes().splitlines(keepends=True), sorted_lines(target)
    target.write_bytes(b"".join(line for i, line in enumerate(lines) if i not in (0, 3)))
    assert run("--input", source, "--output", target, *FLAGS)[0] == 1
    assert sorted_lines(target) == want


def test_lines_that_are_added_run(run, whole):
    source, target = whole
    before = target.read_bytes()
    source.write_text(source.read_text() + '{"id": "new", "prompt": "a"}\n')
    errors = run("--input", source, "--output", target, *FLAGS)[2]
    assert f" rows in {target}, 1 of them with an error, 9 from before; " in errors
    assert target.read_bytes().startswith(before) and len(read_rows(target)) == 10


def test_overwrite(run, whole):
    source, target = whole
    want = sorted_lines(target)
    target.write_text("something else\n")
    assert run("--input", source, "--output", target, "--overwrite", *FLAGS)[0] == 1
    assert sorted_lines(target) == want


@pytest.mark.parametrize("lines, flags, sentence", [
    (LINES, ("--seed", "4"), "{out} was made with other parameters; use those, or give another --output, or "
     "--overwrite to lose what {out} holds"),
    (LINES, ("--chat",), "{out} was made with other parameters; .*"),
    (LINES, ("--kv-dtype", "float16"), "{out} was made with other parameters; .*"),
    (LINES, ("--compute", "int8"), "{out} was made with other parameters; .*"),
    (["Hello", *LINES[1:]], (), r"the row for id 1 in {out} was made from another line than line 1 of {in}; .*"),
    (LINES[:1] + LINES[2:], (), "the row for .* in {out} was made from another line than line [2-9] of {in}; .*"),
    (LINES[:-1], (), "{out} has a row for id 9, {in} has no such line; .*"),
    ([*LINES, {"id": "greedy", "prompt": "a"}], (), 'lines 2 and 10 of {in} have the same id, "greedy"'),
    ([*LINES, {"id": 1.0, "prompt": "a"}], (), "lines 1 and 10 of {in} have the same id, 1.0"),
])  # fmt: skip
def test_what_does_not_belong_together_is_refused(run, whole, lines, flags, sentence):
    source, target = whole
    before = target.read_bytes() + b'{"id": "cut'
    target.write_bytes(before)  # not even what is cut off is taken away
    write_lines(source, lines)
    status, _, errors = run("--input", source, "--output", target, *FLAGS, *flags)
    sentence = sentence.replace("{out}", re.escape(str(target))).replace("{in}", re.escape(str(source)))
    assert status == 2 and re.fullmatch(f"pagedkv: error: {sentence}\n", errors), errors
    assert target.read_bytes() == before


@pytest.mark.parametrize("what", ["weight", "tokenizer", "template", "end", "context", "name"])
def test_another_model_is_refused(run, whole, tmp_path, what):
    """What the rows depend on; the model's own name is not among it."""
    tensors, metadata = text_tensors(), dict(METADATA)
    if what == "weight":
        tensors["model.layers.1.mlp.down_proj.weight"] *= np.float32(1.01)
    elif what == "tokenizer":
        metadata["tokenizer.ggml.tokens"] = [*TOKENS[:-2], "<usr>", "Hi"]
    elif what == "template":
        metadata["tokenizer.chat_template"] += " "
    elif what == "end":
        metadata["tokenizer.ggml.eos_token_id"] = 255
    elif what == "context":
        metadata["llama.context_length"] = 2999
    else:
        metadata["general.name"] = "another name"
    write_gguf(tmp_path / "other.gguf", CONFIG, tensors, metadata=metadata)
    source, target = whole
    before = target.read_bytes()
    status, _, errors = run("--input", source, "--output", target, *FLAGS, model=tmp_path / "other.gguf")
    assert target.read_bytes() == before
    if what == "name":
        assert status == 1 and " 9 from before" in errors
        return
    other = ("model, or by a version of pagedkv that computes or names it differently" if what == "weight" else
             "tokenizer, chat template or context length than this model's")  # fmt: skip
    assert (status, errors) == (2, f"pagedkv: error: {target} was made with another {other}; use that one, or give another "
                                f"--output, or --overwrite to lose what {target} holds\n")  # fmt: skip


def test_the_model_is_known_by_its_fingerprint(whole, gguf):
    digests = {row["digest"].split("-")[1] for row in read_rows(whole[1])}
    assert digests == {hashlib.blake2b(b"%d " % len(name) + name, digest_size=6).hexdigest()
                       for name in [pk.LlamaModel.load(gguf).fingerprint.encode()]}  # fmt: skip


def test_files_of_a_tokenizer_beside_the_weights(run, tmp_path):
    source, target = write_lines(tmp_path / "in", ["Hi"]), tmp_path / "out"
    path = write_hf(tmp_path / "hf", CONFIG, text_tensors())
    Tokenizer.from_gguf_metadata(METADATA)._backend.save(str(path / "tokenizer.json"))
    assert run("--input", source, "--output", target, *FLAGS, model=path)[0] == 0
    (path / "chat_template.jinja").write_text("{{ messages }}")
    assert "another tokenizer, chat template or" in run("--input", source, "--output", target, *FLAGS, model=path)[2]
    (path / "chat_template.jinja").unlink()
    assert " 1 from before" in run("--input", source, "--output", target, *FLAGS, model=path)[2]


def test_rows_of_an_older_version_are_refused(run, whole):
    """Their digest had three parts."""
    source, target = whole
    target.write_bytes(re.sub(b'("digest": "\\w+-\\w+-\\w+)-\\w+"', rb'\1"', target.read_bytes()))
    before = target.read_bytes()
    status, _, errors = run("--input", source, "--output", target, *FLAGS)
    assert (status, errors) == (2, f"pagedkv: error: line 1 of {target} is no row of this command, in this version; give "
                                "another --output, or --overwrite to lose what it holds\n")  # fmt: skip
    assert target.read_bytes() == before


def test_rows_of_two_models_are_refused(run, whole):
    source, target = whole
    rows = target.read_bytes().splitlines(keepends=True)
    rows[1] = re.sub(b'("digest": "\\w+-)\\w{12}', b"\\g<1>" + b"0" * 12, rows[1])
    target.write_bytes(b"".join(rows))
    assert f"{target} has rows of two models; give another" in run("--input", source, "--output", target, *FLAGS)[2]


def test_a_model_that_moved_is_the_same(run, whole, tmp_path, gguf):
    source, target = whole
    (tmp_path / "moved.gguf").write_bytes(gguf.read_bytes())
    assert " 9 from before" in run("--input", source, "--output", target, *FLAGS, model=tmp_path / "moved.gguf")[2]


@pytest.mark.parametrize("content", [
    b"a note of mine", b"a note of mine\n", b'{"id": 1, "prompt": "Hi"}', b'{"id": 1, "prompt": "Hi"}\n', b"{}\n",
    b'{"a": 1}\n{"id": ', b"\n\n", b"\x00\x01\x02",
])  # fmt: skip
def test_other_files_are_left_alone(run, tmp_path, content):
    source = write_lines(tmp_path / "in", ["Hi"])
    (tmp_path / "out").write_bytes(content)
    status, _, errors = run("--input", source, "--output", tmp_path / "out")
    assert status == 2 and re.fullmatch("pagedkv: error: line 1 of .*/out is no row of this command, in this version; .*\n", errors)
    assert (tmp_path / "out").read_bytes() == content


def test_a_link_to_a_file_to_be_made(run, tmp_path):
    source = write_lines(tmp_path / "in", ["Hi"])
    os.symlink("made", tmp_path / "link")
    for _ in range(2):
        assert run("--input", source, "--output", tmp_path / "link", *FLAGS)[0] == 0
        assert len(read_rows(tmp_path / "made")) == 1 and (tmp_path / "link").is_symlink()


def test_two_rows_of_one_id_are_refused(run, whole):
    source, target = whole
    target.write_bytes(target.read_bytes() * 2)
    assert " has two rows for id " in run("--input", source, "--output", target, *FLAGS)[2]


# ---- Usage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, sentence", [
    (["Hi", "--output", "x"], r"--output needs --input \(see pagedkv generate --help\)"),
    (["Hi", "--overwrite"], "--overwrite needs --input .*"),
    (["Hi", "--n-blocks", "3"], "--n-blocks needs --input .*"),
    (["Hi", "--max-num-seqs", "3"], "--max-num-seqs needs --input .*"),
    (["Hi", "--input", "{in}"], "give a prompt or --input, not both"),
    (["--input", "nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
    (["--input", "{in}", "--output", "{in}"], ".* is the input; give another --output"),
    (["--input", "{in}", "--output", "{dir}"], ".*: Is a directory"),
    (["--input", "{in}", "--output", "{dir}/a/b"], ".*/a/b: No such file or directory"),
    (["--input", "{in}", "--seed", "-1"], r"seed must be in \[0, 2\*\*64\), not -1"),
    (["--input", "{in}", "--top-p", "0"], r"top_p must be in \(0, 1\], not 0.0"),
    (["--input", "{in}", "-n", "5000"], "n is at most 4096 in a batch, not 5000"),
])  # fmt: skip
def test_bad_usage(run, tmp_path, args, sentence):
    source = write_lines(tmp_path / "in", ["Hi"])
    args = [arg.replace("{in}", str(source)).replace("{dir}", str(tmp_path)) for arg in args]
    status, output, errors = run(*args)
    assert (status, output) == (2, "") and re.fullmatch(f"pagedkv: error: {sentence}\n", errors), errors
    assert source.read_text() == '"Hi"\n'


# ---- Memory and progress ------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def parts_of(gguf, lines, n_seqs):
    model = pk.LlamaModel.load(gguf)
    engine = Engine(model, model.new_pool(n_blocks=400), n_seqs, 512)
    lines = batch.Input(io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode()), "lines")
    plan = batch.Plan(bytearray(sum(1 for _ in lines)), 0)
    return engine, lines, plan


class NoStamp:
    def row_digest(self, line):
        return ""


def test_only_a_window_of_the_input_is_in_memory(gguf, monkeypatch):
    engine, lines, plan = parts_of(gguf, [{"prompt": "Hi", "n": 1 + i % 3} for i in range(200)], n_seqs=4)
    params = pk.SamplingParams(max_tokens=3)
    n_read, most, read = 0, 0, batch.read_request
    outcome = batch.Outcome(plan.n_rows, 0, 0)

    def counted(*args):
        nonlocal n_read, most
        n_read += 1
        most = max(most, n_read - outcome.n_done)
        return read(*args)

    monkeypatch.setattr("pagedkv.batch.job.read_request", counted)
    rows = []
    output = batch.RowStream(rows.append, "rows")
    batch.run(engine, lines, plan, output, NoStamp(), params, False, outcome, batch.Progress(plan, engine, None))
    assert len(rows) == 200 and 4 <= most <= 2 * 4 + 1
    # A line with more samples than the window runs, alone.
    engine, lines, plan = parts_of(gguf, [{"prompt": "Hi", "n": 30}, "a", {"prompt": "Hi", "n": 20}], n_seqs=2)
    outcome = batch.Outcome(plan.n_rows, 0, 0)
    batch.run(engine, lines, plan, output, NoStamp(), params, False, outcome, batch.Progress(plan, engine, None))
    assert outcome.n_done == 3 and engine.pool.n_free + engine.stats()["blocks_cached"] == 400


def test_an_input_that_loses_lines(gguf):
    engine, lines, plan = parts_of(gguf, ["Hi"] * 3, n_seqs=2)
    plan.is_done += bytes(1)
    outcome, progress = batch.Outcome(plan.n_rows, 0, 0), batch.Progress(plan, engine, None)
    output = batch.RowStream(lambda row: None, "rows")
    with pytest.raises(batch.BatchError, match="lines was changed while it was read"):
        batch.run(engine, lines, plan, output, NoStamp(), pk.SamplingParams(), False, outcome, progress)
    assert outcome.n_done == 3


def test_a_signal_between_steps_stops_the_run(gguf):
    engine, lines, plan = parts_of(gguf, ["Hi"] * 20, n_seqs=2)
    outcome, received, rows = batch.Outcome(plan.n_rows, 0, 0), [], []

    def write(row):
        rows.append(row)
        received.append(signal.SIGTERM)

    params = pk.SamplingParams(max_tokens=3, seed=0)
    batch.run(engine, lines, plan, batch.RowStream(write, "rows"), NoStamp(), params, False, outcome,
              batch.Progress(plan, engine, None), received)  # fmt: skip
    assert outcome.signal == signal.SIGTERM and 1 <= len(rows) == outcome.n_done < 20


def test_a_signal_inside_a_step_gives_the_step_up(gguf, monkeypatch):
    """And the rows of the run that follows are those of one without a signal."""
    params, rows = pk.SamplingParams(max_tokens=3, seed=0), {}

    def run(received, plan, lines, engine, key):
        outcome = batch.Outcome(plan.n_rows, plan.n_done, 0)
        output = batch.RowStream(lambda row: rows.setdefault(key, []).append(row), "rows")
        progress = batch.Progress(plan, engine, None)
        batch.run(engine, lines, plan, output, NoStamp(), params, False, outcome, progress, received)
        return outcome

    engine, lines, plan = parts_of(gguf, ["Hi"] * 5, n_seqs=2)
    run([], plan, lines, engine, "whole")
    engine, lines, plan = parts_of(gguf, ["Hi"] * 5, n_seqs=2)
    n_steps, step = 0, engine.model.step

    def pressed(*args, **options):
        nonlocal n_steps
        n_steps += 1
        if n_steps == 5:
            signal.raise_signal(signal.SIGINT)
        return step(*args, **options)

    with batch.stop_signals() as received, monkeypatch.context() as patch:
        patch.setattr(engine.model, "step", pressed)
        outcome = run(received, plan, lines, engine, "cut")
    assert outcome.signal == signal.SIGINT and n_steps == 5 and 1 <= len(rows["cut"]) == outcome.n_done < 5
    engine, lines, plan = parts_of(gguf, ["Hi"] * 5, n_seqs=2)
    for i in range(len(rows["cut"])):
        plan.is_done[i] = 1
    run([], plan, lines, engine, "rest")
    assert sorted(rows["cut"] + rows["rest"]) == sorted(rows["whole"])


def test_progress(run, whole, monkeypatch):
    source, target = whole
    rows = target.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(rows[:2]))
    monkeypatch.setattr("pagedkv.batch.job.REPORT_S", 0.0)
    monkeypatch.setattr("pagedkv.batch.job.BAR_S", 0.0)
    errors = run("--input", source, "--output", target, *FLAGS)[2]
    assert re.search(r"\npagedkv: [3-9] of 9 rows, [\d.,]+ tokens/s, \d+/[\d,]+ blocks, \d+:\d\d:\d\d to go\n", errors)
    target.write_bytes(b"".join(rows[:2]))
    assert run("--input", source, "--output", target, *FLAGS, "--quiet")[2] == ""
    target.write_bytes(b"".join(rows[:2]))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    run("--input", source, "--output", target, *FLAGS)
    shown = terminal.getvalue()
    assert re.search(r" [3-8]/9 rows, [\d.,]+ tokens/s, \d+/[\d,]+ blocks, \d+:\d\d:\d\d to go", shown)
    assert re.search(r"100%.* 9/9 rows, [\d.,]+ tokens/s, 0/[\d,]+ blocks, 0:00:00 to go\n", shown)
    assert shown.endswith(" tokens/s\n") and "\npagedkv: 9 rows in " in shown


def test_progress_that_nobody_reads(run, whole, monkeypatch):
    class Gone(Terminal):
        def write(self, text):
            raise BrokenPipeError

    source, target = whole
    rows, want = target.read_bytes().splitlines(keepends=True), sorted_lines(target)
    monkeypatch.setattr("pagedkv.batch.job.REPORT_S", 0.0)
    monkeypatch.setattr("pagedkv.batch.job.BAR_S", 0.0)
    for is_terminal in (False, True):
        target.write_bytes(b"".join(rows[:2]))
        monkeypatch.setattr(Gone, "isatty", lambda self, is_terminal=is_terminal: is_terminal)
        with monkeypatch.context() as context:
            context.setattr(sys, "stderr", Gone())
            status = run("--input", source, "--output", target, *FLAGS)[0]
        assert status == 1 and sorted_lines(target) == want


def test_durations():
    assert [batch.job._duration(s) for s in (0, 59.6, 3599, 86_400 * 3)] == ["0:00:00", "0:01:00", "0:59:59", "72:00:00"]


# ---- As a process -------------------------------------------------------------------------------


def batch_args(source, target, gguf):
    return ("generate", "--input", source, "--output", target, "--model", gguf, "--threads", 1, "--max-num-seqs", 4)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, gguf):
    """An input of 60 texts of 200 tokens, and the rows of one run."""
    folder = tmp_path_factory.mktemp("long")
    lines = [{"id": f"r{i}", "prompt": f"text {i % 50}", "max_tokens": 200, "ignore_eos": True, "n": 1 + i % 2}
             for i in range(60)]  # fmt: skip
    source = write_lines(folder / "in", [*lines, {"id": "bad"}])
    assert cli.main([str(arg) for arg in batch_args(source, folder / "whole", gguf)]) == 1
    return source, sorted_lines(folder / "whole")


def wait_for_rows(process, target, n_bytes):
    """Wait until the file has so many bytes, or the process has ended."""
    until = time.monotonic() + CHILD_SECONDS
    while process.poll() is None and (not target.exists() or target.stat().st_size < n_bytes):
        assert time.monotonic() < until
        time.sleep(0.002)


def test_killed_again_and_again(long_run, tmp_path, gguf):
    source, want = long_run
    target, rng, total = tmp_path / "out", random.Random(5), sum(map(len, long_run[1]))
    n_killed, at = 0, 0
    while True:
        process = subprocess.Popen(command(*batch_args(source, target, gguf)), env=child_env(), stderr=subprocess.PIPE)
        try:
            at += rng.randrange(total // 5)
            wait_for_rows(process, target, at)
            time.sleep(rng.random() * 0.02)
            process.kill()
            errors = process.communicate(timeout=CHILD_SECONDS)[1]
        finally:
            process.kill()
            process.wait()
        if process.returncode != -signal.SIGKILL:
            break
        n_killed += 1
    assert process.returncode == 1 and b"pagedkv: 61 rows in " in errors, errors
    assert n_killed >= 2
    assert sorted_lines(target) == want


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped(long_run, tmp_path, gguf, number, status):
    """And while it runs, a second one on the same output is refused."""
    source, want = long_run
    target = tmp_path / "out"
    args = batch_args(source, target, gguf)
    # Quiet: on a busy machine it would tell its progress.
    process = subprocess.Popen(command(*args, "--quiet"), env=child_env(), stderr=subprocess.PIPE, text=True)
    try:
        wait_for_rows(process, target, 1)
        if number == signal.SIGINT:
            os.kill(process.pid, signal.SIGSTOP)  # it must still be there
            assert refusal(child(*args)) == f"another process is writing to {target}\n"
            os.kill(process.pid, signal.SIGCONT)
        process.send_signal(number)
        errors = process.communicate(timeout=CHILD_SECONDS)[1]
    finally:
        process.kill()
        process.wait()
    n = len(read_rows(target))
    assert (process.returncode, errors) == (status, f"pagedkv: stopped: {n} of 61 rows are in {target}, and the same "
                                            "command goes on from there\n")  # fmt: skip
    assert 1 <= n < 61
    done = child(*args)
    assert done.returncode == 1 and f" {n} from before; " in done.stderr
    assert sorted_lines(target) == want


def test_a_file_that_may_not_grow(long_run, tmp_path, gguf):
    """A limit of the file's size, which cuts a row in its middle as a full disk does."""
    source, want = long_run
    target = tmp_path / "out"
    args, total = batch_args(source, target, gguf), sum(map(len, want))
    code = ("import resource, sys; from pagedkv import cli; resource.setrlimit(resource.RLIMIT_FSIZE, (%d,) * 2); "
            "sys.exit(cli.main())")  # fmt: skip
    done = child(*args, "--quiet", entry=lambda *rest: [sys.executable, "-c", code % (total // 2), *map(str, rest)])
    n = len(read_rows(target))
    assert refusal(done) == (f"{target}: File too large; {n} of 61 rows are in {target}, and the same command goes on "
                             "from there\n")  # fmt: skip
    assert 1 <= n < 61 and target.stat().st_size <= total // 2
    assert child(*args).returncode == 1 and sorted_lines(target) == want


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk(whole, gguf):
    source, _ = whole
    done = child("generate", "--input", source, "--output", "/dev/full", "--model", gguf)
    assert refusal(done) == "/dev/full: No space left on device; 0 of 9 rows were written\n"
    done = child("generate", "--input", source, "--model", gguf, shell=">/dev/full")
    assert refusal(done) == "writing to standard output failed: No space left on device\n"


def test_standard_streams(whole, gguf, tmp_path):
    source, target = whole
    want = sorted_lines(target)
    args = ("generate", "--input", "-", "--model", gguf, *FLAGS)
    done = child(*args, shell=f"<{source} >{tmp_path}/a")
    assert done.returncode == 1 and sorted_lines(tmp_path / "a") == want
    assert re.match("pagedkv: 9 rows in standard output, 1 of them with an error; ", done.stderr)
    # A pipe is read before the first step: with the same lines, a file goes on.
    code = 'cat "$0" | exec "$@"'
    target.write_bytes(target.read_bytes()[:-30])
    done = subprocess.run(["sh", "-c", code, str(source), *command(*args, "--output", target)], env=child_env(),
                          capture_output=True, text=True, timeout=CHILD_SECONDS)  # fmt: skip
    assert done.returncode == 1 and " 8 from before; " in done.stderr and sorted_lines(target) == want
    assert refusal(child(*args, shell="<&-")) == "standard input is closed; give the prompts as a file\n"


def test_a_reader_that_goes_away(whole, gguf):
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = child("generate", "--input", whole[0], "--model", gguf, stdout=write_end)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
