"""The engine for fields in host memory."""
