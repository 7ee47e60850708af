"""Halo exchanges: which cells go where, and by which route."""

from mpishare.halo.cartesian import HaloExchange
from mpishare.halo.layout import Layout
from mpishare.halo.neighbors import NeighborExchange

__all__ = ["HaloExchange", "Layout", "NeighborExchange"]
