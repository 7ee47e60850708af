"""Halo exchanges between the ranks of a grid or of an unstructured mesh."""

from mpishare.halo.cartesian import HaloExchange
from mpishare.halo.layout import Layout
from mpishare.halo.neighbors import NeighborExchange

__all__ = ["HaloExchange", "Layout", "NeighborExchange"]
