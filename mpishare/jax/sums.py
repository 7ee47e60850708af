"""Reductions and dot products as functions that JAX can compile; sums have derivatives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad

from mpishare.halo import Layout
from mpishare.jax.primitive import Collective, arrays_of
from mpishare.reduction.allreduce import Allreduce

if TYPE_CHECKING:
    from collections.abc import Sequence


def reduce(total: Allreduce, array: Any) -> Any:
    """Return the combination of all ranks' arrays, on every rank.

    Collective over the plan's ranks, when the compiled program comes to it. What `exchange` says of
    compiled programs, streams, errors and the end of a node holds here too.

    Parameters
    ----------
    total : Allreduce
        Plain or exact, made for a `Layout` in C order, where JAX computes.
    array : array of JAX
        Of the shape and dtype that the plan was made for.

    Returns
    -------
    array
        A new one.

    Raises
    ------
    NotImplementedError
        Under derivatives, where the plan's operation is not ``"sum"``. Others as in `exchange`.

    Notes
    -----
    The transpose of a sum adds up the cotangents of all ranks, as that of `jax.lax.psum` under
    `jax.pmap`: `jax.grad` is the gradient of the sum of what all ranks return. If all return the
    same total, that is its gradient times the number of ranks.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> node = Node(MPI.COMM_SELF, backend="host")
    >>> total = Allreduce(node.comm, Layout(2, "f4"), node=node)
    >>> jax.jit(lambda u: mpishare.jax.reduce(total, u))(jax.numpy.array([1.0, 2.0]))
    Array([1., 2.], dtype=float32)
    >>> node.close()
    """
    (given,) = _arrays("reduce", total, array)
    layout = total._layout
    try:
        layout.require(
            replace(Layout(given.shape, given.dtype).of_field(), device=layout.device), "the array"
        )
    except ValueError as error:
        raise total._named("reduce", error) from None
    operation = _sum if total._operation.name == "sum" else _combination
    return operation.bind(given, plan=total, method="reduce")[0]


def dot(total: Allreduce, x: Any, y: Any) -> Any:
    """Return the sum of ``conj(x) * y`` over the elements of all ranks, on every rank.

    Collective, and with derivatives, as `reduce`; these are dot products too, exact if the plan is.

    Parameters
    ----------
    total : Allreduce
        A sum, plain or exact, where JAX computes.
    x, y : array of JAX
        Of the plan's dtype, both of one shape, which may differ from the plan's, and from rank to
        rank: cells without their ghosts.

    Returns
    -------
    array
        A new one, of shape ().

    Raises
    ------
    ValueError
        If the dtype or a shape differs, or the plan is no sum. Others as in `exchange`.
    """
    given = _arrays("dot", total, x, y)
    total._require_sum()
    shape, dtype = given[0].shape, total._layout.dtype
    for name, each in zip("xy", given, strict=True):
        if (each.shape, each.dtype) != (shape, dtype):
            raise ValueError(
                f"{total.name}: dot failed: {name} is {each.dtype}{each.shape} instead of "
                f"{dtype}{shape}. Make another plan, or convert it by astype"
            )
    return _dot_of(total, *given)


def _arrays(call: str, total: Any, *given: Any) -> list[Any]:
    if not isinstance(total, Allreduce):
        raise TypeError(
            f"mpishare.jax.{call} failed: it takes an Allreduce first, not {type(total).__name__}"
        )
    return arrays_of(total, call, "array", given)


def _dot_of(total: Allreduce, x: Any, y: Any) -> Any:
    return _dot.bind(x, y, plan=total, method="dot")[0]


def _dot_tangents(arrays: Sequence[Any], tangents: Sequence[Any], *, plan: Any, **_: Any) -> Any:
    (x, y), (of_x, of_y) = arrays, tangents
    pairs = [(of_x, y)] * (type(of_x) is not ad.Zero) + [(x, of_y)] * (type(of_y) is not ad.Zero)
    return [_dot_of(plan, x, y)], [sum(_dot_of(plan, *pair) for pair in pairs)]


def _dot_transpose(wanted: Sequence[Any], x: Any, y: Any, *, plan: Any, **_: Any) -> Any:
    mine = ad.instantiate_zeros(wanted[0])
    of_all = _dot_of(plan, jnp.ones_like(mine), mine)  # a sum of one number of each rank
    if ad.is_undefined_primal(x):
        return [jnp.conj(of_all * y), None]
    return [None, of_all * jnp.conj(x)]


def _refuse_derivative(*_: Any, plan: Allreduce, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{plan.name}: reduce failed: only a sum has derivatives, and the plan's op is "
        f"{plan._operation.name!r}. Put jax.lax.stop_gradient around the argument"
    )


_NO_BATCH = "Make the Allreduce for arrays with the axis of the batch, and call reduce"
_sum = Collective("reduce", _NO_BATCH)
_sum.make_linear(lambda _, method, __: method)
_combination = Collective("reduce", _NO_BATCH)  # by any other operation
ad.primitive_jvps[_combination] = _refuse_derivative
_dot = Collective("dot", _NO_BATCH, lambda x, _: [ShapedArray((), x.dtype)])
ad.primitive_jvps[_dot] = _dot_tangents
ad.primitive_transposes[_dot] = _dot_transpose
