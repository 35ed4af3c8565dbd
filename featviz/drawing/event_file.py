"""A file of TensorBoard's events: protobuf messages in TFRecord frames.

TensorBoard's own writer computes the checksums byte by byte in Python, which takes longer than
drawing the pictures that they are of. The frames are those of
https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from featviz import files
from featviz.drawing import scan
from featviz.rundir.atomic import reported

PREFIX = "events.out.tfevents."
"""With which the names of all such files begin."""

_VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78
"""CRC-32C's, its bits reversed."""
_STRIDE = 8
"""Bytes that are looked up at a time."""

_numbers = count()
"""Files of one process have names of their own."""


class EventFile:
    """A new file of events in a folder; each is handed to the system as soon as it is added."""

    def __init__(self, folder: Path) -> None:
        """Begin the file with the version of its format.

        Raises:
            OSError: it cannot be made.
        """
        host, number = socket.gethostname(), next(_numbers)
        self.path = folder / f"{PREFIX}{int(time.time()):010d}.{host}.{os.getpid()}.{number}"
        self._file = self.path.open("xb")
        self._write(file_version=_VERSION)

    def add(self, values: Sequence[Any], step: int) -> None:
        """Add one event.

        Args:
            values: of TensorBoard's message `Summary.Value`.

        Raises:
            StoreError: the file cannot be written.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        with reported(self.path, "name another folder"):
            self._write(step=step, summary=Summary(value=values))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._file.write(frame(Event(wall_time=time.time(), **fields).SerializeToString()))
        self._file.flush()


def read_pictures(folder: Path) -> Iterator[tuple[int, str]]:
    """Step and tag of each picture in the files of events of a folder, as far as these are whole.

    Raises:
        FileError: a file cannot be read.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    for path in sorted(folder.glob(f"{PREFIX}*")):
        with files.open_regular(path) as file:
            for data in _frames(file):
                try:
                    event = Event.FromString(data)
                except DecodeError:
                    break
                for value in event.summary.value:
                    if value.HasField("image"):
                        yield event.step, value.tag


def _frames(file: BinaryIO) -> Iterator[bytes]:
    """The data of each TFRecord; the last one may have been cut off when its writer was killed."""
    left = os.fstat(file.fileno()).st_size
    while len(head := file.read(12)) == 12:
        (length,) = struct.unpack("<Q", head[:8])
        left -= 16 + length
        if left < 0:
            return
        yield file.read(length)
        file.seek(4, os.SEEK_CUR)


def frame(data: bytes) -> bytes:
    """A TFRecord: the length, its checksum, the data, and their checksum."""
    length = struct.pack("<Q", len(data))
    head = length + struct.pack("<I", masked_crc32c(length))
    return b"".join((head, data, struct.pack("<I", masked_crc32c(data))))


def masked_crc32c(data: bytes) -> int:
    """A TFRecord's checksum: CRC-32C, rotated, plus a constant."""
    loops = scan.compiled()
    if loops is None:
        from tensorboard.compat.tensorflow_stub import pywrap_tensorflow

        return int(pywrap_tensorflow.masked_crc32c(data))
    crc = int(loops.crc32c(np.frombuffer(bytearray(data), np.uint8), _tables()))
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _tables() -> np.ndarray:
    """uint32 [8, 256]: what a byte does to the checksum, with 0 to 7 bytes behind it."""
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = (crc >> np.uint32(1)) ^ (crc & np.uint32(1)) * np.uint32(_POLYNOMIAL)
    tables = [crc]
    for _ in range(1, _STRIDE):
        tables.append((tables[-1] >> np.uint32(8)) ^ crc[tables[-1] & np.uint32(255)])
    return np.stack(tables)
