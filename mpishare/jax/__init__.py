"""Exchanges of JAX arrays, inside `jax.jit` and its gradients. Imports JAX; mpishare itself does not."""

from mpishare.jax.exchange import exchange

__all__ = ["exchange"]
