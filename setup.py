"""The compiled part. Everything else is in pyproject.toml."""

import os
import sys
from glob import glob

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# PAGEDKV_DEBUG=1 turns Cython's own checks on; the checks at the door are always there.
DEBUG = os.environ.get("PAGEDKV_DEBUG", "0") not in ("", "0")
# PAGEDKV_SANITIZE=address,undefined builds with those sanitizers; .ci/sanitize runs the tests with them.
SANITIZE = os.environ.get("PAGEDKV_SANITIZE", "")

# macOS and Windows are untried. MSVC compiles the plain C kernels alone (dispatch.h asks for GCC or clang before it includes
# the others): the same bits, many times slower. tests/test_wheel.py holds that part to plain C11. On macOS, Homebrew's
# libomp is found through CFLAGS and LDFLAGS (pyproject.toml, tool.cibuildwheel.macos).
if sys.platform == "win32":
    compile_args, link_args = ["/O2", "/std:c11", "/openmp", "/fp:precise"], []
elif sys.platform == "darwin":
    compile_args, link_args = ["-O3", "-ffp-contract=off", "-Xpreprocessor", "-fopenmp"], ["-lomp"]
else:
    compile_args, link_args = ["-O3", "-ffp-contract=off", "-fopenmp", "-fno-math-errno"], ["-fopenmp"]

if SANITIZE:
    compile_args = [*compile_args, "-O1", "-g1", "-fno-omit-frame-pointer", f"-fsanitize={SANITIZE}"]
    link_args = [*link_args, f"-fsanitize={SANITIZE}"]

core = Extension(
    "pagedkv._core",
    ["pagedkv/_core.pyx"],
    include_dirs=["include", numpy.get_include()],
    depends=glob("include/pagedkv/*.h") + ["pagedkv/_core.pxd"],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    extra_compile_args=compile_args,
    extra_link_args=link_args,
)


class build_py_with_headers(build_py):
    """A wheel carries the C headers inside the package, where pagedkv.get_include() finds them."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = os.path.join(self.build_lib, "pagedkv", "include", "pagedkv")
            self.mkpath(target)
            for header in glob("include/pagedkv/*.h"):
                self.copy_file(header, target)


setup(
    cmdclass={"build_py": build_py_with_headers},
    ext_modules=cythonize(
        [core],
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": DEBUG,
            "embedsignature": True,
            # Pools, sequences and the counts of blocks are changed under the interpreter's lock alone; a free-threaded
            # CPython turns it on again when this module is imported, with a RuntimeWarning.
            "freethreading_compatible": False,
        },
    )
)
