"""The benchmark of mpishare: ``mpirun -n 4 python -m mpishare.bench``.

`cases` lists what is timed; `setup`, `fence`, `halo` and `allreduce` time it, against the messages
of `mpi` and `staged` and the libraries behind `library`. `comparison` takes the times, and `report`
shows them. `benchmarks/` of the repository adds cases and baselines to the same catalog.
Importing this package imports neither MPI nor CuPy, so that ``--help`` and ``list`` work where
neither does.
"""
