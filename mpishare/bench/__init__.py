"""The benchmark of mpishare: ``mpirun -n 4 python -m mpishare.bench``.

`options` reads the command line, `cases` holds one file a case, `links` the libraries between GPUs
that rivals use. `contest` times the arms of a case against each other by the clocks of `measure`;
`header`, `report` and `plot` write down what was found, and `compare` sets two runs side by side.
Importing this package imports neither MPI nor CuPy, so that ``--help`` and ``list`` work where
neither does.
"""
