"""An exchange as a function that JAX can compile, and differentiate.

JAX arrays cannot be written, so the exchange returns new ones. It is linear, and its transpose is
`accumulate`, whose own transpose is the exchange.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from mpishare.halo import Layout
from mpishare.halo.plan import Plan
from mpishare.jax.primitive import Collective, arrays_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def exchange(plan: Plan, *fields: Any, shift: Mapping[str, int] | None = None) -> Any:
    """Return the fields with every ghost brought up to date.

    Collective over the plan's ranks, when the compiled program comes to it. It works inside
    `jax.jit`, `lax.fori_loop`, `lax.scan` and `lax.cond`, and under `jax.grad`, `jax.vjp` and
    `jax.jvp`: its transpose adds every ghost to the cell that it shadows and zeroes it, as
    `HaloExchange.accumulate` does. Not under `jax.vmap` and `jax.checkpoint`.

    On a GPU it is ordered on XLA's stream and the host waits for nothing; on the host it blocks the
    thread in which XLA runs it.

    Parameters
    ----------
    plan : HaloExchange, NeighborExchange or SeamExchange
        Made for a `Layout` in C order, one for each field, or for one without dtype, on a node of
        JAX's own GPU, or of ``backend="host"`` where JAX computes on the CPU.
    *fields : array of JAX
        Of the shapes and dtypes that the plan was made for.
    shift : dict of str to int, optional
        Of a `SeamExchange`: ints that are known when JAX traces.

    Returns
    -------
    array, or tuple of arrays if there are several fields
        New ones; XLA reuses the memory of the old ones where nothing else reads them.

    Raises
    ------
    TypeError
        If the first argument is no such plan, or a field is not an array.
    NotImplementedError
        Under `jax.vmap`, and what uses it: `jax.jacfwd`, `jax.jacrev` and `jax.hessian`. Under
        derivatives, if seams have offsets.
    ValueError
        If a field has another shape or dtype than the plan was made for, or shifts other names.
    ClosedError
        If the plan is closed.

    Notes
    -----
    JAX returns before its program has run. Call ``jax.block_until_ready`` before anything else is
    called on the node, and before the node is closed. What an exchange raises, such as a
    `PeerError`, arrives as the text of JAX's own error. JAX keeps what it has compiled, and with it
    the plan: ``jax.clear_caches`` lets go of both.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> node = Node(MPI.COMM_SELF, backend="host")
    >>> halo = HaloExchange(
    ...     node.comm, Layout(4, "f4"), 1, dims=(1,), periods=True, node=node)
    >>> step = jax.jit(lambda u: mpishare.jax.exchange(halo, u))
    >>> step(jax.numpy.array([0.0, 1.0, 2.0, 0.0]))
    Array([2., 1., 2., 1.], dtype=float32)
    >>> node.close()
    """
    if not isinstance(plan, Plan):
        raise TypeError(
            "mpishare.jax.exchange failed: it takes the plan of an exchange, then its fields, "
            f"not {type(plan).__name__} first"
        )
    given = arrays_of(plan, "exchange", "field", fields)
    layouts = _layouts(given)
    if not plan._fields.has_seen(layouts):
        jax.effects_barrier()  # agreed on while JAX traces, as in `_transposed`
    pair = plan._fields.pair_for("exchange", layouts, None)
    try:
        pair.require_like(layouts)
    except ValueError as error:
        raise plan._named("exchange", error) from None
    shifts = tuple(sorted((shift or {}).items()))
    wanted = getattr(plan, "shifts", ())
    if tuple(dict(shifts)) != wanted:
        raise ValueError(f"{plan.name}: exchange failed: shift= must name {wanted}, not {shift!r}")
    found = _exchange.bind(*given, plan=plan, method="exchange", shift=shifts)
    return found[0] if len(found) == 1 else tuple(found)


def _layouts(fields: Sequence[Any]) -> list[Layout]:
    return [Layout(np.shape(field), field.dtype) for field in fields]


def _transposed(plan: Any, method: str, fields: Sequence[Any]) -> str:
    if method == "accumulate":
        return "exchange"
    # It allocates, which cannot be recorded, and so not be left to the first call. All ranks come
    # here, as they trace the same program.
    jax.effects_barrier()
    plan._fields.pair_for("accumulate", _layouts(fields), None).make_reverse()
    return "accumulate"


_exchange = Collective(
    "exchange",
    "Make the plan for fields with the axis of the batch, and name by axes= those that the grid "
    "cuts",
    is_sum=False,
)
_exchange.make_linear(_transposed)
