"""What the variants of a case have in common: who exchanges what with whom, and how it is checked.

`exchange` is the interface that the baselines work on; `ring` and `grid` are its two problems.
"""
