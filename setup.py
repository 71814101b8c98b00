"""The compiled part. Everything else is in pyproject.toml."""

import os
import sys
from glob import glob

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

# PAGEDKV_DEBUG=1 turns Cython's own checks on; the checks at the door are always there.
DEBUG = os.environ.get("PAGEDKV_DEBUG", "0") not in ("", "0")

if sys.platform == "win32":
    compile_args, link_args = ["/O2", "/openmp", "/fp:precise"], []
elif sys.platform == "darwin":
    compile_args, link_args = ["-O3", "-ffp-contract=off", "-Xpreprocessor", "-fopenmp"], ["-lomp"]
else:
    compile_args, link_args = ["-O3", "-ffp-contract=off", "-fopenmp", "-fno-math-errno"], ["-fopenmp"]

core = Extension(
    "pagedkv._core",
    ["pagedkv/_core.pyx"],
    include_dirs=["include", numpy.get_include()],
    depends=glob("include/pagedkv/*.h") + ["pagedkv/_core.pxd"],
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    extra_compile_args=compile_args,
    extra_link_args=link_args,
)

setup(
    ext_modules=cythonize(
        [core],
        compiler_directives={
            "language_level": 3,
            "boundscheck": DEBUG,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": DEBUG,
            "embedsignature": True,
        },
    )
)
