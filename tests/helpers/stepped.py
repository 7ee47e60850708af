"""Boxes with a step: what a plan would exchange of them, though none offers it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

from mpishare.halo import cartesian
from mpishare.plans import message
from mpishare.plans.cells import Box
from mpishare.plans.message import Part


@dataclass(frozen=True)
class Stepped(Box):
    """Every second plane of a box along `axis`."""

    axis: ClassVar[int] = 0

    @property
    def slices(self) -> tuple[slice, ...]:
        found = [*super().slices]
        found[self.axis] = slice(self.lower[self.axis], self.upper[self.axis], 2)
        return tuple(found)

    @property
    def shape(self) -> tuple[int, ...]:
        found = [*super().shape]
        found[self.axis] = -(-found[self.axis] // 2)
        return tuple(found)

    def cut(self, axis: int, first: int, last: int) -> Box:
        step = 2 if axis == self.axis else 1
        found = super().cut(axis, step * first, step * last)
        return type(self)(found.lower, found.upper)


def stepped_along(axis: int) -> type[Stepped]:
    return type("Stepped", (Stepped,), {"axis": axis})


@contextmanager
def stepped_faces(axis: int) -> Iterator[None]:
    """Within it, plans are made whose faces have a step along an axis."""
    boxes = stepped_along(axis)

    def of_box(field: int, layout: Any, box: Box) -> Part:
        return Part.of_box(field, layout, boxes(box.lower, box.upper))

    with (
        mock.patch.object(cartesian, "Part", mock.Mock(of_box=of_box)),
        mock.patch.object(message, "Box", boxes),
    ):
        yield
