"""The main of the benchmark: parse the command line, run the cases, report on rank 0."""

from __future__ import annotations

import sys
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mpishare.bench.cases import BASELINES, CASES, Case
from mpishare.bench.options import PLOT_SUFFIXES, PROG, Options, parse
from mpishare.bench.report import as_json, heading, listed, of_case, summary, table
from mpishare.bench.signals import StoppedError
from mpishare.tools.cli import (
    UsageError,
    fail_run,
    fail_usage,
    is_first_process,
    run_on_ranks,
    start_mpi_in_time,
    tell,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from mpishare.bench.report import Row
    from mpishare.bench.session import Session


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the benchmark and return its exit status.

    Collective over COMM_WORLD, host-blocking. 0: every result was right. 1: a result was wrong, or
    the run failed. 2: the command line is wrong. 130: it was interrupted. A rank that raises aborts
    all with status 1.
    """
    try:
        options = parse(argv, prog)
    except UsageError as exc:
        return fail_usage(prog, str(exc))
    if options.cases == ("list",):
        if is_first_process():
            sys.stdout.write(case_list())
        return 0
    start_mpi_in_time(prog, options.timeout_s)
    return run_on_ranks(lambda comm: _run(comm, options))


def case_list() -> str:
    """Return what ``list`` prints: each case, its baselines by backend, and what these do."""
    cases = listed(line for case in CASES.values() for line in _described(case))
    notes = listed(sorted((name, each.note) for name, each in BASELINES.items() if each.note))
    return f"{cases}\nbaselines whose names do not tell what they do:\n{notes}"


def _described(case: Case) -> list[tuple[str, str]]:
    lines = [case.summary, *filter(None, [case.note])]
    for backend, names in case.baselines.items():
        unasked = ", ".join(name for name in names if name not in case.on_request)
        named = ", ".join(name for name in names if name in case.on_request)
        texts = filter(None, [unasked, named and f"when named {named}"])
        lines += [f"{backend}: against {'; '.join(texts)}"] * bool(names)
    options = ["takes --width, --fields, --corners"] * bool(case.naxes)
    options += ["runs by its name or by 'all'"] * (not case.is_default)
    lines += ["; ".join(options)] * bool(options)
    return [*zip_longest((case.name,), lines, fillvalue="")]


def _run(comm: MPI.Intracomm, options: Options) -> int:
    from mpishare import MpiShareError
    from mpishare.bench.session import Session

    # Before the run: only rank 0 writes the files, and knows whether it can.
    problem = comm.bcast(_problem(options) if comm.rank == 0 else None, 0)
    if problem is not None:
        return fail_usage(options.prog, problem)
    try:
        session = Session(comm, options)
    except (MpiShareError, ValueError) as exc:  # of a wrong MPISHARE_BACKEND or MPISHARE_ROUTE
        return fail_run(options.prog, comm, exc)
    return _measure(session)


def _measure(session: Session) -> int:
    """Run the cases, show each as it ends, write the report, and return the exit status."""
    from mpishare.bench import environment

    comm, options = session.comm, session.options
    found = {**environment.gather(session), "left_out": session.left_out}
    is_shown = options.format == "table" and comm.rank == 0

    def show(text: str) -> None:
        if is_shown:
            with session.progress.paused():
                sys.stdout.write(text)

    def write(interrupted: str | None = None) -> int:
        found["interrupted"] = interrupted
        found["versions"] = environment.versions()  # of what the cases loaded too
        try:
            _write(options, found, session.rows)
        except OSError as error:
            return fail_run(options.prog, comm, error)
        return int(any(row.wrong for row in session.rows))

    show(heading(found))
    interrupted = None
    for name, is_interrupted in _ended(session, write):
        show(of_case(name, found, session.rows))
        interrupted = name if is_interrupted else None
    show(summary(session.rows))
    status = 0
    if comm.rank == 0:
        status = 0 if interrupted else write()
        _end(options, found, session.rows, interrupted)
    sys.stdout.flush()
    # A launcher ends the job at the first nonzero status: rank 0 writes its report before that.
    return session.signals.exit_status if interrupted else int(comm.bcast(status))


def _ended(session: Session, write: Callable[[str], object]) -> Iterator[tuple[str, bool]]:
    """Run the cases; yield the name of each as it ends, and whether a signal interrupted it.

    Collective, host-blocking; closes the node. At a signal rank 0 calls `write` with the name of
    the case at once: Open MPI kills the ranks soon.
    """
    with session.node, closing(session.progress):
        session.expect([CASES[name] for name in session.options.cases])
        for name in session.options.cases:
            if session.comm.rank == 0:
                session.signals.first = partial(write, name)
            try:
                resolve_name(CASES[name].run)(session, CASES[name])
            except StoppedError:
                yield name, True
                break
            yield name, False
        session.close()


def _end(
    options: Options, found: dict[str, Any], rows: Sequence[Row], interrupted: str | None
) -> None:
    """Draw the plot, and tell of a run that was interrupted."""
    if options.plot:
        from mpishare.bench.plot import draw

        draw(Path(options.plot), found, rows)
    if interrupted:
        sys.stdout.flush()
        kept = f"{options.output} has" if options.output else "above is"
        tell(options.prog, f"interrupted in {interrupted}; {kept} what was finished")


def _problem(options: Options) -> str | None:
    """Return why a file of the options cannot be written, None where all can."""
    if options.plot is not None and find_spec("matplotlib") is None:
        return f"--plot: matplotlib is not installed: {sys.executable} -m pip install matplotlib"
    if options.plot is not None and Path(options.plot).suffix not in PLOT_SUFFIXES:
        return f"--plot: {options.plot!r} must end in {', '.join(PLOT_SUFFIXES)}"
    for option, name in (("--output", options.output), ("--plot", options.plot)):
        try:
            if name is not None:
                Path(name).open("a").close()
        except OSError as exc:
            return f"{option}: {name!r}: {exc.strerror}"
    return None


def _write(options: Options, environment: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the report to the file of the options, and JSON to stdout; tables are there already."""
    data = as_json(environment, [row.as_dict() for row in rows])
    if options.output is None:
        sys.stdout.write(data if options.format == "json" else "")
        return
    is_data = options.format == "json" or Path(options.output).suffix == ".json"
    text = data if is_data else table(environment, rows)
    try:
        Path(options.output).write_text(text)
    except OSError:
        # A full disk must not lose the run: the report goes to stdout.
        sys.stdout.write(text)
        raise
