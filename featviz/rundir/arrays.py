"""Arrays of a run directory, read back: statistics in npz files, and kept tensors. What numpy would
evaluate or unpack is not; no array is larger than the manifest says."""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import BinaryIO

import numpy as np
from PIL import Image

from featviz.errors import StoreError
from featviz.files import Folder, npy
from featviz.records import STAT_COLUMNS, Floats
from featviz.rundir import STATS_FILE
from featviz.rundir.schema import Capture
from featviz.text import quoted

MOST_STATS = 256 * 2**20
"""Bytes of the statistics of an image: ten million channels."""
MOST_TENSOR = 4 * 2**30
"""Bytes of a kept tensor."""

_ENCRYPTED = 1
_ROW_BYTES = 4 * len(STAT_COLUMNS)
_MEMBER_BYTES = 4096
"""What an array of a few rows may take in an npz, with its name twice, headers and padding."""

BROKEN = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    Image.DecompressionBombError,
)
"""What zipfile, numpy and Pillow raise on broken files; Pillow's PNG reader raises SyntaxError."""


def stats_of(folder: Folder, rows: Sequence[Capture]) -> dict[str, Floats]:
    """The statistics of all rows of an image's manifest, float32 [maps, 6] under `Place.stats_key`.

    Raises:
        FileNotFoundError: there is no file of them.
        FileError: it is larger than the rows need, or cannot be read.
        StoreError: it does not fit the rows.
    """
    most = sum(2 * row.maps * _ROW_BYTES + _MEMBER_BYTES + 16 * len(row.layer) for row in rows)
    data = folder.read(STATS_FILE, min(most + _MEMBER_BYTES, MOST_STATS))
    where = quoted(f"{folder.name}/{STATS_FILE}")
    if len(data) < sum(row.maps for row in rows) * _ROW_BYTES:  # arrays may overlap in a zip file
        raise StoreError(f"{where} has {len(data):,} bytes, too few for the maps of its manifest")
    stats: dict[str, Floats] = {}
    try:
        arrays = _Npz(data)
        for row in rows:
            key = row.place.stats_key
            stats[key] = array = arrays[key]
            if array.dtype != np.float32 or array.shape != (row.maps, len(STAT_COLUMNS)):
                raise ValueError(
                    f"{key} is {array.dtype} {list(array.shape)}, expected float32 "
                    f"{[row.maps, len(STAT_COLUMNS)]}"
                )
    except BROKEN as error:
        raise StoreError(f"{where} cannot be read: {quoted(str(error))}") from error
    return stats


class _Npz:
    """The arrays of an npz file in memory, without copies: compressed ones, which could be of any
    size, are refused, as is what featviz does not write.

    A seventh of the time of `np.load`, which evaluates each array's header.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            self.members = {info.filename: info for info in archive.infolist()}

    def __getitem__(self, key: str) -> np.ndarray:
        info = self.members.get(f"{key}.npy")
        if info is None:
            raise ValueError(f"it has no {key}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise ValueError(f"{key} is compressed, which featviz does not write")
        name, extra = struct.unpack_from("<HH", self.data, info.header_offset + 26)
        start = info.header_offset + 30 + name + extra
        stored = memoryview(self.data)[start : start + info.file_size]
        if zlib.crc32(stored) != info.CRC:
            raise ValueError(f"{key} has another check sum than it should")
        return npy.read_npy(stored)


def read_tensor(file: BinaryIO, expected: list[int]) -> np.ndarray:
    """The array in an open npy file, of the expected shape.

    Raises:
        ValueError: it is of another shape or size, or no array as numpy writes it.
    """
    size = os.fstat(file.fileno()).st_size
    dtype, shape, order, start = npy.header(file.read(npy.HEAD))
    if list(shape) != expected:
        raise ValueError(f"its shape is {list(shape)}, by the manifest {expected}")
    if size - start != math.prod(shape) * dtype.itemsize or size > MOST_TENSOR:
        raise ValueError(f"it has {size - start:,} bytes, not those of {dtype} {list(shape)}")
    file.seek(start)
    flat: np.ndarray = np.fromfile(file, dtype, math.prod(shape))
    return flat.reshape(shape, order=order)
