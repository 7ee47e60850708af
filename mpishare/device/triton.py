"""The functions of ``<mpishare.cuh>`` for Triton: to call in kernels of `triton.jit`.

A kernel gets ``int(window.device["self"])``, here `d`. The group is always the whole program: its
threads make a call together, and meet where docs/device.md asks for that. Kernels with specialized
warps cannot call these functions. `dtype` and `block` are constants of the kernel; peers, `to`,
`n`, slots, values and epochs are integers; `to` counts elements of the type of `source`. After a
false wait a kernel goes on, with a flag: its later waits end at once.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl

# As in mpishare.cuh. The first thread polls for all, or each for itself where it needs the value.
_WAIT = """{
    .reg .pred ok, go, newer;
    .reg .b32 thread, polls, part;
    .reg .b64 word, flag, now, since, spent;
    setp.eq.b32 ok, 0, 0;
    mov.b32 polls, 0;
    mov.b64 since, 0;
    WHO
POLL:
    CHECK
    @ok bra END;
    add.u32 polls, polls, 1;
    and.b32 part, polls, 0xff;
    setp.ne.u32 go, part, 0;
    @go bra POLL;
    ld.volatile.u64 flag, [LOST];
    setp.ne.u64 go, flag, 0;
    @go bra END;
    and.b32 part, polls, 0x3fff;
    setp.ne.u32 go, part, 0;
    @go bra POLL;
    mov.u64 now, %globaltimer;
    setp.eq.u64 go, since, 0;
    @go mov.b64 since, now;
    st.volatile.u64 [WAITING], 1;
    ld.volatile.u64 flag, [ABORT];
    setp.ne.u64 go, flag, 0;
    @go bra GIVE_UP;
    sub.u64 spent, now, since;
    setp.lt.u64 go, spent, DEADLINE;
    @go bra POLL;
    st.volatile.u64 [LATE], 1;
GIVE_UP:
    st.volatile.u64 [LOST], 1;
END:
    setp.ne.u64 go, since, 0;
    @go st.volatile.u64 [WAITING], 0;
JOIN:
    barrier.red.and.pred ok, 0, ok;
    selp.b32 $0, 1, 0, ok;
    RESULT
}"""


def _wait_asm(who: str, check: str, result: str) -> tl.constexpr:
    """Return the text of a wait, whose results are operands 0 and 1."""
    text = _WAIT.replace("WHO", who).replace("CHECK", check).replace("RESULT", result)
    names = "PLACE", "VALUE", "LOST", "ABORT", "WAITING", "LATE", "DEADLINE"
    for number, name in enumerate(names, start=2):
        text = text.replace(name, f"${number}")
    return tl.constexpr(text)


_WAIT_SIGNAL = _wait_asm(
    """mov.u32 thread, %tid.x;
    setp.ne.u32 go, thread, 0;
    @go bra JOIN;""",
    """ld.acquire.sys.global.u64 word, [PLACE];
    sub.s64 spent, word, VALUE;
    setp.ge.s64 ok, spent, 0;""",
    "mov.u32 $1, 0;",
)
_WAIT_WORD = _wait_asm(
    "",
    """ld.relaxed.sys.global.u64 word, [PLACE];
    shr.u64 spent, word, 32;
    sub.s64 spent, spent, VALUE;
    cvt.s32.s64 part, spent;
    setp.eq.s32 ok, part, 0;
    setp.gt.s32 newer, part, 0;
    @newer st.volatile.u64 [LATE], 2;
    @newer bra GIVE_UP;""",
    "cvt.u32.u64 $1, word;",
)
_STORE = """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first st.ORDER.sys.global.u64 [$1], $2;
    mov.b32 $0, 0;
}"""
_STORE_RELEASE, _STORE_RELAXED = (
    tl.constexpr(_STORE.replace("ORDER", order)) for order in ("release", "relaxed")
)
_WHOLE = tl.constexpr(1 << 32)  # see `epoch` in mpishare.cuh


@triton.jit
def _word(d, number):
    return tl.load(tl.cast(d, tl.pointer_type(tl.int64)) + number)


@triton.jit
def _half(d, number):
    return tl.load(tl.cast(d, tl.pointer_type(tl.int32)) + number)


@triton.jit
def rank(d):
    """Return the number of this rank."""
    return _half(d, 12)


@triton.jit
def size(d):
    """Return the number of ranks."""
    return _half(d, 13)


@triton.jit
def _mine(d, writer, slot):
    return _word(d, 2) + 8 * (tl.cast(writer - size(d), tl.int64) * _half(d, 15) + slot)


@triton.jit
def _store(d, peer, slot, value, order: tl.constexpr):
    row = _word(_word(d, 1), peer)
    place = row + 8 * (tl.cast(rank(d), tl.int64) * _half(d, 15) + slot)
    tl.inline_asm_elementwise(
        order, "=r,l,l,~{memory}", [place, tl.cast(value, tl.int64)], tl.int32, False, 1
    )


@triton.jit
def at(d, peer, dtype: tl.constexpr):
    """Return a pointer to the peer's segment: for loads, stores, atomics with ``scope="sys"``."""
    return tl.cast(_word(_word(d, 0), peer), tl.pointer_type(dtype))


@triton.jit
def put(d, peer, to, source, n, block: tl.constexpr = 1024):
    """Copy `n` elements at the pointer `source` to the peer's element `to`, `block` at once."""
    target = at(d, peer, source.dtype.element_ty) + to
    tl.debug_barrier()  # another thread may have written what this one reads
    for first in range(0, n, block):
        i = first + tl.arange(0, block)
        tl.store(target + i, tl.load(source + i, i < n), i < n)


@triton.jit
def signal(d, peer, slot, value):
    """Raise my signal at a slot of the peer, after all stores of the program."""
    tl.debug_barrier()
    _store(d, peer, slot, value, _STORE_RELEASE)


@triton.jit
def put_signal(d, peer, to, source, n, slot, value, block: tl.constexpr = 1024):
    """Copy, then raise the signal."""
    put(d, peer, to, source, n, block)
    signal(d, peer, slot, value)


@triton.jit
def _await(d, peer, slot, value, asm: tl.constexpr):
    host = _word(d, 3)
    return tl.inline_asm_elementwise(
        asm,
        "=r,=r,l,l,l,l,l,l,l,~{memory}",
        [
            _mine(d, peer, slot),
            tl.cast(value, tl.int64),
            _word(d, 2) + 24 * _half(d, 15),
            host,
            host + 8 + 8 * peer,
            host + 8 + 8 * (size(d) + peer),
            _word(d, 5),
        ],
        (tl.int32, tl.uint32),
        False,
        1,
    )


@triton.jit
def wait(d, peer, slot, value):
    """Wait until the peer's signal at my slot is at least `value`; return whether it came."""
    ok, _ = _await(d, peer, slot, value, _WAIT_SIGNAL)
    return ok != 0


@triton.jit
def barrier(d, slot):
    """Wait for this program of every rank; return whether all came. The slot is its own."""
    count = tl.cast(_word(d, 2) + 8 * slot, tl.pointer_type(tl.int64))
    value = tl.load(count, volatile=True) + 1
    tl.debug_barrier()
    tl.store(count, value)
    for peer in range(size(d)):
        _store(d, peer, slot, value, _STORE_RELEASE)
    ok = True
    for peer in range(size(d)):
        ok = wait(d, peer, slot, value) & ok
    return ok


@triton.jit
def put_word(d, peer, slot, word, epoch):
    """Send 4 bytes beside their epoch."""
    bits = tl.cast(tl.cast(word, tl.uint32, bitcast=True), tl.int64)
    _store(d, peer, slot, tl.cast(epoch, tl.int64) << 32 | bits, _STORE_RELAXED)


@triton.jit
def get_word(d, peer, slot, epoch, dtype: tl.constexpr):
    """Wait for the word of exactly this epoch; return whether it came, and the word."""
    ok, word = _await(d, peer, slot, tl.cast(epoch, tl.int64) & 0xFFFFFFFF, _WAIT_WORD)
    return ok != 0, tl.cast(word, dtype, bitcast=True)


@triton.jit
def epoch(d, slot):
    """Return the number of this launch, from 1 on; every program calls it once."""
    counted = tl.cast(_word(d, 2) + 8 * (_half(d, 15) + slot), tl.pointer_type(tl.int64))
    newest = counted + _half(d, 15)
    last = tl.load(newest, volatile=True)
    ahead = (tl.load(counted, volatile=True) >> 32) + 1 - last
    value = last + tl.cast(tl.cast(ahead, tl.int32), tl.int64)
    tl.debug_barrier()
    n = tl.cast(tl.num_programs(0), tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    is_first = tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0
    tl.store(newest, value, mask=is_first)
    tl.atomic_add(counted, tl.where(is_first, _WHOLE + 1 - n, 1), sem="relaxed")
    return value
