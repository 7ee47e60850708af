"""The order in which the elements of a field are packed, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from mpishare.plans.layout import Layout

if TYPE_CHECKING:
    from mpishare.plans.engine import PlanSetup
    from mpishare.plans.layout import FieldLayout

    Order = Literal["C", "F"]


def packing_order(setup: PlanSetup) -> Order:
    """Return the order in which the elements of all ranks are packed.

    Fields that are all packed in Fortran order need no copy in that order.
    """
    return "F" if all(is_packed(each[0], "F") for each in setup.layouts) else "C"


def is_packed(layout: FieldLayout, order: Order) -> bool:
    """Whether the elements are contiguous in this order."""
    packed = Layout(layout.shape, layout.dtype, order).of_field()
    return replace(packed, device=layout.device).is_like(layout)
