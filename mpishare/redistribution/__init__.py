"""Global arrays that are spread over the ranks one way, and wanted another."""
