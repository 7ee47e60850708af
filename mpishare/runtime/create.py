"""Creation of a node: the ranks that share memory, the backend, the GPUs."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import asdict
from functools import partial
from importlib import import_module
from itertools import compress
from typing import TYPE_CHECKING, Any, cast

from mpishare import native
from mpishare.backends import Backend, Device
from mpishare.coordination.abort import (
    Shutdown,
    abort_at_exit,
    abort_when_late,
    abort_when_left,
)
from mpishare.coordination.agreement import Agreement, is_agreed
from mpishare.coordination.control_block import ControlBlock, State
from mpishare.coordination.life import Event
from mpishare.coordination.mpi_agreement import (
    CommWatch,
    agree_keeping,
    allgather,
    duplicate,
    identify,
    making_communicators,
    require_intracomm,
)
from mpishare.coordination.watchdog import EXIT_VARIABLE, Watchdog
from mpishare.errors import CudaError, PeerTimeout, closed, describe, late_unknown
from mpishare.memory.arguments import is_duration
from mpishare.memory.process_memory import Token, why_unreadable
from mpishare.memory.shared import map_on_all_ranks, remove_abandoned
from mpishare.runtime import places
from mpishare.runtime.context import NodeContext
from mpishare.runtime.places import Findings, Place, known_to_all, surveyed
from mpishare.runtime.preflight import (
    check_fork,
    check_singleton,
    choose_backend,
    is_check_asked,
    load_mpi,
    one_gpu_note,
)
from mpishare.runtime.probe import probe_cuda, routed
from mpishare.runtime.report import Member, Report, time_sliced_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mpi4py import MPI

    from mpishare.runtime.report import Pair

log = logging.getLogger("mpishare")
node_log = logging.getLogger("mpishare.node")

CALL = "Node"


def create_node(
    comm: MPI.Intracomm | None, backend: Any, device: Any, timeout_s: Any
) -> tuple[NodeContext, Shutdown]:
    """Make the nodes of a communicator. Collective over it; see `Node`."""
    MPI = load_mpi()  # noqa: N806  a module
    made: list[Agreement] = []
    check_fork()
    comm = require_intracomm(CALL, MPI.COMM_WORLD if comm is None else comm)
    with _undone_together(made) as undo:
        check_singleton(MPI.COMM_WORLD.size, os.environ, MPI.Get_library_version())
        deadline_s = float(timeout_s) if is_duration(timeout_s) else 300.0
        watch = CommWatch(CALL, deadline_s)
        all_comm = duplicate(comm, watch)
        undo.callback(all_comm.Free)
        here = surveyed(places.place())
        mine = {name: each.rank for name, each in here.items()}
        chosen, why_host, ranks_in = choose_backend(all_comm, backend, timeout_s, watch, mine)
        known = known_to_all(ranks_in, here)
        if known is None:
            node_comm, color, notes = _find_node(all_comm, watch)
        else:
            node_comm, color, notes = duplicate(all_comm, watch), 0, []
        undo.callback(node_comm.Free)

        def build() -> tuple[NodeContext, list[Any]]:
            context = _build(all_comm, node_comm, chosen, device, watch, why_host, notes, known)
            made.append(context.agreement)
            # If another node fails. Memory that its ranks have opened stays.
            undo.callback(_leave, context.agreement, context.watchdog, context.backend)
            return context, [color, context.uuids[context.rank]]

        context, replies = agree_keeping(all_comm, build, watch)
        colors, uuids = zip(*replies, strict=True)
    shutdown = Shutdown(context.agreement, context.finish_at_exit, context.watchdog.stop)
    context.comms = node_comm, all_comm
    elsewhere = [each != color for each in colors]
    context.all_uuids = [*context.uuids, *compress(uuids, elsewhere)]
    node_log.info(
        "node made: rank %d of %d on %s, backend %s, leader %d, %s",
        context.rank,
        context.size,
        context.report.members[0].host,
        chosen,
        context.report.leader,
        context.backend.device or why_host or "no GPU",
    )
    return context, shutdown


@contextlib.contextmanager
def _undone_together(made: Sequence[Agreement]) -> Iterator[contextlib.ExitStack]:
    """Yield a stack of collective callbacks, for an error that every rank raises.

    By another one this rank leaves the node that it has made: the others may have theirs.
    """
    try:
        with contextlib.ExitStack() as undo:
            try:
                yield undo
            except BaseException as error:
                # Others still wait for this rank, or this rank for one that is missing.
                alone = not is_agreed(error) or getattr(error, "is_unanswered", False)
                if alone or isinstance(error, PeerTimeout):
                    undo.pop_all()
                    for agreement in made:
                        agreement.life.leave(CALL, error)
                raise
            undo.pop_all()
    except BaseException as error:
        if not is_agreed(error):
            abort_when_left(CALL, error)
        raise


def destroy_node(context: NodeContext, shutdown: Shutdown) -> None:
    """Destroy a node without open objects. Collective over its ranks, host-blocking."""
    agreement, call = context.agreement, "Node.close"

    def release() -> None:
        context.drain(call)
        context.suballocator.release()

    agreement.step(call, release)
    agreement.step(call, context.suballocator.close)
    for comm in agreement.plan_comms.values():
        comm.free()
    for communicator in context.nccl.values():
        communicator.close()
    context.fd_server.close()
    _leave(agreement, context.watchdog, context.backend)
    shutdown.cancel()
    node_log.debug("node closed")
    context.close_chunks()  # after the block, whose pool uses them
    agreement.life.end(Event.CLOSE, closed("the node"))


def _leave(
    agreement: Agreement,
    watchdog: Watchdog,
    backend: Backend | None,
    error: BaseException | None = None,
) -> None:
    """Publish that this rank closes a node, or why it leaves it, and release its part."""
    block = agreement.block
    # Before the lock goes, so that the end is not taken for a death.
    block.depart(State.CLOSED) if error is None else agreement.life.tell(error)
    watchdog.stop()
    if backend is not None:
        with contextlib.suppress(CudaError):  # after a failed kernel every call of the driver fails
            backend.unregister(block.memory)
    agreement.close()
    block.close()


@contextlib.contextmanager
def _making_communicator(watch: CommWatch) -> Iterator[None]:
    """Watch a collective of MPI that blocks, and that a rank may die in."""
    why = partial(late_unknown, watch.call, watch.timeout_s)
    with making_communicators(watch.call), abort_when_late(why, watch.timeout_s):
        yield


def _find_node(all_comm: MPI.Intracomm, watch: CommWatch) -> tuple[MPI.Intracomm, int, list[str]]:
    """Return the ranks that share memory, the lowest of them, and notes on others."""
    from mpi4py import MPI

    with _making_communicator(watch):
        comm = cast("MPI.Intracomm", all_comm.Split_type(MPI.COMM_TYPE_SHARED, all_comm.rank))
    first = identify(all_comm, watch)[next(iter(identify(comm, watch)))]
    replies = allgather(all_comm, places.here(first, all_comm.rank), watch)
    known = [Place(group, boot, tuple(folder)) for group, boot, folder in replies]
    notes = places.elsewhere(all_comm.rank, known)
    is_split = any(each.group == 0 and each != known[0] for each in known)
    if notes and is_split and all_comm.rank == 0:
        log.warning("%s", notes[0])
    color = places.mates_of(all_comm.rank, known)[0]
    if len({*known}) > len({each.group for each in known}):  # MPI's ranks are of several nodes
        comm.Free()
        with _making_communicator(watch):
            comm = cast("MPI.Intracomm", all_comm.Split(color, all_comm.rank))
    return comm, color, notes


def _build(
    all_comm: MPI.Intracomm,
    node_comm: MPI.Intracomm,
    chosen: str,
    device: Any,
    watch: CommWatch,
    why_host: str | None,
    notes: list[str],
    known: Findings | None,
) -> NodeContext:
    from mpi4py import MPI

    if known is None and node_comm.rank == 0:
        remove_abandoned()  # first: of jobs whose processes were all killed
    block = _control_block(node_comm, watch)
    agreement = Agreement(block, watch.timeout_s)
    agreement.ranks = identify(node_comm, watch)
    agreement.progress = MPI.COMM_WORLD.Iprobe  # which receives no message
    watchdog = Watchdog(agreement, releases=chosen == "cuda")
    token = Token() if known is None else None  # held until all have tried to read it
    made: list[Backend] = []

    def begin() -> tuple[tuple[Backend, Any], dict[str, Any]]:
        watchdog.exit_after_s = _exit_after_s()
        backend = _backend(chosen, device, agreement)
        address = backend.register(block.memory)
        made.append(backend)
        block.fill_pools(address)
        compiled, why = (None, None) if backend.has_streams else native.choose()
        return (backend, compiled), {
            "process": {
                "given_rank": all_comm.rank,
                "host": socket.gethostname(),
                "pid": os.getpid(),
            },
            "device": backend.device and asdict(backend.device),
            "nonce": os.urandom(8).hex(),
            "cpus": sorted(os.sched_getaffinity(0)),
            "unreadable": token and why_unreadable(offers, agreement.rank),
            "is checked": is_check_asked(),
            "native missing": why,
        }

    with _left_by_error(agreement, watchdog, made):
        block.lock()
        # From now on an unlocked rank is dead.
        offers = agreement.step(CALL, lambda: token and token.offer)
        watchdog.start()
        (backend, compiled), replies = agreement.step_keeping(CALL, begin)
        members = tuple(
            Member(rank, **each["process"], device=each["device"] and Device(**each["device"]))
            for rank, each in enumerate(replies)
        )
        context = _make_context(agreement, backend, compiled, watchdog, members, replies)
        if known is None:
            unreadable = tuple(
                (reader, owner, why)
                for reader, each in enumerate(replies)
                for owner, why in each["unreadable"]
            )
            known = Findings(places.place(), unreadable, None)
        agreement.name, agreement.findings = context.name, _probed(known, context)
        context.report = _report(context, members, why_host, notes)
    return context


@contextlib.contextmanager
def _left_by_error(
    agreement: Agreement, watchdog: Watchdog, made: Sequence[Backend]
) -> Iterator[None]:
    """Leave a node that is being made, with its backend if that is `made`, by an error."""
    try:
        yield
    except BaseException as error:
        _leave(agreement, watchdog, made[0] if made else None, error)
        if agreement.life.is_fatal:
            abort_at_exit(describe(error))
        raise


def _make_context(
    agreement: Agreement,
    backend: Backend,
    compiled: Any,
    watchdog: Watchdog,
    members: Sequence[Member],
    replies: Sequence[dict[str, Any]],
) -> NodeContext:
    nonces = [each["nonce"] for each in replies]
    # All together: launchers leave a rank that they bind to a core with one CPU, which is its own.
    cpus = set[int]().union(*(each["cpus"] for each in replies))
    context = NodeContext(agreement, backend, watchdog, members, nonces, len(cpus))
    if not backend.has_streams:
        reasons = [each["native missing"] for each in replies]
        context.compiled = compiled
        context.native_missing = native.why_missing(reasons, is_first=agreement.rank == 0)
    agreement.open_meetings(context.fence)
    if any(each["is checked"] for each in replies):
        # By name: it stands above, and only who asks for it loads it.
        import_module("mpishare.tools.checker").install(context)
    return context


def _probed(known: Findings, context: NodeContext) -> Findings:
    """Return the findings, on CUDA with those about the GPUs that the ranks use now."""
    probed = known.probed
    if context.backend.has_streams and (probed is None or probed.uuids != context.uuids):
        return known._replace(probed=probe_cuda(context))
    return known


def _report(
    context: NodeContext, members: tuple[Member, ...], why_host: str | None, notes: list[str]
) -> Report:
    findings, time_sliced = context.agreement.findings, tuple[str, ...]()
    pairs: tuple[Pair, ...] = ()  # those of a host are made for who asks: `Node.report`
    probed = findings.probed if context.backend.has_streams else None
    if probed is not None:
        time_sliced = time_sliced_gpus(members)
        pairs = tuple(routed(pair, is_time_sliced=bool(time_sliced)) for pair in probed.pairs)
    notes += [
        f"{context.uuids.count(uuid)} ranks share {uuid[:12]} without the Multi-Process Service: "
        "they take turns of about a millisecond. Start by `python -m mpishare.mps mpirun ...`, "
        "and on several nodes with a daemon on each"
        for uuid in time_sliced
    ]
    warnings = [*filter(None, [one_gpu_note(context.uuids, os.environ)])]
    notes += warnings
    if context.rank == 0:
        _warn(members[0].host, warnings, pairs)
    return Report(
        context.backend.name,
        why_host,
        0,
        members,
        pairs,
        tuple(notes),
        native_missing=context.native_missing,
        unreadable=findings.unreadable,
    )


def _warn(host: str, warnings: Sequence[str], pairs: Sequence[Pair]) -> None:
    for note in warnings:
        log.warning("on %s %s", host, note)
    blocked = [pair for pair in pairs if not pair.memory]
    if blocked:
        log.warning(
            "%d of %d pairs of ranks on %s cannot share GPU memory; the first is rank %d to "
            "rank %d: %s",
            len(blocked),
            len(pairs),
            host,
            blocked[0].origin,
            blocked[0].target,
            blocked[0].reason,
        )


def _control_block(node_comm: MPI.Intracomm, watch: CommWatch) -> ControlBlock:
    def step(work: Callable[[], tuple[Any, Any]]) -> tuple[Any, list[Any]]:
        return agree_keeping(node_comm, work, watch)

    nbytes = ControlBlock.nbytes_for(node_comm.size)
    memory = map_on_all_ranks(step, nbytes, is_maker=node_comm.rank == 0)
    return ControlBlock(memory, node_comm.rank, node_comm.size)


def _exit_after_s() -> float:
    """Return the seconds after which a process that does not notice a death ends."""
    value = os.environ.get(EXIT_VARIABLE, "inf")
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"{EXIT_VARIABLE}={value!r} is no number of seconds") from None


def _backend(chosen: str, device: Any, agreement: Agreement) -> Backend:
    if chosen == "host":
        if device is not None and agreement.rank == 0:
            log.warning("device=%r is ignored: the node is on the host backend", device)
        from mpishare.backends.host import HostBackend

        return HostBackend()
    from mpishare.backends import driver
    from mpishare.backends.cuda import CudaBackend

    where = f"{agreement.here} on {socket.gethostname()}"
    return CudaBackend(driver.choose_device(device, agreement.rank), where)
