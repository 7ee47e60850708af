"""A ring buffer by hand: slots that are posted by the consumer and filled by the producer.

    mpirun -n 2 python -m mpi4py scripts/examples/13_ring_buffer.py

This is what MPI's active target is for: post says "my slot is free", complete "it is filled".
"""

import mpishare

SLOTS, ITEMS, LENGTH, MODULUS = 4, 100, 1000, 1 << 40


def fibonacci(item, n):
    """The Fibonacci numbers from this item on, modulo a large number."""
    a, b = 0, 1
    for _ in range(item):
        a, b = b, (a + b) % MODULUS
    numbers = []
    for _ in range(n):
        numbers.append(a)
        a, b = b, (a + b) % MODULUS
    return numbers


with mpishare.Node() as node:
    if node.size == 1:
        raise SystemExit("a ring buffer needs two ranks: mpirun -n 2")
    producer, consumer, xp = 0, 1, node.xp
    source = xp.asarray(fibonacci(0, LENGTH + ITEMS), dtype="i8")
    # Each slot is a window: its own order, independent of the other slots.
    ring = [node.allocate_each(LENGTH if node.rank == consumer else 0, "i8") for _ in range(SLOTS)]
    wrong = xp.zeros((), "i8")
    if node.rank == consumer:
        for slot in ring:
            slot.post([producer])  # free
    for item in range(ITEMS):
        slot = ring[item % SLOTS]
        if node.rank == producer:
            slot.start([consumer])  # my stream waits until the slot is free
            slot.segment(consumer)[...] = source[item : item + LENGTH]
            slot.complete()
        elif node.rank == consumer:
            slot.wait()  # my stream waits until it is filled
            wrong += (slot.array != source[item : item + LENGTH]).sum()
            if item + SLOTS < ITEMS:
                slot.post([producer])
    node.synchronize()
    if int(wrong):
        raise SystemExit(f"WRONG: {int(wrong)} numbers")
    if node.rank == consumer:
        print(f"{ITEMS} items through {SLOTS} slots: right")
