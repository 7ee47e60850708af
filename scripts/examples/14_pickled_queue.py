"""A window through a multiprocessing queue: the child verifies the pattern and writes another.

    mpirun -n 1 python -m mpi4py scripts/examples/14_pickled_queue.py

A named window pickles. What comes out of the queue in a process that was spawned is the same
memory, attached. That process imports this file again, MPI too: it is started outside of the job.
"""

import multiprocessing

from mpi4py import MPI

import mpishare

N = 1024


def child(queue, answers):
    """Run in a process of its own, which is a job of one rank."""
    assert MPI.COMM_WORLD.size == 1
    with queue.get() as there:
        data = there.array
        is_right = data.tolist() == [100.0 + k for k in range(N)]
        data[...] = -data
        answers.put((is_right, float(data[-1])))  # the copy to the host waits for the GPU


def main():
    """Run as rank 0 of a job of any size."""
    context = multiprocessing.get_context("spawn")  # a fork would not have a GPU
    with mpishare.Node() as node:
        window = node.share(lambda: 100.0 + node.xp.arange(N), name="pattern")
        node.synchronize()
        if node.is_leader:
            queue, answers = context.Queue(), context.Queue()
            process = context.Process(target=child, args=(queue, answers))
            with mpishare.outside_environment():
                process.start()
            queue.put(window)
            is_right, last = answers.get(timeout=60)
            process.join()
            if not is_right or last != -100.0 - (N - 1):
                raise SystemExit(f"WRONG: the child saw {is_right}, {last}")
        window.fence()
        if float(window.array[5]) != -105.0:
            raise SystemExit(f"WRONG: {window.array[:5]}")
        if node.is_leader:
            print("the parent sees the child's pattern: right")


if __name__ == "__main__":
    main()
