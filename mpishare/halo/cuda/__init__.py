"""The engine for fields in GPU memory.

`engine`, on top of `plan_engine`, which reductions share, composes `direction` (messages and
routes; `direct`: parts without staging), `buffers` (`flags`, `staging`; for MPI `mpi_stages` of
`pieces`, or `mpi_in_place` where nothing is packed), `kernels` (launches of `work_items`, made of
`records` and `strided` cells, copied to the GPU by `tables`), and for each alignment of the fields
`fused` and `streamed`. `graphs`, `launch_order` and `fast_path` make repeated calls cheap.
"""
