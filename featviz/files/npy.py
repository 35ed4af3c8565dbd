"""Arrays in the formats of numpy, npy and npz: nothing in them is evaluated or unpickled."""

from __future__ import annotations

import io
import math
import re
import zipfile
import zlib
from functools import lru_cache
from typing import Any

import numpy as np

from featviz.errors import FileError
from featviz.text import quoted

MAGIC = b"\x93NUMPY"
HEAD = 2048
"""Bytes of an array in which its header must end: numpy's own take 128."""

_HEADER = re.compile(
    rb"\{'descr': '([<>|][biufc]\d+)', 'fortran_order': (True|False), "
    rb"'shape': \((?:(\d{1,18}(?:, \d{1,18})*),?)?\), \} *\n"
)
"""The header of an array as numpy writes it; it is not evaluated."""
_OBJECTS = re.compile(rb"'descr': (\[|'[^']*[OSUVMm])")
_ENCRYPTED = 1
_PIECE = 2**20


def header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any, int]:
    """Type, shape, order and where the numbers begin, from the first HEAD bytes of an npy file
    (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, version 1.0).

    Raises:
        ValueError: it is no array of numbers as numpy writes it.
    """
    start = 10 + int.from_bytes(data[8:10], "little")
    if not data.startswith(MAGIC + b"\x01\x00"):
        raise ValueError("it is no array as numpy writes it")
    return *_parsed(data[10:start]), start


@lru_cache(maxsize=1024)
def _parsed(line: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    parts = _HEADER.fullmatch(line)
    if parts is None:
        if _OBJECTS.search(line):
            raise ValueError("it holds Python objects or texts, and only numbers are read")
        raise ValueError("its header is not as numpy writes it")
    shape = tuple(map(int, parts[3].decode().split(", "))) if parts[3] else ()
    return np.dtype(parts[1].decode()), shape, "F" if parts[2] == b"True" else "C"


def read_npy(data: bytes) -> np.ndarray:
    """The array that the bytes of an npy file hold, without a copy.

    Raises:
        ValueError: it is none, or has more or fewer bytes than its header says.
    """
    dtype, shape, order, start = header(data[:HEAD])
    if len(data) - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"it has {max(len(data) - start, 0):,} bytes, not those of {dtype} {list(shape)}"
        )
    array: np.ndarray = np.frombuffer(data, dtype, offset=start).reshape(shape, order=order)
    return array


def read_npz(data: bytes, most: int) -> dict[str, np.ndarray]:
    """The arrays that the bytes of an npz file hold, compressed or not, by name.

    Args:
        most: bytes that they may unpack to, all together.

    Raises:
        ValueError: it is none, an array is damaged or holds no numbers, or they unpack to more.
    """
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                content = _member(archive, info, most)
                most -= len(content)
                arrays[info.filename.removesuffix(".npy")] = read_npy(content)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError) as error:
        raise ValueError(f"its zip is damaged: {quoted(str(error))}") from error
    return arrays


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, most: int) -> bytes:
    """What one member unpacks to; it is not believed how much that is."""
    if info.flag_bits & _ENCRYPTED or info.compress_type not in (
        zipfile.ZIP_STORED,
        zipfile.ZIP_DEFLATED,
    ):
        raise ValueError(f"{quoted(info.filename)} is packed in a way that numpy does not use")
    parts, left = [], most
    with archive.open(info) as member:
        while part := member.read(min(_PIECE, left + 1)):
            left -= len(part)
            if left < 0:
                raise ValueError(f"it unpacks to more than {most:,} bytes")
            parts.append(part)
    return b"".join(parts)


def only(named: dict[str, Any], what: str, remedy: str) -> Any:
    """The one value of a mapping, or the one that is called `image`.

    Args:
        what: the values, for the message: "arrays".
        remedy: how to save one.

    Raises:
        FileError: there are several, or none.
    """
    if len(named) == 1:
        return next(iter(named.values()))
    if "image" in named:
        return named["image"]
    names = ", ".join(quoted(str(name)) for name in list(named)[:6]) or "nothing"
    raise FileError(f"holds {len(named)} {what} ({names}), and none is called image", remedy)
