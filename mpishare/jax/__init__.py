"""Exchanges of JAX arrays inside `jax.jit`. The one part of mpishare that imports JAX."""

from mpishare.jax.primitive import exchange

__all__ = ["exchange"]
