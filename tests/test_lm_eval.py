"""The lm-evaluation-harness over pagedkv: its own tasks on local files, against scores and texts computed here."""

import json
import math
import sys

import numpy as np
import pytest

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra pagedkv[lm-eval]")

import pagedkv as pk  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from pagedkv.generate import generate  # noqa: E402
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
        ids = encode(sample["doc"]["prompt"])
        events = generate(model, model.new_pool(n_tokens=200), ids, 1, 8, pk.SamplingParams(temperature=0), (END,))
        tokens = [token for ((_, token, _),) in events]
        assert sample["resps"] == [[lm.tokenizer.decode(tokens, skip_special_tokens=True).split("q")[0]]]


def test_it_is_registered_and_made_from_arguments(path):
    from lm_eval.api.registry import get_model

    made = get_model("pagedkv").create_from_arg_string(
        f"pretrained={path},n_tokens=64,kv_dtype=float16,max_length=40", {"batch_size": 8, "device": "cuda:0"})
    assert (made.pool.dtype, made.pool.n_blocks, made.max_length) == ("float16", 4, 40)
    assert PagedKVLM(made.model, n_tokens=32).max_length == 32 and made.tokenizer_name == made.model.fingerprint
    for length in (0, 65):
        with pytest.raises(ValueError, match=rf"max_length {length} is outside \[1, 64\]"):
            PagedKVLM(made.model, n_tokens=64, max_length=length)


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
    with pytest.raises(ValueError, match=r"\['num_beams'\] are not known"):
        text(num_beams=4)
    with pytest.raises(ValueError, match="1024 tokens to generate leave no room for a prompt in 1024"):
        text(max_gen_toks=1024)


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
