"""Processes outside the job that look at its windows: names, snapshots, and the way to both."""
