"""Read arrays that somebody else wrote, npy and npz, by `np.load` with checks of sizes and
types. With `allow_pickle=False` it runs no code of the file."""

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
"""The most characters of a header; those that numpy writes have 128."""

_MAX_UNPACKED = 2**30
"""The most bytes of an npz file's arrays, added up."""

_NUMBERS = "biufc"

_PARSING = Lock()
"""Lets only one thread at a time read headers. numpy parses them by `ast`; in Python 3.11
threads share its count of recursions, so one of two threads can fail on a sound file
(python/cpython#106905)."""


def read_npy(file: bytes | BinaryIO) -> np.ndarray:
    """Read the array of an npy file.

    Args:
        file: The content of the file, or the open file.

    Raises:
        ValueError: Where the file is not an npy file, is truncated, or holds no numbers.
    """
    with _errors_as_one():
        array = np.load(_as_file(file), allow_pickle=False, max_header_size=_MAX_HEADER)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in _NUMBERS:
        raise ValueError("it holds no array of numbers")
    return array


def read_npz(data: bytes) -> np.ndarray:
    """Read one array of an npz file: the only one, or the one that is called `image`.

    Raises:
        ValueError: As from `read_arrays`.
        FileError: Where the file has no array, or several and none is called `image`.
    """
    arrays = read_arrays(data)
    array: np.ndarray = only(
        arrays, "arrays", "np.save('array.npy', np.load(FILE)[NAME])"
    )
    return array


def read_arrays(data: bytes, max_bytes: int = _MAX_UNPACKED) -> dict[str, np.ndarray]:
    """Read the arrays of an npz file, by name.

    Raises:
        ValueError: Where the file is not an npz file, is truncated, holds something else
            than arrays of numbers, or unpacks to more than `max_bytes`.
    """
    with _errors_as_one():
        archive: Any = np.load(
            _as_file(data), allow_pickle=False, max_header_size=_MAX_HEADER
        )
        # arrays may be compressed, so their sizes are checked before they are unpacked
        sizes = [info.file_size for info in archive.zip.infolist()]
        arrays = dict(archive) if sum(sizes) <= max_bytes else None
    if arrays is None:
        raise ValueError(f"it unpacks to more than {max_bytes:,} bytes")
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.dtype.kind not in _NUMBERS:
            raise ValueError(f"{quoted(name)} is no array of numbers")
    return arrays


def only(named: dict[str, Any], plural: str, remedy: str) -> Any:
    """The only value of a mapping, or the value that is called `image`.

    Args:
        named: Values by name.
        plural: What the values are, for messages: `arrays`.
        remedy: Code that makes a file with only one of them, for the hint.

    Raises:
        FileError: Where there is no value, or several and none is called `image`.
    """
    if "image" in named:
        return named["image"]
    if len(named) == 1:
        (value,) = named.values()
        return value
    names = ", ".join(quoted(str(name)) for name in list(named)[:6]) or "nothing"
    raise FileError(
        f"holds {len(named)} {plural} ({names}), and none is called image", remedy
    )


def _as_file(file: bytes | BinaryIO) -> BinaryIO:
    """An open file: bytes become one in memory."""
    return io.BytesIO(file) if isinstance(file, bytes) else file


@contextmanager
def _errors_as_one() -> Iterator[None]:
    """A context for reading a file by numpy: any exception becomes a ValueError of one line.
    Only one thread at a time is in it (see _PARSING)."""
    try:
        with _PARSING:
            yield
    except Exception as error:
        raise ValueError(
            f"it is no array as numpy writes it: {quoted(first_line(error))}"
        ) from error
