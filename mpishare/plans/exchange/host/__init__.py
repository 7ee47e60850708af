"""The engines for fields in host memory: in C where there is a compiled part, else in Python."""
