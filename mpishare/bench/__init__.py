"""The benchmark of mpishare: ``mpirun -n 4 python -m mpishare.bench``.

`cases` lists what is timed, a module per case or family; `baselines` holds what mpishare is
measured against, `problems` the data that both move and the checks of it. `comparison` times the
variants of a case by the clocks of `measure`; `environment` and `report` write down what was found.
Importing this package imports neither MPI nor CuPy, so that ``--help`` and ``list`` work where
neither does.
"""
