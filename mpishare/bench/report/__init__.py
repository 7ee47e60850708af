"""What a run leaves: `rows`, `render` as table, JSON or CSV, `plot`, and `compare` of two files."""
