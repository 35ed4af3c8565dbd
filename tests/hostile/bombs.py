"""Zeros, packed: small files that unpack to more than a program should hold."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from isal import igzip, isal_zlib


@contextmanager
def packing_quickly() -> Iterator[None]:
    """zipfile packs by ISA-L, whose streams are as long as zlib's and take a twentieth of the
    time."""
    with mock.patch.object(zipfile, "zlib", isal_zlib):
        yield


@functools.cache
def zeros_in_zlib(size: int) -> bytes:
    """A zlib stream of so many zeros."""
    packer, piece = isal_zlib.compressobj(), bytes(2**20)
    pieces = [packer.compress(piece) for _ in range(size // len(piece))]
    return b"".join([*pieces, packer.compress(bytes(size % len(piece))), packer.flush()])


def gzipped(data: bytes) -> bytes:
    """A gzip file."""
    return igzip.compress(data)
