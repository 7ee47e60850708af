"""A server deals requests to its workers: each goes to the first that is free.

    mpirun -n 4 python -m mpi4py scripts/examples/36_model_server.py

The answers go into a window, each to the place of its request.
"""

import mpishare

REQUESTS, LENGTH = 60, 256

with mpishare.Node() as node:
    xp = node.xp
    answers = node.allocate(REQUESTS, fill=-1)
    requests = node.channel(1 + LENGTH, deal=True)  # the leader serves, all others work
    n_taken = 0
    if node.rank == requests.producer:
        for number in range(REQUESTS):
            with requests.put() as slot:  # dealt at the end of the block
                slot[0], slot[1:] = number, number / 2
        requests.end()
    else:
        for slot in requests:  # the next turn asks for another one
            answers.array[slot[:1].astype(int)] = slot[1:].sum()  # the model
            n_taken += 1
    answers.fence()
    taken = node.comm.allgather(n_taken)
    if node.is_leader:
        right = [number / 2 * LENGTH for number in range(REQUESTS)]
        if requests.consumers and (answers.array.tolist() != right or sum(taken) != REQUESTS):
            raise SystemExit(f"WRONG: {taken}: {answers.array}")
        print(f"{len(requests.consumers)} workers answered {sum(taken)} requests: right")
