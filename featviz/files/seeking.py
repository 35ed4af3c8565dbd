"""A file in a store that is read from any place, as archives need it."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from threading import Lock

from featviz.errors import FileError
from featviz.files.fetch import read_part, size_of
from featviz.files.stores import Remote

BLOCK = 4 * 2**20
"""Bytes that are asked for at once."""
_HELD = 2
"""Blocks that are held."""


class RemoteFile:
    """A file in a store, read in blocks; several threads may do so."""

    def __init__(self, place: Remote, longest: int) -> None:
        """Ask the store how large it is.

        Args:
            longest: bytes that a single read may ask for.

        Raises:
            FileError: it is not there, or the store does not say.
        """
        self.place, self.longest, self.size = place, longest, size_of(place)
        self._lock = Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def part(self, start: int, size: int) -> bytes:
        """These bytes.

        Raises:
            FileError: there are fewer, they are too many, or they could not be read.
        """
        if size > self.longest:
            raise FileError(f"it has a part of {size} bytes, more than the {self.longest} of any")
        if start < 0 or size < 0 or start + size > self.size:
            raise FileError(f"it ends at byte {self.size}, and byte {start + size} is needed")
        if size > BLOCK:
            return read_part(self.place, start, size)
        with self._lock:
            numbers = range(start // BLOCK, (start + max(size, 1) - 1) // BLOCK + 1)
            held = b"".join(self._block(number) for number in numbers)
        first = start - numbers[0] * BLOCK
        return held[first : first + size]

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * BLOCK
            size = min(BLOCK, self.size - start)
            self._blocks[number] = read_part(self.place, start, size) if size > 0 else b""
            if len(self._blocks) > _HELD:
                self._blocks.popitem(last=False)
        return self._blocks[number]


class RemoteCursor(io.RawIOBase):
    """A remote file opened for one reader, who has a place in it."""

    def __init__(self, file: RemoteFile) -> None:
        """Begin at the start."""
        self.file, self._at = file, 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Bytes from the start."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place."""
        begins = {os.SEEK_CUR: self._at, os.SEEK_END: self.file.size}
        self._at = max(0, offset + begins.get(whence, 0))
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read so many bytes, or all that follow."""
        left = max(0, self.file.size - self._at)
        content = self.file.part(self._at, left if size is None or size < 0 else min(size, left))
        self._at += len(content)
        return content
