"""Rows of columns that go to other ranks, in numbers that only their sender knows."""
