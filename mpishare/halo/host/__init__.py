"""The engines for fields in host memory: in C where there is a compiled part, else in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishare.halo.engine import PlanSetup
    from mpishare.halo.host.engine import HostEngine


def engine_class(setup: PlanSetup, *, is_reverse: bool) -> type[HostEngine]:
    """Return the engine of one direction of a plan."""
    if setup.context.compiled is not None and not is_reverse:
        from mpishare.halo.host.compiled_engine import CompiledEngine

        return CompiledEngine
    # Cells are added by NumPy, in its order.
    from mpishare.halo.host.engine import HostEngine

    return HostEngine
