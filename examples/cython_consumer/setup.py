"""python setup.py build_ext --inplace"""

import pagedkv
from Cython.Build import cythonize
from setuptools import Extension, setup

sharing = Extension(
    "sharing", ["sharing.pyx"], include_dirs=[pagedkv.get_include()], extra_compile_args=["-ffp-contract=off"]
)
setup(name="sharing", ext_modules=cythonize([sharing]))
