"""One file for each command: parse, call, echo."""
