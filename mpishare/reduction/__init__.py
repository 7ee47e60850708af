"""Reductions over ranks: operations, and the engine of each backend."""
