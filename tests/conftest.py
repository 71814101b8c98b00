"""Fixtures for all modules."""

import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import pagedkv as pk
from pagedkv import _core

INCLUDE = Path(pk.get_include())

# Shared machines make deadlines a coin toss; an example database would litter the tree.
settings.register_profile("pagedkv", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pagedkv")

# Which thread does what is to be tested with more threads than this machine may have processors.
_core._set_capped(False)


@pytest.fixture
def threads():
    """Function that sets the thread count; the count before is back afterwards."""
    before = pk.get_num_threads()
    yield pk.set_num_threads
    pk.set_num_threads(before)


@pytest.fixture
def run_c(tmp_path):
    """Function that compiles a C program against include/ and runs it: (exit status, output)."""
    commands = [shlex.split(c) for c in (sysconfig.get_config_var("CC") or "", "cc", "gcc", "clang")]
    compiler = next((c for c in commands if c and shutil.which(c[0])), None)
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc, clang)")

    def run(source):
        (tmp_path / "check.c").write_text(source)
        subprocess.run([*compiler, "-std=c11", "-O1", "-D_GNU_SOURCE", "-ffp-contract=off", f"-I{INCLUDE}",
                        str(tmp_path / "check.c"), "-o", str(tmp_path / "check"), "-lm"], check=True)  # fmt: skip
        done = subprocess.run([str(tmp_path / "check")], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    return run
