"""The common part of the engines of all plans for fields in GPU memory. It needs CuPy."""
