"""The implementation of `windows/publisher.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpishare.view.pool_door import PoolDoor
from mpishare.view.publication import Publication

if TYPE_CHECKING:
    from mpishare.runtime.context import NodeContext
    from mpishare.windows.pool_blocks import OwnBlocks

publish = Publication


def serve_pool(context: NodeContext, key: bytes, blocks: OwnBlocks) -> PoolDoor:
    return PoolDoor(context.fd_server, key, context.backend, blocks)
