"""Host memory that several ranks map, made in collective steps."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from mpishare.errors import UnsupportedError
from mpishare.memory import shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mpishare.memory.shared import SharedMemory

    # `Agreement.step_keeping`, or that of other ranks, in one call.
    Steps = Callable[[Callable[[], tuple[Any, Any]]], tuple[Any, list[Any]]]


def map_on_all_ranks(
    step: Steps, nbytes: int, *, is_maker: bool, is_sparse: bool = False
) -> SharedMemory:
    """Map the same zeroed memory on every rank. Collective, host-blocking.

    Returns it with its file open. After an error on any rank no memory is left mapped. `is_maker`
    is True on the one rank that allocates it.
    """
    with ExitStack() as undo, ExitStack() as names:

        def offer() -> tuple[SharedMemory | None, str]:
            if not is_maker:
                return None, ""
            made = undo.enter_context(closing(shared.create(nbytes, is_sparse=is_sparse)))
            name = shared.publish(made)
            names.callback(shared.forget, name)  # once all have attached it, or never will
            return made, name

        def attach() -> tuple[SharedMemory, None]:
            return made or undo.enter_context(closing(_attach(published, nbytes))), None

        made, published = step(offer)
        memory: SharedMemory = step(attach)[0]
        undo.pop_all()
    return memory


def _attach(names: Iterable[str], nbytes: int) -> SharedMemory:
    try:
        return shared.attach(next(filter(None, names)), nbytes)
    except PermissionError as error:
        raise UnsupportedError(
            f"cannot open the shared memory of another rank in {shared.FOLDER}: "
            f"{error.strerror}. All ranks of a machine must run as one user; start "
            "containers with the same --user and --userns, and with --ipc=host."
        ) from error
