"""The common part of all plans: agreed on once by all ranks, then used many times."""
