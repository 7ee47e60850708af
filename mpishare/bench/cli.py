"""The main of the benchmark: parse the command line, run the cases, report on rank 0."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpishare.bench.cases import CASES
from mpishare.bench.options import PLOT_SUFFIXES, PROG, Options, parse
from mpishare.bench.report import compare
from mpishare.bench.report.render import FILE_FORMATS, render
from mpishare.cli import (
    UsageError,
    fail_run,
    fail_usage,
    is_first_process,
    is_terminal,
    run_on_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.bench.report.rows import Row
    from mpishare.bench.session import Session


def main(argv: list[str] | None = None) -> int:
    """Run ``python -m mpishare.bench`` and return its exit status.

    Collective over COMM_WORLD, host-blocking. 0: every result was right. 1: a result was wrong, or
    the run failed. 2: the command line is wrong. A rank that raises aborts all with status 1.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["compare"]:
        return compare.main(arguments[1:])
    try:
        options = parse(arguments)
    except UsageError as exc:
        return fail_usage(PROG, str(exc))
    if options.cases == ("list",):
        if is_first_process():
            sys.stdout.write(case_list())
        return 0
    return run_on_ranks(lambda comm: _run(comm, options))


def case_list() -> str:
    """Return what ``list`` prints: each case with its variants, and its baselines by backend."""
    lines = []
    for case in CASES.values():
        lines.append(f"{case.name:<10} {case.summary}")
        lines.append(f"{'':<10} {'; '.join(case.variants)}")
        for backend, names in case.baselines.items():
            unasked = [name for name in names if name not in case.on_request]
            named = [name for name in names if name in case.on_request]
            texts = [", ".join(unasked), "when named " + ", ".join(named) if named else ""]
            if names:
                lines.append(f"{'':<10} {backend}: against {'; '.join(filter(None, texts))}")
        options = "takes --width, --fields, --corners" if case.takes_halo else ""
        absent = "" if case.is_default else "runs by its name or by 'all'"
        if options or absent:
            lines.append(f"{'':<10} {'; '.join(filter(None, (options, absent)))}")
    return "\n".join(lines) + "\n"


def _run(comm: MPI.Intracomm, options: Options) -> int:
    from mpishare import MpiShareError
    from mpishare.bench.session import Session

    # Before the run: only rank 0 writes the files, and knows whether it can.
    problem = comm.bcast(_problem(options) if comm.rank == 0 else None, 0)
    if problem is not None:
        return fail_usage(PROG, problem)
    try:
        session = Session(comm, options)
    except (MpiShareError, ValueError) as exc:  # of a wrong MPISHARE_BACKEND
        return fail_run(PROG, comm, exc)
    found, rows = measure_all(session)
    status = int(any(row.wrong for row in rows))
    if comm.rank == 0:
        try:
            _write(options, found, rows)
        except OSError as error:
            status = fail_run(PROG, comm, error)
        sys.stdout.flush()
    # A launcher ends the job at the first nonzero status: rank 0 writes its report before that.
    return int(comm.bcast(status))


def measure_all(session: Session) -> tuple[dict[str, Any], list[Row]]:
    """Run the cases that the options name, close the node, and return the environment and the rows.

    Collective, host-blocking. Both are the same on every rank.
    """
    from mpishare.bench import environment

    options = session.options
    rows: list[Row] = []
    with session.node, closing(session.progress) as progress:
        progress.expect(_turns(options, session.node.backend))
        for name in options.cases:
            case = CASES[name]
            module = import_module(f"mpishare.bench.cases.{case.module or name}")
            rows += module.run(session, case)
        # After the cases, which load the libraries whose versions it has.
        found = environment.gather(session)
        session.close()
    return found, rows


def _turns(options: Options, backend: str) -> int:
    """Return how often the bar advances: once per timed block of each variant."""
    sized = [name for name in options.cases if CASES[name].is_sized]
    sizes = sum(len(options.sizes(backend, name)) for name in sized)
    return options.repeat * (sizes + len(options.cases) - len(sized))


def _problem(options: Options) -> str | None:
    """Return why a file of the options cannot be written, None where all can."""
    if options.plot is not None and find_spec("matplotlib") is None:
        command = f"{sys.executable} -m pip install matplotlib"
        return f"--plot: matplotlib is not installed: {command}"
    if options.plot is not None and Path(options.plot).suffix not in PLOT_SUFFIXES:
        return f"--plot: {options.plot!r} must end in {', '.join(PLOT_SUFFIXES)}"
    for option, name in (("--output", options.output), ("--plot", options.plot)):
        if name is None:
            continue
        path = Path(name).absolute()
        if path.is_dir():
            return f"{option}: {name!r} is a folder"
        if not path.parent.is_dir():
            return f"{option}: the folder of {name!r} does not exist"
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            return f"{option}: no permission to write {name!r}"
    return None


def _write(options: Options, environment: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the report to stdout, to the file of the options, or to both."""
    suffix = Path(options.output or "").suffix[1:]
    file_format = suffix if suffix in FILE_FORMATS else options.format
    if options.output is None or file_format != options.format:
        shown = render(options.format, environment, rows, is_color=is_terminal(sys.stdout))
        sys.stdout.write(shown)
    if options.output is not None:
        text = render(file_format, environment, rows, is_color=False)
        try:
            Path(options.output).write_text(text)
        except OSError:
            # A full disk must not lose the run: the report goes to stdout.
            sys.stdout.write(text)
            raise
    if options.plot is not None:
        from mpishare.bench.report.plot import draw

        draw(Path(options.plot), environment, rows)
    if options.format == "csv":
        # Stdout has rows and nothing else.
        sys.stderr.write("".join(f"{note}\n" for note in environment["notes"]))
