"""The extension module of the host backend. All else is declared in pyproject.toml."""

import os
import sysconfig
from pathlib import Path

import numpy
from setuptools import Extension, setup

FOLDER = Path("mpishare", "native")

host = Extension(
    "mpishare.native._host",
    [str(path) for path in sorted(FOLDER.glob("*.c"))],
    depends=["setup.py", *map(str, sorted(FOLDER.glob("*.h")))],
    include_dirs=[numpy.get_include()],
    extra_compile_args=[
        *("-std=c11", "-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"),
        "-ffp-contract=off",  # products and sums are rounded one by one, on every machine
        "-fwrapv",  # counts of exact sums wrap where they are dropped
    ],
    libraries=["m"],
    py_limited_api=True,
    # Without a compiler everything works in Python. Who asks for C learns why it cannot be built.
    optional=os.environ.get("MPISHARE_HOST_CODE") != "compiled",
)
# A Python without the GIL has no stable ABI, and to load the module would bring the GIL back.
is_free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
setup(
    ext_modules=[] if is_free_threaded else [host],
    options={} if is_free_threaded else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
