"""The engine for fields in GPU memory.

`engine` (on top of `plan_engine`, which reductions share) composes, in this order: `direction`
(messages and routes; `direct`: parts that need no staging), `buffers` (`flags`, `staging`; by MPI
`mpi_stages` of `pieces`, `mpi_in_place` where nothing is packed),
`kernels` (launches of `work_items`, which are made of `records` and `strided` cells; `tables`
copies them to the GPU), and per alignment of the fields `fused` and `streamed`; `graphs`,
`launch_order` and `fast_path` make repeated calls cheap.
"""
