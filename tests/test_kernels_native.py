"""The C kernels without Python: tests/kernels_check.c, compiled here, run here and under emulation.

It compares each instruction set with scalar, bit for bit; the checksum it prints must be one and the same
for every compiler, optimisation level and processor.
"""

import platform
import re
import shlex
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pagedkv as pk
import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "tests" / "kernels_check.c"
INCLUDE = Path(pk.get_include())
FLAGS = ["-std=c11", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
RUN_SECONDS = 300  # 0.2 s natively, 2 s under emulation; the limit only ends a hang

CROSS = "aarch64-linux-gnu-gcc"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")


@cache
def host_compiler():
    """Command of the C compiler: the interpreter's own if it is here, else cc; None without any."""
    for command in (sysconfig.get_config_var("CC") or "", "cc", "gcc", "clang"):
        parts = shlex.split(command)
        if parts and shutil.which(parts[0]):
            return tuple(parts)
    return None


def require_host_compiler():
    if host_compiler() is None:
        pytest.skip("no C compiler")
    return list(host_compiler())


def build(directory, command, *flags):
    """Compile the check; a compiler's refusal is the test's failure."""
    program = directory / "kernels_check"
    line = [*command, *FLAGS, *flags, f"-I{INCLUDE}", str(SOURCE), "-o", str(program), "-lm"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(line)}\n{done.stderr}"
    return program


def run(*command):
    """Run the check and return (checksum, names of the ISAs compared, names of those not on this CPU)."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    n_checks, n_differences = map(int, re.search(r"^(\d+) checks, (\d+) differences$", done.stdout, re.M).groups())
    assert n_differences == 0
    compared = set(re.findall(r"^(\w+) +matmul_f32 +[1-9]\d* checks", done.stdout, re.M))
    assert n_checks > 1000 * len(compared)
    checksum = re.findall(r"^scalar +\S.*checksum ([0-9a-f]{16})$", done.stdout, re.M)[-1]
    return checksum, compared, set(re.findall(r"^(\w+) +not on this CPU$", done.stdout, re.M))


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return run(build(tmp_path_factory.mktemp("native"), require_host_compiler(), "-O2"))


def test_every_table_is_accounted_for(native):
    """Compared with scalar, or named as absent: none is passed over in silence."""
    _, compared, absent = native
    expected = {"x86_64": {"avx2", "avx512"}, "amd64": {"avx2", "avx512"}, "aarch64": {"neon"}, "arm64": {"neon"}}
    assert compared | absent == expected.get(platform.machine().lower(), set())


@pytest.mark.parametrize("isa", ["avx2", "avx512", "neon"])
def test_isa_was_compared(native, isa):
    if isa not in native[1]:
        pytest.skip(f"{isa} does not run on this CPU")


@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_optimisation_level_does_not_show(native, tmp_path, level):
    """-O2 is the fixture's, -O1 that of the sanitizers' test."""
    assert run(build(tmp_path, require_host_compiler(), level))[0] == native[0]


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_compiler_does_not_show(native, tmp_path, compiler):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    if Path(shutil.which(compiler)).samefile(shutil.which(host_compiler()[0])):
        pytest.skip(f"{compiler} -O3 is in test_optimisation_level_does_not_show")
    assert run(build(tmp_path, [compiler], "-O3"))[0] == native[0]


@pytest.mark.slow
def test_sanitizers_find_nothing(native, tmp_path):
    """As .ci/sanitize does; the compiler takes over a minute."""
    flags = ["-O1", "-g1", "-fsanitize=undefined,address", "-fno-sanitize-recover=all"]
    compiler = require_host_compiler()
    empty = tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    tried = subprocess.run([*compiler, *flags, str(empty), "-o", str(tmp_path / "empty")], capture_output=True)
    if tried.returncode != 0 or subprocess.run([str(tmp_path / "empty")], capture_output=True).returncode != 0:
        pytest.skip(f"{compiler[0]} cannot build or run with -fsanitize=undefined,address")
    assert run(build(tmp_path, compiler, *flags))[0] == native[0]


@pytest.mark.parametrize("level", [pytest.param("-O0", marks=pytest.mark.slow), "-O3"])
def test_aarch64_gives_the_same_bits(native, tmp_path, level):
    """NEON equals scalar there, and scalar there equals scalar here."""
    if not shutil.which(CROSS):
        pytest.skip(f"{CROSS} is not installed")
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if emulator is None:
        pytest.skip(f"none of {', '.join(EMULATORS)} is installed")
    checksum, compared, _ = run(emulator, build(tmp_path, [CROSS], level, "-static"))
    assert compared == {"neon"}
    assert checksum == native[0]
