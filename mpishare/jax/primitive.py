"""Calls of plans as operations that JAX can compile: in the same order on all ranks.

XLA reaches a plan by a callback. On the host that carries the token of ordered effects: all ranks
must make their calls in the same order, and XLA runs beside each other what has no data in common.
`io_callback` carries it too, but first makes arrays of JAX of its arguments, which takes longer
than an exchange. XLA's threads take numbers too small to be normal for zeros, which is switched off
for sums: they have the same bits there as elsewhere.

On a GPU it is a buffer callback: XLA hands out its stream and the memory of the results, and makes
such calls in the order of its program, the same on all ranks.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import ExecutionStage, buffer_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mpishare.plans.base_plan import BasePlan

# The effect that keeps ordered callbacks in order has no public name.
_EFFECTS = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().jaxpr.effects

_LIBC = ctypes.CDLL(None)
_Fenv, _DEFAULT_FENV = ctypes.c_char * 64, ctypes.c_void_p(-1)  # room for a fenv_t; FE_DFL_ENV


class Collective(Primitive):  # type: ignore[misc]
    """An operation whose parameters are a plan and the name of the method of it that is called.

    The method writes into its arguments: copies of the arrays, unless nothing else reads them. With
    `results`, which makes the avals of the results of the arrays, it reads the arrays and writes
    into further arguments. `no_batch` says what to do in place of `jax.vmap`.
    """

    multiple_results = True

    def __init__(
        self,
        call: str,
        no_batch: str,
        results: Callable[..., Sequence[Any]] | None = None,
        *,
        is_sum: bool = True,
    ) -> None:
        super().__init__(f"mpishare_{call}")
        self._is_sum = is_sum
        self._call, self._no_batch, self._is_in_place = call, no_batch, results is None
        self._avals = results or (lambda *arrays: arrays)
        self.def_impl(jax.jit(self.bind, static_argnames=("plan", "method", "shift")))
        self.def_effectful_abstract_eval(lambda *avals, **_: ([*self._avals(*avals)], _EFFECTS))
        batching.primitive_batchers[self] = self._refuse_batch
        mlir.register_lowering(self, self._lower_on_host, platform="cpu")
        mlir.register_lowering(self, mlir.lower_fun(self._on_gpu), platform="cuda")

    def make_linear(self, transposed: Callable[[Any, str, Sequence[Any]], str]) -> None:
        """Derive it as linear; the transpose calls the method that `transposed` names."""

        def tangents(arrays: Sequence[Any], given: Sequence[Any], **params: Any) -> Any:
            if (plan := params["plan"])._has_offsets:
                raise NotImplementedError(
                    f"{plan.name}: {self._call} failed: its offsets have no derivative"
                )
            results = self.bind(*arrays, **params)
            found = self.bind(*map(_or_zeros, given, arrays), **params)
            pairs = zip(given, found, strict=True)
            return results, [g if _is_of_integers(g) else f for g, f in pairs]

        def transpose(
            wanted: Sequence[Any], *arrays: Any, plan: Any, method: str, **rest: Any
        ) -> Any:
            # Plans have the conjugates of complex factors on the way back, as an adjoint has; a
            # transpose has none.
            given = [*map(jnp.conj, map(_or_zeros, wanted, arrays))]
            method = transposed(plan, method, given)
            found = map(jnp.conj, self.bind(*given, plan=plan, method=method, **rest))
            pairs = zip(arrays, found, strict=True)
            return [f if ad.is_undefined_primal(array) else None for array, f in pairs]

        ad.primitive_jvps[self] = tangents
        ad.primitive_transposes[self] = transpose

    def _lower_on_host(
        self, context: mlir.LoweringRuleContext, *operands: Any, **params: Any
    ) -> Any:
        call = _bind(**params)
        if self._is_sum:
            call = _keeping_denormals(call)

        def run(*arrays: Any) -> list[np.ndarray[Any, Any]]:
            if self._is_in_place:
                results = given = [np.array(each) for each in arrays]
            else:
                results = [np.empty(each.shape, each.dtype) for each in context.avals_out]
                given = [*map(np.asarray, arrays), *results]
            call(*given)
            return results

        (effect,), tokens = _EFFECTS, context.tokens_in
        avals = context.avals_in, context.avals_out
        found, token, _ = mlir.emit_python_callback(
            context, run, tokens.get(effect), operands, *avals, has_side_effect=True
        )
        context.set_tokens_out(tokens.update_tokens(mlir.TokenSet({effect: token})))
        return found

    def _on_gpu(self, *arrays: Any, **params: Any) -> Any:
        call = _bind(**params)

        def run(context: Any, results: list[Any], *buffers: Any) -> None:
            # XLA also calls at the stages that prepare its program, where there is nothing to do.
            if context.stage == ExecutionStage.EXECUTE:
                given = results if self._is_in_place else [*buffers, *results]
                call(*given, stream=int(context.stream))

        enqueued = buffer_callback(
            run,
            [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self._avals(*arrays)],
            has_side_effect=True,
            input_output_aliases={at: at for at in range(len(arrays) * self._is_in_place)},
            # XLA may then call once, record what the call enqueues, and replay that without Python.
            command_buffer_compatible=not params["plan"]._needs_host,
        )
        # Without the barrier XLA (JAX 0.11.2) merges the call with a later `.at[].set()` of its
        # result, and fails: "DynamicSliceFusion: DUS target must be a fusion parameter".
        return jax.lax.optimization_barrier(enqueued(*arrays))

    def _refuse_batch(self, *_: Any, plan: BasePlan, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"{plan.name}: {self._call} failed: it cannot be mapped by jax.vmap, nor by "
            f"jax.jacfwd, jax.jacrev and jax.hessian, which use that. {self._no_batch}"
        )


def _keeping_denormals(call: Callable[..., None]) -> Callable[..., None]:
    def run(*arguments: Any) -> None:
        kept = _Fenv()
        _LIBC.fegetenv(kept)
        _LIBC.fesetenv(_DEFAULT_FENV)
        try:
            call(*arguments)
        finally:
            _LIBC.fesetenv(kept)

    return run


def _bind(
    plan: BasePlan, method: str, shift: Sequence[tuple[str, int]] = ()
) -> Callable[..., None]:
    """Return the call that XLA makes in a thread of its own."""
    call = getattr(plan, method)
    return plan._in_any_thread(partial(call, shift=dict(shift)) if shift else call)


def _or_zeros(tangent: Any, array: Any) -> Any:
    """Return the tangent of an array, which all ranks pass to the plan: zeros if there is none."""
    aval = getattr(array, "aval", array)
    return jnp.zeros(aval.shape, aval.dtype) if isinstance(tangent, ad.Zero) else tangent


def _is_of_integers(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) and tangent.aval.dtype == jax.dtypes.float0


def arrays_of(plan: BasePlan, call: str, noun: str, given: Sequence[Any]) -> list[Any]:
    """Return the arguments of a call with the dtypes that JAX gives them, or raise."""
    if plan.is_closed:
        raise plan._closed(f"{plan.name}: {call}")
    for number, each in enumerate(given):
        if not isinstance(each, jax.Array | np.ndarray):
            raise TypeError(
                f"{plan.name}: {call} failed: {noun} {number} is not an array of JAX but of type "
                f"{type(each).__name__}"
            )
    return [*map(jnp.asarray, given)]
