"""What a node runs on: how it is made, what the ranks find out about the machine, its context."""
