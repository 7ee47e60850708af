"""The memory of a pool: its owner creates it, the other ranks import it, and all try it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mpishare.errors import CudaError, MpiShareError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import OwnMemory, PeerMemory
    from mpishare.runtime.context import NodeContext


def share_pool_memory(
    context: NodeContext, call: str, owner: int, nbytes: int
) -> tuple[OwnMemory | None, PeerMemory | None]:
    """Return the memory on its owner, and that of another rank. Collective."""
    backend, descriptors, is_owner = context.backend, context.descriptors, context.rank == owner
    own: list[OwnMemory] = []
    imported: list[PeerMemory] = []
    fds: list[int] = []
    lent: list[str] = []
    tried: list[int] = []
    stream = backend.enter(None)[0]

    def create() -> str:
        if not is_owner:
            return ""
        own.append(backend.create_pool(nbytes))
        fds.append(own[0].export())
        lent.append(descriptors.lend(fds[0]))
        return lent[0]

    def import_it() -> str:
        if is_owner:
            tried.append(own[0].allocate(1, stream))
            return own[0].publish(tried[0]).hex()
        fds.append(descriptors.borrow(owner, tokens[owner], context.agreement.timeout_s))
        imported.append(backend.import_pool(fds[0]))
        return ""

    def try_it() -> None:
        for memory in imported:
            memory.let_go(memory.open(bytes.fromhex(trials[owner]), 1))

    def free() -> None:
        for memory in own:
            memory.free([(address, 1, stream) for address in tried])

    def step(work: Callable[[], Any]) -> list[Any]:
        return context.agreement.step(call, lambda: _supported(call, work))

    try:
        tokens = step(create)
        trials = step(import_it)
        step(try_it)
        step(free)
    except BaseException:
        _undo(context, call, own, imported)
        raise
    finally:
        for token in lent:
            descriptors.take_back(token)
        for fd in fds:
            os.close(fd)
    return (own[0], None) if is_owner else (None, imported[0])


def _supported(call: str, work: Callable[[], Any]) -> Any:
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


def _undo(
    context: NodeContext, call: str, own: list[OwnMemory], imported: list[PeerMemory]
) -> None:
    """Close the memory of a failed call: importers first, as in `close`."""

    def release() -> None:
        for memory in imported:
            memory.close()

    try:
        context.agreement.step(call, release)
    except MpiShareError:
        return  # the node is broken: others may still map it, and the first error explains more
    for memory in own:
        memory.close()
