"""The interface between plans of rows and their engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from mpishare.plans.engine import PlanEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mpishare.plans.engine import PlanSetup, RoutedSetup
    from mpishare.rows.calls import Span
    from mpishare.rows.form import Form


class RowEngine(PlanEngine, Protocol):
    """Moves the rows of one plan; made collectively, calls as those of `RowExchange`.

    What a call is given is checked before anything is published: `TypeError` or `ValueError`.
    """

    def start(self, columns: list[Any], spans: Sequence[Span | None], stream: Any) -> None:
        """Send rows of the columns, one span a key."""
        ...

    def place(self, into: Mapping[int, list[Any]], stream: Any) -> None:
        """Receive: by the places of the keys into arrays, the others into slots."""
        ...

    def append(self, columns: list[Any], count: Any, stream: Any) -> Any:
        """Receive all behind `count`, and return the new count."""
        ...

    def counts(self) -> tuple[list[int], list[int]]:
        """Return how many rows came and went, by key; host-blocking."""
        ...

    @property
    def device_counts(self) -> Any:
        """How many rows come, in the memory of the columns."""
        ...

    def received(self, place: int) -> list[Any]:
        """Return the rows that came, where they are; host-blocking."""
        ...


class MigrationEngine(Protocol):
    """Moves rows out of arrays with spare rows and into them."""

    left: Any  # of shape (), in the memory of the columns

    def migrate(self, columns: list[Any], to: Any, count: Any, stream: Any) -> Any:
        """Move them, and return the new count."""
        ...

    def stuck(self) -> tuple[dict[Any, int], int, int]:
        """Return the rows left by key, those that go to no peer, those that came into full arrays.

        Host-blocking.
        """
        ...


def engine_class(setup: PlanSetup) -> Callable[[RoutedSetup, Form], Any]:
    """Import the engine for the backend of the columns."""
    if setup.on_gpu:
        from mpishare.rows.cuda import CudaRows

        return CudaRows
    from mpishare.rows.host import HostRows

    return HostRows


def migration_class(setup: PlanSetup) -> Callable[..., MigrationEngine]:
    """Import what moves rows by their goals, made of an engine and ``stable=``."""
    if setup.on_gpu:
        from mpishare.rows.cuda_migration import CudaMigration

        return CudaMigration
    from mpishare.rows.host_migration import HostMigration

    return HostMigration
