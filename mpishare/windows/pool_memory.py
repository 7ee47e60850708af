"""The memory of a pool: its owner creates it, the other ranks import it, and all try it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mpishare.errors import CudaError, UnsupportedError
from mpishare.windows.undo import undoing

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import OwnMemory, PeerMemory
    from mpishare.runtime.context import NodeContext

T = TypeVar("T")


def share_pool_memory(
    context: NodeContext, call: str, owner: int, nbytes: int
) -> tuple[OwnMemory | None, PeerMemory | None]:
    """Return the memory on its owner, and that of another rank. Collective."""
    backend, descriptors, is_owner = context.backend, context.descriptors, context.rank == owner
    stream = backend.enter(None)[0]
    with undoing(context, call) as undo, ExitStack() as lent:

        def create() -> tuple[OwnMemory | None, str]:
            if not is_owner:
                return None, ""
            memory = backend.create_pool(nbytes)
            undo.made.callback(memory.close)
            fd = memory.export()
            lent.callback(os.close, fd)
            token = descriptors.lend(fd)
            lent.callback(descriptors.take_back, token)
            return memory, token

        def import_it() -> tuple[tuple[PeerMemory | None, int], str]:
            if own is not None:
                address = own.allocate(1, stream)
                return (None, address), own.publish(address).hex()
            fd = descriptors.borrow(owner, tokens[owner], context.agreement.timeout_s)
            lent.callback(os.close, fd)
            memory = backend.import_pool(fd)
            undo.opened.callback(memory.close)
            return (memory, 0), ""

        def try_it() -> tuple[None, None]:
            if imported is not None:
                imported.let_go(imported.open(bytes.fromhex(trials[owner]), 1))
            return None, None

        def free() -> tuple[None, None]:
            if own is not None:
                own.free([(tried, 1, stream)])
            return None, None

        def step(work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
            return context.agreement.step_keeping(call, partial(_supported, call, work))

        own, tokens = step(create)
        (imported, tried), trials = step(import_it)
        step(try_it)
        step(free)
    return own, imported


def _supported(call: str, work: Callable[[], T]) -> T:
    try:
        return work()
    except CudaError as error:
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        # WSL2 reports that it can, and cannot.
        raise UnsupportedError(
            f"{call} failed: memory pools cannot be shared here: {error} Use node.allocate_each, "
            "which shares memory in another way."
        ) from error
