"""``<mpishare.cuh>`` for Numba: functions to call in kernels of `numba.cuda.jit`.

A kernel gets ``int(window.device["self"])``, here `d`. The names, the order and the groups are
those of docs/device.md, with the group in the name: `put_signal_block`, `wait_warp`. Ranks, slots
and values are integers, at most `int64`; `source` is a contiguous array, whole or a slice, and `to`
the peer's element where it begins, of the source's dtype. `rank`, `size`, `epoch` and `signal` have
no group: one thread calls `signal`, every thread `epoch`. Nothing is compiled before the first
kernel that calls it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numba.cuda import CUSource, declare_device, jit, types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import overload

_FUNCTIONS = """
#define API extern "C" __device__
typedef mpishare::Word Word;
typedef const mpishare::Device* Pointer;
API int mpishare_rank(Pointer d) { return d->rank; }
API int mpishare_size(Pointer d) { return d->size; }
API long long mpishare_epoch(Pointer d, int slot) { return mpishare::epoch(*d, slot); }
API int mpishare_signal(Pointer d, int peer, int slot, Word value) {
    mpishare::signal(*d, peer, slot, value);
    return 0;
}
"""
_OF_A_GROUP = """
API int mpishare_put_GROUP(Pointer d, int peer, long long to, const char* from, long long n) {
    mpishare::put<mpishare::GROUP>(*d, peer, to, from, n);
    return 0;
}
API int mpishare_put_signal_GROUP(
    Pointer d, int peer, long long to, const char* from, long long n, int slot, Word value
) {
    mpishare::put_signal<mpishare::GROUP>(*d, peer, to, from, n, slot, value);
    return 0;
}
API bool mpishare_wait_GROUP(Pointer d, int peer, int slot, Word value) {
    return mpishare::wait<mpishare::GROUP>(*d, peer, slot, value);
}
API bool mpishare_barrier_GROUP(Pointer d, int slot) {
    return mpishare::barrier<mpishare::GROUP>(*d, slot);
}
"""
_INT, _VALUE = types.int32, types.int64
_GROUPS = "thread", "warp", "block"
SOURCE = "".join(
    [
        Path(__file__).with_name("mpishare.cuh").read_text(),
        _FUNCTIONS,
        *(_OF_A_GROUP.replace("GROUP", group) for group in _GROUPS),
    ]
)
_LINKED = CUSource(SOURCE, name="mpishare.cu")


def _declare(name: str, result: Any, *arguments: Any) -> Any:
    signature = result(types.uint64, *arguments)
    return declare_device(f"mpishare_{name}", signature, link=_LINKED, abi="c")


def _address(source: Any) -> Any:
    """Return the address of an array in a kernel; refuses one with gaps when it is compiled."""
    return source.ctypes.data


@overload(_address, strict=False)  # type: ignore[untyped-decorator]
def _compiled_address(source: Any) -> Any:
    if not (isinstance(source, types.Array) and source.layout in "CF"):
        raise TypingError(f"the source of a put is {source}, not a contiguous array")
    return lambda source: source.ctypes.data


def _putting(group: str) -> Any:
    declared = _declare(f"put_{group}", _INT, _INT, types.int64, types.uint64, types.int64)

    @jit(device=True)  # type: ignore[untyped-decorator]
    def put(d: Any, peer: int, to: int, source: Any) -> None:
        nbytes = source.itemsize
        declared(d, peer, to * nbytes, _address(source), source.size * nbytes)

    return put


def _putting_with_signal(group: str) -> Any:
    declared = _declare(
        f"put_signal_{group}", _INT, _INT, types.int64, types.uint64, types.int64, _INT, _VALUE
    )

    @jit(device=True)  # type: ignore[untyped-decorator]
    def put_signal(d: Any, peer: int, to: int, source: Any, slot: int, value: int) -> None:
        nbytes = source.itemsize
        declared(d, peer, to * nbytes, _address(source), source.size * nbytes, slot, value)

    return put_signal


rank = _declare("rank", _INT)
size = _declare("size", _INT)
epoch = _declare("epoch", _VALUE, _INT)
signal = _declare("signal", _INT, _INT, _INT, _VALUE)

put_thread, put_warp, put_block = map(_putting, _GROUPS)
put_signal_thread, put_signal_warp, put_signal_block = map(_putting_with_signal, _GROUPS)
wait_thread, wait_warp, wait_block = (
    _declare(f"wait_{each}", types.boolean, _INT, _INT, _VALUE) for each in _GROUPS
)
barrier_thread, barrier_warp, barrier_block = (
    _declare(f"barrier_{each}", types.boolean, _INT) for each in _GROUPS
)
