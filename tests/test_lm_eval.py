"""The lm-evaluation-harness over pagedkv: its own tasks on local files, against scores and texts computed here."""

import json
import math
import sys

import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra pagedkv[lm-eval]")

import pagedkv as pk  # noqa: E402
import lm_eval.models.utils  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from pagedkv.lm_eval import PagedKVLM  # noqa: E402
from test_cli import BEGIN, CONFIG, END, METADATA, text_tensors  # noqa: E402
from tiny import write_gguf  # noqa: E402


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm_eval") / "tiny.gguf"
    write_gguf(path, CONFIG, text_tensors(), metadata=METADATA | {"tokenizer.ggml.add_bos_token": True})
    return path


@pytest.fixture(scope="module")
def lm(path):
    return PagedKVLM(path, n_tokens=1024)


def instances(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def log_softmax(logits):
    x = logits.astype(np.float64)
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


def logprob(model, context, continuation):
    seq = model.new_sequence(model.new_pool(n_tokens=3000))
    logits = model.prefill([*context, *continuation], seq, all_logits=True)[len(context) - 1:-1]
    return log_softmax(logits)[np.arange(len(continuation)), continuation].sum()


def text_alone(lm, context, options, seed=0):
    """What a context goes on with: single steps in a pool of its own, and the harness's reading of the options."""
    options = lm_eval.models.utils.normalize_gen_kwargs(options, lm.max_gen_toks)
    params = pk.SamplingParams(temperature=options.get("temperature", 1.0) if options["do_sample"] else 0.0,
                               top_p=options.get("top_p", 1.0), top_k=options.get("top_k", 0), seed=seed)  # fmt: skip
    ids = lm.tok_encode(context)[-(lm.max_length - options["max_gen_toks"]):]
    seq, tokens = lm.model.new_sequence(lm.model.new_pool(n_tokens=3000)), []
    logits = lm.model.prefill(ids, seq)
    while len(tokens) < options["max_gen_toks"]:
        token = params.choose(logits, 0, len(seq))
        if token == END:
            break
        tokens.append(token)
        logits = lm.model.decode_step([token], [seq])[0]
    text = lm.tokenizer.decode(tokens, skip_special_tokens=True)
    return lm_eval.models.utils.postprocess_generated_text(text, options["until"], None)


# ---- Through the harness ----


def write_task(folder, name, docs, **fields):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {"task": name, "dataset_path": "json", "test_split": "test", "metadata": {"version": 1},
            "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.jsonl")},
                               "cache_dir": str(folder / "cache")}}  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(task | fields))  # JSON is YAML


QUESTIONS = [{"question": f"Question {i}: {text}", "choices": [" Hi", " no way", "x" * (i + 1)], "label": i % 3}
             for i, text in enumerate(["who?", "Why is that", "when", "how many are there"])]  # fmt: skip


def test_tasks(tmp_path, path, lm):
    write_task(tmp_path, "choice", QUESTIONS, output_type="multiple_choice", doc_to_text="{{question}}",
               doc_to_choice="{{choices}}", doc_to_target="label", metric_list=[{"metric": "acc"}])  # fmt: skip
    write_task(tmp_path, "words", [{"text": text} for text in ("Hi there, this is a text.", "Another one")],
               output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
               metric_list=[{"metric": "byte_perplexity"}])  # fmt: skip
    write_task(tmp_path, "write", [{"prompt": "Hi "}, {"prompt": "Tell me "}], output_type="generate_until",
               doc_to_text="{{prompt}}", doc_to_target="", metric_list=[{"metric": "exact_match"}],
               generation_kwargs={"until": ["q"], "max_gen_toks": 8, "do_sample": False})  # fmt: skip
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    out = lm_eval.simple_evaluate("pagedkv", f"pretrained={path},n_tokens=1024", tasks=["choice", "words", "write"],
                                  task_manager=manager, batch_size=3, bootstrap_iters=0)  # fmt: skip
    model, encode = lm.model, lm.tokenizer.encode
    right = []
    for sample, doc in zip(sorted(out["samples"]["choice"], key=lambda s: s["doc_id"]), QUESTIONS):
        want = [logprob(model, encode(doc["question"]), encode(" " + choice, add_special_tokens=False))
                for choice in doc["choices"]]  # the harness puts a space in front  # fmt: skip
        got = [float(response[0][0]) for response in sample["resps"]]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9)
        right.append(int(np.argmax(want)) == doc["label"])
    assert out["results"]["choice"]["acc,none"] == np.mean(right)
    texts = ["Hi there, this is a text.", "Another one"]
    total = sum(logprob(model, [BEGIN], encode(text, add_special_tokens=False)) for text in texts)
    n_bytes = sum(map(len, texts))
    assert math.isclose(out["results"]["words"]["byte_perplexity,none"], math.exp(-total / n_bytes), rel_tol=1e-12)
    for sample in out["samples"]["write"]:
        want = text_alone(lm, sample["doc"]["prompt"], {"until": ["q"], "max_gen_toks": 8, "do_sample": False})
        assert sample["resps"] == [[want]]


def test_it_is_registered_and_made_from_arguments(path):
    from lm_eval.api.registry import get_model

    made = get_model("pagedkv").create_from_arg_string(
        f"pretrained={path},n_tokens=64,kv_dtype=float16,max_length=40", {"batch_size": 8, "device": "cuda:0"})
    assert (made.pool.dtype, made.pool.n_blocks, made.max_length) == ("float16", 4, 40)
    assert PagedKVLM(made.model, n_tokens=32).max_length == 32 and made.tokenizer_name == made.model.fingerprint
    for length in (0, 65):
        with pytest.raises(ValueError, match=rf"max_length {length} is outside \[1, 64\].* the pool of 4 blocks of 16"):
            PagedKVLM(made.model, n_tokens=64, max_length=length)
    with pytest.raises(ValueError, match=r"max_length 3001 is outside \[1, 3000\], what the model's context of 3000"):
        PagedKVLM(made.model, n_tokens=4000, max_length=3001)
    assert PagedKVLM(made.model).pool.n_blocks == 2 * 3000 // 16  # two contexts: one is short


# ---- Each kind of request ----


def test_loglikelihood(lm):
    pairs = [("", " Hi"), ("Hi", " you"), ("Hi ", "you"), ("<beg>Hi", " you"), ("Say", " a longer thing"),
             ("Hi", " you")]  # fmt: skip
    results = lm.loglikelihood(instances("loglikelihood", *pairs))
    assert results[1] == results[2] == results[3] == results[5]  # one space, one begin token
    assert all(type(total) is float and is_greedy is False for total, is_greedy in results)
    np.testing.assert_allclose([total for total, _ in results][:2], [
        logprob(lm.model, [BEGIN], lm.tokenizer.encode(" Hi", add_special_tokens=False)),
        logprob(lm.model, lm.tokenizer.encode("Hi"), lm.tokenizer.encode(" you", add_special_tokens=False)),
    ], rtol=0, atol=1e-9)  # fmt: skip
    assert [lm.loglikelihood(instances("loglikelihood", pair))[0] for pair in pairs] == results
    assert lm.loglikelihood([]) == [] and lm.pool.n_free == lm.pool.n_blocks


def test_a_long_context_loses_its_beginning(lm):
    short = PagedKVLM(lm.model, n_tokens=16)
    for context, continuation in (("a" * 50, "bcd"), ("a" * 14, "bcd"), ("abc", "d" * 16)):
        ids = lm.tokenizer.encode(context)[-(17 - len(continuation)):]
        (result,) = short.loglikelihood(instances("loglikelihood", (context, continuation)))
        want = logprob(lm.model, ids, lm.tokenizer.encode(continuation, add_special_tokens=False))
        assert math.isclose(result[0], want, rel_tol=1e-12)
    with pytest.raises(ValueError, match="has 17 tokens; 16 fit"):
        short.loglikelihood(instances("loglikelihood", ("a", "d" * 17)))


def test_a_long_text_goes_in_windows(lm):
    short, text = PagedKVLM(lm.model, n_tokens=16), "".join(chr(97 + i % 23) for i in range(40))
    ids = lm.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 40
    want = (logprob(lm.model, [BEGIN], ids[:16]) + logprob(lm.model, ids[15:16], ids[16:32])
            + logprob(lm.model, ids[23:32], ids[32:]))  # fmt: skip
    got = short.loglikelihood_rolling(instances("loglikelihood_rolling", (text,), ("",), ("Hi",)))
    assert math.isclose(got[0], want, rel_tol=1e-12) and got[1] == 0
    hi = lm.tokenizer.encode("Hi", add_special_tokens=False)
    assert math.isclose(got[2], logprob(lm.model, [BEGIN], hi), rel_tol=1e-12)


def test_generation_ends_where_it_is_told(lm):
    def text(context="Hi ", **options):
        return lm.generate_until(instances("generate_until", (context, options)))[0]

    whole = text(max_gen_toks=30)
    assert len(whole) > 5 and whole == text(max_tokens=30, until=["\0"], do_sample=False, temperature=0.7)
    assert text(max_new_tokens=4) == whole[:4] and text(max_gen_toks=30, until=None) == whole
    stop = whole[3:5]
    assert text(max_gen_toks=30, until=stop) == whole[:whole.index(stop)]
    assert text(max_gen_toks=30, until=["", "\0\0", stop]) == whole[:whole.index(stop)]
    assert lm.pool.n_free == lm.pool.n_blocks
    assert len(text("", max_gen_toks=2)) <= 2 and text("a" * 3000, max_gen_toks=5)
    options = {"max_gen_toks": 20, "do_sample": True, "temperature": 2.0}
    sampled = [text(**options) for _ in range(2)]
    assert sampled[0] == sampled[1] != whole
    again = lm.generate_until(instances("generate_until", *[("Hi ", options)] * 2))
    assert again[0] == sampled[0] != again[1]


MIXED = [{"max_gen_toks": 12}, {"until": ["e"], "max_gen_toks": 30}, {"until": " ", "max_new_tokens": 25},
         {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "max_gen_toks": 20},
         {"temperature": 0.7, "max_tokens": 9},
         {"do_sample": False, "temperature": 3.0, "top_k": 5, "num_beams": 1, "max_gen_toks": 1},
         {"do_sample": True, "top_k": 7, "until": ["x", "ab", "r"], "max_completion_tokens": 40}]  # fmt: skip


def test_mixed_requests_run_together_and_each_as_alone(lm):
    """Pools in which all run at once, few, and one at a time; the texts in the requests' order."""
    contexts = ["Hi there" * (i % 4) + f"{i} by the sea" for i in range(15)]
    requests = [(context, MIXED[i % len(MIXED)]) for i, context in enumerate(contexts)]
    requests.append(requests[3])  # again: another sample
    want = [text_alone(lm, context, dict(options)) for context, options in requests[:-1]]
    want.append(text_alone(lm, *requests[3], seed=1))
    assert want[-1] != want[3] and len(set(want)) > 12
    for n_tokens in (4096, 192, 96):
        each = PagedKVLM(lm.model, n_tokens=n_tokens, max_length=96)
        assert each.generate_until(instances("generate_until", *requests)) == want
        assert each.pool.n_free == each.pool.n_blocks


def test_requests_share_steps_and_prompts(lm, monkeypatch):
    rows, step = [], type(lm.model).step

    def counted(self, batch, *args, **options):
        rows.append([len(tokens) for _, tokens in batch])
        return step(self, batch, *args, **options)

    monkeypatch.setattr(type(lm.model), "step", counted)
    shots = "a shot " * 20
    options = {"max_gen_toks": 8, "until": ["\0"]}
    lm.generate_until(instances("generate_until", *[(f"{shots}{i}", options) for i in range(100)]))
    assert max(map(len, rows)) > 32 and len(rows) < 60
    assert sum(map(sum, rows)) < 64 * 145 + 36 * 20 + 100 * 8  # the later ones find the shots in the cache


def test_requests_are_told_as_they_end(lm, monkeypatch, capsys):
    """The cache has each text when its request ends, and the bar counts it; what waits is not read yet."""
    told, read = [], []

    class Hook:
        def add_partial(self, kind, args, text):
            told.append((kind, args, text))
            assert len(read) <= len(told) + 2 * 64 + 1

    encode = PagedKVLM.tok_encode
    monkeypatch.setattr(PagedKVLM, "tok_encode", lambda self, text: (read.append(text), encode(self, text))[1])
    monkeypatch.setattr(lm, "cache_hook", Hook())
    requests = [(f"text {i}", {"max_gen_toks": 30 if i == 0 else 1 + i % 3}) for i in range(300)]
    texts = lm.generate_until(instances("generate_until", *requests))
    assert told[0][1] != requests[0] and len(told) == len(read) == 300  # the longest one ends later
    assert sorted(told) == sorted(("generate_until", args, text) for args, text in zip(requests, texts))
    assert "Running generate_until requests: 100%" in capsys.readouterr().err
    lm.generate_until(instances("generate_until", *requests[:2]), disable_tqdm=True)
    assert capsys.readouterr().err == ""


def test_impossible_options_are_refused_before_the_first_step(lm, monkeypatch):
    monkeypatch.setattr(type(lm.model), "step", None)
    for options, message in [({"num_beams": 4}, r"\['num_beams'\] are not known"), ({"top_p": 0}, "top_p must be in"),
                             ({"max_gen_toks": 0}, "max_tokens must be at least 1"),
                             ({"max_gen_toks": 1024}, "1024 tokens to generate leave no room for a prompt in 1024")]:
        with pytest.raises(ValueError, match=message):
            lm.generate_until(instances("generate_until", ("Hi", {"max_gen_toks": 3}), ("Hi", options)))


def test_an_interrupt_gives_the_blocks_back(lm, monkeypatch):
    class Hook:
        def add_partial(self, *_):
            raise KeyboardInterrupt

    requests = instances("generate_until", *[("Hi " * 9, {"max_gen_toks": 2 + i}) for i in range(9)])
    monkeypatch.setattr(lm, "cache_hook", Hook())
    with pytest.raises(KeyboardInterrupt):
        lm.generate_until(requests)
    assert lm.pool.n_free == lm.pool.n_blocks


def test_chat(lm):
    chat = [{"role": "user", "content": "Hi"}]
    assert lm.apply_chat_template(chat) == "<user>Hi<end>" and lm.chat_template(True) == lm.tokenizer.chat_template
    chat.append({"role": "assistant", "content": " So "})
    assert lm.apply_chat_template(chat, add_generation_prompt=False) == "<user>Hi<end><user> So"


def test_results_are_kept_by_the_cache(tmp_path, lm):
    from lm_eval.api.model import CachingLM

    requests = instances("loglikelihood", ("Hi", " you"), ("Hi", " there"))
    want = lm.loglikelihood(requests)
    try:
        CachingLM(lm, str(tmp_path / "cache.db")).loglikelihood(requests)
        cached = CachingLM(object.__new__(PagedKVLM), str(tmp_path / "cache.db"))
        assert cached.loglikelihood(requests) == want
    finally:
        lm.set_cache_hook(lm_eval.api.model.CacheHook(None))


def test_the_harness_is_imported_by_this_module_alone():
    import subprocess

    code = "import sys, pagedkv; assert 'lm_eval' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
