"""An exchange as a function that JAX can compile, and differentiate.

JAX arrays cannot be written, so the exchange returns new ones. It is linear, and its transpose is
`accumulate`, whose own transpose is the exchange.

XLA reaches the plan by a callback. On the host that carries the token of ordered effects: all ranks
must make their exchanges in the same order, and XLA runs beside each other what has no data in
common. `io_callback` carries it too, but first makes arrays of JAX of its arguments, which takes
longer than the exchange. On a GPU it is a buffer callback: XLA hands out its stream and the memory
of the result, and makes such calls in the order of its program, the same on all ranks.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import ExecutionStage, buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from mpishare.halo import Layout
from mpishare.halo.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_primitive = Primitive("mpishare_exchange")
_primitive.multiple_results = True


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
    if plan.is_closed:
        raise plan._closed(f"{plan.name}: exchange")
    for number, field in enumerate(fields):
        if not isinstance(field, jax.Array | np.ndarray):
            raise TypeError(
                f"{plan.name}: exchange failed: field {number} is not an array of JAX but of type "
                f"{type(field).__name__}"
            )
    layouts = _layouts(fields)
    if not plan._fields.has_seen(layouts):
        jax.effects_barrier()  # agreed on while JAX traces, as in `_transpose`
    pair = plan._fields.pair_for("exchange", layouts, None)
    try:
        pair.require_like(layouts)
    except ValueError as error:
        raise plan._named("exchange", error) from None
    given = tuple(sorted((shift or {}).items()))
    wanted = getattr(plan, "shifts", ())
    if tuple(dict(given)) != wanted:
        raise ValueError(f"{plan.name}: exchange failed: shift= must name {wanted}, not {shift!r}")
    found = _primitive.bind(*fields, plan=plan, is_reverse=False, shift=given)
    return found[0] if len(found) == 1 else tuple(found)


def _call_of(plan: Plan, shift: Any, *, is_reverse: bool) -> Callable[..., None]:
    call: Any = plan.accumulate if is_reverse else plan.exchange
    return partial(call, shift=dict(shift)) if shift else call


def _shapes(fields: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(field.shape, field.dtype) for field in fields]


def _layouts(fields: Sequence[Any]) -> list[Layout]:
    return [Layout(np.shape(field), field.dtype) for field in fields]


def _lower_on_host(
    context: mlir.LoweringRuleContext, *fields: Any, plan: Plan, is_reverse: bool, shift: Any
) -> Any:
    def run(*arrays: Any) -> list[np.ndarray[Any, Any]]:
        copies = [np.array(array) for array in arrays]
        with plan._in_this_thread():
            _call_of(plan, shift, is_reverse=is_reverse)(*copies)
        return copies

    (effect,), tokens = _EFFECTS, context.tokens_in
    results, token, _ = mlir.emit_python_callback(
        context,
        run,
        tokens.get(effect),
        fields,
        context.avals_in,
        context.avals_out,
        has_side_effect=True,
    )
    context.set_tokens_out(tokens.update_tokens(mlir.TokenSet({effect: token})))
    return results


def _on_gpu(*fields: Any, plan: Plan, is_reverse: bool, shift: Any) -> Any:
    def run(context: Any, buffers: list[Any], *_: Any) -> None:
        # XLA also calls at the stages that prepare its program, where there is nothing to move.
        if context.stage != ExecutionStage.EXECUTE:
            return
        with plan._in_this_thread():
            call = _call_of(plan, shift, is_reverse=is_reverse)
            call(*buffers, stream=int(context.stream))

    call = buffer_callback(
        run,
        _shapes(fields),
        has_side_effect=True,
        input_output_aliases={number: number for number in range(len(fields))},
        # XLA may then call once, record what the call enqueues, and replay that without Python.
        command_buffer_compatible=not plan._setup.host_routes,
    )
    # Without the barrier XLA (JAX 0.11.2) merges the call with a later `.at[].set()` of its result,
    # and fails: "DynamicSliceFusion: DUS target must be a fusion parameter".
    return jax.lax.optimization_barrier(call(*fields))


# The effect that keeps ordered callbacks in order has no public name.
_EFFECTS = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().jaxpr.effects


def _now(*fields: Any, **params: Any) -> Any:
    return _primitive.bind(*fields, **params)


def _transpose(wanted: Sequence[Any], *_: Any, plan: Plan, is_reverse: bool, shift: Any) -> Any:
    given = [ad.instantiate_zeros(each) if isinstance(each, ad.Zero) else each for each in wanted]
    if not is_reverse:
        # It allocates, which cannot be recorded, and so not be left to the first call. All ranks
        # come here, as they trace the same program.
        jax.effects_barrier()
        plan._fields.pair_for("accumulate", _layouts(given), None).make_reverse()
    # Accumulate has the conjugates of complex factors, as an adjoint has; a transpose has none.
    given = [jax.numpy.conj(each) for each in given]
    found = _primitive.bind(*given, plan=plan, is_reverse=not is_reverse, shift=shift)
    return [jax.numpy.conj(each) for each in found]


def _tangents(fields: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Exchange the tangents too: that is the tangent of the exchange, which is linear."""
    if (plan := params["plan"])._has_offsets:
        raise NotImplementedError(f"{plan.name}: exchange failed: its offsets have no derivative")
    results = _primitive.bind(*fields, **params)
    given = [ad.instantiate_zeros(each) if isinstance(each, ad.Zero) else each for each in tangents]
    return results, _primitive.bind(*given, **params)


def _refuse_batch(*_: Any, plan: Plan, **__: Any) -> Any:
    raise NotImplementedError(
        f"{plan.name}: exchange failed: it cannot be mapped by jax.vmap, nor by jax.jacfwd, "
        "jax.jacrev and jax.hessian, which use that. Make the plan for fields with the axis of the "
        "batch, and name by axes= those that the grid cuts"
    )


_primitive.def_impl(jax.jit(_now, static_argnames=("plan", "is_reverse", "shift")))
_primitive.def_effectful_abstract_eval(lambda *fields, **_: (list(fields), _EFFECTS))
ad.primitive_jvps[_primitive] = _tangents
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _refuse_batch
mlir.register_lowering(_primitive, _lower_on_host, platform="cpu")
mlir.register_lowering(_primitive, mlir.lower_fun(_on_gpu), platform="cuda")
