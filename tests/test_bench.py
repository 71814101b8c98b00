"""The benchmark runs and says what its README promises. Nothing here looks at a time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny

import pagedkv as pk
from pagedkv.bench import engines, files, peers
from pagedkv.formats import quants

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ["ceilings", "kernels", "decode", "peers", "bits"]


def run_bench(*arguments, **environment):
    return subprocess.run([sys.executable, "-P", "-m", "pagedkv.bench", *map(str, arguments)], capture_output=True,
                          text=True, timeout=600, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny.tiny_config(head_dim=32, rope_dim=32)
    return tiny.write_hf(tmp_path_factory.mktemp("bench") / "model", config, tiny.tiny_tensors(config))


@pytest.fixture(scope="module")
def result(model, tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "result.json"
    done = run_bench("--quick", "--threads", 2, "--model", model, "--peers", "numpy", "--json", file)
    assert done.returncode == 0, done.stderr
    return file, json.loads(file.read_text()), done.stdout


@pytest.fixture
def readme():
    file = ROOT / "bench" / "README.md"
    if not file.is_file():
        pytest.skip("the source tree with bench/README.md is not here")
    return file.read_text()


def documented(text, heading):
    """Names in backquotes of the first column of the README's table under a heading of its own."""
    table = re.search(rf"^\| {heading} \|.*?\n\n", text, re.MULTILINE | re.DOTALL).group()
    return [name for line in table.strip().splitlines()[2:] for name in re.findall("`([^`]+)`", line.split("|")[1])]


def test_document(result):
    _, document, _ = result
    assert set(document) == {"schema", "machine", "model", "quick", "sections", "ceilings_skipped", "skipped", "peers",
                             "probes", "rows", "same_bits", "health"}
    assert document["schema"] == 1 and document["quick"] and document["health"] == []
    assert document["sections"] == SECTIONS
    assert set(document["peers"]) == {"numpy"}
    assert {"cpu", "isa", "threads", "commit", "pagedkv", "numpy", "load_average", "date"} <= set(document["machine"])
    assert document["machine"]["threads"] == 2


def test_rows_have_the_documented_fields(result, readme):
    _, document, _ = result
    fields = set(documented(readme, "in `rows`"))
    keys = set()
    for row in document["rows"]:
        assert set(row) == fields
        assert 0 < row["best_s"] <= row["median_s"] and row["k"] >= 3 and row["n_calls"] >= 1 and row["spread"] >= 0
        assert (row["gb_s"] is None) == (row["nbytes"] == 0) and (row["tokens_s"] is None) == (row["n_tokens"] == 0)
        keys.add((row["engine"], row["section"], row["name"], row["shape"]))
    assert len(keys) == len(document["rows"])  # --compare needs them unique


def test_every_documented_row_is_there(result, readme):
    _, document, _ = result
    names = {row["name"] for row in document["rows"] if row["section"] in ("kernels", "decode")}
    no_int8 = any(each["what"] == "compute int8" for each in document["skipped"])
    skipped = {"decode int8", "prefill int8"} if no_int8 else set()
    matmuls = {f"matmul {name}" for name in ("qkv", "o", "gate_up", "down", "head", *quants.BLOCKS)}
    assert names == set(documented(readme, "row")) - {"matmul NAME", "matmul TYPE"} - skipped | matmuls


def test_kv_types_are_measured_or_skipped_by_name(result):
    _, document, _ = result
    skipped = {each["what"] for each in document["skipped"]}
    for dtype in ("float16", "bfloat16", "q8_0"):
        rows = [row for row in document["rows"] if row["shape"].endswith(f" KV {dtype}")]
        assert bool(rows) != (f"KV {dtype}" in skipped)
        if rows:
            assert {row["name"] for row in rows} == {"paged_attention", "attention step", "decode as in file"}


def test_peers_take_turns_with_pagedkv(result):
    _, document, _ = result
    rows = [row for row in document["rows"] if row["section"] == "peers"]
    assert {row["engine"] for row in rows} == {"pagedkv", "numpy"}
    for row in rows:
        if row["engine"] != "pagedkv":
            assert [r["k"] for r in rows if (r["name"], r["shape"]) == (row["name"], row["shape"])] == [3, 3]


def test_the_same_bits_are_ours(result):
    _, document, text = result
    ours = [each for each in document["same_bits"] if each["engine"] == "pagedkv"]
    assert {(each["m"], each["threads"]) for each in ours} == {(m, n) for m in (1, 3) for n in (1, 2)}
    assert all(each["same_bits"] for each in ours) and "same bits" in text
    assert {each["engine"] for each in document["same_bits"]} == {"pagedkv", "numpy"}


def test_the_same_bits_between_runs_are_compared():
    ids, logits = [3, 1, 2], np.arange(6, dtype=np.float32).reshape(3, 2)
    assert engines.row_difference((ids, logits), (ids, logits.copy()))["same_bits"]
    other = logits.copy()
    other[1, 0] += 0.5
    found = engines.row_difference((ids, logits), (ids, other))
    assert not found["same_bits"] and found["same_ids"] and found["max_difference"] == 0.5
    other[2] += 100  # after the first other id the contexts differ, and logits cannot be compared
    found = engines.row_difference((ids, logits), ([3, 5, 2], other))
    assert found["parted_at"] == 1 and found["max_difference"] == 0.5
    found = engines.row_difference((ids, None), (ids, None))
    assert found["same_ids"] and found["same_bits"] is None


def test_a_peer_that_fails_is_a_sentence(tmp_path):
    with pytest.raises(peers.PeerFailed, match="^llama.cpp"):  # not installed, or no such file
        with peers.Peer("llama.cpp", threads=1, file=str(tmp_path / "none.gguf")):
            pass
    with peers.Peer("numpy", threads=1) as peer, pytest.raises(peers.PeerFailed, match="no_such_method"):
        peer.no_such_method()


def test_files_for_the_peers_hold_the_same_model(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = tiny.tiny_config(head_dim=32, rope_dim=32)
    source = tmp_path / "model.gguf"
    tiny.write_gguf(source, config, tiny.tiny_tensors(config), types="f16")
    model, prompt = pk.LlamaModel.load(source), [1, 2, 3]
    want = model.prefill(prompt, model.new_sequence(model.new_pool(n_tokens=16)))
    for kind in ("F32", "F16"):
        file = files.write(source, kind)
        assert files.kind_of(file) == kind and files.write(source, kind) == file
        copy = pk.LlamaModel.load(file)
        assert (copy.prefill(prompt, copy.new_sequence(copy.new_pool(n_tokens=16))) == want).all()
    assert files.kind_of(files.write(source, "Q8_0")) == "Q8_0"


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    probe = {"read_gb_s": 20.0, "fma_gflop_s": 100.0}
    row = {"engine": "pagedkv", "section": "decode", "name": "decode float32", "note": "", "cold": True,
           "nbytes": 10**9, "operations": 10**10, "gflop_s": 80.0, "tokens_s": 40.0}  # fmt: skip
    machine = {"cpu": "a", "isa": "b", "threads": 2, "pagedkv": "1", "commit": "c"}
    document = {"schema": 1, "quick": False, "machine": machine, "model": "m", "probes": [probe],
                "rows": [{**row, "shape": f"M={m} ctx=128"} for m in (1, 8)]}  # fmt: skip
    file = tmp_path / "result.json"
    file.write_text(json.dumps(document))
    done = run_bench("--plot", file, tmp_path / "now")
    assert done.returncode == 0, done.stderr
    for name in ("roofline", "tokens"):
        assert (tmp_path / f"now-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_runs_it(tmp_path):
    done = subprocess.run([sys.executable, "-P", "-m", "pagedkv", "bench", "--compare", "no-such.json", "no-such.json"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no-such.json" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run([sys.executable, "-P", "-m", "pagedkv", "bench", "--help"], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0 and "pagedkv bench" in done.stdout and "--peers" in done.stdout


def test_bench_at_the_top_of_the_tree():
    if not (ROOT / "bench" / "__main__.py").is_file():
        pytest.skip("the source tree with bench/ is not here")
    # -P, and the root last on the path: an installed pagedkv comes before its own source tree.
    code = ("import sys; sys.path.append(sys.argv.pop(1)); import bench.__main__ as top; "
            "from pagedkv.bench.__main__ import main; assert top.main is main")
    done = subprocess.run([sys.executable, "-P", "-c", code, str(ROOT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_fractions_follow_from_the_probes(result):
    _, document, _ = result
    if document["ceilings_skipped"]:
        pytest.skip(document["ceilings_skipped"])
    assert {row["name"] for row in document["rows"] if row["section"] == "ceilings"} == {"read", "fma"}
    for probe in document["probes"]:
        assert set(probe) == {"at_s", "read_gb_s", "read_median_gb_s", "fma_gflop_s", "fma_median_gflop_s", "k"}
    for row in document["rows"]:
        if row["limit"] is None:
            assert row["fraction"] is None and (not row["cold"] or not row["nbytes"] + row["operations"])
            continue
        around = [document["probes"][i] for i in row["probes"]]
        assert len(around) == 2
        read_s = row["nbytes"] / max(probe["read_gb_s"] for probe in around) / 1e9
        fma_s = row["operations"] / max(probe["fma_gflop_s"] for probe in around) / 1e9
        assert row["limit"] == ("read" if read_s >= fma_s else "fma")
        assert row["fraction"] == pytest.approx(max(read_s, fma_s) / row["median_s"])


def test_the_table_shows_every_row(result):
    _, document, text = result
    for row in document["rows"]:
        name = row["name"] if row["engine"] == "pagedkv" else f"{row['name']}, {row['engine']}"
        assert re.search(rf"^{re.escape(name)} +{re.escape(row['shape'])} ", text, re.MULTILINE)


def test_compare(result, tmp_path):
    file, document, _ = result
    for row in document["rows"]:
        row["median_s"] *= 2
        row["best_s"] *= 2
    document["rows"] = [row for row in document["rows"] if row["section"] != "peers"]
    document["rows"][-1]["shape"] = "n=7"
    slower = tmp_path / "slower.json"
    slower.write_text(json.dumps(document))
    done = run_bench("--compare", slower, file)
    assert done.returncode == 0, done.stderr
    compared = [line.split() for line in done.stdout.splitlines() if " 2.00 " in line]
    assert len(compared) == len(document["rows"]) - 1
    last = document["rows"][-1]["name"]
    assert f"only in A: {last} n=7" in done.stdout and f"only in B: {last} n=" in done.stdout


def test_without_a_compiler(model, tmp_path):
    file = tmp_path / "result.json"
    done = run_bench("ceilings", "--quick", "--model", model, "--json", file, CC="no-such-compiler-at-all")
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert "no-such-compiler-at-all" in document["ceilings_skipped"] and document["ceilings_skipped"] in done.stdout
    assert document["rows"] == [] and document["probes"] == []


@pytest.mark.parametrize("arguments, said", [
    (("--threads", "0"), "at least 1"),
    (("--peers", "numpy,no-such-peer"), "no-such-peer"),
    (("--plot", "no-such.json", "x"), "no-such.json"),
    (("--json", "no/such/folder/x.json"), "no directory"),
    (("decode", "--model", "no-such-model"), "no-such-model"),
    (("--compare", __file__, __file__), "not a result"),
    (("--compare", "no-such.json", "no-such.json"), "no-such.json"),
])  # fmt: skip
def test_bad_input(arguments, said):
    done = run_bench(*arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_result_is_not_timed(model):
    broken = ("import sys; from pagedkv import _core\n"
              "def twice(x, w, out, right=_core.matmul): right(x, w, out); out *= 2\n"
              "_core.matmul = twice\n"
              "from pagedkv.bench.__main__ import main; sys.exit(main())")  # fmt: skip
    done = subprocess.run([sys.executable, "-P", "-c", broken, "kernels", "--quick", "--model", str(model)],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "matmul qkv" in done.stderr and "float64" in done.stderr
    assert "matmul qkv" not in done.stdout
