"""What the engines of all plans for fields in GPU memory share. It needs CuPy."""
