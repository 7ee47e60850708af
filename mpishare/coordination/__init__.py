"""Agreement, waits, failure and shutdown of the ranks of a node. No CUDA."""
