"""How a node is made."""
