"""The fields that a rank gives to a plan: their arrays, their layouts, and where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mpishare.memory.memory import address_of
from mpishare.plans import layout
from mpishare.plans.disjoint import Disjoint, require_distinct_cells
from mpishare.plans.layout import FieldLayout, Layout, as_numpy
from mpishare.runtime.preflight import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpishare.runtime.context import Location, NodeContext


class GivenFields(NamedTuple):
    """A rank's fields as it gave them, checked alone: the ranks have not agreed on them yet."""

    arrays: list[Any]  # empty if one of the fields is a `Layout`
    layouts: list[FieldLayout]
    backend: str  # "auto", that of the node, if each is a `Layout`
    takes_any: bool  # they are a `Layout` without dtype

    @classmethod
    def of(cls, fields: Any, backend: str, name: str = "") -> GivenFields:
        """Check the user's fields; raise for those that cannot travel, or that share elements.

        `backend` is ``"auto"`` for that of the first array; errors call a single field by `name`.
        """
        require_backend(backend)
        given = layout.as_list(fields)
        takes_any = layout.takes_any(given)
        arrays = [field for field in given if not isinstance(field, Layout)]
        if backend == "auto" and arrays:
            backend = "cuda" if layout.is_on_gpu(arrays[0]) else "host"
        layouts = layouts_of(given, backend, name)
        require_disjoint(given, layouts, name)
        return cls(arrays if len(arrays) == len(given) else [], layouts, backend, takes_any)


def require_backend(backend: Any) -> None:
    """Raise `ValueError` for a ``backend=`` that there is not."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, not {backend!r}")


def layouts_of(fields: Sequence[Any], backend: str, name: str = "") -> list[FieldLayout]:
    """Return the layouts of arrays and of each `Layout`, or raise for fields that cannot travel."""
    return [_layout_of(each, name or f"field {i}", backend) for i, each in enumerate(fields)]


def _layout_of(field: Any, name: str, backend: str) -> FieldLayout:
    if isinstance(field, Layout):
        return layout.check_layout(field.of_field(), name)
    if backend == "cuda":
        from mpishare.plans.gpu.fields import cuda_layout

        return cuda_layout(field, name)
    return layout.host_layout(as_numpy(field, name), name)


def require_disjoint(fields: Sequence[Any], layouts: Sequence[FieldLayout], name: str = "") -> None:
    """Raise `ValueError` if two cells share memory: MPI may not receive into both."""
    for each in dict.fromkeys(layouts):
        require_distinct_cells(each, name or f"field {layouts.index(each)}")
    numbers = [n for n, field in enumerate(fields) if not isinstance(field, Layout)]
    if len(numbers) > 1:
        kept = [layouts[n] for n in numbers]
        Disjoint(kept).require(_addresses([fields[n] for n in numbers], kept), numbers)


def require_device(layouts: Sequence[FieldLayout], context: NodeContext) -> None:
    """Raise `ValueError` if a field is on another GPU than this rank's."""
    gpu = context.backend.device
    mine = None if gpu is None else gpu.ordinal
    for number, each in enumerate(layouts):
        if each.device is not None and each.device != mine:
            raise ValueError(
                f"field {number} is on GPU {each.device}, the node of this rank uses GPU {mine}"
            )


def locations(
    context: NodeContext, fields: Sequence[Any], layouts: Sequence[FieldLayout]
) -> list[Location | None]:
    """Return each field's location in a window; None if other ranks cannot store there.

    Without MPS the ranks of a GPU take turns, and the flag would cost the sender one more turn.
    """
    if not fields or layouts[0].device is None:
        return [None] * len(layouts)
    device, mine = context.backend.device, context.uuids[context.rank]
    if device is None or not device.mps or context.uuids.count(mine) < 2:
        return [None] * len(layouts)
    found = [
        context.locate(address, layout.span_nbytes)
        for address, layout in zip(_addresses(fields, layouts), layouts, strict=True)
    ]
    return [each if each and context.uuids[each.rank] == mine else None for each in found]


def _addresses(fields: Sequence[Any], layouts: Sequence[FieldLayout]) -> Sequence[int]:
    if layouts[0].device is None:
        return [address_of(as_numpy(field, "a field")) for field in fields]
    from mpishare.plans.gpu.fields import addresses_of

    return addresses_of(fields, layouts)
