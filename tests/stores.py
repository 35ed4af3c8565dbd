"""fsspec's own `memory://` as an object store, for the tests of runs in stores."""

from __future__ import annotations

import fsspec

URL = "memory://bucket/maps"


def stored(url: str = URL) -> dict[str, bytes]:
    """Every object below a URL, with its bytes."""
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}


def put(name: str, data: bytes, url: str = URL) -> None:
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/{name}", data)


def flip(name: str, url: str = URL) -> None:
    """Change one bit in the middle of an object."""
    data = bytearray(stored(url)[name])
    data[len(data) // 2] ^= 4
    put(name, bytes(data), url)
