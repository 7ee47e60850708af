"""Measurements beyond those of `mpishare.bench`, for who works on mpishare; not in the wheel.

``mpirun -n 2 python -m benchmarks CASE...`` takes the command line of `mpishare.bench` and has its
cases too. It adds the newest libraries between GPUs, upper bounds of the machine, solvers, JAX, and
cases of single mechanisms: see `catalog`. `tables` makes those of the documentation.
"""
