"""Bytes that other processes map."""
