"""Memory that other processes map."""
