"""The engine for fields in GPU memory, on top of `mpishare.plans.gpu`.

`engine` composes `direction` (messages and routes, parts without staging), `buffers` (by the layout
in `staging`; for MPI `mpi_buffers`), `kernels` (launches of `work_items`, made of `records` and
`strided` cells), and for each alignment of the fields `fused` and `streamed`.
"""
