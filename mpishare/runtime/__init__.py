"""How a node is made: checks of the machine, the report on it, and the context of its objects."""
