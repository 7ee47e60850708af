"""Build the extension module of a clone, or of a tree like it: about a second, if it is missing or
older than its sources.

Standard library only. Scripts beside each other may do so at once: the last step is atomic.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

FILE = Path("mpishare", "native", "_host.abi3.so")


def build(tree: Path, python: Path) -> str:
    """Build it by a Python that has what pyproject.toml asks for; return why that failed, if so."""
    made = tree / FILE
    sources = [tree / "setup.py", *made.parent.glob("*.[ch]")]
    if made.exists() and all(each.stat().st_mtime <= made.stat().st_mtime for each in sources):
        return ""
    (tree / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree / "build") as folder:
        done = subprocess.run(
            [python, "setup.py", "-q", "build_ext", "--build-lib", folder, "--build-temp", folder],
            cwd=tree,
            env={**os.environ, "MPISHARE_HOST_CODE": "compiled"},  # a failure is an error
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode == 0:
            (built,) = Path(folder).rglob(FILE.name)  # of an older revision in another folder
            built.replace(tree / built.relative_to(folder))
            return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line.lower()]
    return (errors or lines or [f"setup.py ended with {done.returncode}"])[0]


def build_and_tell(tree: Path, python: Path = Path(sys.executable)) -> None:
    """Build it, or say why not: everything works in Python then, only slower."""
    if why := build(tree, python):
        print(f"setup: the C part of {tree} is not built: {why}", file=sys.stderr, flush=True)
