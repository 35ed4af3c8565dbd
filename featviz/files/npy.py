"""Arrays that somebody else wrote, npy and npz: `np.load`, which runs and unpickles
nothing with `allow_pickle=False`, behind checks of sizes and types."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, BinaryIO

import numpy as np

from featviz.errors import FileError
from featviz.text import first_line, quoted

MAGIC = b"\x93NUMPY"

_MAX_HEADER = 2048
"""Characters of a header: numpy's own have 128."""

_MAX_UNPACKED = 2**30
"""Bytes of all arrays of a file together."""

_NUMBERS = "biufc"

_PARSING = Lock()
"""numpy reads headers by `ast`, which in Python 3.11 counts its recursion for all threads
together: of two at once one can fail on a sound file (python/cpython#106905)."""


def read_npy(file: bytes | BinaryIO) -> np.ndarray:
    """The array of an npy file; ValueError where the file is not an npy file, not
    whole, or holds no numbers."""
    with _errors_as_one():
        array = np.load(_opened(file), allow_pickle=False, max_header_size=_MAX_HEADER)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in _NUMBERS:
        raise ValueError("it holds no array of numbers")
    return array


def read_npz(data: bytes) -> np.ndarray:
    """The one array of an npz file, or the one that is called `image`.

    Raises:
        ValueError: as from `read_arrays`: it is not an npz file of numbers.
        FileError: it holds no array, or several of which none is called `image`.
    """
    arrays = read_arrays(data)
    array: np.ndarray = only(
        arrays, "arrays", "np.save('array.npy', np.load(FILE)[NAME])"
    )
    return array


def read_arrays(data: bytes, max_bytes: int = _MAX_UNPACKED) -> dict[str, np.ndarray]:
    """The arrays of an npz file, by name.

    Raises:
        ValueError: it is not an npz file, not whole, holds what is not an array of
            numbers, or unpacks to more than `max_bytes`.
    """
    with _errors_as_one():
        archive: Any = np.load(
            _opened(data), allow_pickle=False, max_header_size=_MAX_HEADER
        )
        # compressed arrays: what they unpack to is asked before they do
        sizes = [info.file_size for info in archive.zip.infolist()]
        arrays = dict(archive) if sum(sizes) <= max_bytes else None
    if arrays is None:
        raise ValueError(f"it unpacks to more than {max_bytes:,} bytes")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in _NUMBERS:
            raise ValueError(f"{quoted(name)} is no array of numbers")
    return arrays


def only(named: dict[str, Any], plural: str, remedy: str) -> Any:
    """The one value of a mapping, or the one that is called `image`.

    Args:
        named: Values by name.
        plural: What they are, for messages: `arrays`.
        remedy: How a file with one of them is made, for the hint.

    Raises:
        FileError: Where there is none, or several of which none is called `image`.
    """
    # as the documents say, so that a file may hold more than one
    if "image" in named:
        return named["image"]
    if len(named) == 1:
        (value,) = named.values()
        return value
    names = ", ".join(quoted(str(name)) for name in list(named)[:6]) or "nothing"
    raise FileError(
        f"holds {len(named)} {plural} ({names}), and none is called image", remedy
    )


def _opened(file: bytes | BinaryIO) -> BinaryIO:
    return io.BytesIO(file) if isinstance(file, bytes) else file


@contextmanager
def _errors_as_one() -> Iterator[None]:
    """Whatever a file makes numpy and zipfile raise, as a ValueError of one line."""
    try:
        with _PARSING:
            yield
    except Exception as error:
        raise ValueError(
            f"it is no array as numpy writes it: {quoted(first_line(error))}"
        ) from error
