"""The main of the benchmark: parse the command line, run the cases, report on rank 0."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from itertools import pairwise, zip_longest
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from mpishare.bench.cases import BASELINES, CASES, Case
from mpishare.bench.options import PROG, Options, parse
from mpishare.bench.report import as_json, heading, listed, of_case, summary
from mpishare.tools.cli import (
    UsageError,
    fail_run,
    fail_usage,
    is_first_process,
    run_on_ranks,
    start_mpi_in_time,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI

    from mpishare.bench.session import Session


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Run the benchmark and return its exit status.

    Collective over COMM_WORLD, host-blocking. 0: every result was right. 1: a result was wrong, or
    the run failed. 2: the command line is wrong. A rank that raises aborts all with status 1.
    """
    try:
        options = parse(argv, prog)
    except UsageError as exc:
        return fail_usage(prog, str(exc))
    if options.cases == ("list",):
        if is_first_process():
            sys.stdout.write(case_list())
        return 0
    # At Ctrl-C the ranks end at once: what was finished is shown and written already.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    start_mpi_in_time(options.timeout_s)
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
    problem = comm.bcast(unwritable(options) if comm.rank == 0 else None, 0)
    if problem is not None:
        return fail_usage(options.prog, problem)
    try:
        session = Session(comm, options)
    except (MpiShareError, ValueError) as exc:  # of a wrong MPISHARE_BACKEND or MPISHARE_ROUTE
        return fail_run(options.prog, comm, exc)
    return _measure(session)


def _measure(session: Session) -> int:
    """Run the cases, show and write each as it ends, and return the exit status. Closes the node.

    Collective, host-blocking.
    """
    from mpishare.bench import environment

    comm, options, rows = session.comm, session.options, session.rows
    found = {**environment.gather(session), "left_out": session.left_out}
    is_shown = options.format == "table" and comm.rank == 0

    def show(text: str) -> None:
        if is_shown:
            sys.stdout.write(text)
            sys.stdout.flush()

    def write(name: str | None) -> None:
        """Write what there is; `name`: the case that runs now, in which the run may end."""
        found["interrupted"] = name
        if comm.rank == 0:
            with suppress(OSError):  # said at the end
                _write(session, found)

    show(heading(found))
    write(options.cases[0])
    with session.node:
        session.expect([CASES[name] for name in options.cases])
        for name, following in pairwise([*options.cases, None]):
            case = CASES[name or ""]
            resolve_name(case.run)(session, case)
            write(following)
            show(of_case(case.name, found, rows))
        session.close()
    show(summary(rows))
    found["versions"] = environment.versions()  # of what the cases loaded too
    # A launcher ends the job at the first nonzero status: rank 0 writes its report before that.
    return int(comm.bcast(_end(session, found) if comm.rank == 0 else None))


def _end(session: Session, found: dict[str, Any]) -> int:
    """Write the report and return the exit status."""
    options, rows = session.options, session.rows
    if options.format == "json":
        sys.stdout.write(as_json(found, [row.as_dict() for row in rows]))
    sys.stdout.flush()
    try:
        _write(session, found)
    except OSError as error:
        return fail_run(options.prog, session.comm, error)
    return int(any(row.wrong for row in rows))


def unwritable(options: Options) -> str | None:
    """Return why the file of ``--output`` cannot be written, None where it can."""
    try:
        if options.output is not None:
            Path(options.output).open("a").close()
    except OSError as exc:
        return f"--output: {options.output!r}: {exc.strerror}"
    return None


def _write(session: Session, found: dict[str, Any]) -> None:
    """Write the report so far to the file of the options, if any."""
    if session.options.output is not None:
        text = as_json(found, [row.as_dict() for row in session.rows])
        Path(session.options.output).write_text(text)
