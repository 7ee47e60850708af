"""What carries words from one rank's GPU to another's, for the rivals: one file a library.

`link` says what all of them are asked for, `known` which there are. Nothing here is imported before
a run wants such a rival: of these libraries a machine may have none.
"""
