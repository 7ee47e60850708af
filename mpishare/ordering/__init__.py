"""Order on streams: counters, epochs, and the chain of one object."""
