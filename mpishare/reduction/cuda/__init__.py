"""Reductions of fields in GPU memory: kernels that fold in rank order, and their launches."""
