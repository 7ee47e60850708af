"""Halo exchanges: which cells go where, and by which route."""

from mpishare.halo.cartesian import HaloExchange
from mpishare.halo.neighbors import NeighborExchange

__all__ = ["HaloExchange", "NeighborExchange"]
