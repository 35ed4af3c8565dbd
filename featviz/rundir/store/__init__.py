"""A run directory in an object store, reached through fsspec: the same tree, each file an object.

`objects` speaks with the store, `listing` tells what is there, `lock` keeps second writers away,
`run` writes a run image by image, and `fetch` brings a run here for whoever reads it.
"""
