"""Memory of a node for processes outside of its job: named windows, handles, programs in C."""
