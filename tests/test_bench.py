"""The benchmark runs and says what its README promises. Nothing here looks at a time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

ROOT = Path(__file__).resolve().parent.parent
MAIN = "import sys; sys.path.append(sys.argv.pop(1)); from bench.__main__ import main; sys.exit(main())"

pytestmark = pytest.mark.skipif(not (ROOT / "bench").is_dir(), reason="the source tree with bench/ is not here")


def run_bench(*arguments, **environment):
    # -P, and the root last on the path: an installed pagedkv comes before its own source tree.
    return subprocess.run([sys.executable, "-P", "-c", MAIN, str(ROOT), *map(str, arguments)], capture_output=True,
                          text=True, timeout=600, env={**os.environ, **environment})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny.tiny_config(head_dim=32, rope_dim=32)
    return tiny.write_hf(tmp_path_factory.mktemp("bench") / "model", config, tiny.tiny_tensors(config))


@pytest.fixture(scope="module")
def result(model, tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "result.json"
    done = run_bench("--quick", "--threads", 2, "--model", model, "--json", file)
    assert done.returncode == 0, done.stderr
    return file, json.loads(file.read_text()), done.stdout


def documented(heading):
    """Names in backquotes of the first column of the README's table under a heading of its own."""
    text = (ROOT / "bench" / "README.md").read_text()
    table = re.search(rf"^\| {heading} \|.*?\n\n", text, re.MULTILINE | re.DOTALL).group()
    return [name for line in table.strip().splitlines()[2:] for name in re.findall("`([^`]+)`", line.split("|")[1])]


def test_document(result):
    _, document, _ = result
    assert set(document) == {"schema", "machine", "model", "quick", "sections", "ceilings_skipped", "probes", "rows",
                             "health"}
    assert document["schema"] == 1 and document["quick"] and document["health"] == []
    assert document["sections"] == ["ceilings", "kernels", "decode"]
    assert {"cpu", "isa", "threads", "commit", "pagedkv", "numpy", "load_average", "date"} <= set(document["machine"])
    assert document["machine"]["threads"] == 2


def test_rows_have_the_documented_fields(result):
    _, document, _ = result
    fields = set(documented("in `rows`"))
    keys = set()
    for row in document["rows"]:
        assert set(row) == fields
        assert 0 < row["best_s"] <= row["median_s"] and row["k"] >= 3 and row["n_calls"] >= 1 and row["spread"] >= 0
        assert (row["gb_s"] is None) == (row["nbytes"] == 0) and (row["tokens_s"] is None) == (row["n_tokens"] == 0)
        keys.add((row["engine"], row["section"], row["name"], row["shape"]))
    assert len(keys) == len(document["rows"])  # --compare needs them unique


def test_every_documented_row_is_there(result):
    _, document, _ = result
    names = {row["name"] for row in document["rows"] if row["section"] != "ceilings"}
    matrices = {f"matmul {name}" for name in ("qkv", "o", "gate_up", "down", "head")}
    assert names == set(documented("row")) - {"matmul NAME"} | matrices


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
        assert re.search(rf"^{re.escape(row['name'])} +{re.escape(row['shape'])} ", text, re.MULTILINE)


def test_compare(result, tmp_path):
    file, document, _ = result
    for row in document["rows"]:
        row["median_s"] *= 2
        row["best_s"] *= 2
    document["rows"][-1]["shape"] = "n=7"
    slower = tmp_path / "slower.json"
    slower.write_text(json.dumps(document))
    done = run_bench("--compare", slower, file)
    assert done.returncode == 0, done.stderr
    compared = [line.split() for line in done.stdout.splitlines() if " 2.00 " in line]
    assert len(compared) == len(document["rows"]) - 1
    assert "only in A: prefill as in file n=7" in done.stdout and "only in B: prefill as in file" in done.stdout


def test_without_a_compiler(model, tmp_path):
    file = tmp_path / "result.json"
    done = run_bench("ceilings", "--quick", "--model", model, "--json", file, CC="no-such-compiler-at-all")
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert "no-such-compiler-at-all" in document["ceilings_skipped"] and document["ceilings_skipped"] in done.stdout
    assert document["rows"] == [] and document["probes"] == []


@pytest.mark.parametrize("arguments, said", [
    (("--threads", "0"), "at least 1"),
    (("--json", "no/such/folder/x.json"), "no directory"),
    (("decode", "--model", "no-such-model"), "no-such-model"),
    (("--compare", __file__, __file__), "not a result"),
    (("--compare", "no-such.json", "no-such.json"), "no-such.json"),
])  # fmt: skip
def test_bad_input(arguments, said):
    done = run_bench(*arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_wrong_result_is_not_timed(model):
    broken = ("import sys; sys.path.append(sys.argv.pop(1)); from pagedkv import _core\n"
              "def twice(x, w, out, right=_core.matmul): right(x, w, out); out *= 2\n"
              "_core.matmul = twice\n"
              "from bench.__main__ import main; sys.exit(main())")  # fmt: skip
    done = subprocess.run([sys.executable, "-P", "-c", broken, str(ROOT), "kernels", "--quick", "--model", str(model)],
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "matmul qkv" in done.stderr and "float64" in done.stderr
    assert "matmul qkv" not in done.stdout
