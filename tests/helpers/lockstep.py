"""A pytest plugin for `mpirun -n N python -m pytest FOLDER`: every rank runs every test, in step.

After each phase of a test the ranks tell each other how it went. A failure on any rank is a
failure on all, and the first rank, which alone prints, shows the text of every rank that failed.
A test that some ranks skip and others do not has failed. `@pytest.mark.ranks(min=, max=)`
deselects a test outside these counts. A rank that hangs is ended by pytest-timeout, after the
traceback of every thread.

A test must not raise on one rank while the others wait for it in a collective: they wait until
their limit ends the job (the failing rank prints its text before, so that nothing is lost).
"""

import faulthandler
import gc
import hashlib
import os
import sys
import time
from collections.abc import Generator
from typing import NamedTuple

import pytest
from _pytest._io import TerminalWriter

LATE_S = 2.0  # how long a rank that failed waits for the others before it speaks for itself
YIELD_S = 0.002  # how long ranks that wait look without a sleep
END_S = 100.0  # for what comes after the last test: Finalize may hang after a broken one


class Phase(NamedTuple):
    """How one phase of one test went on one rank."""

    test: str
    when: str
    outcome: str
    text: str


def verdict(phases: list[Phase]) -> str | None:
    """Why this phase has failed as a whole, None where every rank says the same and none failed."""
    failed = {rank: phase.text for rank, phase in enumerate(phases) if phase.outcome == "failed"}
    if failed:
        lines = [f"failed on ranks {sorted(failed)} of {len(phases)}"]
        for rank, text in failed.items():
            lines += [f"---- rank {rank} ----", text]
        return "\n".join(lines)
    skipped = {rank: phase.text for rank, phase in enumerate(phases) if phase.outcome == "skipped"}
    if skipped and len(skipped) < len(phases):
        return f"skipped on ranks {sorted(skipped)} of {len(phases)} only: {skipped}"
    return None


def digest(text: str) -> bytes:
    """A few bytes that differ where texts do."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def selects(mark: pytest.Mark | None, size: int) -> bool:
    """Whether a test with this `ranks` mark is for `size` ranks."""
    if mark is None:
        return True
    unknown = set(mark.kwargs) - {"min", "max"}
    if mark.args or unknown:
        raise pytest.UsageError(f"ranks takes min= and max=, not {mark.args} {unknown}")
    return mark.kwargs.get("min", 1) <= size <= (mark.kwargs.get("max") or size)


class Lockstep:
    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self.config = config
        self.comm = MPI.COMM_WORLD.Dup()
        self.uncollected: list[str] = []

    def is_same(self, mine: bytes, *, bad_news: str = "", item: pytest.Item | None = None) -> bool:
        """Whether every rank says this; does not spin, as the ranks may be more than the cores."""
        everyone = bytearray(len(mine) * self.comm.size)
        request = self.comm.Iallgather(mine, everyone)
        begin = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - begin
            if waited > LATE_S and bad_news:
                self.say(f"\nrank {self.comm.rank}, while the others do not come:\n{bad_news}\n")
                bad_news = ""
                # A limit ends the whole job: that of the ranks that hang, which say where.
                item.ihook.pytest_timeout_cancel_timer(item=item)
            if waited < YIELD_S:
                os.sched_yield()
            else:
                time.sleep(0.0005)
        return everyone == mine * self.comm.size

    def say(self, text: str) -> None:
        """Write to stderr, behind pytest's capture."""
        capture = self.config.pluginmanager.getplugin("capturemanager")
        with capture.global_and_fixture_disabled():
            os.write(2, text.encode())

    def pytest_sessionstart(self) -> None:
        if self.comm.rank != 0:
            self.config.pluginmanager.unregister(name="terminalreporter")
            # Where pytest-timeout writes its tracebacks.
            self.config.get_terminal_writer = lambda: TerminalWriter(sys.__stderr__)

    def pytest_report_header(self) -> str:
        from mpi4py import MPI

        library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        return f"mpi: {self.comm.size} ranks in lockstep, {library}"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.uncollected.append(str(report.longrepr))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        chosen, others = [], []
        for item in items:
            fits = selects(item.get_closest_marker("ranks"), self.comm.size)
            (chosen if fits else others).append(item)
        if others:
            config.hook.pytest_deselected(items=others)
        items[:] = chosen

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        mine = (self.uncollected, [item.nodeid for item in session.items])
        if self.is_same(digest(repr(mine))):
            # Tests that collect garbage then look at what tests made, not at all that pytest holds.
            gc.collect()
            gc.freeze()
            return
        everyone = self.comm.allgather(mine)
        lines = ["the ranks collected different tests"]
        for rank, (errors, tests) in enumerate(everyone):
            lines += [f"---- rank {rank}: {len(tests)} tests ----", *errors]
            lines += sorted(set(tests) ^ set(everyone[0][1]))
        pytest.exit("\n".join(lines), returncode=3)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        text = "" if report.passed else report.longreprtext or str(report.longrepr)
        mine = Phase(report.nodeid, report.when, report.outcome, text)
        told = digest(f"{report.nodeid}\0{report.when}\0{report.outcome}")
        bad_news = text if report.failed else ""
        if self.is_same(told, bad_news=bad_news, item=item) and not report.failed:
            return report
        phases = self.comm.allgather(mine)
        if len({(phase.test, phase.when) for phase in phases}) > 1:
            pytest.exit(f"the ranks are out of step: {phases}", returncode=3)
        reason = verdict(phases)
        if reason is not None:
            report.outcome, report.longrepr = "failed", reason
            if hasattr(report, "wasxfail"):  # an expected failure of some ranks only is none
                del report.wasxfail
        return report

    def pytest_internalerror(self, excrepr: object) -> None:
        self.say(f"{excrepr}\n")
        self.comm.Abort(3)

    def pytest_unconfigure(self) -> None:
        faulthandler.dump_traceback_later(END_S, exit=True, file=sys.__stderr__)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.collectonly:
        return
    lockstep = Lockstep(config)
    if lockstep.comm.rank != 0:
        config.option.xmlpath = None  # the first rank writes it
    config.pluginmanager.register(lockstep, "lockstep")


@pytest.fixture(scope="session")
def comm():
    """The communicator of all ranks."""
    from mpi4py import MPI

    return MPI.COMM_WORLD
