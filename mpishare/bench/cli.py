"""The benchmark's main: read the command line, run the cases, report on rank 0."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.bench import compare
from mpishare.bench.cases import CASES
from mpishare.bench.launch import (
    UsageError,
    fail_run,
    fail_usage,
    is_first_process,
    is_terminal,
    run_on_ranks,
)
from mpishare.bench.options import PLOT_SUFFIXES, PROG, Options, parse
from mpishare.bench.report import FILE_FORMATS, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.bench.rows import Row
    from mpishare.bench.session import Session


def main(argv: list[str] | None = None) -> int:
    """Run ``python -m mpishare.bench`` and return its exit status.

    Collective over COMM_WORLD, host-blocking. 0: all that ran was right. 1: a result was wrong.
    2: the command line is. A rank that raises aborts all of them with status 1.
    """
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["compare"]:
        return compare.main(words[1:])
    try:
        options = parse(words)
    except UsageError as exc:
        return fail_usage(PROG, str(exc))
    if options.cases == ("list",):
        if is_first_process():
            sys.stdout.write(case_list())
        return 0
    return run_on_ranks(lambda comm: _run(comm, options))


def case_list() -> str:
    """Return what ``list`` prints: each case with its arms, and its rivals on each backend.

    Local.
    """
    lines = []
    for case in CASES.values():
        lines.append(f"{case.name:<10} {case.summary}")
        lines.append(f"{'':<10} {'; '.join(case.arms)}")
        for backend, names in case.rivals.items():
            unasked = [name for name in names if name not in case.on_request]
            named = [name for name in names if name in case.on_request]
            words = [", ".join(unasked), "when named " + ", ".join(named) if named else ""]
            if names:
                lines.append(f"{'':<10} {backend}: against {'; '.join(filter(None, words))}")
        options = "takes --width, --fields, --corners" if case.takes_halo else ""
        absent = "" if case.is_default else "runs by its name or by 'all'"
        if options or absent:
            lines.append(f"{'':<10} {'; '.join(filter(None, (options, absent)))}")
    return "\n".join(lines) + "\n"


def _run(comm: MPI.Intracomm, options: Options) -> int:
    from mpishare import MpiShareError
    from mpishare.bench.session import Session

    # Only rank 0 writes the file and can tell whether it may; to find out after the run is late.
    problem = comm.bcast(_problem(options) if comm.rank == 0 else None, 0)
    if problem is not None:
        return fail_usage(PROG, problem)
    try:
        session = Session(comm, options)
    except (MpiShareError, ValueError) as exc:  # of a wrong MPISHARE_BACKEND
        return fail_run(PROG, comm, exc)
    header, rows = measure_all(session)
    status = int(any(row.wrong for row in rows))
    if comm.rank == 0:
        try:
            _write(options, header, rows)
        except OSError as error:
            status = fail_run(PROG, comm, error)
    # A launcher ends the job at the first status that is not 0: rank 0 has its report out first.
    return int(comm.bcast(status))


def measure_all(session: Session) -> tuple[dict[str, Any], list[Row]]:
    """Run the cases that the options name, close the node, and return the header and the rows.

    Collective, host-blocking. Both are the same on every rank.
    """
    from mpishare.bench import header

    options = session.options
    rows: list[Row] = []
    with session.node, session.progress as progress:
        progress.expect(_turns(options, session.node.backend))
        for name in options.cases:
            rows += import_module(f"mpishare.bench.cases.{name}").run(session)
        # After the cases: the versions are those of what they have loaded.
        found = header.gather(session)
        session.close()
    return found, rows


def _turns(options: Options, backend: str) -> int:
    """Return how often the bar advances: once when each arm of a case and size had its turn."""
    sizes = (
        len(options.sizes(backend, name)) if CASES[name].is_sized else 1 for name in options.cases
    )
    return options.repeat * sum(sizes)


def _problem(options: Options) -> str | None:
    """Return why a file cannot be written that the options name, None where all can."""
    if options.plot is not None and find_spec("matplotlib") is None:
        bring = f"{sys.executable} -m pip install matplotlib"
        return f"--plot: matplotlib is not installed; {bring} brings it"
    if options.plot is not None and Path(options.plot).suffix not in PLOT_SUFFIXES:
        return f"--plot: {options.plot!r} must end in {', '.join(PLOT_SUFFIXES)}"
    for word, name in (("--output", options.output), ("--plot", options.plot)):
        if name is None:
            continue
        path = Path(name).absolute()
        if path.is_dir():
            return f"{word}: {name!r} is a folder"
        if not path.parent.is_dir():
            return f"{word}: the folder of {name!r} does not exist"
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            return f"{word}: no permission to write {name!r}"
    return None


def _write(options: Options, header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the report to stdout, to the file that was asked for, or to both."""
    named = Path(options.output or "").suffix[1:]
    filed = named if named in FILE_FORMATS else options.format
    if options.output is None or filed != options.format:
        _print(render(options.format, header, rows, is_color=is_terminal(sys.stdout)))
    if options.output is not None:
        text = render(filed, header, rows, is_color=False)
        try:
            Path(options.output).write_text(text)
        except OSError:
            # A full disk must not cost the run: the report is then on stdout.
            _print(text)
            raise
    if options.plot is not None:
        from mpishare.bench.plot import draw

        draw(Path(options.plot), header, rows)
    if options.format == "csv":
        # Its lines are rows and nothing else.
        sys.stderr.write("".join(f"{note}\n" for note in header["notes"]))


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
