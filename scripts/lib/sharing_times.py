"""Times of an open handle, of 200 shared arrays and of dealt frames, beside other libraries.

    mpirun -n 2 python -m mpi4py scripts/lib/sharing_times.py ranks [FILE]
    python scripts/lib/sharing_times.py child [FILE]

Between two ranks, and between a program and a child that it spawns; without GPUs. FILE gets a line
of JSON more for each way: the least and the median microseconds of all rounds. A way whose library
is not installed is left out.
"""

import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from multiprocessing import reduction, shared_memory
from pathlib import Path

import numpy as np

import mpishare

SIZES = (4 << 10, 1 << 20)
COUNT, ROUNDS, SLOTS = 200, 30, 4
FRAMES, FRAME_ROUNDS = 20, 150  # in a round of a few, since the machine may have other work
OPENED, DEALT, SHARED = "open a handle", "deal a frame", f"share {COUNT} arrays"
HAS = {name: importlib.util.find_spec(name) is not None for name in ("zmq", "ucxx", "torch")}


def row(what, way, nbytes, times):
    """Return a line of figures; times in seconds."""
    least, median = min(times), statistics.median(times)
    found = {"what": what, "way": way, "nbytes": nbytes}
    return found | {"least_us": round(1e6 * least, 2), "median_us": round(1e6 * median, 2)}


def check(array, number):
    """Fail unless the first and the last byte are those of frame `number`."""
    if int(array[0]) != number % 256 or int(array[-1]) != 7:
        raise SystemExit(f"WRONG: {array} is not number {number}")


def arrays_of(nbytes):
    """Return arrays that differ in their first byte."""
    arrays = np.full((COUNT, nbytes), 7, "u1")
    arrays[:, 0] = np.arange(COUNT) % 256
    return list(arrays)


def opens(open_, handles, held):
    """Return the seconds of each open with its first access; `held` gets the arrays."""
    times = []
    for number, handle in enumerate(handles):
        begin = time.perf_counter()
        array = open_(handle)
        array[0]
        times.append(time.perf_counter() - begin)
        check(array, number)
        held.append(array)
    return times


def opens_twice(open_, handles):
    """Return the seconds of opening each, and of opening it again while it is open."""
    held = []
    return opens(open_, handles, held), opens(open_, handles, held)


@contextlib.contextmanager
def handles_of(node, arrays):
    """Return handles of copies in a pool; of none on a rank without arrays."""
    with node.pool() as pool:
        copies = [pool.allocate(array.shape, array.dtype) for array in arrays or []]
        for copy, array in zip(copies, arrays or [], strict=True):
            copy[...] = array
        yield pool, [pool.handle(copy) for copy in copies]
        node.barrier()
        del copies[:]


# --- between two ranks


@contextlib.contextmanager
def frames_by_channel(node, nbytes):
    frames = node.channel(nbytes, "u1", slots=SLOTS, deal=True)

    def send(frame):
        with frames.put() as slot:
            slot[...] = frame

    def receive(number):
        with frames.get() as slot:
            check(slot, number)

    yield send, receive
    frames.close()


@contextlib.contextmanager
def frames_by_mpi(node, nbytes):
    """Deal as one does with messages: a worker asks, the server sends to who asked first."""
    from mpi4py import MPI

    comm, word, status = node.comm, np.zeros(1, "u1"), MPI.Status()
    buffer = np.empty(nbytes, "u1")

    def send(frame):
        comm.Recv(word, MPI.ANY_SOURCE, status=status)
        comm.Send(frame, status.source)

    def receive(number):
        comm.Send(word, 0)
        comm.Recv(buffer, 0)
        check(buffer, number)

    yield send, receive


@contextlib.contextmanager
def frames_by_zmq(node, nbytes):
    del nbytes
    import zmq

    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        address = node.comm.bcast(f"ipc://{folder}/frames")
        with context.socket(zmq.PULL if node.rank else zmq.PUSH) as socket:
            socket.set_hwm(SLOTS)
            (socket.connect if node.rank else socket.bind)(address)

            def receive(number):
                check(np.frombuffer(socket.recv(copy=False), "u1"), number)

            yield socket.send, receive
            node.barrier()


def times_of_frames(node, way, nbytes):
    """Return the seconds of a frame in each round, until the consumer has read them."""
    frame, times = np.full(nbytes, 7, "u1"), []
    with way(node, nbytes) as (send, receive):
        for _ in range(FRAME_ROUNDS):
            node.barrier()
            begin = time.perf_counter()
            for number in range(FRAMES):
                if node.rank:
                    receive(number)
                else:
                    frame[0] = number % 256
                    send(frame)
            times.append((time.perf_counter() - begin) / FRAMES)
    return node.comm.bcast(times, 1)


def shared_by_mpi(node, arrays):
    from mpi4py import MPI

    sizes = node.comm.bcast(arrays and [array.nbytes for array in arrays])
    window = MPI.Win.Allocate_shared(0 if node.rank else sum(sizes), comm=node.comm)
    found = np.split(np.frombuffer(window.Shared_query(0)[0], "u1"), np.cumsum(sizes)[:-1])
    for target, array in zip(found, arrays or [], strict=False):
        target[...] = array
    return found, [window]


def copied_by_mpi(node, arrays):
    return node.comm.bcast(arrays), []


def of_windows(windows):
    return [window.array for window in windows], windows


def shared_one(node, arrays):
    return of_windows([node.share(arrays and arrays[0])])


def shared_all(node, arrays):
    return of_windows(node.share_all(arrays))


def shared_in_turn(node, arrays):
    return of_windows([node.share(arrays and arrays[n]) for n in range(COUNT)])


def times_of_shares(node, way, arrays):
    times = []
    for _ in range(3 if way is shared_in_turn else ROUNDS):
        node.barrier()
        begin = time.perf_counter()
        found, windows = way(node, arrays)
        node.barrier()
        times.append(time.perf_counter() - begin)
        for number, array in enumerate(found):
            check(array, number)
        node.barrier()
        del found, array
        for window in windows:
            window.Free() if hasattr(window, "Free") else window.close()
    return times


SHARES = {
    "mpishare: one `share` of one array": shared_one,
    "mpishare: `share_all`": shared_all,
    f"mpishare: {COUNT} times `share`": shared_in_turn,
    "MPI: one `Win.Allocate_shared`, views by hand": shared_by_mpi,
    "MPI: `bcast`, a copy per rank": copied_by_mpi,
}
DEALS = {
    "mpishare: `channel(deal=True)`": frames_by_channel,
    "MPI: a request, then the frame": frames_by_mpi,
}
if HAS["zmq"]:
    DEALS["ZeroMQ: PUSH and PULL, ipc"] = frames_by_zmq


def of_ranks():
    """Yield all lines of figures between two ranks."""
    with mpishare.Node(backend="host") as node:
        for nbytes in SIZES:
            arrays = None if node.rank else arrays_of(nbytes)
            for name, way in SHARES.items():
                yield row(SHARED, name, nbytes, times_of_shares(node, way, arrays))
            for name, way in DEALS.items():
                yield row(DEALT, name, nbytes, times_of_frames(node, way, nbytes))
            with handles_of(node, arrays) as (pool, handles):
                handles = node.comm.bcast(handles)
                found = node.comm.bcast(opens_twice(pool.open, handles) if node.rank else None, 1)
            yield row(OPENED, "mpishare: `pool.open`, in another rank", nbytes, found[0])
            yield row(OPENED, "mpishare: `pool.open`, open already", nbytes, found[1])


# --- between a program and its child


def child(connection, queue):
    """Run what the parent asks for, in a process of its own."""
    for function in iter(connection.recv, None):
        connection.send(function(queue))


def take_frames(queue):
    for number in range(FRAMES):
        check(queue.get(), number)


def take_arrays(queue):
    for number, array in enumerate(queue.get()):
        check(array, number)


def open_block(name):
    block = shared_memory.SharedMemory(name)
    _blocks.append(block)  # an array keeps it from being closed
    return np.frombuffer(block.buf, "u1")


_blocks = []


def close_blocks():
    while _blocks:
        _blocks.pop().close()


def take_blocks(queue):
    for number, name in enumerate(queue.get()):
        check(open_block(name), number)
    close_blocks()


def open_handles(queue):
    return opens_twice(mpishare.open_handle, queue.get())


def open_blocks(queue):
    found = opens(open_block, queue.get(), [])
    close_blocks()
    return found


def open_tensors(queue):
    return opens(reduction.ForkingPickler.loads, queue.get(), [])


def take_by_ucxx(queue):
    """Return the seconds of a frame in each round, by UCXX."""
    import ucxx

    async def take():
        frame, times = np.empty(queue.get(), "u1"), []
        endpoint = await ucxx.create_endpoint("127.0.0.1", queue.get())
        for _ in range(FRAME_ROUNDS):
            await endpoint.send(frame[:1])  # ready
            begin = time.perf_counter()
            for number in range(FRAMES):
                await endpoint.recv(frame)
                check(frame, number)
            times.append((time.perf_counter() - begin) / FRAMES)
        await endpoint.close()
        return times

    return asyncio.run(take())


def by_ucxx(process, arrays):
    """Return what `take_by_ucxx` measures."""
    import ucxx

    loop, word = asyncio.new_event_loop(), np.empty(1, "u1")
    asyncio.set_event_loop(loop)

    async def send(endpoint):
        for _ in range(FRAME_ROUNDS):
            await endpoint.recv(word)
            for array in arrays[:FRAMES]:
                await endpoint.send(array)

    def items():
        sent = loop.create_future()

        async def serve(endpoint):
            await send(endpoint)
            sent.set_result(None)

        async def listen():
            return ucxx.create_listener(serve)

        listener = loop.run_until_complete(listen())
        yield arrays[0].nbytes
        yield listener.port
        loop.run_until_complete(sent)

    _, times = process.ask(take_by_ucxx, items())
    return times


class Child:
    """A process that this one spawned."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.queue = context.Queue(SLOTS)
        self._process = context.Process(target=child, args=(theirs, self.queue))
        self._process.start()

    def ask(self, function, items):
        """Run a function there on these items of the queue; return its seconds and its answer."""
        self._connection.send(function)
        begin = time.perf_counter()
        for item in items:
            self.queue.put(item)
        answer = self._connection.recv()
        return time.perf_counter() - begin, answer

    def close(self):
        self._connection.send(None)
        self._process.join()


@contextlib.contextmanager
def blocks_of(arrays):
    """Return what makes and fills blocks of shared memory when it is asked for their names."""
    blocks = []

    def names():
        for array in arrays:
            blocks.append(shared_memory.SharedMemory(create=True, size=array.nbytes))
            np.frombuffer(blocks[-1].buf, "u1")[...] = array
        yield [block.name for block in blocks]

    yield names()
    for block in blocks:
        block.close()
        block.unlink()


def of_child():
    """Yield all lines of figures between a program and its child."""
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(contextlib.closing(Child()))
        if HAS["ucxx"]:  # before MPI, which may have another UCX
            for nbytes in SIZES:
                times = by_ucxx(process, arrays_of(nbytes))
                yield row(DEALT, "UCXX: send and receive", nbytes, times)
        node = stack.enter_context(mpishare.Node(backend="host"))
        for nbytes in SIZES:
            arrays = arrays_of(nbytes)
            with handles_of(node, arrays) as (_, handles):
                _, found = process.ask(open_handles, [handles])
            yield row(OPENED, "mpishare: `open_handle`, without MPI", nbytes, found[0])
            yield row(OPENED, "mpishare: `open_handle`, open already", nbytes, found[1])
            with blocks_of(arrays) as names:
                _, found = process.ask(open_blocks, names)
            yield row(OPENED, "multiprocessing: `SharedMemory(name)`", nbytes, found)
            times = []
            for _ in range(ROUNDS):
                with blocks_of(arrays) as names:
                    times.append(process.ask(take_blocks, names)[0])
            yield row(SHARED, f"multiprocessing: {COUNT} `SharedMemory`", nbytes, times)
            times = [
                process.ask(take_frames, arrays[:FRAMES])[0] / FRAMES for _ in range(FRAME_ROUNDS)
            ]
            yield row(DEALT, "multiprocessing: a queue of arrays", nbytes, times)
            if HAS["torch"]:
                yield from of_tensors(process, nbytes, arrays)


def of_tensors(process, nbytes, arrays):
    """Yield the lines of PyTorch's queues, whose tensors travel as descriptors."""
    import torch.multiprocessing

    def new():
        return [torch.from_numpy(array.copy()) for array in arrays]

    _, found = process.ask(
        open_tensors, [[bytes(reduction.ForkingPickler.dumps(t)) for t in new()]]
    )
    yield row(OPENED, "torch.multiprocessing: a tensor unpickled", nbytes, found)
    times = [process.ask(take_arrays, [new()])[0] for _ in range(ROUNDS)]
    yield row(SHARED, "torch.multiprocessing: a list in a queue", nbytes, times)
    times = [process.ask(take_frames, new()[:FRAMES])[0] / FRAMES for _ in range(FRAME_ROUNDS)]
    yield row(DEALT, "torch.multiprocessing: a queue of tensors", nbytes, times)


def main():
    if sys.argv[1] == "child":
        lines, is_first = of_child(), True
    else:
        from mpi4py import MPI

        lines, is_first = of_ranks(), MPI.COMM_WORLD.rank == 0
    for line in map(json.dumps, lines):
        if is_first:
            print(line, flush=True)
        if is_first and len(sys.argv) > 2:
            with Path(sys.argv[2]).open("a") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
