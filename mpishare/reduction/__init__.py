"""Reductions over ranks: what they compute, and the engine of each backend."""
