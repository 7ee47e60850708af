"""What mpishare is measured against: MPI on the host and through it, libraries between GPUs.

`host_mpi` and `staged` hold the MPI baselines, `library` the interface of `cuda_mpi`, `nccl`,
`nvshmem` and `symmetric`, which are imported when a run wants them: a machine may have none.
"""
