"""The engine for fields in GPU memory."""
