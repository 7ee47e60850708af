"""The engine for fields in GPU memory.

`engine` composes, in this order: `direction` (messages and routes), `buffers` (`flags`, `staging`,
MPI), `kernels` (launches of `work_items`), and per alignment of the fields `fused` and `streamed`;
`graphs`, `launch_order` and `fast_path` make repeated calls cheap.
"""
