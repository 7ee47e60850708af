"""The engine for fields in host memory, where there is a compiled part: calls are made in C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpishare.backends.streams import handle_of
from mpishare.coordination import recording
from mpishare.halo.host.compiled_route import CompiledRoute
from mpishare.halo.host.engine import HostCall, HostEngine

if TYPE_CHECKING:
    from collections.abc import Sequence


class CompiledEngine(HostEngine):
    """`HostEngine` of an exchange that is not reversed. C checks the fields of most calls, too."""

    _route = CompiledRoute
    _host: CompiledRoute

    def prepare(self, fields: Sequence[Any]) -> HostCall:
        """Check the fields of a call that C does not take: arrays of others, and wrong ones."""
        recording.require_none(self._name, "its fields are in host memory")
        arrays, addresses = self._checked(fields)
        return HostCall(self._host.bind(addresses), arrays)

    def try_fast(self, fields: Sequence[Any], stream: Any) -> bool:
        """Exchange NumPy arrays of the plan's layouts, or return False with nothing done."""
        if stream is not None:
            handle_of(stream)
        try:
            return self._has_fast_path and self._host.try_exchange(fields)
        except BaseException as error:
            self._leave_node(error)
            raise

    def try_start(self, fields: Sequence[Any], stream: Any) -> bool:
        """Start an exchange of such arrays, or return False with nothing done."""
        if stream is not None:
            handle_of(stream)
        try:
            return self._has_fast_path and self._host.try_start(fields)
        except BaseException as error:
            self._leave_node(error)
            raise

    def try_wait(self, stream: Any) -> bool:
        """End what `try_start` has begun, or return False with nothing done."""
        if stream is not None:
            handle_of(stream)
        try:
            return self._host.try_wait()
        except BaseException as error:
            self._leave_node(error)
            raise
