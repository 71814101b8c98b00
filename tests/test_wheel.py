"""What a wheel carries: headers and a .pxd that others can build on, one OpenMP runtime, kernels for old and new CPUs.

All of it is asked of the package as it was imported: in .ci/wheels that is an installed wheel without its source.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from fractions import Fraction
from pathlib import Path

import numpy as np
import pagedkv as pk
import pytest
import tiny
from pagedkv import _core
from promise_rows import child_env, run_child

INCLUDE = Path(pk.get_include())
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
HEADERS = sorted(path.name for path in (INCLUDE / "pagedkv").glob("*.h"))
X86 = {"int8_avx2.h", "int8_avx512.h", "kernels_avx2.h", "kernels_avx512.h"}
NEON = {"int8_neon.h", "kernels_neon.h"}
MACHINE = sysconfig.get_platform().rpartition("-")[2].lower()

# An emulated CPU -> the best instruction set it has. QEMU's emulator has AVX2 but no AVX-512; the first is as old as NumPy's
# own wheel allows (x86-64-v2).
CPUS = {"Nehalem": "scalar", "Haswell": "avx2"}


QUIET = ["-Wall", "-Wextra", f"-isystem{INCLUDE}"]


def compiler(name):
    return shutil.which(name) or pytest.skip(f"{name} is not installed")


def compiles(tmp_path, source, *command):
    """Whether the compiler takes it, without a word."""
    path = tmp_path / ("check.cc" if "++" in command[0] else "check.c")
    path.write_text(source)
    done = subprocess.run([*command, "-fsyntax-only", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr[:2000]


# -- headers --------------------------------------------------------------------------------------


def test_files_are_there():
    """What is no Python module and is read all the same; each is in pyproject.toml or setup.py by name."""
    package = Path(pk.__file__).parent
    for name in ("_core.pxd", "_core.pyi", "py.typed", "bench/ceilings.c", "server/page.html"):
        assert (package / name).is_file(), name
    for name in ("batch", "bench", "engine", "formats"):
        importlib.import_module(f"pagedkv.{name}")
    assert {"attention.h", "dispatch.h", "layout.h", "pool.h", "step.h"} | X86 | NEON <= set(HEADERS)


@pytest.mark.parametrize("name", ["gcc", pytest.param("clang", marks=pytest.mark.slow)])
def test_each_header_compiles_alone(tmp_path, name):
    """In strict C11; those of another architecture are for dispatch.h to leave out."""
    foreign = (set() if MACHINE in ("x86_64", "amd64") else X86) | (set() if MACHINE in ("aarch64", "arm64") else NEON)
    for header in set(HEADERS) - foreign:
        compiles(tmp_path, f'#include "pagedkv/{header}"\n', compiler(name), "-std=c11", *QUIET)


@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_headers_are_c_plus_plus_too(tmp_path, name):
    """The two that include all others."""
    lines = "".join(f'#include "pagedkv/{header}.h"\n' for header in ("step", "sampling"))
    compiles(tmp_path, f'extern "C" {{\n{lines}}}\n', compiler(name), "-std=c++17", *QUIET)


# What a compiler that is neither GCC nor clang sees, MSVC for one. System headers come first: they need the real macros.
PLAIN = """
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#undef __aarch64__
#endif
#undef __GNUC__
#undef __clang__
#undef __unix__
#undef __APPLE__
#define __attribute__(x) _Static_assert(0, "an attribute of GNU C")
#define __asm__ assembler_of_gnu_c
#include "pagedkv/sampling.h"
#include "pagedkv/step.h"
"""


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_scalar_kernels_are_plain_c11(tmp_path, name):
    source = PLAIN + "int table_of_scalar_alone[pkv_n_kernels == 1 ? 1 : -1];\n"
    source = source.replace("pkv_n_kernels", "(int)(sizeof pkv_kernel_tables / sizeof *pkv_kernel_tables)")
    compiles(tmp_path, source, compiler(name), "-std=c11", "-pedantic-errors", "-Werror=vla", f"-I{INCLUDE}")


def test_c_consumer(tmp_path):
    source = EXAMPLES / "c_consumer" / "shared_prefix.c"
    if not source.exists():
        pytest.skip("examples/ is not here")
    program = str(tmp_path / "shared_prefix")
    subprocess.run([compiler("cc"), "-std=c11", "-O0", *QUIET, "-Werror", "-ffp-contract=off", str(source),
                    "-lm", "-o", program], check=True)  # fmt: skip
    # 20 rows of 1; then 20 of 1 and 20 of 3: 2 blocks, of which the full one is shared, and 2 of the second's own.
    assert subprocess.run([program], capture_output=True, text=True).stdout == "means 1 2, blocks in use 4\n"


@pytest.mark.slow
def test_cython_consumer(tmp_path):
    pytest.importorskip("Cython")
    pytest.importorskip("setuptools")
    if not (EXAMPLES / "cython_consumer").exists():
        pytest.skip("examples/ is not here")
    compiler("cc")
    folder = shutil.copytree(EXAMPLES / "cython_consumer", tmp_path / "cython_consumer")
    done = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder,
                          env=child_env(CFLAGS="-O0"), capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    code = ("import numpy as np, pagedkv as pk, sharing\n"
            "pool = pk.BlockPool(8, 1, 4)\n"
            "seq = pk.Sequence.import_(np.ones((1, 2, 1, 33, 4), np.float32), pool)\n"
            "before, children = sharing.shared_blocks(pool), [seq.fork() for _ in range(2)]\n"
            "print(before, sharing.shared_blocks(pool), pool.n_saved)\n")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=child_env(), capture_output=True, text=True)
    assert done.stdout.split() == ["0", "3", "6"], done.stderr


# -- the machine ----------------------------------------------------------------------------------


def nearest_f32(exact):
    """A rational number rounded once to float32, ties to even. Within the normal numbers."""
    guess = np.float32(float(exact))
    near = [np.nextafter(guess, np.float32(side)) for side in (-np.inf, np.inf)] + [guess]
    return min(near, key=lambda f: (abs(Fraction(float(f)) - exact), int(f.view(np.int32)) & 1))


@pytest.mark.parametrize("isa", pk.available_isas())
def test_fma_rounds_once(isa):
    """The kernels' sums stand on the C library's fmaf in scalar; some libraries round twice, by way of double."""
    rng = np.random.default_rng(0)
    x, y = rng.uniform(1, 2, (2, 40)).astype(np.float32)
    z = np.float32(2.0**-30) * rng.uniform(1, 2, 40).astype(np.float32)
    # Through products near the midpoint of two float32, whose fate z decides.
    want = [[nearest_f32(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))) for b, c in zip(y, z)] for a in x]
    before = pk.isa()
    _core._set_isa(isa)
    try:
        got = pk.matmul(np.stack([np.ones_like(x), x], axis=1), pk.pack(np.stack([z, y], axis=1)))
    finally:
        _core._set_isa(before)
    assert got.tolist() == np.array(want).tolist()


# A fused multiply-add that is none: the sum is rounded to another type first, as mingw-w64 does.
FMAF = "float {}(float x, float y, float z) {{ volatile {} product = ({})x * y; return (float)(product + z); }}\n"


def test_a_wrong_fmaf_is_seen(run_c):
    kinds = ("double", "long double", "float")
    functions = "".join("static " + FMAF.format(f"by_{kind.replace(' ', '_')}", kind, kind) for kind in kinds)
    calls = ", ".join(f"pkv_fma_rounds_once({name})" for name in ("fmaf", "by_double", "by_long_double", "by_float"))
    program = (f'#include <stdio.h>\n#include "pagedkv/kernels_scalar.h"\n{functions}'
               f'int main(void) {{ printf("%d %d %d %d\\n", {calls}); return 0; }}\n')  # fmt: skip
    assert run_c(program) == (0, "1 0 0 0\n")


@pytest.mark.skipif(not (sys.platform.startswith("linux") and MACHINE == "x86_64"),
                    reason="elsewhere fmaf is an instruction, or LD_PRELOAD does not put another in its place")  # fmt: skip
@pytest.mark.parametrize("rounding", ["twice", "once"])
def test_import_is_refused_where_fmaf_rounds_twice(tmp_path, rounding):
    """Instead of other bits than those of other machines."""
    (tmp_path / "wrong.c").write_text(FMAF.format("fmaf", "double", "double") if rounding == "twice" else "int nothing;\n")
    subprocess.run([compiler("cc"), "-O1", "-shared", "-fPIC", str(tmp_path / "wrong.c"), "-o", str(tmp_path / "wrong.so")],
                   check=True)  # fmt: skip
    preload = f"{os.environ.get('LD_PRELOAD', '')}:{tmp_path / 'wrong.so'}".lstrip(":")
    done = subprocess.run([sys.executable, "-c", "import pagedkv"], env=child_env(LD_PRELOAD=preload),
                          capture_output=True, text=True)  # fmt: skip
    if rounding == "once":
        assert done.returncode == 0, done.stderr
    else:
        assert done.stderr.splitlines()[-1].startswith("ImportError: the C library's fmaf rounds twice"), done.stderr


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    config = tiny.tiny_config()
    folder = tiny.write_hf(tmp_path_factory.mktemp("wheel") / "tiny", config, tiny.tiny_tensors(config))
    return folder, run_child(folder, "--tokens", "2")


@pytest.mark.skipif(MACHINE != "x86_64", reason="CPU models of x86-64")
@pytest.mark.parametrize("cpu", CPUS)
def test_old_cpus_give_the_same_bits(tiny_model, cpu):
    """One build runs with AVX2 and without, chosen by what the CPU says of itself. AVX-512 is for machines that have it."""
    emulator = next(filter(None, map(shutil.which, ("qemu-x86_64", "qemu-x86_64-static"))), None)
    if emulator is None:
        pytest.skip("none of qemu-x86_64, qemu-x86_64-static is installed")
    folder, native = tiny_model
    script = Path(__file__).with_name("promise_rows.py")
    env = child_env(PAGEDKV_NUM_THREADS="1", PAGEDKV_ISA="")
    env.pop("OPENBLAS_CORETYPE", None)  # NumPy's library would believe it, and not the CPU
    done = subprocess.run([emulator, "-cpu", cpu, sys.executable, str(script), str(folder), "--tokens", "2"],
                          env=env, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["isa"], result["sha256"]) == (CPUS[cpu], native["sha256"])


def test_one_openmp_runtime():
    """In a wheel it is the wheel's own, under a name that no other library shares; threadpoolctl sees it and this library."""
    pytest.importorskip("threadpoolctl")
    code = ("import json, threadpoolctl, pagedkv\n"
            "print(json.dumps([(p['internal_api'], p['filepath']) for p in threadpoolctl.threadpool_info()]))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=child_env(), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    runtimes = [Path(path) for api, path in found if api == "openmp"]
    assert [api for api, _ in found].count("pagedkv") == 1
    assert len(runtimes) == 1
    libraries = Path(pk.__file__).parents[1] / "pagedkv.libs"  # auditwheel's
    if libraries.is_dir():
        assert [path.name for path in libraries.iterdir()] == [runtimes[0].name]
        assert runtimes[0].parent.samefile(libraries) and runtimes[0].name.startswith("libgomp-")
