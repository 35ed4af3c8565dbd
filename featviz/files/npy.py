"""Arrays in the formats of numpy, npy and npz: nothing in them is evaluated or unpickled."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from functools import lru_cache
from tokenize import TokenError
from typing import Any

import numpy as np

from featviz.errors import FileError
from featviz.text import quoted

MAGIC = b"\x93NUMPY"
HEAD = 2048
"""Bytes of an array in which its header must end: numpy's own take 128."""

_ENCRYPTED = 1
_UNPACKED_BYTES = 2**30


def header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any, int]:
    """Type, shape, order and where the numbers begin, from the first HEAD bytes of an npy file of
    version 1.0; ValueError where it is no array of numbers."""
    start = 10 + int.from_bytes(data[8:10], "little")
    if not data.startswith(MAGIC + b"\x01\x00"):
        raise ValueError("it is no array as numpy writes it")
    return *_parsed(data[8:start]), start


@lru_cache(maxsize=1024)
def _parsed(line: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    """Type, shape and order of a header, which numpy takes for a literal: nothing in it is run."""
    try:
        found = np.lib.format.read_array_header_1_0(io.BytesIO(line), max_header_size=HEAD)
    except (ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError) as error:
        raise ValueError("its header is not as numpy writes it") from error
    shape, by_columns, dtype = found
    if dtype.kind not in "biufc":
        raise ValueError("it holds Python objects or texts, and only numbers are read")
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape is {list(shape)}")
    return dtype, shape, "F" if by_columns else "C"


def read_npy(data: bytes | memoryview) -> np.ndarray:
    """The array of an npy file, without a copy; ValueError where it is none, or not whole."""
    dtype, shape, order, start = header(bytes(data[:HEAD]))
    count = max(len(data) - start, 0)
    if count != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"it has {count:,} bytes, not those of {dtype} {list(shape)}")
    array: np.ndarray = np.frombuffer(data, dtype, offset=start).reshape(shape, order=order)
    return array


def read_npz(data: bytes) -> np.ndarray:
    """The one array of an npz file, compressed or not, or the one that is called `image`."""
    try:
        arrays = read_arrays(data)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, OSError) as error:
        raise ValueError(f"its zip is damaged: {quoted(str(error))}") from error
    array: np.ndarray = only(arrays, "arrays", "np.save('array.npy', np.load(FILE)[NAME])")
    return array


def read_arrays(data: bytes, packed: bool = True) -> dict[str, np.ndarray]:
    """The arrays of an npz file, faster than `np.load`; `packed` takes compressed ones, too.
    ValueError for what is no numbers or too much; what zipfile raises on broken files comes as it
    is."""
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = archive.infolist()
        if sum(info.file_size for info in members) > _UNPACKED_BYTES:
            raise ValueError(f"it unpacks to more than {_UNPACKED_BYTES:,} bytes")
        for info in members:
            name = info.filename.removesuffix(".npy")
            if not packed and info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{quoted(name)} is compressed, which featviz does not write")
            usual = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            if info.flag_bits & _ENCRYPTED or not usual:
                raise ValueError(f"{quoted(name)} is packed in a way that numpy does not use")
            with archive.open(info) as member:  # unpacks no more than it is asked for
                arrays[name] = read_npy(member.read(info.file_size))
    return arrays


def only(named: dict[str, Any], what: str, remedy: str) -> Any:
    """The one value of a mapping, or the one that is called `image`."""
    if len(named) == 1 or "image" in named:
        return named.get("image", next(iter(named.values())))
    names = ", ".join(quoted(str(name)) for name in list(named)[:6]) or "nothing"
    raise FileError(f"holds {len(named)} {what} ({names}), and none is called image", remedy)
