"""How the ranks of a node agree, wait, fail and end. No CUDA."""
