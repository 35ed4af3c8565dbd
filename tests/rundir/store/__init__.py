"""A run directory in an object store."""
