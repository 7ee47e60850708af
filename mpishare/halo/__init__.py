"""Halo exchanges between the ranks of a grid or of an unstructured mesh."""

from mpishare.halo.cartesian import HaloExchange
from mpishare.halo.neighbors import NeighborExchange
from mpishare.halo.seam import Seam
from mpishare.halo.seam_exchange import SeamExchange
from mpishare.plans.cells import Box
from mpishare.plans.layout import Layout

__all__ = ["Box", "HaloExchange", "Layout", "NeighborExchange", "Seam", "SeamExchange"]
