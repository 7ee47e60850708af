"""Count what a reader of the code has to hold in mind, for one source tree or for two.

A tree is a git revision or a folder with the repository's layout; default: the working tree.
Standard library only.

modules at the root    files mpishare/*.py, `__init__` included
rooms                  the package seen from above: each module at its root, each folder in it
                       (bench is one), and the applications as one
arrows                 pairs of rooms of which the first imports from the second: all imports,
                       also those in functions and those for type checkers alone
lines                  in all languages (Python, C, CUDA, headers, shell): the library is mpishare
                       without bench
private in tests       accesses of an attribute with one underscore in front, but of self and cls
registries             mutable containers that modules of mpishare fill, and cached functions

That floors have no circle is seen to by import-linter, and that functions are simple by ruff.
"""

import argparse
import ast
import contextlib
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, APPLICATIONS = "mpishare", "applications"
SOURCES = {"", ".py", ".pyi", ".c", ".h", ".cu", ".cuh", ".sh", ".sbatch"}
#: Of what is counted, the folders; the library is the package without the bench.
FOLDERS = {"bench": "mpishare/bench", "benchmarks": "benchmarks", "tests": "tests"}
FOLDERS |= {"scripts": "scripts"}
#: What makes a container that begins empty, and what keeps the results of a function.
CONTAINERS = {"dict", "list", "set", "deque", "defaultdict", "OrderedDict", "Counter"}
CONTAINERS |= {"WeakSet", "WeakKeyDictionary", "WeakValueDictionary"}
CACHES = {"cache", "lru_cache"}


@dataclass
class Structure:
    """The numbers of one tree, as rows of the table, and what -v lists beside some of them."""

    rows: dict[str, int] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, found: list[str]) -> None:
        self.rows[name], self.lists[name] = len(found), found


@contextlib.contextmanager
def tree_of(where: str) -> Iterator[Path]:
    """The folder of a tree, unpacked for as long as it is looked at if git has it."""
    if Path(where).is_dir():
        yield Path(where)
        return
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", where]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"{where} is neither a folder nor a revision: there is no git") from None
    if done.returncode:
        raise SystemExit(f"{where} is neither a folder nor a revision: {done.stderr.decode()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder)


def modules_of(root: Path) -> dict[str, Path]:
    """Every module of the package and every application, by its dotted name."""
    found = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    for path in sorted((root / "scripts" / APPLICATIONS).glob("*.py")):
        found[f"{APPLICATIONS}.{path.stem}"] = path
    return found


def imports(tree: ast.AST, module: str, path: Path) -> Iterator[str]:
    """Every name that is imported."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def room(module: str) -> str:
    head, _, rest = module.partition(".")
    return head if head == APPLICATIONS else rest.partition(".")[0] or "__init__"


def module_of(name: str, modules: dict[str, Path]) -> str | None:
    """The module that an imported name is, or is from; None where it is none of these."""
    # `from mpishare.node import Node` is of the module, `from mpishare import node` too.
    parts = name.split(".")
    heads = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((head for head in heads if head in modules), None)


def arrows(modules: dict[str, Path]) -> set[tuple[str, str]]:
    """Which room imports from which."""
    found = set()
    for module, path in modules.items():
        for name in imports(ast.parse(path.read_text()), module, path):
            found.add((room(module), room(module_of(name, modules) or module)))
    return {(a, b) for a, b in found if a != b}


def lines_in(folder: Path) -> int:
    """The lines of all sources, programs without a suffix among them."""
    paths = (path for path in folder.rglob("*") if path.suffix in SOURCES and path.is_file())
    return sum(path.read_text().count("\n") for path in paths)


def nodes_in(root: Path, folder: str) -> Iterator[tuple[str, ast.AST]]:
    """Every node of the Python files below a folder, and where it stands."""
    for path in sorted((root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(root).as_posix()}:{getattr(node, 'lineno', 0)}"
            yield where, node


def private_in_tests(root: Path) -> list[str]:
    return [
        f"{where} {ast.unparse(node)}"
        for where, node in nodes_in(root, "tests")
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def last_name(node: ast.AST) -> str:
    """The name of what is called or written as a decorator, without those of its modules."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def begins_empty(value: ast.expr | None) -> bool:
    """Whether a value is a container that something is to fill."""
    if isinstance(value, ast.Dict):
        return not value.keys
    if isinstance(value, ast.List):
        return not value.elts
    return isinstance(value, ast.Call) and last_name(value) in CONTAINERS


def registries(root: Path) -> list[str]:
    """What the modules of the package keep for the whole process."""
    found = []
    for where, module in nodes_in(root, PACKAGE):
        for node in module.body if isinstance(module, ast.Module) else ():
            if isinstance(node, ast.Assign | ast.AnnAssign) and begins_empty(node.value):
                found.append(f"{where[:-1]}{node.lineno} {ast.unparse(node)}")
            elif isinstance(node, ast.FunctionDef) and CACHES & {
                *map(last_name, node.decorator_list)
            }:
                found.append(f"{where[:-1]}{node.lineno} {node.name}()")
    return found


def measure(root: Path) -> Structure:
    modules = modules_of(root)
    rooms = {room(module) for module in modules}
    of = Structure()
    of.add("modules at the root", sorted(p.name for p in (root / PACKAGE).glob("*.py")))
    of.add("rooms", sorted(rooms))
    of.add("arrows", sorted(f"{a} -> {b}" for a, b in arrows(modules)))
    lines = {name: lines_in(root / folder) for name, folder in FOLDERS.items()}
    of.rows["lines of library"] = lines_in(root / PACKAGE) - lines["bench"]
    of.rows |= {f"lines of {name}": n for name, n in lines.items()}
    of.add("private in tests", private_in_tests(root))
    of.add("registries", registries(root))
    return of


def report(names: list[str], found: list[Structure], *, is_verbose: bool) -> list[str]:
    wide = max(map(len, found[0].rows)), *(max(12, len(name)) for name in names)
    table = [["", *names]]
    table += [[name, *(str(each.rows[name]) for each in found)] for name in found[0].rows]
    lines = []
    for first, *rest in table:
        cells = [cell.rjust(width) for cell, width in zip(rest, wide[1:], strict=True)]
        lines.append("  ".join([first.ljust(wide[0]), *cells]).rstrip())
    for name, each in zip(names, found, strict=True):
        for title, items in each.lists.items():
            if is_verbose and items:
                lines += ["", f"{name}: {title}", *(f"  {item}" for item in items)]
    return lines


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/structure",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("trees", nargs="*", metavar="TREE", help="a git revision or a folder")
    parser.add_argument("-v", "--verbose", action="store_true", help="list what is counted")
    options = parser.parse_args(words)
    found = []
    for tree in options.trees or [str(ROOT)]:
        with tree_of(tree) as root:
            if not (root / PACKAGE).is_dir():
                parser.error(f"{tree} has no folder {PACKAGE}")
            found.append(measure(root))
    names = options.trees or ["working tree"]
    print("\n".join(report(names, found, is_verbose=options.verbose)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
