"""MODEL strings to modules, and how to feed them."""
