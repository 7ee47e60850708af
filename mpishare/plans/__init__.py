"""What plans of every kind share: agreed on once by all ranks, then used many times."""
