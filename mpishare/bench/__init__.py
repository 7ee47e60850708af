"""The benchmark of mpishare: ``mpirun -n 4 python -m mpishare.bench``.

`options` reads the command line, `cases` holds one file a case, `measure` times the arms of a case
against each other, `header` and `report` write down what was found. Importing this package imports
neither MPI nor CuPy, so that ``--help`` and ``list`` work where neither does.
"""
