"""Exchanges and sums of JAX arrays inside `jax.jit`. The one part of mpishare that imports JAX."""

from mpishare.jax.exchanges import exchange
from mpishare.jax.sums import dot, reduce

__all__ = ["dot", "exchange", "reduce"]
