"""Make the memory of a pool: its owner creates it, the other ranks import it, and all try it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mpishare.errors import CudaError, MpiShareError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpishare.backends import PoolMemory
    from mpishare.context import NodeContext


def share_pool_memory(context: NodeContext, call: str, owner: int, nbytes: int) -> PoolMemory:
    """Make the memory on the owner, import it on all other ranks, and try it. Collective."""
    backend, descriptors, is_owner = context.backend, context.descriptors, context.rank == owner
    made: list[PoolMemory] = []
    lent: list[tuple[int, str]] = []
    tried: list[int] = []
    stream = backend.enter(None)[0]

    def create() -> str:
        if not is_owner:
            return ""
        memory, fd = backend.create_pool(nbytes)
        made.append(memory)
        lent.append((fd, descriptors.lend(fd)))
        return lent[0][1]

    def import_it() -> str:
        if is_owner:
            tried.append(made[0].allocate(1, stream))
            return made[0].publish(tried[0]).hex()
        fd = descriptors.borrow(owner, tokens[owner], context.agreement.timeout_s)
        try:
            made.append(backend.import_pool(fd))
        finally:
            os.close(fd)
        return ""

    def try_it() -> None:
        if not is_owner:
            made[0].let_go(made[0].open(bytes.fromhex(trials[owner])))

    def free() -> None:
        for address in tried:
            made[0].free(address, 1, stream)

    def step(work: Callable[[], Any]) -> list[Any]:
        return context.agreement.step(call, lambda: _supported(call, work))

    try:
        tokens = step(create)
        trials = step(import_it)
        step(try_it)
        step(free)
    except BaseException:
        _undo(context, call, made, is_owner=is_owner)
        raise
    finally:
        for fd, token in lent:
            descriptors.take_back(token)
            os.close(fd)
    return made[0]


def _supported(call: str, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except CudaError as error:
        if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
            raise
        # WSL2 says that it can, and cannot.
        raise UnsupportedError(
            f"{call} failed: memory pools cannot be shared here: {error} Use node.allocate_each, "
            "which shares memory in another way."
        ) from error


def _undo(context: NodeContext, call: str, made: list[PoolMemory], *, is_owner: bool) -> None:
    """Close the memory of a failed call: importers first, as in `close`."""

    def release() -> None:
        if not is_owner:
            for memory in made:
                memory.close()

    try:
        context.agreement.step(call, release)
    except MpiShareError:
        return  # the node is broken: others may still map it, and the error before says more
    if is_owner:
        for memory in made:
            memory.close()
