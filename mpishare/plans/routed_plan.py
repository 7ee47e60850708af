"""What all plans have in common that move cells: routes, calls in two halves, calls out of turn."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpishare.coordination import recording
from mpishare.errors import EpochError, format_nbytes
from mpishare.plans import routes
from mpishare.plans.base_plan import BasePlan
from mpishare.plans.node_cache import report_of

if TYPE_CHECKING:
    from mpishare.plans.engine import RoutedSetup


class RoutedPlan(BasePlan):
    """A plan whose engines move cells by routes."""

    _setup: RoutedSetup
    _open: Any = None  # the call that was started
    _noun: str  # for a call, in errors

    def _open_on_routes(self, setup: RoutedSetup) -> None:
        """Register with the node, once the engines are made; warn of slow routes, log all."""
        report = report_of(setup.node)
        routes.warn(setup.name, setup.comm, report, setup.routes)
        self._open_on(setup)
        if self._log.isEnabledFor(logging.INFO):
            self._log.info(
                "%s made in %.1f ms, %s of staging: %s",
                self.name,
                1e3 * (perf_counter() - setup.begin),
                format_nbytes(self.staging_nbytes),
                report.describe_routes(setup.comm.ranks_here, setup.comm.rank, self.routes),
            )

    @property
    def routes(self) -> dict[int, str]:
        """The route of the cells from and to each rank, by its rank in the given communicator."""
        return dict[int, str](self._setup.my_routes)

    @property
    def staging_nbytes(self) -> int:
        """Bytes of staging memory, of this rank and shared by its node."""
        return sum(engine.staging_nbytes for engine in self._engines)

    def _check(self, call: str) -> None:
        super()._check(call)
        if self._setup.busy[0]:
            raise EpochError(
                f"{self.name}: {call} failed: another call of the plan is under way, in which a "
                "handler of a signal came. Call it after that."
            )

    def _check_free(self, call: str) -> None:
        """Raise unless a call may begin now."""
        self._check(call)
        if self._open is not None:
            raise EpochError(
                f"{self.name}: {call} failed: {self._noun} is open. Call wait() first."
            )

    def _check_started(self, opened: Any) -> None:
        """Raise unless a call that was started may be waited for now."""
        self._check("wait")
        if opened is None:
            raise EpochError(f"{self.name}: wait failed: nothing was started. Call start() first.")

    def _begin_open(self, call: Any) -> None:
        """Remember a call that was started, unless the capture in which it was recorded fails."""
        self._open = call
        if (captured_by := recording.current()) is not None:
            captured_by.undo.append(self._drop_open)

    def _reopen(self, opened: Any) -> None:
        """Take back that a call was waited for, which failed."""
        if not self._is_closed:
            self._open = opened

    def _drop_open(self) -> None:
        """Forget the start of a failed capture: it will never run."""
        self._open = None

    def _end_call(self) -> None:
        # A handler that closes the plan within its wait ends that wait, which raises.
        if self._open is not None and not self._setup.busy[0]:
            self.wait()

    def _is_in_call(self) -> bool:
        return self._open is not None

    def wait(self, stream: Any = None) -> Any:
        """End what `start` began."""
        raise NotImplementedError
