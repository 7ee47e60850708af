"""The command line of the benchmark, parsed without MPI."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf
from typing import Any

from mpishare.bench.cases import CASES, baselines, default_cases, halo_cases
from mpishare.tools.cli import Parser, UsageError, seconds

PROG = "python -m mpishare.bench"
#: The sizes of a full run, in bytes; ``--min`` and ``--max`` cut it and stand in it themselves.
SIZES = (8, 512, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
#: The sizes of a run that names none; a machine without a GPU copies a hundred times slower.
DEFAULT_SIZES = {
    "host": (8, 4 << 10, 64 << 10, 1 << 20),
    "cuda": (8, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20),
}
_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
#: The words of the check have four bits for the number of the field.
_MAX_FIELDS = 16
_CHOICES = range(1, _MAX_FIELDS + 1)
_EPILOG = """\
cases: 'list' says what each of them times, and what the baselines are; 'all' runs every case at
every size. Without a case these run, at the sizes that end soon:
{defaults}.
Sizes are in bytes, or written as 64KiB, 1MiB; they are multiples of 8. For a halo case it is the
size of a face: n, the cells per rank along each axis, is chosen to come near it, and the row has
the bytes that result. For redistribute and permuted it is the size of a rank's part of the array.
Clocks: 'latency' synchronizes after each exchange, 'back to back' after a batch of them
('throughput' in JSON).
Every time is the maximum over the ranks. The exit status is 1 if a result was wrong.
"""


def parse_nbytes(text: str) -> int:
    """Parse ``8``, ``64KiB`` or ``1MiB``, a positive multiple of 8: an argument type."""
    match = re.fullmatch(r"(\d+) ?([KMG]i)?(B?)", text.strip())
    if match is None or (match[2] and not match[3]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 8, 64KiB or 1MiB")
    nbytes = int(match[1]) * _UNITS[(match[2] or "") + match[3]]
    if nbytes <= 0 or nbytes % 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive multiple of 8 bytes")
    return nbytes


def _count(text: str) -> int:
    """Parse an integer of 1 or more: an argument type."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def _within(sizes: Iterable[int], low: float, high: float) -> tuple[int, ...]:
    return tuple(nbytes for nbytes in sizes if low <= nbytes <= high)


def _option(flag: str, default: Any, text: str, **arguments: Any) -> Any:
    """Return a field of `Options` that `flag` sets; the rest is for argparse."""
    return field(default=default, metadata={"flag": flag, "help": text, **arguments})


_SIZE = {"type": parse_nbytes, "metavar": "SIZE"}
_NUMBER = {"type": _count, "metavar": "N"}
_SECONDS = {"type": seconds, "metavar": "S"}
_FILE = {"metavar": "FILE"}
_ENDS = "end after about S: fewer timed blocks than --repeat, then fewer sizes"
_AGAINST = "none, all, or some of: {baselines}; without it, those that end soon"
_WARMUP = "untimed iterations before each block (%(default)s)"
_FIELDS = f"fields per exchange, 1 to {_MAX_FIELDS}, for {{halo}} (%(default)s)"


@dataclass(frozen=True)
class Options:
    """What the command line asks for; the help texts describe the options.

    `cases` may be ``("list",)``, to print them. `full`: a case runs at every size where the command
    line names none. `against` is None for the baselines that a case runs by default, and has
    ``"all"`` for every one that it has on the backend.
    """

    cases: tuple[str, ...] = ()
    prog: str = PROG
    full: bool = False
    min_nbytes: int | None = _option("--min", None, "smallest size", **_SIZE)
    max_nbytes: int | None = _option("--max", None, "largest size", **_SIZE)
    iters: int | None = _option("--iters", None, "iterations of a timed block", **_NUMBER)
    warmup: int = _option("--warmup", 3, _WARMUP, type=int, metavar="N")
    repeat: int = _option("--repeat", 5, "timed blocks of each variant (%(default)s)", **_NUMBER)
    limit_s: float | None = _option("--seconds", None, _ENDS, **_SECONDS)
    against: tuple[str, ...] | None = _option("--against", None, _AGAINST, metavar="BASELINE,...")
    width: int = _option("--width", 1, "ghost cells per side, for {halo} (%(default)s)", **_NUMBER)
    fields: int = _option("--fields", 1, _FIELDS, type=int, choices=_CHOICES, metavar="N")
    corners: bool = _option(
        "--corners", False, "edges and corners too, for {halo}", action="store_true"
    )
    format: str = _option(
        "--format", "table", "of the report on stdout (%(default)s)", choices=("table", "json")
    )
    output: str | None = _option(
        "--output", None, "write the report to FILE as JSON, anew after each case", **_FILE
    )
    revision: str | None = _option(
        "--revision", None, "of mpishare in the report, where git does not know it", metavar="TEXT"
    )
    check: bool = _option("--no-check", True, "do not check results", action="store_false")
    timeout_s: float = _option(
        "--timeout-s", 120.0, "deadline of the host's waits (%(default)g s)", **_SECONDS
    )

    def sizes(self, backend: str, case: str) -> tuple[int, ...]:
        """Return the ascending sizes of a face or message in bytes, on a backend and of a case."""
        own = CASES[case]
        low, most = self.min_nbytes or 0, own.max_nbytes or inf
        named = {*filter(None, (self.min_nbytes, self.max_nbytes))}
        ladder = own.sizes.get(backend, DEFAULT_SIZES[backend])
        if self.full or named:
            ladder = _within(SIZES, 0, most)
        if backend == "host" and low <= most:
            # As one --max may be of several cases: there only --min names what takes minutes.
            named = {*_within(named, 0, most)}
        high = self.max_nbytes or max(*ladder, low)
        return tuple(sorted({*_within(ladder, low, high), *named}))

    def wants(self, baseline: str, *, unasked: bool = True) -> bool:
        """Return whether `baseline` is to run; `unasked`: without ``--against``."""
        if self.against is None:
            return unasked
        return "all" in self.against or baseline in self.against

    def as_dict(self) -> dict[str, Any]:
        """Return the options that change a number, for the report."""
        options = asdict(self)
        for name in ("format", "output", "prog", "revision"):
            del options[name]
        return options


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=f"mpirun -n 4 {prog}",
        description="Measure mpishare against baselines, with every result checked.",
        epilog=_EPILOG.format(defaults=", ".join(default_cases())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    listed = "list, all, or some of: " + ", ".join(CASES)
    parser.add_argument("cases", nargs="*", metavar="case", help=listed)
    names = {"baselines": ", ".join(baselines()), "halo": halo_cases()}
    for each in fields(Options):
        if each.metadata:
            arguments = dict(each.metadata)
            arguments["help"] = arguments["help"].format(**names)
            flag = arguments.pop("flag")
            parser.add_argument(flag, dest=each.name, default=each.default, **arguments)
    return parser


def _require_known(problem: str, names: list[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"{problem} {name!r}: choose from {', '.join(known)}")


def _chosen_cases(names: list[str]) -> tuple[tuple[str, ...], bool]:
    """Return the cases to run, and whether they run at every size."""
    _require_known("unknown case", names, ("list", "all", *CASES))
    if "list" in names:
        return ("list",), False
    if "all" in names:
        return tuple(CASES), True
    # In the order they were named, each once.
    return tuple(dict.fromkeys(names)) or default_cases(), False


def _chosen_baselines(text: str | None) -> tuple[str, ...] | None:
    """Return the baselines to run, None for those that run by default."""
    if text is None or text == "none":
        return None if text is None else ()
    names = [name.strip() for name in text.split(",")]
    if "none" in names:
        raise UsageError("--against: 'none' takes no other name")
    _require_known("--against: unknown baseline", names, ("none", "all", *baselines()))
    return tuple(dict.fromkeys(names))


def parse(argv: Sequence[str] | None = None, prog: str = PROG) -> Options:
    """Parse the command line, the same on every rank; `UsageError` if it is wrong."""
    found = vars(_parser(prog).parse_intermixed_args(argv))
    found["cases"], found["full"] = _chosen_cases(found["cases"])
    found["against"] = _chosen_baselines(found["against"])
    options = Options(**found, prog=prog)
    low, high = options.min_nbytes, options.max_nbytes
    if low is not None and high is not None and low > high:
        raise UsageError(f"--min ({low} bytes) is larger than --max ({high} bytes)")
    # Options of the halo cases would change nothing where none of these runs.
    if options.cases != ("list",) and not any(CASES[name].naxes for name in options.cases):
        for name in ("width", "fields", "corners"):
            if getattr(options, name) != getattr(Options, name):
                raise UsageError(f"--{name} is for {halo_cases()}, and none of them is to run")
    return options
