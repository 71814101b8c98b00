"""The examples, on the real model with a few tokens; and their types, and those of the package, by mypy."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pagedkv as pk
import pytest
from promise_rows import child_env, real_model

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not here")


@pytest.fixture(scope="module")
def model():
    return real_model()


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_best_of_n(model):
    llm = pk.LLM(model)
    module = example("best_of_n")
    question = "Say only the number 7."
    votes = module.vote(llm, question, n=4, max_tokens=12)
    params = pk.SamplingParams(n=4, temperature=0.8, top_p=0.95, seed=1, max_tokens=12)
    texts = [s.text for s in llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)[0].outputs]
    answers = [module.last_number(text) for text in texts]
    assert votes and all(answers.count(answer) == count for answer, count in votes)
    assert [module.last_number(t) for t in ("a 3, then 1,234.5.", "-7", "none")] == ["1234.5", "-7", None]


def test_multiple_choice(model):
    module = example("multiple_choice")
    assert module.choose(model, module.QUESTIONS) == [0, 0, 0]
    assert module.choose(model, [(context, choices[::-1]) for context, choices in module.QUESTIONS]) == [2, 2, 2]


def test_beam_search(model):
    beam_search = example("beam_search").beam_search
    prompt = model.tokenizer.encode("The capital of France is")
    (greedy,) = pk.LLM(model).generate([prompt], pk.SamplingParams(temperature=0, max_tokens=4, logprobs=0), use_tqdm=False)
    ((score, tokens),) = beam_search(model, prompt, width=1, n_tokens=4)
    assert tokens == greedy.outputs[0].token_ids
    assert score == pytest.approx(greedy.outputs[0].cumulative_logprob)
    wide = beam_search(model, prompt, width=3, n_tokens=4)
    pairs = pk.score(model, [(prompt, tokens) for _, tokens in wide])
    assert [score for score, _ in wide] == pytest.approx([pair.logprob for pair in pairs])
    assert wide[0][0] == max(score for score, _ in wide) >= score - 1e-9


def test_save_prefix(model, tmp_path):
    module = example("save_prefix")
    module.save(model, "Spain: Madrid.", tmp_path / "prefix.kv")
    tokens = model.tokenizer.encode("Spain: Madrid.") + model.tokenizer.encode(" France:", add_special_tokens=False)
    with model.new_sequence(model.new_pool(n_tokens=64)) as seq:
        want = model.prefill(tokens, seq)
    assert np.array_equal(module.go_on(model, tmp_path / "prefix.kv", " France:").view(np.int32), want.view(np.int32))


def test_async_clients(model):
    prompts = ["The capital of France is", "Once upon a time", "1, 2, 3,"]
    answers = asyncio.run(example("async_clients").serve(model, prompts, max_tokens=4))
    params = pk.SamplingParams(temperature=0, max_tokens=4)
    assert answers == [out.outputs[0].text for out in pk.LLM(model).generate(prompts, params, use_tqdm=False)]


def test_runs_as_a_script(model):
    done = subprocess.run([sys.executable, str(EXAMPLES / "multiple_choice.py")], env=child_env(), capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == "The capital of France is Paris", done.stderr


# -- types ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What mypy found out of NumPy, for all runs."""
    return str(tmp_path_factory.mktemp("mypy"))


def mypy(folder, *command):
    pytest.importorskip("mypy")
    return subprocess.run([sys.executable, "-m", *command], cwd=folder, env=child_env(), capture_output=True, text=True)


def test_examples_pass_mypy_strict(cache):
    paths = [f"examples/{name}.py" for name in NAMES]
    done = mypy(ROOT, "mypy", "--strict", "--cache-dir", cache, *paths)
    assert done.returncode == 0, done.stdout


def test_a_wrong_argument_is_seen(tmp_path, cache):
    """The types say something: a list where a text belongs, a count as a text, a misspelt attribute."""
    (tmp_path / "wrong.py").write_text(
        "import pagedkv as pk\n"
        "model = pk.LlamaModel.load(3)\n"
        "pk.SamplingParams(n='4')\n"
        "pk.BlockPool(8, 1, 4).n_fre\n"
        "model.tokenizer.decode('text')\n"
        "text: str = model.prefill([1], model.new_sequence(model.new_pool(n_tokens=8)))\n")  # fmt: skip
    done = mypy(tmp_path, "mypy", "--strict", "--cache-dir", cache, "--config-file", str(ROOT / "pyproject.toml"), "wrong.py")
    for line in (2, 3, 4, 5, 6):
        assert f"wrong.py:{line}: error" in done.stdout


# Cython's own names; parts that need optional packages, or are for this package alone.
NOT_PUBLIC = r"""
pagedkv\._core\.(__reduce_cython__|__setstate_cython__|__test__)
pagedkv\.lm_eval
pagedkv\.server\..*
pagedkv\.ray(\..*)?
pagedkv\.sandbox\..*
pagedkv\.bench\..*
"""


@pytest.mark.slow
def test_signatures_match_the_runtime(tmp_path):
    """Every public name of the compiled core is in _core.pyi, with its parameters and defaults, and nothing else is."""
    (tmp_path / "allow").write_text(NOT_PUBLIC)
    done = mypy(ROOT, "mypy.stubtest", "--concise", "--ignore-unused-allowlist", "--allowlist", str(tmp_path / "allow"),
                "--mypy-config-file", str(ROOT / "pyproject.toml"), "pagedkv")  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
